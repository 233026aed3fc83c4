// Between the model's basis and a codec's, for one row of D numbers: lane holds channels lane + 32 i.
#pragma once
#include "args.cuh"

namespace kv {

// order ** -0.5 of a power of two, exact or rounded once
KV_DEV float orthonormal(int order) {
  float unit = 1.0f;
  for (; order >= 4; order >>= 2) unit *= 0.5f;
  return order == 2 ? unit * 0.70710678118654752f : unit;
}

// x <- diag(H, ..., H) x for N rows at once, whose exchanges then wait for one another no longer than those of one row;
// H the orthonormal Sylvester-Hadamard matrix of that order, its own inverse
template <int D, int N> KV_DEV void hadamard_rows(float (&x)[N][D / 32], int order, int lane) {
  KV_UNROLL
  for (int bit = 1; bit < 32; bit *= 2) {
    if (bit < order) {
      KV_UNROLL
      for (int i = 0; i < N * (D / 32); ++i) {
        float& own = x[i / (D / 32)][i % (D / 32)];
        const float other = shfl_xor(own, bit);
        own = lane & bit ? other - own : own + other;
      }
    }
  }
  KV_UNROLL
  for (int step = 1; step < D / 32; step *= 2) {
    if (32 * step < order) {
      KV_UNROLL
      for (int i = 0; i < N * (D / 32); ++i) {
        const int row = i / (D / 32), at = i % (D / 32);
        if (!(at & step) && at + step < D / 32) {
          const float a = x[row][at], b = x[row][at + step];
          x[row][at] = a + b;
          x[row][at + step] = a - b;
        }
      }
    }
  }
  if (order > 1) {
    const float unit = orthonormal(order);
    KV_UNROLL
    for (int i = 0; i < N * (D / 32); ++i) x[i / (D / 32)][i % (D / 32)] *= unit;
  }
}
template <int D> KV_DEV void hadamard_row(float (&x)[D / 32], int order, int lane) {
  float rows[1][D / 32];
  KV_UNROLL
  for (int i = 0; i < D / 32; ++i) rows[0][i] = x[i];
  hadamard_rows<D>(rows, order, lane);
  KV_UNROLL
  for (int i = 0; i < D / 32; ++i) x[i] = rows[0][i];
}

template <int D> KV_DEV void multiply_row(float (&x)[D / 32], const Side& side, int batch, int head, int lane) {
  if (!side.factor) return;
  const float* at = side.factor + batch * side.factor_batch + (int64_t)head * D;
  KV_UNROLL
  for (int i = 0; i < D / 32; ++i) x[i] *= at[lane + 32 * i];
}

// Rows of D floats of 8 heads in shared memory, spread so that lanes 4 g + j, which read head g or 2j and distant
// channels, access different banks.
KV_CONSTEXPR int skew(int channel) { return channel + channel / 4; }
KV_CONSTEXPR int row_floats(int head_dim) { return head_dim + head_dim / 4 + 1; }

KV_DEV float warp_sum(float x) {
  KV_UNROLL
  for (int bit = 16; bit; bit /= 2) x += shfl_xor(x, bit);
  return x;
}
KV_DEV float warp_max(float x) {
  KV_UNROLL
  for (int bit = 16; bit; bit /= 2) x = maximum(x, shfl_xor(x, bit));
  return x;
}

}  // namespace kv
