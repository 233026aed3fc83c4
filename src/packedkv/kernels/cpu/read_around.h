// Methods around another one: the sign sketch of a residual (turboquant-qjl, octopus-qjl), and outliers held in fp16.
#pragma once
#include "read_chunks.h"
#include "read_groups.h"

namespace kv {

// times the Hadamard matrix of +1 and -1 within a vector; whole numbers stay exact
template <int HALF = 1> inline F signed_sums(F x) {
  I other, minus;
  for (int i = 0; i < LANES; ++i) other[i] = i ^ HALF, minus[i] = i & HALF ? (int32_t)0x80000000 : 0;
  x = KV_SHUFFLE(x, x, other) + (F)((I)x ^ minus);
  if constexpr (2 * HALF < LANES) return signed_sums<2 * HALF>(x);
  else return x;
}

// Option 6: number of the plane of signs, which the residual's length follows. Tables: the sketch's D signs, then the
// coefficient, float32, then the stage's tables. row becomes (row + the residual's estimate) norm
inline void add_residual(const Rows& r, int t, float norm, float* row) {
  const int place = r.first + t, plane = r.options[6], dim = r.dim, count = dim / LANES;
  const uint8_t* bits = r.row(plane, place, dim / 8);
  const float* signs = (const float*)r.tables;
  const F size = splat(half(r.row(plane + 1, place, 2)) * signs[dim]);
  F x[WIDEST / LANES];
  for (int i = 0; i < count; ++i)
    x[i] = signed_sums(convert((codes<1>(bits, i * LANES) & 1) * 2 - 1));
  for (int step = 1; step < count; step *= 2)
    for (int i = 0; i < count; i += 2 * step)
      for (int j = i; j < i + step; ++j) {
        const F a = x[j], b = x[j + step];
        x[j] = a + b, x[j + step] = a - b;
      }
  for (int i = 0; i < count; ++i) {
    float* to = row + i * LANES;
    store(to, (load(to) + x[i] * load(signs + i * LANES) * size) * norm);
  }
}

inline Rows stage_of(const Rows& r) {
  Rows stage = r;
  stage.tables += 4 * (r.dim + 1);
  return stage;
}

template <int BITS> inline void unpack_levels_sketch(const Rows& r) {
  const Rows stage = stage_of(r);
  const float* levels = (const float*)stage.tables + 1;
  const float root = float_at(stage.tables);
  const Table<BITS> table([=](I q) {
    F x;
    for (int i = 0; i < LANES; ++i) x[i] = levels[q[i]];
    return x;
  });
  for (int t = 0; t < r.count; ++t) {
    const int place = r.first + t;
    float* row = r.out + t * r.dim;
    const uint8_t* codes_row = r.row(0, place, r.dim * BITS / 8);
    for (int c = 0; c < r.dim; c += LANES) store(row + c, table(codes<BITS>(codes_row, c)));
    add_residual(r, t, (r.options[0] ? float_at(r.row(1, place, 4)) : half(r.row(1, place, 2))) * root, row);
  }
}

inline void unpack_octopus_sketch(const Rows& r) {
  const Rows stage = stage_of(r);
  float ones[TILE], norms[TILE];
  for (float& one : ones) one = 1;
  all_triplets<true>(stage, ones);
  triplets_norms(stage, norms);
  for (int t = 0; t < r.count; ++t) add_residual(r, t, norms[t], r.out + t * r.dim);
}

// Chunks of four channels that are held in fp16 replace what INNER unpacks. Options: 6 number of the plane of flags,
// which the outliers follow; 7 outliers of a token
template <Unpack INNER, Order ORDER = order_straight> inline void unpack_outliers(const Rows& r) {
  INNER(r);
  int16_t channel[WIDEST], place[WIDEST];
  ORDER(r.options, r.dim, channel);
  for (int c = 0; c < r.dim; ++c) place[channel[c]] = (int16_t)c;
  const int plane = r.options[6], slots = r.options[7], n = (r.dim + 3) / 4;
  for (int t = 0; t < r.count; ++t) {
    const uint8_t* flags = r.row(plane, r.first + t, (n + 7) / 8);
    const uint8_t* kept = r.row(plane + 1, r.first + t, 8 * slots);
    int slot = 0;
    for (int i = 0; i < n; ++i) {
      if (!(flags[i / 8] >> i % 8 & 1)) continue;
      const int from = slot < slots ? slot++ : slots - 1;
      for (int k = 0; k < 4; ++k) r.out[t * r.dim + place[4 * i + k]] = half(kept + 8 * from + 2 * k);
    }
  }
}

}  // namespace kv
