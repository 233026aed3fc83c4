// Merging of sums (m, l, o) of attention: over the warps of a CTA, over the splits of a sequence, with dense tokens and
// learned sinks; and the rotation back to the model's basis. All sums are fp32, unnormalised, with respect to 2^m.
#pragma once
#include "mixed.cuh"
#include "softmax.cuh"

namespace kv {

// normalise one row in the codes' basis, rotate it back, add what is in the model's basis already, store; MIXED:
// mixed.cuh
template <int D, bool MIXED>
KV_DEV void store_row(const DecodeArgs& a, float (&x)[RUNS_OF<D>], const float (&dense)[RUNS_OF<D>], float m, float l,
                      int b, int h, int head, int lane) {
  const float total_inverse = l > 0.0f ? 1.0f / l : 0.0f;
  KV_UNROLL
  for (int i = 0; i < RUNS_OF<D>; ++i) x[i] *= total_inverse;
  if constexpr (MIXED) mix_row<D>(x, MixedBy<D>(a.value.matrix, h), lane);
  hadamard_row<D>(x, (int)a.value.block, lane);
  multiply_row<D>(x, a.value, b, h, lane);
  const QueryHead of(a, b, head);
  const int64_t at = of.row * a.out_batch + of.head * a.out_head;
  KV_UNROLL
  for (int i = 0; i < RUNS_OF<D>; ++i) {
    if (!is_channel<D>(lane + 32 * i)) continue;
    store_real(a.out, at + lane + 32 * i, x[i] + dense[i] * total_inverse, a.out_kind);
  }
  if (lane == 0) {
#ifdef KV_QUERIES
    const int64_t heads = a.heads * a.each;
#else
    const int64_t heads = a.heads * a.group;
#endif
    a.lse[of.row * heads + of.head] =
        l > 0.0f ? (m + log2_fast(l)) * 0.69314718055994531f : minus_infinity();
  }
}

// a learned sink is one more logit without a value
KV_DEV void add_sink(const DecodeArgs& a, int b, int head, float& m, float& l, float& factor) {
  factor = 1.0f;
  if (!a.sinks) return;
  const float sink = a.sinks[QueryHead(a, b, head).head] * 1.4426950408889634f;
  if (sink == minus_infinity()) return;
  const float next = maximum(m, sink);
  factor = m == minus_infinity() ? 0.0f : exp2_fast(m - next);
  l = l * factor + exp2_fast(sink - next);
  m = next;
}

// merge the warps of a team and either store the result or leave a partial for `combine`; ROWS: heads of a warp's sums
template <int D, int WARPS, int ROWS, bool MIXED>
KV_DEV void merge_warps(const DecodeArgs& a, const float* o, const float* ms, const float* ls, int b, int h,
                        int first_head, int live, int slot, int warp) {
  const int lane = opaque(thread() % 32);
  KV_NO_UNROLL
  for (int n = warp; n < live; n += WARPS) {
    float m = minus_infinity(), l = 0.0f, x[RUNS_OF<D>];
    for (int w = 0; w < WARPS; ++w) m = maximum(m, ms[w * ROWS + n]);
    KV_UNROLL
    for (int i = 0; i < RUNS_OF<D>; ++i) x[i] = 0.0f;
    for (int w = 0; w < WARPS; ++w) {
      const float of_warp = ms[w * ROWS + n], factor = of_warp == minus_infinity() ? 0.0f : exp2_fast(of_warp - m);
      l += ls[w * ROWS + n] * factor;
      KV_UNROLL
      for (int i = 0; i < RUNS_OF<D>; ++i)
        x[i] += o[(w * ROWS + n) * row_floats(D) + skew(channel_or_first<D>(lane, i))] * factor;
    }
    const int head = first_head + n;
    if (a.slots == 1) {
      float factor, none[RUNS_OF<D>];
      add_sink(a, b, head, m, l, factor);
      KV_UNROLL
      for (int i = 0; i < RUNS_OF<D>; ++i) x[i] *= factor, none[i] = 0.0f;
      store_row<D, MIXED>(a, x, none, m, l, b, h, head, lane);
    } else {
      const int64_t at = (b * (int64_t)(a.heads * a.group) + head) * a.slots + slot;
      KV_UNROLL
      for (int i = 0; i < RUNS_OF<D>; ++i)
        if (is_channel<D>(lane + 32 * i)) a.part_o[at * D + lane + 32 * i] = x[i];
      if (lane == 0) a.part_m[at] = m, a.part_l[at] = l;
    }
  }
}

// N numbers from a place that is a multiple of N of them from the start of a row
template <int N> KV_DEV void load_floats(float (&x)[N], const float* at) {
  KV_UNROLL
  for (int i = 0; i < N; i += N % 4 ? 1 : 4) {
    if constexpr (N % 4 == 0) {
      const Words4 w = *(const Words4*)(at + i);
      x[i] = bits_float(w.a), x[i + 1] = bits_float(w.b), x[i + 2] = bits_float(w.c), x[i + 3] = bits_float(w.d);
    } else {
      x[i] = at[i];
    }
  }
}

// Merge the partials of one query head; one CTA per row of [B * HQ]. Its code is short, because it is fetched cold
// and run once; a warp loads its partials together, and the warps synchronise once. MIXED: every warp has some of the
// head's matrix, which it loads before it waits.
template <int D, int WARPS, bool MIXED = false> KV_DEV void combine(const DecodeArgs& a) {
  constexpr int N = RUNS_OF<D>, CHUNK = 5, RUNS = MIXED ? (D / 8 + WARPS - 1) / WARPS : 1;
  KV_DYNAMIC_SHARED(shared_bytes);  // floats: WARPS + 1 rows of sums, as many maxima, as many sums of l
  float* sums = (float*)shared_bytes;
  float* ms = sums + (WARPS + 1) * D;
  float* ls = ms + WARPS + 1;
  const int warp = thread() / 32, lane = thread() % 32;
  const int64_t row = block_x();
  const int head = (int)(row % (a.heads * a.group)), b = (int)(row / (a.heads * a.group));
  const MixedBy<D> by(a.value.matrix, head / a.group);
  Words4 lines[RUNS][N];
  float unit = 1.0f;
  if constexpr (MIXED) {
    unit = by.unit();
    KV_UNROLL
    for (int t = 0; t < RUNS; ++t) {
      const int k = warp + t * WARPS;
      KV_UNROLL
      for (int i = 0; i < N; ++i) lines[t][i] = by.line(k < D / 8 ? k : warp, lane + 32 * i);
    }
  }
  wait_for_previous();
  if (!QueryHead(a, b, head).live) return;
  // a lane sums N neighbouring channels of every WARPS-th slot, of 80 lanes from 26 on the same last ones; the dense
  // tokens' slot, behind the splits', stays apart
  auto own = [=] {
    if constexpr (D % 32 == 0) return lane * N;
    else return lane * N + N > D ? D - N : lane * N;
  };
  const float* part_o = a.part_o + row * a.slots * D + own();
  const float* part_m = a.part_m + row * a.slots;
  const float* part_l = a.part_l + row * a.slots;
  float m = minus_infinity(), l = 0.0f, x[N];
  KV_UNROLL
  for (int i = 0; i < N; ++i) x[i] = 0.0f;
  KV_NO_UNROLL
  for (int from = warp; from < a.splits; from += CHUNK * WARPS) {
    float of_m[CHUNK], of_l[CHUNK], o[CHUNK][N];
    KV_UNROLL
    for (int k = 0; k < CHUNK; ++k) {
      const int s = from + k * WARPS < a.splits ? from + k * WARPS : from;
      of_m[k] = part_m[s], of_l[k] = part_l[s];
      load_floats<N>(o[k], part_o + (int64_t)s * D);
    }
    const float before = m;
    KV_UNROLL
    for (int k = 0; k < CHUNK; ++k) m = maximum(m, of_m[k]);
    const float old = before == minus_infinity() ? 0.0f : exp2_fast(before - m);
    l *= old;
    KV_UNROLL
    for (int i = 0; i < N; ++i) x[i] *= old;
    KV_UNROLL
    for (int k = 0; k < CHUNK; ++k) {  // an empty slot holds arbitrary numbers
      const bool none = from + k * WARPS >= a.splits || of_m[k] == minus_infinity();
      const float weight = none ? 0.0f : exp2_fast(of_m[k] - m);
      l += none ? 0.0f : weight * of_l[k];
      KV_UNROLL
      for (int i = 0; i < N; ++i) x[i] += none ? 0.0f : weight * o[k][i];
    }
  }
  KV_UNROLL
  for (int i = 0; i < N; ++i) sums[warp * D + own() + i] = x[i];
  if (lane == 0) ms[warp] = m, ls[warp] = l;
  const bool has_dense = a.slots > a.splits;
  if (has_dense && warp == WARPS - 1) {
    load_floats<N>(x, part_o + (int64_t)a.splits * D);
    KV_UNROLL
    for (int i = 0; i < N; ++i) sums[WARPS * D + own() + i] = x[i];
    if (lane == 0) ms[WARPS] = part_m[a.splits], ls[WARPS] = part_l[a.splits];
  }
  sync_threads();
  if (!MIXED && warp) return;
  m = has_dense ? ms[WARPS] : minus_infinity(), l = 0.0f;
  KV_UNROLL
  for (int w = 0; w < WARPS; ++w) m = maximum(m, ms[w]);
  float dense[N], weights[WARPS];
  KV_UNROLL
  for (int w = 0; w < WARPS; ++w) {
    weights[w] = ms[w] == minus_infinity() ? 0.0f : exp2_fast(ms[w] - m);
    l += weights[w] * ls[w];
  }
  auto merged = [&](int c) {
    float all = 0.0f;
    KV_UNROLL
    for (int w = 0; w < WARPS; ++w) all += weights[w] * sums[w * D + c];
    return all;
  };
  KV_UNROLL
  for (int i = 0; i < N; ++i) x[i] = MIXED ? 0.0f : merged(channel_or_first<D>(lane, i)), dense[i] = 0.0f;
  if (has_dense && ms[WARPS] != minus_infinity()) {
    const float weight = exp2_fast(ms[WARPS] - m);
    l += weight * ls[WARPS];
    KV_UNROLL
    for (int i = 0; i < N; ++i) dense[i] = weight * sums[WARPS * D + channel_or_first<D>(lane, i)];
  }
  float factor;
  add_sink(a, b, head, m, l, factor);
  if constexpr (MIXED) {
    float lines_of[(RUNS + 3) / 4];  // the channels of the warp's lines
    KV_UNROLL
    for (int i = 0; i < (RUNS + 3) / 4; ++i) {
      const int c = 8 * (warp + (4 * i + lane / 8) * WARPS) + lane % 8;
      lines_of[i] = c < D ? merged(c) : 0.0f;
    }
    sync_threads();  // the sums have been read
    KV_UNROLL
    for (int t = 0; t < RUNS; ++t) {
      KV_UNROLL
      for (int e = 0; e < 8; ++e) {
        const float of = shfl(lines_of[t / 4], t % 4 * 8 + e);
        KV_UNROLL
        for (int i = 0; i < N; ++i) x[i] += of * MixedBy<D>::number(lines[t][i], e);
      }
    }
    KV_UNROLL
    for (int i = 0; i < N; ++i) sums[warp * D + lane + 32 * i] = x[i];
    sync_threads();
    if (warp) return;
    KV_UNROLL
    for (int i = 0; i < N; ++i) {
      x[i] = 0.0f;
      KV_UNROLL
      for (int w = 0; w < WARPS; ++w) x[i] += sums[w * D + lane + 32 * i];
      x[i] *= unit;
    }
  }
  KV_UNROLL
  for (int i = 0; i < N; ++i) x[i] *= factor, dense[i] *= factor;
  store_row<D, false>(a, x, dense, m, l, b, head / a.group, head, lane);
}
// bytes of shared memory that `combine` takes
KV_CONSTEXPR int combine_shared(int head_dim, int warps) {
  return (warps + 1) * (head_dim + 2) * 4;
}

}  // namespace kv
