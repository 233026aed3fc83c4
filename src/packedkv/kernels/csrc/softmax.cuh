// Online softmax of 4 N heads in one warp, in powers of two: arXiv:1805.02867, with a reference that may lag behind the
// maximum, so that sums are rarely rescaled. Lane 4 g + j holds heads N j .. N j + N - 1 and its own
// tokens' share of the sums. Scores and weights: N heads of a token, then N of another one.
#pragma once
#include "transform.cuh"

namespace kv {

KV_DEV float minus_infinity() { return bits_float(0xff800000u); }

// x = softcap * log2(e) * tanh(x / (softcap * log2(e))): scores are in powers of two
template <int N> KV_DEV void soft_cap(float (&s)[N], float softcap) {
  const float unit = softcap * 1.4426950408889634f, inverse = 2.0f / softcap;
  KV_UNROLL
  for (int i = 0; i < N; ++i) s[i] = unit * (1.0f - 2.0f / (exp2_fast(s[i] * inverse) + 1.0f));
}

template <int N> struct Softmax {
  float m[N];  // reference exponents
  float l[N];  // sums of 2^(s - m)

  KV_DEV void start() {
    KV_UNROLL
    for (int n = 0; n < N; ++n) m[n] = minus_infinity(), l[n] = 0.0f;
  }
  // 2^8 still fits the fp16 that P is rounded to, with room for the scales of values
  KV_DEV bool lags(const float (&top)[N]) const { return top[0] > m[0] + 8.0f || top[N - 1] > m[N - 1] + 8.0f; }

  // take the maximum over the warp as reference, or the old one moved by `shift` where that is larger, and the maximum
  // moved by it where there is no old one; factor: what older sums are multiplied by
  KV_DEV void raise(float (&top)[N], float (&factor)[N], float shift) {
    KV_UNROLL
    for (int n = 0; n < N; ++n) {
      KV_UNROLL
      for (int bit = 4; bit < 32; bit *= 2) top[n] = maximum(top[n], shfl_xor(top[n], bit));
      const float next = m[n] == minus_infinity() ? top[n] + shift : maximum(m[n] + shift, top[n]);
      factor[n] = next == minus_infinity() ? 1.0f : exp2_fast(m[n] - next);
      m[n] = next;
      l[n] *= factor[n];
    }
  }
  KV_DEV void weigh(const float (&s)[2 * N], float (&p)[2 * N]) {
    KV_UNROLL
    for (int i = 0; i < 2 * N; ++i) {
      const float base = m[i % N] == minus_infinity() ? 0.0f : m[i % N];
      p[i] = exp2_fast(s[i] - base);
      l[i % N] += p[i];
    }
  }
  // sum over the lanes
  KV_DEV void finish() {
    KV_UNROLL
    for (int n = 0; n < N; ++n) {
      KV_UNROLL
      for (int bit = 4; bit < 32; bit *= 2) l[n] += shfl_xor(l[n], bit);
    }
  }
};

}  // namespace kv
