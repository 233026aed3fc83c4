// Encoding rows with look-up tables in shared memory: as encode.cuh, but a block serves one head at a time and loads
// its tables first.
//
//     KV_KERNEL void KV_BOUNDS(kv::TABLE_THREADS, 1) kv_encode(KV_GRID_CONSTANT kv::EncodeArgs args) {
//       kv::encode_with_table<kv::Role<kv::HqmqRow<128, 96, 4>>>(args, kv::block_z() ? args.value : args.key);
//     }
//   encode_tables<K, V>(args)   the same where the roles differ: keys that are held without their mean
//
// Grid (x, B, roles), any x >= 1; multiples of the number of heads waste no blocks. TABLE_THREADS threads and
// table_bytes<Codec>() bytes of dynamic shared memory.
//
// Codecs: eight lanes hold a row, four rows to a warp; or, for few rows, TEAM = 32 lanes
//
//   : TableRow
//   DIM, PLANES, plane_bytes(p)   as in encode.cuh
//   TABLE       bytes of a head's tables that are copied to shared memory, a multiple of 16; 0: `table` is global
//   BY_SEQUENCE tables are those of a sequence: TABLE bytes for each head, table_head from one sequence to the next
//   DERIVED     bytes behind the copied tables, a multiple of 16, which derive(to, table, thread, threads) fills
//   SCRATCH     bytes of shared memory per warp, a multiple of 16
//   quad(const float (&y)[numbers_of(D, TEAM)], int part, uint32_t keep, bool live, uint8_t* const (&at)[PLANES],
//        const uint8_t* table, uint8_t* scratch)
//               as in encode.cuh, channels of FOURS of TEAM lanes; `scratch` is the warp's, and free again when all
//               lanes return. With OWN true there is another argument, the float that `factor` [B or 1, H] has for the
//               sequence and head; with HOLDS true, what hold(table, part) has found of the head
//
// A Mixed codec (mixed.cuh) gets rows that a matrix has brought to the codes' basis, before the factor; its SCRATCH has
// four rows of SCRATCH / 4 bytes, each of D floats and a number more.
#pragma once
#include "encode.cuh"
#include "mixed.cuh"

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

// Where a matrix brings tokens to the codes' basis, all warps of a block share the product: of its rows, four of each
// warp, every warp has some channels. Sums are exact, as ops/exact.py defines them: a row and the matrix are integers
// of 15 bits, which are two numbers of 8 bits each. The tensor core's sums of 2 D of their products, each at most 2^14,
// stay within 2^23.
template <int D, int SCRATCH> struct RowMixer {
  KV_CONST int N = D / 8, ROW = SCRATCH / 4, ROWS = 4 * TABLE_WARPS;
  KV_CONST int BITS = 15;  // packedkv.ops.exact.KERNEL_BITS
  static_assert(ROW % 16 == 0 && ROW >= 4 * D + 4 && D <= 256, "a row of floats and a number");
  KV_FUNCTION int units() { return D / 16 * 2; }  // of 16 channels and 16 rows
  KV_CONST int EACH = (D / 8 + TABLE_WARPS - 1) / TABLE_WARPS;

  // y of the row of eight lanes, of which `part` has 32 i + 4 part + e in y[4 i + e]; `scratch` is the block's; all
  // threads call it together
  KV_DEV static void mix(float (&y)[N], int part, const uint8_t* matrix, uint8_t* scratch) {
    const int lane = thread() % 32, warp = thread() / 32, g = lane / 4, j = lane % 4;
    uint8_t* own = scratch + (4 * warp + lane / 8) * ROW;
    float top = 0.0f;
    KV_UNROLL for (int k = 0; k < N; k++) top = maximum(top, magnitude(y[k]));
    KV_UNROLL for (int step = 4; step; step /= 2) top = maximum(top, shfl_xor(top, step));
    // top < 2^exponent, the least such power; of zeros any
    const int exponent = top == 0.0f ? 0 : (int)(double_bits((double)top) >> 52) - 1022;
    const int up = BITS - exponent, first = up < 127 ? up : 127;  // 2^up may be beyond fp32
    const float by = bits_float((uint32_t)(first + 127) << 23), more = bits_float((uint32_t)(up - first + 127) << 23);
    KV_UNROLL for (int k = 0; k < N; k += 2) {
      uint32_t high[2], low[2];
      KV_UNROLL for (int e = 0; e < 2; e++) {
        const float wide = add(mul(mul(y[k + e], by), more), 12582912.0f);  // the integer in its lowest bits
        const int whole = (int)(float_bits(wide) - 0x4b400000u), upper = (whole + 128) >> 8;
        high[e] = half_bits((float)upper), low[e] = half_bits((float)(whole - 256 * upper));
      }
      const int c = channel_of<8>(part, k);
      *(uint32_t*)(own + 2 * c) = high[0] | high[1] << 16;
      *(uint32_t*)(own + 2 * (D + c)) = low[0] | low[1] << 16;
    }
    if (part == 0) *(int*)(own + 4 * D) = exponent;
    sync_threads();
    float sums[EACH][2][4];
    KV_UNROLL for (int i = 0; i < EACH; i++) {
      const int unit = warp + i * TABLE_WARPS;
      if (unit < units()) product(sums[i], matrix, scratch, unit / 2 * 16, unit % 2 * 16, g, j);
    }
    sync_threads();
    KV_UNROLL for (int i = 0; i < EACH; i++) {
      const int unit = warp + i * TABLE_WARPS;
      if (unit >= units()) continue;
      KV_UNROLL for (int n = 0; n < 8; n++) {
        const int row = unit % 2 * 16 + n / 4 * 8 + 2 * j + n % 2, c = unit / 2 * 16 + g + n / 2 % 2 * 8;
        *(float*)(scratch + row * ROW + 4 * c) = sums[i][n / 4][n % 4];
      }
    }
    sync_threads();
    KV_UNROLL for (int k = 0; k < N; k++) y[k] = *(const float*)(own + 4 * channel_of<8>(part, k));
    sync_warp();  // before the codec writes to its scratch
  }

  // channels c + g and c + g + 8 of rows first + 2 j, + 1, + 8 and + 9
  KV_DEV static void product(float (&sums)[2][4], const uint8_t* matrix, const uint8_t* scratch, int c, int first,
                             int g, int j) {
    float high[2][4] = {}, middle[2][4] = {}, low[2][4] = {};
    const uint32_t* lines = (const uint32_t*)matrix + 4 * (c + g) + j;
    const uint8_t* rows = scratch + (first + g) * ROW + 4 * j;
    KV_NO_UNROLL for (int k = 0; k < D / 16; k++) {
      uint32_t a[2][4], b[2][2][2];  // high and low
      KV_UNROLL for (int part = 0; part < 2; part++) {
        KV_UNROLL for (int i = 0; i < 4; i++)
          a[part][i] = lines[part * D * D / 2 + 4 * ((2 * k + i / 2) * D + i % 2 * 8)];
        KV_UNROLL for (int n = 0; n < 2; n++) {
          KV_UNROLL for (int i = 0; i < 2; i++)
            b[part][n][i] = *(const uint32_t*)(rows + 8 * n * ROW + 2 * (part * D + 16 * k + 8 * i));
        }
      }
      KV_UNROLL for (int n = 0; n < 2; n++) {
        mma(high[n], a[0][0], a[0][1], a[0][2], a[0][3], b[0][n][0], b[0][n][1]);
        mma(middle[n], a[0][0], a[0][1], a[0][2], a[0][3], b[1][n][0], b[1][n][1]);
        mma(middle[n], a[1][0], a[1][1], a[1][2], a[1][3], b[0][n][0], b[0][n][1]);
        mma(low[n], a[1][0], a[1][1], a[1][2], a[1][3], b[1][n][0], b[1][n][1]);
      }
    }
    KV_UNROLL for (int n = 0; n < 2; n++) {
      KV_UNROLL for (int i = 0; i < 4; i++) {
        const int exponent = *(const int*)(scratch + (first + 8 * n + 2 * j + i % 2) * ROW + 4 * D);
        const double unit = bits_double((uint64_t)(exponent - 2 * BITS + 1023) << 52);
        const double sum = fma((double)high[n][i], 65536.0, fma((double)middle[n][i], 256.0, (double)low[n][i]));
        sums[n][i] = (float)mul(sum, unit);
      }
    }
  }
};

// a warp's rows of a head
template <class R>
KV_DEV void table_rows(const EncodeArgs& a, const EncodeSide& s, int head, int worker, int workers, int64_t begin,
                       const uint8_t* table, uint8_t* scratch) {
  using C = typename R::Codec;
  constexpr int TEAM = C::TEAM, ROWS = 32 / TEAM, N = numbers_of(C::DIM, TEAM);
  int lane = thread() % 32, part = lane % TEAM, b = block_y();
  const int ahead = ahead_of<C::DIM, TEAM>(part);
  uint32_t tokens = (uint32_t)s.tokens, step = (uint32_t)workers * TABLE_WARPS * ROWS;
  int64_t row = b * s.batch + head * s.head;
  const int size = a.kind == 2 ? 4 : 2;  // bytes of a number
  const uint8_t* rows = (const uint8_t*)s.x + size * (row + 4 * part);
  const int64_t stride = size * s.token;
  // registers are there for it, or for the mean, so with a mean each step looks again
  typename C::Held held;
  if constexpr (!R::MEAN) held = C::hold(table, part);
  const int64_t factors = b * s.factor_batch + head * C::DIM;
  const float* times = R::FACTOR == FACTOR_TIMES ? s.factor + factors + 4 * part : nullptr;
  constexpr bool MIXED = is_mixed<C>(0);  // then all warps take as many steps, some of them with no row of their own
  for (uint32_t first = ((uint32_t)worker * TABLE_WARPS + thread() / 32) * ROWS;
       (MIXED ? first - thread() / 32 * ROWS : first) < tokens; first += step) {
    uint32_t n = first + lane / TEAM;
    bool live = n < tokens;
    if (!live) n = MIXED ? 0 : first;
    uint32_t w[N];
    load_words<TEAM, true>(w, rows + n * stride, 0, 0, a.kind, ahead);
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
    if (!MIXED && !any(live)) continue;
    uint8_t* at[C::PLANES];
    locate<C>(at, a, s, b, head, slot);
    float y[N];
    widen<TEAM, true>(y, w, a.kind);

    bool good = true;  // false for NaN too
    KV_UNROLL for (int k = 0; k < N; k++) good &= magnitude(y[k]) <= HALF_MAX;
    good = (ballot(!good) >> (lane - part) & (uint32_t)((1ull << TEAM) - 1)) == 0;
    if (!good) {
      if (live && part == 0) raise(a.bad, 1);
      KV_UNROLL for (int k = 0; k < N; k++) y[k] = 0.0f;
    }
    keep_row<TEAM, C::DIM, true>(y, a, s, b, head, slot, part, live, ahead);
    if constexpr (R::MEAN) {
      float less[N];
      turned_mean<TEAM, C::DIM, true>(less, a.mean, b, head, n, part, ahead);
      KV_UNROLL for (int k = 0; k < N; k++) y[k] = sub(y[k], less[k]);
    }
    if constexpr (MIXED)
      RowMixer<C::DIM, C::SCRATCH>::mix(y, part, s.matrix + (int64_t)head * (4 * C::DIM * C::DIM),
                                        scratch - thread() / 32 * C::SCRATCH);
    if (R::FACTOR != FACTOR_NONE) {
      KV_UNROLL for (int k = 0; k < N; k += 4) {  // neighbouring channels
        if constexpr (R::FACTOR == FACTOR_TIMES) {
          uint32_t f[4];
          load_words<4>(f, times + TEAM * k - (k == N - 4 ? ahead : 0));
          KV_UNROLL for (int e = 0; e < 4; e++) y[k + e] = mul(y[k + e], bits_float(f[e]));
        } else {
          const int64_t from = factors + channel_at<TEAM, N, true>(part, k, ahead);
          KV_UNROLL for (int e = 0; e < 4; e++) y[k + e] = factored<R::FACTOR>(y[k + e], s.factor, from + e);
        }
      }
    }
    static_assert(TEAM == 8 || (R::ORDER == 1 && !MIXED), "rows of 8 lanes are rotated");
    if constexpr (R::ORDER > 1) rotate_row<8, R::ORDER>(y, part);
    if constexpr (R::MEAN) held = C::hold(table, part);
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
  constexpr int LINES = (4 * C::DIM + 127) / 128;  // of a row of floats
  const int b = block_y(), lane = thread() % 32;
  if (R::FACTOR == FACTOR_TIMES && thread() < LINES)
    prefetch(s.factor + b * s.factor_batch + head * C::DIM + thread() * 32);
  if (R::MEAN && thread() < LINES) prefetch(a.mean.mean + b * a.mean.batch + head * C::DIM + thread() * 32);
  constexpr int TEAM = C::TEAM, ROWS = 32 / TEAM;
  const uint32_t first = ((uint32_t)worker * TABLE_WARPS + thread() / 32) * ROWS, n = first + lane / TEAM;
  if (n >= (uint32_t)s.tokens) return;
#ifdef KV_SLOTS
  if (lane == 0) prefetch(a.slots + first);
#else
  if (begin + n >= (uint32_t)a.capacity) return;
  if (lane == 0) prefetch(a.page_table + b * a.table_row + (uint32_t)(begin + first) / (uint32_t)a.page_tokens);
#endif
  const int64_t row = b * s.batch + head * s.head + n * s.token;
  const int size = a.kind == 2 ? 4 : 2;
  for (int at = lane % TEAM * 128; at < C::DIM * size; at += TEAM * 128)
    prefetch((const uint8_t*)s.x + size * row + at);
  if constexpr (R::MEAN) {
    const int64_t turn = b * a.mean.turn_batch + n * a.mean.turn_token + lane % 4 * 32;
    if (lane % 4 * 64 < a.mean.turning) prefetch((lane & 4 ? a.mean.sines : a.mean.cosines) + turn);
  }
}

template <class R> KV_DEV void encode_with_table(const EncodeArgs& a, const EncodeSide& s) {
  using C = typename R::Codec;
  static_assert(C::TABLE % 16 == 0 && C::SCRATCH % 16 == 0, "whole 16 bytes");
  KV_DYNAMIC_SHARED(shared);
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

template <class K, class V> KV_DEV void encode_tables(const EncodeArgs& a) {
  if (block_z() == 0) encode_with_table<K>(a, a.key);
  else encode_with_table<V>(a, a.value);
}

}  // namespace kv
