// Med (codecs/outliers.py) around a row codec whose code basis is the model's: chunks of four above a threshold go to
// fp16, and the inner codec sees zeros in their place.
#pragma once
#include "encode_sums.cuh"
#include "encode_table.cuh"

namespace kv {

// SLOTS as in the layout, at most D / 4. Tables are the inner codec's
template <class INNER, int SLOTS> struct MedRow : TableRow {
  KV_CONST bool OWN = true;  // the threshold
  KV_CONST int DIM = INNER::DIM;
  KV_CONST int RUNS = DIM / 32;  // chunks of a lane: 8 i + part
  KV_CONST int STAGE = INNER::PLANES;
  KV_CONST int PLANES = STAGE + 2;
  KV_FUNCTION int plane_bytes(int p) { return p < STAGE ? INNER::plane_bytes(p) : p == STAGE ? RUNS : 8 * SLOTS; }
  KV_CONST int TABLE = INNER::TABLE;
  KV_CONST int SCRATCH = INNER::SCRATCH;

  KV_DEV static void quad(const float (&y)[DIM / 8], int part, uint32_t keep, bool live, uint8_t* const (&at)[PLANES],
                          const uint8_t* table, uint8_t* scratch, float threshold) {
    float bulk[DIM / 8];
    KV_UNROLL for (int k = 0; k < DIM / 8; k++) bulk[k] = y[k];
    uint32_t kept = 0;  // bit i: this lane's chunk 8 i + part
    int32_t taken[SLOTS];
    KV_UNROLL for (int n = 0; n < SLOTS; n++) taken[n] = DIM;  // none
    if (any(may_exceed(y, threshold))) {
      double length[RUNS];
      KV_UNROLL for (int i = 0; i < RUNS; i++) {
        double s[4];
        KV_UNROLL for (int e = 0; e < 4; e++) s[e] = mul((double)y[4 * i + e], (double)y[4 * i + e]);
        length[i] = sqrt(add(add(s[0], s[1]), add(s[2], s[3])));
        if (!(length[i] > (double)threshold)) length[i] = -1.0;
      }
      KV_UNROLL for (int n = 0; n < SLOTS; n++) {
        double most = -1.0;
        int32_t chunk = DIM;
        KV_UNROLL for (int i = 0; i < RUNS; i++) {
          if (length[i] > most) most = length[i], chunk = 8 * i + part;
        }
        KV_UNROLL for (int mask = 4; mask; mask /= 2) {
          double other = shfl_xor(most, mask);
          int32_t its = (int32_t)shfl_xor((uint32_t)chunk, mask);
          if (other > most || (other == most && its < chunk)) most = other, chunk = its;
        }
        taken[n] = chunk;
        KV_UNROLL for (int i = 0; i < RUNS; i++) {
          if (chunk != 8 * i + part) continue;
          length[i] = -1.0;
          kept |= 1u << i;
          KV_UNROLL for (int e = 0; e < 4; e++) bulk[4 * i + e] = 0.0f;
        }
      }
    }
    int count = 0;
    KV_UNROLL for (int n = 0; n < SLOTS; n++) count += taken[n] < DIM ? 1 : 0;
    uint64_t* rows = (uint64_t*)at[STAGE + 1];
    uint64_t both = keep | (uint64_t)keep << 32;
    KV_UNROLL for (int i = 0; i < RUNS; i++) {
      bool mine = kept >> i & 1;
      uint32_t flags = ballot(mine) >> (thread() % 32 - part) & 0xff & keep;
      if (part == i && live) at[STAGE][i] = (uint8_t)flags;
      if (!mine || !live) continue;
      int rank = 0;
      KV_UNROLL for (int n = 0; n < SLOTS; n++) rank += taken[n] < 8 * i + part ? 1 : 0;
      uint32_t low = half_bits(y[4 * i]) | (uint32_t)half_bits(y[4 * i + 1]) << 16;
      uint32_t high = half_bits(y[4 * i + 2]) | (uint32_t)half_bits(y[4 * i + 3]) << 16;
      rows[rank] = (low | (uint64_t)high << 32) & both;
    }
    if (part == 0 && live) {
      for (int n = count; n < SLOTS; n++) rows[n] = 0;
    }
    uint8_t* stage[STAGE];
    KV_UNROLL for (int p = 0; p < STAGE; p++) stage[p] = at[p];
    inner(bulk, part, keep, live, stage, table, scratch);
  }

  KV_DEV static void inner(const float (&bulk)[DIM / 8], int part, uint32_t keep, bool live,
                           uint8_t* const (&at)[STAGE], const uint8_t* table, uint8_t* scratch) {
    INNER::quad(bulk, part, keep, live, at, table, scratch);
  }

  // false only where no chunk can be longer than the threshold: squares in fp32 are off by 2^-22 at most; those that
  // underflow are decided in double
  KV_DEV static bool may_exceed(const float (&y)[DIM / 8], float threshold) {
    float limit = mul(mul(threshold, threshold), 1.0f - 0x1p-20f);
    bool found = !(limit > 0x1p-100f);
    KV_UNROLL for (int i = 0; i < RUNS; i++) {
      const float* x = y + 4 * i;
      found = found || fma(x[3], x[3], fma(x[2], x[2], fma(x[1], x[1], mul(x[0], x[0])))) >= limit;
    }
    return found;
  }
};

}  // namespace kv
