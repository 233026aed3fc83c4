// Encoder of octopus (packedkv/codecs/octopus.py): the direction and length of each three channels of the unit vector.
//
// Planes and options 0 to 5: as in read_triplets.h. Option 6: the rounding, an Octopus.rounding by its place in Rounding.
// Tables: walls of the octahedral coordinates, double [2^b_dir], those of the lengths, double [2^b_nrm], each filled up
// with infinity; then directions (x, y, z, 0), float32 [4^b_dir], and lengths, float32 [2^b_nrm].
#pragma once
#include "encode_linear.h"

namespace kv {

enum Rounding { ROUND_SCALAR, ROUND_2X2, ROUND_3X3, ROUND_FULL };

// A row's codes in the bytes of codecs/octopus.py.
struct SplitWords {
  int words;       // bits of a part that are whole words
  int bits, low;   // of a code, and of those its lower field; low = 0: codes are whole

  void store(const uint32_t* codes, int n, uint8_t* front, uint8_t* tail) const {
    Stream rest(tail);
    for (int part = 0, first = 0; part < 4; ++part) {
      Stream own(front + part * words / 8);
      int at = 0;
      const auto put = [&](uint32_t x, int size) {
        const int inside = std::min(size, std::max(0, words - at));
        own.put(x & ((1u << inside) - 1), inside);
        rest.put(x >> inside, size - inside);
        at += size;
      };
      const int end = first + n / 4;
      for (int i = first; i < end; ++i) put(codes[i] >> low, bits - low);
      for (int i = first; low && i < end; ++i) put(codes[i] & ((1u << low) - 1), low);
      first = end;
      if (part < n % 4) put(codes[first++], bits);
    }
    rest.end();
  }
};

struct Triplets {
  int direction, length;  // bits
  Rounding rounding;
  const double *square_walls, *length_walls;
  const float *directions, *lengths;

  explicit Triplets(const New& n)
      : direction(n.options[0]), length(n.options[1]), rounding((Rounding)n.options[6]),
        square_walls((const double*)n.tables), length_walls(square_walls + (1 << direction)),
        directions((const float*)(length_walls + (1 << length))), lengths(directions + (4 << 2 * direction)) {}

  // the code of a part of a unit vector
  uint32_t code(double x, double y, double z) const {
    // codecs/octopus.py, to_square
    const double size = std::max(std::fabs(x) + std::fabs(y) + std::fabs(z), 1e-300);
    const double p = x / size, q = y / size, a = 1 - std::fabs(q), b = 1 - std::fabs(p);
    const double xi = z < 0 ? (p >= 0 ? a : -a) : p, eta = z < 0 ? (q >= 0 ? b : -b) : q;
    const int levels = 1 << direction;
    int i = walls_below(square_walls, levels, xi), j = walls_below(square_walls, levels, eta);
    uint32_t chosen = (uint32_t)(i << direction | j);
    double found;
    if (rounding == ROUND_SCALAR) {
      found = std::sqrt(x * x + y * y + z * z);
    } else {
      const int side = rounding == ROUND_FULL ? levels : 2;
      if (rounding == ROUND_FULL) i = j = 0;
      double best = -INFINITY;
      for (int u = 0; u < side; ++u)
        for (int v = 0; v < side; ++v) {
          const uint32_t row = (uint32_t)(std::min(i + u, levels - 1) << direction | std::min(j + v, levels - 1));
          const float* d = directions + 4 * row;
          const double score = (double)d[0] * x + (double)d[1] * y + (double)d[2] * z;
          const bool more = score > best;
          best = more ? score : best, chosen = more ? row : chosen;
        }
      found = std::min(std::max(best, 0.0), 1.0);
    }
    return chosen << length | (uint32_t)walls_below(length_walls, 1 << length, found);
  }
};

// writes token t; leaves its unit vector, filled up with zeros, and the codes
inline void encode_triplets(const New& n, const Triplets& triplets, int t, double* unit, uint32_t* codes) {
  const int count = (n.dim + 2) / 3, bits = 2 * triplets.direction + triplets.length;
  const int front = n.options[4] > 0, norm_plane = front + (n.options[5] > 0);
  const SplitWords words{2 * n.options[4], bits, n.options[2] ? triplets.length : 0};
  const float* y = n.rows + t * n.dim;
  const double norm = std::sqrt(square_sum(y, n.dim));
  store_norm(n.at(norm_plane, t), norm, n.dim, n.options[3]);
  for (int c = 0; c < n.dim; ++c) unit[c] = norm > 0 ? y[c] / norm : 0;
  for (int c = n.dim; c < 3 * count; ++c) unit[c] = 0;
  for (int i = 0; i < count; ++i) codes[i] = triplets.code(unit[3 * i], unit[3 * i + 1], unit[3 * i + 2]);
  words.store(codes, count, n.at(0, t), n.at(front, t));
}

inline void encode_octopus(const New& n) {
  const Triplets triplets(n);
  double unit[WIDEST + 2];
  uint32_t codes[WIDEST / 3 + 1];
  for (int t = 0; t < n.count; ++t) encode_triplets(n, triplets, t, unit, codes);
}

}  // namespace kv
