// Reader of octopus keys (kvcodec/codecs/octopus.py): a code is the row of a table of decoded triplets.
//
// Up to 10 bits the table holds the triplets themselves. Longer codes are looked up as a direction, from a table that
// is short enough for several copies, and a length, two triplets' lengths at a time where 4^b_nrm of them are few; what
// is multiplied is rounded once more. Four lanes share ceil(D/3) triplets evenly; those behind the last one are
// padding.
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
  using Directions = Table8<ENTRIES, 131072>;
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

  // two triplets have three registers: x and y of each, then both z. The last one of an odd number has two.
  KV_CONST int GROUPS = 1;
  KV_CONST int K_REGS = (PER + (PER + 1) / 2 + 1) / 2 * 2;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = false;
  KV_CONST float K_UNIT = 1.0f;
  KV_FUNCTION int k_channel(int part, int e) {
    const int two = e / 6 * 2, of_z = two + 1 < PER ? 2 : 1;  // of three registers
    const bool z = e % 6 / 2 == of_z;
    const int triplet = two + (z ? e % 2 : e % 6 / 2), c = 3 * (part * PER + triplet) + (z ? 2 : e % 2);
    return e % 6 / 2 <= of_z && triplet < PER && c < D ? c : -1;
  }
  KV_FUNCTION float k_weight(int) { return 1.0f; }

  template <class P>
  KV_DEV static void keys(const P& planes, const uint8_t* table, int token, int part, int lane, uint32_t (&r)[K_REGS]) {
    const Stream<ROW, PER * W> codes(planes[0], token, lane / 4, part);
    const uint32_t mine = Directions::copy(lane);
    constexpr int FROM = JOINT ? 0 : B_NRM, TO = Directions::STRIDE_BIT;
    constexpr uint32_t ROWS = (uint32_t)(ENTRIES - 1) << TO, MASK = (1u << B_NRM) - 1;
    auto direction = [&](int k) {
      return Directions::get(table, (codes.field(W * k + FROM, W - FROM, TO) & ROWS) | mine);
    };
    auto length_at = [&](int k, int to, uint32_t rest) { return (codes.field(W * k, B_NRM, to) & MASK << to) | rest; };
    auto length = [&](uint32_t at) { return load_table(table + Directions::BYTES, at); };
    KV_UNROLL
    for (int k = 0; k < PER; k += 2) {
      const bool two = k + 1 < PER;
      const Words2 first = direction(k), second = two ? direction(k + 1) : Words2{0u, 0u};
      uint32_t z = two ? prmt(first.b, second.b, 0x5410) : first.b;
      uint32_t* to = r + 3 * (k / 2);
      if (JOINT) {
        to[0] = first.a;
        if (two) to[1] = second.a;
      } else {
        uint32_t at = length_at(k, 7, 4u * lane);
        if (PAIRS && two) at = length_at(k + 1, 7 + B_NRM, at);
        uint32_t both = length(at);
        if (!PAIRS && two) both = prmt(both, length(length_at(k + 1, 7, 4u * lane)), 0x5410);
        to[0] = hmul2(first.a, low2(both));
        if (two) to[1] = hmul2(second.a, high2(both));
        z = hmul2(z, both);
      }
      to[two ? 2 : 1] = z;
    }
    if (K_REGS > PER + (PER + 1) / 2) r[K_REGS - 1] = 0u;
  }

  // gamma / sqrt(D); sqrt(D) is in the table
  template <class P> KV_DEV static float k_scale(const P& planes, int token, int) {
    return NORM32 ? ((const float*)planes[1])[token] : half_float(((const uint16_t*)planes[1])[token]);
  }
};

}  // namespace kv
