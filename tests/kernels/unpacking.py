"""What a reader makes of every byte of a tile, channel by channel, on the emulated machine."""

import ctypes

import torch
from torch import Tensor

from packedkv.codec import Codec, Params, Payload, Role
from packedkv.kernels.spec import definitions
from packedkv.kernels.spec import reader as reader_of
from tests.kernels import harness

_SOURCE = """
#include "tile.cuh"
#include "{header}"
using R = {reader};
KV_DEV void store(float* row, int channel, uint32_t half2, int e, float scale, int* bad) {{
  const float x = kv::half_float((uint16_t)(half2 >> e % 2 * 16));
  if (!(x - x == 0.0f)) *bad = 1;
  if (channel >= 0) row[channel] = row[channel] == -1.0f ? scale * x : 1e30f;  // a channel is written once
}}
template <class Q> KV_DEV float value_scale(const kv::Planes<Q, {tokens}>& planes, int token) {{
  if constexpr (Q::HAS_V_SCALE) return Q::v_scale(planes, token);
  return 1.0f;
}}
KV_KERNEL void unpack(const uint8_t* tile, const uint8_t* source, float* out, int* bad) {{
  KV_DYNAMIC_SHARED(table);
  const kv::Planes<R, {tokens}> planes{{tile}};
  const int lane = kv::thread() % 32, warp = kv::thread() / 32;
  if constexpr (R::TABLE > 0) R::fill(table, source, kv::thread(), 64);
  kv::sync_threads();
  for (int token = 8 * warp; token < {tokens}; token += 16) {{{body}
  }}
}}
extern "C" void run(const uint8_t* tile, const uint8_t* source, float* out, int* bad) {{
  kv::launch(1, 1, 1, 64, R::TABLE, unpack, tile, source, out, bad);
}}
extern "C" int table_bytes() {{ return R::TABLE; }}
"""
_BODY: dict[Role, str] = {
    "key": """
    const int at = token + lane / 4, part = lane % 4;
    uint32_t r[R::K_REGS];
    R::keys(planes, table, at, part, lane, r);
    for (int e = 0; e < 2 * R::K_REGS; ++e) {
      const float scale = R::k_scale(planes, at, e / (2 * R::K_REGS / R::GROUPS)) * R::k_weight(e);
      store(out + at * DIM, R::k_channel(part, e), r[e / 2], e, scale, bad);
    }""",
    "value": """
    for (int odd = 0; odd < 2; ++odd) {
      const int at = token + lane % 4 * 2 + odd, part = lane / 4;
      uint32_t r[R::V_REGS];
      R::values(planes, table, at, part, lane, r);
      for (int e = 0; e < 2 * R::V_REGS; ++e) {
        const float scale = value_scale<R>(planes, at) * R::v_weight(e);
        store(out + at * DIM, R::v_channel(part, e), r[e / 2], e, scale, bad);
      }
    }""",
}


def unpacked(
    codec: Codec, dim: int, payload: Payload | None, params: Params, tokens: int, role: Role, table_shrink: int = 0
) -> Tensor:
    """What a reader makes of a tile: float32 ``[tokens, dim]``; of bytes 255 without a payload."""
    found = reader_of(codec, dim, role)
    table = torch.zeros(1, 1, dtype=torch.uint8) if found.tables is None else found.tables(params)
    body = _BODY[role].replace("DIM", str(dim))
    source = _SOURCE.format(header=found.header, reader=found.type, tokens=tokens, body=body)
    lib = harness.build("\n".join([*definitions(table_shrink), source]))
    assert lib.enter("table_bytes", result=ctypes.c_int) == (found.shared, *found.fewer)[table_shrink]
    out, bad = torch.full((tokens, dim), -1.0), torch.zeros(1, dtype=torch.int32)
    lib.call("run", tile_of(codec, dim, payload, tokens), table[:1], harness.Out(out), harness.Out(bad))
    assert payload is None or not bad.item()
    return out


def tile_of(codec: Codec, dim: int, payload: Payload | None, tokens: int) -> Tensor:
    """Bytes of the planes of one role; all 255 without a payload."""
    planes = []
    for field in codec.layout(dim).fields:
        size = field.nbytes * tokens
        plane = torch.full((-(-size // 16) * 16,), 255, dtype=torch.uint8)
        if payload is not None:
            plane[:size] = payload[field.name][0, 0].contiguous().view(torch.uint8).flatten()
        planes.append(plane)
    return torch.cat(planes)
