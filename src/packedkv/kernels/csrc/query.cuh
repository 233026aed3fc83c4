// The query of decode attention, transformed into the basis of the codes, as tensor-core operands.
//
// Heads are the 8 columns of its products. Where at most 4 share a KV head, each of them has two columns, 2n and
// 2n + 1: of keys, one meets one half of the channels and one the other, which are the rows of tokens g and g + 8
// otherwise; of values, one takes the first of two channels that share a register and one the second, which are
// products of their own otherwise. And a lane has the softmax of one head instead of two.
#pragma once
#include "mixed.cuh"
#include "tile.cuh"
#include "transform.cuh"

namespace kv {

// constants that a reader may leave out
template <class R> KV_CONSTEXPR auto k_offset(int) -> decltype(R::K_OFFSET) { return R::K_OFFSET; }
template <class R> KV_CONSTEXPR float k_offset(long) { return 0.0f; }
template <class R> KV_CONSTEXPR auto k_scale_unit(int) -> decltype(R::K_SCALE_UNIT) { return R::K_SCALE_UNIT; }
template <class R> KV_CONSTEXPR float k_scale_unit(long) { return 0.0f; }

// More channels than the registers of a warp hold queries and sums of without halving both, even where that costs
// work; heads are then four at a time.
KV_CONSTEXPR bool is_wide(int head_dim) { return head_dim > 256; }

// keys that are SKETCHED meet a second query, H (s q), whose channels are numbered from D on
template <class K, int D> KV_CONSTEXPR int query_channels() { return is_sketched<K>(0) ? 2 * D : D; }

// A reader of keys may have another one, Halved, for heads with two columns.
template <class K, int HEADS, class = void> struct KeysOf { using Reader = K; };
template <class K> struct KeysOf<K, 4, typename Always<typename K::Halved>::Void> {
  using Reader = typename K::Halved;
};

// The query of HEADS heads, 4 or 8, in the basis of the codes: B operands of the tensor core, and what undoes their
// scaling.
template <class K, int D, int HEADS> struct Query {
  KV_CONST bool HALVED = HEADS == 4 && (is_wide(D) || (K::GROUPS == 1 && !K::K_BLOCKED));
  KV_CONST int REGS = HALVED ? K::K_REGS / 2 : K::K_REGS;
  uint32_t r[REGS];            // of column g, channels of part j; HALVED: every second register of keys
  uint32_t plain[K::K_BLOCKED ? REGS : 1];  // the same without weights
  float sum[K::GROUPS][HEADS / 4];  // sum over a group's channels of the rounded q; the lane's heads
  float scale[HEADS / 4];      // scores = dot * scale, in powers of two
};

// A warp's part of the query: the rows of every WARPS-th head, and the factor of the codes' basis. Loads only, so that
// a kernel can start them early without waiting.
template <int D, int WARPS, int HEADS> struct QueryRows {
  KV_CONST int N = RUNS_OF<D>, ROWS = (HEADS + WARPS - 1) / WARPS;
  uint32_t words[ROWS][N];  // that hold a number of 32 bits, or of 16 bits from bit `shift` on
  int shift[ROWS];
  float factor[N];
  KV_DEV static int run(int i, int lane) { return is_channel<D>(lane + 32 * i) ? i : 0; }
  KV_DEV QueryRows(const DecodeArgs& a, const Side& side, int b, int h, int first, int live, int warp) {
    const int lane = thread() % 32, wide = a.q_kind == 2;
    KV_UNROLL
    for (int row = 0; row < ROWS; ++row) {
      const int n = warp + row * WARPS;  // missing heads read the first one
      const QueryHead of(a, b, first + (n < live ? n : 0));
      const int64_t number = of.row * a.q_batch + (int64_t)of.head * a.q_head + lane;
      const uint8_t* at = (const uint8_t*)a.q + (number << (1 + wide));
      const int odd = (int)((uint64_t)at & 2);
      const uint32_t* from = (const uint32_t*)(at - odd);
      shift[row] = odd * 8;
      KV_UNROLL
      for (int i = 0; i < N; ++i) words[row][i] = from[run(i, lane) * (16 << wide)];
    }
    const float* factors = side.factor + b * side.factor_batch + (int64_t)h * D + lane;
    KV_UNROLL
    for (int i = 0; i < N; ++i) factor[i] = side.factor ? factors[32 * run(i, lane)] : 1.0f;
  }
  KV_DEV float number(int row, int i, int kind) const {
    const uint32_t x = words[row][i] >> shift[row];
    const float of_half = half_float((uint16_t)x), of_bf16 = bf16_float((uint16_t)x);  // choices, not branches
    return kind == 2 ? bits_float(x) : kind == 0 ? of_half : of_bf16;
  }
};

// the rows in the basis of the codes, and their largest numbers, to shared memory; the rows of a warp together
template <class K, int D, int WARPS, int HEADS>
KV_DEV void stage_query(float* shared, const QueryRows<D, WARPS, HEADS>& rows, const DecodeArgs& a, const Side& side,
                        int h, int live, int warp) {
  constexpr int N = RUNS_OF<D>, ROWS = QueryRows<D, WARPS, HEADS>::ROWS, WIDTH = row_floats(query_channels<K, D>());
  const int lane = opaque(thread() % 32), kind = a.q_kind;
  float x[ROWS][N], top[ROWS];
  KV_UNROLL
  for (int row = 0; row < ROWS; ++row) {
    top[row] = 0.0f;
    KV_UNROLL
    for (int i = 0; i < N; ++i) {
      const float number = rows.number(row, i, kind) * (side.factor ? rows.factor[i] : 1.0f);
      x[row][i] = warp + row * WARPS < live ? number : 0.0f;  // of missing heads it is another one's
    }
  }
  auto put = [&](int first) {
    KV_UNROLL
    for (int row = 0; row < ROWS; ++row) {
      const int n = warp + row * WARPS;
      KV_UNROLL
      for (int i = 0; i < N; ++i) {
        const int c = lane + 32 * i;
        if ((HEADS % WARPS == 0 || n < HEADS) && is_channel<D>(c)) shared[n * WIDTH + skew(first + c)] = x[row][i];
        top[row] = maximum(top[row], magnitude(x[row][i]));
      }
    }
  };
  hadamard_rows<D>(x, (int)side.block, lane);
  put(0);
  if constexpr (is_sketched<K>(0)) {
    const float* signs = K::sketch(side.table + h * side.table_head);
    KV_UNROLL
    for (int row = 0; row < ROWS; ++row) {
      KV_UNROLL
      for (int i = 0; i < N; ++i) x[row][i] *= signs[lane + 32 * i];
    }
    hadamard_rows<D>(x, D, lane);
    put(D);
  }
  KV_UNROLL
  for (int bit = 16; bit; bit /= 2) {
    KV_UNROLL
    for (int row = 0; row < ROWS; ++row) top[row] = maximum(top[row], shfl_xor(top[row], bit));
  }
  KV_UNROLL
  for (int row = 0; row < ROWS; ++row) {
    const int n = warp + row * WARPS;
    if (lane == 0 && (HEADS % WARPS == 0 || n < HEADS)) shared[HEADS * WIDTH + n] = top[row];
  }
}

// The staged rows of all heads times the head's matrix, and their largest numbers; by all warps of a team, which `sync`
// synchronises. A synchronisation is due before and after.
template <int D, int WARPS, int HEADS, class Sync>
KV_DEV void mix_query(float* shared, const MixedBy<D>& by, int warp, Sync sync) {
  constexpr int N = D / 32, EACH = (N + WARPS - 1) / WARPS, WIDTH = row_floats(D);
  const int lane = opaque(thread() % 32);
  float y[EACH][HEADS];
  KV_UNROLL
  for (int i = 0; i < EACH; ++i) {
    KV_UNROLL
    for (int n = 0; n < HEADS; ++n) y[i][n] = 0.0f;
    const int c = lane + 32 * (warp + i * WARPS);
    if (c >= D) continue;  // of a warp without channels
    _Pragma("unroll 4")
    for (int k = 0; k < D / 8; ++k) {
      const Words4 w = by.line(k, c);
      KV_UNROLL
      for (int e = 0; e < 8; ++e) {
        const float own = MixedBy<D>::number(w, e);
        KV_UNROLL
        for (int n = 0; n < HEADS; ++n) y[i][n] += shared[n * WIDTH + skew(8 * k + e)] * own;
      }
    }
  }
  sync();
  KV_UNROLL
  for (int i = 0; i < EACH; ++i) {
    const int c = lane + 32 * (warp + i * WARPS);
    if (c >= D) continue;
    KV_UNROLL
    for (int n = 0; n < HEADS; ++n) shared[n * WIDTH + skew(c)] = y[i][n] * by.unit();
  }
  sync();
  KV_NO_UNROLL
  for (int n = warp; n < HEADS; n += WARPS) {
    float top = 0.0f;
    KV_UNROLL
    for (int i = 0; i < N; ++i) top = maximum(top, magnitude(shared[n * WIDTH + skew(lane + 32 * i)]));
    top = warp_max(top);
    if (lane == 0) shared[HEADS * WIDTH + n] = top;
  }
}

// from there, after a synchronisation, to the warp's operands; `own`: the reader's own tables, in shared memory
template <class K, int D, int HEADS>
KV_DEV void take_query(Query<K, D, HEADS>& q, const float* shared, const uint8_t* own, const DecodeArgs& a) {
  constexpr int WIDTH = row_floats(query_channels<K, D>());
  const int lane = opaque(thread() % 32), g = lane / 4, j = lane % 4;
  const int head = g * HEADS / 8, odd = g % 2;
  const float* mine = shared + head * WIDTH;
  const float top = shared[HEADS * WIDTH + head];
  // 2^k with top 2^k in [1, 2), then up to where the smallest weights keep their bits; blocked scales need the room
  // themselves: below 1, so that a product with any of them is finite
  int exponent = (int)(float_bits(top) >> 23) - 127;
  exponent = exponent < -100 ? -100 : exponent > 100 ? 100 : exponent;
  exponent -= K::K_BLOCKED ? -1 : 9;
  const float down = bits_float((uint32_t)(127 - exponent) << 23), up = bits_float((uint32_t)(127 + exponent) << 23);
  KV_UNROLL
  for (int group = 0; group < K::GROUPS; ++group) {
    float sum = 0.0f;
    KV_UNROLL
    for (int k = 0; k < q.REGS / K::GROUPS; ++k) {
      const int r = group * (q.REGS / K::GROUPS) + k, e = q.HALVED ? 4 * r + 2 * odd : 2 * r;
      const int c0 = K::k_channel(j, e), c1 = K::k_channel(j, e + 1);
      const float w0 = K::k_weight(e), w1 = K::k_weight(e + 1);
      // padding reads another channel: choices, not branches, so that loads need not wait for one another
      const float y0 = mine[skew(model_channel<K>(own, c0 < 0 ? 0 : c0))] * down * w0;
      const float y1 = mine[skew(model_channel<K>(own, c1 < 0 ? 0 : c1))] * down * w1;
      const float x0 = c0 < 0 ? 0.0f : y0, x1 = c1 < 0 ? 0.0f : y1;
      q.r[r] = pack_half2(x0, x1);
      if constexpr (K::K_BLOCKED) q.plain[r] = pack_half2(x0 / w0, x1 / w1);
      sum += half_float((uint16_t)q.r[r]) / w0 + half_float((uint16_t)(q.r[r] >> 16)) / w1;
    }
    sum += shfl_xor(sum, 1);
    sum += shfl_xor(sum, 2);
    if (q.HALVED) sum += shfl_xor(sum, 4);
    if (k_offset<K>(0) != 0.0f) sum *= k_offset<K>(0);
    KV_UNROLL
    for (int n = 0; n < HEADS / 4; ++n) q.sum[group][n] = shfl(sum, 8 * j + 4 * n);
  }
  const float unit = k_scale_unit<K>(0) != 0.0f ? k_scale_unit<K>(0) * a.scale2 : a.scale2;
  KV_UNROLL
  for (int n = 0; n < HEADS / 4; ++n) q.scale[n] = shfl(up, 8 * j + 4 * n) * unit;
}

}  // namespace kv
