// Reader of fp8 (packedkv/codecs/fp8.py): E4M3 bytes, with or without a scale per token.
//
// Sign, exponent and fraction of a byte, put where fp16 has them, are the number times 2^-8, subnormal ones included.
#pragma once
#include "read_int.cuh"

namespace kv {

template <int D, bool SCALED> struct ReadFp8 {
  KV_CONST float UNIT = 256.0f;
  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = SCALED ? 2 : 1;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? D : 2; }
  KV_CONST int TABLE = 0;
  KV_DEV static void fill(uint8_t*, const uint8_t*, int, int) {}

  // a word's bytes 1 and 3, then 0 and 2
  KV_FUNCTION int place(int e) { return e / 4 * 4 + e % 2 * 2 + (e / 2 % 2 ? 0 : 1); }
  template <int N> KV_DEV static void read(const uint8_t* at, uint32_t (&r)[N]) {
    uint32_t w[N / 2];
    load_run<N / 2>(w, at);
    KV_UNROLL
    for (int n = 0; n < N; ++n) {
      const uint32_t x = n % 2 ? w[n / 2] << 8 : w[n / 2], y = n % 2 ? w[n / 2] << 7 : w[n / 2] >> 1;
      r[n] = (x & 0x80008000u) | (y & 0x3f803f80u);
    }
  }
  template <class P> KV_DEV static float scale(const P& planes, int token) {
    return SCALED ? half_float(((const uint16_t*)planes[SCALED])[token]) * UNIT : UNIT;
  }

  KV_CONST int GROUPS = 1;
  KV_CONST int K_REGS = D / 8;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = false;
  KV_FUNCTION int k_channel(int part, int e) { return part * (D / 4) + place(e); }
  KV_FUNCTION float k_weight(int) { return 1.0f; }
  template <class P>
  KV_DEV static void keys(const P& planes, const uint8_t*, int token, int part, int, uint32_t (&r)[K_REGS]) {
    read<K_REGS>(planes[0] + token * D + part * (D / 4), r);
  }
  template <class P> KV_DEV static float k_scale(const P& planes, int token, int) { return scale(planes, token); }

  KV_CONST int V_REGS = (D + 31) / 32 * 2;
  using V = Parts<D, 2 * V_REGS, 8>;
  KV_CONST bool V_BLOCKED = false;
  KV_CONST bool V_BLOCK_ZERO = false;
  KV_CONST bool HAS_V_SCALE = SCALED;
  KV_CONST bool HAS_V_ZERO = false;
  KV_FUNCTION int v_channel(int part, int e) { return V::channel(part, place(e)); }
  KV_FUNCTION float v_weight(int) { return SCALED ? 1.0f : UNIT; }
  template <class P>
  KV_DEV static void values(const P& planes, const uint8_t*, int token, int part, int, uint32_t (&r)[V_REGS]) {
    read<V_REGS>(planes[0] + token * D + V::template place<8>(part), r);
  }
  template <class P> KV_DEV static float v_scale(const P& planes, int token) { return scale(planes, token); }
};

}  // namespace kv
