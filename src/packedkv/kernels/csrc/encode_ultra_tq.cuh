// Ultra-TQ keys (codecs/ultra_tq.py): nearest of 16 levels over the root mean square that is held in fp16.
#pragma once
#include "encode_turboquant.cuh"

namespace kv {

// BLOCKS: a norm per 32 channels, over 2^SHIFT, instead of one per token. Table: Levels<4> of y over its norm
template <int D, bool BLOCKS, int SHIFT> struct UltraTqRow : TableRow {
  KV_CONST int DIM = D;
  KV_CONST int PLANES = 2;
  KV_CONST int NORMS = BLOCKS ? D / 32 : 1;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? D / 2 : 2 * NORMS; }
  KV_CONST int TABLE = Levels<4>::BYTES;
  KV_CONST int SCRATCH = LevelCodes<D, 4>::SCRATCH;

  KV_DEV static void quad(const float (&y)[D / 8], int part, uint32_t keep, bool live, uint8_t* const (&at)[2],
                          const uint8_t* table, uint8_t* scratch) {
    constexpr double UNIT = (double)(1 << SHIFT);
    double held[NORMS];
    KV_UNROLL for (int g = 0; g < NORMS; g++) {
      double total;
      if (BLOCKS) {
        double s[4];
        KV_UNROLL for (int e = 0; e < 4; e++) s[e] = mul((double)y[4 * g + e], (double)y[4 * g + e]);
        total = sum_of_team(s);
      } else {
        total = sum_of_squares(y);
      }
      uint16_t norm = half_by_float(div(sqrt(div(total, (double)(BLOCKS ? 32 : D))), UNIT));
      held[g] = mul((double)half_float(norm), UNIT);
      if (part == 0 && live) ((uint16_t*)at[1])[g] = (uint16_t)(norm & keep);
    }
    LevelCodes<D, 4>::store(y, held, part, keep, live, at[0], table, scratch);
  }
};

}  // namespace kv
