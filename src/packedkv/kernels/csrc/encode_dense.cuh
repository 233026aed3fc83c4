// Dense: 16-bit numbers as they are, BF16 or fp16.
//
// Planes: data [D].
#pragma once
#include "encode.cuh"

namespace kv {

template <int D, bool BF16> struct EncodeDense {
  KV_CONST int DIM = D, TEAM = 8, SCRATCH = 0, N = numbers_of(D, 8), PLANES = 1;
  KV_FUNCTION int plane_bytes(int) { return 2 * D; }

  KV_DEV static uint32_t bits(float x) { return BF16 ? bf16_bits(x) : half_bits(x); }
  KV_DEV static void quad(const float (&y)[N], int part, uint32_t keep, bool live, uint8_t* const (&at)[PLANES]) {
    if (!live) return;
    KV_UNROLL for (int i = 0; i < N / 4; i++) {
      uint32_t* to = (uint32_t*)(at[0] + 64 * i + 8 * place_of<D>(i, part));
      to[0] = (bits(y[4 * i]) | bits(y[4 * i + 1]) << 16) & keep;
      to[1] = (bits(y[4 * i + 2]) | bits(y[4 * i + 3]) << 16) & keep;
    }
  }
};

}  // namespace kv
