// hqmq (kvcodec/codecs/hqmq.py): a row of the head's codebook, a sign and a radius per four channels.
//
// Planes: the layout's fields. Options: 0 bits of a code, 1 bits of a radius, 2 whether bits are in the order of
// ops/signed_rows.py, 3 how many planes lie before the scale. Tables: rows of four float32, every second of the
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

inline void unpack_hqmq(const Rows& r) {
  const int w = r.options[0], bits = r.options[1], n = (r.dim + 3) / 4, steps = (1 << bits) - 1;
  const bool signed_rows = r.options[2];
  const float* rows = (const float*)r.tables;
  for (int t = 0; t < r.count; ++t) {
    const int place = r.first + t;
    const float step = half(r.row(r.options[3], place, 2)) * 2 / (float)steps;
    float* out = r.out + t * r.dim;
    const auto put = [&](int i, uint32_t row, uint32_t sign, uint32_t radius) {
      Four x;
      memcpy(&x, rows + 4 * row, 16);
      const float length = (float)radius * step;
      x *= sign ? -length : length;
      memcpy(out + 4 * i, &x, 16);
    };
    const int spare = w + bits - 16, low = 16 - w;
    if (signed_rows && spare >= 0) {
      const uint8_t *units = r.row(0, place, 2 * n), *more = r.row(1, place, n * spare / 8);
      for (int i = 0; i < n; ++i) {
        uint16_t unit;
        memcpy(&unit, units + 2 * i, 2);
        uint32_t radius = unit & ((1u << low) - 1);
        if (spare) radius |= code_at(more, n * spare / 8, spare, i) << low;
        put(i, (unit & 0x7fffu) >> low, unit >> 15, radius);
      }
    } else if (signed_rows) {
      const int part = w == 10 ? 8 : w - 1, m = n / 8, planes = (w == 10) + (bits == 4);
      const uint8_t *low_bits = r.row(0, place, n * part / 8), *radii = r.row(1, place, n / 2);
      const uint8_t* flags = r.row(2, place, planes * m);
      const uint8_t* signs = flags + (w == 10 ? m : 0);
      for (int i = 0; i < n; ++i) {
        uint32_t row = part == 8 ? low_bits[i] : code_at(low_bits, n * part / 8, part, i);
        if (w == 10) row |= (uint32_t)(flags[i % m] >> i / m & 1) << 8;
        const uint32_t radius = radii[i / 2] >> i % 2 * 4 & 15;
        if (bits == 4) put(i, row, signs[i % m] >> i / m & 1, radius);
        else put(i, row, radius >> 3, radius & 7);
      }
    } else {
      const int code_bytes = (n * w + 7) / 8, radius_bytes = (n * bits + 7) / 8;
      const uint8_t *codes = r.row(0, place, code_bytes), *radii = r.row(1, place, radius_bytes);
      for (int i = 0; i < n; ++i) {
        const uint32_t code = code_at(codes, code_bytes, w, i);
        put(i, code >> 1, code & 1, code_at(radii, radius_bytes, bits, i));
      }
    }
  }
}

}  // namespace kv
