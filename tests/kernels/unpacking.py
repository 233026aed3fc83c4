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
KV_DEV void store(float* row, int channel, uint32_t half2, int e, float scale, int* bad) {{
  const float x = kv::half_float((uint16_t)(half2 >> e % 2 * 16));
  if (!(x - x == 0.0f)) *bad = 1;
  row[channel] = row[channel] == -1.0f ? scale * x : 1e30f;  // a channel is written once
}}
template <class R> KV_DEV float value_scale(const kv::Planes<R, {tokens}>& planes, int token) {{
  if constexpr (R::HAS_V_SCALE) return R::v_scale(planes, token);
  return 1.0f;
}}
template <class R>
KV_DEV void tile(const uint8_t* bytes, const uint8_t* source, uint8_t* table, float* out, int* bad) {{
  const kv::Planes<R, {tokens}> planes{{bytes}};
  const int lane = kv::thread() % 32, warp = kv::thread() / 32;
  uint8_t* own = table + kv::align16(R::TABLE);
  if constexpr (R::TABLE > 0) R::fill(table, source, kv::thread(), 64);
  if constexpr (kv::own_bytes<R>(0) > 0) R::fill_own(own, source, kv::thread(), 64);
  kv::sync_threads();
  for (int token = 8 * warp; token < {tokens}; token += 16) {{{body}
  }}
}}
KV_KERNEL void unpack(const uint8_t* bytes, const uint8_t* source, int stride, float* out, int* bad) {{
  KV_DYNAMIC_SHARED(table);
  const int head = kv::block_x();
  tile<{reader}>(bytes + head * kv::planes_bytes<{reader}>({tokens}), source + head * stride, table,
                 out + head * {tokens} * {dim}, bad);
}}
extern "C" void run(const uint8_t* bytes, const uint8_t* source, int64_t stride, float* out, int* bad, int64_t heads) {{
  constexpr int SHARED = kv::align16({reader}::TABLE) + kv::own_bytes<{reader}>(0);
  kv::launch((int)heads, 1, 1, 64, SHARED, unpack, bytes, source, (int)stride, out, bad);
}}
extern "C" int table_bytes() {{ return {reader}::TABLE; }}
"""
_BODY: dict[Role, str] = {
    "key": """
    const int at = token + lane / 4, part = lane % 4;
    const auto held = kv::held_of_keys<R>(table, own, part, lane);
    uint32_t r[R::K_REGS];
    R::keys(planes, held, at, part, lane, r);
    for (int e = 0; e < 2 * R::K_REGS; ++e) {
      const float scale = R::k_scale(planes, at, e / (2 * R::K_REGS / R::GROUPS)) * R::k_weight(e);
      const int c = R::k_channel(part, e);
      if (c >= 0) store(out + at * DIM, kv::model_channel<R>(own, c), r[e / 2], e, scale, bad);
    }""",
    "value": """
    for (int odd = 0; odd < 2; ++odd) {
      const int at = token + lane % 4 * 2 + odd, part = lane / 4;
      const auto held = kv::held_of_values<R>(table, own, part, lane);
      uint32_t r[R::V_REGS];
      R::values(planes, held, at, part, lane, r);
      for (int e = 0; e < 2 * R::V_REGS; ++e) {
        const float scale = value_scale<R>(planes, at) * R::v_weight(e);
        const int c = R::v_channel(part, e);
        if (c >= 0) store(out + at * DIM, kv::model_channel<R>(own, c), r[e / 2], e, scale, bad);
      }
    }""",
}


def unpacked(
    codec: Codec, dim: int, payload: Payload | None, params: Params, tokens: int, role: Role, table_shrink: int = 0
) -> Tensor:
    """What a reader makes of a tile of each head: float32 ``[H, tokens, dim]``; without a payload all bytes are 255."""
    found = reader_of(codec, dim, role)
    table = torch.zeros(1, 1, dtype=torch.uint8) if found.tables is None else found.tables(params).flatten(0, -2)
    body = _BODY[role].replace("DIM", str(dim))
    source = _SOURCE.format(header=found.header, reader=found.type, tokens=tokens, dim=dim, body=body)
    lib = harness.build("\n".join([*definitions(table_shrink), source]))
    assert lib.enter("table_bytes", result=ctypes.c_int) == (found.shared, *found.fewer)[table_shrink]
    bytes_ = tiles_of(codec, dim, payload, tokens)
    out, bad = torch.full((len(bytes_), tokens, dim), -1.0), torch.zeros(1, dtype=torch.int32)
    stride = table.shape[1] if len(table) > 1 else 0
    lib.call("run", bytes_, table, stride, harness.Out(out), harness.Out(bad), len(bytes_))
    assert payload is None or not bad.item()
    return out


def tiles_of(codec: Codec, dim: int, payload: Payload | None, tokens: int) -> Tensor:
    """Bytes of the planes of one role, ``[H, bytes]``; all 255 and one head without a payload."""
    planes, heads = [], 1 if payload is None else next(iter(payload.values())).shape[1]
    for field in codec.layout(dim).fields:
        size = field.nbytes * tokens
        plane = torch.full((heads, -(-size // 16) * 16), 255, dtype=torch.uint8)
        if payload is not None:
            plane[:, :size] = payload[field.name][0].contiguous().view(torch.uint8).flatten(1)
        planes.append(plane)
    return torch.cat(planes, 1)
