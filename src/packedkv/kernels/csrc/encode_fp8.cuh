// FP8: E4M3 codes, with one fp16 scale per token and head, or none.
//
// Planes: codes [D], scale fp16 [1] if SCALED.
#pragma once
#include "encode_int.cuh"

namespace kv {

template <int D, bool SCALED> struct EncodeFp8 {
  KV_CONST int DIM = D, TEAM = 8, SCRATCH = 0, N = numbers_of(D, 8), PLANES = SCALED ? 2 : 1;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? D : 2; }

  KV_DEV static void quad(const float (&y)[N], int part, uint32_t keep, bool live, uint8_t* const (&at)[PLANES]) {
    float s = 1.0f, r = 1.0f;
    if constexpr (SCALED) {
      float high = 0.0f;
      KV_UNROLL for (int k = 0; k < N; k++) high = maximum(high, magnitude(y[k]));
      uint32_t scale = held_scale<448>(team_max<8>(high), 0.0f);
      s = half_float((uint16_t)scale);
      r = rcp_fast(s);
      if (live && part == 0) *(uint16_t*)at[1] = (uint16_t)(scale & keep);
    }
    KV_UNROLL for (int i = 0; i < N / 4; i++) {
      float q[4];
      KV_UNROLL for (int e = 0; e < 4; e++) {
        q[e] = y[4 * i + e];
        if (SCALED) {  // division loses the sign of a zero, which E4M3 keeps
          uint32_t sign = float_bits(q[e]) & 0x80000000u;
          q[e] = bits_float((float_bits(quotient(q[e], s, r)) & 0x7fffffffu) | sign);
        }
      }
      uint32_t word = e4m3_pair(q[0], q[1]) | e4m3_pair(q[2], q[3]) << 16;
      if (live) ((uint32_t*)at[0])[8 * i + place_of<D>(i, part)] = word & keep;
    }
  }
};

}  // namespace kv
