// Reader of hqmq (kvcodec/codecs/hqmq.py, packing=ceil), keys and values: four channels are a row of a codebook times a
// radius.
//
// The radius stays where it lies, an fp16 subnormal, and the codebook is held times 2^15, so that their product, one
// instruction for two channels, is a normal number. Radii that lie higher by a power of two leave that to q or to the
// output.
//
// The codebook's size limits speed: lanes read different rows, and only what fits in many copies is read without
// conflicts. Rows 2i and 2i + 1 are each other's negatives: half of them are held, and the code's lowest bit becomes
// the radius' sign.
#pragma once
#include "bits.cuh"

namespace kv {

// Dead slots hold any bits, and 24 S is no power of two: what is looked up for them must not lie outside of shared
// memory.
enum Bound {
  CLAMP,  // by one more instruction for each row
  UP,     // rows behind the table may be read: it is the keys', and the values' is as long
  DOWN,   // rows before the table may be read: it is the values', upside down, and the keys' is as long
};

template <int D, int S, int R, Bound BOUND = CLAMP> struct ReadHqmq {
  KV_CONST int W = S == 24 ? 10 : S == 48 ? 11 : S == 96 ? 12 : 13;
  static_assert((S == 24 || S == 48 || S == 96 || S == 192) && (R == 3 || R == 4 || R == 6), "what the codec has");
  KV_CONST int CHUNKS = D / 4;
  KV_CONST int ROW = (CHUNKS * W + 7) / 8;
  KV_CONST int RADII = (CHUNKS * R + 7) / 8;
  KV_CONST int ENTRIES = 12 * S;
  using Codebook = Table8<ENTRIES, 73728>;

  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = 3;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? ROW : p == 1 ? RADII : 2; }
  KV_CONST int TABLE = Codebook::BYTES;

  // source: rows 0, 2, 4 .. of four fp16 numbers, times 2^15
  KV_DEV static void fill(uint8_t* to, const uint8_t* from, int thread, int threads) {
    Codebook::template fill<BOUND == DOWN>(to, from, thread, threads);
  }

  // N chunks of a part
  template <int N> struct Part {
    using Lengths = Small<RADII, N, R>;
    KV_FUNCTION float weight(int k) { return 1.0f / (float)(1 << Lengths::shift(k)); }
    template <class P>
    KV_DEV static void read(const P& planes, const uint8_t* table, int token, int own, int part, int lane,
                            uint32_t* r) {
      const Stream<ROW, N * W> codes(planes[0], token, own, part);
      const Lengths lengths(planes[1], token, own, part);
      const uint32_t mine = Codebook::copy(lane);
      constexpr int TO = Codebook::STRIDE_BIT;
      constexpr uint32_t LAST = (1u << (W - 1)) - 1;  // of the rows that a code can name
      KV_UNROLL
      for (int k = 0; k < N; ++k) {
        const uint32_t row = codes.field(W * k + 1, W - 1, TO);
        uint32_t at = ((BOUND == DOWN ? ~row : row) & LAST << TO) | mine;
        if (BOUND == CLAMP) at = at < (uint32_t)TABLE - 8 ? at : (uint32_t)TABLE - 8;
        const Words2 x = Codebook::get(table - (BOUND == DOWN ? (int)(LAST - ENTRIES + 1) * Codebook::STRIDE : 0), at);
        uint32_t length = lengths.word(k);
        const int sign = Lengths::high(k) ? 31 : 15;
        length |= codes.field(W * k, 1, sign) & 1u << sign;
        length = Lengths::high(k) ? high2(length) : low2(length);
        r[2 * k] = hmul2(x.a, length), r[2 * k + 1] = hmul2(x.b, length);
      }
    }
  };
  // sigma / (2^R - 1), from sigma / 2, 2^-24 of a subnormal and the codebook's 2^15
  template <class P> KV_DEV static float scale(const P& planes, int token) {
    return half_float(((const uint16_t*)planes[2])[token]) * (1024.0f / (float)((1 << R) - 1));
  }

  using Keys = Part<CHUNKS / 4>;
  KV_CONST int GROUPS = 1;
  KV_CONST int K_REGS = CHUNKS / 2;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = false;
  KV_CONST float K_UNIT = 1.0f;
  KV_FUNCTION int k_channel(int part, int e) { return part * (D / 4) + e; }
  KV_FUNCTION float k_weight(int e) { return Keys::weight(e / 4); }
  template <class P>
  KV_DEV static void keys(const P& planes, const uint8_t* table, int token, int part, int lane, uint32_t (&r)[K_REGS]) {
    Keys::read(planes, table, token, lane / 4, part, lane, r);
  }
  template <class P> KV_DEV static float k_scale(const P& planes, int token, int) { return scale(planes, token); }

  using Values = Part<CHUNKS / 8>;
  KV_CONST int V_REGS = CHUNKS / 4;
  KV_CONST bool V_BLOCKED = false;
  KV_CONST bool V_BLOCK_ZERO = false;
  KV_CONST bool HAS_V_SCALE = true;
  KV_CONST bool HAS_V_ZERO = false;
  KV_FUNCTION int v_channel(int part, int e) { return part * (D / 8) + e; }
  KV_FUNCTION float v_weight(int e) { return Values::weight(e / 4); }
  template <class P>
  KV_DEV static void values(const P& planes, const uint8_t* table, int token, int part, int lane,
                            uint32_t (&r)[V_REGS]) {
    Values::read(planes, table, token, lane % 4 * 2, part, lane, r);
  }
  template <class P> KV_DEV static float v_scale(const P& planes, int token) { return scale(planes, token); }
};

}  // namespace kv
