"""Readers of int-b, kivi, innerq, fp8 and of group-wise integer values, in the pairings of the presets."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from packedkv.codec import Codec
from packedkv.codecs.fp8 import Fp8
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.innerq import InnerQ
from packedkv.codecs.turboquant import TurboQuant
from tests.kernels import decode_cases
from tests.kernels.decode_cases import CASES, Case, Geometry, check, check_all, each_in_turn


def _group(bits: int, group: int = 32) -> GroupInt:
    return GroupInt(bits, group)


def _tokens(bits: int, group: int = 32) -> GroupInt:
    return GroupInt(bits, group, "tokens")


def _int(bits: int, symmetric: bool = False) -> GroupInt:
    return GroupInt(bits, 0, symmetric=symmetric)


BITS = (2, 3, 4, 8)
INNER_KEY = InnerQ(3, "channels", norm=True)
PAIRS: dict[str, tuple[Codec, Codec]] = {
    **{f"int-{bits}": (_int(bits), _int(bits)) for bits in (2, 3, 4, 8)},
    "int-4 symmetric": (_int(4, True), _int(4, True)),
    "int-2 symmetric": (_int(2, True), _int(2, True)),
    **{f"kivi-{bits}": (_tokens(bits), _group(bits)) for bits in (2, 3, 4, 8)},
    "innerq-base": (INNER_KEY, InnerQ(3, "tokens")),
    "innerq-small": (INNER_KEY, InnerQ(2, "tokens")),
    "innerq-hybrid": (INNER_KEY, InnerQ(2, "tokens", hybrid=True)),
    "innerq full": (InnerQ(3, "channels", "full"), InnerQ(2, "tokens", "full")),
    "fp8": (Fp8(True), Fp8(True)),
    "fp8 unscaled": (Fp8(False), Fp8(False)),
    "int-4 and kivi-4 values": (_int(4), _group(4)),
    **{f"group keys {bits}": (_group(bits), _int(bits)) for bits in (2, 3, 4, 8)},
}

DIMS = (128, 64, 96, 256, 512)


@pytest.mark.parametrize(("name", "dim"), each_in_turn(PAIRS, DIMS))
def test_reader(name: str, dim: int) -> None:
    key, value = PAIRS[name]
    check_all(key, value, dim, CASES, tolerance=2)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("values", [2.0**-16, 1e-3, 1e4])
def test_interleaved_values_of_any_size(values: float, group: int) -> None:
    """Scales join weights in fp16, which must neither vanish nor overflow."""
    check(_tokens(4), _group(4, group), 128, Case(lens=(130, 64), values=values), tolerance=2)


@pytest.mark.parametrize(
    "geometry", [Geometry(tile=64), Geometry(page=128, tile=32, warps=3, stages=3), Geometry(page=32)]
)
@pytest.mark.parametrize("name", ["kivi-2", "innerq-hybrid"])
def test_geometries(name: str, geometry: Geometry) -> None:
    """Blocks of 32 tokens in tiles of 32 and 64, alive in part or not at all."""
    for lens, start in (((31, 32, 33, 300), (0, 31, 32, 40)), ((63, 64, 97, 257), (0, 33, 64, 255))):
        check(*PAIRS[name], 64, Case(lens=lens, start=start, splits=2), geometry, tolerance=2)


# groups that are longer than a tile: of the presets first, then the other widths and head_dims
_BOTH = {f"kivi-g{group}-{bits}": (_tokens(bits, group), _group(bits, group)) for group in (64, 128) for bits in BITS}
_TQ = {f"kivi-tq-{bits}": (_tokens(bits, 128), TurboQuant(bits)) for bits in (3, 4)}
LONG = {**_BOTH, **_TQ}
_OFTEN = {("kivi-g64-4", 128), ("kivi-g64-3", 64), ("kivi-g128-4", 64), ("kivi-g128-4", 128), ("kivi-g128-2", 96),
          ("kivi-g64-8", 256), ("kivi-tq-4", 128), ("kivi-tq-3", 192)}  # fmt: skip
_LONG_CASES = (
    # of few heads whose largest scores are nearly equal, bf16's error happens to cancel: more heads
    *(replace(case, lens=(130, 64, 100, 128), heads=2) if case.spread else case for case in CASES),
    Case((300, 129, 128), start=(127, 64, 0), heads=2, group=3, splits=3),
    Case((63, 65, 31, 250), start=(0, 63, 30, 200), splits=2, group=8, loud=30.0),
)


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        pytest.param(name, dim, marks=[] if (name, dim) in _OFTEN else [pytest.mark.wide])
        for name in LONG
        for dim in (*DIMS, 192)
    ],
)
def test_groups_longer_than_a_tile(name: str, dim: int) -> None:
    key, value = LONG[name]
    check_all(key, value, dim, _LONG_CASES, Geometry(page=key.block_tokens, tile=32), tolerance=2)


@pytest.mark.parametrize(
    ("name", "geometry"),
    [
        ("kivi-g128-4", Geometry(page=256, tile=64, warps=3, stages=3)),
        ("kivi-tq-4", Geometry(page=128, tile=64)),
        ("kivi-g64-3", Geometry(page=64, tile=64)),  # a page is a tile is a group
        ("kivi-g64-3", Geometry(page=128, tile=64)),
    ],
)
def test_long_groups_in_tiles_of_64_and_pages_of_several(name: str, geometry: Geometry) -> None:
    check_all(*LONG[name], 64, _LONG_CASES[-2:], geometry, tolerance=2)


def test_hybrid_values_with_offsets() -> None:
    """Numbers far from 0 make every group asymmetric, which random ones never do."""
    key, value = PAIRS["innerq-hybrid"]
    x = value.encode(torch.randn(1, 1, 32, 64) + 9, {})
    assert bool(torch.signbit(x["scale"]).all())
    for lens in ((130, 7), (65, 33)):
        check(key, value, 64, Case(lens=lens, shift=9.0), tolerance=2)
    check(key, value, 64, Case(lens=(130,), shift=1.2), tolerance=2)  # some and some


# -- scales that join the query ----------------------------------------------------------------------------------------

# four sequences with one live token each, the second of a block: log-sum-exp is its score
_ONE = Case(lens=(2, 34, 66, 98), start=(1, 33, 65, 97), heads=2, group=8)


def _two_valued(monkeypatch: pytest.MonkeyPatch, bits: int, steps: tuple[int, int], unit: float) -> None:
    """Keys whose blocks hold -a and, in the live token, a: a = S (2^bits - 1) / 2 for random S in ``steps`` units."""

    def rows(case: Case, role: str, dim: int, tokens: int, rng: torch.Generator) -> Tensor:
        shape = (len(case.lens), case.heads, tokens, dim)
        if role == "value":
            return torch.randn(shape, generator=rng)
        step = torch.randint(*steps, (*shape[:2], tokens // 32, 1, dim), generator=rng) * unit
        x = -step.expand(-1, -1, -1, 32, -1).clone()
        x[..., 1, :] *= -1
        return x.flatten(2, 3) * (2**bits - 1) / 2

    monkeypatch.setattr(decode_cases, "rows", rows)


@pytest.mark.parametrize(("bits", "steps", "scale"), [(2, (64, 86), 0.16), (3, (16, 32), 0.055)])
def test_scores_keep_half_the_rounding_of_scaled_queries(
    monkeypatch: pytest.MonkeyPatch, bits: int, steps: tuple[int, int], scale: float
) -> None:
    """Keys, scales and queries are bf16 numbers: bf16 scores are exact, and what is off comes of query times scale.

    Left alone, that rounding counts with the largest code: the worst of these scores is off by 3e-3. Against the middle
    code it is half of that; the bound is 2e-3.
    """
    _two_valued(monkeypatch, bits, steps, 1 / steps[0])
    check(_tokens(bits), _group(4), 64, replace(_ONE, scale=scale), tolerance=2)


@pytest.mark.parametrize("bits", [2, 3])
def test_the_largest_scales_do_not_overflow(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Keys of -60000 and 60000: with two bits a scale is 40000, and a query times it has to be an fp16 number."""
    _two_valued(monkeypatch, bits, (1, 2), 120000 / (2**bits - 1))
    check(_tokens(bits), _group(4), 64, _ONE, tolerance=2)
