// Reader of ghost (kvcodec/codecs/ghost.py, transform=channels): codes of widths that differ by channel, levels that are
// a cubic of the code, a scale for each token.
//
// Four neighbouring channels, a quad, share a width, and lie at the same place of four streams: a lane reads words of
// one stream, two neighbouring quads, a pair, at a time, to the halves of a register. Where a pair begins and how wide
// its codes are is data, the same for all tokens of a head: `fill` sums the widths up and leaves what a pair needs in
// shared memory. As widths fall along a stream, a pair can begin only in a range that is known when the kernel is
// compiled, nearly always within two words: then one shift finds it.
//
// A code is placed in the upper bits of the ten that fp16 has: c 2^(10 - w) as bits is t = c 2^(-14 - w), subnormal;
//   u = 2^15 t - (1 - 2^-w) = (2 c - (2^w - 1)) / 2^w        exact, between -1 and 1
//   level = u (A 2^(w - 1) + B 2^(3 w - 3) u^2)               four operations for two codes
#pragma once
#include "platform.cuh"

namespace kv {

// TWICE: 2 b, of b bits for each channel on average; VALUES: of values, whose pairs are two lanes' in turn and which
// have a mean
template <int D, int TWICE, bool VALUES> struct ReadGhost {
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
  // shared: what each pair needs, Program; the channels; the means
  struct Program {
    uint32_t shift, up, mask, middle;  // middle, a, b: half2
    uint32_t a, b, unused[2];
  };
  KV_CONST int ORDER = 32 * PAIRS;
  KV_CONST int MEANS = ORDER + D;
  KV_CONST int TABLE = MEANS + (VALUES ? 4 * D : 0);

  // the widest span of streams that pairs [first, last] can lie in: widths fall and sum up to TOTAL
  KV_FUNCTION int lowest(int first) { return ((2 * first + 1) * TOTAL + QUADS - 1) / QUADS - 10; }
  KV_FUNCTION int highest(int last) { return (2 * last + 2) * WIDEST < TOTAL ? (2 * last + 2) * WIDEST : TOTAL; }
  KV_FUNCTION int whole(int bit) { return bit < 0 ? -32 : bit / 32 * 32; }
  KV_FUNCTION bool near(int first, int last, int from) { return highest(last) - from <= 64; }
  // the bit of the streams from which the shifts of pairs [first, last] count: zeros lie before the first
  KV_FUNCTION int origin(int first, int last) {
    const int low = lowest(first), bytes = low < 0 ? -32 : low / 8 * 8;
    return near(first, last, whole(low)) || !near(first, last, bytes) ? whole(low) : bytes;
  }

  KV_FUNCTION float slope(int w) {
    return w == 0 ? 0.0f : w == 1 ? 1.5958f : w == 2 ? 2 * 0.89289f : w == 3 ? 4 * 0.47146f : w == 4 ? 8 * 0.24051f
        : w == 5 ? 16 * 0.12183f : w == 6 ? 32 * 0.061706f : 64 * 0.031279f;
  }
  KV_FUNCTION float bend(int w) {
    return w < 2 ? 0.0f : w == 2 ? 8 * 0.050693f : w == 3 ? 64 * 0.011585f : w == 4 ? 512 * 0.0020975f
        : w == 5 ? 4096 * 0.00033676f : w == 6 ? 32768 * 5.0861e-05f : 262144 * 7.4065e-06f;
  }

  KV_DEV static void fill(uint8_t* to, const uint8_t* from, int thread, int threads) {
    const uint8_t* widths = from + D;
    for (int pair = thread; pair < PAIRS; pair += threads) {
      int begin = 0;
      for (int quad = 0; quad < 2 * pair; ++quad) begin += widths[quad];
      const int w0 = widths[2 * pair], w1 = widths[2 * pair + 1], first = pair / EACH * EACH;
      Program p;
      p.shift = (uint32_t)(begin + w0 - 10 - origin(first, first + EACH - 1));
      p.up = 1u << (16 - w1);
      p.mask = ((1u << w0) - 1) << (10 - w0) | ((1u << w1) - 1) << (26 - w1);
      p.middle = pack_half2(1.0f - 1.0f / (float)(1 << w0), 1.0f - 1.0f / (float)(1 << w1));
      p.a = pack_half2(slope(w0), slope(w1));
      p.b = pack_half2(bend(w0), bend(w1));
      p.unused[0] = p.unused[1] = 0;
      ((Program*)to)[pair] = p;
    }
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
  // the word of a stream from a bit on that is known when compiled
  KV_DEV static uint32_t word(const uint32_t (&w)[WORDS], int bit) {
    const int i = bit < 0 ? -1 : bit / 32;
    const uint32_t low = i >= 0 && i < WORDS ? w[i < 0 ? 0 : i < WORDS ? i : 0] : 0u;
    const uint32_t high = i + 1 < WORDS ? w[i + 1 < WORDS ? i + 1 : 0] : 0u;
    return bit % 32 ? funnel(low, high, bit % 32) : low;
  }
  // 32 bits of a stream from `shift` bits behind the origin on
  KV_DEV static uint32_t window(const uint32_t (&w)[WORDS], int first, uint32_t shift) {
    const int last = first + EACH - 1, from = origin(first, last);
    uint32_t low = word(w, from), high = word(w, from + 32);
    if (near(first, last, from)) return (uint32_t)(((uint64_t)high << 32 | low) >> shift);
    KV_UNROLL
    for (int i = 1; i < WORDS; ++i) {
      if (near(first, last, from + 32 * (i - 1))) break;
      const bool later = shift >= 32u * i;
      low = later ? word(w, from + 32 * i) : low;
      high = later ? word(w, from + 32 * (i + 1)) : high;
    }
    return funnel(low, high, shift % 32);
  }
  template <int REGS>
  KV_DEV static void levels(const uint32_t (&w)[WORDS], const uint8_t* table, int own, uint32_t (&r)[REGS]) {
    KV_UNROLL
    for (int k = 0; k < REGS; ++k) {
      const Program& p = ((const Program*)table)[EACH * k + own];
      const Words4 x = *(const Words4*)&p;
      const Words2 ab = *(const Words2*)&p.a;
      const uint32_t low = window(w, EACH * k, x.a);
      const uint32_t u = hfms2(prmt(low, low * x.b, 0x7610) & x.c, 0x78007800u, x.d);
      r[k] = hmul2(u, hfma2(hmul2(u, u), ab.b, ab.a));
    }
  }

  // 2^((n - 6) / 4), n from the last bits of the streams; 0 for n = 0
  template <class P> KV_DEV static float scale(const P& planes, int token) {
    const uint8_t* last = planes[0] + token * (4 * STREAM) + 4 * STREAM - 4 * UNIT;
    uint32_t n;
    if (UNIT == 4) {
      const Words4 x = *(const Words4*)last;
      n = funnel(x.a, funnel(x.b, funnel(x.c, x.d >> 31, 31), 31), 31);
    } else {
      uint32_t x;
      if (UNIT == 2) {
        const Words2 y = *(const Words2*)last;
        x = prmt(y.a, y.b, 0x7531);
      } else {
        x = *(const uint32_t*)last;
      }
      n = dot4(x >> 7 & 0x01010101u, 0x08040201u, 0u);
    }
    const float power = exp2_fast((float)(int)n * 0.25f - 1.5f);
    return n ? power : 0.0f;
  }

  KV_CONST int GROUPS = 1;
  KV_CONST int K_REGS = D / 8;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = false;
  KV_FUNCTION int k_channel(int part, int e) { return 4 * e + part; }
  KV_FUNCTION float k_weight(int) { return 1.0f; }
  template <class P>
  KV_DEV static void keys(const P& planes, const uint8_t* table, int token, int part, int, uint32_t (&r)[K_REGS]) {
    uint32_t w[WORDS];
    load(planes[0] + token * (4 * STREAM), part, w);
    levels(w, table, 0, r);
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
  KV_DEV static void values(const P& planes, const uint8_t* table, int token, int part, int, uint32_t (&r)[V_REGS]) {
    uint32_t w[WORDS];
    load(planes[0] + token * (4 * STREAM), part % 4, w);
    levels(w, table, part / 4, r);
  }
  template <class P> KV_DEV static float v_scale(const P& planes, int token) { return scale(planes, token); }
};

}  // namespace kv
