// Codes with one map per token: saw-int4 (packedkv/codecs/saw_int4.py), turboquant, fp8 and numbers held dense.
//
// Planes: 0 the codes, 1 the token's scales. Up to four bits a token's 2^b numbers are computed once and looked up.
#pragma once
#include <type_traits>

#include "reader.h"
#include "simd.h"

namespace kv {

// Whether a row of codes is read in blocks: a lane has the codes of BYTES bytes, whose first ones are the lanes of one
// vector, the next ones of the next, so that a shift and a look-up make a vector.
template <int BITS, int BYTES>
constexpr bool BLOCKS = BITS == 3 ? BYTES == 3 : BYTES != 3 && (BITS == 4 || BITS == 2 || BITS == 1);

// `with(c, constant)` gets the blocks of channels [first, end) by their first channel and the bytes of a lane
template <int BITS, class With> inline int in_blocks(int first, int end, const With& with) {
  const auto of = [&](auto bytes) {
    if constexpr (BLOCKS<BITS, bytes>)
      for (constexpr int SIZE = 8 * bytes / BITS * LANES; first + SIZE <= end; first += SIZE) with(first, bytes);
  };
  of(std::integral_constant<int, 4>());
  of(std::integral_constant<int, 3>());
  of(std::integral_constant<int, 2>());
  of(std::integral_constant<int, 1>());
  return first;
}

// Rows of codes, `bytes` apart, to rows of dim numbers.
struct Codes {
  const uint8_t* row;
  int64_t bytes;
  int count, dim;
  float* out;

  Codes(const Rows& r, int bits, int first = 0)
      : row(r.row(0, r.first + first, r.dim * bits / 8)), bytes(r.dim * bits / 8), count(r.count - first), dim(r.dim),
        out(r.out + first * r.dim) {}
};

// Channels [first, end) of rows in the order of `order_run`. look_of(t) gives the function of a row: of codes (bits
// above a code may be anything) and of their place in the row.
template <int BITS, class LookOf> inline void look_up(const Codes& rows, int first, int end, const LookOf& look_of) {
  const auto each = [&](int c, const auto& unpack) {
    const uint8_t* row = rows.row + c * BITS / 8;
    float* out = rows.out + c;
    const int64_t bytes = rows.bytes, dim = rows.dim;  // for all that the compiler knows, `out` may lie over rows
    for (int t = 0, count = rows.count; t < count; ++t, row += bytes, out += dim) {
      const auto look = look_of(t);
      unpack(row, [&](int j, I x) { store(out + j * LANES, look(x, c + j * LANES)); });
    }
  };
  first = in_blocks<BITS>(first, end, [&](int c, auto bytes) {
    each(c, [](const uint8_t* row, const auto& put) {
      constexpr int BYTES = decltype(bytes)::value;
      const U x = lanes<BYTES>(row);
      for (int j = 0; j < 8 * BYTES / BITS; ++j) put(j, (I)(x >> j * BITS));
    });
  });
  const auto straight = [&](auto vectors) {
    constexpr int COUNT = decltype(vectors)::value;
    for (; first + COUNT * LANES <= end; first += COUNT * LANES)
      each(first, [c = first](const uint8_t* row, const auto& put) {
        for (int j = 0; j < COUNT; ++j) put(j, codes<BITS>(row - c * BITS / 8, c + j * LANES));
      });
  };
  straight(std::integral_constant<int, 4>());
  straight(std::integral_constant<int, 1>());
}

template <int BITS> inline void order_run(int first, int end, int16_t* channel) {
  first = in_blocks<BITS>(first, end, [&](int c, auto bytes) {
    constexpr int EACH = 8 * bytes / BITS;
    for (int j = 0; j < EACH; ++j)
      for (int i = 0; i < LANES; ++i) channel[c + j * LANES + i] = (int16_t)(c + i * EACH + j);
  });
  for (int c = first; c < end; ++c) channel[c] = (int16_t)c;
}

template <int BITS> inline void order_row(const int32_t*, int dim, int16_t* channel) {
  order_run<BITS>(0, dim, channel);
}

// s (q - z), s and z fp16 side by side
inline void unpack_saw(const Rows& r) {
  float scales[2 * TILE];
  halves(r.row(1, r.first, 4), 2 * r.count, scales);
  look_up<4>(Codes(r, 4), 0, r.dim, [scales = (const float*)scales](int t) {
    const F s = splat(scales[2 * t]), z = splat(scales[2 * t + 1]);
    return Table<4>([=](I q) { return s * (convert(q) - z); });
  });
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
  look_up<BITS>(Codes(r, BITS), 0, r.dim, [&](int t) {
    const F scale = splat(norms[t] * root);
    if constexpr (BITS <= 4) return table.times(scale);
    else return [=](I q, int) { return level(q) * scale; };
  });
}

// E4M3 times the token's scale. Option 0: whether there is one
inline void unpack_fp8(const Rows& r) {
  float scales[TILE];
  if (r.options[0]) halves(r.row(1, r.first, 2), r.count, scales);
  for (int t = 0; t < r.count; ++t) {
    const uint8_t* row = r.row(0, r.first + t, r.dim);
    const F scale = splat(r.options[0] ? scales[t] : 1.0f);
    for (int c = 0; c < r.dim; c += LANES) {
      store(r.out + t * r.dim + c, load_e4m3(row + c) * scale);
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
