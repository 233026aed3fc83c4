"""Rows changed between the model's basis and that of the codes, on the emulated machine, against float64."""

from typing import Any

import pytest
import torch

from packedkv.kernels.constants import Constants
from packedkv.kernels.cuda import basis
from packedkv.kernels.cuda.basis import (
    COPY,
    DIVIDE,
    MULTIPLY,
    MULTIPLY_AFTER,
    WARPS,
    Joined,
    Part,
    change_basis,
    out_of_codes,
    queries_to_change,
    rows_of_warp,
)
from packedkv.ops.hadamard import block_hadamard
from tests.kernels.conftest import normal


def into_codes(q: torch.Tensor, key: Constants) -> torch.Tensor:
    q, parts = queries_to_change(q, key)
    change_basis(parts)
    return q


def wanted(x: torch.Tensor, side: Constants, way: int) -> torch.Tensor:
    rows = x.double()
    factor: Any = 1.0
    if side.factor is not None:
        group = x.shape[1] // side.factor.shape[1]
        factor = side.factor.double().repeat_interleave(group, 1)[:, :, None]
    rows = rows * factor if way == MULTIPLY else rows / factor if way == DIVIDE else rows
    rows = block_hadamard(rows, side.order).double()
    return rows * factor if way == MULTIPLY_AFTER else rows


@pytest.mark.parametrize(("dim", "order"), [(64, 64), (96, 32), (128, 1), (256, 256), (160, 2)])
def test_several_tensors_in_one_launch(dim: int, order: int, machine: dict[str, Any]) -> None:
    """Of several dtypes, head and token counts; strided, into a part of what others share."""
    factor = normal(2, 2, dim).abs() + 0.1
    sides = Constants(None, factor, order), Constants(None, factor[:1], order), Constants(None, None, order)
    kinds = (torch.bfloat16, MULTIPLY), (torch.float16, DIVIDE), (torch.float32, MULTIPLY_AFTER)
    parts = []
    for i, (side, (dtype, way)) in enumerate(zip(sides, kinds, strict=True)):
        heads, tokens = 2 * (i + 1), (7, 1, 33)[i]
        x = normal(2, tokens, heads, dim, seed=i).to(dtype).transpose(1, 2)
        out = torch.full((2, heads, tokens + 3, dim), 9.0, dtype=torch.float32 if i == 2 else torch.float16)
        if i == 1:  # some of the tokens, without slices
            more = torch.cat([x, x + 1, x - 1], 2)
            parts.append(Part(more, out, side, way, tokens, tokens, 1))
        else:
            parts.append(Part(x, out[:, :, 1:-2], side, way))
    change_basis([*parts, Part(normal(2, 2, 0, dim).bfloat16(), torch.empty(2, 2, 0, dim), sides[2], MULTIPLY)])
    ((grid, _, _, _),) = machine["kv_basis"].launches
    assert grid == (-(-33 * 6 // (WARPS * rows_of_warp(dim))), 2, 3)
    for x, out, side, way, first, tokens, *_ in parts:
        whole = out if tokens else out._base
        assert whole is not None
        found = wanted(x[:, :, first : first + tokens] if tokens else x, side, way)
        torch.testing.assert_close(whole[:, :, 1:-2].double(), found, rtol=1e-3, atol=2e-3)
        assert (whole[:, :, 0] == 9).all()
        assert (whole[:, :, -2:] == 9).all()


def test_more_rows_than_blocks(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basis, "MOST_BLOCKS", 2)
    x, side = normal(1, 1, 2 * WARPS * rows_of_warp(64) + 5, 64).half(), Constants(None, None, 64)
    torch.testing.assert_close(into_codes(x, side).double(), wanted(x, side, MULTIPLY), rtol=1e-3, atol=2e-3)
    assert machine["kv_basis"].launches[0][0][0] == 2


def test_nothing_is_launched_where_nothing_changes(machine: dict[str, Any]) -> None:
    plain, x = Constants(None, None, 1), normal(1, 2, 3, 64).half()
    assert into_codes(x, plain) is x
    assert out_of_codes(x, plain) is x
    assert out_of_codes(x, plain, torch.bfloat16).dtype == torch.bfloat16
    change_basis([])
    assert "kv_basis" not in machine
    factor = torch.full((1, 2, 64), 2.0)
    assert out_of_codes(x, Constants(None, factor, 1)).dtype == torch.float32
    assert torch.equal(out_of_codes(x, Constants(None, factor, 1)), 2 * x.float())


def test_fp16_saturates_and_nan_stays(machine: dict[str, Any]) -> None:
    x = normal(1, 1, 2, 64).bfloat16()
    x[0, 0, 0], x[0, 0, 1, 3] = 60000.0, torch.nan
    out = into_codes(x, Constants(None, None, 64))
    assert out[0, 0, 0, 0] == 65504
    assert not out[0, 0, 0, 1:].any()
    assert out[0, 0, 1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_that_do_not_begin_at_16_bytes(dtype: torch.dtype, machine: dict[str, Any]) -> None:
    side = Constants(None, None, 64)
    x = normal(1, 2, 5, 65).to(dtype)[..., 1:]
    out = torch.full((1, 2, 5, 65), 9.0, dtype=dtype)
    change_basis([Part(x, out[..., 1:], side, MULTIPLY)])
    torch.testing.assert_close(out[..., 1:].double(), wanted(x, side, MULTIPLY), rtol=1e-2, atol=2e-2)
    assert (out[..., 0] == 9).all()
    assert machine["kv_basis"].launches


def test_outputs_over_different_tokens_are_joined(machine: dict[str, Any]) -> None:
    """As one softmax over all of them and the sinks; a row without tokens has either infinity."""
    side, lse, other_lse = Constants(None, None, 1), normal(3, 4), normal(3, 4, seed=1)
    other_lse[0, 0], other_lse[1, 1], lse[2, 2] = torch.inf, -torch.inf, -torch.inf
    lse[2, 3], other_lse[2, 3], sinks = torch.inf, torch.inf, normal(3, seed=2)
    x, other = (normal(1, 4, 3, 64, seed=s).half().transpose(1, 2) for s in (3, 4))
    for given in (sinks, None):
        out = torch.empty(1, 3, 4, 64)
        change_basis([Part(x, out, side, MULTIPLY, joined=Joined(lse, other, other_lse, given))])
        third = torch.full_like(lse, -torch.inf) if given is None else given[:, None].expand(3, 4)
        parts = torch.stack([lse, other_lse, third])
        weights = torch.where(parts.isinf(), 0.0, parts.double().exp())
        weights = (weights / weights.sum(0)).nan_to_num(0.0)
        want = weights[0][..., None] * x[0].double() + weights[1][..., None] * other[0].double()
        torch.testing.assert_close(out[0].double(), want, rtol=1e-4, atol=1e-4)


def test_rows_are_gathered_scattered_and_copied(machine: dict[str, Any]) -> None:
    x = normal(1, 2, 6, 64).half()
    x[0, 0, 4, 5], x[0, 1, 2, 3] = torch.inf, torch.nan
    out = torch.full((1, 2, 9, 64), 9.0, dtype=torch.float16)
    source, target = (torch.tensor(n, dtype=torch.int32) for n in ([4, 2, 0], [8, -1, 1]))
    change_basis([Part(x, out, Constants(None, None, 1), COPY, tokens=3, source=source, target=target)])
    want = torch.full_like(out, 9.0)
    want[:, :, 8], want[:, :, 1] = x[:, :, 4], x[:, :, 0]
    assert torch.equal(out, want)
