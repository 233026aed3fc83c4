// What an encoder gets: new tokens of one role, page and head in the basis of the codes, and where their bytes go.
//
// An encoder is a function `void encode(const New&)` in encode_<name>.h; encoders.h lists them by name. Its bytes are
// those of the codec's `encode`: the same operations in the same precision, in an order that the codec fixes.
#pragma once
#include <cmath>

#include "reader.h"
#include "simd.h"

namespace kv {

constexpr int MOST_TOKENS = 256;  // most tokens of a block

struct New {
  const float* rows;       // [count, D]
  uint8_t* page;
  const uint8_t* tables;   // as kernels/codecs/<stem>.py made them, or null
  const int64_t* planes;   // byte of the page at which each plane begins
  const int64_t* sizes;    // bytes of a block in each plane
  const int32_t* options;
  int dim, block, place, count;

  // bytes of token t's block in plane p
  uint8_t* at(int p, int t) const { return page + planes[p] + (place + t) / block * sizes[p]; }
};

using Encode = void (*)(const New&);

// -- numbers ----------------------------------------------------------------------------------------------------------

inline F min(F a, F b) { return a < b ? a : b; }
inline float smallest(F x) { return -largest(-x); }

// to the nearest whole number, ties to even; |x| below 2^22, or 2^51 of doubles. Zero loses its sign
inline F nearest(F x) {
  const F magic = splat(12582912.0f);
  return (x + magic) - magic;
}
inline double nearest(double x) {
  const double magic = 0x1.8p52;
  return (x + magic) - magic;
}
inline F clip(F x, float low, float high) { return min(max(x, splat(low)), splat(high)); }
inline I whole(F x) { return __builtin_convertvector(x, I); }

inline uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
inline float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

// the nearest fp16 number, ties to even
inline uint16_t to_half(float x) {
  const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000u, size = u & 0x7fffffffu;
  if (size >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);
  if (size < 0x38800000u) return (uint16_t)(sign | (bits_of(float_of(size) + 0.5f) - 0x3f000000u));
  return (uint16_t)(sign | (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13);
}
inline float from_half(uint16_t h) { return half(&h); }
inline F rounded_to_half(F x) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
  return (F)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__aarch64__)
  return (F)vcvt_f32_f16(vcvt_f16_f32((float32x4_t)x));
#else
  for (int i = 0; i < LANES; ++i) x[i] = from_half(to_half(x[i]));
  return x;
#endif
}

struct Range {
  float low, high;
};
// least and largest of n numbers, a multiple of LANES; -0 is below 0
inline Range range_of(const float* x, int n) {
  F low = load(x), high = low;
  I sign = (I)low;
  for (int c = LANES; c < n; c += LANES) {
    const F y = load(x + c);
    low = min(y, low), high = max(y, high), sign |= (I)y;
  }
  Range r{smallest(low), largest(high)};
  if (r.low == 0) {
    int any = 0;
    for (int i = 0; i < LANES; ++i) any |= sign[i];
    r.low = any < 0 ? -0.0f : 0.0f;
  }
  return r;
}

// ops/groups.py, fp16_scale
inline uint16_t group_scale(float span, float steps, float zero) {
  const float wanted = span / steps;
  const uint16_t scale = to_half(wanted < 0x1p-24f ? 0x1p-24f : wanted > 65504.0f ? 65504.0f : wanted);
  return zero + steps * from_half(scale) > 65504.0f ? (uint16_t)(scale - 1) : scale;
}

// -- codes ------------------------------------------------------------------------------------------------------------

// LANES whole numbers of at most a byte
inline void store_codes(uint8_t* to, I q) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)q));
#else
  typedef uint8_t V __attribute__((vector_size(LANES)));
  const V x = __builtin_convertvector(q, V);
  memcpy(to, &x, sizeof x);
#endif
}

// ops/bitpack.py: n codes, a multiple of 8, as a little-endian bit stream
template <int BITS> inline void pack(const uint8_t* codes, int n, uint8_t* to) {
  if constexpr (BITS == 8) {
    memcpy(to, codes, n);
    return;
  }
  constexpr uint64_t ONE = 0x00ff00ff00ff00ff, TWO = 0x0000ffff0000ffff, FOUR = 0x00000000ffffffff;
  for (int i = 0; i < n; i += 8, to += BITS) {
    uint64_t x;
    memcpy(&x, codes + i, 8);
    x = (x & ONE) | (x & ~ONE) >> (8 - BITS);
    x = (x & TWO) | (x & ~TWO) >> (16 - 2 * BITS);
    x = (x & FOUR) | (x & ~FOUR) >> (32 - 4 * BITS);
    memcpy(to, &x, BITS);
  }
}

// A little-endian bit stream of numbers of any widths (ops/bitpack.py).
struct Stream {
  uint8_t* to;
  uint64_t held = 0;
  int bits = 0;

  explicit Stream(uint8_t* to) : to(to) {}
  // x, which is below 2^n
  void put(uint32_t x, int n) {
    held |= (uint64_t)x << bits;
    for (bits += n; bits >= 8; bits -= 8, held >>= 8) *to++ = (uint8_t)held;
  }
  // the last byte, filled up with zeros
  void end() {
    if (bits) *to = (uint8_t)held;
  }
};

}  // namespace kv
