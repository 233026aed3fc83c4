// Reader of dense (packedkv/codecs/dense.py): 16-bit numbers as they are. For layers of which a role stays in 16 bit,
// beside a role that is packed. bf16 becomes fp16, exactly within fp16's range, which cached numbers keep; below
// 2^-14 it is off by 2^-25 at most.
#pragma once
#include "platform.cuh"

namespace kv {

template <int D, bool BF16> struct ReadDense {
  KV_CONST int RUNS = (D + 31) / 32;  // of 32 channels; of 80 the last parts of the third are empty
  // of a part in a run, so many 16-bit numbers each: an empty one reads the row's first run
  KV_FUNCTION bool there(int run, int part, int each) { return D % 32 == 0 || 32 * run + part * each < D; }
  KV_FUNCTION int place(int run, int part, int each) {
    return there(run, part, each) ? 64 * run + 2 * each * part : 2 * each * part;
  }
  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = 1;
  KV_FUNCTION int plane_bytes(int) { return 2 * D; }
  KV_CONST int TABLE = 0;
  KV_DEV static void fill(uint8_t*, const uint8_t*, int, int) {}

  KV_DEV static uint32_t half2(uint32_t w) {
    return BF16 ? pack_half2(bits_float(w << 16), bits_float(w & 0xffff0000u)) : w;
  }

  // 16 bytes in turn: the parts of a token lie side by side
  KV_CONST int GROUPS = 1;
  KV_CONST int K_REGS = 4 * RUNS;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = false;
  KV_FUNCTION int k_channel(int part, int e) {
    return there(e / 8, part, 8) ? e / 8 * 32 + part * 8 + e % 8 : -1;
  }
  KV_FUNCTION float k_weight(int) { return 1.0f; }
  template <class P>
  KV_DEV static void keys(const P& planes, const uint8_t*, int token, int part, int, uint32_t (&r)[K_REGS]) {
    KV_UNROLL
    for (int i = 0; i < RUNS; ++i) {
      uint32_t w[4];
      load_words<4>(w, planes[0] + token * (2 * D) + place(i, part, 8));
      KV_UNROLL
      for (int k = 0; k < 4; ++k) r[4 * i + k] = half2(w[k]);
    }
  }
  template <class P> KV_DEV static float k_scale(const P&, int, int) { return 1.0f; }
  template <class P> KV_DEV static float k_zero(const P&, int, int) { return 0.0f; }

  // 8 bytes in turn
  KV_CONST int V_REGS = 2 * RUNS;
  KV_CONST bool V_BLOCKED = false;
  KV_CONST bool V_BLOCK_ZERO = false;
  KV_CONST bool HAS_V_SCALE = false;
  KV_CONST bool HAS_V_ZERO = false;
  KV_FUNCTION int v_channel(int part, int e) {
    return there(e / 4, part, 4) ? e / 4 * 32 + part * 4 + e % 4 : -1;
  }
  KV_FUNCTION float v_weight(int) { return 1.0f; }
  template <class P>
  KV_DEV static void values(const P& planes, const uint8_t*, int token, int part, int, uint32_t (&r)[V_REGS]) {
    KV_UNROLL
    for (int i = 0; i < RUNS; ++i) {
      uint32_t w[2];
      load_words<2>(w, planes[0] + token * (2 * D) + place(i, part, 4));
      r[2 * i] = half2(w[0]);
      r[2 * i + 1] = half2(w[1]);
    }
  }
  template <class P> KV_DEV static float v_scale(const P&, int) { return 1.0f; }
  template <class P> KV_DEV static float v_zero(const P&, int) { return 0.0f; }
};

}  // namespace kv
