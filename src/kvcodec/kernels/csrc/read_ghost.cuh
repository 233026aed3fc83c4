// Reader of ghost (kvcodec/codecs/ghost.py, transform=channels): codes of widths that differ by channel, levels that
// are a cubic of the code, a scale for each token.
//
// Four neighbouring channels, a quad, share a width, and lie at the same place of four streams: a lane reads words of
// one stream, two neighbouring quads, a pair, at a time, to the halves of a register. Where a pair begins and how wide
// its codes are is data, the same for all tokens of a head: `fill` sums the widths up and leaves what a pair needs in
// shared memory. As widths fall along a stream, a pair can begin only in a range that is known when the kernel is
// compiled, nearly always within two words: then one shift finds it.
//
// Levels of pairs of up to four bits whose widths differ by one at most are looked up, two at a time: 1.5 operations
// for a number. The n bits of a pair have an entry from 2^n on, in 32 copies, so that no two lanes share a bank; the
// tables are the same for all heads. Wider codes, and pairs whose widths differ more, are computed, 4 operations for
// a number: a code is placed in the upper bits of the ten that fp16 has, c 2^(10 - w), as a number t = c 2^(-14 -
// w);
//   u = 2^15 t - (1 - 2^-w) = (2 c - (2^w - 1)) / 2^w        exact, between -1 and 1
//   level = u (A 2^(w - 1) + B 2^(3 w - 3) u^2)
// As widths fall, the registers are in two parts: a tile's code has neither looked up, the second or both (WAYS).
#pragma once
#include "bits.cuh"

namespace kv {

// TWICE: 2 b, of b bits for each channel on average; VALUES: of values, whose pairs are two lanes' in turn and which
// have a mean. BORROWS: values look up the keys' levels, which lie before. LOOK: how many parts of the registers are
// looked up
template <int D, int TWICE, bool VALUES, bool BORROWS = false, int LOOK = 0> struct ReadGhost {
  KV_CONST int QUADS = D / 4, PAIRS = D / 8;
  KV_CONST int STREAM = D * TWICE / 64;  // bytes
  KV_CONST int WORDS = (STREAM + 3) / 4;
  KV_CONST int UNIT = STREAM % 4 == 0 ? 4 : STREAM % 2 == 0 ? 2 : 1;  // bytes of a stream side by side
  KV_CONST int TOTAL = 8 * STREAM - 1;   // sum of the widths
  KV_CONST int EACH = VALUES ? 2 : 1;    // pairs of the streams for each register
  KV_CONST int WIDEST = 7;

  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = 1;
  KV_FUNCTION int plane_bytes(int) { return 4 * STREAM; }

  // -- tables --------------------------------------------------------------------------------------------------------
  // global: uint8 [D] channels of the model as sorted, uint8 [D / 4] widths; of values then, from a multiple of 16 on,
  // float [D] means over sizes, in that order
  KV_CONST int CENTRE = align16(D + QUADS);
  KV_CONST int SOURCE = CENTRE + (VALUES ? 4 * D : 0);  // bytes
  // shared: what each pair needs, Program; the channels; the means; how many parts can be looked up; levels
  struct Program {
    uint32_t shift, up, mask, middle;  // of codes that are computed; middle, a, b: half2
    uint32_t a, b;
    uint32_t look_shift, look_mask;    // of codes that are looked up
  };
  KV_CONST int ORDER = 32 * PAIRS;
  KV_CONST int MEANS = ORDER + D;
  KV_CONST int PARTS = MEANS + (VALUES ? 4 * D : 0);
  KV_CONST int LEVELS = PARTS + 16;
  KV_CONST int LOOKED_UP = 4;  // bits of a code
  KV_CONST int ENTRIES = 2 << 2 * LOOKED_UP;
  KV_CONST int KEYS_LEVELS = ORDER + D + 16;  // of the keys
  KV_CONST int TABLE = LEVELS + (BORROWS ? 0 : 128 * ENTRIES);
  KV_CONST int REGS = PAIRS / EACH;
  KV_CONST int PARTED = TWICE < 7 ? REGS / 4 : REGS / 2;  // registers of the first part
  KV_CONST int COMPUTED = LOOK == 0 ? REGS : LOOK == 1 ? PARTED : 0;

  // the widest span of streams that pairs [first, last] can lie in: widths fall and sum up to TOTAL
  KV_FUNCTION int lowest(int first) {
    const int wide = ((2 * first + 1) * TOTAL + QUADS - 1) / QUADS - 10;
    const int narrow = (2 * first * TOTAL + QUADS - 1) / QUADS;
    return wide < narrow - 7 ? wide : narrow - 7;
  }
  KV_FUNCTION int highest(int last) {
    const int quads = 2 * last + 2, wide = COMPUTED * EACH * 2 < quads ? COMPUTED * EACH * 2 : quads;
    const int bits = wide * WIDEST + (quads - wide) * LOOKED_UP;
    return bits < TOTAL ? bits : TOTAL;
  }
  KV_FUNCTION int whole(int bit) { return bit < 0 ? -32 : bit / 32 * 32; }
  // the word of the streams from which the shifts of a register's pairs count, zeros lying before the first
  KV_FUNCTION int origin(int k) { return whole(lowest(EACH * k)) / 32; }
  // how a register's pairs are found: in that word and the next one (WORDWISE), in 64 bits from each pair's lowest on
  // (BITWISE), or in one of several words (FAR)
  enum Reach { WORDWISE, BITWISE, FAR };
  KV_FUNCTION Reach reach_of(int k) {
    const int first = EACH * k, last = first + EACH - 1;
    if (highest(last) - 32 * origin(k) <= 64) return WORDWISE;
    for (int pair = first; pair <= last; ++pair)
      if (highest(pair) - lowest(pair) > 64 || lowest(pair) / 32 != origin(k)) return FAR;
    return BITWISE;
  }

  KV_FUNCTION float slope(int w) {
    return w == 0 ? 0.0f : w == 1 ? 1.5958f : w == 2 ? 2 * 0.89289f : w == 3 ? 4 * 0.47146f : w == 4 ? 8 * 0.24051f
        : w == 5 ? 16 * 0.12183f : w == 6 ? 32 * 0.061706f : 64 * 0.031279f;
  }
  KV_FUNCTION float bend(int w) {
    return w < 2 ? 0.0f : w == 2 ? 8 * 0.050693f : w == 3 ? 64 * 0.011585f : w == 4 ? 512 * 0.0020975f
        : w == 5 ? 4096 * 0.00033676f : w == 6 ? 32768 * 5.0861e-05f : 262144 * 7.4065e-06f;
  }

  KV_DEV static float level(int w, int code) {
    const float u = (float)(2 * code + 1 - (1 << w)) / (float)(1 << w);
    return u * (slope(w) + bend(w) * (u * u));
  }
  KV_DEV static void fill_levels(uint8_t* to, int thread, int threads) {
    check_shared_base();
    for (int n = thread; n < ENTRIES; n += threads) {
      int bits = 0;
      while (n >> (bits + 1)) ++bits;
      const int w1 = bits / 2, w0 = bits - w1, code = n & ((1 << bits) - 1);
      const uint32_t x = pack_half2(level(w0, code & ((1 << w0) - 1)), level(w1, code >> w0));
      KV_UNROLL
      for (int i = 0; i < 8; ++i) ((Words4*)(to + 128 * n))[(i + thread) % 8] = {x, x, x, x};
    }
  }
  KV_DEV static void fill(uint8_t* to, const uint8_t* from, int thread, int threads) {
    const uint8_t* widths = from + D;
    for (int pair = thread; pair < PAIRS; pair += threads) {
      int begin = 0;
      for (int quad = 0; quad < 2 * pair; ++quad) begin += widths[quad];
      const int w0 = widths[2 * pair], w1 = widths[2 * pair + 1], from = begin - 32 * origin(pair / EACH);
      Program p;
      p.shift = (uint32_t)(from + w0 - 10);
      p.up = 1u << (16 - w1);
      p.mask = ((1u << w0) - 1) << (10 - w0) | ((1u << w1) - 1) << (26 - w1);
      p.middle = pack_half2(1.0f - 1.0f / (float)(1 << w0), 1.0f - 1.0f / (float)(1 << w1));
      p.a = pack_half2(slope(w0), slope(w1));
      p.b = pack_half2(bend(w0), bend(w1));
      p.look_shift = (uint32_t)(from - 7);
      p.look_mask = ((1u << (w0 + w1)) - 1) << 7;
      ((Program*)to)[pair] = p;
    }
    if (thread == 0) {
      int pair = PAIRS - 1;
      for (; pair >= 0; --pair) {
        const int w0 = widths[2 * pair], w1 = widths[2 * pair + 1];
        if (w0 > LOOKED_UP || w1 > w0 || w0 - w1 > 1) break;
      }
      *(uint32_t*)(to + PARTS) = pair < 0 ? 2 : pair < PARTED * EACH ? 1 : 0;
    }
    if (!BORROWS) fill_levels(to + LEVELS, thread, threads);
    for (int i = thread; i < D / 4; i += threads) ((uint32_t*)(to + ORDER))[i] = ((const uint32_t*)from)[i];
    if (VALUES) {
      for (int i = thread; i < D; i += threads) ((float*)(to + MEANS))[i] = ((const float*)(from + CENTRE))[i];
    }
  }
  // channels are sorted: the model's channel of the codes' channel c, by the table in shared memory; of the same
  // table in global memory, and the mean that is added to a value
  KV_CONST bool ORDERED = true;
  KV_DEV static int model_channel(const uint8_t* table, int c) { return table[ORDER + c]; }
  KV_DEV static int source_channel(const uint8_t* source, int c) { return source[c]; }
  KV_CONST bool CENTRED = VALUES;
  KV_DEV static float centre(const uint8_t* table, int c) { return ((const float*)(table + MEANS))[c]; }
  KV_DEV static float source_centre(const uint8_t* source, int c) { return ((const float*)(source + CENTRE))[c]; }

  // -- codes ---------------------------------------------------------------------------------------------------------
  KV_DEV static void load(const uint8_t* row, int stream, uint32_t (&w)[WORDS]) {
    const uint8_t* at = row + UNIT * stream;
    KV_UNROLL
    for (int i = 0; i < WORDS; ++i) {
      if (UNIT == 4) {
        w[i] = *(const uint32_t*)(at + 16 * i);
      } else if (UNIT == 2) {
        w[i] = *(const uint16_t*)(at + 16 * i);
        if (4 * i + 2 < STREAM) w[i] |= (uint32_t)*(const uint16_t*)(at + 16 * i + 8) << 16;
      } else {
        w[i] = at[16 * i];
        KV_UNROLL
        for (int k = 1; k < 4; ++k)
          if (4 * i + k < STREAM) w[i] |= (uint32_t)at[16 * i + 4 * k] << 8 * k;
      }
    }
  }
  // word i of a stream; zeros before and behind it
  KV_DEV static uint32_t word(const uint32_t (&w)[WORDS], int i) { return i < 0 || i >= WORDS ? 0u : w[i]; }
  // 32 bits of a stream, of pair `own` of register k, from `shift` bits behind its origin on
  KV_DEV static uint32_t window(const uint32_t (&w)[WORDS], int k, int own, uint32_t shift) {
    const int i = origin(k);
    uint32_t low = word(w, i), high = word(w, i + 1);
    if (reach_of(k) == BITWISE) {
      const int by = own ? lowest(EACH * k + EACH - 1) % 32 : lowest(EACH * k) % 32;
      low = funnel(low, high, by), high = funnel(high, word(w, i + 2), by), shift -= by;
    }
    if (reach_of(k) != FAR) return (uint32_t)(((uint64_t)high << 32 | low) >> shift);
    KV_UNROLL
    for (int far = 1; far < WORDS; ++far) {
      if (32 * (i + far) >= highest(EACH * k + EACH - 1)) break;
      const bool later = shift >= 32u * far;
      low = later ? word(w, i + far) : low;
      high = later ? word(w, i + far + 1) : high;
    }
    return funnel(low, high, shift % 32);
  }

  // how many parts can be looked up, and the reader that does
  KV_DEV static int ways(const uint8_t* table) { return (int)*(const uint32_t*)(table + PARTS); }
  template <int WAY> using Way = ReadGhost<D, TWICE, VALUES, BORROWS, WAY>;

  // N tokens of a lane, the pairs `own` + EACH k of a stream
  template <int N, class P>
  KV_DEV static void levels(const P& planes, const uint8_t* table, const int (&tokens)[N], int stream, int own,
                            int lane, uint32_t* const (&r)[N]) {
    // where the tables begin that hold the levels, and how far behind, as a constant of the loads
    const uint8_t* held = BORROWS ? table - KEYS_LEVELS - 128 * ENTRIES : table;
    constexpr int BEHIND = BORROWS ? KEYS_LEVELS : LEVELS;
    uint32_t w[N][WORDS];
    KV_UNROLL
    for (int n = 0; n < N; ++n) load(planes[0] + tokens[n] * (4 * STREAM), stream, w[n]);
    KV_UNROLL
    for (int k = 0; k < REGS; ++k) {
      const Program& p = ((const Program*)table)[EACH * k + own];
      if (k >= COMPUTED) {
        const Words2 look = *(const Words2*)&p.look_shift;
        const uint32_t base = look.b + (uint32_t)(128 + 4 * lane);  // the entry of 2^n, the lane's copy
        KV_UNROLL
        for (int n = 0; n < N; ++n) r[n][k] = load_table<BEHIND>(held, (window(w[n], k, own, look.a) & look.b) | base);
      } else {
        const Words4 x = *(const Words4*)&p;
        const Words2 ab = *(const Words2*)&p.a;
        KV_UNROLL
        for (int n = 0; n < N; ++n) {
          const uint32_t low = window(w[n], k, own, x.a);
          const uint32_t u = hfms2(prmt(low, low * x.b, 0x7610) & x.c, 0x78007800u, x.d);
          r[n][k] = hmul2(u, hfma2(hmul2(u, u), ab.b, ab.a));
        }
      }
    }
  }

  // 2^((n - 6) / 4), n from the last bits of the streams; 0 for n = 0
  template <class P> KV_DEV static float scale(const P& planes, int token) {
    const uint8_t* last = planes[0] + token * (4 * STREAM) + 4 * STREAM - 4 * UNIT;
    uint32_t n;  // 2^23 + n as a float
    if (UNIT == 4) {
      const Words4 x = *(const Words4*)last;
      n = funnel(x.a, funnel(x.b, funnel(x.c, funnel(x.d, 0x04b00000u, 31), 31), 31), 31);
    } else {
      uint32_t x;
      if (UNIT == 2) {
        const Words2 y = *(const Words2*)last;
        x = prmt(y.a, y.b, 0x7531);
      } else {
        x = *(const uint32_t*)last;
      }
      n = dot4(x >> 7 & 0x01010101u, 0x08040201u, 0x4b000000u);
    }
    const float power = exp2_fast(fma(bits_float(n), 0.25f, -2097153.5f));
    return n == 0x4b000000u ? 0.0f : power;
  }

  KV_CONST int GROUPS = 1;
  KV_CONST int K_REGS = D / 8;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = false;
  KV_FUNCTION int k_channel(int part, int e) { return 4 * e + part; }
  KV_FUNCTION float k_weight(int) { return 1.0f; }
  KV_CONST bool IN_TWOS = true;
  template <class P>
  KV_DEV static void keys(const P& planes, const uint8_t* table, int token, int part, int lane,
                          uint32_t (&r)[K_REGS]) {
    levels<1>(planes, table, {token}, part, 0, lane, {r});
  }
  template <class P>
  KV_DEV static void two_keys(const P& planes, const uint8_t* table, int first, int second, int part, int lane,
                              uint32_t (&x)[K_REGS], uint32_t (&y)[K_REGS]) {
    levels<2>(planes, table, {first, second}, part, 0, lane, {x, y});
  }
  template <class P> KV_DEV static float k_scale(const P& planes, int token, int) { return scale(planes, token); }

  KV_CONST int V_REGS = D / 16;
  KV_CONST bool V_BLOCKED = false;
  KV_CONST bool V_BLOCK_ZERO = false;
  KV_CONST bool HAS_V_SCALE = true;
  KV_CONST bool HAS_V_ZERO = false;
  KV_FUNCTION int v_channel(int part, int e) { return 4 * (e / 2 * 4 + part / 4 * 2 + e % 2) + part % 4; }
  KV_FUNCTION float v_weight(int) { return 1.0f; }
  template <class P>
  KV_DEV static void values(const P& planes, const uint8_t* table, int token, int part, int lane,
                            uint32_t (&r)[V_REGS]) {
    levels<1>(planes, table, {token}, part % 4, part / 4, lane, {r});
  }
  template <class P>
  KV_DEV static void two_values(const P& planes, const uint8_t* table, int first, int second, int part, int lane,
                                uint32_t (&x)[V_REGS], uint32_t (&y)[V_REGS]) {
    levels<2>(planes, table, {first, second}, part % 4, part / 4, lane, {x, y});
  }
  template <class P> KV_DEV static float v_scale(const P& planes, int token) { return scale(planes, token); }
};

}  // namespace kv
