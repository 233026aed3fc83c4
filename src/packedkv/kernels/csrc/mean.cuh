// Keys that are held without their mean before RoPE: every score gets back the term q . R_t mu, and unpacked keys get
// back R_t mu. R_t turns a pair of channels (x, y) by t theta: (x cos - y sin, y cos + x sin).
//
// For a pair of channels with the query (u, v) and the mean (m, n),
//   q . R_t mu = sum over pairs of A cos(t theta) + B sin(t theta),  A = u m + v n,  B = v m - u n.
// From token s on, for token s + i,
//   A' cos(i theta) + B' sin(i theta),  A' = A cos(s theta) + B sin(s theta),  B' = B cos(s theta) - A sin(s theta),
// and with C = cos(i theta) - 1 the term of token s + i is the sum of A', the same for 16 tokens, and of
//   A' C + B' sin(i theta).
// So a warp turns 2 PAIRS numbers per head from tile to tile, in fp32, sums A', and takes one more product of the size
// of its scores, with 16 rows of C, sin(i theta) that are the same for all layers, heads and sequences, of which a lane
// holds its part in registers. There A' and B' are rounded to 11 bits; but large means are of pairs that turn slowly,
// whose C and sine are small: what differs from token to token is nearly exact. Each later run of 16 tokens of a tile
// turns the rounded numbers on: A'' = A' + change, change = A' C + B' sin of so many tokens, small for these pairs too;
// the sum of changes, a product with ones, comes to that of A'.
//
// Angles. cos and sin of a position are products of those of its digits to base 128, exact to fp32 whatever the
// position: no argument of sine or cosine is ever large. From tile to tile A' and B' are turned on in fp32, which adds
// 2^-24 a tile.
//
// table of a KV head (packedkv/kernels/mean.py):
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

// The term of a warp's tiles of T tokens, for HEADS query heads (query.cuh) of a team of WARPS warps. TIGHT: what is
// not needed after `take` has a place of its own, START bytes, that others may then use.
template <int D, int PAIRS, int HEADS, int T, int WARPS, bool TIGHT = false> struct MeanTerm {
  KV_CONST int N = HEADS / 4, SUBS = T / 16, BLOCKS = PAIRS / 16;
  KV_CONST int ANGLE = 8 * PAIRS;          // bytes of cos and sin of all pairs
  KV_CONST int ROW = ANGLE + 16;           // of a head's A and B; heads g and g + 1 in different banks
  KV_CONST int SCALES = 128;               // of what makes terms scores, 16 for each part and parity of heads
  KV_CONST int COLUMNS = HEADS / 4;        // products of a block of pairs: two of four heads have a column each
  // Blocks whose A' and B' a lane holds in registers; the others' wait in shared memory. TIGHT: all, and what they take
  // the registers of, the table's rows, is in shared memory, once for all warps.
  KV_CONST bool ALL_HELD = TIGHT && BLOCKS > 16 / HEADS;
  KV_CONST int HELD = ALL_HELD || BLOCKS < 16 / HEADS ? BLOCKS : 16 / HEADS;
  KV_CONST int WAITING = (BLOCKS - HELD) * COLUMNS * 512;
  // A team's `shared`: A and B of its heads, scales, angles of steps, the table's rows if they are there, and of each
  // warp cos and sin of its start and what waits. TIGHT: `start` has A and B, and cos and sin of the warps' starts.
  KV_CONST int OWN = (TIGHT ? 0 : ANGLE) + WAITING, TABLE = ALL_HELD ? 1024 * BLOCKS : 0;
  KV_CONST int KEPT = TIGHT ? 0 : HEADS * ROW, STEPS = SCALES + SUBS * ANGLE + TABLE;
  KV_CONST int SHARED = (KEPT + STEPS + WARPS * OWN + 127) / 128 * 128;
  KV_CONST int START = TIGHT ? (HEADS * ROW + WARPS * ANGLE + 127) / 128 * 128 : 0;
  // behind `start`, which is `shared` if not TIGHT, the warps' starts and how far they are apart
  KV_CONST int STARTS = HEADS * ROW + (TIGHT ? 0 : STEPS), STEP = TIGHT ? ANGLE : OWN;
  KV_CONST int WAIT = KEPT + STEPS - TABLE + (TIGHT ? 0 : ANGLE);  // what waits, or the rows
  KV_CONST int REAL = PAIRS < D / 2 ? PAIRS : D / 2;  // pairs behind them repeat the last one and count nothing
  static_assert(PAIRS % 16 == 0, "whole products");

  // A couple is two neighbouring pairs. Of a block of 16 pairs, part j has the couples j and j + 4; query columns
  // (query.cuh) meet both of them, or of four heads the even columns the first and the odd columns the second.
  uint32_t rows[2][ALL_HELD ? 1 : BLOCKS][4];  // A operands of the tensor core: of two tokens or of two couples, cos
                                               // less 1, then sin
  float held[HELD][COLUMNS][4];  // A' and B' of the lane's couples at the tile's start
  // Where a lane finds the scales of its heads; behind them cos and sin of a step to the next tile, and, less 1 and in
  // fp16, of those within a tile.
  const uint8_t* at;
  uint8_t* waiting;  // ALL_HELD: the lane's part of the table's rows

  // A and B of the team's heads, scaled by a power of two
  KV_DEV static void stage(uint8_t* shared, uint8_t* start, const DecodeArgs& a, int b, int h, int first_head, int live,
                           int warp) {
    const int lane = thread() % 32;
    const MeanTable table(a.mean, h, PAIRS);
    const float* mean = a.mean.mean + b * a.mean.batch + (int64_t)h * D;
    constexpr int UNITS = (PAIRS + 63) / 64;  // couples of a lane
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
      // 2^k with top 2^k in [1, 2), then up to 2^9: sums of A' of a lane fit fp16
      int exponent = (int)(float_bits(top) >> 23) - 127;
      exponent = (exponent < -100 ? -100 : exponent > 100 ? 100 : exponent) - 9;
      const float down = bits_float((uint32_t)(127 - exponent) << 23);
      const float up = bits_float((uint32_t)(127 + exponent) << 23);
      KV_UNROLL
      for (int i = 0; i < UNITS; ++i) {
        const int couple = lane + 32 * i;
        if (2 * couple < PAIRS) {
          const float u[2] = {x[i][0] * down, x[i][1] * down}, v[2] = {y[i][0] * down, y[i][1] * down};
          *(Words4*)(start + n * ROW + 16 * place(couple)) = words(u, v);
        }
      }
      if (lane < 8 / HEADS) *(float*)(shared + KEPT + 16 * lane + 32 * (n / N) + 4 * (n % N)) = up * a.scale2;
    }
  }
  // number of a couple in shared memory: by blocks and parts
  KV_DEV static int place(int couple) { return couple / 8 * 8 + couple % 4 * 2 + couple % 8 / 4; }
  KV_DEV static Words4 words(const float (&c)[2], const float (&s)[2]) {
    return Words4{float_bits(c[0]), float_bits(c[1]), float_bits(s[0]), float_bits(s[1])};
  }

  // the angles of the team's steps, and of the start of the warp's first tile
  KV_DEV static void start_turning(uint8_t* shared, uint8_t* start, const DecodeArgs& a, int b, int h, int token,
                                   int warp) {
    const MeanTable table(a.mean, h, PAIRS);
    uint8_t* angles = shared + KEPT + SCALES;
    KV_NO_UNROLL
    for (int couple = thread() % 32; 2 * couple < PAIRS; couple += 32) {
      float c[2], s[2];
      const auto turn = [&](int tokens) {
        KV_UNROLL
        for (int k = 0; k < 2; ++k) table.turn(tokens, 2 * couple + k, c[k], s[k]);
      };
      turn(a.mean.placed[b] + token);
      *(Words4*)(start + STARTS + warp * STEP + 16 * place(couple)) = words(c, s);
      KV_NO_UNROLL
      for (int sub = warp; sub < SUBS; sub += WARPS) {
        turn(sub ? 16 * sub : T * WARPS);
        uint8_t* to = angles + sub * ANGLE + 16 * place(couple);
        if (sub == 0) *(Words4*)to = words(c, s);
        else *(Words2*)to = Words2{pack_half2(c[0] - 1.0f, c[1] - 1.0f), pack_half2(s[0], s[1])};
      }
    }
  }

  // the lane's part of the table's rows
  KV_DEV void hold(uint8_t* shared, const uint8_t* table, int warp) {
    const int lane = thread() % 32, g = lane / 4, j = lane % 4;
    const uint32_t* words = (const uint32_t*)table + 2 * (g * (PAIRS / 2) + j);
    KV_UNROLL
    for (int k = 0; k < 2; ++k) {
      KV_UNROLL
      for (int m = 0; m < BLOCKS; ++m) {
        const int at = HEADS == 8 ? 8 * m + 4 * k : 4 * k * PAIRS + 8 * m;  // 4 PAIRS words: 8 tokens further
        const uint32_t *x = words + 2 * at, *y = x + (HEADS == 8 ? 8 * PAIRS : 8);  // words: as operands, not pairs
        if constexpr (ALL_HELD) {
          if ((k * BLOCKS + m) % WARPS == warp)
            *(Words4*)(shared + WAIT + 16 * lane + 512 * (k * BLOCKS + m)) = Words4{x[0], y[0], x[1], y[1]};
        } else {
          rows[k][m][0] = x[0], rows[k][m][1] = y[0], rows[k][m][2] = x[1], rows[k][m][3] = y[1];
        }
      }
    }
  }
  // after a synchronisation
  KV_DEV void take(uint8_t* shared, uint8_t* start, int warp) {
    const int lane = thread() % 32, g = lane / 4, j = lane % 4, own = 2 * j + (HEADS == 4 ? g % 2 : 0);
    at = shared + KEPT + 16 * own;
    const uint8_t* query = start + g * HEADS / 8 * ROW + 16 * own;
    uint8_t* const mine = start + STARTS + warp * STEP;
    waiting = shared + WAIT + warp * OWN + 16 * lane;
    KV_UNROLL
    for (int m = 0; m < BLOCKS; ++m) {
      KV_UNROLL
      for (int i = 0; i < COLUMNS; ++i) {
        const int of = 128 * m + 16 * i;
        float x[4];
        floats(x, query + of);
        turn(x, mine + 16 * own + of);
        put(x, m, i);
      }
    }
  }
  // to the next tile of the warp
  KV_DEV void turn_on() {
    KV_UNROLL
    for (int m = 0; m < BLOCKS; ++m) {
      KV_UNROLL
      for (int i = 0; i < COLUMNS; ++i) {
        float x[4];
        get(x, m, i);
        turn(x, at + SCALES + 128 * m + 16 * i);
        put(x, m, i);
      }
    }
  }
  // A' and B' of a couple
  KV_DEV void get(float (&x)[4], int m, int i) const {
    if (m < HELD) {
      KV_UNROLL
      for (int k = 0; k < 4; ++k) x[k] = held[m][i][k];
    } else {
      floats(x, waiting + ((m - HELD) * COLUMNS + i) * 512);
    }
  }
  KV_DEV void put(const float (&x)[4], int m, int i) {
    if (m < HELD) {
      KV_UNROLL
      for (int k = 0; k < 4; ++k) held[m][i][k] = x[k];
    } else {
      *(Words4*)(waiting + ((m - HELD) * COLUMNS + i) * 512) =
          Words4{float_bits(x[0]), float_bits(x[1]), float_bits(x[2]), float_bits(x[3])};
    }
  }
  KV_DEV void load_row(uint32_t (&x)[4], int k, int m) const {
    const Words4 w = *(const Words4*)(waiting + 512 * (k * BLOCKS + m));
    x[0] = w.a, x[1] = w.b, x[2] = w.c, x[3] = w.d;
  }
  KV_DEV static void floats(float (&x)[4], const uint8_t* from) {
    const Words4 w = *(const Words4*)from;
    x[0] = bits_float(w.a), x[1] = bits_float(w.b), x[2] = bits_float(w.c), x[3] = bits_float(w.d);
  }
  // A' = A cos + B sin, B' = B cos - A sin
  KV_DEV static void turn(float (&x)[4], const uint8_t* angles) {
    float by[4];
    floats(by, angles);
    MeanTable::turn_by(x[0], x[2], by[0], -by[2]);
    MeanTable::turn_by(x[1], x[3], by[1], -by[3]);
  }

  // the terms of a tile, as `scores` orders them, times `scale`
  KV_DEV void terms(float (&term)[SUBS][2 * N]) const {
    uint32_t start[BLOCKS][COLUMNS][2];
    float sum = 0.0f, same[4] = {};
    KV_UNROLL
    for (int m = 0; m < BLOCKS; ++m) {
      KV_UNROLL
      for (int i = 0; i < COLUMNS; ++i) {
        float x[4];
        get(x, m, i);
        start[m][i][0] = pack_half2(x[0], x[1]), start[m][i][1] = pack_half2(x[2], x[3]);
        sum += x[0] + x[1];
      }
    }
    // the sum of a head's lanes, to 22 bits
    const float high = bits_float(float_bits(sum) & 0xffffe000u);
    mma(same, ONES, ONES, pack_half2(high, sum - high));
    KV_UNROLL
    for (int sub = 0; sub < SUBS; ++sub) {
      float d[2][4] = {}, more[4] = {same[0], same[1], 0.0f, 0.0f};
      uint32_t earlier = 0u;
      KV_UNROLL
      for (int m = 0; m < BLOCKS; ++m) {
        uint32_t b[COLUMNS][2], change[2] = {0u, 0u};
        KV_UNROLL
        for (int i = 0; i < COLUMNS; ++i) {
          b[i][0] = start[m][i][0], b[i][1] = start[m][i][1];
          if (sub == 0) continue;
          const Words2 t = *(const Words2*)(at + SCALES + sub * ANGLE + 128 * m + 16 * i);
          change[i] = hfma2(b[i][0], t.a, hmul2(b[i][1], t.b));
          b[i][1] = hadd2(b[i][1], hfms2(b[i][1], t.a, hmul2(b[i][0], t.b)));
          b[i][0] = hadd2(b[i][0], change[i]);
        }
        if (sub > 0) {  // of four heads those of two blocks at once
          if (HEADS == 8) mma(more, ONES, ONES, ONES, ONES, change[0], change[1]);
          else if (m % 2 == 1) mma(more, ONES, ONES, ONES, ONES, earlier, change[0]);
          else if (m + 1 == BLOCKS) mma(more, ONES, ONES, ONES, ONES, change[0], 0u);
          earlier = change[0];
        }
        KV_UNROLL
        for (int k = 0; k < 2; ++k) {
          uint32_t apart[4];
          if constexpr (ALL_HELD) load_row(apart, k, m);
          const uint32_t* a = ALL_HELD ? apart : rows[k][ALL_HELD ? 0 : m];
          mma(d[HEADS == 8 ? 0 : k], a[0], a[1], a[2], a[3], b[HEADS == 8 ? k : 0][0], b[HEADS == 8 ? k : 0][1]);
        }
      }
      KV_UNROLL
      for (int i = 0; i < 2 * N; ++i) {
        const int n = i % N;
        const float scale = ((const float*)at)[n];
        const float x = HEADS == 8 ? d[0][i] : d[i][0] + d[i][3];
        term[sub][i] = (x + (HEADS == 8 ? more[n] : more[0] + more[1])) * scale;
      }
    }
  }
  KV_CONST uint32_t ONES = 0x3c003c00u;
};

template <int D, int HEADS, int T, int WARPS, bool TIGHT> struct MeanTerm<D, 0, HEADS, T, WARPS, TIGHT> {
  KV_CONST int SHARED = 0, START = 0;
};

}  // namespace kv
