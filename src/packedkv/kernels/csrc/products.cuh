// The two products of decode attention over 16 tokens, on the tensor core: queries with keys, weights with values.
// Scales, zeros and offsets, which a codec's Reader keeps apart from its raw numbers (by token, group or block), are
// applied here.
#pragma once
#include "query.cuh"
#include "tile.cuh"

namespace kv {

// d += keys q for 16 tokens, over registers [from, to): the lane's heads for token g, then for token g + 8
template <class K, int D, int HEADS>
KV_DEV void dots(float (&d)[HEADS / 2], const uint32_t (&x)[K::K_REGS], const uint32_t (&y)[K::K_REGS],
                 const uint32_t (&q)[Query<K, D, HEADS>::REGS], int from, int to) {
  if constexpr (HEADS == 8) {
    KV_UNROLL
    for (int k = from; k < to; k += 2) mma(d, x[k], y[k], x[k + 1], y[k + 1], q[k], q[k + 1]);
  } else if constexpr (Query<K, D, HEADS>::HALVED) {
    // a column's product with the other one's channels is not used
    float c[2][4] = {{d[0], 0.0f, 0.0f, 0.0f}, {d[1], 0.0f, 0.0f, 0.0f}};
    KV_UNROLL
    for (int k = from; k < to; k += 4) {
      if (k + 4 <= to) {
        mma(c[0], x[k], x[k + 1], x[k + 2], x[k + 3], q[k / 2], q[k / 2 + 1]);
        mma(c[1], y[k], y[k + 1], y[k + 2], y[k + 3], q[k / 2], q[k / 2 + 1]);
      } else {
        mma(c[0], x[k], x[k + 1], q[k / 2]);
        mma(c[1], y[k], y[k + 1], q[k / 2]);
      }
    }
    d[0] = c[0][0] + c[0][3], d[1] = c[1][0] + c[1][3];
  } else {  // both columns have the same numbers
    float c[4] = {d[0], 0.0f, d[1], 0.0f};
    KV_UNROLL
    for (int k = from; k < to; k += 2) mma(c, x[k], y[k], x[k + 1], y[k + 1], q[k], q[k + 1]);
    d[0] = c[0], d[1] = c[2];
  }
}

// scores of 16 tokens: the lane's heads for token g, then for token g + 8
template <class K, int D, int HEADS, bool MASKED, class P, class H, class NUMBERS>
KV_DEV void scores(float (&s)[HEADS / 2], const Query<K, D, HEADS>& q, const P& planes, const H& held, int token,
                   int lane, const uint32_t (&block_q)[Query<K, D, HEADS>::REGS], const float (&block_zero)[2],
                   const NUMBERS& numbers) {
  constexpr int PER = K::K_REGS / K::GROUPS, N = HEADS / 4;
  const int j = lane % 4, at = token + lane / 4;
  uint32_t x[K::K_REGS], y[K::K_REGS];
  Unpacks<K, MASKED>::Reader::keys(planes, held, at, j, lane, x);
  Unpacks<K, MASKED>::Reader::keys(planes, held, at + 8, j, lane, y);
  float sx[K::GROUPS], sy[K::GROUPS];
  if constexpr (k_scale_unit<K>(0) != 0.0f) {
    K::k_scales(planes, at, sx);
    K::k_scales(planes, at + 8, sy);
  } else if constexpr (is_numbered<K>(0)) {
    sx[0] = numbers.key_scale(token / 8);
    sy[0] = numbers.key_scale(token / 8 + 1);
  } else if constexpr (!K::K_BLOCKED) {
    KV_UNROLL
    for (int group = 0; group < K::GROUPS; ++group) {
      sx[group] = K::k_scale(planes, at, group);
      sy[group] = K::k_scale(planes, at + 8, group);
    }
  }
  KV_UNROLL
  for (int i = 0; i < 2 * N; ++i) s[i] = K::K_BLOCKED ? block_zero[i % N] : 0.0f;
  KV_UNROLL
  for (int group = 0; group < K::GROUPS; ++group) {
    float d[2 * N];
    KV_UNROLL
    for (int i = 0; i < 2 * N; ++i) d[i] = k_offset<K>(0) != 0.0f ? q.sum[group][i % N] : 0.0f;
    if constexpr (K::K_BLOCKED) dots<K, D, HEADS>(d, x, y, block_q, group * PER, (group + 1) * PER);
    else dots<K, D, HEADS>(d, x, y, q.r, group * PER, (group + 1) * PER);
    if constexpr (K::K_BLOCKED) {
      KV_UNROLL
      for (int i = 0; i < 2 * N; ++i) s[i] += d[i] * K::K_UNIT;
    } else {
      KV_UNROLL
      for (int i = 0; i < 2 * N; ++i) s[i] += d[i] * (i < N ? sx[group] : sy[group]);
      if constexpr (K::HAS_K_ZERO && k_offset<K>(0) == 0.0f) {
        constexpr float UNIT = k_scale_unit<K>(0) != 0.0f ? 1.0f / k_scale_unit<K>(0) : 1.0f;
        const float zx = K::k_zero(planes, at, group) * UNIT, zy = K::k_zero(planes, at + 8, group) * UNIT;
        KV_UNROLL
        for (int i = 0; i < 2 * N; ++i) s[i] += q.sum[group][i % N] * (i < N ? zx : zy);
      }
    }
  }
  KV_UNROLL
  for (int i = 0; i < 2 * N; ++i) s[i] *= q.scale[i % N];
}

// bits of 1 / w as fp16, w a power of two between 2^-14 and 2^14
KV_CONSTEXPR uint32_t inverse_half(float w) {
  int exponent = 15;
  for (; w < 1.0f; w *= 2.0f) ++exponent;
  for (; w > 1.0f; w *= 0.5f) --exponent;
  return (uint32_t)exponent << 10;
}
template <class K> KV_CONSTEXPR uint32_t inverse_weights(int r) {
  return inverse_half(K::k_weight(2 * r)) | inverse_half(K::k_weight(2 * r + 1)) << 16;
}
// register r of the query, that of keys' register `of` (HALVED: or of the next one)
template <class K, int D, int HEADS> KV_DEV uint32_t unweighted(const Query<K, D, HEADS>& q, int r, int of) {
  const bool same = inverse_weights<K>(of) == 0x3c003c00u && (!q.HALVED || inverse_weights<K>(of + 1) == 0x3c003c00u);
  return same ? q.r[r] : q.plain[r];
}

// Scale and zero of a block's channels go into q: block_q = q s, and the zeros' share of every score.
//
// block_q is rounded to fp16. In a loud channel this error matters: 2^-12 of q s, times a code of up to
// 2^b - 1, is 0.02 in a score of 70. The tensor core sums q s and block_q exactly, and their difference, times the
// middle code, is added to the zeros: at most half of the error remains, as if the keys had been rounded to fp16.
template <class K, int D, int HEADS, class P>
KV_DEV void enter_block(uint32_t (&block_q)[Query<K, D, HEADS>::REGS], float (&zero)[2], const Query<K, D, HEADS>& q,
                        const P& planes, int block, int lane) {
  uint32_t s[K::K_REGS], z[K::K_REGS];
  K::k_block(planes, block, lane % 4, s, z);
  float exact[4] = {0.0f, 0.0f, 0.0f, 0.0f}, rounded[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  // rows: one register's, and the other's; a column's product with the other's is not used
  if constexpr (Query<K, D, HEADS>::HALVED) {
    float zeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    KV_UNROLL
    for (int k = 0; k < K::K_REGS; k += 4) {
      const int r = k / 2;
      block_q[r] = hmul2(q.r[r], lane & 4 ? s[k + 1] : s[k]);
      block_q[r + 1] = hmul2(q.r[r + 1], lane & 4 ? s[k + 3] : s[k + 2]);
      const uint32_t q0 = unweighted<K>(q, r, k), q1 = unweighted<K>(q, r + 1, k + 2);
      mma(zeros, z[k], z[k + 1], z[k + 2], z[k + 3], q0, q1);
      mma(exact, s[k], s[k + 1], s[k + 2], s[k + 3], q0, q1);
      const uint32_t f[4] = {inverse_weights<K>(k), inverse_weights<K>(k + 1), inverse_weights<K>(k + 2),
                             inverse_weights<K>(k + 3)};
      mma(rounded, f[0], f[1], f[2], f[3], block_q[r], block_q[r + 1]);
    }
    zero[0] = zeros[0] + zeros[3] + (exact[0] + exact[3] - (rounded[0] + rounded[3])) * K::K_MIDDLE;
    zero[1] = 0.0f;
  } else {
    KV_UNROLL
    for (int k = 0; k < K::K_REGS; k += 2) {
      block_q[k] = hmul2(q.r[k], s[k]);
      block_q[k + 1] = hmul2(q.r[k + 1], s[k + 1]);
      // all tokens have the same zeros and scales: eight rows hold those, eight these
      mma(exact, z[k], s[k], z[k + 1], s[k + 1], unweighted<K>(q, k, k), unweighted<K>(q, k + 1, k + 1));
      const uint32_t f0 = inverse_weights<K>(k), f1 = inverse_weights<K>(k + 1);
      mma(rounded, f0, f0, f1, f1, block_q[k], block_q[k + 1]);
    }
    zero[0] = exact[0] + (exact[2] - rounded[0]) * K::K_MIDDLE;
    zero[1] = exact[1] + (exact[3] - rounded[1]) * K::K_MIDDLE;
  }
}

// Where a lane's sums of V^T P lie: out[k][i / 4][i % 4], i < COUNT, is element(k, i) of its part, for its head(i).
template <class V, int HEADS> struct Sums {
  KV_CONST bool PAIRED = is_paired<V>(0), HALVED = HEADS == 4 && (!PAIRED || is_wide(16 * V::V_REGS));
  KV_CONST int HALVES = HALVED ? 1 : 2, COUNT = 4 * HALVES;
  KV_FUNCTION int element(int k, int i) { return HALVED ? 4 * k + i : 4 * k + i / 4 + i / 2 % 2 * 2; }
  KV_FUNCTION int head(int i) { return HEADS == 4 ? 0 : i % 2; }
  KV_FUNCTION bool used(int i) { return HEADS == 8 || HALVED || i % 2 == 0; }  // the other column repeats it
};

// out += V^T P of 8 of 16 tokens: x has token 2j, or 2j + 1 if `later`, y the token 8 further; b as `weights`
template <class V, int HEADS>
KV_DEV void add_rows(float (&out)[V::V_REGS / 2][Sums<V, HEADS>::HALVES][4], const uint32_t (&b)[2],
                     const uint32_t (&x)[V::V_REGS], const uint32_t (&y)[V::V_REGS], bool later, int lane) {
  // a token's two channels share a register, so each product takes P in one half and zero in the other
  const uint32_t down = later ? 0x4432u : 0x4410u, up = later ? 0x3244u : 0x1044u;
  if constexpr (Sums<V, HEADS>::HALVED) {
    const uint32_t half = lane & 4 ? up : down, b0 = prmt(b[0], 0u, half), b1 = prmt(b[1], 0u, half);
    KV_UNROLL
    for (int k = 0; k < V::V_REGS / 2; ++k) mma(out[k][0], x[2 * k], x[2 * k + 1], y[2 * k], y[2 * k + 1], b0, b1);
  } else {
    const uint32_t low0 = prmt(b[0], 0u, down), low1 = prmt(b[1], 0u, down);
    const uint32_t high0 = prmt(b[0], 0u, up), high1 = prmt(b[1], 0u, up);
    KV_UNROLL
    for (int k = 0; k < V::V_REGS / 2; ++k) {
      mma(out[k][0], x[2 * k], x[2 * k + 1], y[2 * k], y[2 * k + 1], low0, low1);
      mma(out[k][1], x[2 * k], x[2 * k + 1], y[2 * k], y[2 * k + 1], high0, high1);
    }
  }
}

// out += V^T P of 16 tokens, P by `weights`; dead tokens' numbers are dropped when MASKED
template <class V, int HEADS, bool MASKED, class P, class H>
KV_DEV void add_values(float (&out)[V::V_REGS / 2][Sums<V, HEADS>::HALVES][4], const uint32_t (&b)[2], const P& planes,
                       const H& held, int token, int lane, int live_from, int live_to) {
  const int g = lane / 4, j = lane % 4;
  KV_UNROLL
  for (int odd = 0; odd < 2; ++odd) {
    const bool later = is_turned<V>(0) && j >= 2 ? !odd : odd;
    // 2 j + later by nibbles, which the compiler keeps apart from the constant part of the address
    const int place = is_turned<V>(0) ? (int)((odd ? 0x6431u : 0x7520u) >> (4 * j) & 15u) : 2 * j + odd;
    const int at = token + place;
    uint32_t x[V::V_REGS], y[V::V_REGS];
    Unpacks<V, MASKED>::Reader::values(planes, held, at, g, lane, x);
    Unpacks<V, MASKED>::Reader::values(planes, held, at + 8, g, lane, y);
    if (MASKED) {
      const bool keep_x = at >= live_from && at < live_to, keep_y = at + 8 >= live_from && at + 8 < live_to;
      KV_UNROLL
      for (int r = 0; r < V::V_REGS; ++r) x[r] = keep_x ? x[r] : 0u, y[r] = keep_y ? y[r] : 0u;
    }
    add_rows<V, HEADS>(out, b, x, y, later, lane);
  }
}

// The same of paired values: scales join P, and the zeros' sum is row g of `zero`, group g % SCALES, and row g + 8
// where there are more than eight. Dead tokens have P = 0 and finite codes; their scales and zeros may be anything
// and are dropped.
template <class V, int HEADS, bool MASKED, class P>
KV_DEV void add_pairs(float (&out)[V::V_REGS / 2][Sums<V, HEADS>::HALVES][4], float (&zero)[4],
                      const uint32_t (&b)[2], const P& planes, int token, int lane, int live_from, int live_to) {
  constexpr bool HALVED = Sums<V, HEADS>::HALVED;
  const int at = token + lane % 4 * 2;
  uint32_t w[2][V::WORDS], s[HALVED ? 1 : 2][V::SCALES], z[2], further[2] = {0u, 0u}, live[2];
  V::load_pairs(planes, token, lane, w);
  KV_UNROLL
  for (int half = 0; half < 2; ++half) {
    live[half] = 0xffffffffu;
    if (MASKED) {
      const int t = at + 8 * half;
      live[half] = (t >= live_from && t < live_to ? 0xffffu : 0u) |
                   (t + 1 >= live_from && t + 1 < live_to ? ~0xffffu : 0u);
    }
    if constexpr (!HALVED) V::scale_pairs(planes, at + 8 * half, live[half], s[half]);
    z[half] = V::zero_pair(planes, token + 8 * half, lane) & live[half];
    if constexpr (V::SCALES > 8) further[half] = V::zero_pair(planes, token + 8 * half, lane, 8) & live[half];
  }
  mma(zero, z[0], further[0], z[1], further[1], b[0], b[1]);
  if constexpr (HALVED) {  // a head's columns take neighbouring channels, of 8 tokens at a time
    const uint32_t even = lane & 4 ? 0u : 0xffffffffu;
    KV_UNROLL
    for (int half = 0; half < 2; ++half) {
      V::scale_pairs(planes, at + 8 * half, live[half], s[0]);
      KV_UNROLL
      for (int q = 0; q < V::SCALES; ++q) {
        const uint32_t p = hmul2(b[half], s[0][q]);
        uint32_t x[4];
        KV_UNROLL
        for (int e = 0; e < 4; ++e) x[e] = V::pair(w[half], 4 * q + e);
        mma(out[q][0], x[0], x[2], x[1], x[3], p & even, p & ~even);
      }
    }
  } else {
    KV_UNROLL
    for (int q = 0; q < V::SCALES; ++q) {
      const uint32_t b0 = hmul2(b[0], s[0][q]), b1 = hmul2(b[1], s[1][q]);
      KV_UNROLL
      for (int n = 0; n < 2; ++n) {
        const int e = 4 * q + n;
        mma(out[q][n], V::pair(w[0], e), V::pair(w[0], e + 2), V::pair(w[1], e), V::pair(w[1], e + 2), b0, b1);
      }
    }
  }
}

// p as `scores` gives them, scaled: B operands; a head with two columns has them in both
template <int N> KV_DEV void weights(uint32_t (&b)[2], const float (&p)[N]) {
  b[0] = transpose8(pack_half2(p[0], p[N / 2 - 1]));
  b[1] = transpose8(pack_half2(p[N / 2], p[N - 1]));
}

// blocked values: 32 tokens are summed apart, from their mass times the offset of the codes on, then times the
// channels' scales
template <class V, int HEADS>
KV_DEV void enter_values(float (&part)[V::V_REGS / 2][Sums<V, HEADS>::HALVES][4], float (&mass)[4],
                         const uint32_t (&b0)[2], const uint32_t (&b1)[2]) {
  using Sum = Sums<V, HEADS>;
  const uint32_t one = 0x3c003c00u;
  mass[0] = mass[1] = mass[2] = mass[3] = 0.0f;
  mma(mass, one, one, one, one, b0[0], b0[1]);
  mma(mass, one, one, one, one, b1[0], b1[1]);
  KV_UNROLL
  for (int k = 0; k < V::V_REGS / 2; ++k) {
    KV_UNROLL
    for (int i = 0; i < Sum::COUNT; ++i)
      part[k][i / 4][i % 4] = mass[Sum::head(i)] * (V::V_OFFSET / V::v_weight(Sum::element(k, i)));
  }
}
template <class V, int HEADS, class P>
KV_DEV void leave_values(float (&out)[V::V_REGS / 2][Sums<V, HEADS>::HALVES][4],
                         const float (&part)[V::V_REGS / 2][Sums<V, HEADS>::HALVES][4], const float (&mass)[4],
                         const P& planes, int block, int lane) {
  using Sum = Sums<V, HEADS>;
  float s[2 * V::V_REGS];
  V::v_bscales(planes, block, lane / 4, s);
  KV_UNROLL
  for (int k = 0; k < V::V_REGS / 2; ++k) {
    KV_UNROLL
    for (int i = 0; i < Sum::COUNT; ++i) out[k][i / 4][i % 4] += part[k][i / 4][i % 4] * s[Sum::element(k, i)];
  }
  if constexpr (V::V_UNEVEN) {
    if (!any(V::v_uneven(planes, block, lane / 4))) return;
    float z[2 * V::V_REGS];
    V::v_surplus(planes, block, lane / 4, z);
    KV_UNROLL
    for (int k = 0; k < V::V_REGS / 2; ++k) {
      KV_UNROLL
      for (int i = 0; i < Sum::COUNT; ++i) {
        const int e = Sum::element(k, i);
        out[k][i / 4][i % 4] += mass[Sum::head(i)] * (z[e] * (1.0f / V::v_weight(e)));
      }
    }
  }
}

}  // namespace kv
