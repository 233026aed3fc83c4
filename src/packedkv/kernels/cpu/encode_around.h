// Encoders with another one inside: the sign sketch of a residual (turboquant-qjl, octopus-qjl; ops/qjl.py).
//
// Option 7: number of the plane of signs, which the residual's length follows. Tables: the sketch's D signs, float32,
// then the stage's tables.
#pragma once
#include "encode_triplets.h"

namespace kv {

inline New stage_of(const New& n) {
  New stage = n;
  stage.tables += 4 * n.dim;
  return stage;
}

// r [D]: what the stage leaves of token t's unit vector; overwritten
inline void store_sketch(const New& n, int t, double* r) {
  const float* signs = (const float*)n.tables;
  const uint16_t length = to_half((float)std::sqrt(square_sum(r, n.dim)));
  memcpy(n.at(n.options[7] + 1, t), &length, 2);
  for (int c = 0; c < n.dim; ++c) r[c] = nearest(r[c] * 0x1p30) * signs[c];  // whole numbers, whose sums are exact
  for (int half = 1; half < n.dim; half *= 2)
    for (int i = 0; i < n.dim; i += 2 * half)
      for (int j = i; j < i + half; ++j) {
        const double a = r[j], b = r[j + half];
        r[j] = a + b, r[j + half] = a - b;
      }
  uint8_t* to = n.at(n.options[7], t);
  for (int i = 0; i < n.dim / 8; ++i) {
    uint32_t byte = 0;
    for (int k = 0; k < 8; ++k) byte |= (uint32_t)(r[8 * i + k] >= 0) << k;
    to[i] = (uint8_t)byte;
  }
}

// The stage's tables: the walls, double, and the levels, float32. Option 0: whether norms are float32
template <int BITS> inline void encode_levels_sketch(const New& n) {
  constexpr int SIZE = 1 << BITS;
  const uint8_t* tables = stage_of(n).tables;
  double walls[SIZE], r[WIDEST];
  float levels[SIZE];
  memcpy(walls, tables, sizeof walls), memcpy(levels, tables + sizeof walls, sizeof levels);
  uint8_t codes[WIDEST];
  for (int t = 0; t < n.count; ++t) {
    const float* y = n.rows + t * n.dim;
    const double norm = std::sqrt(square_sum(y, n.dim));
    store_norm(n.at(1, t), norm, n.dim, n.options[0]);
    for (int c = 0; c < n.dim; ++c) {
      const double u = norm > 0 ? y[c] / norm : 0;
      codes[c] = (uint8_t)walls_below(walls, SIZE, u);
      r[c] = u - levels[codes[c]];
    }
    pack<BITS>(codes, n.dim, n.at(0, t));
    store_sketch(n, t, r);
  }
}

inline void encode_octopus_sketch(const New& n) {
  const New stage = stage_of(n);
  const Triplets triplets(stage);
  double unit[WIDEST + 2];
  uint32_t codes[WIDEST / 3 + 1];
  for (int t = 0; t < n.count; ++t) {
    encode_triplets(stage, triplets, t, unit, codes);
    for (int c = 0; c < n.dim; ++c) {
      const uint32_t code = codes[c / 3];
      const float direction = triplets.directions[4 * (code >> triplets.length) + c % 3];
      const float held = direction * triplets.lengths[code & ((1u << triplets.length) - 1)];
      unit[c] -= held;
    }
    store_sketch(n, t, unit);
  }
}

}  // namespace kv
