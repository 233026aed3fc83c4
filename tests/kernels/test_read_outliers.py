"""The reader of outliers held beside the codes of hqmq and of integers: its sums, pages unpacked, its machine code."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from packedkv.codec import ROLES, Codec, Role, Site
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.hqmq import RADII, SIZES, Hqmq
from packedkv.codecs.outliers import Med
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.errors import UnsupportedError
from packedkv.kernels import spec as specs
from packedkv.kernels.codecs.outliers import SHARED_BLOCK, WARPS
from packedkv.kernels.constants import constants_for
from packedkv.kernels.cuda import decode as attention
from packedkv.kernels.cuda import launch, prefill
from packedkv.kernels.cuda.launch import H200, Config, config_for
from tests.kernels import decode_cases
from tests.kernels.decode_cases import CASES, Case, Geometry, check, check_all, each_in_turn, sides
from tests.kernels.offline import Kernel, architectures_in_turn, compile_kernels, opcode
from tests.kernels.test_operators import fill

SAW = SawInt4()

# with c = 1.2 nearly all slots are taken, with 1.9 some; Gaussian chunks longer than three medians do not occur
CODECS: dict[str, Codec] = {
    "hqmq": Med(Hqmq(24, 3), 1.9),
    "hqmq int8": Med(Hqmq(48, 4, codebook="int8"), 1.2),
    "hqmq-s96_r4": Med(Hqmq(96, 4), 3),
    "one slot": Med(Hqmq(24, 6), 1.5, slots=1),
    "three slots": Med(Hqmq(192, 6), 1.2, slots=3),
    "five slots": Med(GroupInt(4, 0), 1.0, slots=5),
    **{f"int-{bits}": Med(GroupInt(bits, 0), 1.5) for bits in (2, 3, 4, 8)},
    "int symmetric": Med(GroupInt(4, 0, "channels", True), 1.9),
}


def check_both(codec: Codec, dim: int, *cases: Case, geometry: Geometry | None = None) -> None:
    # two keys may nearly tie, and chance says whose rounding tells them apart better
    check_all(codec, codec, dim, cases, geometry, tolerance=2.0)


_OFTEN = {"hqmq": 128, "int-2": 256, "hqmq-s96_r4": 64, "one slot": 96, "three slots": 192, "five slots": 128}
"""A reader of each number of slots, and of codes in 10 to 13 bits; integers of all widths are unpacked below."""


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        pytest.param(name, dim, marks=[] if _OFTEN.get(name) == dim else [pytest.mark.wide])
        for name in CODECS
        for dim in (64, 96, 128, 192, 256)
    ],
)
def test_decode(name: str, dim: int) -> None:
    check_both(CODECS[name], dim, *CASES)


@pytest.mark.parametrize(
    ("name", "dim", "geometry"),
    [
        ("hqmq", 64, Geometry(page=16, tile=16, warps=1)),
        ("three slots", 128, Geometry(tile=64, stages=3)),
        ("five slots", 64, Geometry(page=128, warps=4)),
    ],
)
def test_geometries_and_orders(name: str, dim: int, geometry: Geometry) -> None:
    """One scratch serves all tokens of a warp, one after another: threads in any order."""
    for order in range(3):
        case = Case(lens=(1, 17, 300), start=(0, 13, 70), splits=2, order=order)
        check_both(CODECS[name], dim, case, geometry=geometry)


@pytest.mark.parametrize("role", ROLES)
def test_beside_another_codec(role: Role) -> None:
    codec = CODECS["hqmq"]
    check_all(*((codec, SAW) if role == "key" else (SAW, codec)), 64, CASES[:5], tolerance=2.0)


def patched(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let ``change(rows, role)`` have its way with the tokens of every case."""
    plain = decode_cases.rows

    def rows(case: Case, role: Role, dim: int, tokens: int, rng: torch.Generator) -> Tensor:
        x = plain(case, role, dim, tokens, rng)
        change(x, role)
        return x.half().float()

    monkeypatch.setattr(decode_cases, "rows", rows)


@pytest.mark.parametrize("name", ["hqmq-s96_r4", "int-4"])
def test_tokens_of_nothing_but_outliers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their scale is 0, and the first that a warp sees tell it nothing of the size of values."""

    def change(x: Tensor, role: Role) -> None:
        x[:, :, :40, :8] = x[:, :, :40, 12:] = 0.0

    patched(monkeypatch, change)
    codec = replace(CODECS[name], c=0.1, slots=1)
    for lens in ((40, 33), (64, 130)):
        check_both(codec, 64, Case(lens=lens), Case(lens=lens, dense=(3, 0), splits=2))


@pytest.mark.parametrize("name", ["hqmq", "hqmq-s96_r4", "int-8"])
def test_outliers_beyond_any_scale(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest of fp16 among small numbers: what the codes hold is still to be seen beside them."""

    def change(x: Tensor, role: Role) -> None:
        x *= 0.02
        if role == "value":  # a few channels, elsewhere errors can be told
            x[..., 20:24] = 60000.0 * x[..., 20:24].sign()
        else:
            x[..., 4:8] *= 800

    patched(monkeypatch, change)
    for dim in (64, 128):
        check_both(CODECS[name], dim, Case(lens=(130, 64)))


@pytest.mark.parametrize("role", ROLES)
def test_what_integers_have_under_outliers_shows(role: Role) -> None:
    """Two bits that are not symmetric have no level at 0; the bound is narrower than what they have there."""
    both = dict(zip(ROLES, sides(CODECS["int-2"], CODECS["int-2"], 64), strict=True))
    right = both[role]
    both[role] = replace(right, reader=right.reader.replace("kv::RestInt<64, 2>", "kv::RestZero"))
    assert both[role] != right
    with pytest.raises(AssertionError, match=r"relative error|log-sum-exp"):
        check(both["key"], both["value"], 64, Case(lens=(130,)), tolerance=2.0)


# -- pages unpacked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dim"), each_in_turn(CODECS, (128, 256, 64, 96, 192)))
def test_unpacked_pages_are_what_the_codec_decodes(name: str, dim: int, machine: dict[str, Any]) -> None:
    codec, heads = CODECS[name], 2
    pair = specs.decode_spec(codec, codec, dim, 64)
    store, params, decoded = fill(codec, codec, dim, heads, [128, 128], 64)
    for role in ROLES:
        assert bool(store.read(role, 0, 128)["flags"].any()) == (codec.c < 3)
    key, value = (
        constants_for(side, params[role], heads, dim) for side, role in zip((pair.key, pair.value), ROLES, strict=True)
    )
    packed = prefill.Packed(store.pages, store.table, specs.text_of(pair), key, value)
    for first, count in ((0, 128), (32, 77)):
        found = prefill.unpack(packed, first, count)
        for got, want in zip(found, decoded, strict=True):
            part = want[:, :, first : first + count]
            assert float((got.float() - part).norm() / part.norm()) < 1e-3


# -- what the reader takes for granted ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec",
    [*(Hqmq(s, r) for s, r in zip(SIZES, (*RADII, 3), strict=True)), Hqmq(24, 3, codebook="int8")]
    + [GroupInt(bits, 0, "channels", True) for bits in (2, 3, 4, 8)],
    ids=str,
)
def test_zeros_are_decoded_to_zeros(codec: Codec) -> None:
    """kv::RestZero: nothing of the inner codec is left under an outlier."""
    x = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0)).unflatten(-1, (16, 4))
    x[:, :, torch.arange(64), torch.arange(64) % 16] = 0.0
    params = codec.fit(Site(0, "key", 1, 64))
    back = codec.decode(codec.encode(x.flatten(-2), params), params).unflatten(-1, (16, 4))
    assert not back[:, :, torch.arange(64), torch.arange(64) % 16].any()


@pytest.mark.parametrize(
    "inner", [SawInt4(), GroupInt(4, 32), GroupInt(2, 32, "tokens"), Hqmq(24, 3, "radix")], ids=str
)
def test_other_codecs_with_outliers_are_refused(inner: Codec) -> None:
    with pytest.raises(UnsupportedError, match="the kernels read"):
        specs.reader(Med(inner), 128, "key")


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("s", SIZES)
def test_eight_warps_find_room(s: int, dim: int) -> None:
    for r in RADII:
        codec = Med(Hqmq(s, r))
        pair = specs.decode_spec(codec, codec, dim, 64)
        config = config_for(pair, 256, 32768, H200)
        assert config.warps * config.resident >= (WARPS if dim < 192 or s == 24 else WARPS // 2)
        assert launch.shared_bytes(pair, config) <= SHARED_BLOCK == H200.shared_block


# -- machine code ------------------------------------------------------------------------------------------------------


def compiled(codec: Codec, config: Config, arch: int) -> Kernel:
    pair = specs.decode_spec(codec, codec, 128, 64)
    return compile_kernels(attention.program(pair, config).source, arch)["kv_decode"]


@pytest.mark.parametrize(
    ("codec", "products", "most", "arch"),
    architectures_in_turn([(Med(Hqmq(24, 3)), 24, (3.5, 4.1, 4.8)), (Med(GroupInt(4, 0)), 24, (1.9, 2.7, 3.7))]),
    ids=str,
)
def test_machine_code(codec: Codec, products: int, most: tuple[float, float, float], arch: int) -> None:
    """No spills; instructions for a number of the cache without outliers, with those of keys, with all (sm_90)."""
    kernel = compiled(codec, Config(32, 8, 2, 1, 1), arch)
    assert kernel.stack == 0
    assert not kernel.spills()
    for extra, bound in zip((0, 8, 16), most, strict=True):
        least = 2 * (products + extra)
        ways = [loop.shortest("HMMA", least) for loop in kernel.loops_with("HMMA", "LDGSTS")]
        way = min(ways, key=len)
        assert sum(opcode(x) == "HMMA" for x in way) == least
        assert len(way) * 32 / (2 * 32 * 128) <= bound * (1 if arch == 90 else 1.25)
