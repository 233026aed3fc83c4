// Online softmax of 8 heads in one warp, in powers of two: arXiv:1805.02867, with a reference that may lag behind the
// maximum, so that what has been summed is rescaled rarely. Lane 4 g + j holds heads 2j, 2j+1 and its own tokens'
// share of the sums.
#pragma once
#include "transform.cuh"

namespace kv {

KV_DEV float minus_infinity() { return bits_float(0xff800000u); }

// x = softcap * log2(e) * tanh(x / (softcap * log2(e))): scores are in powers of two
KV_DEV void soft_cap(float (&s)[4], float softcap) {
  const float unit = softcap * 1.4426950408889634f, inverse = 2.0f / softcap;
  KV_UNROLL
  for (int i = 0; i < 4; ++i) s[i] = unit * (1.0f - 2.0f / (exp2_fast(s[i] * inverse) + 1.0f));
}

struct Softmax {
  float m[2];  // reference exponents
  float l[2];  // sums of 2^(s - m)

  KV_DEV void start() {
    m[0] = m[1] = minus_infinity();
    l[0] = l[1] = 0.0f;
  }
  // 2^8 still fits the fp16 that P is rounded to, with room for the scales of values
  KV_DEV bool lags(const float (&top)[2]) const { return top[0] > m[0] + 8.0f || top[1] > m[1] + 8.0f; }

  // take the maximum over the warp as reference; factor: what older sums are multiplied by
  KV_DEV void raise(float (&top)[2], float (&factor)[2]) {
    KV_UNROLL
    for (int n = 0; n < 2; ++n) {
      KV_UNROLL
      for (int bit = 4; bit < 32; bit *= 2) top[n] = maximum(top[n], shfl_xor(top[n], bit));
      const float next = maximum(m[n], top[n]);
      factor[n] = next == minus_infinity() ? 1.0f : exp2_fast(m[n] - next);
      m[n] = next;
      l[n] *= factor[n];
    }
  }
  KV_DEV void weigh(const float (&s)[4], float (&p)[4]) {
    KV_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float base = m[i % 2] == minus_infinity() ? 0.0f : m[i % 2];
      p[i] = exp2_fast(s[i] - base);
      l[i % 2] += p[i];
    }
  }
  // sum over the lanes
  KV_DEV void finish() {
    KV_UNROLL
    for (int n = 0; n < 2; ++n) {
      KV_UNROLL
      for (int bit = 4; bit < 32; bit *= 2) l[n] += shfl_xor(l[n], bit);
    }
  }
};

}  // namespace kv
