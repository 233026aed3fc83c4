// Encoder of hqmq (packedkv/codecs/hqmq.py): a product p q_s of quaternions and a radius per four channels.
//
// Planes, options 2 and 3: as in read_chunks.h. Options: 0 S, 1 bits of a radius, 4 bits of a code. Tables: the
// components of the head's q_s, float32 [4, S], rows padded with zeros to a multiple of 16.
#pragma once
#include "encoder.h"

namespace kv {

constexpr int MOST_SECONDARY = 192;

inline double size_of(double x) { return std::fabs(x); }
inline F size_of(F x) { return (F)((I)x & 0x7fffffff); }
inline double fma(double a, double b, double c) { return a * b + c; }
inline double larger(double a, double b) { return a > b ? a : b; }
inline F larger(F a, F b) { return max(a, b); }

// v = y conj(q); of doubles, or of vectors
template <class T> inline void turned(const T* y, T a, T b, T c, T d, T* v) {
  v[0] = fma(y[3], d, fma(y[2], c, fma(y[1], b, y[0] * a)));
  v[1] = fma(y[3], c, fma(-y[2], d, fma(-y[0], b, y[1] * a)));
  v[2] = fma(-y[3], b, fma(y[1], d, fma(-y[0], c, y[2] * a)));
  v[3] = fma(y[2], b, fma(-y[1], c, fma(-y[0], d, y[3] * a)));
}

// the largest inner product of v with a Hurwitz unit
template <class T> inline T corner_score(const T* v) {
  const T a = size_of(v[0]), b = size_of(v[1]), c = size_of(v[2]), d = size_of(v[3]);
  return larger(larger(larger(a, b), larger(c, d)), (a + b + c + d) * 0.5f);
}

// Row of the unit (ops/quaternion.py, UNITS) whose inner product with v, which is not 0, is the largest one, `best`; the
// lowest row on ties.
inline uint32_t nearest_unit(const double* v, double best) {
  for (uint32_t i = 0; i < 4; ++i)
    if (size_of(v[i]) == best) return 2 * i + (v[i] < 0);
  // rows of (1 +-i +-j +-k)/2 by the signs of i, j and k, the last one fastest
  constexpr uint8_t ROWS[] = {14, 22, 10, 18, 8, 12, 16, 20};
  uint32_t signs = 0, zeros = 0, row = 24;
  for (int i = 0; i < 4; ++i) signs |= (v[i] < 0) << (3 - i), zeros |= (v[i] == 0) << (3 - i);
  for (uint32_t flip = zeros;; flip = (flip - 1) & zeros) {  // where v is 0, either sign
    const uint32_t x = signs ^ flip;
    row = std::min<uint32_t>(row, x & 8 ? ROWS[~x & 7] + 1 : ROWS[x]);
    if (!flip) return row;
  }
}

// 24 s + p of the product that has the largest inner product with a chunk; the lowest one on ties.
//
// float32 leaves out every s that is worse than the best by more than its error, double decides between the others: on
// the grid of ops/quaternion.py all of its sums are exact. In float32 a chunk is at most 2 long and q_s at most 1: a
// score is off by less than 2^-18, a difference by less than 2^-17.
struct Products {
  const float* secondary;
  int padded;

  uint32_t nearest(const float* x) const {
    float most = 0;
    for (int i = 0; i < 4; ++i) most = std::max(most, std::fabs(x[i]));
    if (most == 0) return 0;
    uint64_t bits;
    const double wide = most;
    memcpy(&bits, &wide, 8);
    bits = (uint64_t)(1022 + 1023 + 40 - (int)(bits >> 52)) << 52;  // 2^40 over the power of two above the largest
    double unit, y[4], v[4];
    memcpy(&unit, &bits, 8);
    F z[4], all[MOST_SECONDARY / LANES], best = splat(0.0f);
    for (int i = 0; i < 4; ++i) y[i] = kv::nearest(x[i] * unit), z[i] = splat((float)(y[i] * 0x1p-40));
    for (int s = 0; s < padded; s += LANES) {
      const float* q = secondary + s;
      F w[4];
      turned(z, load(q), load(q + padded), load(q + 2 * padded), load(q + 3 * padded), w);
      all[s / LANES] = corner_score(w);
      best = max(all[s / LANES], best);
    }
    const float enough = largest(best) - 0x1p-16f;
    double score = -1, held[4];
    int chosen = 0;
    for (int first = 0; first < padded; first += 64) {
      uint64_t left = 0;  // bit i: q_{first + i} may be the best
      for (int s = 0; s < 64 && first + s < padded; s += LANES)
        left |= (uint64_t)which(all[(first + s) / LANES] >= splat(enough)) << s;
      for (; left; left &= left - 1) {
        const int s = first + __builtin_ctzll(left);
        const float* q = secondary + s;
        turned<double>(y, q[0], q[padded], q[2 * padded], q[3 * padded], v);
        const double its = corner_score(v);
        if (its > score) score = its, chosen = s, memcpy(held, v, sizeof v);
      }
    }
    return 24 * (uint32_t)chosen + nearest_unit(held, score);
  }
};

// ops/quaternion.py, quantize_lengths: the radii of n chunks; returns the scale
inline uint16_t radii_of(const float* y, int n, int steps, uint32_t* radius) {
  double length[WIDEST / 4], most = 0;
  for (int i = 0; i < n; ++i) {
    double square[4];
    for (int k = 0; k < 4; ++k) square[k] = (double)y[4 * i + k] * y[4 * i + k];
    length[i] = std::sqrt(square[0] + square[1] + (square[2] + square[3]));
    most = larger(length[i], most);
  }
  const uint16_t scale = to_half((float)(most * 0.5));
  const double sigma = (double)from_half(scale) * 2;
  for (int i = 0; i < n; ++i) {
    const double wanted = sigma > 0 ? kv::nearest(length[i] * steps / sigma) : 0;
    radius[i] = (uint32_t)(wanted < steps ? wanted : steps);
  }
  return scale;
}

// codes and radii of token t in the order of codecs/hqmq.py, or as two plain streams
inline void store_chunks(const New& n, int t, int count, const uint32_t* codes, const uint32_t* radius) {
  const int r = n.options[1], w = n.options[4], spare = w + r - 16, held = 16 - w;
  Stream first(n.at(0, t)), second(n.at(1, t));
  if (!n.options[2]) {
    for (int i = 0; i < count; ++i) first.put(codes[i], w), second.put(radius[i], r);
  } else if (spare >= 0) {
    for (int i = 0; i < count; ++i) {
      const uint32_t row = codes[i] >> 1, sign = codes[i] & 1;
      first.put(sign << 15 | row << held | (radius[i] & ((1u << held) - 1)), 16);
      if (spare) second.put(radius[i] >> held, spare);
    }
  } else {
    const int low = w == 10 ? 8 : w - 1, bytes = count / 8;
    for (int i = 0; i < count; ++i) {
      const uint32_t row = codes[i] >> 1, sign = codes[i] & 1;
      first.put(row & ((1u << low) - 1), low);
      second.put(r == 3 ? radius[i] | sign << 3 : radius[i], 4);
    }
    const auto plane = [&](uint8_t* to, int bit) {
      for (int i = 0; i < bytes; ++i) {
        uint32_t byte = 0;
        for (int g = 0; g < 8; ++g) byte |= (codes[bytes * g + i] >> bit & 1) << g;
        to[i] = (uint8_t)byte;
      }
    };
    if (w == 10) plane(n.at(2, t), 9);
    if (r == 4) plane(n.at(2, t) + (w == 10 ? bytes : 0), 0);
  }
  first.end(), second.end();
}

inline void encode_hqmq(const New& n) {
  const int count = n.dim / 4;
  const Products products{(const float*)n.tables, (n.options[0] + 15) / 16 * 16};
  uint32_t codes[WIDEST / 4], radius[WIDEST / 4];
  for (int t = 0; t < n.count; ++t) {
    const float* y = n.rows + t * n.dim;
    for (int i = 0; i < count; ++i) codes[i] = products.nearest(y + 4 * i);
    const uint16_t scale = radii_of(y, count, (1 << n.options[1]) - 1, radius);
    memcpy(n.at(n.options[3], t), &scale, 2);
    store_chunks(n, t, count, codes, radius);
  }
}

}  // namespace kv
