// Codes with one map per token: saw-int4 (kvcodec/codecs/saw_int4.py), turboquant, fp8 and numbers held dense.
//
// Planes: 0 the codes, 1 the token's scales. Up to four bits a token's 2^b numbers are computed once and looked up.
#pragma once
#include "reader.h"
#include "simd.h"

namespace kv {

// channels [first, end) of a row
template <int BITS>
inline void look_up(const uint8_t* row, int first, int end, const Table<BITS>& table, float* out) {
  for (int c = first; c < end; c += LANES) store(out + c, table(codes<BITS>(row, c)));
}

// s (q - z), s and z fp16 side by side
inline void unpack_saw(const Rows& r) {
  float scales[2 * TILE];
  halves(r.row(1, r.first, 4), 2 * r.count, scales);
  for (int t = 0; t < r.count; ++t) {
    const F s = splat(scales[2 * t]), z = splat(scales[2 * t + 1]);
    const Table<4> table([=](I q) { return s * (convert(q) - z); });
    look_up(r.row(0, r.first + t, r.dim / 2), 0, r.dim, table, r.out + t * r.dim);
  }
}

// level[q] (norm root); tables: root, then the levels, float32. Option 0: whether norms are float32
template <int BITS> inline void unpack_levels(const Rows& r) {
  const float root = float_at(r.tables);
  const float* levels = (const float*)r.tables + 1;
  const auto level = [=](I q) {
    F x;
    for (int i = 0; i < LANES; ++i) x[i] = levels[q[i] & ((1 << BITS) - 1)];
    return x;
  };
  const Table<(BITS <= 4 ? BITS : 1)> table(level);
  float norms[TILE];
  if (r.options[0]) memcpy(norms, r.row(1, r.first, 4), sizeof(float) * r.count);
  else halves(r.row(1, r.first, 2), r.count, norms);
  for (int t = 0; t < r.count; ++t) {
    const F scale = splat(norms[t] * root);
    const uint8_t* row = r.row(0, r.first + t, r.dim * BITS / 8);
    float* out = r.out + t * r.dim;
    if constexpr (BITS <= 4) look_up(row, 0, r.dim, table.times(scale), out);
    else
      for (int c = 0; c < r.dim; c += LANES) store(out + c, level(codes<BITS>(row, c)) * scale);
  }
}

// E4M3 times the token's scale. Option 0: whether there is one
inline void unpack_fp8(const Rows& r) {
  float scales[TILE];
  if (r.options[0]) halves(r.row(1, r.first, 2), r.count, scales);
  for (int t = 0; t < r.count; ++t) {
    const uint8_t* row = r.row(0, r.first + t, r.dim);
    const F scale = splat(r.options[0] ? scales[t] : 1.0f);
    for (int c = 0; c < r.dim; c += LANES) {
      const U x = widen<uint8_t>(row + c), rest = x & 0x7fu;
      const U size = (U)((F)(rest << 20) * splat(0x1p120f)) | ((U)(rest == 0x7fu) & 0x7fc00000u);
      store(r.out + t * r.dim + c, (F)(size | (x & 0x80u) << 24) * scale);
    }
  }
}

// rows of numbers: kind 0 fp16, 1 bf16, 2 float32
inline void unpack_numbers(const uint8_t* from, int64_t stride, int kind, int count, int dim, float* out) {
  for (int t = 0; t < count; ++t, from += stride, out += dim) {
    for (int c = 0; c < dim; c += LANES) {
      if (kind == 0) store(out + c, load_halves(from + 2 * c));
      else if (kind == 1) store(out + c, (F)(widen<uint16_t>(from + 2 * c) << 16));
      else store(out + c, load((const float*)from + c));
    }
  }
}

// Option 0: their kind
inline void unpack_dense(const Rows& r) {
  const int bytes = r.dim * (r.options[0] == 2 ? 4 : 2);
  unpack_numbers(r.row(0, r.first, bytes), bytes, r.options[0], r.count, r.dim, r.out);
}

}  // namespace kv
