// Ghost (codecs/ghost.py; Mixed with transform=klt): six scales around a row's root mean square are tried, the one of
// least weighted error is kept. All in fp32 and operation by operation as the reference does it, sums by halves over
// the places.
//
// Table of a head, made by kernels/codecs/ghost.py:
//   float levels [256]        of width w from 2^w - 1 on
//   float cuts [256]          between them, 2^w - 1 from 2^w on
//   float walls [16]          of the energy, between the scales' numbers; infinite behind the last
//   float scales [16]
//   float centre [D], weight [D]        by place; zeros of keys
//   uint8 order [D], widths [D]         by place
//
// Which scale costs least is found by sums that are not rounded as the reference's. Where another scale costs as little
// but for what rounding may do (one row of some thousands), the sums are taken again, number by number as the reference
// does. With x = |y| / scale the error of a channel is | |x - c| - h |: c the cut next to x, h half the distance of the
// levels beside it. The numbers up to the last cut are divided into 2^w buckets for a width of w bits, which are
// narrower than any step between cuts, so a bucket has one cut at most; its entry is that cut, or the next one, or the
// last. Rounding moves an error by less than 2^-21 |y| + 2^-22 of itself, so a cost C, where all zeros cost C0, by less
// than 2^-20 sqrt(C C0) + 2^-18 C <= 2^-17 C + 2^-25 C0 + 2^-18 C: `unsure` allows both costs that, and more.
//
// A code is found by the same entry and one comparison. Codes are symmetric, so x = y / scale is coded by its magnitude
// and its sign. x is the correctly rounded quotient (Markstein: the rounded reciprocal, a product and two fused
// operations; denormal ones only tell the sign, which is the product's), cuts and levels are the reference's.
#pragma once
#include "bits.cuh"
#include "encode_table.cuh"

namespace kv {

// TWICE: 2 b, bits of a pair; LANES: 8, or 32 where D is a multiple of 128
template <int D, int TWICE, int LANES = 8> struct GhostRow : TableRow {
  KV_CONST int TEAM = LANES;
  KV_CONST int DIM = D, N = D / LANES, PAIRS = D / 2;
  static_assert(LANES == 8 || (LANES == 32 && D % 128 == 0), "whole fours of channels");
  KV_CONST int WORDS = D * TWICE / 64;   // of a row
  KV_CONST int PLANES = 1;
  KV_CONST bool BY_SEQUENCE = true;
  KV_FUNCTION int plane_bytes(int) { return 4 * WORDS; }
  KV_CONST int CUTS = 1024, WALLS = 2048, SCALES = WALLS + 64, CENTRE = SCALES + 64, WEIGHT = CENTRE + 4 * D;
  KV_CONST int ORDER = WEIGHT + 4 * D, WIDTHS = ORDER + D;
  KV_CONST int TABLE = align16(WIDTHS + D);
  KV_CONST int ROW = 4 * D + 32;         // bytes of scratch; rows begin at different banks
  KV_CONST int SCRATCH = 32 / LANES * ROW;
  KV_DEV static int channel(int part, int k) { return channel_of<LANES, true>(part, k); }

  // the sum over the row's channels 32 i + 4 p + e by halves over i, then e and p
  KV_DEV static float sum(const float (&y)[N]) {
    constexpr int RUNS = N / 4, PADDED = RUNS <= 2 ? RUNS : RUNS <= 4 ? 4 : 8;
    float s[4];
    KV_UNROLL for (int e = 0; e < 4; e++) {
      float run[PADDED];
      KV_UNROLL for (int i = 0; i < PADDED; i++) run[i] = i < RUNS ? y[i < RUNS ? 4 * i + e : 0] : 0.0f;
      KV_UNROLL for (int half = PADDED / 2; half; half /= 2) {
        KV_UNROLL for (int i = 0; i < half; i++) run[i] = add(run[i], run[i + half]);
      }
      s[e] = run[0];
      if constexpr (LANES == 32) {
        s[e] = add(s[e], shfl_xor(s[e], 16));
        s[e] = add(s[e], shfl_xor(s[e], 8));
      }
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

  // Behind the table, made of it: a line of COPIES entries for each bucket of each width, those of w from 2^w on, of a
  // cut and half the distance of its levels; of each line the number of the level below the cut; positive levels by
  // their numbers, 2^(w - 1) + m for the m-th of width w; 1 / scales.
  KV_CONST int COPIES = 16, LINE_SHIFT = 7;
  KV_CONST int LOWER = 256 << LINE_SHIFT, LEVELS = LOWER + 256, INVERSES = LEVELS + 4 * 128, DERIVED = INVERSES + 64;
  // x / SPAN + SHIFT, up to 1, times so many, is the line; 1 is beyond the last cut of all widths
  KV_CONST float SPAN = 7.83f, SHIFT = 0.5078125f;
  KV_DEV static float lines(int width) { return (float)(2 << width) - 0.015625f; }  // so that 1 is in the last one
  KV_DEV static void derive(uint8_t* to, const uint8_t* table, int thread, int threads) {
    check_shared_base();
    const float *levels = (const float*)table, *cuts = (const float*)(table + CUTS);
    for (int line = thread; line < 256; line += threads) {
      int w = 0;
      while (line >> (w + 1)) ++w;
      const int last = (1 << w >> 1) - 2;  // of the cuts above zero
      // a little below the bucket's begin
      const float begin = (((float)line - 0.0078125f) / lines(w) - SHIFT) * SPAN;
      const float* own = cuts + (1 << w) + (1 << w >> 1);
      int m = 0;  // how many are before it, or `last`
      KV_UNROLL for (int step = 32; step; step /= 2) m += m + step <= last && own[m + step - 1] < begin ? step : 0;
      // the level above the cut; a width of 1 bit has a cut at zero alone, one of none has none
      const int above = last < 0 ? (1 << w >> 1) : (1 << w >> 1) + m + 1;
      const float cut = last < 0 ? 0.0f : own[m], half = sub(levels[(1 << w) - 1 + above], cut);
      KV_UNROLL for (int i = 0; i < COPIES / 2; i++)
        *(Words4*)(to + (line << LINE_SHIFT) + (i + thread) % 8 * 16) =
            {float_bits(cut), float_bits(half), float_bits(cut), float_bits(half)};
      to[LOWER + line] = (uint8_t)(above - (w > 0));
    }
    for (int number = thread; number < 128; number += threads) {
      int w = 0;
      while (number >> w) ++w;
      ((float*)(to + LEVELS))[number] = number ? levels[(1 << w) - 1 + number] : 0.0f;
    }
    KV_NO_UNROLL for (int n = thread; n < 16; n += threads)
      ((float*)(to + INVERSES))[n] = n ? div(1.0f, ((const float*)(table + SCALES))[n]) : 0.0f;
  }
  // where the entry of x lies, x being over SPAN
  KV_DEV static uint32_t place(float x, float lines, uint32_t copy) {
    const float wide = fma(saturate(add(x, SHIFT)), lines, 65536.0f);  // the line from bit 7 on
    return and_or(float_bits(wide), 0x7f80u, copy);
  }
  // number of the positive level of |y / scale|, less one if that is beyond a cut; with it, 1 for a place of no bits.
  // q: the quotient, which is zero where the rounded one is
  KV_DEV static uint32_t number_of(const uint8_t* table, float y, float scale, float inverse, float lines,
                                   uint32_t copy, float& q, bool& beyond) {
    q = mul(y, inverse);
    const float x = fma(fma(-q, scale, y), inverse, q);
    const uint32_t at = place(mul(magnitude(q), 1.0f / SPAN), lines, copy);
    const float cut = bits_float(load_table<TABLE>(table, at));
    beyond = x > cut || x <= -cut;  // a negative one is beyond the cut that it equals
    return table[TABLE + LOWER + (at >> LINE_SHIFT)];
  }
  // of the lane's places: their lines, and as far as registers go weights and 4 times their channels
  KV_CONST bool HOLDS = true;
  KV_CONST int KEPT = N <= 16 ? N : 0;
  struct Held {
    float lines[N], weight[KEPT ? KEPT : 1];
    uint32_t from[KEPT ? KEPT : 1];
  };
  KV_DEV static Held hold(const uint8_t* table, int part) {
    Held held{};
    KV_UNROLL for (int k = 0; k < N; k++) held.lines[k] = lines(table[WIDTHS + channel(part, k)]);
    KV_UNROLL for (int k = 0; k < KEPT; k++) {
      const int c = channel(part, k);
      held.weight[k] = ((const float*)(table + WEIGHT))[c], held.from[k] = 4u * table[ORDER + c];
    }
    return held;
  }
  KV_DEV static float weight(const Held& held, const uint8_t* table, int k) {
    return KEPT ? held.weight[KEPT ? k : 0] : ((const float*)(table + WEIGHT))[channel(thread() % LANES, k)];
  }
  KV_DEV static uint32_t from(const Held& held, const uint8_t* table, int k) {
    return KEPT ? held.from[KEPT ? k : 0] : 4u * table[ORDER + channel(thread() % LANES, k)];
  }
  KV_DEV static float over_parts(float x) {
    KV_UNROLL for (int step = LANES / 2; step; step /= 2) x = add(x, shfl_xor(x, step));
    return x;
  }
  KV_DEV static int tried(int nearest, int step) {
    return nearest + step < 1 ? 1 : nearest + step > 15 ? 15 : nearest + step;
  }

  // the scale of least cost as the reference finds it
  KV_DEV static int searched(const float (&y)[N], const Held& held, uint32_t copy, int nearest,
                             const uint8_t* table) {
    const uint8_t* derived = table + TABLE;
    float cost[N];
    KV_UNROLL for (int k = 0; k < N; k++) cost[k] = mul(weight(held, table, k), mul(y[k], y[k]));
    float least = sum(cost);
    int number = 0;
    KV_NO_UNROLL for (int step = -1; step <= 4; step++) {
      const int n = tried(nearest, step);
      const float scale = ((const float*)(table + SCALES))[n], inverse = ((const float*)(derived + INVERSES))[n];
      KV_UNROLL for (int k = 0; k < N; k++) {
        float q;
        bool beyond;
        const uint32_t own = number_of(table, y[k], scale, inverse, held.lines[k], copy, q, beyond) + beyond;
        const float level = held.lines[k] > 2.0f ? ((const float*)(derived + LEVELS))[own] : 0.0f;  // of width 0
        const float error = sub(magnitude(y[k]), mul(scale, level));
        cost[k] = mul(weight(held, table, k), mul(error, error));
      }
      const float all = sum(cost);
      if (all < least) least = all, number = n;
    }
    return number;
  }

  // a pair's bits: two numbers, one more where they are beyond a cut, flipped where negative; the first has as many
  // bits as the lowest five of `width` say
  KV_DEV static uint32_t field(uint32_t first, uint32_t second, const bool* beyond, const bool* negative,
                               uint32_t width) {
    const uint32_t above = rotate_left(1u, width);
    uint32_t x = first + second * above;
    if (beyond[0]) x += 1;
    if (beyond[1]) x += above;
    if (negative[0]) x ^= above - 1;
    if (negative[1]) x ^= -above;
    return x & ((1u << TWICE) - 1);  // a code of no bits: none
  }

  // y is in the model's order
  KV_DEV static void quad(const float (&given)[N], int part, uint32_t keep, bool live, uint8_t* const (&at)[1],
                          const uint8_t* table, uint8_t* scratch, const Held& held) {
    const float *walls = (const float*)(table + WALLS), *scales = (const float*)(table + SCALES);
    const uint8_t* derived = table + TABLE;
    const float* inverses = (const float*)(derived + INVERSES);
    const int lane = thread() % 32;
    const uint32_t copy = lane % COPIES * 8;
    uint8_t* own = scratch + lane / LANES * ROW;
    KV_UNROLL for (int k = 0; k < N; k++) ((float*)own)[channel(part, k)] = given[k];
    sync_warp();
    float y[N], energy[N], zero = 0.0f;
    const uint8_t* centre = table + opaque(16 * part) + CENTRE;
    KV_UNROLL for (int k = 0; k < N; k++) {
      y[k] = sub(*(const float*)(own + from(held, table, k)), ((const float*)centre)[channel(0, k)]);
      const float square = mul(y[k], y[k]);
      energy[k] = held.lines[k] > 2.0f ? square : 0.0f;  // of widths above 0
      zero = fma(weight(held, table, k), square, zero);
    }
    zero = over_parts(zero);
    const float total = sum(energy);
    int nearest = 1, number = 0;
    KV_UNROLL for (int step = 8; step; step /= 2) nearest += walls[nearest + step - 2] < total ? step : 0;
    float least = zero, next = bits_float(0x7f800000u);
    KV_NO_UNROLL for (int step = -1; step <= 4; step += 2) {
      float by[2], cost[2] = {0.0f, 0.0f};
      KV_UNROLL for (int i = 0; i < 2; i++) by[i] = mul(inverses[tried(nearest, step + i)], 1.0f / SPAN);
      KV_UNROLL for (int k = 0; k < N; k++) {
        const float own_weight = weight(held, table, k);
        KV_UNROLL for (int i = 0; i < 2; i++) {
          const float x = mul(magnitude(y[k]), by[i]);
          const Words2 entry = load_table2<TABLE>(table, place(x, held.lines[k], copy));
          const float error = sub(magnitude(fma(x, SPAN, -bits_float(entry.a))), bits_float(entry.b));
          cost[i] = fma(mul(own_weight, error), error, cost[i]);
        }
      }
      KV_UNROLL for (int i = 0; i < 2; i++) {
        const int n = tried(nearest, step + i);
        const float all = mul(over_parts(cost[i]), mul(scales[n], scales[n]));
        if (n == nearest + step + i) {  // else it is tried by another step
          next = minimum(next, maximum(all, least));
          if (all < least) least = all, number = n;
        }
      }
    }
    // NaN too
    const bool unsure = !(next > fma(least, 1.0f + 1.0f / 32768, fma(zero, 1.0f / 8388608, 1e-36f)));
    if (any(unsure)) number = searched(y, held, copy, nearest, table);
    const float scale = scales[number], inverse = inverses[number];
    sync_warp();  // all have read the row
    KV_UNROLL for (int i = 0; i < N / 4; i++) {
      const uint32_t widths = *(const uint32_t*)(table + opaque(4 * part) + (WIDTHS + 4 * LANES * i));
      uint32_t codes[4];
      bool beyond[4], negative[4];
      KV_UNROLL for (int e = 0; e < 4; e++) {
        const int k = 4 * i + e;
        float q;
        codes[e] = number_of(table, y[k], scale, inverse, held.lines[k], copy, q, beyond[e]);
        negative[e] = !(q > 0.0f);
      }
      uint32_t low = field(codes[0], codes[1], beyond, negative, widths);
      uint32_t high = field(codes[2], codes[3], beyond + 2, negative + 2, widths >> 16);
      if (i == N / 4 - 1 && part >= LANES - 2) {  // short pairs
        constexpr uint32_t TOP = 1u << (TWICE - 1);
        low = and_or(low, TOP - 1, (uint32_t)(number >> (2 * part - 2 * LANES + 4) & 1) * TOP);
        high = and_or(high, TOP - 1, (uint32_t)(number >> (2 * part - 2 * LANES + 5) & 1) * TOP);
      }
      ((uint32_t*)own)[LANES * i + part] = low | high << TWICE;
    }
    sync_warp();
    // a word of the row is a run of these numbers from some bit of the first on
    constexpr int BITS = 2 * TWICE, STEP = BITS % 8 ? BITS % 4 ? 2 : 4 : BITS % 16 ? 8 : 16;  // of those first bits
    constexpr int COUNT = (32 + BITS - STEP + BITS - 1) / BITS;
    uint32_t* to = (uint32_t*)at[0] + part;
    KV_UNROLL for (int i = 0; i < (WORDS + LANES - 1) / LANES; i++) {
      const int u = LANES * i + part;
      if (WORDS % LANES && u >= WORDS) break;
      const uint32_t first = 32u * u / BITS;
      uint32_t low = 0, high = 0;
      KV_UNROLL for (int n = 0; n < COUNT; n++) {
        const uint32_t two = ((const uint32_t*)own)[first + n];
        const int from = n * BITS;
        if (from < 32) low |= two << (from < 32 ? from : 0);
        if (from >= 32) high |= two << (from >= 32 ? from - 32 : 0);
        else if (from + BITS > 32) high |= two >> (from > 0 ? 32 - from : 0);
      }
      const uint32_t bits = funnel(low, high, 32u * u - first * BITS) & keep;
      if (live) to[LANES * i] = bits;
    }
    sync_warp();
  }
};

}  // namespace kv
