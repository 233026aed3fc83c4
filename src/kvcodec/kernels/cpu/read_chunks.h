// hqmq (kvcodec/codecs/hqmq.py): a row of the head's codebook, a sign and a radius per four channels.
//
// Planes: the layout's fields. Options: 2 whether bits are in the order of ops/signed_rows.py, 3 how many planes lie
// before the scale. Tables: rows of four float32, every second of the
// codebook (the others are their negatives).
#pragma once
#include "read_triplets.h"

namespace kv {

// code `i` of a plain stream of `bits`; reads no byte behind `bytes`
inline uint32_t code_at(const uint8_t* stream, int bytes, int bits, int i) {
  const int bit = i * bits, first = bit / 8;
  uint32_t word = stream[first];
  if (first + 1 < bytes) word |= (uint32_t)stream[first + 1] << 8;
  if (first + 2 < bytes) word |= (uint32_t)stream[first + 2] << 16;
  return word >> bit % 8 & ((1u << bits) - 1);
}

// LANES bits of a plane (ops/signed_rows.py) of n chunks, from chunk c on; bit[c] is the bit's number
inline I plane_bits(const uint8_t* plane, const int32_t* bit, int n, int c) {
  I at, x;
  memcpy(&at, bit + c, sizeof at);
  if (n <= 32) {
    int32_t all = 0;
    memcpy(&all, plane, 4);
    return (I)((U)splat_int(all) >> (U)at) & 1;
  }
  for (int i = 0; i < LANES; ++i) x[i] = plane[at[i] / 8] >> at[i] % 8 & 1;
  return x;
}

constexpr int CHUNKS = WIDEST / 4 + LANES;

// What a token's chunks are: byte of the table at which the row begins, and signed length. W bits of a code, R of a
// radius. Vectors may read behind the row, in the page.
template <int W, int R>
inline void chunks(const Rows& r, int place, int n, float step, const int32_t* bit, uint32_t* row, float* length) {
  constexpr int SPARE = W + R - 16, LOW = 16 - W;
  const auto put = [=](int c, I rows, I radius, I negative) {  // negative: 0 or 1
    const I from = rows * 16;
    memcpy(row + c, &from, sizeof from);
    store(length + c, (F)((I)(convert(radius) * step) ^ negative << 31));
  };
  if (!r.options[2]) {  // plain streams
    const int code_bytes = (n * W + 7) / 8, radius_bytes = (n * R + 7) / 8;
    const uint8_t *codes = r.row(0, place, code_bytes), *radii = r.row(1, place, radius_bytes);
    for (int i = 0; i < n; ++i) {
      const uint32_t code = code_at(codes, code_bytes, W, i);
      const float size = (float)code_at(radii, radius_bytes, R, i) * step;
      row[i] = code >> 1 << 4, length[i] = code & 1 ? -size : size;
    }
  } else if constexpr (SPARE >= 0) {
    const uint8_t *units = r.row(0, place, 2 * n), *more = r.row(1, place, n * SPARE / 8);
    for (int c = 0; c < n; c += LANES) {
      const I unit = (I)widen<uint16_t>(units + 2 * c);
      I radius = unit & ((1 << LOW) - 1);
      if constexpr (SPARE > 0) radius |= (codes<SPARE>(more, c) & ((1 << SPARE) - 1)) << LOW;
      put(c, (unit & 0x7fff) >> LOW, radius, unit >> 15);
    }
  } else {
    constexpr int PART = W == 10 ? 8 : W - 1, PLANES_HELD = (W == 10) + (R == 4);
    const uint8_t *low = r.row(0, place, n * PART / 8), *radii = r.row(1, place, n / 2);
    const uint8_t *flags = r.row(2, place, PLANES_HELD * n / 8), *signs = flags + (W == 10 ? n / 8 : 0);
    int32_t part[CHUNKS];
    if constexpr (PART != 8)
      for (int i = 0; i < n; i += 4) {
        uint64_t word;
        memcpy(&word, low + i * PART / 8, 8);
        word >>= i * PART % 8;
        for (int j = 0; j < 4; ++j) part[i + j] = (int32_t)(word >> j * PART & ((1 << PART) - 1));
      }
    for (int c = 0; c < n; c += LANES) {
      I rows;
      if constexpr (PART == 8) rows = (I)widen<uint8_t>(low + c) | plane_bits(flags, bit, n, c) << 8;
      else memcpy(&rows, part + c, sizeof rows);
      const I four = codes<4>(radii, c);
      put(c, rows, four & ((1 << R) - 1), R == 4 ? plane_bits(signs, bit, n, c) : four >> 3 & 1);
    }
  }
}

template <int W, int R> inline void unpack_hqmq(const Rows& r) {
  const int n = (r.dim + 3) / 4, m = n / 8;
  int32_t bit[CHUNKS] = {};
  if (r.options[2])
    for (int i = 0; i < n; ++i) bit[i] = i % m * 8 + i / m;
  float step[TILE];
  halves(r.row(r.options[3], r.first, 2), r.count, step);
  for (int t = 0; t < r.count; ++t) step[t] = step[t] * 2 / (float)((1 << R) - 1);
  constexpr int SOME = 4;  // tokens whose numbers have reached memory before they are read
  uint32_t row[SOME][CHUNKS];
  float length[SOME][CHUNKS];
  for (int first = 0; first < r.count; first += SOME) {
    const int count = r.count - first < SOME ? r.count - first : SOME;
    for (int k = 0; k < count; ++k)
      chunks<W, R>(r, r.first + first + k, n, step[first + k], bit, row[k], length[k]);
    float* out = r.out + first * r.dim;
    for (int k = 0; k < count; ++k, out += r.dim)
      for (int i = 0; i < n; i += LANES / 4)
        store(out + 4 * i, four_by_four(r.tables, row[k] + i) * each_four_times(length[k] + i));
  }
}

}  // namespace kv
