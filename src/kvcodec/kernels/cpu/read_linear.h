// One linear or tabulated map per token: saw-int4, int-b (group=0 of kvcodec/codecs/group_int.py), turboquant.
//
// Planes: 0 the codes, then scales as below. Up to four bits the token's 2^b numbers are computed once and looked up.
#pragma once
#include "reader.h"
#include "simd.h"

namespace kv {

template <int BITS> inline void unpack_row(const uint8_t* row, int dim, const Table<BITS>& table, float* out) {
  for (int c = 0; c < dim; c += LANES) store(out + c, table(codes<BITS>(row, c)));
}

// entry(i): the numbers of codes i
template <int BITS, class Entry> inline void unpack_row(const uint8_t* row, int dim, const Entry& entry, float* out) {
  if constexpr (BITS <= 4) unpack_row(row, dim, Table<BITS>(entry), out);
  else
    for (int c = 0; c < dim; c += LANES) store(out + c, entry(codes<BITS>(row, c)));
}

// s (q - z), s and z fp16 side by side
inline void unpack_saw(const Rows& r) {
  for (int t = 0; t < r.count; ++t) {
    const uint8_t* scales = r.row(1, r.first + t, 4);
    const F s = splat(half(scales)), z = splat(half(scales + 2));
    const auto entry = [=](I q) { return s * (convert(q) - z); };
    unpack_row<4>(r.row(0, r.first + t, r.dim / 2), r.dim, entry, r.out + t * r.dim);
  }
}

// S q + Z, or S (q - 2^(b-1)) where symmetric
template <int BITS, bool SYMMETRIC> inline void unpack_int(const Rows& r) {
  for (int t = 0; t < r.count; ++t) {
    const int place = r.first + t;
    const F s = splat(half(r.row(1, place, 2)));
    const uint8_t* row = r.row(0, place, r.dim * BITS / 8);
    if constexpr (SYMMETRIC) {
      const auto entry = [=](I q) { return convert(q - (1 << (BITS - 1))) * s; };
      unpack_row<BITS>(row, r.dim, entry, r.out + t * r.dim);
    } else {
      const F z = splat(half(r.row(2, place, 2)));
      const auto entry = [=](I q) { return convert(q) * s + z; };
      unpack_row<BITS>(row, r.dim, entry, r.out + t * r.dim);
    }
  }
}

// level[q] (norm sqrt(D)); tables: sqrt(D), then the levels, float32. Option 0: whether norms are float32
template <int BITS> inline void unpack_turboquant(const Rows& r) {
  const float root = float_at(r.tables);
  const float* levels = (const float*)r.tables + 1;
  const auto level = [=](I q) {
    F x;
    for (int i = 0; i < LANES; ++i) x[i] = levels[q[i] & ((1 << BITS) - 1)];
    return x;
  };
  const Table<BITS <= 4 ? BITS : 1> table(level);
  for (int t = 0; t < r.count; ++t) {
    const int place = r.first + t;
    const F scale = splat((r.options[0] ? float_at(r.row(1, place, 4)) : half(r.row(1, place, 2))) * root);
    const uint8_t* row = r.row(0, place, r.dim * BITS / 8);
    if constexpr (BITS <= 4) unpack_row(row, r.dim, table.times(scale), r.out + t * r.dim);
    else unpack_row<BITS>(row, r.dim, [=](I q) { return level(q) * scale; }, r.out + t * r.dim);
  }
}

}  // namespace kv
