// Reader of octopus keys (kvcodec/codecs/octopus.py): a code is the row of a table of decoded triplets.
//
// Up to 10 bits the table holds the triplets themselves. Longer codes are looked up as a direction, from a table that is short
// enough for several copies, and a length, two triplets' lengths at a time where 4^b_nrm of them are few; what is multiplied is
// rounded once more. Four part lanes share ceil(D/3) triplets evenly; those behind the last one, and the fourth number of
// each, are padding.
#pragma once
#include "bits.cuh"

namespace kv {

template <int D, int B_DIR, int B_NRM, bool NORM32> struct ReadOctopus {
  KV_CONST int W = 2 * B_DIR + B_NRM;
  KV_CONST int TRIPLETS = (D + 2) / 3;
  KV_CONST int PER = (TRIPLETS + 3) / 4;
  KV_CONST int ROW = (TRIPLETS * W + 7) / 8;
  KV_CONST bool JOINT = W <= 10;
  KV_CONST bool PAIRS = B_NRM <= 3;
  KV_CONST int ENTRIES = 1 << (JOINT ? W : 2 * B_DIR);
  using Directions = Table8<ENTRIES, 65536>;
  // lengths: one word per lane and entry, two fp16 numbers
  KV_CONST int LENGTHS = JOINT ? 0 : 1 << (PAIRS ? 2 * B_NRM : B_NRM);
  static_assert(W <= 16 && B_DIR <= 6, "the table of directions fits into shared memory");

  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = 2;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? ROW : NORM32 ? 4 : 2; }
  KV_CONST int TABLE = Directions::BYTES + LENGTHS * 128;

  // source: ENTRIES of four fp16 numbers, the last one 0; for two steps also 2^B_NRM lengths in fp16
  KV_DEV static void fill(uint8_t* to, const uint8_t* from, int thread, int threads) {
    Directions::fill(to, from, thread, threads);
    const uint16_t* length = (const uint16_t*)(from + ENTRIES * 8);
    uint32_t* at = (uint32_t*)(to + Directions::BYTES);
    for (int i = thread; i < LENGTHS * 32; i += threads) {
      const int e = i / 32;
      at[i] = length[e % (1 << B_NRM)] | (uint32_t)length[PAIRS ? e >> B_NRM : e] << 16;
    }
  }

  KV_CONST int GROUPS = 1;
  KV_CONST int K_REGS = 2 * PER;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = false;
  KV_CONST float K_UNIT = 1.0f;
  KV_FUNCTION int k_channel(int part, int e) {
    const int c = 3 * (part * PER + e / 4) + e % 4;
    return e % 4 < 3 && c < D ? c : -1;
  }
  KV_FUNCTION float k_weight(int) { return 1.0f; }

  template <class P> KV_DEV static void keys(const P& planes, const uint8_t* table, int token, int part, int lane, uint32_t (&r)[K_REGS]) {
    const Stream<ROW, PER * W> codes(planes[0], token, part);
    const uint32_t mine = Directions::copy(lane);
    constexpr int FROM = JOINT ? 0 : B_NRM, COUNT = W - FROM, TO = Directions::STRIDE_BIT;
    constexpr uint32_t ROWS = (uint32_t)(ENTRIES - 1) << TO;
    KV_UNROLL
    for (int k = 0; k < PER; ++k) {
      const Words2 x = Directions::get(table, (codes.field(W * k + FROM, COUNT, TO) & ROWS) | mine);
      r[2 * k] = x.a, r[2 * k + 1] = x.b;
    }
    if (JOINT) return;
    const uint8_t* lengths = table + Directions::BYTES;
    const uint32_t own = lane * 4;
    constexpr uint32_t MASK = (1u << B_NRM) - 1;
    KV_UNROLL
    for (int k = 0; k < PER; k += PAIRS ? 2 : 1) {
      uint32_t at = (codes.field(W * k, B_NRM, 7) & MASK << 7) | own;
      if (PAIRS && k + 1 < PER) at |= codes.field(W * (k + 1), B_NRM, 7 + B_NRM) & MASK << (7 + B_NRM);
      const uint32_t length = *(const uint32_t*)(lengths + at);
      r[2 * k] = hmul2(r[2 * k], low2(length)), r[2 * k + 1] = hmul2(r[2 * k + 1], low2(length));
      if (PAIRS && k + 1 < PER) r[2 * k + 2] = hmul2(r[2 * k + 2], high2(length)), r[2 * k + 3] = hmul2(r[2 * k + 3], high2(length));
    }
  }

  // gamma / sqrt(D); sqrt(D) is in the table
  template <class P> KV_DEV static float k_scale(const P& planes, int token, int) {
    return NORM32 ? ((const float*)planes[1])[token] : half_float(((const uint16_t*)planes[1])[token]);
  }
};

}  // namespace kv
