// UltraQuant: E2M1 codes in groups of 32 channels, each with a power of two (UE8M0) or, REAL, an fp16 scale. Rotation
// is the role's:
// Role<EncodeUltraquant<D, C>, ORDER>; C are the bits of the double c, the scale over a group's largest magnitude.
// REAL scales are held over 2^UNIT, UNIT = ceil(log2(ORDER) / 2).
//
// Planes: codes [D / 2], scale uint8 (REAL: fp16) [D / 32].
#pragma once
#include "encode_int.cuh"

namespace kv {

template <int D, uint64_t C, bool REAL = false, int UNIT = 0> struct EncodeUltraquant {
  KV_CONST int DIM = D, TEAM = 8, SCRATCH = 0, N = D / 8, PLANES = 2, GROUPS = D / 32;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? D / 2 : GROUPS * (REAL ? 2 : 1); }

  // the byte of the power of two nearest to y on a log scale: sqrt(1/2) and more of a power of two round up to it
  KV_DEV static int32_t nearest_power(double y) {
    constexpr uint64_t ROOT = 0x6a09e667f3bcdull;  // fraction bits of the double nearest to sqrt(1/2)
    int32_t byte = (int32_t)((double_bits(y) - ROOT) >> 52) - 1022 + 127;
    byte = byte < 0 ? 0 : byte > 254 ? 254 : byte;
    return y > 0.0 ? byte : 0;
  }
  KV_DEV static float power(int32_t byte) { return bits_float(byte > 0 ? (uint32_t)byte << 23 : 1u << 22); }

  // code of magnitude a, in the low bits: three lines of slope 2, 1, 1/2, the lowest counts, see codecs/ultraquant.py
  KV_DEV static uint32_t code(float y) {
    float a = magnitude(y);
    float t = minimum(fma(a, 2.0f, ROUNDING), fma(a, 1.0f, ROUNDING + 2.0f));
    t = minimum(minimum(t, fma(a, 0.5f, ROUNDING + 4.0f)), ROUNDING + 7.0f);
    return y < 0.0f ? float_bits(t) | 8 : float_bits(t);  // not for -0
  }

  KV_DEV static void quad(const float (&y)[N], int part, uint32_t keep, bool live, uint8_t* const (&at)[PLANES]) {
    constexpr int EACH = GROUPS < 8 ? GROUPS : 8;  // groups at a time
    static_assert(GROUPS % EACH == 0, "whole turns");
    KV_UNROLL for (int first = 0; first < GROUPS; first += EACH) groups<EACH>(y, first, part, keep, live, at);
  }
  template <int EACH>
  KV_DEV static void groups(const float (&y)[N], int first, int part, uint32_t keep, bool live,
                            uint8_t* const (&at)[PLANES]) {
    using Share = Shares<EACH>;
    constexpr float HELD = (float)(1 << UNIT);
    float high[Share::ALL];
    KV_UNROLL for (int g = 0; g < Share::ALL; g++) {
      high[g] = 0.0f;
      KV_UNROLL for (int k = 4 * g; k < 4 * g + 4 && k < 4 * EACH; k++)
        high[g] = maximum(high[g], magnitude(y[4 * first + k]));
    }
    double wanted = mul((double)Share::template reduce<true>(high, part), bits_double(C));
    uint32_t scale;
    float s = 1.0f, r;
    if (REAL) {
      float real = (float)mul(wanted, 1.0 / HELD);
      scale = half_bits(minimum(maximum(real, LEAST_SCALE), HALF_MAX));
      s = mul(half_float((uint16_t)scale), HELD);
      r = rcp_fast(s);
    } else {
      scale = (uint32_t)nearest_power(wanted);
      r = power(254 - (int32_t)scale);
    }
    if (live && Share::first(part)) {
      if (REAL) ((uint16_t*)at[1])[first + Share::group(part)] = (uint16_t)(scale & keep);
      else at[1][first + Share::group(part)] = (uint8_t)(scale & keep);
    }
    KV_UNROLL for (int i = 0; i < EACH; i++) {
      float own_s = REAL ? Share::of(s, i) : 1.0f, own_r = Share::of(r, i);
      uint32_t c[4];
      KV_UNROLL for (int e = 0; e < 4; e++) {
        float x = y[4 * (first + i) + e];
        c[e] = code(REAL ? quotient(x, own_s, own_r) : mul(x, own_r));
      }
      store_quad<4>(at[0] + 16 * (first + i), part, c[0], c[1], c[2], c[3], keep, live);
    }
  }
};

}  // namespace kv
