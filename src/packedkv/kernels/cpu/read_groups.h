// Codes of which groups of channels, or of tokens, share a map: int, kivi, innerq, ultraquant, ultra-tq, q4_0.
//
// Planes: 0 the codes, 1 the scales, 2 the zeros where there are any. Along channels a token has a scale per group;
// along tokens a block has one per channel.
#pragma once
#include "read_linear.h"

namespace kv {

constexpr int MOST_GROUPS = WIDEST / 16;

// -- interleaved codes (codecs/group_int.py): runs of 128 channels -----------------------------------------------------

// of 2 bits: 32 bytes as a plain stream
inline void deinterleave(const uint8_t* row, int dim, uint8_t* out) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  for (int i = 0; i < dim / 4; i += 16) {
    Bytes x;
    memcpy(&x, row + i, 16);
#if defined(__clang__)
    x = __builtin_shufflevector(x, x, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    x = __builtin_shuffle(x, Bytes{0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15});
#endif
    memcpy(out + i, &x, 16);
  }
}

// Of 3 bits: 16 numbers of 8 codes each; code c of number i belongs to channel 64 (i / 8) + 32 (c / 4) + 4 (i % 8) +
// c % 4 of the run.
inline void eights(const uint8_t* run, uint32_t* number) {
  typedef uint16_t Units __attribute__((vector_size(16)));
  typedef uint32_t Numbers __attribute__((vector_size(32)));
  Units unit[3];
  memcpy(unit, run, sizeof unit);
  const Numbers u = __builtin_convertvector(unit[0], Numbers), v = __builtin_convertvector(unit[1], Numbers),
                w = __builtin_convertvector(unit[2], Numbers);
  const Numbers low = (u & 0x7fff) | (v & 0x1ff) << 15;
  const Numbers high = (v >> 9 & 0x3f) | (w & 0x7fff) << 6 | (u >> 15) << 21 | (v >> 15) << 22 | (w >> 15) << 23;
  memcpy(number, &low, 32), memcpy(number + 8, &high, 32);
}

// `map(g, t)` gives the function of codes of a token's group, of a multiple of 32 channels
template <class Map> inline void look_up_eights(const Codes& rows, int group, const Map& map) {
  const I upper = (iota() >= splat_int(8)) & 8;  // lanes of the run's second half, where a vector has both
  const int each = rows.dim / 8;
  uint32_t number[TILE * WIDEST / 8];
  for (int t = 0; t < rows.count; ++t)
    for (int run = 0; run < each; run += 16) eights(rows.row + t * rows.bytes + 3 * run, number + t * each + run);
  for (int at = 0; at < each; at += LANES) {
    const int begin = at / 8 * 64, end = begin + (LANES > 8 ? 64 : 0);
    for (int half = 0; half < 2; ++half)
      for (int t = 0; t < rows.count; ++t) {
        const auto low = map((begin + 32 * half) / group, t), high = map((end + 32 * half) / group, t);
        const Table<4> table([&](I i) { return choose((i & 8) == 0, low(i & 7), high(i & 7)); });
        const U x = lanes<4>((const uint8_t*)(number + t * each + at));
        float* out = rows.out + t * rows.dim + 8 * at;
        for (int j = 4 * half; j < 4 * half + 4; ++j) store(out + j * LANES, table((I)(x >> 3 * j & 7) | upper));
      }
  }
}

inline void order_eights(int dim, int16_t* channel) {
  for (int run = 0; run < dim; run += 128)
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 8; ++j)
        channel[run + (i / LANES * 8 + j) * LANES + i % LANES] =
            (int16_t)(run + i / 8 * 64 + j / 4 * 32 + i % 8 * 4 + j % 4);
}

// -- along channels ---------------------------------------------------------------------------------------------------

inline int group_of(const int32_t* options, int dim) { return options[0] ? options[0] : dim; }

// whether two groups share a block of look_up: a lane's byte has codes of 2 bits, half of the lanes a group each
template <int BITS> inline bool in_pairs(int group, int dim) {
  return BITS == 2 && 2 * group == 4 * LANES && dim % (2 * group) == 0;
}

// `map(g, t)` gives the function of codes of a token's group; options: 0 channels of a group, 1 interleaved
template <int BITS, class Map> inline void unpack_groups(const Rows& r, const Map& map) {
  const int dim = r.dim, group = group_of(r.options, dim);
  Codes rows(r, BITS);
  if constexpr (BITS == 3)
    if (r.options[1]) return look_up_eights(rows, group, map);
  uint8_t plain[TILE * WIDEST / 4];
  if constexpr (BITS == 2) {
    if (r.options[1]) {
      deinterleave(rows.row, rows.count * dim, plain);
      rows.row = plain;
    }
    if (in_pairs<BITS>(group, dim)) {
      const I tag = (iota() >= splat_int(LANES / 2)) & 4;
      for (int g = 0; g < dim / group; g += 2)
        look_up<BITS>(rows, g * group, (g + 2) * group, [&](int t) {
          const auto low = map(g, t), high = map(g + 1, t);
          const Table<3> table([&](I i) { return choose((i & 4) == 0, low(i & 3), high(i & 3)); });
          return [=](I q, int) { return table((q & 3) | tag); };
        });
      return;
    }
  }
  for (int g = 0; g * group < dim; ++g)
    look_up<BITS>(rows, g * group, (g + 1) * group < dim ? (g + 1) * group : dim, [&](int t) {
      const auto entry = map(g, t);
      if constexpr (BITS <= 4) return Table<BITS>(entry);
      else return [=](I q, int) { return entry(q); };
    });
}

// of unpack_groups
template <int BITS> inline void order_groups(const int32_t* options, int dim, int16_t* channel) {
  if (BITS == 3 && options[1]) return order_eights(dim, channel);
  int group = group_of(options, dim);
  if (in_pairs<BITS>(group, dim)) group *= 2;
  for (int c = 0; c < dim; c += group) order_run<BITS>(c, c + group < dim ? c + group : dim, channel);
}

inline int groups_of(const Rows& r) {
  const int group = group_of(r.options, r.dim);
  return (r.dim + group - 1) / group;
}

// S q + Z, or S (q - 2^(b-1)) where symmetric
template <int BITS, bool SYMMETRIC> inline void unpack_int(const Rows& r) {
  const int groups = groups_of(r);
  float scales[TILE * MOST_GROUPS], zeros[TILE * MOST_GROUPS];
  halves(r.row(1, r.first, 2 * groups), r.count * groups, scales);
  if constexpr (SYMMETRIC) {
    unpack_groups<BITS>(r, [&](int g, int t) {
      const F s = splat(scales[t * groups + g]);
      return [=](I q) { return convert(q - (1 << (BITS - 1))) * s; };
    });
  } else {
    halves(r.row(2, r.first, 2 * groups), r.count * groups, zeros);
    unpack_groups<BITS>(r, [&](int g, int t) {
      const F s = splat(scales[t * groups + g]), z = splat(zeros[t * groups + g]);
      return [=](I q) { return convert(q) * s + z; };
    });
  }
}

// level[q] scale; tables: what norms are multiplied with, then 16 levels, float32. Option 2: scales are powers of two
inline void unpack_group_levels(const Rows& r) {
  const int groups = groups_of(r), n = r.count * groups;
  const float unit = float_at(r.tables);
  float scales[TILE * MOST_GROUPS];
  if (r.options[2]) {
    const uint8_t* bytes = r.row(1, r.first, groups);
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
      const I x = (I)widen<uint8_t>(bytes + i);
      store(scales + i, (F)(x << 23 | ((x == 0) & 1 << 22)));
    }
    for (; i < n; ++i) {
      const uint32_t bits = bytes[i] ? (uint32_t)bytes[i] << 23 : 1u << 22;
      memcpy(scales + i, &bits, 4);
    }
  } else {
    halves(r.row(1, r.first, 2 * groups), n, scales);
    for (int i = 0; i < n; ++i) scales[i] *= unit;
  }
  const Table<4> levels([&](I q) {
    F x;
    for (int i = 0; i < LANES; ++i) x[i] = ((const float*)r.tables)[1 + q[i]];
    return x;
  });
  const int group = group_of(r.options, r.dim);
  for (int g = 0; g < groups; ++g)
    look_up<4>(Codes(r, 4), g * group, (g + 1) * group < r.dim ? (g + 1) * group : r.dim,
               [&](int t) { return levels.times(splat(scales[t * groups + g])); });
}

// ggml's q4_0, d (q - 8): channels j and j + 16 of a group of 32 share a byte
inline void unpack_q4_0(const Rows& r) {
  const int groups = r.dim / 32;
  float scales[TILE * MOST_GROUPS];
  halves(r.row(1, r.first, 2 * groups), r.count * groups, scales);
  for (int t = 0; t < r.count; ++t)
    for (int g = 0; g < groups; ++g) {
      const uint8_t* row = r.row(0, r.first + t, r.dim / 2) + 16 * g;
      float* out = r.out + t * r.dim + 32 * g;
      const F d = splat(scales[t * groups + g]);
      const Table<4> table([=](I q) { return convert(q - 8) * d; });
      for (int c = 0; c < 16; c += LANES) {
        const I both = (I)widen<uint8_t>(row + c);
        store(out + c, table(both)), store(out + 16 + c, table(both >> 4));
      }
    }
}

// -- along tokens -----------------------------------------------------------------------------------------------------

// ASYMMETRIC: S q + Z; SYMMETRIC: S (q - 2^(b-1)); HYBRID: either, by the scale's sign.
enum Along { ASYMMETRIC, SYMMETRIC, HYBRID };

// Option 0: tokens of a block
template <int BITS, Along KIND> inline void unpack_tokens(const Rows& r) {
  const int group = r.options[0], dim = r.dim;
  float plain[WIDEST], s[WIDEST], z[WIDEST];
  int16_t channel[WIDEST];
  order_row<BITS>(nullptr, dim, channel);
  const auto constants = [&](int plane, int block, float* to) {
    halves(r.row(plane, block, 2 * dim), dim, plain);
    for (int c = 0; c < dim; c += LANES) store(to + c, picked_from(plain, channel + c));
  };
  const Table<(BITS <= 4 ? BITS : 1)> number([](I q) { return convert(q); });
  for (int t = 0; t < r.count;) {
    const int block = (r.first + t) / group;
    constants(1, block, s);
    if (KIND != SYMMETRIC) constants(2, block, z);
    Codes rows(r, BITS, t);
    rows.count = (block + 1) * group - r.first - t < rows.count ? (block + 1) * group - r.first - t : rows.count;
    t += rows.count;
    look_up<BITS>(rows, 0, dim, [&](int) {
      return [&](I codes, int c) {
        F q;
        if constexpr (BITS <= 4) q = number(codes);
        else q = convert(codes);
        const F scale = load(s + c);
        if constexpr (KIND == ASYMMETRIC) return q * scale + load(z + c);
        if constexpr (KIND == SYMMETRIC) return (q - (float)(1 << (BITS - 1))) * scale;
        const I mask = (I)scale >> 31;
        const F size = (F)((I)scale & 0x7fffffff), zero = (F)((I)load(z + c) & mask);
        const F middle = (F)((I)splat((float)(1 << (BITS - 1))) & ~mask);
        return (q - middle) * size + zero;
      };
    });
  }
}

}  // namespace kv
