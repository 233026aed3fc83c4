"""The reader of ghost: every kind of pair, whole decoders, means before RoPE, machine code."""

import pytest
import torch

from packedkv.codec import NO_SAMPLE, Params, Sample, Site
from packedkv.codecs.ghost import ALLOWED, PARTS, Ghost, kinds, share_bits
from packedkv.kernels.codecs.ghost import FEWER, read_tables
from packedkv.kernels.spec import definitions
from tests.kernels import harness
from tests.kernels.decode_cases import CASES, Case, Geometry, Means, check_all
from tests.kernels.klt import Klt

# -- kinds of pairs ----------------------------------------------------------------------------------------------------

TOKENS = 16
UNPACK = """
#include "tile.cuh"
#include "read_ghost.cuh"
template <class R, bool VALUES>
KV_DEV void unpacked(const uint8_t* tile, const uint8_t* table, const uint8_t* own, float* out) {{
  const kv::Planes<R, {tokens}> planes{{tile}};
  const int lane = kv::thread() % 32, g = lane / 4, j = lane % 4;
  for (int turn = 0; turn < (VALUES ? 4 : 2); ++turn) {{
    constexpr int REGS = VALUES ? R::V_REGS : R::K_REGS;
    const int token = VALUES ? 4 * turn + j : 8 * turn + g;
    uint32_t r[REGS];
    float scale;
    if constexpr (VALUES) {{
      const auto held = R::hold_values(table, own, g, lane);
      R::values(planes, held, token, g, lane, r);
      scale = R::v_scale(planes, token);
    }} else {{
      const auto held = R::hold_keys(table, own, j, lane);
      R::keys(planes, held, token, j, lane, r);
      scale = R::k_scale(planes, token, 0);
    }}
    for (int e = 0; e < 2 * REGS; ++e) {{
      float& to = out[token * {dim} + kv::model_channel<R>(own, VALUES ? R::v_channel(g, e) : R::k_channel(j, e))];
      const float x = kv::half_float((uint16_t)(r[e / 2] >> e % 2 * 16)) * scale;
      to = to == -100.0f ? x : 1e30f;  // a channel is written once
    }}
  }}
}}
using K = kv::ReadGhost<{dim}, {total}, false>;
using V = kv::ReadGhost<{dim}, {total}, true, true>;
KV_KERNEL void unpack(const uint8_t* tiles, const uint8_t* tables, float* keys, float* values) {{
  KV_DYNAMIC_SHARED(shared);
  const int h = kv::block_x();
  K::fill(shared, tables, kv::thread(), 32);
  uint8_t *levels = shared + K::TABLE, *own = levels + V::TABLE;  // what the keys read comes first
  using Own = kv::OwnTables<K, V>;
  Own::fill(own, tables + h * V::SOURCE, tables + h * V::SOURCE, kv::thread(), 32);
  kv::sync_threads();
  const uint8_t* tile = tiles + h * {tokens} * K::plane_bytes(0);
  unpacked<K, false>(tile, shared, own, keys + h * {tokens} * {dim});
  unpacked<V, true>(tile, levels, own + Own::VALUES, values + h * {tokens} * {dim});
}}
extern "C" void run(const uint8_t* tiles, const uint8_t* tables, float* keys, float* values, int64_t heads) {{
  const int shared = K::TABLE + V::TABLE + kv::OwnTables<K, V>::BYTES;
  kv::launch((int)heads, 1, 1, 32, shared, unpack, tiles, tables, keys, values);
}}
"""


OFTEN = (2, 96), (2.5, 64), (3, 128), (3.5, 128), (4, 128)


@pytest.mark.parametrize(
    ("bits", "dim"),
    [
        pytest.param(bits, dim, marks=[] if (bits, dim) in OFTEN else pytest.mark.wide)
        for dim in (64, 96, 128, 192, 256)
        for bits in ALLOWED
        if dim * bits % 32 == 0
    ],
)  # fmt: skip
def test_every_kind_of_pair(bits: float, dim: int) -> None:
    """Heads from even to steep, arbitrary bytes."""
    codec, rng = Ghost(bits), torch.Generator().manual_seed(dim)
    steep = torch.linspace(0, 8, 12)[:, None]
    cost = torch.exp(steep * torch.randn(12, dim, generator=rng)).double().sort(-1, descending=True).values
    widths, _ = share_bits(cost, codec.total)
    full = widths.view(12, -1, 2)[:, : dim // 2 - PARTS].flatten(0, 1).unique(dim=0).tolist()
    assert [tuple(x) for x in full] == kinds(codec.total)
    heads, ones = len(widths), torch.ones(1, len(widths), dim)
    order = torch.stack([torch.randperm(dim, generator=rng) for _ in range(heads)])[None]
    params = {"order": order.short(), "factor": ones, "weight": ones, "widths": widths[None].to(torch.uint8)}
    codes = torch.randint(0, 256, (1, heads, TOKENS, int(dim * bits) // 8), generator=rng, dtype=torch.uint8)
    want = codec.from_code(codec.decode({"codes": codes}, params), params)[0]
    tables = read_tables({**params, "centre": 0 * ones}, codec.total)[0]
    for table_shrink in (0, 1, 2) if codec.total in FEWER else (0,):
        source = UNPACK.format(dim=dim, total=codec.total, tokens=TOKENS)
        lib = harness.build("\n".join([*definitions(table_shrink), source]))
        found = [torch.full((heads, TOKENS, dim), -100.0) for _ in range(2)]
        lib.call("run", codes[0].contiguous(), tables, *map(harness.Out, found), heads)
        for x in found:
            assert bool(((x - want).abs() < 1e-3 * want.abs() + 1e-6).all())


# -- decoders ----------------------------------------------------------------------------------------------------------


class One(Ghost):
    """Ghost whose constants are those of all sequences together."""

    __module__ = Ghost.__module__  # by which its kernels are found

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """As ``Ghost.fit``, with B = 1."""
        assert sample.tensor is not None
        return super().fit(site, Sample(sample.tensor.transpose(0, 1).flatten(1, 2)[None]))


MEANS = (
    Case((130, 64), means=Means((5, 1000), each=True), group=8),
    Case((130, 64), means=Means((5, 1000), few=8), heads=2),
)


@pytest.mark.parametrize(("codec", "dim"), [(Ghost(3), 128), (One(2.5), 64)])
def test_decode(codec: Ghost, dim: int) -> None:
    check_all(codec, codec, dim, (*CASES, *MEANS) if dim == 128 else CASES[:3])


@pytest.mark.wide
@pytest.mark.parametrize(("bits", "dim"), [(3, 128), (4, 64)])
def test_decode_of_mixed_channels(bits: float, dim: int) -> None:
    """Of keys and values; dense tokens, means and windows stay in the model's basis."""
    klt = Klt(bits, "klt")
    cases = (*CASES, *MEANS) if dim == 128 else (CASES[0], CASES[7])  # with dense tokens, and in one split without
    check_all(klt, klt, dim, cases)


@pytest.mark.parametrize("group", [4, 8])
def test_dense_tokens_join(group: int) -> None:
    """Among codes of values with large means, in a split of their own, or alone."""
    cases = (
        Case((130, 7, 0, 33), heads=2, splits=3, alone=True, dense=(3, 0, 77, 1), sinks=True, group=group),
        Case((65, 0, 100), dense=(5, 1, 40), dense_start=(2, 0, 30), splits=2, shift=20.0, group=group, order=7),
        Case((0, 40), dense=(4, 4), values=1e-3, group=group),
    )
    check_all(Ghost(4), Ghost(4), 64, cases)


def test_teams_share_levels() -> None:
    """Each has the order and the kinds of its own piece, of any sequence and head; pieces without codes."""
    cases = (
        Case((130, 7, 64), heads=2, group=8, dense=(0, 0, 1)),
        Case((0, 1, 15, 65), group=1, heads=2),
        Case((200, 190, 10), start=(130, 150, 10), splits=3, group=3),
        Case((130, 64, 33), means=Means((5, 1000, 3), few=8), heads=2),
    )
    check_all(Ghost(3), Ghost(3), 64, cases, Geometry(teams=2))
