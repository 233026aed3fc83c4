// Keys that are held without their mean: every score gets back the term q . R_t mu. R_t turns a pair of channels (x, y)
// by t theta: (x cos - y sin, y cos + x sin).
//
// For a pair of channels with the query (u, v) and the mean (m, n), at position c + x,
//   q . R mu = sum over pairs of A cos(x theta) + B sin(x theta),
//   A = a cos(c theta) + b sin(c theta),  B = b cos(c theta) - a sin(c theta),  a = u m + v n,  b = v m - u n.
// Of SPAN tokens around c, those at c + x and c - x share both sums, so a token costs one multiply-add for a pair and
// row; tokens are lanes. Numbers of a row are turned to c once for all of them. Channels that do not turn add a number
// of the row's own.
//
// Most frequencies are so low that a span turns a pair by less than SLOW to either side. There cos and sin are
// polynomials of eight terms, and slow pairs are summed before they meet tokens: sums of A and B times powers of their
// frequencies take the places of four pairs.
//
// Angles. Cosines and sines of a position are products of those of its digits to base 128, in double: they are right to
// float32 at any position, and no error grows from span to span.
//
// table of a KV head (packedkv/kernels/cpu/mean.py), P pairs by falling frequency, P a multiple of 16; N of them are not
// slow, or all:
//   double [3][128][2][P]        cos and sin of digit d at place p, (d << 7 p) theta
//   double [2][P]                cos and sin of (SPAN - 1) / 2 theta: from a span's first token to c
//   float  [N (+ 4)][2][SPAN/2]  cos and sin of (i + 1/2) theta; then powers 2 j and 2 j + 1 of (2 i + 1) / (SPAN - 1)
//   float  [8][P - N / 16 * 16]  of slow pairs what power j counts: (-1)^(j/2) ((SPAN - 1) / 2 theta)^j / j!
//   int16  [2][P]                the pair's two channels
#pragma once
#include <algorithm>
#include <cstdlib>

#include "reader.h"
#include "simd.h"

namespace kv {

constexpr int SPAN = 64, HALF_SPAN = SPAN / 2;
constexpr int POWERS = 8;
constexpr int TURN_BITS = 7, TURN_DIGITS = 3;  // positions below 2^21

// Read by kernels/structs.py.
struct KeyMean {
  const float* turning;  // [B or 1, H, 2, P]: of the table's pairs, zero where it has none; or null
  const float* still;    // [B or 1, H, D]: of channels that do not turn, zero elsewhere; or null
  const uint8_t* table;  // null where `turning` is
  int64_t turning_batch, still_batch;  // numbers from one sequence's means to the next one's
  int64_t table_head;    // bytes from one head's table to the next one's; 0: all heads share it
  int64_t pairs, fast;   // P and N; 0 where `turning` is null

  explicit operator bool() const { return turning || still; }
};

// The term of the rows of a task.
struct MeanTerm {
  int pairs = 0, fast = 0, used = 0, rows = 0;  // used: pairs and powers in the tile
  const double *digits = nullptr, *middle = nullptr;
  const float *tile = nullptr, *powers = nullptr;
  float *own = nullptr, *turned = nullptr, *terms = nullptr, *still = nullptr;
  int64_t first = 0, end = 0;  // positions of `terms`

  static size_t scratch(int rows, int pairs) { return (size_t)rows * (2 * pairs + SPAN + 1) + 8 * pairs + 2 * LANES; }

  MeanTerm() = default;
  // q [rows, dim], model basis
  MeanTerm(const KeyMean& mean, int b, int h, const float* q, int rows, int dim, float* scratch)
      : pairs((int)mean.pairs), fast((int)mean.fast), used(fast == pairs ? pairs : fast + POWERS / 2), rows(rows) {
    own = scratch, turned = own + 2 * rows * pairs, terms = turned + 8 * pairs;
    still = terms + rows * SPAN + LANES;
    const int16_t* channel = nullptr;
    const float* m = nullptr;
    if (pairs) {
      digits = (const double*)(mean.table + h * mean.table_head);
      middle = digits + (TURN_DIGITS << TURN_BITS) * 2 * pairs, tile = (const float*)(middle + 2 * pairs);
      powers = tile + SPAN * used;
      channel = (const int16_t*)(powers + (fast == pairs ? 0 : POWERS * (pairs - slow())));
      m = mean.turning + b * mean.turning_batch + (int64_t)h * 2 * pairs;
    }
    for (int r = 0; r < rows; ++r, q += dim) {
      for (int p = 0; p < pairs; ++p) {
        const double u = q[channel[p]], v = q[channel[pairs + p]], x = m[p], y = m[pairs + p];
        const double a = u * x + v * y, c = v * x - u * y;
        own[2 * r * pairs + p] = (float)(a * middle[p] + c * middle[pairs + p]);
        own[(2 * r + 1) * pairs + p] = (float)(c * middle[p] - a * middle[pairs + p]);
      }
      double sum = 0;
      if (mean.still) {
        const float* x = mean.still + b * mean.still_batch + (int64_t)h * dim;
        for (int c = 0; c < dim; ++c) sum += (double)q[c] * x[c];
      }
      still[r] = (float)sum;
    }
  }

  // adds the terms of `count` tokens from `position` on to scores s [rows, stride]; LANES numbers behind may change
  void add(float* s, int stride, int64_t position, int count) {
    if (pairs && (position < first || position + count > end)) fill(position);
    for (int r = 0; r < rows; ++r, s += stride) {
      const F more = splat(still[r]);
      if (!pairs) {
        for (int i = 0; i < count; i += LANES) store(s + i, load(s + i) + more);
        continue;
      }
      const float* from = terms + r * SPAN + (position - first);
      for (int i = 0; i < count; i += LANES) store(s + i, load(s + i) + (load(from + i) + more));
    }
  }

 private:
  int slow() const { return fast / 16 * 16; }  // where vectors of slow pairs begin

  __attribute__((noinline)) void fill(int64_t position) {  // apart: Task::run has enough in its registers
    first = position, end = position + SPAN;
    alignas(64) float c[WIDEST / 2], s[WIDEST / 2];
    turn(position, c, s);
    for (int r = 0; r < rows; r += 4) {
      const int some = std::min(4, rows - r);
      for (int i = 0; i < some; ++i) {
        const float *a = own + 2 * (r + i) * pairs, *b = a + pairs;
        float *x = turned + 2 * i * pairs, *y = x + pairs;
        for (int p = 0; p < pairs; p += LANES) {
          const F u = load(a + p), v = load(b + p), cos = load(c + p), sin = load(s + p);
          store(x + p, fma(u, cos, v * sin)), store(y + p, fma(v, cos, -(u * sin)));
        }
      }
      if (fast < pairs) sum_slow(some);
      float* to = terms + r * SPAN;
      if (some == 4) products<4>(to);
      else if (some == 3) products<3>(to);
      else if (some == 2) products<2>(to);
      else products<1>(to);
    }
  }

  // cos and sin of position * theta, for each pair
  void turn(int64_t position, float* c, float* s) const {
    const int64_t n = std::abs(position);  // before a sequence's first token there may be padding
    const auto row = [&](int digit) {
      return digits + 2 * pairs * ((digit << TURN_BITS) + (n >> TURN_BITS * digit & ((1 << TURN_BITS) - 1)));
    };
    const double sign = position < 0 ? -1 : 1, *x = row(0), *y = row(1), *z = row(2);
    const bool far = n >> 2 * TURN_BITS;
    for (int p = 0; p < pairs; ++p) {
      double cos = x[p] * y[p] - x[pairs + p] * y[pairs + p], sin = x[p] * y[pairs + p] + x[pairs + p] * y[p];
      if (far) {
        const double old = cos;
        cos = cos * z[p] - sin * z[pairs + p], sin = old * z[pairs + p] + sin * z[p];
      }
      c[p] = (float)cos, s[p] = (float)(sign * sin);
    }
  }

  // of `some` rows, the powers' sums behind the fast pairs
  void sum_slow(int some) {
    const int from = slow(), wide = pairs - from, count = POWERS * some;
    float flat[4 * POWERS + LANES];
    for (int first = 0; first < count; first += LANES) {  // LANES sums, of two rows, one or half of one
      const float* a = turned + first / POWERS * 2 * pairs;
      const float* next = first / POWERS + 1 < some ? a + 2 * pairs : a;
      const float* w = powers + first % POWERS * wide - from;
      F x[LANES];
      for (F& one : x) one = F{};
      for (int p = from; p < pairs; p += LANES)
        for (int j = 0; j < LANES; ++j) {
          const float* row = (j < POWERS ? a : next) + j % 2 * pairs;
          x[j] = fma(load(row + p), load(w + j % POWERS * wide + p), x[j]);
        }
      store(flat + first, sums(x));
    }
    for (int i = 0; i < count; ++i) turned[(i / POWERS * 2 + i % 2) * pairs + fast + i % POWERS / 2] = flat[i];
  }

  template <int R> void products(float* to) const {
    constexpr int WIDE = LANES == 16 ? 2 : 1;
    for (int k = 0; k < HALF_SPAN; k += WIDE * LANES) {
      F even[R][WIDE], odd[R][WIDE];
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < WIDE; ++i) even[r][i] = odd[r][i] = F{};
      for (int p = 0; p < used; ++p) {
        const float* at = tile + p * SPAN + k;
        F x[WIDE], y[WIDE];
        for (int i = 0; i < WIDE; ++i) x[i] = load(at + i * LANES), y[i] = load(at + HALF_SPAN + i * LANES);
        for (int r = 0; r < R; ++r) {
          const F a = splat(turned[2 * r * pairs + p]), b = splat(turned[(2 * r + 1) * pairs + p]);
          for (int i = 0; i < WIDE; ++i) even[r][i] = fma(a, x[i], even[r][i]), odd[r][i] = fma(b, y[i], odd[r][i]);
        }
      }
      I back;
      for (int i = 0; i < LANES; ++i) back[i] = LANES - 1 - i;
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < WIDE; ++i) {
          const F before = even[r][i] - odd[r][i];
          const int at = k + i * LANES;
          store(to + r * SPAN + HALF_SPAN + at, even[r][i] + odd[r][i]);
          store(to + r * SPAN + HALF_SPAN - LANES - at, KV_SHUFFLE(before, before, back));
        }
    }
  }
};

}  // namespace kv
