// Norms of InnerQ's keys (codecs/innerq.py) for one head of one sequence: sqrt(max over the tokens |x|), 1 for 0, which
// both channels of a rotary pair share; and their reciprocals in double, as the encoder takes them.
//
//     KV_KERNEL void KV_BOUNDS(kv::FIT_NORM_THREADS, 1) kv_fit(KV_GRID_CONSTANT kv::FitNormArgs args) {
//       kv::fit_norms<128>(args);
//     }
//
// Grid (H, B, 1).
#pragma once
#include "platform.cuh"

namespace kv {

constexpr int FIT_NORM_THREADS = 1024;

// read by kernels/structs.py
struct FitNormArgs {
  const void* x;            // [B, H, tokens, D] fp16 or bf16, rows of whole 8 bytes
  float* norm;              // [B, H, D]
  double* reciprocal;       // the same
  int64_t batch, head, token;  // strides of x in numbers
  int64_t tokens;
  int32_t kind, heads;      // 0 fp16, 1 bf16
};

// the larger; NaN if one is
KV_DEV float larger(float a, float b) { return b > a || b != b ? b : a; }

template <int D> KV_DEV void fit_norms(const FitNormArgs& a) {
  constexpr int LANES = D / 4, AT_ONCE = FIT_NORM_THREADS / LANES;  // threads of a token, tokens
  KV_SHARED(float, most, D * AT_ONCE);
  const int h = block_x(), b = block_y(), lane = thread() % LANES, own = thread() / LANES;
  float top[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const uint16_t* x = (const uint16_t*)a.x + b * a.batch + h * a.head + 4 * lane;
  if (own < AT_ONCE) {
    for (int64_t i = own; i < a.tokens; i += AT_ONCE) {
      const Words2 w = *(const Words2*)(x + i * a.token);
      const uint32_t bits[4] = {w.a & 0xffffu, w.a >> 16, w.b & 0xffffu, w.b >> 16};
      KV_UNROLL
      for (int e = 0; e < 4; ++e) {
        const uint16_t y = (uint16_t)bits[e];
        top[e] = larger(top[e], magnitude(a.kind == 0 ? half_float(y) : bf16_float(y)));
      }
    }
    KV_UNROLL
    for (int e = 0; e < 4; ++e) most[own * D + 4 * lane + e] = top[e];
  }
  sync_threads();
  for (int c = thread(); c < D / 2; c += FIT_NORM_THREADS) {
    float m = 0.0f;
    for (int i = 0; i < AT_ONCE; ++i) m = larger(larger(m, most[i * D + c]), most[i * D + c + D / 2]);
    const float norm = m == 0.0f ? 1.0f : sqrt(m);
    for (int k = c; k < D; k += D / 2) {
      const int64_t at = ((int64_t)b * a.heads + h) * D + k;
      a.norm[at] = norm, a.reciprocal[at] = div(1.0, (double)norm);
    }
  }
}

}  // namespace kv
