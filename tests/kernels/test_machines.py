"""GPUs with less shared memory than an H200: nothing is refused there, and enough warps hide what look-ups cost."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import packedkv
from packedkv.codec import ROLES, Site
from packedkv.description import kernels_for
from packedkv.errors import KVError, UnsupportedError
from packedkv.kernels.choose import refusal
from packedkv.kernels.constants import constants_for
from packedkv.kernels.cuda import decode as attention
from packedkv.kernels.cuda import encode, launch, prefill
from packedkv.kernels.cuda.arguments import EncodeArgs
from packedkv.kernels.cuda.launch import Config, machine_of
from packedkv.kernels.spec import HEAD_DIMS, DecodeSpec, decode_spec, encode_spec, text_of
from packedkv.kernels.tokens import Rules, StepTokens
from tests.kernels import emulation

SMALL = {"99 KB": machine_of("sm_89"), "163 KB": machine_of("sm_80")}
WIDE_ROWS = {("dense", 192), ("dense", 256), ("kivi-tq-4", 192), ("kivi-tq-4", 256)}
"""On 99 KB: tiles of 16, or 32, tokens of eight warps do not fit, whatever the tables. The same holds for dense tokens
in a block of their own (values that are rotated) at a head_dim of 192 and more.
"""


def pair_of(preset: str, dim: int) -> DecodeSpec:
    scheme = packedkv.get(preset)
    return decode_spec(scheme.key, scheme.value, dim, scheme.page_layout(dim).page_tokens)


def launches(pair: DecodeSpec, there: launch.Machine) -> Iterator[tuple[Config, bool, int]]:
    """Few and many sequences, short and long ones, with dense tokens in a block of their own and without."""
    for units, capacity, dense, heads in itertools.product((4, 512), (2048, 65536), (False, True), (4, 8)):
        yield launch.config_for(pair, units, capacity, there, dense and not pair.joins, heads), dense, heads


@pytest.mark.parametrize("name", SMALL)
def test_every_preset_fits_every_machine(name: str) -> None:
    """With as many warps as hide what look-ups cost, and pages that tiles divide."""
    there = SMALL[name]
    for preset, dim in itertools.product(packedkv.presets(), HEAD_DIMS):
        try:
            pair = pair_of(preset, dim)
        except KVError:  # no kernels, or a head_dim that a codec refuses
            continue
        check_launches(name, preset, dim, pair)
    for preset, dim, page in itertools.product(("int-4", "kivi-4", "hqmq-s24_r3"), (64, 128), (32, 64, 128)):
        scheme = packedkv.get(preset)
        pair = decode_spec(scheme.key, scheme.value, dim, page)
        assert all(page % config.tile == 0 for config, *_ in launches(pair, there))


def check_launches(name: str, preset: str, dim: int, pair: DecodeSpec) -> None:
    there = SMALL[name]
    for config, dense, heads in launches(pair, there):
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


def test_what_fits_nowhere_is_refused() -> None:
    pair = pair_of("hqmq-s96_r4", 128)
    with pytest.raises(UnsupportedError, match=r"needs \d+ bytes of shared memory in a block; this GPU has 1024"):
        launch.config_for(pair, 1, 64, launch.Machine(1, 1024, 1024))
    with pytest.raises(UnsupportedError, match=r"unpacking .* needs \d+ bytes .*; this GPU has 1024"):
        prefill.config_for(pair, launch.Machine(1, 1024, 1024))


def test_a_bench_can_take_a_gpu_for_a_smaller_one() -> None:
    """As many blocks share a multiprocessor as on the smaller one."""
    cpu = torch.device("cpu")
    assert (launch.machine(cpu), launch.asked_bytes(40_000, cpu)) == (launch.H200, 40_000)
    with launch.limited(100):
        there = launch.machine(cpu)
        assert there == launch.Machine(132, *SMALL["99 KB"][1:])
        for shared in (1024, 40_000, 50_176, 99_840):
            asked = launch.asked_bytes(shared, cpu)
            assert launch.H200.shared_sm // (asked + 1024) == there.shared_sm // (shared + 1024)
            assert asked <= launch.H200.shared_block
    assert launch.machine(cpu) == launch.H200


@pytest.mark.parametrize(("preset", "teams"), [("hqmq-s48_r4", 2), ("int-4", 1)])
def test_launch_constants_without_room_are_refused(preset: str, teams: int, machine: dict[str, Any]) -> None:
    """Before anything is compiled: a launch with less memory writes over its neighbours, or faults."""
    pair, config = pair_of(preset, 64), launch.Config(64, 8, 16, 1, 1, teams)
    need = launch.shared_bytes(pair, config, heads=4)
    assert need > launch.H200.shared_block
    pages, table = torch.zeros(1, 2, pair.tile_bytes(64), dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.int32)
    key, value = (
        constants_for(side, packedkv.get(preset).codec(role).fit(Site(0, role, 2, 64)), 2, 64)
        for side, role in zip((pair.key, pair.value), ROLES, strict=True)
    )
    text = rf"Config\(tile=64, .* needs {need} bytes of shared memory in a block; this GPU has 232448\. Give fewer"
    with pytest.raises(UnsupportedError, match=text):
        attention.decode_attention(
            torch.zeros(1, 2, 1, 64), StepTokens(pages, table, torch.ones(1, dtype=torch.int32)), Rules(1.0),
            spec=text_of(pair), key=key, value=value, config=config,
        )  # fmt: skip
    assert "kv_decode" not in machine


@pytest.mark.parametrize("preset", ["hqmq-s192_r6", "octopus-4", "ghost-4", "octopus-qjl-4"])
def test_tables_of_encoders_fit_99_kb(preset: str, machine: dict[str, Any]) -> None:
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


GPU = torch.device("cuda")
OF_80 = ["dense", "fp8", "int-2", "int-4", "int-8", "saw-int4", "turboquant-2", "turboquant-4"]
READ = [p for p in packedkv.presets() if packedkv.describe(p)["kernels"]["decode"] == "cuda"]
READ_AT_ONCE = [p for p in READ if packedkv.get(p).key.fit_tokens == 1]
OF_192 = [p for p in READ_AT_ONCE if packedkv.describe(p, 192)["kernels"]["decode"] == "cuda"]
OF_512 = [p for p in READ_AT_ONCE if all(packedkv.get(p).codec(role).block_tokens == 1 for role in ROLES)]


def test_which_presets_have_kernels() -> None:
    """Of 80 channels without ghost-3, which its codec refuses; of 192 all but sketches."""
    found = {p: kernels_for(packedkv.get(p), 80) for p in packedkv.presets() if p != "ghost-3"}
    assert sorted(p for p, kernels in found.items() if kernels["decode"] == "cuda") == OF_80
    assert {found[p]["encode"] for p in OF_80} == {"cuda"}
    assert set(READ_AT_ONCE) - set(OF_192) == {"octopus-qjl-4", "octopus-qjl-3", "octopus-qjl-2", "turboquant-qjl-3"}


REFUSED = {
    **dict.fromkeys(
        ((p, 80) for p in ("hqmq-s24_r3", "octopus-3", "kivi-4", "innerq-base", "ghost-4", "ultraquant", "int-3")),
        "head_dim 80 is no multiple of 32",
    ),
    ("ghost-3", 512): "the kernels number a channel of ghost in a byte: head_dim up to 256, not 512",
    ("hqmq-s24_r3:outliers=3", 512): "the kernels take outliers of head_dim up to 256, not 512",
    ("octopus-qjl-3", 512): "",
}


def test_what_is_refused_says_why(machine: dict[str, Any]) -> None:
    for (spec, dim), why in REFUSED.items():
        found = refusal(packedkv.get(spec), dim, GPU)
        assert why in found if why else not found, spec
