// octopus (packedkv/codecs/octopus.py): a code per three channels, in the order of bits of codecs/octopus.py.
//
// Planes: as the layout's fields, codes and tail (one of them may be missing), then the norm. Options: 0 bits of a
// direction, 1 bits of a length, 2 whether fields of a code are held apart, 3 whether norms are float32, 4 bytes of the
// codes, 5 bytes of the tail. Tables, float32: sqrt(D) and three zeros; where the codes' rows lie (below), or, with
// fields apart, where the directions' rows and then the lengths lie; triplets (x, y, z, 0) of all codes, or of all
// directions, and the lengths.
//
// Where n numbers of a row lie: seven rows of int32, each padded with zeros to a multiple of 16. Of bits in the codes:
// 0 their 16-bit unit and the next one << 16, 1 by how much these 32 bits are rotated to the left, 2 a mask of what is
// the number's then; of bits in the tail: 3 to 5 likewise. 6: the four bytes of the units of row 0, counted from the
// begin of their part of the codes. Numbers of rows come times 16, the bytes of a row. Triplets are in the order of
// order_of_triplets, or in their own.
#pragma once
#include <algorithm>

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

// How many triplets come first in the order below.
inline int without_tail(const int32_t* options, int n) {
  const int low = options[2] ? options[1] : 0, high = 2 * options[0] + options[1] - low;
  const int each = n / 4, words = 2 * options[4];  // triplets of a part (codecs/octopus.py), its bits in the codes
  const int whole = low ? (words - each * high) / low : words / high;  // triplets of a part without bits in the tail
  return whole > 0 ? std::min(each, whole) / 4 * 16 : 0;
}

// Triplets without bits in the tail by fours: four of part 0, of part 1, 2 and 3, and again; then the others
inline void order_of_triplets(const int32_t* options, int n, int16_t* triplet) {
  const int each = n / 4, more = n % 4, first = without_tail(options, n);
  int16_t* others = triplet + first;
  for (int part = 0, number = 0; part < 4; ++part)
    for (int i = 0; i < each + (part < more); ++i, ++number)
      *(4 * i < first ? triplet + i / 4 * 16 + part * 4 + i % 4 : others++) = (int16_t)number;
}

constexpr int PLACES = 7;  // rows

// Bits of tokens [first, last) of a page, SOME_ROWS at most.
struct PackedRows {
  const uint8_t *codes, *tail;
  int held, rest, count;

  PackedRows(const Rows& r, int first, int last)
      : codes(r.row(0, first, r.options[4])), tail(r.row(r.options[4] > 0, first, r.options[5])), held(r.options[4]),
        rest(r.options[5]), count(last - first) {}

  // put(k, i, x) gets FIELDS numbers each of the triplets i, i + 1, ... of token k, LANES at a time, `size` in all, the
  // first `alone` of which have no bits in the tail; may read three bytes behind a row, in the page
  template <int FIELDS, class Put>
  KV_INLINE void numbers(const int32_t* places, int size, int alone, const Put& put) const {
#if defined(__AVX512BW__)
    if (held <= 64 && rest <= 64) return in_registers<FIELDS>(places, size, alone, put);
#endif
    const auto bits = [=](const uint8_t* from, const int32_t* p) {
      uint32_t pair;
      memcpy(&pair, from + 2 * (p[0] & 0xffff), 4);
      const int by = p[size];
      return (pair << by | pair >> (32 - by) % 32) & (uint32_t)p[2 * size];
    };
    for (int i = 0; i < size; i += LANES)
      for (int k = 0; k < count; ++k) {
        U x[FIELDS];
        for (int field = 0; field < FIELDS; ++field)
          for (int j = 0; j < LANES; ++j) {
            const int32_t* of = places + PLACES * field * size + i + j;
            x[field][j] = bits(codes + k * held, of);
            if (i + j >= alone) x[field][j] |= bits(tail + k * rest, of + 3 * size);
          }
        put(k, i, x);
      }
  }

#if defined(__AVX512BW__)
  // Numbers without bits in the tail come by shuffles of a part's bytes, the others by those of a row's units, which
  // take both ports of vectors.
  template <int FIELDS, class Put>
  KV_INLINE void in_registers(const int32_t* places, int size, int alone, const Put& put) const {
    const auto low = [](int bytes) { return bytes ? ~0ull >> (64 - bytes) : 0; };
    const U lane = (U)iota() / 4, word = (U)iota() % 4, spread = lane * (uint32_t)(held / 16) + word;
    __m512i row[SOME_ROWS], parts[SOME_ROWS], more[SOME_ROWS];
#pragma GCC unroll 4
    for (int k = 0; k < SOME_ROWS; ++k) {
      const int at = k < count ? k : 0;
      row[k] = _mm512_maskz_loadu_epi8(low(held), codes + at * held);
      parts[k] = _mm512_permutexvar_epi32((__m512i)spread, row[k]);
      more[k] = _mm512_maskz_loadu_epi8(low(rest), tail + at * rest);
    }
    const auto some = [&](int i, auto with_tail) KV_JOINED {
      __m512i p[FIELDS][PLACES];
      for (int field = 0; field < FIELDS; ++field)
        for (int j = 0; j < PLACES; ++j) p[field][j] = _mm512_loadu_si512(places + (PLACES * field + j) * size + i);
#pragma GCC unroll 4
      for (int k = 0; k < SOME_ROWS; ++k) {
        U x[FIELDS];
        for (int field = 0; field < FIELDS; ++field) {
          const __m512i* of = p[field];
          __m512i bits = with_tail ? _mm512_permutexvar_epi16(of[0], row[k]) : _mm512_shuffle_epi8(parts[k], of[6]);
          bits = _mm512_and_si512(_mm512_rolv_epi32(bits, of[1]), of[2]);
          if constexpr (with_tail) {
            const __m512i others = _mm512_rolv_epi32(_mm512_permutexvar_epi16(of[3], more[k]), of[4]);
            bits = _mm512_or_si512(bits, _mm512_and_si512(others, of[5]));
          }
          x[field] = (U)bits;
        }
        put(k, i, x);
      }
    };
    int i = 0;
    for (; i < alone; i += 16) some(i, std::false_type());
    for (; i < size; i += 16) some(i, std::true_type());
  }
#endif
};

// Triplets in rows of four lanes, the fourth of which is filled by other triplets: of LANES triplets, or fewer at the
// row's end, the first ones lie in vectors of their own, and the numbers of those left are the fourth lanes.
struct Run {
  int first, vectors;  // triplet; 3, and at the end 1 or 2

  int own() const { return vectors * LANES / 4; }
  // triplet of lane i of vector j, from the first one on; and its component
  int triplet(int j, int i) const { return i % 4 < 3 ? j * LANES / 4 + i / 4 : own() + (j * LANES / 4 + i / 4) / 3; }
  static int component(int j, int i) { return i % 4 < 3 ? i % 4 : (j * LANES / 4 + i / 4) % 3; }
};

inline void order_triplets(const int32_t* options, int dim, int16_t* channel) {
  const int n = (dim + 2) / 3;
  int16_t triplet[WIDEST / 3 + 1];
  order_of_triplets(options, n, triplet);
  for (Run run{0, 3}; run.first < n; run.first += LANES) {
    run.vectors = std::min(3, dim / LANES - run.first / LANES * 3);
    for (int j = 0; j < run.vectors; ++j)
      for (int i = 0; i < LANES; ++i)
        *channel++ = (int16_t)(3 * triplet[run.first + run.triplet(j, i)] + Run::component(j, i));
  }
}

// the run's triplets, from addresses of rows and lengths, times a scale
template <int VECTORS, bool APART>
KV_INLINE void write_run(const float* rows, const uint32_t* at, const float* lengths, F scale, float* out) {
  constexpr int EACH = LANES / 4;
  const F last = four_by_four(rows, at + VECTORS * EACH), all = load(lengths);
  const auto put = [&](auto number) KV_JOINED {
    constexpr int J = decltype(number)::value;
    F x = filled<J>(four_by_four(rows, at + J * EACH), last);
    if constexpr (APART) {
      I whose;
      for (int i = 0; i < LANES; ++i) whose[i] = Run{0, VECTORS}.triplet(J, i);
      x *= KV_SHUFFLE(all, all, whose);
    }
    store(out + J * LANES, x * scale);
  };
  put(std::integral_constant<int, 0>());
  if constexpr (VECTORS > 1) put(std::integral_constant<int, 1>());
  if constexpr (VECTORS > 2) put(std::integral_constant<int, 2>());
}

// triplets times the token's scale, in the order of order_triplets, or in their own
template <bool APART, bool STRAIGHT>
KV_INLINE void triplets(const Rows& r, int dim, const float* scale) {
  const int n = (dim + 2) / 3, size = padded16(n);
  const int32_t* places = (const int32_t*)r.tables + 4;
  const float* rows = (const float*)(places + (1 + APART) * PLACES * size);
  const float* lengths = rows + (4 << 2 * r.options[0]);
  const int most = (1 << r.options[1]) - 1;
  const Table<4> few([=](I i) {
    F x;
    for (int k = 0; k < LANES; ++k) x[k] = lengths[i[k] & most & 15];
    return x;
  });
  alignas(64) uint32_t code[MANY_ROWS * TRIPLETS];
  alignas(64) float length[MANY_ROWS * TRIPLETS];
  const int alone = STRAIGHT ? 0 : without_tail(r.options, n);
  for (int first = 0; first < r.count; first += MANY_ROWS) {
    const int count = r.count - first < MANY_ROWS ? r.count - first : MANY_ROWS;
    const auto read = [&](const auto& length_of) KV_JOINED {
      for (int t = 0; t < count; t += SOME_ROWS) {
        const int begin = r.first + first + t, end = r.first + first + (t + SOME_ROWS < count ? t + SOME_ROWS : count);
        uint32_t* codes_to = code + t * size;
        float* lengths_to = length + t * size;
        const auto put = [=](int k, int i, const U* x) KV_JOINED {
          memcpy(codes_to + k * size + i, x, sizeof *x);
          if constexpr (APART) store(lengths_to + k * size + i, length_of((I)x[1]));
        };
        PackedRows(r, begin, end).template numbers<1 + APART>(places, size, alone, put);
      }
    };
    if (most < 16) read(few);
    else
      read([lengths](I at) {
        F x;
        for (int j = 0; j < LANES; ++j) x[j] = lengths[at[j]];
        return x;
      });
    for (int t = 0; t < count; ++t) {
      const F by = splat(scale[first + t]);
      const uint32_t* of = code + t * size;
      const float* at = length + t * size;
      float* out = r.out + (first + t) * dim;
      if constexpr (STRAIGHT) {
        for (int i = 0; i < n; i += LANES / 4, out += LANES / 4 * 3) {  // what lies behind the row is overwritten
          F x = four_by_four(rows, of + i);
          if constexpr (APART) x *= each_four_times<0>(load(at + i));
          store_threes(out, x * by);
        }
      } else {
        const int left = dim / LANES % 3, whole = dim / LANES / 3 * LANES;
        int i = 0;
        for (; i < whole; i += LANES, out += 3 * LANES) write_run<3, APART>(rows, of + i, at + i, by, out);
        if (left == 2) write_run<2, APART>(rows, of + i, at + i, by, out);
        if (left == 1) write_run<1, APART>(rows, of + i, at + i, by, out);
      }
    }
  }
}

template <bool STRAIGHT> KV_INLINE void all_triplets(const Rows& r, const float* scale) {
  known_dim(r.dim, [&](auto dim) KV_JOINED {
    if (r.options[2]) triplets<true, STRAIGHT>(r, dim, scale);
    else triplets<false, STRAIGHT>(r, dim, scale);
  });
}

inline KV_APART void unpack_octopus(const Rows& r) {
  float norms[TILE];
  triplets_norms(r, norms);
  all_triplets<false>(r, norms);
}

}  // namespace kv
