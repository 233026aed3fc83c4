// Rows of D numbers from the model's basis into that of the codes, or back: queries, keys and values held dense,
// outputs. One warp per row; several tensors, the parts, in one launch. Rows may be gathered and scattered on the way,
// and outputs joined with those over other tokens.
#pragma once
#include "transform.cuh"

namespace kv {

// mirrored in kvcodec/kernels/arguments.py
struct Rows {
  const void* x;            // [B, heads, tokens, D], by strides in numbers; channels are contiguous
  void* out;                // the same
  const float* factor;      // [B or 1, heads / group, D]; null: ones
  int64_t batch, head, token;
  int64_t out_batch, out_head, out_token;
  int64_t factor_batch;     // 0: one for all sequences
  int64_t block;            // order of the Hadamard rotation, 1 for none
  int32_t kind, out_kind;   // 0 fp16, 1 bf16, 2 fp32
  int32_t heads, tokens, group;
  int32_t way;              // of the factor: multiplies (0) or divides (1) before the rotation, multiplies after it (2);
                            // 3: rows are copied as they are, there is neither
  const int32_t* at;        // null, or [B]: the rows of sequence b lie in batch at[b * at_step] of x
  const int32_t* ends;      // null, or [B + 1]: they go to the rows from ends[b] on of batch 0, as many as lie below
  int64_t at_step;          // ends[b + 1]
  const int32_t* source;    // null, or [tokens]: row t is token source[t] of x
  const int32_t* target;    // null, or [tokens]: row t goes to token target[t] of out; below 0: nowhere
  const void* other;        // null, or outputs over other tokens, as x
  const float *lse, *other_lse;  // null, or the log-sum-exps of x and of other, [heads, tokens], heads lse_head apart;
                            // either infinity: over no token
  const float* sinks;       // null, or [heads]: logits that only join the denominator
  int64_t lse_head;
};
struct BasisArgs {
  Rows parts[5];  // queries, keys and values of the sink, of the window
};

KV_DEV float row_number(const void* from, int64_t at, int kind) {
  if (kind == 2) return ((const float*)from)[at];
  const uint16_t x = ((const uint16_t*)from)[at];
  return kind == 0 ? half_float(x) : bf16_float(x);
}

// fp16 saturates, because a rotated row may exceed what it was made of; NaN stays, and what is copied
KV_DEV void put_number(void* to, int64_t at, float x, int kind, bool copied) {
  if (kind == 2) {
    ((float*)to)[at] = x;
  } else {
    const float near = x != x || copied ? x : minimum(maximum(x, -65504.0f), 65504.0f);
    ((uint16_t*)to)[at] = kind == 0 ? half_bits(near) : bf16_bits(x);
  }
}

// weights of two outputs over tokens of their own, from the log-sum-exps
KV_DEV void join_weights(const Rows& p, int h, int token, float& own, float& other) {
  constexpr float LOG2E = 1.4426950408889634f;
  const float none = bits_float(0xff800000u), all = bits_float(0x7f800000u);
  const int64_t at = h * p.lse_head + token;
  float x = p.lse[at] * LOG2E, y = p.other_lse ? p.other_lse[at] * LOG2E : none;
  const float z = p.sinks ? p.sinks[h] * LOG2E : none;
  x = x == all ? none : x;
  y = y == all ? none : y;
  const float top = maximum(x, maximum(y, z));
  if (top == none) {
    own = other = 0.0f;
    return;
  }
  own = exp2_fast(x - top);
  other = exp2_fast(y - top);
  const float inverse = 1.0f / (own + other + exp2_fast(z - top));
  own *= inverse;
  other *= inverse;
}

// grid (blocks that share the rows of a part and sequence, B, parts)
template <int D, int WARPS> KV_DEV void change_basis(const BasisArgs& a) {
  constexpr int N = D / 32;
  const Rows& p = a.parts[block_z()];
  const int lane = thread() % 32, b = block_y();
  const int64_t batch = (p.at ? p.at[b * p.at_step] : b) * p.batch;
  const int64_t out_batch = p.ends ? p.ends[b] * p.out_token : b * p.out_batch;
  const int tokens = p.ends && p.ends[b + 1] - p.ends[b] < p.tokens ? p.ends[b + 1] - p.ends[b] : p.tokens;
  KV_NO_UNROLL
  for (int row = block_x() * WARPS + thread() / 32; row < p.heads * tokens; row += grid_x() * WARPS) {
    const int token = row / p.heads, h = row % p.heads;
    const int source = p.source ? p.source[token] : token, target = p.target ? p.target[token] : token;
    if (target < 0) continue;
    const int64_t from = batch + h * p.head + source * p.token + lane;
    const int64_t to = out_batch + h * p.out_head + target * p.out_token + lane;
    const float* factor = p.factor ? p.factor + b * p.factor_batch + (int64_t)(h / p.group) * D + lane : nullptr;
    float x[N];
    KV_UNROLL
    for (int i = 0; i < N; ++i) {
      x[i] = row_number(p.x, from + 32 * i, p.kind);
      if (factor && p.way == 0) x[i] *= factor[32 * i];
      if (factor && p.way == 1) x[i] /= factor[32 * i];
    }
    if (p.lse) {
      float own, other;
      join_weights(p, h, token, own, other);
      KV_UNROLL
      for (int i = 0; i < N; ++i)
        x[i] = x[i] * own + (other != 0.0f ? row_number(p.other, from + 32 * i, p.kind) * other : 0.0f);
    }
    hadamard_row<D>(x, (int)p.block, lane);
    KV_UNROLL
    for (int i = 0; i < N; ++i)
      put_number(p.out, to + 32 * i, factor && p.way == 2 ? x[i] * factor[32 * i] : x[i], p.out_kind, p.way == 3);
  }
}

}  // namespace kv
