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

inline void unpack_triplets_to(const Rows& r, int t, float* row) {  // without the norm; row has room for 4 more
  const int direction = r.options[0], length = r.options[1], bits = 2 * direction + length;
  const bool apart = r.options[2];
  const int held = r.options[4], rest = r.options[5], n = (r.dim + 2) / 3, least = n / 4;
  const float* triplets = (const float*)r.tables + 1;
  const float* lengths = triplets + (4 << 2 * direction);
  uint8_t tail[WIDEST + 8];
  int tail_plane = held ? 1 : 0;
  if (rest) memcpy(tail, r.row(tail_plane, r.first + t, rest), rest);
  memset(tail + rest, 0, 8);
  const uint8_t* words = r.row(0, r.first + t, held);
  int at = 0, done = 0;  // bit of the tail, codes done
  for (int part = 0; part < 4; ++part) {
    const int more = part < n % 4, count = least + more;
    uint8_t stream[WIDEST + 16];  // the part's own bits
    memcpy(stream, words + part * (held / 4), held / 4);
    const int left = count * bits - held / 4 * 8;
    for (int i = 0; i < left; i += 24) {
      const uint32_t some = bits_at(tail, at + i);
      uint8_t* to = stream + held / 4 + i / 8;
      to[0] = (uint8_t)some, to[1] = (uint8_t)(some >> 8), to[2] = (uint8_t)(some >> 16);
    }
    memset(stream + held / 4 + (left + 23) / 24 * 3, 0, 4);
    at += left;
    const int high = apart ? 2 * direction : bits;
    for (int i = 0; i < count; ++i, ++done) {
      Four x;
      if (!apart) {
        const uint32_t code = bits_at(stream, i * bits) & ((1u << bits) - 1);
        memcpy(&x, triplets + 4 * code, 16);
      } else {
        uint32_t way, size;
        if (i < least) {
          way = bits_at(stream, i * high) & ((1u << high) - 1);
          size = bits_at(stream, least * high + i * length) & ((1u << length) - 1);
        } else {
          const uint32_t code = bits_at(stream, least * bits) & ((1u << bits) - 1);
          way = code >> length, size = code & ((1u << length) - 1);
        }
        memcpy(&x, triplets + 4 * way, 16);
        x *= lengths[size];
      }
      memcpy(row + 3 * done, &x, 16);
    }
  }
}

inline float triplets_norm(const Rows& r, int t) {
  const int plane = (r.options[4] > 0) + (r.options[5] > 0), place = r.first + t;
  return (r.options[3] ? float_at(r.row(plane, place, 4)) : half(r.row(plane, place, 2))) * float_at(r.tables);
}

inline void unpack_octopus(const Rows& r) {
  float row[WIDEST + 8];
  for (int t = 0; t < r.count; ++t) {
    unpack_triplets_to(r, t, row);
    const F scale = splat(triplets_norm(r, t));
    for (int c = 0; c < r.dim; c += LANES) store(r.out + t * r.dim + c, load(row + c) * scale);
  }
}

}  // namespace kv
