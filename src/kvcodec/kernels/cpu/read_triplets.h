// octopus (kvcodec/codecs/octopus.py): a code per three channels, in the order of bits of ops/split_words.py.
//
// Planes: as the layout's fields, codes and tail (one of them may be missing), then the norm. Options: 0 bits of a
// direction, 1 bits of a length, 2 whether fields of a code are held apart, 3 whether norms are float32, 4 bytes of the
// codes, 5 bytes of the tail. Tables, float32: sqrt(D); then triplets (x, y, z, 0) of all codes, or, with fields
// apart, of all directions, and the lengths.
#pragma once
#include "reader.h"
#include "simd.h"

namespace kv {

typedef float Four __attribute__((vector_size(16)));

inline uint32_t bits_at(const uint8_t* p, int bit) {  // 25 bits at least; reads 4 bytes
  uint32_t word;
  memcpy(&word, p + bit / 8, 4);
  return word >> bit % 8;
}

inline float triplets_norm(const Rows& r, int t) {
  const int plane = (r.options[4] > 0) + (r.options[5] > 0), place = r.first + t;
  return (r.options[3] ? float_at(r.row(plane, place, 4)) : half(r.row(plane, place, 2))) * float_at(r.tables);
}

// one token's triplets, times scale
template <bool APART> inline void triplets(const Rows& r, int t, float scale, float* out) {
  const int direction = r.options[0], length = r.options[1], bits = 2 * direction + length;
  const int held = r.options[4] / 4, rest = r.options[5], n = (r.dim + 2) / 3, least = n / 4;
  const uint32_t all = (1u << bits) - 1, ways = (1u << 2 * direction) - 1, sizes = (1u << length) - 1;
  const float* rows = (const float*)r.tables + 1;
  const float* lengths = rows + (4 << 2 * direction);
  const uint8_t* words = r.row(0, r.first + t, 4 * held);
  const uint8_t* behind = r.row(held ? 1 : 0, r.first + t, rest);
  uint8_t tail[WIDEST + 8], stream[WIDEST + 16];
  for (int i = 0; i < rest; ++i) tail[i] = behind[i];
  memset(tail + rest, 0, 8);
  int at = 0, done = 0;  // bit of the tail, codes done
  const auto put = [&](Four x) {
    x *= scale;
    if (3 * done + 4 <= r.dim) memcpy(out + 3 * done, &x, 16);
    else for (int i = 0; 3 * done + i < r.dim && i < 3; ++i) out[3 * done + i] = x[i];
    ++done;
  };
  const auto look = [&](uint32_t code) {
    Four x;
    if constexpr (APART) {
      memcpy(&x, rows + 4 * (code >> length), 16);
      return x * lengths[code & sizes];
    }
    memcpy(&x, rows + 4 * code, 16);
    return x;
  };
  for (int part = 0; part < 4; ++part, words += held) {
    const int count = least + (part < n % 4), left = count * bits - held * 8;
    for (int i = 0; i < held; i += 4) memcpy(stream + i, words + i, 4);
    for (int i = 0; i < left; i += 32) {  // 32 bits at any place of the tail
      uint64_t some;
      memcpy(&some, tail + (at + i) / 8, 8);
      some >>= (at + i) % 8;
      memcpy(stream + held + i / 8, &some, 8);
    }
    at += left;
    if constexpr (APART) {
      const int begin = least * 2 * direction;
      for (int i = 0; i < least; ++i) {
        const uint32_t way = bits_at(stream, i * 2 * direction) & ways, size = bits_at(stream, begin + i * length) & sizes;
        put(look(way << length | size));
      }
      if (count > least) put(look(bits_at(stream, least * bits) & all));
    } else {
      for (int i = 0; i < count; ++i) put(look(bits_at(stream, i * bits) & all));
    }
  }
}

inline void one_token(const Rows& r, int t, float scale, float* out) {
  if (r.options[2]) triplets<true>(r, t, scale, out);
  else triplets<false>(r, t, scale, out);
}

inline void unpack_octopus(const Rows& r) {
  for (int t = 0; t < r.count; ++t) one_token(r, t, triplets_norm(r, t), r.out + t * r.dim);
}

}  // namespace kv
