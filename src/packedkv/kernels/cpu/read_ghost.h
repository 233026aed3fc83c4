// ghost (packedkv/codecs/ghost.py): fields of T bits, each with the codes of two places, whose widths are the head's own.
//
// Levels of all widths 1 to 7 are symmetric, so those above zero are in one table of 128: the j-th of width w at
// 2^(w-1) + j. A code with its highest bit set is its own place there, another one's complement is. Widths of up to five
// need 32 entries, which two registers hold.
//
// The row's even places are unpacked to its first half, the odd ones to its second.
//
// Option 0: whether there is a mean. Tables, of a head: int16 [D] channel of each place, which the skeleton reads;
// uint8 [D] widths of the even places, then of the odd ones; float [128] levels; float [16] scales; with a mean float [D],
// in the order of the widths.
#pragma once
#include "reader.h"
#include "simd.h"

namespace kv {

struct GhostTables {
  const int16_t* channel;
  const uint8_t* widths;
  const float *levels, *scales, *centre;

  GhostTables(const uint8_t* tables, int dim)
      : channel((const int16_t*)tables), widths(tables + 2 * dim), levels((const float*)(widths + dim)),
        scales(levels + 128), centre(scales + 16) {}
};

inline void order_ghost(const int32_t*, int dim, int16_t* channel) {
  for (int p = 0; p < dim / 2; ++p) channel[p] = (int16_t)(2 * p), channel[dim / 2 + p] = (int16_t)(2 * p + 1);
}

// LANES fields from number `first` on, a multiple of 8; lane i has its field from bit `shift` on
template <int T> struct GhostFields {
#if defined(__AVX512BW__)
  __m512i units;
  U shift;
  GhostFields() {
    alignas(64) uint16_t at[32];
    for (int i = 0; i < 16; ++i) at[2 * i] = (uint16_t)(T * i / 16), at[2 * i + 1] = (uint16_t)(T * i / 16 + 1);
    units = _mm512_load_si512(at);
    shift = (U)(iota() * T & 15);
  }
  U operator()(const uint8_t* row, int first) const {
    const __m256i bytes = _mm256_maskz_loadu_epi8((1u << 2 * T) - 1, row + first / 8 * T);
    return (U)_mm512_permutexvar_epi16(units, _mm512_castsi256_si512(bytes));
  }
#else
  U shift{};
  U operator()(const uint8_t* row, int first) const {
    U x;
    for (int i = 0; i < LANES; ++i) {
      const int bit = (first + i) * T, end = bit % 8 + T;
      const uint8_t* p = row + bit / 8;
      uint32_t one = p[0];
      if (end > 8) one |= (uint32_t)p[1] << 8;
      if (end > 16) one |= (uint32_t)p[2] << 16;
      x[i] = one >> bit % 8;
    }
    return x;
  }
#endif
};

// SIZE levels above zero
template <int SIZE> struct GhostLevels {
#if defined(__AVX512F__)
  __m512 of[SIZE / 16];
  explicit GhostLevels(const float* levels) {
    for (int i = 0; i < SIZE / 16; ++i) of[i] = _mm512_loadu_ps(levels + 16 * i);
  }
  F operator()(I at) const {
    const __m512i i = (__m512i)at;
    if constexpr (SIZE == 16) {
      return (F)_mm512_permutexvar_ps(i, of[0]);
    } else {
      __m512 x[SIZE / 32];
      for (int k = 0; k < SIZE / 32; ++k) x[k] = _mm512_permutex2var_ps(of[2 * k], i, of[2 * k + 1]);
      for (int half = SIZE / 64; half; half /= 2) {
        const __mmask16 upper = _mm512_test_epi32_mask(i, _mm512_set1_epi32(32 * half));
        for (int k = 0; k < half; ++k) x[k] = _mm512_mask_blend_ps(upper, x[k], x[k + half]);
      }
      return (F)x[0];
    }
  }
#else
  const float* of;
  explicit GhostLevels(const float* levels) : of(levels) {}
  F operator()(I at) const {
    F x;
    for (int i = 0; i < LANES; ++i) x[i] = of[at[i]];
    return x;
  }
#endif
};

// what a lane does with its code
struct GhostLanes {
  U shift, mask;
  I middle;
  int most;  // widest code
  GhostLanes(const uint8_t* widths, U from) : shift(from), most(0) {
    for (int i = 0; i < LANES; ++i) {
      const int w = widths[i];
      mask[i] = (1u << w) - 1, middle[i] = w ? 1 << (w - 1) : 0, most = w > most ? w : most;
    }
  }
  template <class Levels> F level(U fields, const Levels& levels) const {
    const I code = (I)(fields >> shift & mask), below = code - middle;
    return (F)((I)levels(code ^ (below >> 31 & (I)mask)) ^ (below & (int32_t)0x80000000));
  }
};

template <int T> inline void unpack_ghost(const Rows& r) {
  const GhostTables tables(r.tables, r.dim);
  const int half = r.dim / 2, bytes = half * T / 8;
  const uint8_t* row = r.row(0, r.first, bytes);
  float scale[TILE];
  uint32_t mask = 0, magic = 0;  // gather the number's four bits in the highest ones
  for (int t = 0; t < 4; ++t) mask |= 1u << (31 - (3 - t) * T), magic += 1u << (28 + t - (31 - (3 - t) * T));
  for (int t = 0; t < r.count; ++t) {
    uint32_t last;
    memcpy(&last, row + t * bytes + bytes - 4, 4);
    scale[t] = tables.scales[(last & mask) * magic >> 28];
  }
  const GhostFields<T> fields;
  const bool moved = r.options[0];
  const GhostLevels<(T < 10 ? 16 : 32)> lower(tables.levels);  // of at most T / 2 bits
  const auto unpack = [&](int first, const GhostLanes& even, const auto& upper, const GhostLanes& odd) {
    const F c0 = moved ? load(tables.centre + first) : F{}, c1 = moved ? load(tables.centre + half + first) : F{};
    for (int t = 0; t < r.count; ++t) {
      const U x = fields(row + t * bytes, first);
      const F s = splat(scale[t]);
      F y = even.level(x, upper) * s, z = odd.level(x, lower) * s;
      if (moved) y += c0, z += c1;
      store(r.out + t * r.dim + first, y), store(r.out + t * r.dim + half + first, z);
    }
  };
  for (int k = 0; k < half; k += LANES) {
    const int first = k + LANES <= half ? k : half - LANES;  // the last ones may be unpacked twice
    U from = fields.shift;
    const GhostLanes even(tables.widths + first, from);
    for (int i = 0; i < LANES; ++i) from[i] += tables.widths[first + i];
    const GhostLanes odd(tables.widths + half + first, from);
    if (even.most <= 4) unpack(first, even, GhostLevels<16>(tables.levels), odd);
    else if (even.most == 5) unpack(first, even, GhostLevels<32>(tables.levels), odd);
    else if (even.most == 6) unpack(first, even, GhostLevels<64>(tables.levels), odd);
    else unpack(first, even, GhostLevels<128>(tables.levels), odd);
  }
}

}  // namespace kv
