// Ghost (codecs/ghost.py, transform=channels): six scales around a row's root mean square are tried, the one of least
// weighted error is kept. All in fp32 and operation by operation as the reference does it, sums by halves over the
// channels as sorted.
//
// Table of a head, made by kernels/ghost.py:
//   float levels [256]        of width w from 2^w - 1 on
//   float cuts [256]          between them, 2^w - 1 from 2^w on
//   float walls [16]          of the energy, between the scales' numbers; infinite behind the last
//   float scales [16]
//   float centre [D], weight [D]        of the channels as sorted; zeros of keys
//   uint8 order [D], widths [D / 4]
//   uint16 begin [D / 4]      the bit of the streams where a quad's codes begin
//   uint8 first [UNITS]       the first quad that ends behind the begin of a unit of a stream
#pragma once
#include "encode_table.cuh"

namespace kv {

// TWICE: 2 b
template <int D, int TWICE> struct GhostRow : TableRow {
  KV_CONST int DIM = D, N = D / 8, QUADS = D / 4;
  KV_CONST int STREAM = D * TWICE / 64;  // bytes
  KV_CONST int UNIT = STREAM % 4 == 0 ? 4 : STREAM % 2 == 0 ? 2 : 1;
  KV_CONST int UNITS = STREAM / UNIT;    // of a stream
  KV_CONST int PLANES = 1;
  KV_CONST bool BY_SEQUENCE = true;
  KV_FUNCTION int plane_bytes(int) { return 4 * STREAM; }
  KV_CONST int CUTS = 1024, WALLS = 2048, SCALES = WALLS + 64, CENTRE = SCALES + 64, WEIGHT = CENTRE + 4 * D;
  KV_CONST int ORDER = WEIGHT + 4 * D, WIDTHS = ORDER + D, BEGIN = WIDTHS + QUADS, FIRST = BEGIN + 2 * QUADS;
  KV_CONST int TABLE = align16(FIRST + UNITS);
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
    uint32_t widths = 0, best[D / 32];  // three bits of each quad; codes of a quad as bytes
    float energy[N];
    KV_UNROLL for (int i = 0; i < D / 32; i++) {
      const int q = 8 * i + part, w = table[WIDTHS + q];
      widths |= (uint32_t)w << 3 * i;
      best[i] = 0;
      KV_UNROLL for (int e = 0; e < 4; e++) {
        const int c = 4 * q + e, k = 4 * i + e;
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
        const int w = widths >> 3 * i & 7;
        found[i] = 0;
        KV_UNROLL for (int e = 0; e < 4; e++) {
          const int k = 4 * i + e;
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
    const uint16_t* begin = (const uint16_t*)(table + BEGIN);
    for (int u = part; u < 4 * UNITS; u += 8) {
      const int stream = u % 4, from = u / 4 * 8 * UNIT;
      uint32_t bits = 0;
      for (int q = table[FIRST + u / 4]; q < QUADS && begin[q] < from + 8 * UNIT; q++) {
        const uint32_t x = own[4 * q + stream];
        bits |= begin[q] < from ? x >> (from - begin[q]) : x << (begin[q] - from);
      }
      if (u / 4 == UNITS - 1) bits |= (uint32_t)(number >> stream & 1) << (8 * UNIT - 1);
      bits &= keep;
      if (!live) continue;
      if (UNIT == 4) ((uint32_t*)at[0])[u] = bits;
      else if (UNIT == 2) ((uint16_t*)at[0])[u] = (uint16_t)bits;
      else at[0][u] = (uint8_t)bits;
    }
    sync_warp();
  }
};

}  // namespace kv
