// Integers in groups along channels (GroupInt), and the parts that all integer encoders share: stored scales,
// quotients with IEEE rounding, packing of codes.
//
//     EncodeGroupInt<D, BITS, GROUP, SYMMETRIC>       GROUP = 0: one group
//
// Planes: codes [D BITS / 8], scale fp16 [groups], zero fp16 [groups] if not symmetric. Codes are interleaved
// (codecs/group_int.py) at 2 and 3 bits if GROUP is 32 and 128 divides D; else they are a plain bit stream.
#pragma once
#include "encode.cuh"

namespace kv {

// 1.5 * 2^23: adding it rounds |x| < 2^22 to the nearest even integer, which then stands in the low bits of the sum
constexpr float ROUNDING = 12582912.0f;
constexpr float LEAST_SCALE = 5.9604644775390625e-08f;  // 2^-24, the smallest positive fp16

// x / s as IEEE rounds it, for s of at most 12 significant bits (a widened fp16 times a power of two) and r within two
// ulp of 1 / s. Why one correction is enough: q = x r is within 5 ulp of x / s; x - s q is exact, a multiple of
// ulp(q) ulp(s) below 5 ulp(q) s; so the corrected sum, before it is rounded, is within 5 ulp * 2^-22 < 2^-19 ulp of
// x / s. A point half way between floats, m, has 25 bits, and x - s m is a nonzero multiple of ulp(s) ulp(m): x / s
// stays 2^-13 ulp away from m. It holds while nothing underflows: |x| >= 2^-84. Below, s >= 2^-24 makes both the
// quotient and this less than 2^-59, which rounds to the same code. Zero loses its sign.
KV_DEV float quotient(float x, float s, float r) {
  float q = mul(x, r);
  return fma(fma(-s, q, x), r, q);
}

// ops/groups.py fp16_scale: bits of the fp16 nearest to span / STEPS, one less where zero + STEPS * scale passes 65504
template <int STEPS> KV_DEV uint32_t held_scale(float span, float zero) {
  constexpr float S = (float)STEPS, R = 1.0f / S;
  float wanted = minimum(maximum(quotient(span, S, R), LEAST_SCALE), HALF_MAX);
  uint32_t bits = half_bits(wanted);
  return add(zero, mul(S, half_float((uint16_t)bits))) > HALF_MAX ? bits - 1 : bits;
}

// What a code of WIDTH bits is: rne((x - z) / s), clipped to BOTTOM..TOP, plus OFFSET; the scale maps STEPS on the span
template <int BITS, int LEVELS, int LEAST, int MOST, int ADDED, bool ZERO> struct Grid {
  KV_CONST int WIDTH = BITS, STEPS = LEVELS, BOTTOM = LEAST, TOP = MOST, OFFSET = ADDED;
  KV_CONST bool HAS_ZERO = ZERO;
  // the code in the low 22 bits. Clipping to whole numbers first changes no code; OFFSET is even, so ties stay even
  KV_DEV static uint32_t code(float x, float s, float r, float z) {
    float q = quotient(HAS_ZERO ? sub(x, z) : x, s, r);
    return float_bits(add(minimum(maximum(q, (float)BOTTOM), (float)TOP), ROUNDING + OFFSET));
  }
};
template <int BITS, bool SYMMETRIC> struct IntGrid;
template <int BITS> struct IntGrid<BITS, false> : Grid<BITS, (1 << BITS) - 1, 0, (1 << BITS) - 1, 0, true> {};
template <int BITS>
struct IntGrid<BITS, true>
    : Grid<BITS, (1 << (BITS - 1)) - 1, 1 - (1 << (BITS - 1)), (1 << (BITS - 1)) - 1, 1 << (BITS - 1), false> {};

// The bytes of four neighbouring channels, by all lanes; codes may have other bits above the lowest 22. 'to' is where
// the bytes of the group of 32 channels begin that eight lanes hold, part 0..7.
template <int WIDTH>
KV_DEV void store_quad(uint8_t* to, int part, uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t keep,
                       bool live) {
  static_assert(WIDTH == 2 || WIDTH == 3 || WIDTH == 4 || WIDTH == 8, "bits of a code");
  if (WIDTH == 8) {
    uint32_t word = prmt(prmt(a, b, 0x0040), prmt(c, d, 0x0040), 0x5410);
    if (live) ((uint32_t*)to)[part] = word & keep;
    return;
  }
  uint32_t word = a + (b << WIDTH) + (c << 2 * WIDTH) + (d << 3 * WIDTH);
  if (WIDTH == 4) {
    if (live) ((uint16_t*)to)[part] = (uint16_t)(word & keep);
  } else if (WIDTH == 2) {
    if (live) to[part] = (uint8_t)(word & keep);
  } else {  // four lanes hold 48 bits, three half words
    word &= 0xfff;
    int j = part % 4;
    uint32_t next = shfl(word, (thread() + 1) % 32);
    word = word >> 4 * j | next << (12 - 4 * j);
    if (live && j < 3) ((uint16_t*)to)[part / 4 * 3 + j] = (uint16_t)(word & keep);
  }
}

// The bytes of an interleaved run of 128 channels: 'code' holds the 16 that part 0..7 has of it, 4 q + p for channel
// 32 q + 4 part + p. As above, but lanes share nothing: a lane's units are whole.
template <int WIDTH>
KV_DEV void store_interleaved(uint8_t* to, int part, const uint32_t (&code)[16], uint32_t keep, bool live) {
  static_assert(WIDTH == 2 || WIDTH == 3, "4 bits in a plain stream are the same bytes");
  constexpr int EACH = 16 / WIDTH;
  KV_UNROLL for (int i = 0; i < WIDTH; i++) {
    uint32_t unit = code[EACH * i];
    KV_UNROLL for (int s = 1; s < EACH; s++) unit += code[EACH * i + s] << WIDTH * s;
    if (WIDTH == 3) unit = (unit & 0x7fff) | code[15] >> i << 15;
    if (live) ((uint16_t*)to)[8 * i + part] = (uint16_t)(unit & keep);
  }
}

// One number for each of GROUPS groups that all eight lanes of a row share, needed once per group: lanes LANES g ..
// LANES g + LANES - 1 have group g afterwards. Halving the groups at each exchange takes 4 + 2 + 1 of them for eight,
// not 8 * 3.
template <int GROUPS> struct Shares {
  KV_CONST int ALL = GROUPS <= 2 ? GROUPS : GROUPS <= 4 ? 4 : 8, LANES = 8 / ALL;
  static_assert(GROUPS <= 8, "a group for each lane");
  KV_DEV static int group(int part) { return part / LANES; }
  KV_DEV static bool first(int part) { return part % LANES == 0 && group(part) < GROUPS; }
  // what the lanes of group g hold
  template <class T> KV_DEV static T of(T x, int g) { return shfl(x, (thread() % 32 & ~7) + g * LANES); }
  template <bool LARGEST> KV_DEV static float reduce(float (&x)[ALL], int part) {
    int n = ALL;
    KV_UNROLL for (int m = 4; m; m /= 2) {
      bool upper = part & m;
      n = n > 1 ? n / 2 : 0;  // groups that stay; 0: one is left
      KV_UNROLL for (int i = 0; i < (n ? n : 1); i++) {
        float mine = upper && n ? x[i + n] : x[i], other = shfl_xor(upper || !n ? x[i] : x[i + n], m);
        x[i] = LARGEST ? maximum(mine, other) : minimum(mine, other);
      }
    }
    return x[0];
  }
};

template <int LANES> KV_DEV float team_max(float x) {
  KV_UNROLL for (int m = 1; m < LANES; m *= 2) x = maximum(x, shfl_xor(x, m));
  return x;
}
template <int LANES> KV_DEV float team_min(float x) {
  KV_UNROLL for (int m = 1; m < LANES; m *= 2) x = minimum(x, shfl_xor(x, m));
  return x;
}

// groups of channels of one token, any grid
template <int D, int GROUP, class GRID, bool INTERLEAVED = false> struct EncodeGroups {
  KV_CONST int DIM = D, TEAM = 8, SCRATCH = 0, N = numbers_of(D, 8);
  KV_CONST int G = GROUP ? GROUP : D, GROUPS = (D + G - 1) / G;
  KV_CONST int PLANES = GRID::HAS_ZERO ? 3 : 2;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? D * GRID::WIDTH / 8 : 2 * GROUPS; }

  struct Held {
    uint32_t scale, zero;  // fp16
    float s, r, z;
  };
  KV_DEV static Held hold(float low, float high) {
    Held h;
    h.zero = 0;
    h.z = 0.0f;
    if (GRID::HAS_ZERO) {
      h.zero = half_bits(minimum(maximum(low, -HALF_MAX), HALF_MAX));
      h.z = half_float((uint16_t)h.zero);
      h.scale = held_scale<GRID::STEPS>(sub(high, h.z), h.z);
    } else {
      h.scale = held_scale<GRID::STEPS>(high, 0.0f);
    }
    h.s = half_float((uint16_t)h.scale);
    h.r = rcp_fast(h.s);
    return h;
  }
  // a symmetric grid needs only the largest magnitude
  KV_DEV static void widen(float x, float& low, float& high) {
    if (GRID::HAS_ZERO) low = minimum(low, x);
    high = maximum(high, GRID::HAS_ZERO ? x : magnitude(x));
  }
  template <int LANES> KV_DEV static Held settle(float low, float high) {
    return hold(GRID::HAS_ZERO ? team_min<LANES>(low) : low, team_max<LANES>(high));
  }
  KV_DEV static void put(uint8_t* const (&at)[PLANES], int group, const Held& h, uint32_t keep) {
    ((uint16_t*)at[1])[group] = (uint16_t)(h.scale & keep);
    if constexpr (GRID::HAS_ZERO) ((uint16_t*)at[2])[group] = (uint16_t)(h.zero & keep);
  }

  KV_DEV static void quad(const float (&y)[N], int part, uint32_t keep, bool live, uint8_t* const (&at)[PLANES]) {
    constexpr float INFINITE = 3.4028234663852886e38f;
    Held h[N];  // of each element; equal ones share registers
    if constexpr ((G % 32 == 0 && GROUPS <= 8) || GROUPS == 1) {  // whole runs of 32: eight lanes share every group
      using Share = Shares<GROUPS>;
      constexpr int EACH = GROUPS == 1 ? N : G / 8;
      float low[Share::ALL], high[Share::ALL];
      KV_UNROLL for (int g = 0; g < Share::ALL; g++) {
        low[g] = INFINITE, high[g] = -INFINITE;
        KV_UNROLL for (int k = g * EACH; k < (g + 1) * EACH && k < N; k++) widen(y[k], low[g], high[g]);
      }
      float lowest = GRID::HAS_ZERO ? Share::template reduce<false>(low, part) : 0.0f;
      Held mine = hold(lowest, Share::template reduce<true>(high, part));
      if (live && Share::first(part)) put(at, Share::group(part), mine, keep);
      KV_UNROLL for (int g = 0; g < GROUPS; g++) {
        Held one = mine;
        if (GROUPS > 1) {
          one.s = Share::of(mine.s, g);
          one.r = Share::of(mine.r, g);
          if (GRID::HAS_ZERO) one.z = Share::of(mine.z, g);
        }
        KV_UNROLL for (int k = g * EACH; k < (g + 1) * EACH && k < N; k++) h[k] = one;
      }
    } else if constexpr (32 % G == 0 && G >= 4) {  // one group to a run, or several
      KV_UNROLL for (int i = 0; i < N / 4; i++) {
        float low = INFINITE, high = -INFINITE;
        KV_UNROLL for (int k = 4 * i; k < 4 * i + 4; k++) widen(y[k], low, high);
        Held one = settle<G / 4>(low, high);
        KV_UNROLL for (int k = 4 * i; k < 4 * i + 4; k++) h[k] = one;
        if (live && part % (G / 4) == 0) put(at, (32 * i + 4 * part) / G, one, keep);
      }
    } else {  // groups that begin anywhere
      KV_UNROLL for (int g = 0; g < GROUPS; g++) {
        float low = INFINITE, high = -INFINITE;
        KV_UNROLL for (int k = 0; k < N; k++) {
          if (channel_of<8>(part, k) / G == g) widen(y[k], low, high);
        }
        Held one = settle<8>(low, high);
        KV_UNROLL for (int k = 0; k < N; k++) {
          if (channel_of<8>(part, k) / G == g) h[k] = one;
        }
        if (live && part == g % 8) put(at, g, one, keep);
      }
    }
    constexpr int RUN = INTERLEAVED ? 16 : 4;  // codes that are stored together
    KV_UNROLL for (int i = 0; i < N / RUN; i++) {
      uint32_t code[RUN];
      KV_UNROLL for (int e = 0; e < RUN; e++) {
        const Held& own = h[RUN * i + e];
        code[e] = GRID::code(y[RUN * i + e], own.s, own.r, own.z);
      }
      uint8_t* to = at[0] + RUN * GRID::WIDTH * i;
      if constexpr (INTERLEAVED) store_interleaved<GRID::WIDTH>(to, part, code, keep, live);
      else store_quad<GRID::WIDTH>(to, place_of<D>(i, part), code[0], code[1], code[2], code[3], keep, live);
    }
  }
};

template <int D, int BITS, int GROUP, bool SYMMETRIC>
using EncodeGroupInt =
    EncodeGroups<D, GROUP, IntGrid<BITS, SYMMETRIC>, (BITS == 2 || BITS == 3) && GROUP == 32 && D % 128 == 0>;

}  // namespace kv
