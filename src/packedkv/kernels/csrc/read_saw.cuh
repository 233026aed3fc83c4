// Reader of saw-int4 (packedkv/codecs/saw_int4.py, zero=rounded, pack=neighbours) and of four-bit codes at large.
//
// Nibbles are not moved: masked in place inside its 16-bit half each is an fp16 subnormal, code * 2^-24, in
// bits 4-7 code * 2^-20. So eight codes cost four masks and one shift. 2^24 goes into the scale, the factor 16 of odd
// nibbles into q or the output.
#pragma once
#include "bits.cuh"

namespace kv {

// Channels of a part, for codes of four bits. For keys a part is D / 4 neighbouring channels in 32-bit words; for
// values D / 8, in halves of words where D / 8 is no multiple of 8, so that the last word may be half empty.
template <int D> struct Nibbles {
  KV_CONST float UNIT = 16777216.0f;
  KV_CONST int K_WORDS = (D + 31) / 32;
  KV_CONST int V_HALVES = (D + 31) / 32;
  using K = Parts<D, 8 * K_WORDS, 4>;
  using V = Parts<D, 4 * V_HALVES, 8>;
  KV_CONST int V_WORDS = (V_HALVES + 1) / 2;
  KV_CONST int K_REGS = 4 * K_WORDS;
  KV_CONST int V_REGS = 4 * V_WORDS;

  // element e: register e / 2, half e % 2; a word's register n has its nibbles n and n + 4
  KV_FUNCTION int k_channel(int part, int e) {
    return K::channel(part, e / 8 * 8 + e % 2 * 4 + e / 2 % 4);
  }
  KV_FUNCTION int v_channel(int part, int e) {
    return e / 8 * 2 + e % 2 < V_HALVES ? V::channel(part, e / 8 * 8 + e % 2 * 4 + e / 2 % 4) : -1;
  }
  KV_FUNCTION float weight(int e) { return e / 2 % 2 ? 0.0625f : 1.0f; }

  KV_DEV static void split(uint32_t w, uint32_t* r) {
    const uint32_t v = w >> 8;
    r[0] = w & 0x000f000fu;
    r[1] = w & 0x00f000f0u;
    r[2] = v & 0x000f000fu;
    r[3] = v & 0x00f000f0u;
  }
  // row: D / 2 bytes of one token
  KV_DEV static void keys(const uint8_t* row, int part, uint32_t (&r)[K_REGS]) {
    uint32_t w[K_WORDS];
    load_words<K_WORDS>(w, row + K::template place<4>(part));
    KV_UNROLL
    for (int i = 0; i < K_WORDS; ++i) split(w[i], r + 4 * i);
  }
  KV_DEV static void values(const uint8_t* row, int part, uint32_t (&r)[V_REGS]) {
    uint32_t w[V_WORDS];
    if (V_HALVES % 2 == 0) {
      load_words<V_WORDS>(w, row + V::template place<4>(part));
    } else {
      const uint16_t* at = (const uint16_t*)(row + V::template place<4>(part));
      KV_UNROLL
      for (int i = 0; i < V_WORDS; ++i) w[i] = at[2 * i] | (2 * i + 1 < V_HALVES ? (uint32_t)at[2 * i + 1] << 16 : 0u);
    }
    KV_UNROLL
    for (int i = 0; i < V_WORDS; ++i) split(w[i], r + 4 * i);
  }
};

template <int D> struct ReadSaw {
  using Codes = Nibbles<D>;
  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = 2;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? D / 2 : 4; }
  KV_CONST int TABLE = 0;
  KV_DEV static void fill(uint8_t*, const uint8_t*, int, int) {}

  KV_CONST int GROUPS = 1;
  KV_CONST int K_REGS = Codes::K_REGS;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = true;
  KV_FUNCTION int k_channel(int part, int e) { return Codes::k_channel(part, e); }
  KV_FUNCTION float k_weight(int e) { return Codes::weight(e); }
  template <class P>
  KV_DEV static void keys(const P& planes, const uint8_t*, int token, int part, int, uint32_t (&r)[K_REGS]) {
    Codes::keys(planes[0] + token * (D / 2), part, r);
  }
  // y = s (code - z)
  template <class P>
  KV_DEV static float scale(const P& planes, int token) { return half_float(((const uint16_t*)planes[1])[2 * token]); }
  template <class P> KV_DEV static float offset(const P& planes, int token) {
    const uint32_t both = ((const uint32_t*)planes[1])[token];
    return -half_float((uint16_t)both) * half_float((uint16_t)(both >> 16));
  }
  template <class P>
  KV_DEV static float k_scale(const P& planes, int token, int) { return scale(planes, token) * Codes::UNIT; }
  template <class P> KV_DEV static float k_zero(const P& planes, int token, int) { return offset(planes, token); }

  KV_CONST int V_REGS = Codes::V_REGS;
  KV_CONST bool V_BLOCKED = false;
  KV_CONST bool V_BLOCK_ZERO = false;
  KV_CONST bool HAS_V_SCALE = true;
  KV_CONST bool HAS_V_ZERO = true;
  KV_FUNCTION int v_channel(int part, int e) { return Codes::v_channel(part, e); }
  KV_FUNCTION float v_weight(int e) { return Codes::weight(e); }
  template <class P>
  KV_DEV static void values(const P& planes, const uint8_t*, int token, int part, int, uint32_t (&r)[V_REGS]) {
    Codes::values(planes[0] + token * (D / 2), part, r);
  }
  template <class P>
  KV_DEV static float v_scale(const P& planes, int token) { return scale(planes, token) * Codes::UNIT; }
  template <class P> KV_DEV static float v_zero(const P& planes, int token) { return offset(planes, token); }
};

}  // namespace kv
