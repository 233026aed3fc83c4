// Codes of which groups of channels, or of tokens, share a map: int, kivi, innerq, ultraquant, ultra-tq, q4_0.
//
// Planes: 0 the codes, 1 the scales, 2 the zeros where there are any. Along channels a token has a scale per group;
// along tokens a block has one per channel.
#pragma once
#include "read_linear.h"

namespace kv {

constexpr int MOST_GROUPS = WIDEST / 16;

// Runs of 128 channels whose codes of 2 or 3 bits are interleaved (ops/interleaved.py), as a plain stream.
template <int BITS> inline void deinterleave(const uint8_t* row, int dim, uint8_t* out) {
  for (int run = 0; run < dim; run += 128, row += 16 * BITS, out += 16 * BITS) {
    if constexpr (BITS == 2) {
      for (int q = 0; q < 4; ++q)
        for (int g = 0; g < 8; ++g) out[8 * q + g] = row[16 * (q / 2) + 2 * g + q % 2];
    } else {
      uint16_t unit[3][8], quad[4][8];
      memcpy(unit, row, sizeof unit);
      for (int g = 0; g < 8; ++g) {
        const uint16_t u = unit[0][g], v = unit[1][g], w = unit[2][g];
        const uint16_t last = (uint16_t)((u >> 15 & 1) | (v >> 14 & 2) | (w >> 13 & 4));
        quad[0][g] = u & 0xfff;
        quad[1][g] = (uint16_t)((u >> 12 & 7) | v << 3) & 0xfff;
        quad[2][g] = (uint16_t)((v >> 9 & 077) | w << 6) & 0xfff;
        quad[3][g] = (uint16_t)((w >> 6 & 0777) | last << 9) & 0xfff;
      }
      for (int q = 0; q < 4; ++q)
        for (int g = 0; g < 8; g += 2) {
          const uint32_t both = (uint32_t)quad[q][g] | (uint32_t)quad[q][g + 1] << 12;
          uint8_t* to = out + 12 * q + g / 2 * 3;
          to[0] = (uint8_t)both, to[1] = (uint8_t)(both >> 8), to[2] = (uint8_t)(both >> 16);
        }
    }
  }
}

// `map(group, token)` gives the function of codes of a token's group; options: 0 channels of a group, 1 interleaved
template <int BITS, class Map> inline void unpack_groups(const Rows& r, const Map& map) {
  const int group = r.options[0] ? r.options[0] : r.dim, groups = (r.dim + group - 1) / group;
  uint8_t plain[WIDEST * 3 / 8];
  for (int t = 0; t < r.count; ++t) {
    const uint8_t* row = r.row(0, r.first + t, r.dim * BITS / 8);
    if constexpr (BITS == 2 || BITS == 3)
      if (r.options[1]) deinterleave<BITS>(row, r.dim, plain), row = plain;
    float* out = r.out + t * r.dim;
    for (int g = 0; g < groups; ++g) {
      const int end = (g + 1) * group < r.dim ? (g + 1) * group : r.dim;
      const auto entry = map(t * groups + g);
      if constexpr (BITS <= 4) look_up(row, g * group, end, Table<BITS>(entry), out);
      else
        for (int c = g * group; c < end; c += LANES) store(out + c, entry(codes<BITS>(row, c)));
    }
  }
}

inline int groups_of(const Rows& r) { return r.options[0] ? (r.dim + r.options[0] - 1) / r.options[0] : 1; }

// S q + Z, or S (q - 2^(b-1)) where symmetric
template <int BITS, bool SYMMETRIC> inline void unpack_int(const Rows& r) {
  const int groups = groups_of(r);
  float scales[TILE * MOST_GROUPS], zeros[TILE * MOST_GROUPS];
  halves(r.row(1, r.first, 2 * groups), r.count * groups, scales);
  if constexpr (SYMMETRIC) {
    unpack_groups<BITS>(r, [&](int i) {
      const F s = splat(scales[i]);
      return [=](I q) { return convert(q - (1 << (BITS - 1))) * s; };
    });
  } else {
    halves(r.row(2, r.first, 2 * groups), r.count * groups, zeros);
    unpack_groups<BITS>(r, [&](int i) {
      const F s = splat(scales[i]), z = splat(zeros[i]);
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
    for (int i = 0; i < n; ++i) {
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
  const int group = r.options[0] ? r.options[0] : r.dim;
  for (int t = 0; t < r.count; ++t)
    for (int g = 0; g < groups; ++g) {
      const int end = (g + 1) * group < r.dim ? (g + 1) * group : r.dim;
      const uint8_t* row = r.row(0, r.first + t, r.dim / 2);
      look_up(row, g * group, end, levels.times(splat(scales[t * groups + g])), r.out + t * r.dim);
    }
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

// Along tokens. ASYMMETRIC: S q + Z; SYMMETRIC: S (q - 2^(b-1)); HYBRID: either, by the scale's sign.
enum Along { ASYMMETRIC, SYMMETRIC, HYBRID };

// Option 0: tokens of a block
template <int BITS, Along KIND> inline void unpack_tokens(const Rows& r) {
  const int group = r.options[0], dim = r.dim;
  float s[WIDEST], z[WIDEST];
  int held = -1;
  for (int t = 0; t < r.count; ++t) {
    const int place = r.first + t, block = place / group;
    if (block != held) {
      halves(r.row(1, block, 2 * dim), dim, s);
      if (KIND != SYMMETRIC) halves(r.row(2, block, 2 * dim), dim, z);
      held = block;
    }
    const uint8_t* row = r.row(0, place, dim * BITS / 8);
    for (int c = 0; c < dim; c += LANES) {
      const I q = codes<BITS>(row, c) & splat_int((1 << BITS) - 1);
      const F scale = load(s + c);
      F x;
      if constexpr (KIND == ASYMMETRIC) x = convert(q) * scale + load(z + c);
      if constexpr (KIND == SYMMETRIC) x = convert(q - (1 << (BITS - 1))) * scale;
      if constexpr (KIND == HYBRID) {
        const I mask = (I)scale >> 31;
        const F size = (F)((I)scale & 0x7fffffff), zero = (F)((I)load(z + c) & mask);
        x = convert(q - (~mask & splat_int(1 << (BITS - 1)))) * size + zero;
      }
      store(r.out + t * dim + c, x);
    }
  }
}

}  // namespace kv
