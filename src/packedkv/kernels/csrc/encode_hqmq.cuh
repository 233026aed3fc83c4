// HQMQ (codecs/hqmq.py): chunks of four as quaternions, the best of 24 S products p q_s, a length in steps of the
// longest's.
//
// The search multiplies a chunk x by the conjugate of the nearest Hurwitz unit p, y = conj(p) x: <p y, p p' q> = <y, p'
// q>, so that one table of candidates serves all 24 units. There |y_1| + |y_2| + |y_3| <= y_0, and the cell of (y_1,
// y_2, y_3) / y_0 in a grid lists the few products that can be best in it. fp32 finds the best of those; where the
// second is too close, they are tried again in double, which is exact (ops/quaternion.py), and the lowest code wins
// ties.
#pragma once
#include "encode_outliers.cuh"
#include "hqmq.cuh"

namespace kv {

// Table (packedkv/kernels/codecs/hqmq.py):
//   half entries[PAIRS][2][4]    products p' q_s cell by cell, each cell's filled up with a zero to whole pairs
//   uint16 names[PAIRS][2]       s << 5 | p' of them
//   uint16 cells[CELLS]          first pair << 4 | pairs; 0: not listed
//   uint8 times[24][24]          the unit p p'; p in order of the sign bits: 1, -1, i .. -k, then from (1+i+j+k)/2 to
//                                -(1+i+j+k)/2, the sign of k changing fastest
//   float secondary[S][4]        q_s, at a multiple of 16 bytes
template <int S> struct HqmqSearch {
  KV_CONST int SIDE = 15;  // cells along an axis, odd: 0 lies in the middle of one
  KV_CONST int CELLS = SIDE * SIDE * SIDE;
  KV_CONST int PAIRS = S == 24 ? 1792 : S == 48 ? 2176 : S == 96 ? 2688 : 3840;
  KV_CONST int NAMES = 16 * PAIRS;
  KV_CONST int LISTS = NAMES + 4 * PAIRS;
  KV_CONST int TIMES = LISTS + 2 * CELLS;
  KV_CONST int SECONDARY = align16(TIMES + 24 * 24);
  KV_CONST int BYTES = SECONDARY + 16 * S;

  struct alignas(16) Two { uint32_t word[4]; };
  struct alignas(16) Four { float w, x, y, z; };

  KV_DEV static float low(uint32_t x) { return half_float((uint16_t)x); }
  KV_DEV static float high(uint32_t x) { return half_float((uint16_t)(x >> 16)); }

  // 24 s + p of the product with the largest inner product with x
  KV_DEV static uint32_t find(const uint8_t* table, const float (&x)[4]) {
    Turn t;
    bool sure = true;
    uint32_t code = guess(table, x, t, sure);
    if (!sure) code = t.list & 15 ? among(table, x, t) : exact(table, x);
    return code;
  }

  // how a chunk was transformed: its unit p, row `unit` of `times`, and what its cell holds
  struct Turn {
    float p[4];
    uint32_t unit, list;
  };

  // In fp32. r is off by less than 2^-20 (a chunk is at most sqrt 2 y_0 long; y has three roundings, the reciprocal an
  // ulp), so a difference of two scores of entries at most 1 apart by less than 2^-19; and lists serve what is up to
  // 2^-18 outside their cell.
  KV_DEV static uint32_t guess(const uint8_t* table, const float (&x)[4], Turn& t, bool& sure) {
    constexpr float WHOLE = 12582912.0f;  // 1.5 * 2^23: around it fp32 holds whole numbers only, the addition rounds
    constexpr float SCALE = 0.5f * SIDE * (1.0f - 1.0f / 128.0f);  // the octahedron lies inside
    float a[4];
    float (&p)[4] = t.p;
    KV_UNROLL for (int i = 0; i < 4; i++) a[i] = magnitude(x[i]);
    float most = maximum(maximum(a[0], a[1]), maximum(a[2], a[3]));
    float half = mul(0.5f, add(add(a[0], a[1]), add(a[2], a[3])));
    bool small = !(most > 1e-30f);  // where a reciprocal is inaccurate
    bool axis = most > half;  // then one component alone is the largest
    float top = axis ? most : half, least = axis ? most : 0.0f, size = axis ? 1.0f : 0.5f;
    KV_UNROLL for (int i = 0; i < 4; i++) {
      p[i] = bits_float(float_bits(a[i] >= least ? size : 0.0f) | (float_bits(x[i]) & 0x80000000u));
    }
    float over = rcp_fast(top), r[3];
    r[0] = fma(p[3], x[2], fma(-p[2], x[3], fma(-p[1], x[0], mul(p[0], x[1]))));
    r[1] = fma(-p[3], x[1], fma(-p[2], x[0], fma(p[1], x[3], mul(p[0], x[2]))));
    r[2] = fma(-p[3], x[0], fma(p[2], x[1], fma(-p[1], x[2], mul(p[0], x[3]))));
    uint32_t cell = 0;
    KV_UNROLL for (int k = 0; k < 3; k++) {
      r[k] = mul(r[k], over);
      cell = cell * SIDE + float_bits(fma(r[k], SCALE, WHOLE + SIDE / 2));
    }
    cell -= float_bits(WHOLE) * (uint32_t)(SIDE * SIDE + SIDE + 1);
    cell = small || cell >= CELLS ? 0 : cell;  // a corner of the grid, of which nothing is listed
    uint32_t list = t.list = ((const uint16_t*)(table + LISTS))[cell];
    const Two* at = (const Two*)table + (list >> 4);
    float best = -1.0f, second = -1.0f;
    uint32_t place = 0;
    KV_NO_UNROLL for (uint32_t i = 0; i < 2 * (list & 15); i += 2) {
      Two e = at[i / 2];
      KV_UNROLL for (uint32_t j = 0; j < 2; j++) {
        uint32_t front = e.word[2 * j], back = e.word[2 * j + 1];
        float s = fma(r[2], high(back), fma(r[1], low(back), fma(r[0], high(front), low(front))));
        second = maximum(second, minimum(best, s));
        place = s > best ? i + j : place;
        best = maximum(best, s);
      }
    }
    sure = sub(best, second) > 0x1p-19f;
    uint32_t name = ((const uint16_t*)(table + NAMES))[2 * (list >> 4) + place];
    uint32_t sign[4], unit;
    KV_UNROLL for (int i = 0; i < 4; i++) sign[i] = float_bits(x[i]) >> 31;
    if (axis) unit = a[1] >= most ? 2 + sign[1] : a[2] >= most ? 4 + sign[2] : a[3] >= most ? 6 + sign[3] : sign[0];
    else unit = 8 + 8 * sign[0] + 4 * sign[1] + 2 * sign[2] + sign[3];
    t.unit = unit;
    bool zero = most == 0.0f;
    sure = sure || zero;
    return zero ? 0 : code_of(table, unit, name);
  }
  KV_DEV static uint32_t code_of(const uint8_t* table, uint32_t unit, uint32_t name) {
    return 24 * (name >> 5) + table[TIMES + 24 * unit + (name & 31)];
  }

  // x, which is not 0, on the reference's grid: times 2^40 over the power of two above its largest component, rounded
  KV_DEV static void scaled(const float (&x)[4], double (&y)[4]) {
    double most = 0.0;
    KV_UNROLL for (int i = 0; i < 4; i++) most = magnitude((double)x[i]) > most ? magnitude((double)x[i]) : most;
    double unit = bits_double((1022 + 1023 + 40 - (double_bits(most) >> 52)) << 52);
    KV_UNROLL for (int i = 0; i < 4; i++) y[i] = round_even(mul((double)x[i], unit));
  }

  // the best of what is listed: sums of multiples of 2^-12 up to 2^41, exact
  KV_DEV static uint32_t among(const uint8_t* table, const float (&x)[4], const Turn& t) {
    double v[4], p[4], y[4];
    scaled(x, v);
    KV_UNROLL for (int i = 0; i < 4; i++) p[i] = (double)t.p[i];
    y[0] = fma(p[3], v[3], fma(p[2], v[2], fma(p[1], v[1], mul(p[0], v[0]))));
    y[1] = fma(p[3], v[2], fma(-p[2], v[3], fma(-p[1], v[0], mul(p[0], v[1]))));
    y[2] = fma(-p[3], v[1], fma(-p[2], v[0], fma(p[1], v[3], mul(p[0], v[2]))));
    y[3] = fma(-p[3], v[0], fma(p[2], v[1], fma(-p[1], v[2], mul(p[0], v[3]))));
    const uint16_t* names = (const uint16_t*)(table + NAMES) + 2 * (t.list >> 4);
    const uint64_t* entries = (const uint64_t*)table + 2 * (t.list >> 4);
    double best = -1.0;
    uint32_t chosen = 0;
    KV_NO_UNROLL for (uint32_t i = 0; i < 2 * (t.list & 15); i++) {
      uint64_t e = entries[i];
      uint32_t front = (uint32_t)e, back = (uint32_t)(e >> 32), code = code_of(table, t.unit, names[i]);
      double s = fma(y[3], (double)high(back), fma(y[2], (double)low(back),
                 fma(y[1], (double)high(front), mul(y[0], (double)low(front)))));
      if (s > best || (s == best && code < chosen)) best = s, chosen = code;
    }
    return chosen;
  }

  // as _by_closed_form of ops/quaternion.py; x is not 0
  KV_DEV static uint32_t exact(const uint8_t* table, const float (&x)[4]) {
    double v[4], y[4];
    scaled(x, y);
    double best = -1.0;
    uint32_t chosen = 0;
    KV_NO_UNROLL for (uint32_t s = 0; s < S; s++) {
      double score = turn(table, y, s, v);
      if (score > best) best = score, chosen = s;
    }
    turn(table, y, chosen, v);
    uint32_t signs = 0, zeros = 0, p = 24;
    KV_UNROLL for (int i = 0; i < 4; i++) signs |= (v[i] < 0.0) << (3 - i), zeros |= (v[i] == 0.0) << (3 - i);
    KV_NO_UNROLL for (uint32_t flip = 0; flip < 16; flip++) {  // the lowest of the halves: where v is 0, either sign
      const uint32_t half = table[TIMES + 24 * (8 + (signs ^ flip))];  // times 1
      if (!(flip & ~zeros) && half < p) p = half;
    }
    KV_UNROLL for (int i = 3; i >= 0; i--) {
      if (v[i] == -best) p = 2 * i + 1;
      if (v[i] == best) p = 2 * i;
    }
    return 24 * chosen + p;
  }
  // v = y conj(q_s), and its largest inner product with a unit
  KV_DEV static double turn(const uint8_t* table, const double (&y)[4], uint32_t s, double (&v)[4]) {
    Four q = ((const Four*)(table + SECONDARY))[s];
    double a = (double)q.w, b = (double)q.x, c = (double)q.y, d = (double)q.z;
    v[0] = fma(y[3], d, fma(y[2], c, fma(y[1], b, mul(y[0], a))));
    v[1] = fma(y[3], c, fma(-y[2], d, fma(-y[0], b, mul(y[1], a))));
    v[2] = fma(-y[3], b, fma(y[1], d, fma(-y[0], c, mul(y[2], a))));
    v[3] = fma(y[2], b, fma(-y[1], c, fma(-y[0], d, mul(y[3], a))));
    double m[4];
    KV_UNROLL for (int i = 0; i < 4; i++) m[i] = magnitude(v[i]);
    double best = mul(0.5, add(add(m[0], m[1]), add(m[2], m[3])));
    KV_UNROLL for (int i = 0; i < 4; i++) best = m[i] > best ? m[i] : best;
    return best;
  }
};

// lengths of a row's chunks in steps, and the scale: quantize_lengths of ops/quaternion.py
template <int D, int R> struct HqmqLengths {
  KV_CONST int RUNS = D / 32;  // chunks of a lane
  KV_CONST int STEPS = (1 << R) - 1;

  KV_DEV static uint16_t round(const float (&y)[D / 8], uint32_t (&steps)[RUNS]) {
    float square[RUNS], most = 0.0f;
    KV_UNROLL for (int i = 0; i < RUNS; i++) {
      const float* x = y + 4 * i;
      square[i] = fma(x[3], x[3], fma(x[2], x[2], fma(x[1], x[1], mul(x[0], x[0]))));
      most = maximum(most, square[i]);
    }
    KV_UNROLL for (int mask = 4; mask; mask /= 2) most = maximum(most, shfl_xor(most, mask));
    // squares are off by 2^-22 at most, roots by 2^-22; smaller ones leave fp32's range
    float longest = mul(0.5f, sqrt(most));
    uint16_t scale = half_bits(longest);
    bool sure = most > 0x1p-40f && half_bits(mul(longest, 1.0f - 0x1p-21f)) == half_bits(mul(longest, 1.0f + 0x1p-21f));
    float over = div((float)STEPS, mul(2.0f, half_float(scale)));
    KV_UNROLL for (int i = 0; i < RUNS; i++) {
      float q = mul(sqrt(square[i]), over), whole = round_even(q);
      sure = sure && sub(0.5f, magnitude(sub(q, whole))) > STEPS * 0x1p-21f;
      steps[i] = (uint32_t)minimum(whole, (float)STEPS);
    }
    return all(sure) ? scale : exact(y, steps);
  }

  KV_DEV static uint16_t exact(const float (&y)[D / 8], uint32_t (&steps)[RUNS]) {
    double length[RUNS], most = 0.0;
    KV_UNROLL for (int i = 0; i < RUNS; i++) {
      double s[4];
      KV_UNROLL for (int e = 0; e < 4; e++) s[e] = mul((double)y[4 * i + e], (double)y[4 * i + e]);
      length[i] = sqrt(add(add(s[0], s[1]), add(s[2], s[3])));
      most = length[i] > most ? length[i] : most;
    }
    KV_UNROLL for (int mask = 4; mask; mask /= 2) {
      double other = shfl_xor(most, mask);
      most = other > most ? other : most;
    }
    uint16_t scale = half_by_float(mul(most, 0.5));
    double sigma = mul((double)half_float(scale), 2.0);
    KV_UNROLL for (int i = 0; i < RUNS; i++) {
      double q = sigma > 0.0 ? round_even(div(mul(length[i], (double)STEPS), sigma)) : 0.0;
      steps[i] = (uint32_t)(q < (double)STEPS ? q : (double)STEPS);
    }
    return scale;
  }
};

// S 24, 48, 96, 192; R 3, 4, 6; whole bits per code, in the order of HqmqFields
template <int D, int S, int R> struct HqmqRow : TableRow {
  using Fields = HqmqFields<D, S, R>;
  KV_CONST int DIM = D;
  KV_CONST int PLANES = Fields::PLANES;
  KV_CONST int CHUNKS = Fields::CHUNKS;
  KV_FUNCTION int plane_bytes(int p) { return Fields::plane_bytes(p); }
  KV_CONST int TABLE = HqmqSearch<S>::BYTES;
  KV_CONST int ROOM = stream_room(CHUNKS);
  KV_CONST int NUMBERS = PLANES - 1;  // of a chunk, one for each field but the scale
  KV_CONST int SCRATCH = 2 * 4 * ROOM * NUMBERS;

  KV_DEV static void quad(const float (&y)[D / 8], int part, uint32_t keep, bool live, uint8_t* const (&at)[PLANES],
                          const uint8_t* table, uint8_t* scratch) {
    uint16_t* numbers[NUMBERS];
    KV_UNROLL for (int n = 0; n < NUMBERS; n++) {
      numbers[n] = (uint16_t*)scratch + (n * 4 + thread() % 32 / 8) * ROOM;
      clear_spare<CHUNKS>(numbers[n], part);
    }
    uint32_t steps[D / 32];
    uint16_t scale = HqmqLengths<D, R>::round(y, steps);
    KV_UNROLL for (int i = 0; i < D / 32; i++) {
      float x[4] = {y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]};
      uint32_t number[3];
      split(HqmqSearch<S>::find(table, x), steps[i], number);
      KV_UNROLL for (int n = 0; n < NUMBERS; n++) numbers[n][8 * i + part] = (uint16_t)number[n];
    }
    sync_warp();
    store_stream<CHUNKS, Fields::UNITS ? 16 : Fields::LOW>(at[0], numbers[0], part, keep, live);
    if constexpr (NUMBERS > 1) {
      store_stream<CHUNKS, Fields::UNITS ? Fields::SPARE : 4>(at[1], numbers[1], part, keep, live);
    }
    if constexpr (NUMBERS > 2) store_planes(at[2], numbers[2], part, keep, live);
    if (part == 0 && live) *(uint16_t*)at[NUMBERS] = (uint16_t)(scale & keep);
    sync_warp();
  }

  KV_DEV static void split(uint32_t code, uint32_t radius, uint32_t (&number)[3]) {
    uint32_t sign = code & 1, row = code >> 1;
    if (Fields::UNITS) {
      number[0] = sign << 15 | row << Fields::HELD | (radius & ((1u << Fields::HELD) - 1));
      number[1] = radius >> Fields::HELD;
    } else {
      number[0] = row & ((1u << Fields::LOW) - 1);
      number[1] = Fields::SIGNED ? radius | sign << 3 : radius;
      number[2] = Fields::LOW == 8 ? row >> 8 | sign << 1 : sign;
    }
  }

  // bit p of the numbers is plane p; in a plane chunk EIGHTH g + i is bit g of byte i
  KV_DEV static void store_planes(uint8_t* at, const uint16_t* bits, int part, uint32_t keep, bool live) {
    if (!live) return;
    KV_UNROLL for (int i = part; i < Fields::EIGHTH; i += 8) {
      uint32_t bytes = 0;
      KV_UNROLL for (int g = 0; g < 8; g++) {
        uint32_t x = bits[Fields::EIGHTH * g + i];
        bytes |= ((x & 1) | (x & 2) << 7) << g;
      }
      KV_UNROLL for (int p = 0; p < Fields::BITS; p++) at[p * Fields::EIGHTH + i] = (uint8_t)((bytes & keep) >> 8 * p);
    }
  }
};

}  // namespace kv
