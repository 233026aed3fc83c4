// What row encoders share: sums in the order of ops/sums.py, nearest levels as ops/lloyd_max.py, bit streams as
// ops/bitpack.py.
//
// Bytes must equal the reference's, which decides in double. Decisions are made in fp32 first, with an error bound;
// values closer to a decision boundary are decided again in double, operation by operation as in the reference: about
// one row in a hundred.
#pragma once
#include "encode.cuh"

namespace kv {

// as torch casts double to half: via float
KV_DEV uint16_t half_by_float(double x) { return half_bits((float)x); }

constexpr float TINY_ROW = 1e-30f;  // rows shorter than this are computed in double: fp32 reciprocals would overflow

// -- sums by halves ---------------------------------------------------------------------------------------------------
// channels 4 part + e of eight lanes: the sum over the lanes' 32 numbers, the same in all lanes
KV_DEV double sum_of_team(double (&s)[4]) {
  KV_UNROLL for (int mask = 4; mask; mask /= 2) {
    KV_UNROLL for (int e = 0; e < 4; e++) s[e] = add(s[e], shfl_xor(s[e], mask));
  }
  return add(add(s[0], s[2]), add(s[1], s[3]));
}
// RUNS numbers that lie 32 channels apart
template <int RUNS, class F> KV_DEV double sum_of_runs(F number) {
  constexpr int PADDED = RUNS <= 2 ? RUNS : RUNS <= 4 ? 4 : RUNS <= 8 ? 8 : 16;
  double run[PADDED];
  KV_UNROLL for (int i = 0; i < PADDED; i++) run[i] = i < RUNS ? number(i) : 0.0;
  KV_UNROLL for (int half = PADDED / 2; half; half /= 2) {
    KV_UNROLL for (int i = 0; i < half; i++) run[i] = add(run[i], run[i + half]);
  }
  return run[0];
}
// squares of a row, y[4 i + e] being channel 32 i + 4 part + e; `again`: the lane's last four are another lane's
template <int N> KV_DEV double sum_of_squares(const float (&y)[N], bool again = false) {
  double s[4];
  KV_UNROLL for (int e = 0; e < 4; e++) {
    s[e] = sum_of_runs<N / 4>(
        [&](int i) { return again && i == N / 4 - 1 ? 0.0 : mul((double)y[4 * i + e], (double)y[4 * i + e]); });
  }
  return sum_of_team(s);
}
// Python's D ** 0.5
KV_CONSTEXPR double root(int dim) {
  return dim == 64 ? 8.0 : dim == 80 ? 8.94427190999916 : dim == 96 ? 9.797958971132712
      : dim == 128 ? 11.313708498984761 : dim == 192 ? 13.856406460551018 : dim == 256 ? 16.0 : 22.627416997969522;
}

// -- the level nearest to a number -----------------------------------------------------------------------------------
// Table of 2^BITS levels with walls between them, all numbers little-endian:
//   float scale, offset, epsilon, 0          cell of u: round(u scale + offset), held within 0 .. CELLS - 1
//   {float wall, uint32 below} [CELLS]       the only wall that u may be near, and how many lie below it
//   double walls [2^BITS]                    ascending; the last ones are infinite where there are fewer
template <int BITS> struct Levels {
  KV_CONST int CELLS = 8 << BITS;
  KV_CONST int WALLS = 16 + 8 * CELLS;
  KV_CONST int BYTES = WALLS + 8 * (1 << BITS);

  // walls below u, for u known to within epsilon; sure becomes false where that does not decide
  KV_DEV static uint32_t guess(const uint8_t* table, float u, bool& sure) {
    const float* head = (const float*)table;
    constexpr float WHOLE = 8388608.0f;  // 2^23, from which on fp32 holds whole numbers: the addition rounds
    float t = fma(u, head[0], head[1]);
    t = minimum(maximum(t, WHOLE), WHOLE + (CELLS - 1));
    uint64_t cell = ((const uint64_t*)(table + 16))[float_bits(t) & (CELLS - 1)];
    float d = sub(u, bits_float((uint32_t)cell));
    sure = sure && magnitude(d) > head[2];
    return (uint32_t)(cell >> 32) + (d > 0.0f ? 1u : 0u);
  }
  // walls below u
  KV_DEV static uint32_t find(const uint8_t* table, double u) {
    const double* walls = (const double*)(table + WALLS);
    uint32_t n = 0;
    KV_UNROLL for (uint32_t step = 1u << BITS >> 1; step; step /= 2) {
      if (walls[n + step - 1] < u) n += step;
    }
    return n;
  }
};

// -- bit streams ------------------------------------------------------------------------------------------------------
KV_CONSTEXPR int common_bits(int n) { return n % 32 == 0 ? 32 : n & -n; }
KV_CONSTEXPR int stream_bytes(int count, int bits) { return (count * bits + 7) / 8; }
// elements that a word of the stream may touch
KV_CONSTEXPR int stream_span(int bits) { return (bits - common_bits(bits) + 32 + bits - 1) / bits; }
// size of the buffer of codes: stream_word reads zeros behind the last one
KV_CONSTEXPR int stream_room(int count) { return (count + 7) / 8 * 8 + 16; }

// 32 bits of the stream of codes, from bit 32 w on
template <int BITS, class T> KV_DEV uint32_t stream_word(const T* codes, int w) {
  constexpr int SPAN = stream_span(BITS);
  static_assert(SPAN * BITS <= 64, "a word of the stream is made in 64 bits");
  int first = 32 * w / BITS;
  uint64_t bits = 0;
  KV_UNROLL for (int j = 0; j < SPAN; j++) bits |= (uint64_t)codes[first + j] << (j * BITS);
  return (uint32_t)(bits >> (32 * w - first * BITS));
}
// word w of a run of BYTES bytes whose first byte is as aligned as BYTES is
template <int BYTES> KV_DEV void store_word(uint8_t* at, int w, uint32_t word) {
  if constexpr (BYTES % 4 == 0) {
    ((uint32_t*)at)[w] = word;
  } else if constexpr (BYTES % 2 == 0) {
    ((uint16_t*)at)[2 * w] = (uint16_t)word;
    if (4 * w + 2 < BYTES) ((uint16_t*)at)[2 * w + 1] = (uint16_t)(word >> 16);
  } else {
    KV_UNROLL for (int j = 0; j < 4; j++) {
      if (4 * w + j < BYTES) at[4 * w + j] = (uint8_t)(word >> 8 * j);
    }
  }
}
// lanes of a team write a row's stream
template <int COUNT, int BITS, class T>
KV_DEV void store_stream(uint8_t* at, const T* codes, int part, uint32_t keep, bool live) {
  constexpr int BYTES = stream_bytes(COUNT, BITS), WORDS = (BYTES + 3) / 4;
  KV_UNROLL for (int first = 0; first < WORDS; first += 8) {
    int w = first + part;
    if (w >= WORDS || !live) continue;
    store_word<BYTES>(at, w, stream_word<BITS>(codes, w) & keep);
  }
}
template <int COUNT, class T> KV_DEV void clear_spare(T* codes, int part) {
  KV_UNROLL for (int i = (COUNT + 7) / 8 * 8; i < stream_room(COUNT); i += 8) codes[i + part] = 0;
}

// the norm of a row, by one lane
template <bool WIDE> KV_DEV void store_norm(uint8_t* at, double norm, int part, uint32_t keep, bool live) {
  if (part || !live) return;
  if (WIDE) *(uint32_t*)at = float_bits((float)norm) & keep;
  else *(uint16_t*)at = (uint16_t)(half_by_float(norm) & keep);
}

}  // namespace kv
