// octopus (kvcodec/codecs/octopus.py): a code per three channels, in the order of bits of ops/split_words.py.
//
// Planes: as the layout's fields, codes and tail (one of them may be missing), then the norm. Options: 0 bits of a
// direction, 1 bits of a length, 2 whether fields of a code are held apart, 3 whether norms are float32, 4 bytes of the
// codes, 5 bytes of the tail. Tables, float32: sqrt(D) and three zeros; where the codes lie (below), or, with fields
// apart, where the directions and then the lengths lie; triplets (x, y, z, 0) of all codes, or of all directions, and
// the lengths.
//
// Where n numbers of a row lie: seven rows of int32, each padded with zeros to a multiple of 16. Of bits in the codes:
// 0 their 16-bit unit and the next one << 16, 1 the first bit, 2 a mask; of bits in the tail: 3 to 5 likewise, 6 the
// number's bit that they begin with.
#pragma once
#include "reader.h"
#include "simd.h"

namespace kv {

constexpr int TRIPLETS = (WIDEST + 2) / 3 + 16;

inline int padded16(int n) { return (n + 15) / 16 * 16; }

inline float triplets_norm(const Rows& r, int t) {
  const int plane = (r.options[4] > 0) + (r.options[5] > 0), place = r.first + t;
  return (r.options[3] ? float_at(r.row(plane, place, 4)) : half(r.row(plane, place, 2))) * float_at(r.tables);
}

// Where a row's bits are, and which of them make its numbers.
struct Numbers {
  const uint8_t* codes;
  int held;
  const uint8_t* tail;
  int rest;
  const int32_t* places;
  int n;

  // the numbers << by; may read three bytes behind the row, in the page
  void put(int by, uint32_t* out) const {
#if defined(__AVX512BW__)
    if (held <= 64 && rest <= 64) return in_registers(by, out);
#endif
    one_by_one(by, out);
  }

  __attribute__((noinline)) void one_by_one(int by, uint32_t* out) const {
    const int size = padded16(n);
    const auto bits = [=](const uint8_t* from, const int32_t* p) {
      uint32_t pair;
      memcpy(&pair, from + 2 * (p[0] & 0xffff), 4);
      return pair >> p[size] & (uint32_t)p[2 * size];
    };
    for (int i = 0; i < n; ++i) {
      const int32_t* p = places + i;
      out[i] = (bits(codes, p) | bits(tail, p + 3 * size) << p[6 * size]) << by;
    }
  }

#if defined(__AVX512BW__)
  void in_registers(int by, uint32_t* out) const {
    const int size = padded16(n);
    const auto row = [](const uint8_t* p, int bytes) {
      return _mm512_maskz_loadu_epi8(bytes ? ~0ull >> (64 - bytes) : 0, p);
    };
    const __m512i front = row(codes, held), back = row(tail, rest);
    const auto bits = [=](__m512i from, const int32_t* p) {
      const __m512i pair = _mm512_permutexvar_epi16(_mm512_loadu_si512(p), from);
      const __m512i shift = _mm512_loadu_si512(p + size), mask = _mm512_loadu_si512(p + 2 * size);
      return _mm512_and_si512(_mm512_srlv_epi32(pair, shift), mask);
    };
    for (int i = 0; i < size; i += 16) {
      const int32_t* p = places + i;
      const U high = (U)_mm512_sllv_epi32(bits(back, p + 3 * size), _mm512_loadu_si512(p + 6 * size));
      const U all = ((U)bits(front, p) | high) << by;
      memcpy(out + i, &all, sizeof all);
    }
  }
#endif
};

// triplets times scale(token)
template <bool APART, class Scale> inline void triplets(const Rows& r, const Scale& scale) {
  const int held = r.options[4], rest = r.options[5], n = (r.dim + 2) / 3, size = padded16(n);
  const int32_t* places = (const int32_t*)r.tables + 4;
  const float* rows = (const float*)(places + (APART ? 14 : 7) * size);
  const float* lengths = rows + (4 << 2 * r.options[0]);
  const int most = (1 << r.options[1]) - 1;
  const Table<4> few([=](I i) {
    F x;
    for (int k = 0; k < LANES; ++k) x[k] = lengths[i[k] & most & 15];
    return x;
  });
  constexpr int SOME = 4;  // tokens whose numbers have reached memory before they are read
  uint32_t code[SOME][TRIPLETS] = {}, which[TRIPLETS];
  float length[SOME][TRIPLETS] = {};
  for (int first = 0; first < r.count; first += SOME) {
    const int count = r.count - first < SOME ? r.count - first : SOME;
    for (int k = 0; k < count; ++k) {
      const int place = r.first + first + k;
      Numbers row{r.row(0, place, held), held, r.row(held > 0, place, rest), rest, places, n};
      row.put(4, code[k]);  // rows have 16 bytes
      if constexpr (APART) {
        row.places += 7 * size;
        row.put(0, which);
        if (most < 16)
          for (int i = 0; i < size; i += LANES) {
            I at;
            memcpy(&at, which + i, sizeof at);
            store(length[k] + i, few(at));
          }
        else
          for (int i = 0; i < n; ++i) length[k][i] = lengths[which[i]];
      }
    }
    for (int k = 0; k < count; ++k) {
      const F by = splat(scale(first + k));
      float* out = r.out + (first + k) * r.dim;
      for (int i = 0; i < n; i += LANES / 4) {  // what lies behind the row is overwritten
        F x = four_by_four(rows, code[k] + i);
        if constexpr (APART) x *= each_four_times(length[k] + i);
        store_threes(out + 3 * i, x * by);
      }
    }
  }
}

template <class Scale> inline void all_triplets(const Rows& r, const Scale& scale) {
  if (r.options[2]) triplets<true>(r, scale);
  else triplets<false>(r, scale);
}

inline void unpack_octopus(const Rows& r) {
  all_triplets(r, [&](int t) { return triplets_norm(r, t); });
}

}  // namespace kv
