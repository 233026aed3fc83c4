// SAW-INT4: token-wise four bits, rounded zero points, neighbouring nibbles. Rotation is the role's:
// Role<EncodeSaw<D>, ORDER>. FLOAT_ZERO: z is not rounded (zero=float), and quotients are taken in double.
//
// Planes: codes [D / 2], scale and zero fp16 [2].
#pragma once
#include "encode_int.cuh"

namespace kv {

template <int D, bool FLOAT_ZERO = false> struct EncodeSaw {
  KV_CONST int DIM = D, TEAM = 8, SCRATCH = 0, N = numbers_of(D, 8), PLANES = 2;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? D / 2 : 4; }

  KV_DEV static void quad(const float (&y)[N], int part, uint32_t keep, bool live, uint8_t* const (&at)[PLANES]) {
    float low = y[0], high = y[0];
    KV_UNROLL for (int k = 1; k < N; k++) low = minimum(low, y[k]), high = maximum(high, y[k]);
    low = team_min<8>(low);
    high = team_max<8>(high);
    // no scale below 2^(floor(log2 max|y|) - 9) or 2^-24
    int32_t exponent = (int32_t)(float_bits(magnitude(maximum(high, -low))) >> 23) - 9;  // a -0 is no big number
    float least = bits_float((uint32_t)(exponent > 103 ? exponent : 103) << 23);
    float wanted = maximum(quotient(sub(high, low), 15.0f, 1.0f / 15.0f), least);
    uint32_t scale = half_bits(minimum(wanted, HALF_MAX));
    float s = half_float((uint16_t)scale), r = rcp_fast(s);
    float z = magnitude(quotient(low, s, r));
    if (!FLOAT_ZERO) z = round_even(z);
    // the sign separately: -0 / s is a signed zero in IEEE, and it is stored
    uint32_t zero = half_bits(z) | (~float_bits(low) >> 16 & 0x8000);
    z = half_float((uint16_t)zero);
    if (live && part == 0) *(uint32_t*)at[1] = (scale | zero << 16) & keep;

    // rne(y / s) is clipped to -z..15 - z where it still stands above ROUNDING; the four codes' z is added when they
    // are packed
    float bottom = ROUNDING - z, top = bottom + 15.0f;
    uint32_t shift = float_bits(ROUNDING) - float_bits(bottom);
    shift = shift * 0x1111u;
    KV_UNROLL for (int i = 0; i < N / 4; i++) {
      uint32_t code[4];
      KV_UNROLL for (int e = 0; e < 4; e++) {
        float x = y[4 * i + e];
        if (FLOAT_ZERO) {
          double q = minimum(maximum(add(div((double)x, (double)s), (double)z), 0.0), 15.0);
          code[e] = float_bits(add((float)round_even(q), ROUNDING));
        } else {
          float q = add(quotient(x, s, r), ROUNDING);
          code[e] = float_bits(minimum(maximum(q, bottom), top));
        }
      }
      if (!FLOAT_ZERO) code[0] += shift;
      store_quad<4>(at[0] + 16 * i, place_of<D>(i, part), code[0], code[1], code[2], code[3], keep, live);
    }
  }
};

}  // namespace kv
