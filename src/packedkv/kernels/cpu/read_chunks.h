// hqmq (packedkv/codecs/hqmq.py): a row of the head's codebook, a sign and a radius per four channels.
//
// Planes: the layout's fields. Options: 2 whether bits are in the order of codecs/hqmq.py, 3 how many planes lie
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

constexpr int CHUNKS = WIDEST / 4 + LANES;
constexpr int SOME_TOKENS = 8;  // whose chunks reach memory before they are read; fresh stores are slow to read

// What tokens' chunks are: byte of the table at which the row begins, and signed length; a token has `each` of them.
struct Chunks {
  int each;
  alignas(64) uint32_t row[SOME_TOKENS * CHUNKS];
  alignas(64) float length[SOME_TOKENS * CHUNKS];

  void put(int at, U rows, F lengths) {
    memcpy(row + at, &rows, sizeof rows);
    store(length + at, lengths);
  }
};

// LANES bits of a plane (codecs/hqmq.py) of n chunks, from chunk c on: bit 12 of each lane, the others are zeros.
// by[c]: the bit's number, up to 32 chunks how far it is to be rotated to the left
KV_INLINE U plane_bits(const uint8_t* plane, const int32_t* by, int n, int c) {
  U at, x;
  memcpy(&at, by + c, sizeof at);
  if (n <= 32) {
    uint32_t all = 0;
    memcpy(&all, plane, 4);
    x = rotated(all - U{}, at);
  } else {
    for (int i = 0; i < LANES; ++i) x[i] = (uint32_t)plane[at[i] / 8] >> at[i] % 8 << 12;
  }
  return x & 0x1000u;
}

// x with the sign of `bits`
inline F signed_by(F x, U bits) { return (F)((U)x ^ (bits & 0x80000000u)); }

// The function of radii, R bits, to lengths; with SIGNED the sign lies above them. Bits above those may be anything.
template <int R, bool SIGNED> inline auto lengths_of(F step) {
  if constexpr (R <= 4 && LANES == 16) {
    const Table<4> table([](I i) {
      const F radius = convert(i & ((1 << R) - 1));
      return SIGNED ? signed_by(radius, (U)i << (31 - R)) : radius;
    });
    return [table = table.times(step)](U x) { return table((I)x); };
  } else {
    return [step](U x) {
      const F length = convert((I)(x & ((1u << R) - 1))) * step;
      return SIGNED ? signed_by(length, x << (31 - R)) : length;
    };
  }
}

// chunks of `count` tokens from `place` on; W bits of a code, R of a radius. Vectors may read behind a row, in the page
template <int W, int R>
KV_INLINE void chunks(const Rows& r, int place, int count, int n, const float* steps, const int32_t* by, Chunks& to) {
  constexpr int SPARE = W + R - 16, LOW = 16 - W;
  if constexpr (SPARE >= 0) {
    constexpr uint32_t HELD = 0x7fff >> LOW << 4;
    const int more_bytes = n * SPARE / 8;
    const uint8_t *units = r.row(0, place, 2 * n), *more = r.row(1, place, more_bytes);
    for (int t = 0, at = 0; t < count; ++t, at += to.each, units += 2 * n, more += more_bytes) {
      const auto lengths = lengths_of<R, false>(splat(steps[t]));
      for (int c = 0; c < n; c += LANES) {
        const U unit = widen<uint16_t>(units + 2 * c), rows = LOW > 4 ? unit >> (LOW - 4) : unit << (4 - LOW);
        U radius = unit;
        if constexpr (SPARE > 0) radius = (unit & ((1u << LOW) - 1)) | (U)codes<SPARE>(more, c) << LOW;
        to.put(at + c, rows & HELD, signed_by(lengths(radius), unit << 16));
      }
    }
  } else {
    constexpr int PART = W == 10 ? 8 : W - 1, PLANES_HELD = (W == 10) + (R == 4);
    const int part_bytes = n * PART / 8, flag_bytes = PLANES_HELD * n / 8, upper = W == 10 ? n / 8 : 0;
    const uint8_t *parts = r.row(0, place, part_bytes), *radii = r.row(1, place, n / 2);
    const uint8_t* flags = r.row(2, place, flag_bytes);
    for (int t = 0, at = 0; t < count; ++t, at += to.each, parts += part_bytes, radii += n / 2, flags += flag_bytes) {
      const auto lengths = lengths_of<R, R == 3>(splat(steps[t]));
      uint32_t part[CHUNKS];
      if constexpr (PART != 8)
        for (int i = 0; i < n; i += 4) {
          uint64_t word;
          memcpy(&word, parts + i * PART / 8, 8);
          word >>= i * PART % 8;
          for (int j = 0; j < 4; ++j) part[i + j] = (uint32_t)(word >> j * PART & ((1 << PART) - 1)) << 4;
        }
      for (int c = 0; c < n; c += LANES) {
        U rows;
        if constexpr (PART == 8) rows = widen<uint8_t>(parts + c) << 4 | plane_bits(flags, by, n, c);
        else memcpy(&rows, part + c, sizeof rows);
        F length = lengths((U)codes<4>(radii, c));
        if constexpr (R == 4) length = signed_by(length, plane_bits(flags + upper, by, n, c) << 19);
        to.put(at + c, rows, length);
      }
    }
  }
}

// the same of plain streams
template <int W, int R>
inline void plain_chunks(const Rows& r, int place, int count, int n, const float* steps, Chunks& to) {
  const int code_bytes = (n * W + 7) / 8, radius_bytes = (n * R + 7) / 8;
  for (int t = 0; t < count; ++t) {
    const uint8_t *codes = r.row(0, place + t, code_bytes), *radii = r.row(1, place + t, radius_bytes);
    for (int i = 0; i < n; ++i) {
      const uint32_t code = code_at(codes, code_bytes, W, i);
      const float size = (float)code_at(radii, radius_bytes, R, i) * steps[t];
      to.row[t * to.each + i] = code >> 1 << 4, to.length[t * to.each + i] = code & 1 ? -size : size;
    }
  }
}

template <int W, int R> KV_INLINE void all_chunks(const Rows& r, int dim) {
  const int n = (dim + 3) / 4, m = n / 8;
  int32_t by[CHUNKS] = {};
  if (r.options[2])
    for (int i = 0; i < n; ++i) {
      const int bit = i % m * 8 + i / m;
      by[i] = n <= 32 ? (12 - bit) & 31 : bit;
    }
  float step[TILE];
  halves(r.row(r.options[3], r.first, 2), r.count, step);
  for (int t = 0; t < r.count; ++t) step[t] = step[t] * 2 / (float)((1 << R) - 1);
  Chunks of;
  of.each = (n + LANES - 1) / LANES * LANES;
  for (int first = 0; first < r.count; first += SOME_TOKENS) {
    const int count = r.count - first < SOME_TOKENS ? r.count - first : SOME_TOKENS;
    if (r.options[2]) chunks<W, R>(r, r.first + first, count, n, step + first, by, of);
    else plain_chunks<W, R>(r, r.first + first, count, n, step + first, of);
    const uint8_t* tables = r.tables;
    float* out = r.out + first * dim;
    for (int t = 0; t < count; ++t, out += dim) {
      const uint32_t* row = of.row + t * of.each;
      for (int i = 0; i < n; i += LANES) {
        const F lengths = load(of.length + t * of.each + i);
        const auto put = [&](auto quarter) KV_JOINED {
          constexpr int J = decltype(quarter)::value, EACH = LANES / 4;
          if (i + J * EACH >= n) return;
          store(out + 4 * i + J * LANES, four_by_four(tables, row + i + J * EACH) * each_four_times<J>(lengths));
        };
        put(std::integral_constant<int, 0>()), put(std::integral_constant<int, 1>());
        put(std::integral_constant<int, 2>()), put(std::integral_constant<int, 3>());
      }
    }
  }
}

template <int W, int R> KV_APART void unpack_hqmq(const Rows& r) {
  known_dim(r.dim, [&](auto dim) KV_JOINED { all_chunks<W, R>(r, dim); });
}

}  // namespace kv
