// Attention over tokens held dense (sink and window) beside the pages: the loop of decode.cuh over tiles of 16 tokens
// whose rows are copied one by one, queries and outputs in the model's basis. Its sums go into a slot of their own.
#pragma once
#include "decode.cuh"
#include "read_dense.cuh"

namespace kv {

// which of the dense tensors are those of a sequence
KV_DEV int64_t dense_of(const DecodeArgs& a, int b) { return a.dense_at ? a.dense_at[b * a.dense_step] : b; }

template <int D, int WARPS, bool CAP, bool BF16, int HEADS> struct DensePart {
  using R = ReadDense<D, BF16>;
  using Loop = Decoder<R, R, D, 16, 16, WARPS, 1, CAP, -1, HEADS>;
  KV_CONST int LOOP = Loop::SHARED;

  KV_DEV static void fetch(uint8_t* to, const void* from, int64_t at, int64_t token_stride, int first, int last,
                           int lane) {
    constexpr int PER = D / 8;  // copies of a row
    KV_UNROLL
    for (int i = lane; i < 16 * PER; i += 32) {
      const int token = first + i / PER < last ? first + i / PER : last - 1;  // dead rows repeat a live one
      copy16(to + i * 16, (const uint16_t*)from + at + token * token_stride + i % PER * 8);
    }
  }

  KV_DEV static void run(const DecodeArgs& a, uint8_t* shared, int b, int h, int first_head, int live_heads) {
    const int warp = thread() / 32, lane = thread() % 32;
    int begin = a.dense_start ? a.dense_start[b] : 0, end = a.dense_lens ? a.dense_lens[b] : a.dense_width;
    begin = begin > 0 ? begin : 0;
    end = end < a.dense_width ? end : a.dense_width;
    uint8_t* tile = shared + Loop::QUERY + warp * Loop::TILE;
    const int64_t at = dense_of(a, b);
    const int64_t k_at = at * a.dense_k_batch + h * a.dense_k_head, v_at = at * a.dense_v_batch + h * a.dense_v_head;
    auto start = [&](int first) {
      if (first < end) {
        fetch(tile, a.dense_k, k_at, a.dense_k_token, first, end, lane);
        fetch(tile + planes_bytes<R>(16), a.dense_v, v_at, a.dense_v_token, first, end, lane);
      }
      copy_commit();
    };
    start(begin + 16 * warp);
    Query<R, D, HEADS> q;
    const Side model{nullptr, nullptr, 0, 0, 0, 1};
    const QueryRows<D, WARPS, HEADS> rows(a, model, b, h, first_head, live_heads, warp);
    stage_query<R, D, WARPS>((float*)shared, rows, a, model, h, live_heads, warp);
    sync_threads();
    take_query<R, D>(q, (const float*)shared, nullptr, a);
    typename Loop::State st;
    Loop::Total::start(st, warp);
    KV_NO_UNROLL
    for (int first = begin + 16 * warp; first < end; first += 16 * WARPS) {
      copy_wait<0>();
      sync_warp();
      Loop::template tile<true>(st, q, a, tile, nullptr, nullptr, lane, 0, end - first, {});
      sync_warp();
      start(first + 16 * WARPS);
    }
    Loop::finish(st, a, shared, b, h, first_head, live_heads, a.splits, warp);
  }
};

// The same where values have no rotation: dense tokens join the sums of the codes, 16 to a warp, spread over all CTAs
// of a sequence; or, where multiprocessors are idle, in a CTA that has no codes. Rows come straight from global memory,
// values in the order in which the codes' accumulators hold channels. SIZED: channels have factors, which outputs will
// be multiplied by, and perhaps means, which will be added; the dense tokens' sums, which have both, are made like the
// codes' before these join them.
template <class Loop, class V, int D, int WARPS, bool CAP, bool BF16, int HEADS, bool SIZED> struct DenseJoin {
  using R = ReadDense<D, BF16>;
  using Sum = Sums<V, HEADS>;
  KV_CONST int N = HEADS / 4;
  KV_CONST bool ORDERED = is_ordered<V>(0);
  KV_CONST bool AT_ONCE = !ORDERED && !is_wide(D);  // a tile's values are loaded at once

  struct Rows {
    const uint8_t* base;
    int64_t stride;
    int last;  // dead tokens read the last live one
    KV_DEV const uint8_t* row(int token) const { return base + (token < last ? token : last) * stride; }
  };

  // two channels to a word, as they are in memory; of keys in the order of ReadDense
  KV_DEV static void keys(const uint8_t* row, int part, uint32_t (&r)[R::K_REGS]) {
    KV_UNROLL
    for (int i = 0; i < R::K_REGS; i += 4) {
      const Words4 w = *(const Words4*)(row + R::place(i / 4, part, 8));
      r[i] = w.a, r[i + 1] = w.b, r[i + 2] = w.c, r[i + 3] = w.d;
    }
  }
  // whether a part's elements are runs of n neighbouring channels, each from a multiple of n on
  KV_FUNCTION bool in_runs(int n) {
    for (int part = 0; part < 8; ++part) {
      for (int e = 0; e < 2 * V::V_REGS; ++e) {
        const int c = V::v_channel(part, e), first = V::v_channel(part, e - e % n);
        if (first < 0 ? c >= 0 : first % n || c != first + e % n) return false;
      }
    }
    return 2 * V::V_REGS % n == 0;
  }
  KV_CONST int RUN = ORDERED ? 1 : in_runs(8) ? 8 : in_runs(4) ? 4 : 1;
  // the model's channels of a part's elements, where they have an order; the table in global memory, as a CTA without
  // codes has no other
  struct Channels {
    int of[ORDERED ? 2 * V::V_REGS : 1];
    KV_DEV Channels(const uint8_t* source, int part) {
      if constexpr (ORDERED) {
        KV_UNROLL
        for (int e = 0; e < 2 * V::V_REGS; ++e) of[e] = V::model_channel(source, V::v_channel(part, e));
      }
    }
    KV_DEV int channel(int part, int e) const {
      if constexpr (ORDERED) return of[e];
      else return V::v_channel(part, e);
    }
  };
  KV_DEV static void values(const uint8_t* row, const Channels& channels, int part, uint32_t (&r)[V::V_REGS]) {
    if constexpr (RUN == 1) {
      KV_UNROLL
      for (int k = 0; k < V::V_REGS; ++k) {
        const int c0 = channels.channel(part, 2 * k), c1 = channels.channel(part, 2 * k + 1);
        const uint32_t low = c0 < 0 ? 0u : ((const uint16_t*)row)[c0], high = c1 < 0 ? 0u : ((const uint16_t*)row)[c1];
        r[k] = low | high << 16;
      }
    } else {
      KV_UNROLL
      for (int k = 0; k < V::V_REGS; k += RUN / 2) {
        const int c = V::v_channel(part, 2 * k);
        uint32_t w[RUN / 2];
        load_words<RUN / 2>(w, row + 2 * (c < 0 ? 0 : c));
        KV_UNROLL
        for (int i = 0; i < RUN / 2; ++i) r[k + i] = c < 0 ? 0u : w[i];
      }
    }
  }

  struct Live {
    int begin, end, tiles;
    int from, step;  // the warp's tiles
    KV_DEV Live(const DecodeArgs& a, int b, int split, int warp) {
      begin = a.dense_start ? a.dense_start[b] : 0, end = a.dense_lens ? a.dense_lens[b] : a.dense_width;
      begin = begin > 0 ? begin : 0;
      end = end < a.dense_width ? end : a.dense_width;
      tiles = (end - begin + 15) / 16;
      const bool alone = a.runs < a.splits;
      from = alone ? (split == a.runs ? warp : tiles) : split + warp * a.splits;
      step = WARPS * (alone ? 1 : a.splits);
    }
    // whether a warp of the CTA has any; the same in all warps
    KV_DEV static bool any(const DecodeArgs& a, int tiles, int split) {
      return a.runs < a.splits ? split == a.runs && tiles > 0 : split < tiles;
    }
  };

  // prefetch a warp's first rows into the L2, long before they are read
  KV_DEV static void prefetch_rows(const DecodeArgs& a, const Live& live, int b, int h, int lane) {
    const int64_t at = dense_of(a, b);
    const uint8_t* k = (const uint8_t*)a.dense_k + 2 * (at * a.dense_k_batch + h * a.dense_k_head);
    const uint8_t* v = (const uint8_t*)a.dense_v + 2 * (at * a.dense_v_batch + h * a.dense_v_head);
    constexpr int LINES = (2 * D + 127) / 128, TILES = 3;
    KV_NO_UNROLL
    for (int i = lane; i < TILES * 16 * LINES; i += 32) {
      const int t = live.from + i / (16 * LINES) * live.step;
      const int token = live.begin + 16 * t + i / LINES % 16;
      if (token >= live.end) continue;
      prefetch(k + 2 * token * a.dense_k_token + i % LINES * 128);
      prefetch(v + 2 * token * a.dense_v_token + i % LINES * 128);
    }
    if (SIZED && live.from < live.tiles && lane * 32 < D)
      prefetch(a.value.factor + b * a.value.factor_batch + (int64_t)h * D + lane * 32);
  }

  template <class State>
  KV_DEV static void run(State& st, const DecodeArgs& a, float* shared, const QueryRows<D, WARPS, HEADS>& query_rows,
                         const Live& live, int b, int h, int live_heads, int split, int warp) {
    const int lane = thread() % 32, g = lane / 4, j = lane % 4;
    const int begin = live.begin, end = live.end, tiles = live.tiles;
    if (!Live::any(a, tiles, split)) return;
    const int64_t at = dense_of(a, b);
    const Rows k_rows{(const uint8_t*)a.dense_k + 2 * (at * a.dense_k_batch + h * a.dense_k_head), 2 * a.dense_k_token,
                      end - 1};
    const Rows v_rows{(const uint8_t*)a.dense_v + 2 * (at * a.dense_v_batch + h * a.dense_v_head), 2 * a.dense_v_token,
                      end - 1};
    uint32_t next_x[R::K_REGS], next_y[R::K_REGS];  // of the next tile, under way where registers allow
    auto fetch = [&](int t) {
      keys(k_rows.row(begin + 16 * t + g), j, next_x);
      keys(k_rows.row(begin + 16 * t + g + 8), j, next_y);
    };
    constexpr bool AHEAD = Loop::HAS_TEAMS && Loop::THREADS <= 256;
    const uint8_t* source = source_of<V>(a.value.table, a.value.table_head, b, h);
    const Channels channels(source, g);
    if (AHEAD) fetch(live.from);
    Loop::sync();  // all warps have read the codes' query
    Query<R, D, HEADS> q;
    const Side model{nullptr, nullptr, 0, 0, 0, 1};
    stage_query<R, D, WARPS>(shared, query_rows, a, model, h, live_heads, warp);
    Loop::sync();
    take_query<R, D>(q, shared, nullptr, a);
    KV_NO_UNROLL
    for (int t = live.from; t < tiles; t += live.step) {
      const int first = begin + 16 * t;
      uint32_t x[R::K_REGS], y[R::K_REGS];
      if (!AHEAD) fetch(t);
      KV_UNROLL
      for (int k = 0; k < R::K_REGS; ++k) x[k] = R::half2(next_x[k]), y[k] = R::half2(next_y[k]);
      auto fetch_values = [&](int odd, uint32_t (&of)[V::V_REGS], uint32_t (&later)[V::V_REGS]) {
        values(v_rows.row(first + 2 * j + odd), channels, g, of);
        values(v_rows.row(first + 2 * j + odd + 8), channels, g, later);
      };
      uint32_t u[2][V::V_REGS], w[2][V::V_REGS];  // under way while scores are made, where there are few loads
      if constexpr (AT_ONCE) fetch_values(0, u[0], w[0]), fetch_values(1, u[1], w[1]);
      float s[2 * N], top[N], p[2 * N];
      KV_UNROLL
      for (int i = 0; i < 2 * N; ++i) s[i] = 0.0f;
      dots<R, D, HEADS>(s, x, y, q.r, 0, R::K_REGS);
      if (AHEAD && t + live.step < tiles) fetch(t + live.step);
      KV_UNROLL
      for (int i = 0; i < 2 * N; ++i) s[i] *= q.scale[i % N];
      if (CAP) soft_cap(s, a.softcap);
      KV_UNROLL
      for (int n = 0; n < N; ++n) {
        if (first + g >= end) s[n] = minus_infinity();
        if (first + g + 8 >= end) s[N + n] = minus_infinity();
        top[n] = maximum(s[n], s[N + n]);
      }
      Loop::Total::rescale(st, top, 0.0f, false);
      st.softmax.weigh(s, p);
      uint32_t p16[2];
      weights(p16, p);
      float sum[V::V_REGS / 2][Sum::HALVES][4];
      KV_UNROLL
      for (int k = 0; k < V::V_REGS / 2; ++k) {
        KV_UNROLL
        for (int i = 0; i < Sum::COUNT; ++i) sum[k][i / 4][i % 4] = 0.0f;
      }
      auto add = [&](int odd, uint32_t (&of)[V::V_REGS], uint32_t (&later)[V::V_REGS]) {
        KV_UNROLL
        for (int k = 0; k < V::V_REGS; ++k) of[k] = R::half2(of[k]), later[k] = R::half2(later[k]);
        add_rows<V, HEADS>(sum, p16, of, later, odd, lane);
      };
      if constexpr (AT_ONCE) {
        add(0, u[0], w[0]), add(1, u[1], w[1]);
      } else {
        KV_NO_UNROLL
        for (int odd = 0; odd < 2; ++odd) {
          fetch_values(odd, u[0], w[0]);
          add(odd, u[0], w[0]);
        }
      }
      // the accumulators hold outputs over their weights, and over the reference of the codes' scales
      if (Loop::SCALED && st.reference == 0.0f) st.reference = st.inverse = 1.0f;
      const float over = Loop::SCALED ? st.inverse : 1.0f;
      KV_UNROLL
      for (int k = 0; k < V::V_REGS / 2; ++k) {
        KV_UNROLL
        for (int i = 0; i < Sum::COUNT; ++i)
          st.out[k][i / 4][i % 4] += sum[k][i / 4][i % 4] * (over / V::v_weight(Sum::element(k, i)));
      }
    }
    if (SIZED && live.from < tiles) into_codes(st, a, source, channels, b, h, g);
  }

  // the sums over nothing but dense tokens, without what `finish` and `store_row` will do to those of all tokens
  template <class State>
  KV_DEV static void into_codes(State& st, const DecodeArgs& a, const uint8_t* source, const Channels& channels, int b,
                                int h, int part) {
    const float* factor = a.value.factor + b * a.value.factor_batch + (int64_t)h * D;
    const float over = Loop::SCALED ? st.inverse : 1.0f;
    float l[N];
    KV_UNROLL
    for (int n = 0; n < N; ++n) l[n] = Loop::Total::over_tokens(st.softmax.l[n]) * over;
    KV_UNROLL
    for (int e = 0; e < 2 * V::V_REGS; ++e) {
      const int c = V::v_channel(part, e);
      if (c < 0) continue;
      const float size = rcp_fast(factor[channels.channel(part, e)]);
      float centre = 0.0f;
      if constexpr (is_centred<V>(0)) centre = V::centre(source, c) * (1.0f / V::v_weight(e));
      KV_UNROLL
      for (int k = 0; k < V::V_REGS / 2; ++k) {
        KV_UNROLL
        for (int i = 0; i < Sum::COUNT; ++i)
          if (Sum::element(k, i) == e) {
            float& x = st.out[k][i / 4][i % 4];
            x = x * size - l[Sum::head(i)] * centre;
          }
      }
    }
  }
};

}  // namespace kv
