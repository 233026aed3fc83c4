// Scores of keys that tables give four channels at a time.
#pragma once
#include "platform.cuh"

namespace kv {

// A reader of keys may have K_QUADS: registers 2 i and 2 i + 1 are one load of a table. A product's operand has to be
// four neighbouring registers, the 1st and 2nd of which are rows of two tokens; loads leave two registers of one token
// side by side, and to bring them into that order takes a move for each. So here both are rows of one token: 2 i above,
// 2 i + 1 below. One product takes the query of the upper registers, whose lower rows are dropped, another one that of
// the lower.
template <class K> KV_CONSTEXPR auto is_quads(int) -> decltype(K::K_QUADS) { return K::K_QUADS; }
template <class K> KV_CONSTEXPR bool is_quads(...) { return false; }

// d[0..1] += token of x, d[2..3] += token of y
template <int N> KV_DEV void quad_products(float (&d)[4], const uint32_t (&x)[N], const uint32_t (&y)[N],
                                           const uint32_t (&q)[N]) {
  static_assert(N % 2 == 0, "pairs of registers");
  float upper[2][4] = {{d[0], d[1], 0.0f, 0.0f}, {d[2], d[3], 0.0f, 0.0f}};
  float lower[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
  KV_UNROLL
  for (int k = 0; k + 4 <= N; k += 4) {
    KV_UNROLL
    for (int t = 0; t < 2; ++t) {
      const uint32_t (&r)[N] = t ? y : x;
      mma(upper[t], r[k], r[k + 1], r[k + 2], r[k + 3], q[k], q[k + 2]);
      mma(lower[t], r[k], r[k + 1], r[k + 2], r[k + 3], q[k + 1], q[k + 3]);
    }
  }
  if (N % 4) {
    KV_UNROLL
    for (int t = 0; t < 2; ++t) {
      const uint32_t (&r)[N] = t ? y : x;
      mma(upper[t], r[N - 2], r[N - 1], q[N - 2]);
      mma(lower[t], r[N - 2], r[N - 1], q[N - 1]);
    }
  }
  d[0] = upper[0][0] + lower[0][2], d[1] = upper[0][1] + lower[0][3];
  d[2] = upper[1][0] + lower[1][2], d[3] = upper[1][1] + lower[1][3];
}

}  // namespace kv
