// Attention over tokens held dense (sink and window) beside the pages: the loop of decode.cuh over tiles of 16 tokens whose rows are copied
// one by one, queries and outputs in the model's basis. Its sums go into a slot of their own.
#pragma once
#include "decode.cuh"
#include "read_dense.cuh"

namespace kv {

template <int D, int WARPS, bool CAP, bool BF16> struct DensePart {
  using R = ReadDense<D, BF16>;
  using Loop = Decoder<R, R, D, 16, 16, WARPS, 1, CAP>;
  KV_CONST int LOOP = Loop::SHARED;

  KV_DEV static void fetch(uint8_t* to, const void* from, int64_t at, int64_t token_stride, int first, int last, int lane) {
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
    const int64_t k_at = b * a.dense_k_batch + h * a.dense_k_head, v_at = b * a.dense_v_batch + h * a.dense_v_head;
    auto start = [&](int first) {
      if (first < end) {
        fetch(tile, a.dense_k, k_at, a.dense_k_token, first, end, lane);
        fetch(tile + planes_bytes<R>(16), a.dense_v, v_at, a.dense_v_token, first, end, lane);
      }
      copy_commit();
    };
    start(begin + 16 * warp);
    Query<R, D> q;
    const Side model{nullptr, nullptr, 0, 0, 1};
    load_query<R, D, WARPS>(q, (float*)shared, a, model, b, h, first_head, live_heads);
    typename Loop::State st;
    Loop::start(st);
    KV_NO_UNROLL
    for (int first = begin + 16 * warp; first < end; first += 16 * WARPS) {
      copy_wait<0>();
      sync_warp();
      Loop::template tile<true>(st, q, a, tile, nullptr, nullptr, lane, 0, end - first);
      sync_warp();
      start(first + 16 * WARPS);
    }
    Loop::finish(st, a, shared, b, h, first_head, live_heads, a.splits);
  }
};

}  // namespace kv
