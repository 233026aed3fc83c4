// TurboQuant (codecs/turboquant.py): nearest Lloyd-Max levels of a rotated unit vector, and its norm.
#pragma once
#include "encode_sums.cuh"
#include "encode_table.cuh"

namespace kv {

// codes of a row over its norm: scaled(i, fast) is the norm of channels 32 i .. 32 i + 31, 0 for a row of zeros
template <int D, int BITS> struct LevelCodes {
  KV_CONST int N = numbers_of(D, 8);
  KV_CONST int QUADS = D / 4;
  KV_CONST int ROOM = stream_room(QUADS);
  KV_CONST bool DIRECT = BITS == 2 || BITS == 4;  // four codes are a byte or two
  KV_CONST int SCRATCH = DIRECT ? 0 : 4 * 4 * ROOM;

  // y over the norm of channels 32 i .. 32 i + 31, which is norm[i % NORMS], 0 for zeros
  template <int NORMS>
  KV_DEV static void store(const float (&y)[N], const double (&norm)[NORMS], int part, uint32_t keep, bool live,
                           uint8_t* at, const uint8_t* table, uint8_t* scratch) {
    using L = Levels<BITS>;
    uint32_t* codes = (uint32_t*)scratch + thread() % 32 / 8 * ROOM;
    float inverse[NORMS];
    KV_UNROLL for (int i = 0; i < NORMS; i++) {
      float wide = (float)norm[i];
      // NaN is always decided in double
      inverse[i] = wide > TINY_ROW ? rcp_fast(wide) : bits_float(0x7fffffffu);
    }
    KV_UNROLL for (int i = 0; i < N / 4; i++) {
      bool sure = true;
      uint32_t four = 0;
      KV_UNROLL for (int e = 0; e < 4; e++) {
        four |= L::guess(table, mul(y[4 * i + e], inverse[i % NORMS]), sure) << (BITS * e);
      }
      if (!sure) {
        four = 0;
        double n = norm[i % NORMS];
        KV_UNROLL for (int e = 0; e < 4; e++) {
          double u = n > 0.0 ? div((double)y[4 * i + e], n) : 0.0;
          four |= L::find(table, u) << (BITS * e);
        }
      }
      int quad = 8 * i + place_of<D>(i, part);
      if constexpr (!DIRECT) codes[quad] = four;
      else if (!live) continue;
      else if constexpr (BITS == 4) ((uint16_t*)at)[quad] = (uint16_t)(four & keep);
      else at[quad] = (uint8_t)(four & keep);
    }
    if constexpr (!DIRECT) {
      clear_spare<QUADS>(codes, part);
      sync_warp();
      store_stream<QUADS, 4 * BITS>(at, codes, part, keep, live);
      sync_warp();
    }
  }
};

// BITS 1 to 6; WIDE: the norm in fp32, not fp16. Table: Levels<BITS> of u
template <int D, int BITS, bool WIDE> struct TurboQuantRow : TableRow {
  KV_CONST int DIM = D;
  KV_CONST int PLANES = 2;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? D * BITS / 8 : WIDE ? 4 : 2; }
  KV_CONST int TABLE = Levels<BITS>::BYTES;
  KV_CONST int SCRATCH = LevelCodes<D, BITS>::SCRATCH;

  KV_DEV static void quad(const float (&y)[numbers_of(D, 8)], int part, uint32_t keep, bool live,
                          uint8_t* const (&at)[2], const uint8_t* table, uint8_t* scratch) {
    double gamma[1] = {sqrt(sum_of_squares(y, ahead_of<D, 8>(part) > 0))};
    store_norm<WIDE>(at[1], div(gamma[0], root(D)), part, keep, live);
    LevelCodes<D, BITS>::store(y, gamma, part, keep, live, at[0], table, scratch);
  }
};

}  // namespace kv
