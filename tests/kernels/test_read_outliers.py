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
from tests.kernels import decode_cases
from tests.kernels.decode_cases import CASES, Case, Geometry, check_all

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


# -- pages unpacked ----------------------------------------------------------------------------------------------------


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
