"""GPUs with less shared memory than an H200: nothing is refused there, and enough warps hide what look-ups cost."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.host import LayerCache
from packedkv.errors import KVError, UnsupportedError
from packedkv.kernels.cuda import build, encode, launch, prefill
from packedkv.kernels.cuda import decode as attention
from packedkv.kernels.cuda.arguments import EncodeArgs
from packedkv.kernels.cuda.launch import Config, machine_of
from packedkv.kernels.spec import HEAD_DIMS, DecodeSpec, decode_spec, encode_spec, text_of
from tests.kernels import emulation
from tests.kernels.emulation import machine  # noqa: F401  a fixture
from tests.kernels.offline import ARCHITECTURES, compile_kernels, opcode
from tests.kernels.test_head_dims import OF_80

SMALL = {"99 KB": machine_of("sm_89"), "163 KB": machine_of("sm_80")}
WIDE_ROWS = {("dense", 192), ("dense", 256), ("kivi-tq-4", 192), ("kivi-tq-4", 256)}
"""On 99 KB: tiles of 16, or 32, tokens of eight warps do not fit, whatever the tables. The same holds for dense tokens
in a block of their own (values that are rotated) at a head_dim of 192 and more.
"""


TERMS = [(preset, arch) for preset in ("ghost-3", "ghost-4") for arch in (86, 89, 120)][:-1]


def pair_of(preset: str, dim: int) -> DecodeSpec:
    scheme = packedkv.get(preset)
    return decode_spec(scheme.key, scheme.value, dim, scheme.page_layout(dim).page_tokens)


class Choice(NamedTuple):
    config: Config
    apart: bool
    heads: int


def choices(pair: DecodeSpec, machine: launch.Machine) -> list[Choice]:  # noqa: F811
    """Launch constants of few and many sequences, long and short ones, with dense tokens apart and without."""
    return [
        Choice(launch.config_for(pair, units, capacity, machine, dense and not pair.joins, heads), dense, heads)
        for units in (4, 512)
        for capacity in (2048, 65536)
        for dense in (False, True)
        for heads in (4, 8)
    ]


def pairs(dims: Iterable[int]) -> Iterator[tuple[str, int, DecodeSpec]]:
    """Every preset that kernels read, at each head_dim."""
    for preset, dim in itertools.product(packedkv.presets(), dims):
        with contextlib.suppress(KVError):
            yield preset, dim, pair_of(preset, dim)


@pytest.mark.parametrize("name", SMALL)
def test_no_preset_is_refused(name: str) -> None:
    for preset, dim, pair in pairs(HEAD_DIMS):
        check_launch(name, preset, dim, pair)


def check_launch(name: str, preset: str, dim: int, pair: DecodeSpec) -> None:
    """Every launch fits the machine, and has as many warps as hide what look-ups cost."""
    there = SMALL[name]
    for config, dense, heads in choices(pair, there):
        need = launch.shared_bytes(pair, config, dense, heads)
        assert need <= there.shared_block
        assert config.resident * (need + 1024) <= there.shared_sm
        if dim > 256:
            assert config.resident_warps >= (2 if name == "99 KB" else 4)
        elif config.table_shrink < pair.table_shrink and config.resident_warps < launch.WARPS:
            assert config.resident_warps >= launch.LESS_WARPS
        elif config.resident_warps < launch.WARPS:
            assert name == "99 KB"
            assert (preset, dim) in WIDE_ROWS or (dense and not pair.joins and dim >= 192)
            assert config.resident_warps >= 4
    warps, table_shrink = prefill.config_for(pair, there)
    assert prefill.shared_bytes(pair, warps, table_shrink) <= there.shared_block
    assert warps == 4 or dim > 256 or (name, preset, dim) == ("99 KB", "kivi-tq-4", 256)


def test_every_launch_divides_its_pages_and_fits_its_machine() -> None:
    """Pages of 16, 64 and 128 tokens, one short sequence to thousands; machines that a small launch fits."""
    for preset, dim, page in itertools.product(packedkv.presets(), (64, 128, 256), (16, 64, 128)):
        scheme = packedkv.get(preset)
        if preset == "dense" or page % max(scheme.key.block_tokens, scheme.value.block_tokens):
            continue
        try:
            pair = decode_spec(scheme.key, scheme.value, dim, page)
        except UnsupportedError:
            continue
        least = launch.shared_bytes(pair, Config(32 if pair.blocked else 16, 2, 2, 1, 1)) + 1024
        for there in (launch.H200, *(small for small in SMALL.values() if least <= small.shared_block)):
            for units, capacity in ((1, 64), (4, 65536), (256, 8192), (4096, 1 << 20)):
                config = launch.config_for(pair, units, capacity, there)
                need = launch.shared_bytes(pair, config)
                assert need <= there.shared_block
                assert config.resident * (need + 1024) <= there.shared_sm
                assert page % config.tile == config.tile % (32 if pair.blocked else 16) == 0
                assert 1 <= config.splits <= max(1, capacity // (config.tile * config.warps) + 1)


def test_where_all_copies_fit_there_are_all() -> None:
    """On 227 KB nothing has changed by what smaller machines need."""
    for preset, dim, pair in pairs(d for d in HEAD_DIMS if d <= 256):
        for config, *_ in choices(pair, launch.H200):
            assert (config.stages, config.table_shrink) == (2, 0), (preset, dim)
        assert prefill.config_for(pair, launch.H200) == (4, pair.table_shrink), (preset, dim)


def test_what_fits_nowhere_is_refused() -> None:
    pair = pair_of("hqmq-s96_r4", 128)
    with pytest.raises(UnsupportedError, match=r"needs \d+ bytes of shared memory in a block; this GPU has 1024"):
        launch.config_for(pair, 1, 64, launch.Machine(1, 1024, 1024))
    with pytest.raises(UnsupportedError, match=r"unpacking .* needs \d+ bytes .*; this GPU has 1024"):
        prefill.config_for(pair, launch.Machine(1, 1024, 1024))


@pytest.mark.parametrize("preset", ["hqmq-s24_r3", "hqmq-s96_r4", "octopus-3"])
def test_a_cache_on_99_kb_holds_the_same_and_attends_alike(
    preset: str,
    machine: dict[str, Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole way, with fewer copies: encoding, decode steps, several queries at once."""
    there = SMALL["99 KB"]
    for module in (attention, prefill):
        monkeypatch.setattr(module, "machine", lambda device: there)
    dim, made = 128, packedkv.get(preset).for_layer(8, 24)
    asked, make = [], emulation.emulated

    def record(program: build.Program, *rest: Any) -> Any:
        asked.append(program.source)
        return make(program, *rest)

    monkeypatch.setattr(emulation, "emulated", record)
    fused, reference = FusedLayerCache(made), LayerCache(made)
    k, v = torch.randn(2, 1, 2, 150, dim, generator=torch.Generator().manual_seed(0)).half()
    for cache in (fused, reference):
        cache.append(k, v)
    for queries in (1, 3):
        q = torch.randn(1, 4, queries, dim, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(fused.attend(q), reference.attend(q), rtol=0, atol=4e-3)
    for got, wanted in zip(fused.decode(), reference.decode(), strict=True):
        assert torch.equal(got, wanted)
    assert sum(source.startswith("#define KV_HALVINGS") for source in asked) >= 1


def test_a_bench_can_take_a_gpu_for_a_smaller_one() -> None:
    cpu, pair = torch.device("cpu"), pair_of("hqmq-s96_r4", 128)
    text = text_of(pair)
    q, table = torch.empty(1, 8, 1, 128), torch.empty(1, 100, dtype=torch.int32)
    assert launch.machine(cpu) == launch.H200
    with launch.limited(100):
        assert launch.machine(cpu) == launch.Machine(132, *SMALL["99 KB"][1:])
        config = launch.config_for(pair, 512, 65536, launch.machine(cpu))
        assert config.warps >= launch.WARPS
        assert config.table_shrink == 2
        assert attention.splits_of(text, q, 2, table) > 1
    assert launch.machine(cpu) == launch.H200


@pytest.mark.parametrize("shared", [1024, 40_000, 50_176, 99_840])
def test_as_many_blocks_share_a_multiprocessor_as_on_the_smaller_gpu(shared: int) -> None:
    cpu = torch.device("cpu")
    assert launch.asked_bytes(shared, cpu) == shared
    with launch.limited(100):
        asked = launch.asked_bytes(shared, cpu)
        there = launch.machine(cpu)
    assert launch.H200.shared_sm // (asked + 1024) == there.shared_sm // (shared + 1024)
    assert asked <= launch.H200.shared_block


@pytest.mark.parametrize(("heads", "warps"), [(4, 12), (8, 8)])
def test_few_sequences_have_as_many_warps_as_the_term_has_registers_for(heads: int, warps: int) -> None:
    scheme = packedkv.get("ghost-2")
    pair = decode_spec(scheme.key, scheme.value, 128, scheme.page_layout(128).page_tokens, 64)
    assert launch.config_for(pair, 4, 65536, launch.H200, heads=heads).resident_warps == warps


def test_on_99_kb_the_heads_that_there_are_take_room() -> None:
    """Two blocks of four warps fit beside the term of four heads, not of eight."""
    scheme = packedkv.get("saw-int4")
    pair = decode_spec(scheme.key, scheme.value, 128, scheme.page_layout(128).page_tokens, 64)
    residents = [launch.config_for(pair, 512, 65536, SMALL["99 KB"], heads=heads).resident for heads in (4, 8)]
    assert residents == [2, 1]


@pytest.mark.parametrize(
    ("preset", "arch"), [("ghost-4", 120), *(pytest.param(*x, marks=pytest.mark.wide) for x in TERMS)]
)
@pytest.mark.parametrize(("units", "heads"), [(256, 4), (256, 8), (4, 8)])
def test_ghost_with_its_term_keeps_to_its_registers(preset: str, arch: int, units: int, heads: int) -> None:
    """On 99 KB nothing is spilled within the loop over tiles, and at most what few instructions take before it."""
    scheme = packedkv.get(preset)
    pair = decode_spec(scheme.key, scheme.value, 128, scheme.page_layout(128).page_tokens, 64)
    config = launch.config_for(pair, units, 65536, machine_of(f"sm_{arch}"), heads=heads)
    assert config.resident_warps >= 7
    kernel = compile_kernels(attention.program(pair, config, dense=1, heads=heads).source, arch)["kv_decode"]
    assert not [x for x in kernel.loop_with("HMMA", "LDGSTS").code if opcode(x) in ("LDL", "STL")]
    assert len(kernel.spills()) <= 60


# -- encoders: tables in shared memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["hqmq-s192_r6", "octopus-4", "ghost-4", "octopus-qjl-4"])
def test_tables_of_encoders_fit_99_kb(preset: str, machine: dict[str, Any]) -> None:  # noqa: F811
    """They have no copies to spare; the largest of each method, at the largest head_dim."""
    scheme = packedkv.get(preset)
    page = scheme.page_layout(256).page_tokens
    for roles, program in encode.programs(encode_spec(scheme.key, scheme.value, 256, page)).items():
        if "kv_shared" not in program.source:
            continue
        (tell,) = emulation.emulated(program, ("kv_shared",), "kv::EncodeArgs")
        size = torch.zeros(1, dtype=torch.int32)
        tell.launch((1, 1, 1), 32, 0, EncodeArgs(bad=size.data_ptr()))
        assert 1024 < int(size) <= SMALL["99 KB"].shared_block, roles


# -- machine code ----------------------------------------------------------------------------------------------------

WITH_KERNELS = [p for p in packedkv.presets() if packedkv.describe(p)["kernels"]["decode"] == "cuda"]
OFTEN = {
    *(("saw-int4", 128, 100), ("octopus-4", 128, 86), ("hqmq-s24_r3", 128, 89), ("hqmq-s96_r4", 128, 120)),
    *(("hqmq-s192_r4", 128, 80), ("saw-int4", 512, 90)),
}
"""Presets and head_dims compiled in every run, and for which architecture; the others are wide."""
OF_512 = ("saw-int4", "int-4", "int-8", "fp8", "turboquant-4", "ultraquant", "hqmq-s96_r4")


@pytest.mark.parametrize(
    ("preset", "dim", "arch"),
    [
        pytest.param(preset, dim, arch, marks=[] if (preset, dim, arch) in OFTEN else [pytest.mark.wide])
        for dim, presets in ((128, WITH_KERNELS), (80, OF_80), (512, OF_512))
        for preset in presets
        for arch in ARCHITECTURES
    ],
)
def test_programs_of_every_architecture_keep_to_their_registers(preset: str, dim: int, arch: int) -> None:
    """Those that a cache asks for there: many long sequences, no spills. Of 512 channels no pages are unpacked."""
    pair, there = pair_of(preset, dim), machine_of(f"sm_{arch}")
    config = launch.config_for(pair, 256, 32768, there, heads=4)
    found = compile_kernels(attention.program(pair, config, heads=pair.heads(4)).source, arch)
    if dim < 512:
        found |= compile_kernels(prefill.program(pair, *prefill.config_for(pair, there)).source, arch)
    assert {"kv_decode", "kv_combine"} <= set(found)
    assert dim < 512 or pair.heads(8) == 4
    for kernel in found.values():
        assert kernel.stack == 0, kernel.name
        assert not kernel.spills(), kernel.name


@pytest.mark.parametrize("arch", [103, 121])
def test_architectures_that_the_disassembler_does_not_know(arch: int) -> None:
    pytest.importorskip("cuda.core")
    try:
        build.compiler_version()
    except UnsupportedError as error:
        pytest.skip(str(error))
    pair = pair_of("hqmq-s96_r4", 128)
    config = launch.config_for(pair, 256, 32768, machine_of(f"sm_{arch}"), heads=4)
    assert build._nvrtc(attention.program(pair, config, heads=4), f"sm_{arch}").startswith(b"\x7fELF")
