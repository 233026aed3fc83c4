// Integers of 2, 3, 4 or 8 bits in a little-endian bit stream (packedkv/ops/bitpack.py), and the reader of int-b
// (group=0 of packedkv/codecs/group_int.py): one scale and, unless symmetric, one zero per token.
//
// Codes stay where they lie: masked inside a 16-bit half, a code in bits 0-9 is an fp16 subnormal, code * factor *
// 2^-24, the factor a power of two by its place. So two codes cost one mask; 2^24 goes into the scale, 1 / factor into
// q or the output.
#pragma once
#include "bits.cuh"

namespace kv {

// N neighbouring 32-bit words from an address that is a multiple of 4 N bytes
template <int N> KV_DEV void load_run(uint32_t (&w)[N], const void* at) {
  if (N % 4 == 0 || N % 2 == 1) {
    load_words<N>(w, at);
  } else {
    KV_UNROLL
    for (int i = 0; i < N / 2; ++i) {
      const Words2 x = ((const Words2*)at)[i];
      w[2 * i] = x.a, w[2 * i + 1] = x.b;
    }
  }
}

// C neighbouring codes, part after part of a row, in registers of two codes each; for two and three bits C is 8 or a
// multiple of 16. Element e (register e / 2, half e % 2) is code place(e) of the part: code * factor(e) * 2^-24.
// SINGLE: words are not loaded two at a time.
template <int BITS, int C, bool SINGLE = false> struct Codes {
  KV_CONST int REGS = C / 2;
  KV_CONST int BYTES = C * BITS / 8;

  KV_FUNCTION int place(int e) {
    if (BITS == 8) return e;
    if (BITS == 4) return e / 8 * 8 + e % 2 * 4 + e / 2 % 4;
    return C == 8 ? e % 2 * 4 + e / 2 : e / 16 * 16 + e % 2 * 8 + e / 2 % 8;
  }
  // its bit within a half, as `read` shifts words for RAW: closed forms, which compilers take for constants
  KV_FUNCTION int position(int n) {
    if (BITS == 8) return 0;
    if (BITS == 4) return n % 2 * 4;
    if (BITS == 2) return n % 4 * 2;
    if (C == 8) return n == 3 ? 1 : 3 * n;
    return n % 8 < 3 ? n % 8 * 3 : n % 8 < 6 ? n % 8 * 3 - 8 : n % 8 * 3 - 16;
  }
  KV_FUNCTION int factor(int e) { return 1 << position(e / 2); }
  // UP: 1024 + code factor, as halves
  template <bool UP> KV_DEV static uint32_t pick(uint32_t w, int n) {
    const uint32_t mask = 0x00010001u * (uint32_t)(((1 << BITS) - 1) << position(n));
    return UP ? and_or(w, mask, 0x64006400u) : w & mask;
  }

  // two words of which byte `first` and the five behind it are 16 codes of three bits
  template <bool UP> KV_DEV static void sixteen(uint32_t low, uint32_t high, uint32_t first, uint32_t* r) {
    const uint32_t a = prmt(low, high, 0x4310u + first * 0x1111u);  // bits 0-15 of either 24
    const uint32_t b = prmt(low, high, 0x5421u + first * 0x1111u);  // bits 8-23
    KV_UNROLL
    for (int n = 0; n < 8; ++n) r[n] = pick<UP>(n < 3 ? a : n < 6 ? b : b >> 8, n);
  }

  template <bool UP = false> KV_DEV static void read(const uint8_t* row, int part, uint32_t (&r)[REGS]) {
    if constexpr (BYTES == 2) {  // 8 codes of two bits
      const uint32_t x = *(const uint16_t*)(row + 2 * part), y = x | x << 8;
      KV_UNROLL
      for (int n = 0; n < 4; ++n) r[n] = pick<UP>(y, n);
    } else if constexpr (BYTES == 3) {  // 8 codes of three bits; both words lie in the row
      const uint32_t* words = (const uint32_t*)row;
      const uint32_t x = prmt(words[3 * part / 4], words[(3 * part + 2) / 4], 0x0210u + 3 * part % 4 * 0x0111u);
      const uint32_t y = (x & 0xfffu) | (x << 4 & 0x0fff0000u);
      KV_UNROLL
      for (int n = 0; n < 4; ++n) r[n] = pick<UP>(n < 3 ? y : y >> 8, n);
    } else if constexpr (BYTES == 6) {  // 16 codes of three bits
      const uint32_t* words = (const uint32_t*)row + 3 * part / 2;
      sixteen<UP>(words[0], words[1], part % 2 * 2, r);
    } else {
      constexpr int WORDS = BYTES / 4;
      uint32_t w[WORDS];
      const uint8_t* at = row + part * BYTES;
      if constexpr (SINGLE) {
        KV_UNROLL
        for (int i = 0; i < WORDS; ++i) w[i] = ((const uint32_t*)at)[i];
      } else {
        load_run<WORDS>(w, at);
      }
      if constexpr (BITS == 3) {
        KV_UNROLL
        for (int i = 0; i < WORDS; i += 3) {
          sixteen<UP>(w[i], w[i + 1], 0, r + i / 3 * 16);
          sixteen<UP>(w[i + 1], w[i + 2], 2, r + i / 3 * 16 + 8);
        }
      } else {
        KV_UNROLL
        for (int n = 0; n < REGS; ++n) {
          if (BITS == 8) r[n] = prmt(w[n / 2], UP ? 0x64646464u : 0u, n % 2 ? 0x4342u : 0x4140u);
          if (BITS == 4) r[n] = pick<UP>(n % 4 < 2 ? w[n / 4] : w[n / 4] >> 8, n);
          if (BITS == 2) r[n] = pick<UP>(n % 8 < 4 ? w[n / 8] : w[n / 8] >> 8, n);
        }
      }
    }
  }

  // codes as they are, exact halves
  KV_DEV static void whole(const uint8_t* row, int part, uint32_t (&r)[REGS]) {
    read<true>(row, part, r);
    KV_UNROLL
    for (int n = 0; n < REGS; ++n) {
      const uint32_t inverse = 0x04000400u * (uint32_t)(15 - position(n));
      r[n] = hfma2(r[n], inverse, 0x80008000u | (inverse + 0x28002800u));  // times 1 / factor, minus 1024 / factor
    }
  }
};

// Codes per part of a row of D. Where D / 4 or D / 8 codes would not end with a byte, a word or a group, a part is
// longer, and the last ones are empty: those of D = 96 are as long as those of 128, those of D = 192 as those of 256,
// those of D = 80 in between, with one that begins inside another (Parts).
template <int D, int BITS> KV_CONSTEXPR int key_codes() {
  if (D == 80) return BITS == 8 ? 20 : BITS == 4 ? 24 : 32;
  return D == 96 && BITS < 4 ? 32 : D == 192 && BITS == 3 ? 64 : D / 4;
}
template <int D, int BITS> KV_CONSTEXPR int value_codes() {
  if (D == 80) return BITS == 8 ? 12 : 16;
  return D == 96 && BITS < 8 ? 16 : D == 192 && BITS < 4 ? 32 : D / 8;
}

// channel of element e, or -1 in an empty part
template <int D, class C> KV_CONSTEXPR int part_channel(int part, int e) {
  return (part + 1) * C::REGS * 2 <= D ? part * C::REGS * 2 + C::place(e) : -1;
}
// an empty part reads the first part
template <int D, class C> KV_DEV int live_part(int part) {
  return D % (C::REGS * 2 * 4) == 0 || (part + 1) * C::REGS * 2 <= D ? part : 0;
}

template <int D, int BITS, bool SYMMETRIC = false> struct ReadInt {
  KV_CONST bool OVERLAPS = D % 32 != 0;  // of parts
  static_assert(!OVERLAPS || D * BITS % 32 == 0, "rows of whole words");
  using K = Codes<BITS, key_codes<D, BITS>(), OVERLAPS>;
  using V = Codes<BITS, value_codes<D, BITS>(), OVERLAPS>;
  template <class C, int COUNT> KV_FUNCTION int channel(int part, int e) {
    return OVERLAPS ? Parts<D, 2 * C::REGS, COUNT>::channel(part, C::place(e)) : part_channel<D, C>(part, e);
  }
  template <class C, int COUNT> KV_DEV static void read(const uint8_t* row, int part, uint32_t (&r)[C::REGS]) {
    if constexpr (OVERLAPS) C::read(row + Parts<D, 2 * C::REGS, COUNT>::template place<BITS>(part), 0, r);
    else C::read(row, live_part<D, C>(part), r);
  }
  KV_CONST int ROW = D * BITS / 8;
  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = SYMMETRIC ? 2 : 3;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? ROW : 2; }
  KV_CONST int TABLE = 0;
  KV_DEV static void fill(uint8_t*, const uint8_t*, int, int) {}

  template <class P>
  KV_DEV static float scale(const P& planes, int token) { return half_float(((const uint16_t*)planes[1])[token]); }
  template <class P> KV_DEV static float zero(const P& planes, int token) {
    if constexpr (SYMMETRIC) return scale(planes, token) * -(float)(1 << (BITS - 1));
    else return half_float(((const uint16_t*)planes[2])[token]);
  }

  KV_CONST int GROUPS = 1;
  KV_CONST int K_REGS = K::REGS;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = true;
  KV_FUNCTION int k_channel(int part, int e) { return channel<K, 4>(part, e); }
  KV_FUNCTION float k_weight(int e) { return 1.0f / K::factor(e); }
  template <class P>
  KV_DEV static void keys(const P& planes, const uint8_t*, int token, int part, int, uint32_t (&r)[K_REGS]) {
    read<K, 4>(planes[0] + token * ROW, part, r);
  }
  template <class P>
  KV_DEV static float k_scale(const P& planes, int token, int) { return scale(planes, token) * 16777216.0f; }
  template <class P> KV_DEV static float k_zero(const P& planes, int token, int) { return zero(planes, token); }

  KV_CONST int V_REGS = V::REGS;
  KV_CONST bool V_BLOCKED = false;
  KV_CONST bool V_BLOCK_ZERO = false;
  KV_CONST bool HAS_V_SCALE = true;
  KV_CONST bool HAS_V_ZERO = true;
  KV_FUNCTION int v_channel(int part, int e) { return channel<V, 8>(part, e); }
  KV_FUNCTION float v_weight(int e) { return 1.0f / V::factor(e); }
  template <class P>
  KV_DEV static void values(const P& planes, const uint8_t*, int token, int part, int, uint32_t (&r)[V_REGS]) {
    read<V, 8>(planes[0] + token * ROW, part, r);
  }
  template <class P>
  KV_DEV static float v_scale(const P& planes, int token) { return scale(planes, token) * 16777216.0f; }
  template <class P> KV_DEV static float v_zero(const P& planes, int token) { return zero(planes, token); }
};

}  // namespace kv
