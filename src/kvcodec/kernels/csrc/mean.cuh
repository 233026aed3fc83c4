// Keys that are held without their mean before RoPE: every score gets back the term q . R_t mu, and unpacked keys get
// back R_t mu. R_t turns a pair of channels (x, y) by t theta: (x cos - y sin, y cos + x sin).
//
// For a pair of channels with the query (u, v) and the mean (m, n),
//   q . R_t mu = sum over pairs of A cos(t theta) + B sin(t theta),  A = u m + v n,  B = v m - u n.
// From token s on, for token s + i,
//   A' cos(i theta) + B' sin(i theta),  A' = A cos(s theta) + B sin(s theta),  B' = B cos(s theta) - A sin(s theta),
// and with C = cos(i theta) - 1 the term of token s + i is the sum of A', the same for 16 tokens, and of
//   A' C + B' sin(i theta).
// So each run of 16 tokens turns 2 PAIRS numbers per head once, in fp32, sums A', and takes one more product of the
// size of its scores, with 16 rows of C, sin(i theta) that are the same for all layers, heads and sequences, of which a
// lane holds its part in registers. There A' and B' are rounded to 11 bits; but large means are of pairs that turn
// slowly, whose C and sine are small: what differs from token to token is nearly exact.
//
// Angles. cos and sin of a position are products of those of its digits to base 128, exact to fp32 whatever the
// position: no argument of sine or cosine is ever large. From tile to tile they are turned on in fp32, which adds 2^-24
// a tile.
//
// table of a KV head (kvcodec/kernels/mean.py):
//   fp16 [16][PAIRS / 2][4]  of token i: cos less 1 of two pairs, and sin of both
//   float2 [3][128][PAIRS]   cos and sin of digit d at place p, (d << 7 p) theta
//   uint32 [PAIRS]           the pair's channels, the first in the low half
//   uint32 [D]               of a channel: the other one of its pair, the pair from bit 16 on, and in bit 30 whether it
//                            is the second one
#pragma once
#include "products.cuh"

namespace kv {

constexpr int TURN_BITS = 7, TURN_DIGITS = 3;  // positions below 2^21
constexpr int MEAN_ROWS = 16;                  // of the table

struct MeanTable {
  const uint8_t* base;
  int pairs;
  KV_DEV MeanTable(const KeyMean& mean, int head, int count) : pairs(count) {
    base = mean.table + head * mean.table_head;
  }
  KV_DEV const float* turns() const { return (const float*)(base + 4 * pairs * MEAN_ROWS); }
  KV_DEV uint32_t channels(int pair) const {
    return ((const uint32_t*)(turns() + 2 * (TURN_DIGITS << TURN_BITS) * pairs))[pair];
  }
  KV_DEV uint32_t of_channel(int c) const {
    return ((const uint32_t*)(turns() + 2 * (TURN_DIGITS << TURN_BITS) * pairs))[pairs + c];
  }
  // cos and sin of position * theta
  KV_DEV void turn(int position, int pair, float& c, float& s) const {
    const int n = position < 0 ? -position : position;  // before a sequence's first token there may be padding
    const Words2* at = (const Words2*)turns() + pair;
    c = 1.0f, s = 0.0f;
    KV_UNROLL
    for (int digit = 0; digit < TURN_DIGITS; ++digit) {
      const int row = (digit << TURN_BITS) + (n >> TURN_BITS * digit & (1 << TURN_BITS) - 1);
      const Words2 w = at[row * pairs];
      turn_by(c, s, bits_float(w.a), bits_float(w.b));
    }
    s = position < 0 ? -s : s;
  }
  KV_DEV static void turn_by(float& c, float& s, float x, float y) {
    const float old = c;
    c = c * x - s * y;
    s = s * x + old * y;
  }
};

// The term of a warp's tiles of T tokens, for HEADS query heads (query.cuh) of a team of WARPS warps.
template <int D, int PAIRS, int HEADS, int T, int WARPS> struct MeanTerm {
  KV_CONST int N = HEADS / 4, SUBS = T / 16, BLOCKS = PAIRS / 16;
  KV_CONST int UNITS = (PAIRS + 63) / 64;  // couples of pairs whose angles a lane turns on
  KV_CONST int ANGLE = 8 * PAIRS;          // bytes of a run's cos and sin, and of those that turn them on
  KV_CONST int ROW = ANGLE + 16;           // of a head's A and B; heads g and g + 1 in different banks
  // of a team
  KV_CONST int SHARED = (HEADS * ROW + 4 * HEADS + (1 + WARPS) * SUBS * ANGLE + 127) / 128 * 128;
  KV_CONST int COLUMNS = HEADS / 4;        // products of a block of pairs: two of four heads have a column each
  KV_CONST int REAL = PAIRS < D / 2 ? PAIRS : D / 2;  // pairs behind them repeat the last one and count nothing
  static_assert(PAIRS % 16 == 0, "whole products");

  // A couple is two neighbouring pairs. Of a block of 16 pairs, part j has the couples j and j + 4; query columns
  // (query.cuh) meet both of them, or of four heads the even columns the first and the odd columns the second.
  uint32_t rows[2][BLOCKS][4];  // A operands of the tensor core: of two tokens or of two couples, cos less 1, then sin
  const uint8_t *query, *start;  // where a lane finds its numbers: of a head, of the starts of a tile's runs of 16
  uint8_t *turned, *step;        // the warp's cos and sin; those of a step to the next tile, and to each run of a tile
  float scale[N];                // of the lane's heads

  // A and B of the team's heads, scaled by a power of two
  KV_DEV static void stage(uint8_t* shared, const DecodeArgs& a, int b, int h, int first_head, int live, int warp) {
    const int lane = thread() % 32;
    const MeanTable table(a.mean, h, PAIRS);
    const float* mean = a.mean.mean + b * a.mean.batch + (int64_t)h * D;
    int channel[UNITS][2][2];
    float m[UNITS][2][2];
    KV_UNROLL
    for (int i = 0; i < 2 * UNITS; ++i) {
      const int pair = 2 * lane + 64 * (i / 2) + i % 2;
      const uint32_t both = table.channels(pair < PAIRS ? pair : 0);
      KV_UNROLL
      for (int k = 0; k < 2; ++k) {
        channel[i / 2][i % 2][k] = (int)(both >> 16 * k & 0xffffu);
        m[i / 2][i % 2][k] = pair < REAL ? mean[channel[i / 2][i % 2][k]] : 0.0f;
      }
    }
    KV_UNROLL
    for (int row = 0; row < (HEADS + WARPS - 1) / WARPS; ++row) {
      const int n = warp + row * WARPS;
      if (n >= HEADS) break;
      const QueryHead of(a, b, first_head + (n < live ? n : 0));
      const int64_t q = of.row * a.q_batch + (int64_t)of.head * a.q_head;
      float x[UNITS][2], y[UNITS][2], top = 0.0f;
      KV_UNROLL
      for (int i = 0; i < UNITS; ++i) {
        KV_UNROLL
        for (int k = 0; k < 2; ++k) {
          const float u = load_real(a.q, q + channel[i][k][0], a.q_kind);
          const float v = load_real(a.q, q + channel[i][k][1], a.q_kind);
          x[i][k] = n < live ? u * m[i][k][0] + v * m[i][k][1] : 0.0f;
          y[i][k] = n < live ? v * m[i][k][0] - u * m[i][k][1] : 0.0f;
          top = maximum(top, magnitude(x[i][k]) + magnitude(y[i][k]));  // no turn makes it larger
        }
      }
      top = warp_max(top);
      // 2^k with top 2^k in [1, 2), then up to 2^14
      int exponent = (int)(float_bits(top) >> 23) - 127;
      exponent = (exponent < -100 ? -100 : exponent > 100 ? 100 : exponent) - 14;
      const float down = bits_float((uint32_t)(127 - exponent) << 23);
      const float up = bits_float((uint32_t)(127 + exponent) << 23);
      KV_UNROLL
      for (int i = 0; i < UNITS; ++i) {
        const int couple = lane + 32 * i;
        if (2 * couple < PAIRS) {
          const float u[2] = {x[i][0] * down, x[i][1] * down}, v[2] = {y[i][0] * down, y[i][1] * down};
          *(Words4*)(shared + n * ROW + place(couple)) = words(u, v);
        }
      }
      if (lane == 0) ((float*)(shared + HEADS * ROW))[n] = up * a.scale2;
    }
  }
  // byte of a couple: A and B of a head, or cos and sin of a tile's start, 16 bytes for each block and part
  KV_DEV static int place(int couple) { return (couple / 8 * 8 + couple % 4 * 2 + couple % 8 / 4) * 16; }

  MeanTerm() = default;
  KV_DEV MeanTerm(uint8_t* shared, int warp) {
    const int lane = thread() % 32, g = lane / 4, j = lane % 4;
    const int own = j * 32 + (HEADS == 4 ? g % 2 * 16 : 0);
    step = shared + HEADS * ROW + 4 * HEADS, turned = step + (1 + warp) * SUBS * ANGLE;
    query = shared + g * HEADS / 8 * ROW + own, start = turned + own;
  }
  // the lane's part of the table's rows
  KV_DEV void hold(const uint8_t* table) {
    const int lane = thread() % 32, g = lane / 4, j = lane % 4;
    const uint32_t* words = (const uint32_t*)table + 2 * (g * (PAIRS / 2) + j);
    KV_UNROLL
    for (int k = 0; k < 2; ++k) {
      KV_UNROLL
      for (int m = 0; m < BLOCKS; ++m) {
        const int at = HEADS == 8 ? 8 * m + 4 * k : 4 * k * PAIRS + 8 * m;  // 4 PAIRS words: 8 tokens further
        const uint32_t *x = words + 2 * at, *y = x + (HEADS == 8 ? 8 * PAIRS : 8);  // words: as operands, not pairs
        rows[k][m][0] = x[0], rows[k][m][1] = y[0], rows[k][m][2] = x[1], rows[k][m][3] = y[1];
      }
    }
  }
  // after a synchronisation
  KV_DEV void take(const uint8_t* shared) {
    KV_UNROLL
    for (int n = 0; n < N; ++n) scale[n] = ((const float*)(shared + HEADS * ROW))[N * (thread() % 4) + n];
  }

  // cos and sin of the start of the warp's first tile
  KV_DEV void start_turning(const DecodeArgs& a, int b, int h, int token, int warp) const {
    const MeanTable table(a.mean, h, PAIRS);
    const int lane = thread() % 32, first = a.mean.placed[b] + token;
    KV_UNROLL
    for (int i = 0; i < UNITS; ++i) {
      const int couple = lane + 32 * i;
      if (PAIRS % 64 && 2 * couple >= PAIRS) continue;
      float c[2], s[2];
      KV_UNROLL
      for (int k = 0; k < 2; ++k) table.turn(first, 2 * couple + k, c[k], s[k]);
      hold(couple, c, s);
      KV_NO_UNROLL
      for (int sub = 0; sub < SUBS; ++sub) {
        float by_c[2], by_s[2];
        KV_UNROLL
        for (int k = 0; k < 2; ++k) table.turn(sub ? 16 * sub : T * WARPS, 2 * couple + k, by_c[k], by_s[k]);
        if (sub > 0) put(couple, sub, c, s, words(by_c, by_s));
        if (warp == 0) *(Words4*)(step + sub * ANGLE + 16 * couple) = words(by_c, by_s);
      }
    }
  }
  // of the next one; a lane has couples of its own, and its numbers wait in shared memory
  KV_DEV void turn_on() const {
    KV_UNROLL
    for (int i = 0; i < UNITS; ++i) {
      const int couple = thread() % 32 + 32 * i;
      if (PAIRS % 64 && 2 * couple >= PAIRS) continue;
      const Words4 x = *(const Words4*)(turned + place(couple));
      float c[2] = {bits_float(x.a), bits_float(x.b)}, s[2] = {bits_float(x.c), bits_float(x.d)};
      turn_both(c, s, *(const Words4*)(step + 16 * couple));
      hold(couple, c, s);
      KV_UNROLL
      for (int sub = 1; sub < SUBS; ++sub) put(couple, sub, c, s, *(const Words4*)(step + sub * ANGLE + 16 * couple));
    }
  }
  // of the tile's start, which is that of its first run
  KV_DEV void hold(int couple, const float (&c)[2], const float (&s)[2]) const {
    *(Words4*)(turned + place(couple)) = words(c, s);
  }
  // of a later run
  KV_DEV void put(int couple, int sub, const float (&start_c)[2], const float (&start_s)[2], const Words4& by) const {
    float c[2] = {start_c[0], start_c[1]}, s[2] = {start_s[0], start_s[1]};
    turn_both(c, s, by);
    *(Words4*)(turned + sub * ANGLE + place(couple)) = words(c, s);
  }
  KV_DEV static void turn_both(float (&c)[2], float (&s)[2], const Words4& by) {
    MeanTable::turn_by(c[0], s[0], bits_float(by.a), bits_float(by.c));
    MeanTable::turn_by(c[1], s[1], bits_float(by.b), bits_float(by.d));
  }
  KV_DEV static Words4 words(const float (&c)[2], const float (&s)[2]) {
    return Words4{float_bits(c[0]), float_bits(c[1]), float_bits(s[0]), float_bits(s[1])};
  }

  // the terms of a tile, as `scores` orders them, times `scale`
  KV_DEV void terms(float (&term)[SUBS][2 * N]) const {
    float d[SUBS][2][4], sum[SUBS];
    KV_UNROLL
    for (int sub = 0; sub < SUBS; ++sub) {
      sum[sub] = 0.0f;
      KV_UNROLL
      for (int i = 0; i < 8; ++i) d[sub][i / 4][i % 4] = 0.0f;
    }
    KV_UNROLL
    for (int m = 0; m < BLOCKS; ++m) {
      Words4 x[COLUMNS];
      KV_UNROLL
      for (int i = 0; i < COLUMNS; ++i) x[i] = *(const Words4*)(query + 128 * m + 16 * i);
      KV_UNROLL
      for (int sub = 0; sub < SUBS; ++sub) {
        uint32_t b[COLUMNS][2];
        KV_UNROLL
        for (int i = 0; i < COLUMNS; ++i)
          sum[sub] += turn_pair(b[i], x[i], *(const Words4*)(start + sub * ANGLE + 128 * m + 16 * i));
        KV_UNROLL
        for (int k = 0; k < 2; ++k) {
          const uint32_t(&a)[4] = rows[k][m];
          mma(d[sub][HEADS == 8 ? 0 : k], a[0], a[1], a[2], a[3], b[HEADS == 8 ? k : 0][0], b[HEADS == 8 ? k : 0][1]);
        }
      }
    }
    KV_UNROLL
    for (int sub = 0; sub < SUBS; ++sub) {
      KV_UNROLL
      for (int bit = 1; bit < (HEADS == 8 ? 4 : 8); bit *= 2) sum[sub] += shfl_xor(sum[sub], bit);
      float same[N];
      KV_UNROLL
      for (int n = 0; n < N; ++n) same[n] = shfl(sum[sub], 8 * (thread() % 4) + 4 * n);
      KV_UNROLL
      for (int i = 0; i < 2 * N; ++i)
        term[sub][i] = ((HEADS == 8 ? d[sub][0][i] : d[sub][i][0] + d[sub][i][3]) + same[i % N]) * scale[i % N];
    }
  }
  // A' and B' of two pairs; the sum of A'
  KV_DEV static float turn_pair(uint32_t (&b)[2], const Words4& both, const Words4& turn) {
    const float u[2] = {bits_float(both.a), bits_float(both.b)}, v[2] = {bits_float(both.c), bits_float(both.d)};
    const float c[2] = {bits_float(turn.a), bits_float(turn.b)}, s[2] = {bits_float(turn.c), bits_float(turn.d)};
    const float x[2] = {u[0] * c[0] + v[0] * s[0], u[1] * c[1] + v[1] * s[1]};
    b[0] = pack_half2(x[0], x[1]);
    b[1] = pack_half2(v[0] * c[0] - u[0] * s[0], v[1] * c[1] - u[1] * s[1]);
    return x[0] + x[1];
  }
};

template <int D, int HEADS, int T, int WARPS> struct MeanTerm<D, 0, HEADS, T, WARPS> {
  KV_CONST int SHARED = 0;
  MeanTerm() = default;
  KV_DEV MeanTerm(uint8_t*, int) {}
};

}  // namespace kv
