// Encoding new tokens into packed pages, to the bytes of the reference codec.
//
// A task takes tokens of one role, sequence and head: they are widened to float32, keys lose their mean where they are
// held without it, all are brought to the basis of the codes (times a matrix of the head, if there is one, and a factor
// per channel, then a block-diagonal Hadamard, as kernels/spec.py defines it), and an encoder writes them. Sums are
// taken in double and rounded once, as in ops/hadamard.py and, of integers, in ops/exact.py.
//
// Tokens with NaN, Inf or a magnitude above 65504 are stored as zero bytes (with all of their block) and raise *bad to
// 1; tokens behind the pages are dropped and raise it to 2.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>

#include "encoders.h"
#include "threads.h"

namespace kv {

// One role. kernels/structs.py reads the structs of this file.
struct EncodeRole {
  const uint8_t* x;            // new tokens [B, H, tokens, D], channels side by side
  int64_t batch, head, token;  // strides of x, in bytes
  int64_t kind;                // 0 fp16, 1 bf16, 2 float32, 3 float32 that is rounded to fp16 first
  int64_t tokens;              // a multiple of block; 0: the role is not written
  int64_t encoder;             // number in ENCODERS
  int64_t block;               // tokens of a block
  const uint8_t* tables;       // as attend.h's Role
  int64_t tables_head, tables_batch;
  const void* factor;          // [B or 1, H, D], float32, or double reciprocals; null: none
  int64_t factor_batch;
  int64_t divides;             // whether factor holds reciprocals
  int64_t order;               // of the Hadamard; 1: none
  const float* matrix;         // [H, D, D] of whole numbers, or null
  int64_t planes[PLANES];      // byte of the page at which each plane begins; -1 behind the last
  int64_t sizes[PLANES];       // bytes of a block in each plane
  int32_t options[OPTIONS];
};

// What is subtracted from keys: their mean, turned as the model turns it.
struct Less {
  const float* mean;             // [B or 1, H, D], or null: nothing
  const float *cosines, *sines;  // [B or 1, tokens, pairs]
  int64_t mean_batch, angles_batch;
  int64_t pairs;                 // the first 2 pairs channels turn
  int64_t interleaved;           // pairs are channels 2 p, 2 p + 1, not p, p + pairs

  // the operations of ops/rope.py, in the same order
  void take(float* row, int64_t b, int64_t h, int64_t token, int dim) const {
    const float* m = mean + b * mean_batch + h * dim;
    const float *c = cosines + b * angles_batch + token * pairs, *s = sines + b * angles_batch + token * pairs;
    const int64_t apart = interleaved ? 1 : pairs, step = interleaved ? 2 : 1;
    for (int64_t p = 0; p < pairs; ++p) {
      const int64_t x = p * step, y = x + apart;
      row[x] -= m[x] * c[p] - m[y] * s[p], row[y] -= m[y] * c[p] + m[x] * s[p];
    }
    for (int64_t i = 2 * pairs; i < dim; ++i) row[i] -= m[i];
  }
};

struct EncodeArgs {
  uint8_t* pages;              // [num_pages, H, page_bytes]
  const int32_t* table;        // [B, ...]
  const int32_t* first;        // [B]: slot of token 0
  int32_t* bad;
  int64_t page_bytes, page_tokens, table_row, columns, batch, heads, dim, threads;
  EncodeRole key, value;
  Less less;                   // of keys

  const EncodeRole& role(int i) const { return i ? value : key; }
};

constexpr float HALF_MAX = 65504.0f;
constexpr int SOME = 32;                 // tokens of a task, where blocks are no longer
constexpr int64_t WORTH = 1 << 15;       // numbers below which other threads cost more than they save

// n numbers of a kind as float32; whether all of them can be held
inline bool widen_row(const uint8_t* from, int64_t kind, int n, float* to) {
  I wrong{};
  for (int c = 0; c < n; c += LANES) {
    F x;
    if (kind == 0) x = load_halves(from + 2 * c);
    else if (kind == 1) x = (F)(widen<uint16_t>(from + 2 * c) << 16);
    else memcpy(&x, from + 4 * c, sizeof x);
    const F size = (F)((I)x & 0x7fffffff);
    wrong |= ~(I)(size <= splat(HALF_MAX));
    store(to + c, kind == 3 ? rounded_to_half(x) : x);
  }
  int any = 0;
  for (int i = 0; i < LANES; ++i) any |= wrong[i];
  return !any;
}

// in place, block by block
inline void hadamard_row(float* row, int dim, int order) {
  double x[WIDEST];
  for (int c = 0; c < dim; ++c) x[c] = row[c] + 0.0;  // sums of -0 are 0, as where they begin with 0
  for (int half = 1; half < order; half *= 2)
    for (int i = 0; i < dim; i += 2 * half)
      for (int j = i; j < i + half; ++j) {
        const double a = x[j], b = x[j + half];
        x[j] = a + b, x[j + half] = a - b;
      }
  const double scale = std::sqrt(1.0 / (double)order);
  for (int c = 0; c < dim; ++c) row[c] = (float)(x[c] * scale);
}

// in place, times a matrix [dim, dim] of integers: rotate_exactly of ops/exact.py, with as many bits
inline void mix_row(float* row, const float* matrix, int dim) {
  constexpr int BITS = 15;  // KERNEL_BITS
  float top = 0.0f;
  for (int c = 0; c < dim; ++c) top = std::max(top, std::fabs(row[c]));
  int exponent;
  std::frexp(top, &exponent);
  const double to = std::ldexp(1.0, BITS - exponent), back = std::ldexp(1.0, exponent - 2 * BITS);
  alignas(64) double sums[WIDEST] = {};
  for (int i = 0; i < dim; ++i) {
    const double x = nearest(row[i] * to);
    const float* m = matrix + (int64_t)i * dim;
    for (int c = 0; c < dim; ++c) sums[c] += x * m[c];
  }
  for (int c = 0; c < dim; ++c) row[c] = (float)(sums[c] * back);
}

// `count` tokens of a sequence and head from token `from` on, in one page
inline void encode_tokens(const EncodeArgs& a, const EncodeRole& r, int64_t b, int64_t h, int64_t from, int64_t count,
                          float* rows) {
  const int64_t slot = a.first[b] + from, column = slot / a.page_tokens, place = slot % a.page_tokens;
  const int dim = (int)a.dim;
  if (column >= a.columns) {
    __atomic_store_n(a.bad, 2, __ATOMIC_RELAXED);
    return;
  }
  uint8_t* page = a.pages + (a.table[b * a.table_row + column] * a.heads + h) * a.page_bytes;
  bool good[MOST_TOKENS], all = true;
  for (int64_t t = 0; t < count; ++t) {
    float* row = rows + t * dim;
    good[t] = widen_row(r.x + b * r.batch + h * r.head + (from + t) * r.token, r.kind, dim, row);
    if (!good[t]) memset(row, 0, sizeof(float) * dim), all = false;
    if (a.less.mean && &r == &a.key) a.less.take(row, b, h, from + t, dim);
    if (r.matrix) mix_row(row, r.matrix + h * dim * dim, dim);
    const int64_t at = b * r.factor_batch + h * dim;
    if (r.factor && r.divides)
      for (int c = 0; c < dim; ++c) row[c] = (float)(row[c] * ((const double*)r.factor)[at + c]);
    else if (r.factor)
      for (int c = 0; c < dim; ++c) row[c] *= ((const float*)r.factor)[at + c];
    if (r.order > 1) hadamard_row(row, dim, (int)r.order);
  }
  const uint8_t* tables = r.tables ? r.tables + b * r.tables_batch + h * r.tables_head : nullptr;
  const New made{rows, page, tables, r.planes, r.sizes, r.options,
                 dim, (int)r.block, (int)place, (int)count};
  ENCODERS[r.encoder].encode(made);
  if (all) return;
  __atomic_store_n(a.bad, 1, __ATOMIC_RELAXED);
  for (int64_t t = 0; t < count; ++t)
    for (int p = 0; !good[t] && p < PLANES && r.planes[p] >= 0; ++p) memset(made.at(p, (int)t), 0, r.sizes[p]);
}

inline void encode(const EncodeArgs& a) {
  int64_t steps[2], tasks[2], numbers = 0;
  for (int i = 0; i < 2; ++i) {
    const EncodeRole& r = a.role(i);
    steps[i] = std::max<int64_t>(r.block, SOME / r.block * r.block);
    tasks[i] = a.batch * a.heads * ((r.tokens + steps[i] - 1) / steps[i]);
    numbers += a.batch * a.heads * r.tokens * a.dim;
  }
  share((int)(tasks[0] + tasks[1]), numbers < WORTH ? 1 : (int)a.threads, [&](int number) {
    const int i = number >= tasks[0];
    const EncodeRole& r = a.role(i);
    const int64_t task = number - (i ? tasks[0] : 0), runs = (r.tokens + steps[i] - 1) / steps[i];
    const int64_t b = task / runs / a.heads, h = task / runs % a.heads;
    const int64_t end = std::min(r.tokens, (task % runs + 1) * steps[i]);
    std::unique_ptr<float[]> rows(new float[steps[i] * a.dim]);
    for (int64_t from = task % runs * steps[i]; from < end;) {
      const int64_t left = a.page_tokens - (a.first[b] + from) % a.page_tokens, count = std::min(left, end - from);
      encode_tokens(a, r, b, h, from, count, rows.get());
      from += count;
    }
  });
}

}  // namespace kv
