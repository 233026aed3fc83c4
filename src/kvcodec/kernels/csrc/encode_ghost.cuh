// Ghost (codecs/ghost.py, transform=channels): six scales around a row's root mean square are tried, the one of least
// weighted error is kept. All in fp32 and operation by operation as the reference does it, sums by halves over the
// places.
//
// Table of a head, made by kernels/ghost.py:
//   float levels [256]        of width w from 2^w - 1 on
//   float cuts [256]          between them, 2^w - 1 from 2^w on
//   float walls [16]          of the energy, between the scales' numbers; infinite behind the last
//   float scales [16]
//   float centre [D], weight [D]        by place; zeros of keys
//   uint8 order [D], widths [D]         by place
#pragma once
#include "encode_table.cuh"

namespace kv {

// TWICE: 2 b, bits of a pair
template <int D, int TWICE> struct GhostRow : TableRow {
  KV_CONST int DIM = D, N = D / 8, PAIRS = D / 2;
  KV_CONST int WORDS = D * TWICE / 64;   // of a row
  KV_CONST int PLANES = 1;
  KV_CONST bool BY_SEQUENCE = true;
  KV_FUNCTION int plane_bytes(int) { return 4 * WORDS; }
  KV_CONST int CUTS = 1024, WALLS = 2048, SCALES = WALLS + 64, CENTRE = SCALES + 64, WEIGHT = CENTRE + 4 * D;
  KV_CONST int ORDER = WEIGHT + 4 * D, WIDTHS = ORDER + D;
  KV_CONST int TABLE = align16(WIDTHS + D);
  KV_CONST int ROW = 4 * D;              // bytes of scratch
  KV_CONST int SCRATCH = 4 * ROW;

  // the sum over the row's channels, lane `part` of eight having 32 i + 4 part + e in y[4 i + e]
  KV_DEV static float sum(const float (&y)[N]) {
    constexpr int RUNS = D / 32, PADDED = RUNS <= 2 ? RUNS : RUNS <= 4 ? 4 : 8;
    float s[4];
    KV_UNROLL for (int e = 0; e < 4; e++) {
      float run[PADDED];
      KV_UNROLL for (int i = 0; i < PADDED; i++) run[i] = i < RUNS ? y[i < RUNS ? 4 * i + e : 0] : 0.0f;
      KV_UNROLL for (int half = PADDED / 2; half; half /= 2) {
        KV_UNROLL for (int i = 0; i < half; i++) run[i] = add(run[i], run[i + half]);
      }
      s[e] = run[0];
    }
    KV_UNROLL for (int mask = 4; mask; mask /= 2) {
      KV_UNROLL for (int e = 0; e < 4; e++) s[e] = add(s[e], shfl_xor(s[e], mask));
    }
    return add(add(s[0], s[2]), add(s[1], s[3]));
  }

  // how many cuts of a width lie below x
  KV_DEV static uint32_t code(const uint8_t* table, int width, float x) {
    const float* cuts = (const float*)(table + CUTS) + (1 << width);
    int n = 0;
    for (int step = 1 << width >> 1; step; step /= 2) n += cuts[n + step - 1] < x ? step : 0;
    return (uint32_t)n;
  }

  // y is in the model's order
  KV_DEV static void quad(const float (&given)[N], int part, uint32_t keep, bool live, uint8_t* const (&at)[1],
                          const uint8_t* table, uint8_t* scratch) {
    const float *levels = (const float*)table, *walls = (const float*)(table + WALLS);
    const float *centre = (const float*)(table + CENTRE), *weight = (const float*)(table + WEIGHT);
    const float* scales = (const float*)(table + SCALES);
    uint8_t* own = scratch + thread() % 32 / 8 * ROW;
    KV_UNROLL for (int k = 0; k < N; k++) ((float*)own)[channel_of<8>(part, k)] = given[k];
    sync_warp();
    float y[N], cost[N];
    uint32_t widths[D / 32], best[D / 32];  // of four neighbouring places, as bytes; so are codes
    float energy[N];
    KV_UNROLL for (int i = 0; i < D / 32; i++) {
      const int q = 8 * i + part;
      widths[i] = ((const uint32_t*)(table + WIDTHS))[q];
      best[i] = 0;
      KV_UNROLL for (int e = 0; e < 4; e++) {
        const int c = 4 * q + e, k = 4 * i + e, w = widths[i] >> 8 * e & 255;
        y[k] = sub(((const float*)own)[table[ORDER + c]], centre[c]);
        const float square = mul(y[k], y[k]);
        energy[k] = w ? square : 0.0f;
        cost[k] = mul(weight[c], square);
        best[i] |= code(table, w, 0.0f) << 8 * e;
      }
    }
    float least = sum(cost);
    const float total = sum(energy);
    int nearest = 1, number = 0;
    KV_NO_UNROLL for (int i = 0; i < 14; i++) nearest += total > walls[i];
    KV_NO_UNROLL for (int step = -1; step <= 4; step++) {
      const int n = nearest + step < 1 ? 1 : nearest + step > 15 ? 15 : nearest + step;
      const float scale = scales[n];
      uint32_t found[D / 32];
      KV_UNROLL for (int i = 0; i < D / 32; i++) {
        found[i] = 0;
        KV_UNROLL for (int e = 0; e < 4; e++) {
          const int k = 4 * i + e, w = widths[i] >> 8 * e & 255;
          const uint32_t x = code(table, w, div(y[k], scale));
          const float error = sub(y[k], mul(scale, levels[(1 << w) - 1 + x]));
          cost[k] = mul(weight[32 * i + 4 * part + e], mul(error, error));
          found[i] |= x << 8 * e;
        }
      }
      const float all = sum(cost);
      if (all < least) {
        least = all, number = n;
        KV_UNROLL for (int i = 0; i < D / 32; i++) best[i] = found[i];
      }
    }
    sync_warp();  // all have read the row
    KV_UNROLL for (int i = 0; i < D / 32; i++) ((uint32_t*)own)[8 * i + part] = best[i];
    sync_warp();
    for (int u = part; u < WORDS; u += 8) {
      uint32_t bits = 0;
      for (int p = 32 * u / TWICE; p < PAIRS && p * TWICE < 32 * u + 32; p++) {
        uint32_t x = own[2 * p] | (uint32_t)own[2 * p + 1] << table[WIDTHS + 2 * p];
        if (p >= PAIRS - 4) x |= (uint32_t)(number >> (p - PAIRS + 4) & 1) << (TWICE - 1);
        const int from = p * TWICE - 32 * u;
        bits |= from < 0 ? x >> -from : x << from;
      }
      bits &= keep;
      if (live) ((uint32_t*)at[0])[u] = bits;
    }
    sync_warp();
  }
};

}  // namespace kv
