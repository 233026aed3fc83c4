"""Readers of octopus and hqmq: every code at every place of a row, then whole decoders."""

import collections
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from packedkv.codec import ROLES, Codec, Params, Payload, Role, Site
from packedkv.codecs.hqmq import RADII, SIZES, Hqmq
from packedkv.codecs.octopus import JOINT_BITS, Octopus
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.kernels.codecs import hqmq as hqmq_kernels
from packedkv.kernels.cuda import build
from packedkv.kernels.spec import definitions
from packedkv.kernels.spec import reader as reader_of
from packedkv.ops.split_words import pack_split
from tests.kernels import harness
from tests.kernels.decode_cases import CASES, Case, Geometry, check_all, each_in_turn, two_dims_in_turn
from tests.kernels.offline import architectures_in_turn, compile_kernels
from tests.kernels.unpacking import tile_of, unpacked

DIMS = [64, 96, 128, 192, 256, 512]

PAIR = """
#include "tile.cuh"
#include "read_hqmq.cuh"
template <int N, class Channel, class Weight>
KV_DEV void store(float* row, int part, const uint32_t (&r)[N], float scale, Channel channel, Weight weight) {{
  for (int e = 0; e < 2 * N; ++e) {{
    float& to = row[channel(part, e)];
    to = to == -1.0f ? scale * weight(e) * kv::half_float((uint16_t)(r[e / 2] >> e % 2 * 16)) : 1e30f;
  }}
}}
using K = {key};
using V = {value};
template <bool DEAD>
KV_DEV void both(const uint8_t* tile, const uint8_t* k_source, const uint8_t* v_source, float* keys, float* values) {{
  KV_DYNAMIC_SHARED(shared);
  const kv::Planes<K, {tokens}> planes{{tile}};
  const int lane = kv::thread() % 32, warp = kv::thread() / 32;
  K::fill(shared, k_source, kv::thread(), 64);
  V::fill(shared + K::TABLE, v_source, kv::thread(), 64);
  kv::sync_threads();
  for (int token = 8 * warp; token < {tokens}; token += 16) {{
    int at = token + lane / 4;
    uint32_t k[K::K_REGS], v[V::V_REGS];
    float unit[1];
    kv::Unpacks<K, DEAD>::Reader::keys(planes, shared, at, lane % 4, lane, k);
    K::k_scales(planes, at, unit);
    store(keys + at * {D}, lane % 4, k, unit[0] * K::K_SCALE_UNIT, K::k_channel, K::k_weight);
    for (int odd = 0; odd < 2; ++odd) {{
      at = token + lane % 4 * 2 + odd;
      kv::Unpacks<V, DEAD>::Reader::values(planes, shared + K::TABLE, at, lane / 4, lane, v);
      store(values + at * {D}, lane / 4, v, V::v_scale(planes, at), V::v_channel, V::v_weight);
    }}
  }}
}}
KV_KERNEL void alive(const uint8_t* tile, const uint8_t* k_source, const uint8_t* v_source, float* keys,
                     float* values) {{
  both<false>(tile, k_source, v_source, keys, values);
}}
KV_KERNEL void dead(const uint8_t* tile, const uint8_t* k_source, const uint8_t* v_source, float* keys,
                    float* values) {{
  both<true>(tile, k_source, v_source, keys, values);
}}
extern "C" void run(const uint8_t* tile, const uint8_t* k_source, const uint8_t* v_source, float* keys,
                    float* values, int64_t slots) {{
  constexpr int TABLES = K::TABLE + V::TABLE;
  if (slots) kv::launch(1, 1, 1, 64, TABLES, dead, tile, k_source, v_source, keys, values);
  else kv::launch(1, 1, 1, 64, kv::with_reach<K, V>(TABLES), alive, tile, k_source, v_source, keys, values);
}}
"""


def table_of(codec: Hqmq, params: Params, role: Role) -> Tensor:
    return hqmq_kernels.read_tables(params, hqmq_kernels.crossed(codec, role))


def unpacked_pair(
    codec: Hqmq, dim: int, payload: Payload | None, params: tuple[Params, Params], tokens: int, dead: bool = False,
    table_shrink: int = 0,
) -> Tensor:  # fmt: skip
    """What the readers of keys and values make of the same tile, with a table each: float32 ``[2, tokens, dim]``.

    ``dead``: as tiles with dead slots are read, and no shared memory but the tables.
    """
    readers = {role: hqmq_kernels.read_type(codec, dim, role) for role in ("key", "value")}
    lib = harness.build("\n".join([*definitions(table_shrink), PAIR.format(tokens=tokens, D=dim, **readers)]))
    keys, values = torch.full((2, tokens, dim), -1.0)
    sources = [table_of(codec, constants, role)[:1] for constants, role in zip(params, ROLES, strict=True)]
    lib.call("run", tile_of(codec, dim, payload, tokens), *sources, harness.Out(keys), harness.Out(values), int(dead))
    return torch.stack([keys, values])


def codes_everywhere(count: int, places: int) -> tuple[Tensor, int]:
    """Codes ``[1, 1, tokens, places]`` that take every value at every place, and how many tokens that takes."""
    tokens = -(-count // 16) * 16
    return ((torch.arange(tokens)[:, None] + 37 * torch.arange(places)) % count)[None, None], tokens


def numbers(tokens: int) -> Tensor:
    """Scales over the whole range of fp16: ``[1, 1, tokens, 1]``."""
    return (
        torch.exp2(torch.arange(tokens) % 29 - 14.0).mul(1 + torch.arange(tokens) % 7 / 8).half()[None, None, :, None]
    )


OCTOPUS = [
    Octopus(3, 1),
    Octopus(4, 2),
    Octopus(5, 3, norm="fp32"),
    Octopus(3, 2),
    Octopus(4, 3),
    Octopus(2, 6),
    Octopus(5, 4),
    Octopus(1, 1),
]


@pytest.mark.parametrize(("codec", "dim"), two_dims_in_turn(OCTOPUS, (64, 96, 192)), ids=str)
def test_octopus_codes(codec: Octopus, dim: int) -> None:
    params = codec.fit(Site(1, "key", 1, dim))
    codes, tokens = codes_everywhere(2**codec.code_bits, -(-dim // 3))
    if dim not in (64, 96) and codec.code_bits > JOINT_BITS:  # each 15th of many: every bit of each place still varies
        codes = codes[:, :, ::15]
        tokens = codes.shape[2] // 16 * 16
        codes = codes[:, :, :tokens]
    norm = numbers(tokens) if codec.norm == "fp16" else numbers(tokens).float() * 1.1
    payload = {**pack_split(codes, codec.code_bits, codec.low_bits), "norm": norm}
    want = codec.decode(payload, params)[0, 0]
    got = unpacked(codec, dim, payload, params, tokens, "key")
    steps = 1 if codec.code_bits <= JOINT_BITS else 3  # a direction, a length and their product are rounded
    scale = norm[0, 0].float()
    torch.testing.assert_close(got / scale, want / scale, rtol=steps * 2.0**-11 * 1.001, atol=1e-6)
    unpacked(codec, dim, None, params, tokens, "key")  # dead slots hold any bits: reads outside of shared memory fault


HQMQ = [Hqmq(s, r, codebook="int8" if (s, r) == (48, 3) else "fp16") for s in SIZES for r in RADII]


def hqmq_payload(codec: Hqmq, dim: int) -> tuple[Payload, int]:
    """All codes at all places, with all radii, and how many tokens that takes."""
    codes, tokens = codes_everywhere(24 * codec.s, dim // 4)
    radii = (torch.arange(tokens)[:, None] // 3 + 5 * torch.arange(dim // 4)) % 2**codec.r
    return {**codec.pack(codes, radii[None, None]), "scale": numbers(tokens)}, tokens


def assert_decoded(codec: Hqmq, payload: Payload, params: Params, got: Tensor) -> None:
    scale = payload["scale"][0, 0].float()
    want = codec.decode(payload, params)[0, 0] / scale
    rounded = 2 if codec.codebook == "int8" else 1  # the product, and the table
    torch.testing.assert_close(got / scale, want, rtol=2.0**-11 * (rounded + 0.001), atol=2.0**-14)


@pytest.mark.parametrize(("codec", "dim"), [*each_in_turn(HQMQ, DIMS), (Hqmq(96, 3), 128)], ids=str)
def test_hqmq_codes(codec: Hqmq, dim: int) -> None:
    for role in ROLES:
        params = codec.fit(Site(1, role, 1, dim))
        payload, tokens = hqmq_payload(codec, dim)
        assert_decoded(codec, payload, params, unpacked(codec, dim, payload, params, tokens, role))
        unpacked(codec, dim, None, params, tokens, role)  # any bits


@pytest.mark.parametrize(("parts", "most"), [(4, [1, 2, 1]), (8, [1, 1])])
def test_words_of_rows_of_11_lie_in_banks_of_their_own(parts: int, most: list[int]) -> None:
    """``Stream::TURNED``: so many words in one bank of each load but the last; in their own order two of each."""
    found = re.search(r"PARTS == 4 \? (0x\w+)u : (0x\w+)u", (build.CSRC / "bits.cuh").read_text())
    assert found is not None
    turned, end = int(found[1 + (parts == 8)], 16), len(most) - 1
    for order, want in ((turned, most), (0, [2] * len(most))):
        for load, conflicts in enumerate(want):
            words = collections.defaultdict[int, set[int]](set)
            for lane in range(32):  # keys: token g, part j; values: token 2 j, part g
                token, part = (lane // 4, lane % 4) if parts == 4 else (2 * (lane % 4), lane // 4)
                place = end - load if order >> lane & 1 and load in (0, end) else load
                word = 11 * token + 352 // parts * part // 32 + place
                words[word % 32].add(word)
            assert max(map(len, words.values())) == conflicts


@pytest.mark.parametrize(("codec", "dim"), each_in_turn(HQMQ, DIMS[::-1]), ids=str)
def test_hqmq_codes_of_both_roles(codec: Hqmq, dim: int) -> None:
    """Tables of keys and values beside each other; other ones, so that none stands in for the other."""
    params = codec.fit(Site(1, "key", 1, dim)), codec.fit(Site(1, "value", 1, dim))
    payload, tokens = hqmq_payload(codec, dim)
    for dead in (False, True):
        if codec.s == 24 or not dead:  # the tables that are interleaved, read as where slots are dead
            both = unpacked_pair(codec, dim, payload, params, tokens, dead)
            for constants, got in zip(params, both, strict=True):
                assert_decoded(codec, payload, constants, got)
        unpacked_pair(codec, dim, None, params, tokens, dead)


def _halvings() -> list[Any]:
    """Codecs and how often the room of their tables is halved, all that there is; most are wide."""
    made = []
    for codec in (*HQMQ, *OCTOPUS[:5]):
        most = len(reader_of(codec, 64, "key").fewer)
        for n in range(1, most + 1):
            chosen = n == most and (isinstance(codec, Octopus) or codec.r != 3 or codec.s in (24, 96))
            made.append(pytest.param(codec, n, marks=[] if chosen else [pytest.mark.wide]))
    return made


@pytest.mark.parametrize(("codec", "table_shrink"), _halvings(), ids=str)
def test_fewer_copies_of_tables_give_the_same_numbers(codec: Codec, table_shrink: int) -> None:
    """As GPUs with less shared memory have them."""
    dim = 64
    params = tuple(codec.fit(Site(1, role, 1, dim)) for role in ROLES)
    if isinstance(codec, Octopus):
        codes, tokens = codes_everywhere(2**codec.code_bits, -(-dim // 3))
        norm = numbers(tokens).float() if codec.norm == "fp32" else numbers(tokens)
        payload = {**pack_split(codes, codec.code_bits, codec.low_bits), "norm": norm}
        usual = unpacked(codec, dim, payload, params[0], tokens, "key")
        assert torch.equal(unpacked(codec, dim, payload, params[0], tokens, "key", table_shrink), usual)
        unpacked(codec, dim, None, params[0], tokens, "key", table_shrink)
        return
    assert isinstance(codec, Hqmq)
    payload, tokens = hqmq_payload(codec, dim)
    for dead in (False, True):
        both = unpacked_pair(codec, dim, payload, params, tokens, dead and codec.s == 24, table_shrink)
        for constants, got in zip(params, both, strict=True):
            assert_decoded(codec, payload, constants, got)
        unpacked_pair(codec, dim, None, params, tokens, dead, table_shrink)
    for role, constants in zip(ROLES, params, strict=True):
        alone = unpacked(codec, dim, payload, constants, tokens, role, table_shrink)
        assert_decoded(codec, payload, constants, alone)


SAW = SawInt4()


@pytest.mark.parametrize(("codec", "dim"), each_in_turn(OCTOPUS[:3], [64, 96, 128, 192, 256]), ids=str)
def test_octopus_decode(codec: Octopus, dim: int) -> None:
    check_all(codec, SAW, dim, CASES)


@pytest.mark.parametrize(
    ("codec", "dim"), each_in_turn(map(Hqmq, (24, 48, 96, 192, 24), (3, 4, 4, 6, 4)), (64, 96, 128, 192, 256))
)
def test_hqmq_decode(codec: Hqmq, dim: int) -> None:
    # scores in the hundreds: two keys nearly tie, and chance says whose rounding tells them apart better
    cases = [replace(case, slack=2.0) if case.spread else case for case in CASES]
    check_all(codec, codec, dim, cases)


@pytest.mark.parametrize("role", ["key", "value"])
def test_hqmq_beside_another_codec(role: Role) -> None:
    codec = Hqmq(24, 3)
    check_all(*((codec, SAW) if role == "key" else (SAW, codec)), 64, CASES)


@pytest.mark.parametrize(
    ("codec", "table_shrink", "dim"), [(Hqmq(24, 4), 2, 64), (Hqmq(96, 4), 2, 128), (Hqmq(192, 6), 1, 96)], ids=str
)
def test_hqmq_decode_with_fewer_copies(codec: Hqmq, table_shrink: int, dim: int) -> None:
    check_all(codec, codec, dim, CASES[:5], Geometry(tile=16, stages=1, table_shrink=table_shrink))


@pytest.mark.parametrize(
    ("codec", "teams", "warps", "stages"),
    [
        pytest.param(
            codec, teams, warps, stages, marks=[] if (teams + stages + (codec.s == 48)) % 2 else [pytest.mark.wide]
        )
        for codec in (Hqmq(24, 3), Hqmq(48, 4))
        for teams, warps in ((2, 2), (3, 1))
        for stages in (1, 2, 3)
    ],
    ids=str,
)
def test_teams_share_tables(codec: Hqmq, teams: int, warps: int, stages: int) -> None:
    """More pieces than teams, pieces with fewer tiles than stages, pieces of dense tokens alone."""
    cases = (
        Case((130, 7, 64, 0, 200, 33, 1), heads=2, group=8),
        Case((130, 7, 64, 300), heads=2, group=3, splits=2, dense=(3, 0, 17, 1), sinks=True, order=5),
    )
    check_all(codec, codec, 64, cases, Geometry(tile=16, warps=warps, teams=teams, stages=stages))


DECODER = """
#include "decode.cuh"
#include "read_hqmq.cuh"
#include "read_octopus.cuh"
#include "read_saw.cuh"
using Kernel = kv::Decoder<{key}, {value}, 128, 64, 32, 8, 2, false, -1, {heads}>;
KV_KERNEL void KV_BOUNDS(256, 1) decode(KV_GRID_CONSTANT kv::DecodeArgs a) {{ Kernel::run(a); }}
"""


@pytest.mark.parametrize(
    ("codec", "heads", "products", "most", "arch"),
    architectures_in_turn(
        [
            (Octopus(3, 1), 8, 50, 2.2),
            (Octopus(4, 2), 8, 50, 2.25),
            (Octopus(5, 3), 8, 50, 2.6),
            (Hqmq(24, 3), 8, 48, 2.55),
            (Octopus(3, 1), 4, 40, 1.75),
            (Octopus(4, 2), 4, 40, 1.84),
            (Octopus(5, 3), 4, 36, 2.4),
            (Hqmq(24, 3), 4, 32, 2.35),
            (Hqmq(48, 4), 4, 32, 2.8),
        ]
    ),
    ids=str,
)
def test_machine_code(codec: Codec, heads: int, products: int, most: float, arch: int) -> None:
    """No spills, and at most so many instructions for a number of the cache on sm_90, a quarter more elsewhere."""
    if isinstance(codec, Octopus):
        pair = reader_of(codec, 128, "key").type, "kv::ReadSaw<128>"
    else:
        assert isinstance(codec, Hqmq)
        pair = hqmq_kernels.read_type(codec, 128, "key"), hqmq_kernels.read_type(codec, 128, "value")
    kernel = compile_kernels(DECODER.format(key=pair[0], value=pair[1], heads=heads), arch)["decode"]
    assert kernel.stack == 0
    assert not kernel.spills()
    ways = [loop.shortest("HMMA", products) for loop in kernel.loops_with("HMMA", "LDGSTS")]
    assert min(map(len, ways)) * 32 / (2 * 32 * 128) <= most * (1 if arch == 90 else 1.25)
