// octopus (kvcodec/codecs/octopus.py): a code per three channels, in the order of bits of ops/split_words.py.
//
// Planes: as the layout's fields, codes and tail (one of them may be missing), then the norm. Options: 0 bits of a
// direction, 1 bits of a length, 2 whether fields of a code are held apart, 3 whether norms are float32, 4 bytes of the
// codes, 5 bytes of the tail. Tables, float32: sqrt(D) and three zeros; where the codes' rows lie (below), or, with
// fields apart, where the directions' rows and then the lengths lie; triplets (x, y, z, 0) of all codes, or of all
// directions, and the lengths.
//
// Where n numbers of a row lie: six rows of int32, each padded with zeros to a multiple of 16. Of bits in the codes:
// 0 their 16-bit unit and the next one << 16, 1 by how much these 32 bits are rotated to the left, 2 a mask of what is
// the number's then; of bits in the tail: 3 to 5 likewise. Numbers of rows come times 16, the bytes of a row.
#pragma once
#include "reader.h"
#include "simd.h"

namespace kv {

constexpr int TRIPLETS = 176;  // most of a row, a multiple of 16
constexpr int SOME_ROWS = 4;  // tokens whose bits are in registers at a time
constexpr int MANY_ROWS = 16;  // tokens whose numbers reach memory before they are read; fresh stores are slow to read

inline int padded16(int n) { return (n + 15) / 16 * 16; }

// norms of all tokens
inline void triplets_norms(const Rows& r, float* norms) {
  const int plane = (r.options[4] > 0) + (r.options[5] > 0);
  if (r.options[3]) memcpy(norms, r.row(plane, r.first, 4), sizeof(float) * r.count);
  else halves(r.row(plane, r.first, 2), r.count, norms);
  for (int t = 0; t < r.count; ++t) norms[t] *= float_at(r.tables);
}

// Bits of SOME_ROWS tokens.
struct PackedRows {
  const uint8_t *codes[SOME_ROWS], *tail[SOME_ROWS];
  int held, rest;

  // of tokens from `first` on; the last one again where there are fewer
  PackedRows(const Rows& r, int first) : held(r.options[4]), rest(r.options[5]) {
    for (int k = 0; k < SOME_ROWS; ++k) {
      const int place = r.first + (first + k < r.count ? first + k : r.count - 1);
      codes[k] = r.row(0, place, held), tail[k] = r.row(held > 0, place, rest);
    }
  }

  // put(k, i, x) gets the numbers i, i + 1, ... of token k, LANES at a time, `size` in all; may read three bytes behind
  // a row, in the page
  template <class Put> void numbers(const int32_t* places, int size, const Put& put) const {
#if defined(__AVX512BW__)
    if (held <= 64 && rest <= 64) return in_registers(places, size, put);
#endif
    const auto bits = [=](const uint8_t* from, const int32_t* p) {
      uint32_t pair;
      memcpy(&pair, from + 2 * (p[0] & 0xffff), 4);
      const int by = p[size];
      return (pair << by | pair >> (32 - by) % 32) & (uint32_t)p[2 * size];
    };
    for (int i = 0; i < size; i += LANES)
      for (int k = 0; k < SOME_ROWS; ++k) {
        U x;
        for (int j = 0; j < LANES; ++j)
          x[j] = bits(codes[k], places + i + j) | bits(tail[k], places + 3 * size + i + j);
        put(k, i, x);
      }
  }

#if defined(__AVX512BW__)
  template <class Put> void in_registers(const int32_t* places, int size, const Put& put) const {
    const auto row = [](const uint8_t* p, int bytes) {
      return _mm512_maskz_loadu_epi8(bytes ? ~0ull >> (64 - bytes) : 0, p);
    };
    __m512i front[SOME_ROWS], back[SOME_ROWS];
    for (int k = 0; k < SOME_ROWS; ++k) front[k] = row(codes[k], held), back[k] = row(tail[k], rest);
    for (int i = 0; i < size; i += 16) {
      __m512i p[6];
      for (int j = 0; j < 6; ++j) p[j] = _mm512_loadu_si512(places + j * size + i);
      for (int k = 0; k < SOME_ROWS; ++k) {
        const __m512i low = _mm512_rolv_epi32(_mm512_permutexvar_epi16(p[0], front[k]), p[1]);
        const __m512i high = _mm512_rolv_epi32(_mm512_permutexvar_epi16(p[3], back[k]), p[4]);
        put(k, i, (U)_mm512_or_si512(_mm512_and_si512(low, p[2]), _mm512_and_si512(high, p[5])));
      }
    }
  }
#endif
};

// Channels lie in order, but for whole runs of LANES triplets: their last quarter fills what the others leave.
inline int triplets_in_runs(int dim) { return dim / 3 / LANES * LANES; }

inline void order_triplets(const int32_t*, int dim, int16_t* channel) {
  const int each = LANES / 4, whole = triplets_in_runs(dim);
  for (int first = 0; first < whole; first += LANES)
    for (int j = 0; j < 3; ++j)
      for (int i = 0; i < LANES; ++i) {
        const int triplet = first + (i % 4 < 3 ? j : 3) * each + i / 4;
        channel[3 * first + j * LANES + i] = (int16_t)(3 * triplet + (i % 4 < 3 ? i % 4 : j));
      }
  for (int c = 3 * whole; c < dim; ++c) channel[c] = (int16_t)c;
}

// triplets times the token's scale; the first `whole` in the order of order_triplets, the others straight
template <bool APART> inline void triplets(const Rows& r, const float* scale, int whole) {
  const int n = (r.dim + 2) / 3, size = padded16(n);
  const int32_t* places = (const int32_t*)r.tables + 4;
  const float* rows = (const float*)(places + (APART ? 12 : 6) * size);
  const float* lengths = rows + (4 << 2 * r.options[0]);
  const int most = (1 << r.options[1]) - 1;
  const Table<4> few([=](I i) {
    F x;
    for (int k = 0; k < LANES; ++k) x[k] = lengths[i[k] & most & 15];
    return x;
  });
  alignas(64) uint32_t code[MANY_ROWS * TRIPLETS];
  alignas(64) float length[MANY_ROWS * TRIPLETS];
  for (int first = 0; first < r.count; first += MANY_ROWS) {
    const int count = r.count - first < MANY_ROWS ? r.count - first : MANY_ROWS;
    for (int t = 0; t < count; t += SOME_ROWS) {
      const PackedRows packed(r, first + t);
      uint32_t* codes_to = code + t * size;
      float* lengths_to = length + t * size;
      packed.numbers(places, size, [=](int k, int i, U x) { memcpy(codes_to + k * size + i, &x, sizeof x); });
      if constexpr (APART) {
        const int32_t* upper = places + 6 * size;
        if (most < 16)
          packed.numbers(upper, size, [=](int k, int i, U x) { store(lengths_to + k * size + i, few((I)x)); });
        else
          packed.numbers(upper, size, [=](int k, int i, U x) {
            for (int j = 0; j < LANES; ++j) lengths_to[k * size + i + j] = lengths[x[j]];
          });
      }
    }
    for (int t = 0; t < count; ++t) {
      const F by = splat(scale[first + t]);
      const auto some = [=, of = code + t * size, at = length + t * size](int i) {
        const F x = four_by_four(rows, of + i);
        return APART ? x * each_four_times(at + i) : x;
      };
      float* out = r.out + (first + t) * r.dim;
      int i = 0;
      for (; i < whole; i += LANES, out += 3 * LANES) {
        const F last = some(i + LANES / 4 * 3);
        store(out, filled<0>(some(i), last) * by);
        store(out + LANES, filled<1>(some(i + LANES / 4), last) * by);
        store(out + 2 * LANES, filled<2>(some(i + LANES / 4 * 2), last) * by);
      }
      for (; i < n; i += LANES / 4, out += LANES / 4 * 3)  // what lies behind the row is overwritten
        store_threes(out, some(i) * by);
    }
  }
}

inline void all_triplets(const Rows& r, const float* scale, int whole) {
  if (r.options[2]) triplets<true>(r, scale, whole);
  else triplets<false>(r, scale, whole);
}

inline void unpack_octopus(const Rows& r) {
  float norms[TILE];
  triplets_norms(r, norms);
  all_triplets(r, norms, triplets_in_runs(r.dim));
}

}  // namespace kv
