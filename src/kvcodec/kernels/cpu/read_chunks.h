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

// rows and signed lengths of one token's n chunks; W bits of a code, R of a radius
template <int W, int R> inline void chunks(const Rows& r, int place, int n, float step, int32_t* row, float* length) {
  constexpr int SPARE = W + R - 16, LOW = 16 - W;
  if (!r.options[2]) {  // plain streams
    const int code_bytes = (n * W + 7) / 8, radius_bytes = (n * R + 7) / 8;
    const uint8_t *codes = r.row(0, place, code_bytes), *radii = r.row(1, place, radius_bytes);
    for (int i = 0; i < n; ++i) {
      const uint32_t code = code_at(codes, code_bytes, W, i);
      const float size = (float)code_at(radii, radius_bytes, R, i) * step;
      row[i] = code >> 1, length[i] = code & 1 ? -size : size;
    }
  } else if constexpr (SPARE >= 0) {
    const uint8_t *units = r.row(0, place, 2 * n), *more = r.row(1, place, n * SPARE / 8);
    int32_t high[WIDEST / 4];
    for (int i = 0; i < n; ++i) high[i] = 0;
    if constexpr (SPARE > 0)
      for (int i = 0; i < n; ++i) high[i] = code_at(more, n * SPARE / 8, SPARE, i) << LOW;
    for (int i = 0; i < n; ++i) {
      uint16_t unit;
      memcpy(&unit, units + 2 * i, 2);
      const float size = (float)((unit & ((1 << LOW) - 1)) | high[i]) * step;
      row[i] = (unit & 0x7fff) >> LOW, length[i] = unit >> 15 ? -size : size;
    }
  } else {
    constexpr int PART = W == 10 ? 8 : W - 1, BITS = (W == 10) + (R == 4);
    const int m = n / 8;
    const uint8_t *low = r.row(0, place, n * PART / 8), *radii = r.row(1, place, n / 2);
    const uint8_t *flags = r.row(2, place, BITS * m), *signs = flags + (W == 10 ? m : 0);
    int32_t bit[WIDEST / 4];
    for (int i = 0; i < n; ++i) row[i] = PART == 8 ? low[i] : code_at(low, n * PART / 8, PART, i);
    if constexpr (W == 10)
      for (int g = 0; g < 8; ++g)
        for (int i = 0; i < m; ++i) row[g * m + i] |= (flags[i] >> g & 1) << 8;
    for (int i = 0; i < n; ++i) bit[i] = radii[i / 2] >> i % 2 * 4 & 15;
    if constexpr (R == 4) {
      for (int g = 0; g < 8; ++g)
        for (int i = 0; i < m; ++i) bit[g * m + i] |= (signs[i] >> g & 1) << 4;
    }
    for (int i = 0; i < n; ++i) {
      const float size = (float)(bit[i] & ((1 << R) - 1)) * step;
      length[i] = bit[i] >> R ? -size : size;
    }
  }
}

template <int W, int R> inline void unpack_hqmq(const Rows& r) {
  const int n = (r.dim + 3) / 4;
  const float* rows = (const float*)r.tables;
  for (int t = 0; t < r.count; ++t) {
    const int place = r.first + t;
    const float step = half(r.row(r.options[3], place, 2)) * 2 / (float)((1 << R) - 1);
    int32_t row[WIDEST / 4];
    float length[WIDEST / 4];
    chunks<W, R>(r, place, n, step, row, length);
    float* out = r.out + t * r.dim;
    for (int i = 0; i < n; ++i) {
      Four x;
      memcpy(&x, rows + 4 * row[i], 16);
      x *= length[i];
      memcpy(out + 4 * i, &x, 16);
    }
  }
}

}  // namespace kv
