"""What is compiled ahead is what the benches launch."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from kvcodec.codec import ROLES
from kvcodec.kernels import spec as specs
from kvcodec.kernels.cuda import decode as attention
from kvcodec.kernels.cuda import encode, launch
from kvcodec.kernels.cuda import history as prefill
from kvcodec_lab.bench.packed import packed_operator, scheme_of
from kvcodec_lab.bench.shapes import PRESETS, SHAPES, Shape
from lab.tests.bench.gpu_stubs import CPU, use_reference

ROOT = Path(__file__).parents[3]


@pytest.fixture
def ahead(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # where its processes find it as well
    return importlib.import_module("compile_kernels")


def launched(spec, shape, monkeypatch):
    """Programs that a decode step, the encoder and the unpacking of a filled cache load."""
    loaded = []

    def load(program, names, device, label=""):
        loaded.append(program)
        return tuple(object() for _ in names)

    for module in (attention, prefill):
        monkeypatch.setattr(module, "load", load)
    for cached in (attention._plan, prefill._kernel):
        cached.cache_clear()
    packed = packed_operator(spec, shape, CPU)
    codecs = [packed.cache.roles[role].codec for role in ROLES]
    page = packed.cache.store.layout.page_tokens
    pair = specs.decode_spec(*codecs, shape.head_dim, page)
    held = sum(x.shape[2] for x in packed.dense["key"] + packed.dense["value"])
    units = shape.batch * shape.kv_heads * pair.tiles(shape.group)
    kind = attention.KINDS[torch.bfloat16] if held else -1
    attention._plan(attention.text_of(pair), units, shape.tokens, (), False, kind, pair.heads(shape.group), False, CPU)
    loaded += encode.programs(specs.encode_spec(*codecs, shape.head_dim, page)).values()
    prefill._kernel(pair, CPU)
    for cached in (attention._plan, prefill._kernel):
        cached.cache_clear()  # of kernels that are none
    return loaded


@pytest.mark.parametrize("spec", ["int-4", "kivi-2", "innerq-base", "octopus-3", "octopus-qjl-3", "hqmq-s24_r3"])
def test_programs_are_those_that_a_filled_cache_launches(ahead, spec, monkeypatch):
    use_reference(monkeypatch)
    for shape in (Shape("few", 1, 7, 1, 128, 300), Shape("many", 20, 2, 2, 64, 300)):
        assert set(launched(spec, shape, monkeypatch)) <= set(ahead.programs_of(scheme_of(spec), shape, launch.H200))


def test_what_no_kernel_reads_needs_no_program(ahead):
    assert list(ahead.programs_of(scheme_of("saw-int4:kmeans=16"), SHAPES["llm64k"], launch.H200)) == []


def test_dense_outer_layers_of_a_model_are_compiled_too(ahead):
    one = set(ahead.wanted(["octopus-3"], [], launch.H200))
    assert any("ReadDense" in program.source for program in one)
    assert len(one) < len(ahead.wanted(PRESETS[:4], [SHAPES["llm64k"]], launch.H200))


def test_programs_reach_the_cache(ahead, monkeypatch, tmp_path, capsys):
    pytest.importorskip("cuda.core")
    from kvcodec.errors import UnsupportedError
    from kvcodec.kernels.cuda.build import cache_folder, compiler_version

    try:
        compiler_version()
    except UnsupportedError as error:
        pytest.skip(str(error))
    programs = list(ahead.programs_of(scheme_of("int-8"), Shape("x", 1, 1, 1, 64, 64), launch.H200))[-1:]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machines = []

    def wanted(specs, shapes, machine):
        machines.append(machine)
        return programs

    monkeypatch.setattr(ahead, "wanted", wanted)
    for more in ([], ["--shared-memory", "100"]):
        monkeypatch.setattr(sys, "argv", ["compile_kernels", "--arch", "sm_90", "--workers", "1", *more])
        assert ahead.main() == 0
    assert machines == [launch.H200, launch.machine_of("sm_89")]
    assert "1 programs for sm_90" in capsys.readouterr().out
    assert len(list(cache_folder().glob("*.cubin"))) == 1
