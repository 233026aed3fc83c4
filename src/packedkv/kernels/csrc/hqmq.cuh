// Bits of hqmq (packedkv/codecs/hqmq.py): row and sign of a code of W bits and a radius of R bits, for each
// chunk of four channels.
#pragma once
#include "platform.cuh"

namespace kv {

template <int D, int S, int R> struct HqmqFields {
  static_assert((S == 24 || S == 48 || S == 96 || S == 192) && (R == 3 || R == 4 || R == 6), "what the codec has");
  static_assert(D % 32 == 0, "whole bytes of single bits");
  KV_CONST int W = S == 24 ? 10 : S == 48 ? 11 : S == 96 ? 12 : 13;
  KV_CONST int CHUNKS = D / 4;
  KV_CONST int EIGHTH = CHUNKS / 8;
  // 16 bits a chunk: sign, row, HELD bits of the radius, and its SPARE high bits in a field of their own; or
  KV_CONST bool UNITS = W + R >= 16;
  KV_CONST int HELD = 16 - W;
  KV_CONST int SPARE = UNITS ? W + R - 16 : 0;
  // LOW bits of the row; 4 bits of radius, the sign among them if SIGNED; planes of the row's bit 8 and of the sign
  KV_CONST int LOW = S == 24 ? 8 : W - 1;
  KV_CONST bool SIGNED = R == 3;
  KV_CONST int BITS = UNITS ? 0 : (S == 24) + !SIGNED;

  KV_CONST int PLANES = 2 + (UNITS ? SPARE > 0 : BITS ? 2 : 1);
  KV_FUNCTION int plane_bytes(int p) {
    if (p == PLANES - 1) return 2;
    if (p == 0) return UNITS ? 2 * CHUNKS : CHUNKS * LOW / 8;
    if (p == 1) return UNITS ? CHUNKS * SPARE / 8 : CHUNKS / 2;
    return BITS * EIGHTH;
  }
};

}  // namespace kv
