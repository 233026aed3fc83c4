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
//
// A code is found by one look-up and one comparison. Codes are symmetric, so x = y / scale is coded by its magnitude
// and its sign; the six scales share the sign. [0, REACH) is divided into 2^w buckets for a width of w bits, which are
// narrower than any step between cuts, so a bucket has one cut at most. Its entry is the first cut that is not below
// it, and where the level on this side of that cut lies; behind it lies the next one. Nothing is rounded otherwise than
// in the reference: x is the correctly rounded quotient (Markstein: the rounded reciprocal, a product and two fused
// operations; denormal ones only tell the sign, which is the product's), cuts and levels are the reference's.
#pragma once
#include "bits.cuh"
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
    // over the lanes four, two and one apart; of four sums a lane keeps two, then one
    const bool high = thread() & 4, odd = thread() & 2;
    float x = add(high ? s[2] : s[0], shfl_xor(high ? s[0] : s[2], 4));
    const float y1 = add(high ? s[3] : s[1], shfl_xor(high ? s[1] : s[3], 4));
    x = add(odd ? y1 : x, shfl_xor(odd ? x : y1, 2));
    x = add(x, shfl_xor(x, 1));
    x = add(x, shfl_xor(x, 4));  // sums 0 and 2, or 1 and 3
    return add(x, shfl_xor(x, 2));
  }

  // Behind the table, made of it, in COPIES copies: an entry for each bucket of each width, those of w from 2^w on, and
  // positive levels, 2^(w - 1) + m the m-th of width w. And of every place four words together: 4 times its channel,
  // and where its buckets begin, from bit 16 on; how many they are; centre; weight.
  KV_CONST int COPIES = 16, LINE_SHIFT = 7, LEVEL_SHIFT = 6;  // lines of 128 and 64 bytes
  KV_CONST int LEVELS = 256 << LINE_SHIFT;
  KV_CONST int PLACES = LEVELS + (128 << LEVEL_SHIFT);
  KV_CONST int DERIVED = PLACES + 16 * D;
  // neighbouring parts lie side by side
  KV_DEV static int entry_of(int i, int part, int e) { return PLACES + 16 * (32 * i + 8 * e + part); }
  KV_CONST float REACH = 3.85f;  // beyond the last cut of all widths
  KV_DEV static float buckets(int width) { return (float)(1 << width) - 0.015625f; }  // so that 1 is in the last one
  KV_DEV static void derive(uint8_t* to, const uint8_t* table, int thread, int threads) {
    check_shared_base();
    for (int c = thread; c < D; c += threads) {
      const int w = table[WIDTHS + c];
      const uint32_t channel = 4u * table[ORDER + c] | 1u << w << (LINE_SHIFT + 16);
      *(Words4*)(to + entry_of(c / 32, c % 32 / 4, c % 4)) = {channel, float_bits(buckets(w)),
          ((const uint32_t*)(table + CENTRE))[c], ((const uint32_t*)(table + WEIGHT))[c]};
    }
    const float *levels = (const float*)table, *cuts = (const float*)(table + CUTS);
    for (int line = thread; line < 256; line += threads) {
      int w = 0;
      while (line >> (w + 1)) ++w;
      // a little below the bucket's begin
      const float begin = ((float)(line - (1 << w)) - 0.0078125f) * (REACH / buckets(w));
      const float* own = cuts + (1 << w) + (1 << w >> 1);  // those above zero
      int m = 0;
      while (own[m] < begin) ++m;
      const uint32_t cut = line ? float_bits(own[m]) << 1 : 0u, level = (uint32_t)((1 << w >> 1) + m) << LEVEL_SHIFT;
      KV_UNROLL for (int i = 0; i < COPIES / 2; i++) {
        const int copy = (i + thread) % 8 * 2;
        *(Words4*)(to + (line << LINE_SHIFT) + 8 * copy) = {cut, level + 4 * copy, cut, level + 4 * copy + 4};
      }
    }
    for (int line = thread; line < 128; line += threads) {
      int w = 0;
      while (line >> w) ++w;
      const uint32_t x = float_bits(line ? levels[(1 << w) - 1 + line] : 0.0f);
      KV_UNROLL for (int i = 0; i < COPIES / 4; i++)
        ((Words4*)(to + LEVELS + (line << LEVEL_SHIFT)))[(i + thread) % 4] = {x, x, x, x};
    }
  }
  // where the level of |y / scale| lies; q: the quotient, which is zero where the rounded one is
  KV_DEV static uint32_t place(const uint8_t* derived, float y, float scale, float inverse, float count, uint32_t base,
                               float& q) {
    q = mul(y, inverse);
    const float x = fma(fma(-q, scale, y), inverse, q);
    const float wide = fma(saturate(mul(magnitude(q), 1.0f / REACH)), count, 65536.0f);  // the bucket from bit 7 on
    const Words2 entry = load_table2(derived, and_or(float_bits(wide), 0x3f80u, base));
    // twice the magnitude, and the sign: a negative one is beyond the cut that it equals
    uint32_t to = entry.b;
    if (rotate_left(float_bits(x), 1) > entry.a) to += 1u << LEVEL_SHIFT;
    return to;
  }

  // y is in the model's order
  KV_DEV static void quad(const float (&given)[N], int part, uint32_t keep, bool live, uint8_t* const (&at)[1],
                          const uint8_t* table, uint8_t* scratch) {
    const float* walls = (const float*)(table + WALLS);
    const float *weight = (const float*)(table + WEIGHT), *scales = (const float*)(table + SCALES);
    const uint8_t* derived = table + TABLE;
    const int lane = thread() % 32;
    uint8_t* own = scratch + lane / 8 * ROW;
    KV_UNROLL for (int k = 0; k < N; k++) ((float*)own)[channel_of<8>(part, k)] = given[k];
    sync_warp();
    float y[N], cost[N], energy[N], count[N];
    uint32_t base[N];
    KV_UNROLL for (int k = 0; k < N; k++) {
      const Words4 of = *(const Words4*)(derived + entry_of(k / 4, part, k % 4));
      y[k] = sub(*(const float*)(own + (of.a & 0xffffu)), bits_float(of.c));
      const float square = mul(y[k], y[k]);
      base[k] = (of.a >> 16) + lane % COPIES * 8, count[k] = bits_float(of.b);
      energy[k] = count[k] > 1.0f ? square : 0.0f;  // of widths above 0
      cost[k] = mul(bits_float(of.d), square);
    }
    float least = sum(cost);
    const float total = sum(energy);
    int nearest = 1, number = 0;
    KV_UNROLL for (int step = 8; step; step /= 2) nearest += walls[nearest + step - 2] < total ? step : 0;
    KV_NO_UNROLL for (int step = -1; step <= 4; step++) {
      const int n = nearest + step < 1 ? 1 : nearest + step > 15 ? 15 : nearest + step;
      const float scale = scales[n], inverse = div(1.0f, scale);
      KV_UNROLL for (int k = 0; k < N; k++) {
        float q;
        const uint32_t to = place(derived, y[k], scale, inverse, count[k], base[k], q);
        const float level = bits_float(load_table<LEVELS>(derived, to));
        const float error = sub(magnitude(y[k]), mul(scale, level));
        cost[k] = mul(weight[32 * (k / 4) + 4 * part + k % 4], mul(error, error));
      }
      const float all = sum(cost);
      if (all < least) least = all, number = n;
    }
    const float scale = scales[number], inverse = number ? div(1.0f, scale) : 0.0f;
    sync_warp();  // all have read the row
    KV_UNROLL for (int i = 0; i < D / 32; i++) {
      uint32_t codes[4];
      KV_UNROLL for (int e = 0; e < 4; e++) {
        const int k = 4 * i + e;
        float q;
        const uint32_t code = place(derived, y[k], scale, inverse, count[k], base[k], q) >> LEVEL_SHIFT;
        codes[e] = q > 0.0f ? code : (base[k] >> LINE_SHIFT) - 1 - code;
      }
      // two fields
      uint32_t low = codes[0] | codes[1] * (base[4 * i] >> LINE_SHIFT);
      uint32_t high = codes[2] | codes[3] * (base[4 * i + 2] >> LINE_SHIFT);
      if (i == D / 32 - 1 && part >= 6) {
        low |= (uint32_t)(number >> (2 * part - 12) & 1) << (TWICE - 1);
        high |= (uint32_t)(number >> (2 * part - 11) & 1) << (TWICE - 1);
      }
      ((uint32_t*)own)[8 * i + part] = low | high << TWICE;
    }
    sync_warp();
    for (int u = part; u < WORDS; u += 8) {
      uint32_t bits = 0;
      const int first = 32 * u / (2 * TWICE);
      KV_UNROLL for (int n = 0; n < 32 / (2 * TWICE) + 2; n++) {
        const int q = first + n, from = q * 2 * TWICE - 32 * u;
        if (q >= D / 4 || from >= 32) continue;
        const uint32_t two = ((const uint32_t*)own)[q];
        bits |= from < 0 ? two >> -from : two << from;
      }
      bits &= keep;
      if (live) ((uint32_t*)at[0])[u] = bits;
    }
    sync_warp();
  }
};

}  // namespace kv
