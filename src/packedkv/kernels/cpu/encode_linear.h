// Encoders of codes with one map per token: saw-int4 (packedkv/codecs/saw_int4.py), turboquant and fp8; and of numbers
// held dense.
#pragma once
#include "encoder.h"

namespace kv {

// Option 0: zero=float
inline void encode_saw(const New& n) {
  uint8_t codes[WIDEST];
  for (int t = 0; t < n.count; ++t) {
    const float* y = n.rows + t * n.dim;
    const Range r = range_of(y, n.dim);
    const float most = r.high > -r.low ? r.high : -r.low;
    // no scale below 2^(floor(log2 max|y|) - 9) or 2^-24
    const int exponent = (int)(bits_of(most) << 1 >> 24) - 9;
    const float least = float_of((uint32_t)(exponent > 103 ? exponent : 103) << 23);
    const float wanted = (r.high - r.low) / 15.0f, above = wanted > least ? wanted : least;
    const uint16_t scale = to_half(above > 65504.0f ? 65504.0f : above);
    const float s = from_half(scale);
    uint16_t zero;
    if (n.options[0]) {
      zero = to_half(-r.low / s);
      const double z = from_half(zero);
      for (int c = 0; c < n.dim; ++c) {
        const double q = (double)y[c] / s + z, held = q < 0 ? 0 : q > 15 ? 15 : q;
        codes[c] = (uint8_t)std::nearbyint(held);
      }
    } else {
      const float z = std::nearbyint(-r.low / s);
      zero = to_half(z);
      for (int c = 0; c < n.dim; c += LANES)
        store_codes(codes + c, whole(clip(nearest(load(y + c) / s) + z, 0.0f, 15.0f)));
    }
    pack<4>(codes, n.dim, n.at(0, t));
    memcpy(n.at(1, t), &scale, 2), memcpy(n.at(1, t) + 2, &zero, 2);
  }
}

// The sum of squares by halves (ops/sums.py).
template <class T> inline double square_sum(const T* y, int dim) {
  double s[WIDEST];
  int size = 1;
  while (size < dim) size *= 2;
  for (int c = 0; c < dim; ++c) s[c] = (double)y[c] * y[c];
  for (int c = dim; c < size; ++c) s[c] = 0;
  while (size /= 2)
    for (int c = 0; c < size; ++c) s[c] += s[c + size];
  return s[0];
}

// how many of `size` - 1 walls lie below u; walls [size], ascending, size a power of two, the last one is not read
inline int walls_below(const double* walls, int size, double u) {
  int n = 0;
  for (int step = size / 2; step; step /= 2)
    if (walls[n + step - 1] < u) n += step;
  return n;
}

// the norm over sqrt(D), in fp16 or float32
inline void store_norm(uint8_t* to, double norm, int dim, bool wide) {
  const float held = (float)(norm / std::sqrt((double)dim));
  const uint16_t narrow = to_half(held);
  if (wide) memcpy(to, &held, sizeof held);
  else memcpy(to, &narrow, sizeof narrow);
}

// The interval of y / norm between walls, as torch.bucketize. float32 decides, and double where a number is so close to
// a wall that it might err. walls [2^BITS], ascending, infinite behind the last
template <int BITS> struct Nearest {
  static constexpr int SIZE = 1 << BITS;
  const double* walls;
  float near;
  Table<(BITS <= 4 ? BITS : 1)> table;

  explicit Nearest(const double* walls)
      : walls(walls), near(0), table([=](I i) {
          F x;
          for (int k = 0; k < LANES; ++k) x[k] = (float)walls[i[k]];
          return x;
        }) {
    for (int i = 0; i < SIZE - 1; ++i) near = std::fmax(near, (float)std::fabs(walls[i]));
    near *= 0x1p-20f;
  }

  uint8_t exactly(double u) const { return (uint8_t)walls_below(walls, SIZE, u); }

  void operator()(const float* y, int dim, double norm, uint8_t* codes) const {
    int c = 0;
    if constexpr (BITS <= 4) {
      if (norm > 1e-30 && norm < 1e30) {
        const float inverse = (float)(1.0 / norm);
        for (; c < dim; c += LANES) {
          const F u = load(y + c) * inverse;
          I code{}, close{};
          for (int step = SIZE / 2; step; step /= 2) {
            const F wall = table(code + splat_int(step - 1)), gap = u - wall;
            code += (I)(gap > splat(0.0f)) & splat_int(step);
            close |= (I)((F)((I)gap & 0x7fffffff) <= splat(near));
          }
          store_codes(codes + c, code);
          int any = 0;
          for (int i = 0; i < LANES; ++i) any |= close[i];
          if (any)
            for (int i = c; i < c + LANES; ++i) codes[i] = exactly(y[i] / norm);
        }
      }
    }
    for (; c < dim; ++c) codes[c] = exactly(norm > 0 ? y[c] / norm : 0.0);
  }
};

// tables: the walls, double. Option 0: whether norms are float32
template <int BITS> inline void encode_levels(const New& n) {
  double walls[1 << BITS];
  memcpy(walls, n.tables, sizeof walls);
  const Nearest<BITS> nearest(walls);
  uint8_t codes[WIDEST];
  for (int t = 0; t < n.count; ++t) {
    const float* y = n.rows + t * n.dim;
    const double norm = std::sqrt(square_sum(y, n.dim));
    store_norm(n.at(1, t), norm, n.dim, n.options[0]);
    nearest(y, n.dim, norm, codes);
    pack<BITS>(codes, n.dim, n.at(0, t));
  }
}

// the nearest E4M3 number, ties to even; |x| at most 448
inline uint8_t to_e4m3(float x) {
  const uint32_t u = bits_of(x), sign = u >> 24 & 0x80u, size = u & 0x7fffffffu;
  if (size < 0x3c800000u) return (uint8_t)(sign | (bits_of(float_of(size) + 0x1p14f) - 0x46800000u));
  return (uint8_t)(sign | (size - 0x3c000000u + 0x7ffffu + (size >> 20 & 1u)) >> 20);
}

// Option 0: whether there is a scale
inline void encode_fp8(const New& n) {
  for (int t = 0; t < n.count; ++t) {
    const float* y = n.rows + t * n.dim;
    float s = 1;
    if (n.options[0]) {
      const Range r = range_of(y, n.dim);
      const uint16_t scale = group_scale(r.high > -r.low ? r.high : -r.low, 448.0f, 0.0f);
      memcpy(n.at(1, t), &scale, 2);
      s = from_half(scale);
    }
    for (int c = 0; c < n.dim; ++c) {
      const float x = y[c] / s;
      n.at(0, t)[c] = to_e4m3(x < -448.0f ? -448.0f : x > 448.0f ? 448.0f : x);
    }
  }
}

// Option 0: kind of the numbers held: 0 fp16, 1 bf16, 2 float32
inline void encode_dense(const New& n) {
  for (int t = 0; t < n.count; ++t) {
    const float* y = n.rows + t * n.dim;
    uint8_t* to = n.at(0, t);
    if (n.options[0] == 2) {
      memcpy(to, y, sizeof(float) * n.dim);
      continue;
    }
    for (int c = 0; c < n.dim; ++c, to += 2) {
      const uint32_t u = bits_of(y[c]);
      const uint16_t x = n.options[0] ? (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16) : to_half(y[c]);
      memcpy(to, &x, 2);
    }
  }
}

}  // namespace kv
