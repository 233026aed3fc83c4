"""The reader of ghost: every run of widths that falls, whole decoders, means before RoPE, machine code."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcodec.attention import attend
from kvcodec.cache.fused import FusedLayerCache
from kvcodec.codec import ROLES, Params, Role, Site
from kvcodec.codecs.ghost import ALLOWED, Ghost
from kvcodec.codecs.saw_int4 import SawInt4
from kvcodec.kernels.ghost import read_tables, sizes
from kvcodec.ops.hadamard import power_of_two_divisor
from tests.kernels import harness
from tests.kernels.decode_cases import CASES, Case, Means, Side, check_all
from tests.kernels.offline import compile_kernels
from tests.kernels.test_fused import Reference, scheme

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
template <class R, bool VALUES> KV_DEV void by(int way, const uint8_t* tile, const uint8_t* table, float* out) {{
  if (way > R::ways(table)) return;
  if (way == 0) unpacked<R, VALUES>(tile, table, out);
  else if (way == 1) unpacked<typename R::template Way<1>, VALUES>(tile, table, out);
  else unpacked<typename R::template Way<2>, VALUES>(tile, table, out);
}}
KV_KERNEL void unpack(const uint8_t* tiles, const uint8_t* tables, float* keys, float* values, int way) {{
  KV_DYNAMIC_SHARED(shared);
  const int h = kv::block_x();
  K::fill(shared, tables + h * V::SOURCE, kv::thread(), 32);  // what the keys read comes first
  uint8_t* own = shared + kv::align16(K::TABLE);
  V::fill(own, tables + h * V::SOURCE, kv::thread(), 32);
  kv::sync_threads();
  const uint8_t* tile = tiles + h * {tokens} * K::plane_bytes(0);
  by<K, false>(way, tile, shared, keys + h * {tokens} * {dim});
  by<V, true>(way, tile, own, values + h * {tokens} * {dim});
}}
extern "C" void run(const uint8_t* tiles, const uint8_t* tables, float* keys, float* values, int64_t heads,
                    int64_t way) {{
  kv::launch((int)heads, 1, 1, 32, kv::align16(K::TABLE) + V::TABLE, unpack, tiles, tables, keys, values, (int)way);
}}
"""


OFTEN = (2, 96), (2.5, 64), (3, 128), (3.5, 128)


def falling(quads: int, total: int) -> list[list[int]]:
    """Widths of the quads that sum up to ``total``: flat, steep and drawn ones, each with several greatest widths."""
    rng, made = torch.Generator().manual_seed(total), []
    for most in (most for most in (7, 6, 5, 4) if most * quads >= total):
        for kind in ("flat", "steep", "drawn"):
            widths = [0] * quads
            for _ in range(total):
                free = [q for q in range(quads) if widths[q] < most]
                drawn = free[int(torch.randint(len(free), (), generator=rng))]
                widths[
                    min(free, key=lambda q: widths[q]) if kind == "flat" else free[0] if kind == "steep" else drawn
                ] += 1
            made.append(sorted(widths, reverse=True))
    return made


@pytest.mark.parametrize(
    ("bits", "dim"),
    [
        pytest.param(bits, dim, marks=[] if (bits, dim) in OFTEN else pytest.mark.wide)
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
    tables = read_tables({**params, "centre": 0 * ones})[0]
    for way in range(3):
        found = [torch.full((heads, TOKENS, dim), -100.0) for _ in range(2)]
        lib.call("run", codes[0].contiguous(), tables, *map(harness.Out, found), heads, way)
        for x in found:
            done = (x != -100).flatten(1).any(1)
            assert bool(done.all()) if way == 0 else bool(done.any()) or bits > 3.5
            off = (x - want)[done].abs() / want[done].abs().clamp_min(0.1)
            assert bool((off < 3e-3).all())  # five roundings to fp16


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
    check_all(side(codec, False), side(codec, True, True), dim, (*CASES, *MEANS) if dim == 128 else CASES[:3])


def test_beside_another_codec() -> None:
    saw = Side(SawInt4(), "kv::ReadSaw<{D}>", "read_saw.cuh", order=power_of_two_divisor)
    check_all(saw, side(Ghost(4), True), 64, CASES[:2])


def test_a_fused_cache(machine: dict[str, Any]) -> None:
    """Encoded, attended and unpacked by kernels, with constants of a file."""
    generator = torch.Generator().manual_seed(0)
    k, v = (
        (torch.randn(2, 2, 98, 64, generator=generator) * torch.logspace(-1, 1, 64) + c).half().float() for c in (0, 1)
    )
    own: dict[Role, Params] = {}
    for role, x in zip(ROLES, (k, v), strict=True):
        own[role] = Ghost(3).fit(Site(0, role, 2, 64), x[:1])
    fused = FusedLayerCache(scheme("ghost-3", sink=4), params=own)
    reference = Reference(scheme("ghost-3", sink=4), params=own)
    for cache in (fused, reference):
        cache.append(k[:, :, :97], v[:, :, :97])
        cache.append(k[:, :, 97:], v[:, :, 97:])
    for tokens in (1, 8):
        q = torch.randn(2, 4, tokens, 64, generator=generator)
        want = attend(q, reference)
        assert float((fused.attend(q) - want).norm() / want.norm()) < 2e-3
    assert set(machine) >= {"kv_encode", "kv_decode", "kv_unpack"}


# -- machine code ------------------------------------------------------------------------------------------------------

_PROGRAM = """
#include "decode.cuh"
#include "read_ghost.cuh"
using K = kv::ReadGhost<128, 6, false>;
using V = kv::ReadGhost<128, 6, true, true>;
using Kernel = kv::Decoder<K, V, 128, 64, 64, 8, 2, false, -1, 4>;
KV_KERNEL void KV_BOUNDS(256, 1) decode(KV_GRID_CONSTANT kv::DecodeArgs a) { Kernel::run(a); }
"""


def test_machine_code() -> None:
    """Where levels are looked up: instructions per element."""
    kernel = compile_kernels(_PROGRAM)["decode"]
    assert kernel.spills() == []
    assert kernel.stack == 0
    loop = kernel.loop_with("HMMA", "LDGSTS")
    path = loop.shortest("HMMA", 64)  # of a tile
    assert len(path) / (2 * 64 * 128 / 32) <= 2.6
