"""The rotation of new rows: sums of doubles, or of integers where GPUs have few units for doubles."""

import pytest
import torch
from torch import Tensor

from packedkv.ops.hadamard import block_hadamard, power_of_two_divisor
from tests.kernels import harness

ROWS = 16
SOURCE = """
#define KV_FEW_DOUBLES {few}
#include "encode.cuh"
using namespace kv;
KV_KERNEL void rotate(const void* x, float* out, int64_t kind) {{
  constexpr int N = {D} / {team};
  const int row = thread() / {team}, part = thread() % {team};
  float y[N];
  load_row<{team}>(y, x, (int64_t)row * {D}, part, (int)kind);
  rotate_row<{team}, {order}>(y, part);
  for (int k = 0; k < N; ++k) out[row * {D} + channel_of<{team}>(part, k)] = y[k];
}}
"""
LAUNCH = """
extern "C" void run(const void* x, float* out, int64_t kind) {{
  kv::launch(1, 1, 1, {threads}, 0, rotate, x, out, kind);
}}
"""


def rotated(x: Tensor, team: int, *, few: bool) -> Tensor:
    dim = x.shape[1]
    names = {"D": dim, "team": team, "order": power_of_two_divisor(dim), "few": int(few), "threads": ROWS * team}
    lib, out = harness.build((SOURCE + LAUNCH).format(**names)), torch.full((ROWS, dim), torch.nan)
    kinds = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
    lib.call("run", x, harness.Out(out), kinds[x.dtype])
    return out


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("team", [8, 32])
def test_sums_of_integers_are_those_of_doubles(team: int, dim: int) -> None:
    """Numbers of every size; rows in which integers would not be exact are added as doubles."""
    rng = torch.Generator().manual_seed(dim)
    x = torch.randn(ROWS, dim, generator=rng)
    sizes = torch.exp2(torch.randint(-24, 12, (ROWS, dim), generator=rng).float())
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for rows in (x, x * sizes, x * 0.02, x * 4096, torch.zeros_like(x)):
            given = rows.clamp(-65504, 65504).to(dtype)
            few, many = (rotated(given, team, few=which) for which in (True, False))
            assert torch.equal(few, many)
            if dtype == torch.float16:
                assert torch.equal(few, block_hadamard(given.float(), power_of_two_divisor(dim)))
    tiny = torch.full((ROWS, dim), 2.0**-40)
    assert torch.equal(rotated(tiny, team, few=True), rotated(tiny, team, few=False))
