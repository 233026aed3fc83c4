// Reader of octopus keys (packedkv/codecs/octopus.py): a code is the row of a table of decoded triplets.
//
// Up to 10 bits the table holds the triplets themselves. Longer codes are looked up as a direction, from a table that
// is short enough for several copies, and a length, two triplets' lengths at a time where 4^b_nrm is small; the product
// is rounded once more.
//
// Four lanes share a row. A lane's part is whole words of its own and a few bits of the row's tail: one shift by an
// amount that depends on the lane alone, after which the place of every field is a compile-time constant. Parts differ
// by a triplet at most; where one is missing, padding is looked up.
#pragma once
#include "bits.cuh"
#include "split_words.cuh"

namespace kv {

// PART_BITS bits of a token's tail of ROW_BYTES bytes, from bit `first` on, which depends on the lane alone, as `own`
// does, the part of `token` below 8. May read up to 7 bytes behind a row.
template <int ROW_BYTES, int PART_BITS> struct Tail {
  KV_CONST int WORDS = (PART_BITS + 31) / 32;
  uint32_t w[WORDS];
  KV_DEV Tail(const uint8_t* plane, int token, int own, int first) {
    const int rest = token - own;
    const uint32_t bit = (uint32_t)(rest % 8 + own) * (ROW_BYTES * 8) + (uint32_t)first;
    const uint32_t* at = (const uint32_t*)(plane + rest / 8 * (8 * ROW_BYTES) + bit / 32 * 4);
    uint32_t x[WORDS + 1];
    KV_UNROLL
    for (int i = 0; i <= WORDS; ++i) x[i] = at[i];
    KV_UNROLL
    for (int i = 0; i < WORDS; ++i) w[i] = funnel(x[i], x[i + 1], bit % 32);
  }
};

// AS_LOADED: triplets as a load leaves them, x and y, z and 0. Where registers of one token need not be apart, they are
// multiplied like that.
template <int D, int B_DIR, int B_NRM, bool NORM32, bool AS_LOADED = false> struct ReadOctopus {
  KV_CONST int W = 2 * B_DIR + B_NRM;
  KV_CONST bool JOINT = W <= JOINT_BITS;
  using Halved = ReadOctopus<D, B_DIR, B_NRM, NORM32, JOINT>;
  using Order = SplitWords<(D + 2) / 3, W, JOINT ? 0 : B_NRM>;
  KV_CONST int LEAST = Order::LEAST, PER = Order::MOST;  // triplets of a part
  KV_CONST bool PAIRS = B_NRM <= 3;
  KV_CONST int ENTRIES = 1 << (JOINT ? W : 2 * B_DIR);
  using Directions = Table8<ENTRIES, 131072>;
  // lengths: one word per lane and entry, two fp16 numbers
  KV_CONST int LENGTHS = JOINT ? 0 : 1 << (PAIRS ? 2 * B_NRM : B_NRM);
  static_assert(W <= 16 && B_DIR <= 6, "the table of directions fits into shared memory");

  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = Order::PLANES + 1;
  KV_FUNCTION int plane_bytes(int p) { return p < Order::PLANES ? Order::plane_bytes(p) : NORM32 ? 4 : 2; }
  KV_CONST int TABLE = Directions::BYTES + LENGTHS * 128;

  // source: ENTRIES of four fp16 numbers, the last one 0; for two steps also 2^B_NRM lengths in fp16
  KV_DEV static void fill(uint8_t* to, const uint8_t* from, int thread, int threads) {
    Directions::fill(to, from, thread, threads);
    const uint16_t* length = (const uint16_t*)(from + ENTRIES * 8);
    Words4* at = (Words4*)(to + Directions::BYTES);
    for (int i = thread; i < LENGTHS * 4; i += threads) {  // eight lanes' copies
      const int e = i / 4;
      const uint32_t x = length[e % (1 << B_NRM)] | (uint32_t)length[PAIRS ? e >> B_NRM : e] << 16;
      at[2 * i] = at[2 * i + 1] = Words4{x, x, x, x};
    }
  }

  // else two triplets have three registers: x and y of each, then both z. The last one of an odd number has two.
  KV_CONST int GROUPS = 1;
  KV_CONST int K_REGS = AS_LOADED ? 2 * PER : (PER + (PER + 1) / 2 + 1) / 2 * 2;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = false;
  KV_CONST float K_UNIT = 1.0f;
  KV_FUNCTION int channel(int part, int triplet, int c) {
    const int at = 3 * (Order::first(part) + triplet) + c;
    return c < 3 && triplet < LEAST + Order::longer(part) && at < D ? at : -1;
  }
  KV_FUNCTION int k_channel(int part, int e) {
    if (AS_LOADED) return channel(part, e / 4, e % 4);
    const int two = e / 6 * 2, of_z = two + 1 < PER ? 2 : 1;  // of three registers
    if (e % 6 / 2 > of_z) return -1;
    const bool z = e % 6 / 2 == of_z;
    return channel(part, two + (z ? e % 2 : e % 6 / 2), z ? 2 : e % 2);
  }
  KV_FUNCTION float k_weight(int) { return 1.0f; }

  struct Part {
    KV_CONST int N = (PER * W + 31) / 32;
    uint32_t w[N];
    template <class P> KV_DEV Part(const P& planes, int token, int own, int part) {
      constexpr int WORDS = Order::WORDS;
      if constexpr (WORDS > 0) {
        const Stream<16 * WORDS, 32 * WORDS> words(planes[0], token, own, part);
        KV_UNROLL
        for (int i = 0; i < WORDS; ++i) w[i] = words.w[i];
      }
      if constexpr (Order::TAIL > 0) {
        const Tail<Order::TAIL, Order::LAST> tail(planes[WORDS > 0], token, own, Order::tail_bit(part));
        KV_UNROLL
        for (int i = WORDS; i < N; ++i) w[i] = tail.w[i - WORDS];
      }
    }
    // the field of `count` bits that begins at bit `from`, moved to bit `to` of a word; other bits of the word are
    // undefined
    KV_DEV uint32_t field(int from, int count, int to) const {
      const int i = from / 32, off = from % 32;
      if (off + count > 32) return funnel(w[i], w[i + 1 < N ? i + 1 : i], off - to);
      return off >= to ? w[i] >> (off - to) : w[i] << (to - off);
    }
  };

  template <class P>
  KV_DEV static void keys(const P& planes, const uint8_t* table, int token, int part, int lane, uint32_t (&r)[K_REGS]) {
    const Part codes(planes, token, lane / 4, part);
    const uint32_t mine = Directions::copy(lane);
    constexpr int BITS = JOINT ? W : 2 * B_DIR, TO = Directions::STRIDE_BIT;
    constexpr uint32_t ROWS = (uint32_t)(ENTRIES - 1) << TO;
    auto direction = [&](int k) {
      return Directions::get(table, (codes.field(Order::upper_bit(k), BITS, TO) & ROWS) | mine);
    };
    // lengths of triplets k and k + 1
    auto lengths = [&](int k, bool two) {
      const bool both = two && PAIRS && k + 1 < LEAST;
      const uint32_t mask = ((1u << (both ? 2 * B_NRM : B_NRM)) - 1) << 7;
      uint32_t at = (codes.field(Order::lower_bit(k), both ? 2 * B_NRM : B_NRM, 7) & mask) | 4u * lane;
      const uint32_t other = codes.field(Order::lower_bit(k + 1), B_NRM, 7 + (PAIRS ? B_NRM : 0));
      if (PAIRS && two && !both) at = (other & ((1u << B_NRM) - 1) << (7 + B_NRM)) | at;
      const uint32_t first = load_table<Directions::BYTES>(table, at);
      if (PAIRS || !two) return first;
      return prmt(first, load_table<Directions::BYTES>(table, (other & mask) | 4u * lane), 0x5410);
    };
    if constexpr (AS_LOADED) {
      KV_UNROLL
      for (int k = 0; k < PER; ++k) {
        const Words2 x = direction(k);
        r[2 * k] = x.a, r[2 * k + 1] = x.b;
      }
      return;
    }
    KV_UNROLL
    for (int k = 0; k < PER; k += 2) {
      const bool two = k + 1 < PER;
      const Words2 first = direction(k), second = two ? direction(k + 1) : Words2{0u, 0u};
      const uint32_t z = two ? prmt(first.b, second.b, 0x5410) : first.b, length = JOINT ? 0u : lengths(k, two);
      uint32_t* to = r + 3 * (k / 2);
      to[0] = JOINT ? first.a : hmul2(first.a, low2(length));
      if (two) to[1] = JOINT ? second.a : hmul2(second.a, high2(length));
      to[two ? 2 : 1] = JOINT ? z : hmul2(z, length);
    }
    if (!AS_LOADED && K_REGS > PER + (PER + 1) / 2) r[K_REGS - 1] = 0u;
  }

  // gamma / sqrt(D); sqrt(D) is in the table
  template <class P> KV_DEV static float k_scale(const P& planes, int token, int) {
    const uint8_t* norms = planes[PLANES - 1];
    return NORM32 ? ((const float*)norms)[token] : half_float(((const uint16_t*)norms)[token]);
  }
};

}  // namespace kv
