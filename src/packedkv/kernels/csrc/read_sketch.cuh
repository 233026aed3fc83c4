// Reader of keys whose residual is held as signs of a sketch (packedkv/ops/qjl.py): octopus-qjl, turboquant-qjl.
//
//   <q, key> = gamma (<q, u^> + g sqrt(pi / 2) / sqrt(D) <H (s q), sigma>)        q in the codes' basis
//
// The signs are a second group of numbers +-1, multiplied by a second query, so nothing is rotated back. D is a power
// of two: H is then Sylvester's, which the skeleton applies.
#pragma once
#include "platform.cuh"

namespace kv {

// Base: the reader of the stage, whose k_scale is gamma / sqrt(D)
template <class Base, int D> struct ReadSketch {
  static_assert((D & (D - 1)) == 0, "the sketch of other sizes is no Hadamard matrix that the skeleton has");
  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = Base::PLANES + 2;
  KV_FUNCTION int plane_bytes(int p) { return p < Base::PLANES ? Base::plane_bytes(p) : p == Base::PLANES ? D / 8 : 2; }
  KV_CONST int TABLE = Base::TABLE;
  // source: D signs of float32, then the stage's tables
  KV_DEV static void fill(uint8_t* to, const uint8_t* from, int thread, int threads) {
    Base::fill(to, from + 4 * D, thread, threads);
  }
  KV_CONST bool SKETCHED = true;
  KV_DEV static const float* sketch(const uint8_t* source) { return (const float*)source; }

  KV_CONST int SIGNS = D / 8;  // registers of a part's signs
  KV_CONST int PER = Base::K_REGS > SIGNS ? Base::K_REGS : SIGNS;
  KV_CONST int GROUPS = 2;
  KV_CONST int K_REGS = 2 * PER;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = false;
  KV_CONST float K_UNIT = 1.0f;
  // register k of a word of signs has bits k and k + 16; of the half word that D = 64 has, k and k + 8
  KV_CONST int HALF = D == 64 ? 8 : 16;
  KV_FUNCTION int k_channel(int part, int e) {
    if (e < 2 * PER) return e < 2 * Base::K_REGS ? Base::k_channel(part, e) : -1;
    const int k = e / 2 - PER;
    return k < SIGNS ? D + part * (D / 4) + k / HALF * 32 + k % HALF + e % 2 * HALF : -1;
  }
  KV_FUNCTION float k_weight(int e) { return e < 2 * Base::K_REGS ? Base::k_weight(e) : 1.0f; }

  template <class P>
  KV_DEV static void keys(const P& planes, const uint8_t* table, int token, int part, int lane, uint32_t (&r)[K_REGS]) {
    uint32_t stage[Base::K_REGS];
    Base::keys(planes, table, token, part, lane, stage);
    KV_UNROLL
    for (int k = 0; k < PER; ++k) {
      r[k] = k < Base::K_REGS ? stage[k] : 0u;
      r[PER + k] = 0u;
    }
    const uint8_t* row = planes[Base::PLANES] + token * (D / 8) + part * (D / 32);
    if (D == 64) {
      const uint32_t both = *(const uint16_t*)row, w = (both & 0xffu) | (both & 0xff00u) << 8;
      KV_UNROLL
      for (int k = 0; k < 8; ++k) r[PER + k] = ((w << (15 - k)) & 0x80008000u) ^ 0xbc00bc00u;
    } else {
      KV_UNROLL
      for (int i = 0; i < D / 128; ++i) {
        const uint32_t w = ((const uint32_t*)row)[i];
        KV_UNROLL
        // bit 1 is +1
        for (int k = 0; k < 16; ++k) r[PER + 16 * i + k] = ((w << (15 - k)) & 0x80008000u) ^ 0xbc00bc00u;
      }
    }
  }
  template <class P> KV_DEV static float k_scale(const P& planes, int token, int group) {
    const float stage = Base::k_scale(planes, token, 0);
    if (group == 0) return stage;
    const float g = half_float(((const uint16_t*)planes[Base::PLANES + 1])[token]);
    return stage * g * 1.2533141373155003f;  // sqrt(pi / 2)
  }
};

}  // namespace kv
