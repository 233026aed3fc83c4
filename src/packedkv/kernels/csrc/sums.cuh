// The sums of a warp of decode attention: codes times weights on the tensor core, and zeros separately, relative to
// references that follow the scores' maximum and the values' largest scale.
//
// The tensor core truncates where it adds to fp32. A sum of codes, which have one sign, would lose a part that grows
// with the number of products: 1 to 7 % of a diffuse head's output over 64k tokens. So every FLUSH tokens the zeros,
// which are summed separately, are added to the codes' sum: twice their sum, and its negative remains, so that half of
// the products add to sums of the other sign, whose truncation cancels the rest.
//
// P times a scale is rounded to fp16. Where attention is diffuse P is nearly one number, and its products with the
// scales, fp16 numbers of few values, may all be rounded to one side while the zeros lose nothing: 2 % of the output of
// 4-bit groups over 4,000 tokens whose P differ by 1e-4. So every warp has a reference of its own up to twice the
// maximum, and another one after every flush: products with many numbers are rounded to either side alike.
#pragma once
#include "products.cuh"
#include "softmax.cuh"

namespace kv {

// of HEADS heads, in tiles of T tokens
template <class V, int HEADS, int T> struct WarpSums {
  using Sum = Sums<V, HEADS>;
  KV_CONST int N = HEADS / 4;  // heads of a lane
  KV_CONST bool PAIRED = is_paired<V>(0);
  KV_CONST bool SCALED = V::HAS_V_SCALE || PAIRED;
  KV_CONST bool FLUSHES = V::HAS_V_ZERO || PAIRED;
  KV_CONST int FLUSH = 512;  // tokens of a warp

  struct State {
    Softmax<N> softmax;
    float bias[N];   // sum of p times the values' zeros
    float reference, inverse;  // of the values' scales, and one over it
    float out[V::V_REGS / 2][Sum::HALVES][4];
    float zero[4];   // paired values: sums of p times the zeros, a row for each group
    uint32_t tiles;  // of the warp, counted from a multiple of FLUSH / T on
  };

  // twice the zeros' sum moves to the codes' sum
  KV_DEV static void flush(State& st) {
    if (SCALED && st.reference == 0.0f) return;
    float zero[N];
    KV_UNROLL
    for (int n = 0; n < N; ++n) zero[n] = V::HAS_V_ZERO ? over_tokens(st.bias[n]) * (SCALED ? st.inverse : 1.0f) : 0.0f;
    KV_UNROLL
    for (int k = 0; k < V::V_REGS / 2; ++k) {
      if constexpr (PAIRED) group_zeros(zero, st, k);
      KV_UNROLL
      for (int i = 0; i < Sum::COUNT; ++i)
        if (Sum::used(i)) st.out[k][i / 4][i % 4] += zero[Sum::head(i)] * (2.0f / V::v_weight(Sum::element(k, i)));
    }
    KV_UNROLL
    for (int n = 0; n < N; ++n) st.bias[n] = -st.bias[n];
    KV_UNROLL
    for (int i = 0; i < 4; ++i) st.zero[i] = -st.zero[i];
  }
  KV_DEV static float over_tokens(float x) {
    KV_UNROLL
    for (int bit = 4; bit < 32; bit *= 2) x += shfl_xor(x, bit);
    return x;
  }
  // paired values: of group k, which is row k: of rows from 8 on the second half of the lane's numbers
  KV_DEV static void group_zeros(float (&zero)[N], const State& st, int k) {
    KV_UNROLL
    for (int n = 0; n < N; ++n) zero[n] = shfl(st.zero[k / 8 * 2 + n], k % 8 * 4 + thread() % 4);
  }

  // how far the reference moves: the n-th flush of a warp adds the golden ratio to it, modulo 1, and a warp begins
  // where one flush, and four for each warp before it, would have led
  KV_DEV static float shift(const State& st, bool full) {
    const uint32_t place = st.tiles / (FLUSH / T) * 0x9e3779b9u;
    if (full) return place < 0x9e3779b9u ? -0.381966f : 0.618034f;
    return st.softmax.m[0] == minus_infinity() ? bits_float(0x3f800000u | place >> 9) - 1.0f : 0.0f;
  }

  // let the references follow where they lag: behind the scores' maximum, or the values' largest scale; and flush
  KV_DEV static void rescale(State& st, float (&top)[N], float largest, bool next_tile = true) {
    if (FLUSHES && next_tile) ++st.tiles;
    const bool full = FLUSHES && next_tile && st.tiles % (FLUSH / T) == 0;
    if (!any(st.softmax.lags(top) || (SCALED && largest > 16.0f * st.reference) || full)) return;
    if constexpr (FLUSHES) {
      if (full) flush(st);
    }
    float factor[N];
    st.softmax.raise(top, factor, FLUSHES ? shift(st, full) : 0.0f);
    if constexpr (V::HAS_V_ZERO) {
      KV_UNROLL
      for (int n = 0; n < N; ++n) st.bias[n] *= factor[n];
    }
    if constexpr (SCALED) {
      float biggest = warp_max(largest);
      if (biggest > 16.0f * st.reference) {
        // where P is divided by the reference before scales are multiplied, both must fit fp16: 2^8 P, all scales
        if (PAIRED) biggest = minimum(maximum(biggest, 0.0078125f), 512.0f);
        // a power of two, so that scaling by it rounds nothing; not below 2^-100, whose inverse is a number as well
        const float next = bits_float(float_bits(maximum(biggest, 7.9e-31f)) & 0x7f800000u);
        st.inverse = bits_float(0x7f000000u - float_bits(next));
        KV_UNROLL
        for (int n = 0; n < N; ++n) factor[n] *= st.reference * st.inverse;
        st.reference = next;
      }
    }
    if constexpr (PAIRED) {
      KV_UNROLL
      for (int i = 0; i < 4; ++i) st.zero[i] *= factor[i % 2 * (N - 1)];
    }
    KV_UNROLL
    for (int k = 0; k < V::V_REGS / 2; ++k) {
      KV_UNROLL
      for (int i = 0; i < Sum::COUNT; ++i) st.out[k][i / 4][i % 4] *= factor[Sum::head(i)];
    }
  }

  // of the n-th warp of a sequence
  KV_DEV static void start(State& st, int n) {
    st.softmax.start();
    st.tiles = (uint32_t)(4 * n + 1) * (FLUSH / T);
    st.bias[0] = st.bias[N - 1] = st.reference = st.inverse = 0.0f;
    st.zero[0] = st.zero[1] = st.zero[2] = st.zero[3] = 0.0f;
    KV_UNROLL
    for (int k = 0; k < V::V_REGS / 2; ++k) {
      KV_UNROLL
      for (int i = 0; i < Sum::COUNT; ++i) st.out[k][i / 4][i % 4] = 0.0f;
    }
  }
};

}  // namespace kv
