// Reader of integers in groups of 32 channels of a token in interleaved order (packedkv/codecs/group_int.py): values of
// kivi, octopus and ultra-tq where the head dimension is a multiple of 128. Values of 4 bits, whose plain stream is
// this order, also in groups of 64 and 128.
//
// Of 128 channels, every g of 8 has four in each of the four groups: 16 codes in BITS units of 16 bits, unit i of g at
// word 8 i + g of the row. So 16 bytes of a token hold unit i of all g, and a transposing matrix load gives lane
// 4 g + j the units of g for two neighbouring tokens: one mask makes a channel of two tokens an operand of the tensor
// core, all of whose rows belong to one group. The group's scales then join P, two tokens to a register as well, and
// the zeros are a product of their own, of 4 rows.
#pragma once
#include "platform.cuh"

namespace kv {

// 16 codes in BITS units: of two tokens (values) or of two g (keys), one in each half of a word
template <int BITS> struct Interleaved {
  static_assert(BITS == 2 || BITS == 3 || BITS == 4, "widths with an interleaved order");
  KV_CONST int UNIT = 16 / BITS;                     // codes of a unit; at 3 bits one more is spread over three units
  KV_CONST int HIGH = BITS == 2 ? 10 : BITS == 3 ? 9 : 8;  // bits that a half's upper codes are moved down by
  KV_FUNCTION bool upper(int n) { return n % UNIT * BITS >= HIGH; }
  // lowest bit of code n within a half: it is left there, an fp16 subnormal, code * 2^(position - 24)
  KV_FUNCTION int position(int n) {
    if (BITS == 3 && n == 15) return 6;
    return n % UNIT * BITS - (upper(n) ? HIGH : 0);
  }
  KV_DEV static uint32_t pick(const uint32_t* w, int n) {
    if (BITS == 3 && n == 15) return (w[0] >> 9 & 0x00400040u) | (w[1] >> 8 & 0x00800080u) | (w[2] >> 7 & 0x01000100u);
    const uint32_t mask = 0x00010001u * (uint32_t)(((1 << BITS) - 1) << position(n));
    return (upper(n) ? w[n / UNIT] >> HIGH : w[n / UNIT]) & mask;
  }
};

template <int D, int BITS, int GROUP = 32> struct ReadInterleaved {
  static_assert(D % 128 == 0 && D <= 512, "rows of 128 channels; 32 of them at a time, 16 times at most");
  static_assert(GROUP == 32 || ((GROUP == 64 || GROUP == 128) && BITS == 4), "whole groups to 128 channels");
  using Codes = Interleaved<BITS>;
  KV_CONST int RUNS = D / 128;
  KV_CONST int ROW = D * BITS / 8;
  KV_CONST int SCALES = D / 32;  // runs of 32 channels; EACH of them share what is stored
  KV_CONST int EACH = GROUP / 32, HELD = SCALES / EACH;
  KV_CONST int WORDS = RUNS * BITS;  // units of a lane and token
  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = 3;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? ROW : 2 * HELD; }
  KV_CONST int TABLE = 0;
  KV_DEV static void fill(uint8_t*, const uint8_t*, int, int) {}
  KV_CONST float UNIT = 16777216.0f;

  template <class P> KV_DEV static float number(const P& planes, int plane, int token, int group) {
    return half_float(((const uint16_t*)planes[plane])[token * HELD + group]);
  }

  // keys: word j of 16 bytes has the units of g = 2j and 2j + 1
  KV_CONST int GROUPS = SCALES;
  KV_CONST int K_REGS = D / 8;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = true;
  KV_CONST float K_SCALE_UNIT = UNIT;
  KV_FUNCTION int k_channel(int part, int e) { return e / 8 * 32 + (2 * part + e % 2) * 4 + e / 2 % 4; }
  KV_FUNCTION float k_weight(int e) { return 1.0f / (float)(1 << Codes::position(e / 2 % 16)); }
  template <class P>
  KV_DEV static void keys(const P& planes, const uint8_t*, int token, int part, int, uint32_t (&r)[K_REGS]) {
    const uint8_t* at = planes[0] + token * ROW + 4 * part;
    uint32_t w[WORDS];
    KV_UNROLL
    for (int i = 0; i < WORDS; ++i) w[i] = *(const uint32_t*)(at + 16 * i);
    KV_UNROLL
    for (int n = 0; n < K_REGS; ++n) r[n] = Codes::pick(w + n / 16 * BITS, n % 16);
  }
  template <class P> KV_DEV static float k_scale(const P& planes, int token, int group) {
    return number(planes, 1, token, group) * UNIT;
  }
  template <class P> KV_DEV static void k_scales(const P& planes, int token, float (&s)[GROUPS]) {
    uint32_t w[GROUPS / 2];
    load_words<GROUPS / 2>(w, planes[1] + token * (2 * GROUPS));
    KV_UNROLL
    for (int i = 0; i < GROUPS; ++i) s[i] = half_float((uint16_t)(w[i / 2] >> i % 2 * 16));
  }
  template <class P> KV_DEV static float k_zero(const P& planes, int token, int group) {
    return number(planes, 2, token, group);
  }

  // values, two tokens to a register; element e is code e % 16 of run e / 16
  KV_CONST bool V_PAIRED = true;
  KV_CONST int V_REGS = D / 16;
  KV_CONST bool V_BLOCKED = false;
  KV_CONST bool V_BLOCK_ZERO = false;
  KV_CONST bool HAS_V_SCALE = false;
  KV_CONST bool HAS_V_ZERO = false;
  KV_FUNCTION int v_channel(int part, int e) { return e / 4 * 32 + part * 4 + e % 4; }
  KV_FUNCTION float v_weight(int e) { return UNIT / (float)(1 << Codes::position(e % 16)); }

  // units of tokens token + 2j, + 1 in w[0], of those 8 behind them in w[1]
  template <class P> KV_DEV static void load_pairs(const P& planes, int token, int lane, uint32_t (&w)[2][WORDS]) {
    // lane 8 i + r: row r of matrix i; matrices i = 0, 1 are 8 tokens each, then the next 16 bytes
    const uint8_t* rows = planes[0] + token * ROW;
    const uint8_t *row = rows + (lane % 16 * ROW + lane / 16 * 16), *first = rows + (lane % 16 * ROW);
    KV_UNROLL
    for (int i = 0; i < WORDS; i += 2) {
      uint32_t x[4];
      if (i + 1 < WORDS) load_transposed<4>(x, row + 16 * i);
      else load_transposed<2>(x, first + 16 * i);
      w[0][i] = x[0], w[1][i] = x[1];
      if (i + 1 < WORDS) w[0][i + 1] = x[2], w[1][i + 1] = x[3];
    }
  }
  KV_DEV static uint32_t pair(const uint32_t (&w)[WORDS], int e) { return Codes::pick(w + e / 16 * BITS, e % 16); }

  // scales of tokens at and at + 1 (even), by group; those not of `live` are 0
  template <class P>
  KV_DEV static void scale_pairs(const P& planes, int at, uint32_t live, uint32_t (&s)[SCALES]) {
    uint32_t w[HELD];
    load_words<HELD>(w, planes[1] + at * (2 * HELD));
    KV_UNROLL
    for (int q = 0; q < SCALES; ++q) {
      const int i = q / EACH;
      s[q] = (HELD == 1 ? w[0] : prmt(w[i / 2], w[(HELD + i) / 2], i % 2 ? 0x7632u : 0x5410u)) & live;
    }
  }
  // zeros of tokens token + 2j and + 1 of run g % SCALES, or of run g + 8
  template <class P> KV_DEV static uint32_t zero_pair(const P& planes, int token, int lane, int from = 0) {
    const int run = lane / 4 % SCALES + from;
    const uint16_t* z = (const uint16_t*)planes[2] + (lane % 4 * (2 * HELD) + run / EACH) + token * HELD;
    return z[0] | (uint32_t)z[HELD] << 16;
  }
  // the lane's share of a tile's largest scale; dead tokens' do not count
  template <int T, bool MASKED, class P>
  KV_DEV static float largest(const P& planes, int lane, int live_from, int live_to) {
    uint32_t most = 0;
    if constexpr (EACH > 1) {
      KV_UNROLL
      for (int i = 0; i < T; i += 32) {  // one token to a lane
        const int token = i + lane;
        if (T % 32 && token >= T) break;
        KV_UNROLL
        for (int q = 0; q < HELD; ++q) {
          const uint32_t s = ((const uint16_t*)planes[1])[token * HELD + q];
          most = hmax2(most, !MASKED || (token >= live_from && token < live_to) ? s : 0u);
        }
      }
      return half_float((uint16_t)most);
    }
    constexpr int PIECES = T * SCALES / 8, PER = SCALES / 4;  // pieces of a pair of tokens
    KV_UNROLL
    for (int i = 0; i < (PIECES + 31) / 32; ++i) {
      const int at = i * 32 + lane;
      if (PIECES % 32 && at >= PIECES) break;
      const Words4 x = ((const Words4*)planes[1])[at];
      uint32_t w[4] = {x.a, x.b, x.c, x.d};
      KV_UNROLL
      for (int n = 0; n < 4; ++n) {
        const int token = PER == 1 ? at * 2 + n / 2 : at / (PER / 2);
        most = hmax2(most, !MASKED || (token >= live_from && token < live_to) ? w[n] : 0u);
      }
    }
    return maximum(half_float((uint16_t)most), half_float((uint16_t)(most >> 16)));
  }

  // slow path: one token's values as floats
  template <class P> KV_DEV static void floats(const P& planes, int token, int part, float (&x)[2 * V_REGS]) {
    const uint16_t* row = (const uint16_t*)(planes[0] + token * ROW);
    uint32_t w[WORDS];
    KV_UNROLL
    for (int i = 0; i < WORDS; ++i) w[i] = row[8 * i + part];
    KV_UNROLL
    for (int e = 0; e < 2 * V_REGS; ++e) {
      const float code = half_float((uint16_t)Codes::pick(w + e / 16 * BITS, e % 16)) * v_weight(e);
      x[e] = code * number(planes, 1, token, e / 4 / EACH) + number(planes, 2, token, e / 4 / EACH);
    }
  }
};

}  // namespace kv
