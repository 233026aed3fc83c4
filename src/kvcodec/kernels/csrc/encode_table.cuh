// Encoding rows with look-up tables in shared memory: as encode.cuh, but a block serves one head at a time and loads
// its tables first.
//
//     KV_KERNEL void KV_BOUNDS(kv::TABLE_THREADS, 1) kv_encode(KV_GRID_CONSTANT kv::EncodeArgs args) {
//       kv::encode_with_table<kv::Role<kv::HqmqRow<128, 96, 4>>>(args, kv::block_z() ? args.value : args.key);
//     }
//
// Grid (x, B, roles), any x >= 1; multiples of the number of heads waste no blocks. TABLE_THREADS threads and
// table_bytes<Codec>() bytes of dynamic shared memory.
//
// Codecs: eight lanes hold a row, four rows to a warp
//
//   : TableRow
//   DIM, PLANES, plane_bytes(p)   as in encode.cuh
//   TABLE       bytes of a head's tables that are copied to shared memory, a multiple of 16; 0: `table` is global
//   BY_SEQUENCE tables are those of a sequence: TABLE bytes for each head, table_head from one sequence to the next
//   DERIVED     bytes behind the copied tables, a multiple of 16, which derive(to, table, thread, threads) fills
//   SCRATCH     bytes of shared memory per warp, a multiple of 16
//   quad(const float (&y)[D / 8], int part, uint32_t keep, bool live, uint8_t* const (&at)[PLANES],
//        const uint8_t* table, uint8_t* scratch)
//               as in encode.cuh; `scratch` is the warp's, and free again when all lanes return. With OWN true there
//               is another argument, the float that `factor` [B or 1, H] has for the sequence and head; with HOLDS
//               true, what hold(table, part) has found of the head
#pragma once
#include "encode.cuh"

namespace kv {

constexpr int TABLE_WARPS = 8;
constexpr int TABLE_THREADS = 32 * TABLE_WARPS;

struct TableRow {
  KV_CONST int TEAM = 8;
  KV_CONST bool BY_SEQUENCE = false;
  KV_CONST bool OWN = false;
  KV_CONST bool HOLDS = false;
  struct Held {};
  KV_DEV static Held hold(const uint8_t*, int) { return {}; }
  KV_CONST int DERIVED = 0;
};

template <class C> KV_CONSTEXPR int table_bytes() { return C::TABLE + C::DERIVED + TABLE_WARPS * C::SCRATCH; }

// a warp's rows of a head
template <class R>
KV_DEV void table_rows(const EncodeArgs& a, const EncodeSide& s, int head, int worker, int workers, int64_t begin,
                       const uint8_t* table, uint8_t* scratch) {
  using C = typename R::Codec;
  constexpr int N = C::DIM / 8;
  int lane = thread() % 32, part = lane % 8, b = block_y();
  uint32_t tokens = (uint32_t)s.tokens, step = (uint32_t)workers * TABLE_WARPS * 4;
  int64_t row = b * s.batch + head * s.head;
  const int size = a.kind == 2 ? 4 : 2;  // bytes of a number
  const uint8_t* rows = (const uint8_t*)s.x + size * (row + 4 * part);
  const int64_t stride = size * s.token;
  const typename C::Held held = C::hold(table, part);
  const int64_t factors = b * s.factor_batch + head * C::DIM;
  const float* times = R::FACTOR == FACTOR_TIMES ? s.factor + factors + 4 * part : nullptr;
  for (uint32_t first = ((uint32_t)worker * TABLE_WARPS + thread() / 32) * 4; first < tokens; first += step) {
    uint32_t n = first + lane / 8;
    bool live = n < tokens;
    if (!live) n = first;
    uint32_t w[N];
    load_words<8>(w, rows + n * stride, 0, 0, a.kind);
    uint32_t slot = 0;
#ifdef KV_SLOTS
    const int64_t to = a.slots[n];
    live = live && to >= 0;
    if (live) slot = (uint32_t)to;
#else
    if (live && begin + n >= (uint32_t)a.capacity) {
      if (part == 0) raise(a.bad, 2);
      live = false;
    }
    if (live) slot = (uint32_t)(begin + n);
#endif
    if (!any(live)) continue;
    uint8_t* at[C::PLANES];
    locate<C>(at, a, s, b, head, slot);
    float y[N];
    widen<8>(y, w, a.kind);

    bool good = true;  // false for NaN too
    KV_UNROLL for (int k = 0; k < N; k++) good &= magnitude(y[k]) <= HALF_MAX;
    good = (ballot(!good) >> (lane - part) & 0xffu) == 0;
    if (!good) {
      if (live && part == 0) raise(a.bad, 1);
      KV_UNROLL for (int k = 0; k < N; k++) y[k] = 0.0f;
    }
    if constexpr (R::MEAN) subtract_mean<8, C::DIM>(y, a.mean, b, head, n, part);
    if (R::FACTOR != FACTOR_NONE) {
      KV_UNROLL for (int k = 0; k < N; k += 4) {  // neighbouring channels
        if constexpr (R::FACTOR == FACTOR_TIMES) {
          uint32_t f[4];
          load_words<4>(f, times + 8 * k);
          KV_UNROLL for (int e = 0; e < 4; e++) y[k + e] = mul(y[k + e], bits_float(f[e]));
        } else {
          const int64_t from = factors + channel_of<8>(part, k);
          KV_UNROLL for (int e = 0; e < 4; e++) y[k + e] = factored<R::FACTOR>(y[k + e], s.factor, from + e);
        }
      }
    }
    if constexpr (R::ORDER > 1) rotate_row<8, R::ORDER>(y, part);
    uint32_t keep = good ? 0xffffffffu : 0u;
    if constexpr (C::OWN) C::quad(y, part, keep, live, at, table, scratch, s.factor[b * s.factor_batch + head]);
    else if constexpr (C::HOLDS) C::quad(y, part, keep, live, at, table, scratch, held);
    else C::quad(y, part, keep, live, at, table, scratch);
  }
}

// A few rows wait longer for memory than for anything else: what they need later is asked for beside the tables.
template <class R>
KV_DEV void ask_early(const EncodeArgs& a, const EncodeSide& s, int head, int worker, int64_t begin) {
  using C = typename R::Codec;
  const int b = block_y(), lane = thread() % 32;
  if (R::FACTOR == FACTOR_TIMES && thread() * 32 < C::DIM)
    prefetch(s.factor + b * s.factor_batch + head * C::DIM + thread() * 32);
  const uint32_t n = ((uint32_t)worker * TABLE_WARPS + thread() / 32) * 4;
#ifdef KV_SLOTS
  if (n >= (uint32_t)s.tokens) return;
  const void* where = a.slots + n;
#else
  if (n >= (uint32_t)s.tokens || begin + n >= (uint32_t)a.capacity) return;
  const void* where = a.page_table + b * a.table_row + (uint32_t)(begin + n) / (uint32_t)a.page_tokens;
#endif
  const int64_t row = b * s.batch + head * s.head + n * s.token;
  const int size = a.kind == 2 ? 4 : 2;
  if (lane == 0) prefetch(where);
  else if ((lane - 1) * 128 < C::DIM * size) prefetch((const uint8_t*)s.x + size * row + (lane - 1) * 128);
}

template <class R> KV_DEV void encode_with_table(const EncodeArgs& a, const EncodeSide& s) {
  using C = typename R::Codec;
  static_assert(C::TEAM == 8 && C::TABLE % 16 == 0 && C::SCRATCH % 16 == 0, "a codec of eight lanes, whole 16 bytes");
  KV_DYNAMIC_SHARED(shared);
  keep_rows<C::DIM, TABLE_WARPS>(a, s);
  uint8_t* scratch = shared + C::TABLE + C::DERIVED + thread() / 32 * C::SCRATCH;
  int heads = grid_x() < a.heads ? grid_x() : a.heads;  // heads processed at a time
  int workers = grid_x() / heads, worker = block_x() / heads;
  if (worker >= workers) return;
#ifdef KV_SLOTS
  const int64_t begin = 0;
#else
  const int64_t begin = s.first[block_y()];
#endif
  for (int head = block_x() % heads; head < a.heads; head += heads) {
    const int64_t behind = C::BY_SEQUENCE ? block_y() * s.table_head + head * C::TABLE : head * s.table_head;
    const uint8_t* table = s.tables + behind;
    if (C::TABLE) {
      sync_threads();  // the last head's may still be in use
      for (int i = 16 * thread(); i < C::TABLE; i += 16 * TABLE_THREADS) copy16(shared + i, table + i);
      copy_commit();
      ask_early<R>(a, s, head, worker, begin);
      copy_wait<0>();
      sync_threads();
    }
    if constexpr (C::DERIVED > 0) {
      C::derive(shared + C::TABLE, shared, thread(), TABLE_THREADS);
      sync_threads();
    }
    table_rows<R>(a, s, head, worker, workers, begin, C::TABLE ? (const uint8_t*)shared : table, scratch);
  }
}

}  // namespace kv
