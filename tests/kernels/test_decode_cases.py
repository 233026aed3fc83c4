"""The decode kernel with saw-int4: every option of the call, every place where a sequence may begin or end."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from packedkv.codec import ROLES, Codec, Role
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.saw_int4 import SawInt4
from tests.kernels.decode_cases import CASES, Case, Geometry, check, check_all, sides

SAW, INT4, INT8 = SawInt4(), GroupInt(4, 0), GroupInt(8, 0)
INTERLEAVED, INTERLEAVED_4, INTERLEAVED_128 = GroupInt(2, 32), GroupInt(4, 32), GroupInt(4, 128)
TOKENS_128 = GroupInt(4, 128, "tokens")
# what CASES has only together
APART = (
    Case((130, 7, 64), heads=2, group=8),
    Case((33, 96, 31), start=(3, 95, 0), group=12, splits=2),
    Case((128, 40), softcap=20.0, sinks=True, scale=0.3, group=5),
    Case((128, 40), softcap=20.0, splits=2),
    Case((250, 17, 0), splits=13, dense=(3, 0, 1)),
    Case((65, 0, 100), dense=(5, 1, 9), dense_start=(2, 0, 3), sinks=True, splits=2, group=7),
)


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256, 512, pytest.param(80, marks=pytest.mark.wide)])
def test_options(dim: int) -> None:
    check_all(SAW, SAW, dim, (*CASES, *(APART if dim in (96, 128) else ())))


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(page=16, tile=16, warps=1, stages=2),
        Geometry(page=64, tile=64, warps=2, stages=3),
        Geometry(page=128, tile=32, warps=4, stages=2),
        Geometry(page=48, tile=48, warps=2, stages=1),
    ],
)
def test_geometries(geometry: Geometry) -> None:
    for lens in ((1, 15, 16, 17), (47, 48, 49, 300), (63, 64, 65, 257)):
        check(SAW, SAW, 64, Case(lens=lens, start=(0, 3, 5, 13), splits=2), geometry)


def test_teams_of_warps() -> None:
    """Every piece of every sequence, whatever the teams that take them: more pieces than teams, and fewer."""
    for teams, warps in ((2, 2), (3, 1)):
        geometry = Geometry(warps=warps, teams=teams)
        cases = (
            Case((130, 7, 64, 0, 200, 33, 1), heads=2, group=8),
            Case((130, 7, 64, 300), heads=2, group=3, splits=2, dense=(3, 0, 17, 1), sinks=True, order=5),
            Case((65,), heads=1),
        )
        check_all(SAW, SAW, 64, tuple(c for c in cases if c.dense is None), geometry)
        check_all(INT4, INT4, 64, cases, geometry)


@pytest.mark.parametrize("teams", [1, 2])
def test_dense_tokens_in_a_split_of_their_own(teams: int) -> None:
    cases = (
        Case((130, 7, 0, 33), heads=2, splits=3, alone=True, dense=(3, 0, 77, 1), sinks=True),
        Case((65, 0, 100), dense=(5, 1, 40), dense_start=(2, 0, 30), splits=2, alone=True, group=3, order=7),
    )
    check_all(INT4, INT4, 64, cases, Geometry(teams=teams))


@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize(
    ("key", "value"),
    [(INT8, INT8), (INTERLEAVED, INTERLEAVED), (TOKENS_128, INTERLEAVED_128)],
    ids=["int-8", "groups of 32", "groups of 128"],
)
def test_long_sums_do_not_drift(key: Codec, value: Codec, group: int) -> None:
    """The tensor core truncates: thousands of products of one sign may not lose what is left when the zero is off.

    Without keys' influence the output is a mean of thousands of values, a hundredth of one.
    """
    case = Case((12288,), group=group, scale=1e-3)
    check(key, value, 128, case, Geometry(page=max(64, key.block_tokens), tile=64, warps=1), tolerance=0.7)


@pytest.mark.parametrize("value", [INT4, INTERLEAVED_4], ids=["int-4", "groups of 32"])
@pytest.mark.parametrize(("lens", "options"), [((4000,), {}), ((3000, 700), {"dense": (40, 0), "splits": 2})])
def test_equal_weights_are_not_all_rounded_to_one_side(value: Codec, lens: tuple[int, ...], options: Any) -> None:
    """Where all weights are nearly one number, so are their products with a scale, and zeros are off by none of it.

    With one reference for all tokens, groups of 32 are off by 2 % here, and the bound is below 0.2 %.
    """
    for scale in (1e-6, 1e-5, 5e-5):
        check(INT4, value, 128, Case(lens, group=5, scale=scale, **options), Geometry(warps=4), tolerance=1)


@pytest.mark.parametrize("role", ROLES)
def test_a_wrong_basis_shows(role: Role) -> None:
    both = dict(zip(ROLES, sides(SAW, SAW, 64), strict=True))
    both[role] = replace(both[role], order=32)
    with pytest.raises(AssertionError, match=r"relative error|log-sum-exp"):
        check(both["key"], both["value"], 64, Case(lens=(64,)))


@pytest.mark.parametrize("group", [4, 7])
def test_dtypes(group: int) -> None:
    case = Case(lens=(33, 70), group=group, dense=(3, 4))
    cases = [
        replace(case, q_dtype=dtype, out_dtype=dtype, dense_dtype=torch.float16 if dtype == torch.float32 else dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
    ]
    check_all(SAW, SAW, 64, cases, tolerance=2)
