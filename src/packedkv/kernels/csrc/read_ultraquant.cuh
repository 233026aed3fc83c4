// Reader of ultraquant (packedkv/codecs/ultraquant.py): E2M1 codes, and a scale for every 32 channels of a token.
//
// A table of bytes (two codes) in shared memory gives fp16: one dot4 and one load for two codes.
//
// Scales are powers of two, which multiply an fp16 number exactly unless the product is subnormal: code 2^E is
// (code / 8) (2^E / 8) 64, exact for E >= -17, off by 2^-19 at most below; E beyond 18, as of c times a magnitude of
// more than 2^18, is out of range.
// scale=real: the product of code / 8 with any fp16 scale is an fp16 number; it is rounded, once.
#pragma once
#include "read_levels.cuh"

namespace kv {

constexpr int TABLE_OWN = 0;       // codes are looked up in a table of this reader's
constexpr int TABLE_BORROWED = 1;  // values: in the table of the keys, of the same codec, that lies before

template <int D, int WAY = TABLE_OWN, bool REAL = false> struct ReadUltraQuant {
  using Values = PartStream<D / 2, 8>;
  using Rows = LevelRows<D, 4>;
  using Pairs = LevelTable<4>;
  KV_CONST int SCALES = D / 32;
  KV_CONST float HELD = 0.125f;  // codes in the table; with powers of two their scales as well
  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = 2;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? D / 2 : REAL ? 2 * SCALES : SCALES; }

  KV_CONST int TABLE = WAY == TABLE_OWN ? Pairs::BYTES : 0;
  KV_DEV static uint32_t number(int code) {  // fp16 bits
    const int e = code >> 1 & 3;
    const float whole = bits_float((uint32_t)(126 + e) << 23);  // 2^(e-1); subnormals are halves
    const float size = e ? whole * (code & 1 ? 1.5f : 1.0f) : code & 1 ? whole : 0.0f;
    return half_bits(size * HELD) | (code & 8) << 12;
  }
  KV_DEV static void fill(uint8_t* to, const uint8_t*, int thread, int threads) {
    check_shared_base();
    for (int n = thread; n < TABLE / 16; n += threads) {
      const uint32_t x = number(n / 8 & 15) | number(n / 8 >> 4) << 16;
      ((Words4*)to)[n] = {x, x, x, x};
    }
  }

  // runs of 4 or 8 channels (`pieces` of them in a group) that share a scale in every part
  KV_FUNCTION int span(int pieces) {
    int n = 1;
    for (; 2 * n <= pieces && SCALES % (2 * n) == 0; n *= 2) {}
    return n;
  }

  // both halves: the scale of a group, as raw numbers hold it
  template <class P> KV_DEV static uint32_t factor(const P& planes, int token, int group) {
    if (REAL) return ((const uint16_t*)planes[1])[token * SCALES + group] * 0x10001u;
    // the group first: added to 4 * token it would become an "or", and the token's constant part leave the load
    const float f = bits_float((uint32_t)(planes[1] + group)[token * SCALES] << 23) * HELD;
    return pack_half2(f, f);
  }

  KV_CONST int GROUPS = 1;
  KV_CONST int K_REGS = D / 8;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = false;
  KV_FUNCTION int k_channel(int part, int e) { return part * (D / 4) + e; }
  KV_FUNCTION float k_weight(int) { return 1.0f; }
  template <class P>
  KV_DEV static void keys(const P& planes, const uint8_t* table, int token, int part, int lane, uint32_t (&r)[K_REGS]) {
    Rows::keys(planes[0] + token * (D / 2), table, part, lane, r);
    constexpr int SPAN = span(4);
    KV_UNROLL
    for (int i = 0; i < SCALES; i += SPAN) {
      const uint32_t f = factor(planes, token, (part * (SCALES / SPAN) + i / SPAN) / (4 / SPAN));
      KV_UNROLL
      for (int k = 4 * i; k < 4 * (i + SPAN); ++k) r[k] = hmul2(r[k], f);
    }
  }
  // with real scales 2^(3 + r), 4^r >= the rotation's order
  KV_FUNCTION float k_unit() {
    float u = 1.0f / HELD;
    for (int spread = 1; D % (2 * spread) == 0; spread *= 4) u *= 2.0f;
    return u;
  }
  template <class P> KV_DEV static float k_scale(const P&, int, int) { return REAL ? k_unit() : 1.0f / (HELD * HELD); }

  KV_CONST bool V_TURNED = D == 128;  // rows of 64 bytes
  KV_CONST int V_REGS = D / 16;
  KV_CONST bool V_BLOCKED = false;
  KV_CONST bool V_BLOCK_ZERO = false;
  KV_CONST bool HAS_V_SCALE = false;
  KV_CONST bool HAS_V_ZERO = false;
  KV_FUNCTION int v_channel(int part, int e) { return part * (D / 8) + e; }
  KV_FUNCTION float v_weight(int) { return REAL ? 1.0f / HELD : 1.0f / (HELD * HELD); }
  template <class P>
  KV_DEV static void values(const P& planes, const uint8_t* table, int token, int part, int lane,
                            uint32_t (&r)[V_REGS]) {
    uint32_t w[Values::WORDS];
    Values::load(planes[0] + token * (D / 2), part, w);
    Pairs::look_up(w, WAY == TABLE_BORROWED ? table - Pairs::BYTES : table, lane, r);
    constexpr int SPAN = span(8);
    KV_UNROLL
    for (int i = 0; i < SCALES; i += SPAN) {
      const uint32_t f = factor(planes, token, (part * (SCALES / SPAN) + i / SPAN) / (8 / SPAN));
      KV_UNROLL
      for (int k = 2 * i; k < 2 * (i + SPAN); ++k) r[k] = hmul2(r[k], f);
    }
  }
};

}  // namespace kv
