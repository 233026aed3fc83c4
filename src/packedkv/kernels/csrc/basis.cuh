// Rows of D numbers from the model's basis into that of the codes, or back: queries, keys and values held dense,
// outputs. One warp per row; several tensors, the parts, in one launch. Rows may be gathered and scattered on the way,
// and outputs joined with those over other tokens.
#pragma once
#include "transform.cuh"

namespace kv {

// read by kernels/structs.py
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
  int32_t way;              // of the factor: multiplies (0), divides (1) before the rotation, multiplies after it (2);
                            // 3: rows are copied as they are, there is neither
  const int32_t* at;        // null, or [B]: the rows of sequence b lie in batch at[b * at_step] of x; below 0: none do
  const int32_t* ends;      // null, or [B + 1]: they go to the rows from ends[b] on of batch 0, as many as lie below
  int64_t at_step;          // ends[b + 1]
  const int32_t* source;    // null, or [tokens]: row t is token source[t] of x
  const int32_t* target;    // null, or [tokens]: row t goes to token target[t] of out; below 0: nowhere
  const void* other;        // null, or outputs over other tokens, as x
  const float *lse, *other_lse;  // null, or the log-sum-exps of x and of other, [heads, tokens], heads lse_head apart;
                            // either infinity: over no token
  const float* sinks;       // null, or [heads]: logits that only join the denominator
  int64_t lse_head;
  int64_t wide;             // whether all rows of x, other and out begin at multiples of 16 bytes
};
struct BasisArgs {
  Rows parts[5];  // queries, keys and values of the sink, of the window
};

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
  using Held = RowLanes<D>;
  constexpr int E = Held::EACH;
  const Rows& p = a.parts[block_z()];
  const int lane = thread() % 32, b = block_y(), c = lane % Held::LANES * E;
  const bool wide = p.wide;
  const int from_batch = p.at ? p.at[b * p.at_step] : b;
  if (from_batch < 0) return;
  const int64_t batch = from_batch * p.batch;
  const int64_t out_batch = p.ends ? p.ends[b] * p.out_token : b * p.out_batch;
  const int tokens = p.ends && p.ends[b + 1] - p.ends[b] < p.tokens ? p.ends[b + 1] - p.ends[b] : p.tokens;
  KV_NO_UNROLL
  for (int first = (block_x() * WARPS + thread() / 32) * Held::ROWS; first < p.heads * tokens;
       first += grid_x() * WARPS * Held::ROWS) {
    const int row = first + lane / Held::LANES;
    bool live = c < D && row < p.heads * tokens;
    const int token = live ? row / p.heads : 0, h = live ? row - token * p.heads : 0;
    const int source = live && p.source ? p.source[token] : token, target = live && p.target ? p.target[token] : token;
    live = live && target >= 0;
    const int64_t from = batch + h * p.head + source * p.token + c;
    const int64_t to = out_batch + h * p.out_head + target * p.out_token + c;
    const float* factor = p.factor ? p.factor + b * p.factor_batch + (int64_t)(h / p.group) * D + c : nullptr;
    float x[E];
    KV_UNROLL
    for (int e = 0; e < E; ++e) x[e] = 0.0f;
    if (live) {
      load_numbers(x, p.x, from, p.kind, wide);
      if (factor && p.way < 2) {
        KV_UNROLL
        for (int e = 0; e < E; ++e) x[e] = p.way == 0 ? x[e] * factor[e] : x[e] / factor[e];
      }
      if (p.lse) {
        float own, other;
        join_weights(p, h, token, own, other);
        KV_UNROLL
        for (int e = 0; e < E; ++e) x[e] *= own;
        if (other != 0.0f) {
          float y[E];
          load_numbers(y, p.other, from, p.kind, wide);
          KV_UNROLL
          for (int e = 0; e < E; ++e) x[e] += y[e] * other;
        }
      }
    }
    rotate<D>(x, (int)p.block, lane);
    if (!live) continue;
    if (factor && p.way == 2) {
      KV_UNROLL
      for (int e = 0; e < E; ++e) x[e] *= factor[e];
    }
    store_numbers(x, p.out, to, p.out_kind, p.way == 3, wide);
  }
}

}  // namespace kv
