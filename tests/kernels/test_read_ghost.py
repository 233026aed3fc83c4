"""The reader of ghost: every run of widths that falls, whole decoders, means before RoPE, machine code."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvcodec.codec import Params, Site
from kvcodec.codecs.ghost import ALLOWED, Ghost
from kvcodec.codecs.saw_int4 import SawInt4
from kvcodec.kernels.ghost import read_tables, sizes
from kvcodec.ops.hadamard import power_of_two_divisor
from tests.kernels import harness
from tests.kernels.decode_cases import CASES, Case, Means, Side, check_all
from tests.kernels.offline import architectures_in_turn, compile_kernels, mix

# -- widths ------------------------------------------------------------------------------------------------------------

TOKENS = 16
UNPACK = """
#include "tile.cuh"
#include "read_ghost.cuh"
template <class R, bool VALUES> KV_DEV void unpacked(const uint8_t* tile, const uint8_t* table, float* out) {{
  const kv::Planes<R, {tokens}> planes{{tile}};
  const int lane = kv::thread() % 32, g = lane / 4, j = lane % 4;
  for (int turn = 0; turn < (VALUES ? 4 : 2); ++turn) {{
    constexpr int REGS = VALUES ? R::V_REGS : R::K_REGS;
    const int token = VALUES ? 4 * turn + j : 8 * turn + g;
    uint32_t r[REGS];
    if constexpr (VALUES) R::values(planes, table, token, g, lane, r);
    else R::keys(planes, table, token, j, lane, r);
    for (int e = 0; e < 2 * REGS; ++e) {{
      float& to = out[token * {dim} + kv::model_channel<R>(table, VALUES ? R::v_channel(g, e) : R::k_channel(j, e))];
      const float x = kv::half_float((uint16_t)(r[e / 2] >> e % 2 * 16)) * R::scale(planes, token);
      to = to == -100.0f ? x : 1e30f;  // a channel is written once
    }}
  }}
}}
using K = kv::ReadGhost<{dim}, {twice}, false>;
using V = kv::ReadGhost<{dim}, {twice}, true, true>;
KV_KERNEL void unpack(const uint8_t* tiles, const uint8_t* tables, float* keys, float* values) {{
  KV_DYNAMIC_SHARED(shared);
  const int h = kv::block_x();
  K::fill(shared, tables + h * V::SOURCE, kv::thread(), 32);  // what the keys read comes first
  uint8_t* own = shared + kv::align16(K::TABLE);
  V::fill(own, tables + h * V::SOURCE, kv::thread(), 32);
  kv::sync_threads();
  const uint8_t* tile = tiles + h * {tokens} * K::plane_bytes(0);
  unpacked<K, false>(tile, shared, keys + h * {tokens} * {dim});
  unpacked<V, true>(tile, own, values + h * {tokens} * {dim});
}}
extern "C" void run(const uint8_t* tiles, const uint8_t* tables, float* keys, float* values, int64_t heads) {{
  kv::launch((int)heads, 1, 1, 32, kv::align16(K::TABLE) + V::TABLE, unpack, tiles, tables, keys, values);
}}
"""


def falling(quads: int, total: int) -> list[list[int]]:
    """Widths of the quads: steep, flat, two heights, and drawn ones."""
    rng, made = torch.Generator().manual_seed(total), []
    for power in (0, 1, 30):
        for most in (7, 6, 5, 4):
            if most * quads < total:
                continue
            widths = [0] * quads
            for i in range(total):
                free = [q for q in range(quads) if widths[q] < most]
                lowest = min(free, key=lambda q: widths[q])
                chosen = free[int(torch.rand((), generator=rng) ** power * len(free))] if power == 1 else free[0]
                widths[lowest if power == 0 else chosen] += 1
                assert sum(widths) == i + 1
            made.append(sorted(widths, reverse=True))
    return made


@pytest.mark.parametrize(
    ("bits", "dim"),
    [
        pytest.param(bits, dim, marks=[] if (bits, dim) in ((2, 96), (2.5, 64), (3, 128), (3.5, 128)) else pytest.mark.wide)
        for dim in (64, 96, 128, 192, 256)
        for bits in ALLOWED
        if dim * bits % 32 == 0
    ],
)  # fmt: skip
def test_every_run_of_widths(bits: float, dim: int) -> None:
    codec, total = Ghost(bits), int(dim * bits) // 4 - 1
    widths = torch.tensor(falling(dim // 4, total))
    heads, rng = len(widths), torch.Generator().manual_seed(dim)
    assert all(a >= b for row in widths.tolist() for a, b in pairwise(row))
    ones = torch.ones(1, heads, dim)
    order = torch.stack([torch.randperm(dim, generator=rng) for _ in range(heads)])[None]
    params = {"order": order.short(), "factor": ones, "weight": ones, "widths": widths[None].to(torch.uint8)}
    codes = torch.randint(0, 256, (1, heads, TOKENS, int(dim * bits) // 8), generator=rng, dtype=torch.uint8)
    want = codec.from_code(codec.decode({"codes": codes}, params), params)[0]
    lib = harness.build(UNPACK.format(dim=dim, twice=int(2 * bits), tokens=TOKENS))
    found = [torch.full((heads, TOKENS, dim), -100.0) for _ in range(2)]
    tables = read_tables({**params, "centre": 0 * ones})[0]
    lib.call("run", codes[0].contiguous(), tables, *map(harness.Out, found), heads)
    for x in found:
        assert float(((x - want).abs() / want.abs().clamp_min(0.1)).max()) < 3e-3  # five roundings to fp16


# -- decoders ----------------------------------------------------------------------------------------------------------


class One(Ghost):
    """Ghost whose constants are those of all sequences together."""

    def fit(self, site: Site, sample: Tensor | None = None) -> Params:
        """As ``Ghost.fit``, with B = 1."""
        assert sample is not None
        return super().fit(site, sample.transpose(0, 1).flatten(1, 2)[None])


def side(codec: Ghost, *arguments: bool) -> Side:
    """How keys or values of this codec are read, by the struct's last arguments."""
    name = ", ".join(["kv::ReadGhost<{D}", str(int(2 * codec.bits)), *(str(x).lower() for x in arguments)]) + ">"
    return Side(codec, name, "read_ghost.cuh", table=lambda p, _: read_tables(p), factor=lambda p, _: sizes(p))


MEANS = (
    Case((130, 64), means=Means((5, 1000), each=True), group=8),
    Case((130, 64), means=Means((5, 1000), few=8), heads=2),
)


@pytest.mark.parametrize(("codec", "dim"), [(Ghost(3), 128), (One(2.5), 64)])
def test_decode(codec: Ghost, dim: int) -> None:
    check_all(side(codec, False), side(codec, True, True), dim, (*CASES, *(MEANS if dim == 128 else ())))


def test_beside_another_codec() -> None:
    saw = Side(SawInt4(), "kv::ReadSaw<{D}>", "read_saw.cuh", order=power_of_two_divisor)
    check_all(saw, side(Ghost(4), True), 64, CASES[:2])


# -- machine code ------------------------------------------------------------------------------------------------------

_PROGRAM = """
#include "decode.cuh"
#include "read_ghost.cuh"
using Kernel = kv::Decoder<kv::ReadGhost<128, {twice}, false>, kv::ReadGhost<128, {twice}, true, true>, 128, 64, 64, 8,
                           2, false, -1, 4>;
KV_KERNEL void KV_BOUNDS(256, 1) decode(KV_GRID_CONSTANT kv::DecodeArgs a) {{ Kernel::run(a); }}
"""
BUDGETS = {2: 3.2, 3: 3.5, 4: 3.7}
"""Instructions per element where levels are looked up; a third more but for sm_90."""


@pytest.mark.parametrize(("bits", "arch"), architectures_in_turn(BUDGETS))
def test_machine_code(bits: int, arch: int) -> None:
    kernel = compile_kernels(_PROGRAM.format(twice=2 * bits), arch)["decode"]
    assert kernel.spills() == []
    assert kernel.stack == 0
    loop = kernel.loop_with("HMMA", "LDGSTS")
    path = loop.shortest("HMMA", 64)  # of a tile
    assert len(path) / (2 * 64 * 128 / 32) <= BUDGETS[bits] * (1 if arch == 90 else 4 / 3)
