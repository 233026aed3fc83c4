// Attention of queries over packed pages and tokens held dense, as packedkv/attention.py defines it.
//
// For each sequence, KV head, block of rows (a row: one query token of one query head) and split of the tokens, a task
// goes through the tokens in tiles: keys are unpacked to float32 once for all rows, scored, their softmax is updated
// as it goes (online softmax), and values are unpacked and summed likewise. Splits are merged by the last of them to
// finish, in order.
//
// Packed keys and values are in the basis of the codes, their channels in the reader's order: queries are mapped to it
// once, and sums mapped back once (times a factor per channel, then a block-diagonal Hadamard; backwards for sums; or
// times a matrix of the head).
// Dense tokens are in the model's basis and have sums of their own. Scores of packed keys that are held without their
// mean get its term (mean.h).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

#include "mean.h"
#include "readers.h"
#include "simd.h"
#include "threads.h"

namespace kv {

// One role. kernels/structs.py reads this struct and Args.
struct Role {
  int64_t reader;            // number in READERS
  const uint8_t* tables;     // look-up tables, or null
  int64_t tables_head;       // bytes from one head's tables to the next one's; 0: all heads share them
  int64_t tables_batch;      // from one sequence's to the next one's; 0: all sequences share them
  const float* factor;       // [B or 1, H, D], or null
  int64_t factor_batch;      // numbers from one sequence's factors to the next one's
  int64_t order;             // of the Hadamard; 1: none
  const float* matrix;       // [H, D, D]: what rows of queries or sums are multiplied with instead; or null
  const uint8_t* dense;      // tokens held dense, or null
  int64_t dense_batch, dense_head, dense_token;  // strides, in bytes
  int64_t dense_kind;        // 0 fp16, 1 bf16, 2 float32
  int64_t planes[PLANES];
  int32_t options[OPTIONS];
};

// A run of tokens, oldest first: where its keys and values lie. At 0 and above: slot of the first token; below: ~x is
// its place among the tokens held dense. `position` is that of the first token, read where keys have no mean.
struct Piece {
  int64_t count, key, value, position;
};

struct Args {
  const float* q;            // [B, HQ, n, D], contiguous
  float* out;                // likewise
  float* lse;                // [B, HQ, n], or null
  const uint8_t* pages;      // [num_pages, H, page_bytes]
  const int32_t* table;      // [B, ...]
  const Piece* pieces;       // [B, pieces_each]
  const int32_t *low, *high; // [B, n]: tokens that a query sees; or null: all
  const float* mask;         // added to scores, by the strides below; or null
  const float* sinks;        // [HQ], or null
  int64_t mask_batch, mask_head, mask_row;
  int64_t page_bytes, page_tokens, table_row, pieces_each;
  int64_t batch, heads, group, queries, dim, threads;
  float scale, softcap;
  Role key, value;
  KeyMean mean;
};

constexpr int ROWS = 64;       // rows of a task
constexpr int SLACK = LANES;   // rows behind a tile that scores read and drop
constexpr int LEAST = 512;     // tokens of a split

// -- linear maps ------------------------------------------------------------------------------------------------------

// times the block-diagonal orthonormal Hadamard of this order, in place
inline void hadamard(float* x, int dim, int order) {
  if (order == 1) return;
  for (int half = 1; half < order; half *= 2)
    for (int i = 0; i < dim; i += 2 * half)
      for (int j = i; j < i + half; ++j) {
        const float a = x[j], b = x[j + half];
        x[j] = a + b, x[j + half] = a - b;
      }
  const float scale = 1.0f / std::sqrt((float)order);
  for (int i = 0; i < dim; ++i) x[i] *= scale;
}

inline const float* factors(const Role& role, const Args& a, int b, int h) {
  return role.factor ? role.factor + b * role.factor_batch + h * a.dim : nullptr;
}

// row M, in place, of a head's matrix, if there is one
inline void mix(const Role& role, int h, float* row, int dim) {
  if (!role.matrix) return;
  const float* m = role.matrix + (int64_t)h * dim * dim;
  alignas(64) float x[WIDEST] = {};
  for (int i = 0; i < dim; ++i)
    for (int c = 0; c < dim; c += LANES) store(x + c, fma(splat(row[i]), load(m + i * dim + c), load(x + c)));
  memcpy(row, x, sizeof(float) * dim);
}

// row[p] = x[channel[p]], or back
inline void permute(const int16_t* channel, float* row, int dim, bool back) {
  float x[WIDEST];
  memcpy(x, row, sizeof(float) * dim);
  for (int p = 0; p < dim; ++p) (back ? row[channel[p]] : row[p]) = x[back ? p : channel[p]];
}

// to a reader's order, or back
inline void reorder(const Role& role, float* row, int dim, bool back) {
  const Order order = READERS[role.reader].order;
  if (!order) return;
  int16_t channel[WIDEST];
  order(role.options, dim, channel);
  permute(channel, row, dim, back);
}

inline const uint8_t* tables_of(const Role& role, int b, int h) {
  return role.tables ? role.tables + b * role.tables_batch + h * role.tables_head : nullptr;
}

// channels to the places of a head's codes, or back
inline void place(const Role& role, int b, int h, float* row, int dim, bool back) {
  const uint8_t* tables = tables_of(role, b, h);
  if (tables && READERS[role.reader].placed) permute((const int16_t*)tables, row, dim, back);  // none: all are dense
}
// a row that the factor has multiplied to the basis of the codes, in the reader's order; or a row of sums back
inline void into_codes(const Role& role, int b, int h, float* row, int dim) {
  mix(role, h, row, dim);
  hadamard(row, dim, (int)role.order);
  place(role, b, h, row, dim, false);
  reorder(role, row, dim, false);
}
inline void out_of_codes(const Role& role, int b, int h, float* row, int dim) {
  reorder(role, row, dim, true);
  place(role, b, h, row, dim, true);
  hadamard(row, dim, (int)role.order);
  mix(role, h, row, dim);
}

// -- products ---------------------------------------------------------------------------------------------------------

// Memory that will be read soon. Few cache lines can be on their way at a time, so it is asked for bit by bit.
struct Ahead {
  const uint8_t *next, *end;
  void fetch(int lines) {
    for (; lines > 0 && next < end; --lines, next += 64) __builtin_prefetch(next);
  }
};

// s[r, t] = <q_r, k_t>; q [R, dim], k [tokens + SLACK, dim], s [R, TILE]
template <int R> inline void score(const float* q, const float* k, int tokens, int dim, float* s, Ahead& ahead) {
  constexpr int WIDE = R > 2 ? 4 : R, STEP = LANES / WIDE;  // tokens at a time: LANES sums in all
  for (int t = 0; t < tokens; t += STEP) {
    ahead.fetch(STEP);
    F x[LANES];
    for (F& one : x) one = F{};
    for (int c = 0; c < dim; c += LANES) {
      F y[STEP];
      for (int i = 0; i < STEP; ++i) y[i] = load(k + (t + i) * dim + c);
      for (int r = 0; r < R; ++r) {
        const F w = load(q + r * dim + c);
        for (int i = 0; i < STEP; ++i) x[r * STEP + i] = fma(w, y[i], x[r * STEP + i]);
      }
    }
    const F all = sums(x);
    float flat[LANES];
    store(flat, all);
    for (int r = 0; r < R; ++r) memcpy(s + r * TILE + t, flat + r * STEP, sizeof(float) * STEP);
  }
}

// acc_r += sum over t of p[r, t] v_t; p [R, TILE]
template <int R, int WIDE>
inline void gather(const float* p, const float* v, int tokens, int dim, float* acc, Ahead& ahead) {
  F x[R][WIDE];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < WIDE; ++i) x[r][i] = F{};
  for (int t = 0; t < tokens; ++t) {
    F y[WIDE];
    if (t % 4 == 0) ahead.fetch(2);
    for (int i = 0; i < WIDE; ++i) y[i] = load(v + t * dim + i * LANES);
    for (int r = 0; r < R; ++r) {
      const F w = splat(p[r * TILE + t]);
      for (int i = 0; i < WIDE; ++i) x[r][i] = fma(w, y[i], x[r][i]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < WIDE; ++i) {  // a tile's sum is added whole: fewer roundings of a large number
      float* to = acc + r * dim + i * LANES;
      store(to, load(to) + x[r][i]);
    }
}

template <int R>
inline void gather_all(const float* p, const float* v, int tokens, int dim, float* acc, Ahead& ahead) {
  constexpr int WIDE = LANES == 16 ? 4 : 2;
  int c = 0;
  for (; c + WIDE * LANES <= dim; c += WIDE * LANES) gather<R, WIDE>(p, v + c, tokens, dim, acc + c, ahead);
  for (; c < dim; c += LANES) gather<R, 1>(p, v + c, tokens, dim, acc + c, ahead);
}

// `with` gets blocks of up to four rows
template <class With> inline void by_four(int rows, const With& with) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) with(std::integral_constant<int, 4>(), r);
  if (rows - r == 3) with(std::integral_constant<int, 3>(), r);
  if (rows - r == 2) with(std::integral_constant<int, 2>(), r);
  if (rows - r == 1) with(std::integral_constant<int, 1>(), r);
}

// -- one task ---------------------------------------------------------------------------------------------------------

// A thread's memory, kept from call to call.
struct Scratch {
  std::vector<float> all;
  float* take(size_t numbers) {
    if (all.size() < numbers + 16) all.resize(numbers + 16);
    return (float*)(((uintptr_t)all.data() + 63) & ~(uintptr_t)63);
  }
};

// What a split leaves: sums [rows, dim] in the model's basis, largest scores and sums of weights [rows].
struct Part {
  float *acc, *most, *total;
};

struct Task {
  const Args& a;
  int b, h, row, rows;  // rows [row, row + rows) of the head's group * queries
  int64_t begin, end;   // tokens

  // tokens that some row sees, of [begin, end)
  void narrow() {
    if (!a.low) return;
    int64_t low = end, high = begin;
    for (int r = 0; r < rows; ++r) {
      const int64_t i = b * a.queries + (row + r) % a.queries;
      low = std::min<int64_t>(low, a.low[i]), high = std::max<int64_t>(high, a.high[i]);
    }
    begin = std::max(begin, low), end = std::min(end, high);
  }

  const uint8_t* page(int64_t slot) const {
    return a.pages + (a.table[b * a.table_row + slot / a.page_tokens] * a.heads + h) * a.page_bytes;
  }

  // `count` tokens from `at` on (a Piece's number); returns whether they are in the basis of the codes
  bool fill(const Role& role, int64_t at, int count, float* out) const {
    const int dim = (int)a.dim;
    if (at < 0) {
      const uint8_t* from = role.dense + b * role.dense_batch + h * role.dense_head + ~at * role.dense_token;
      unpack_numbers(from, role.dense_token, (int)role.dense_kind, count, dim, out);
      return false;
    }
    READERS[role.reader].unpack(
        {page(at), tables_of(role, b, h), role.planes, role.options, dim, (int)(at % a.page_tokens), count, out});
    return true;
  }

  void run(const Part& part) {
    const int dim = (int)a.dim;
    const size_t block = (size_t)rows * dim;
    static thread_local Scratch memory;
    const size_t term = a.mean ? MeanTerm::scratch(rows, (int)a.mean.pairs) : 0;
    float* at = memory.take(3 * block + (TILE + SLACK) * dim + rows * (TILE + LANES) + term);
    const auto next = [&at](size_t n) { float* p = at; at += n; return p; };
    float *q = next(block), *q_code = next(block), *acc_code = next(block), *tile = next((TILE + SLACK) * dim);
    float *s = next(rows * TILE), *total = next(rows * LANES), *more = next(term);
    float* acc = part.acc;
    std::fill(acc, acc + block, 0.0f);
    std::fill(acc_code, acc_code + block, 0.0f);
    std::fill(tile, tile + (TILE + SLACK) * dim, 0.0f);
    std::fill(total, total + rows * LANES, 0.0f);
    std::fill(part.most, part.most + rows, -INFINITY);
    std::fill(part.total, part.total + rows, 0.0f);
    narrow();
    if (begin >= end) return;

    const float* from = a.q + ((b * a.heads + h) * a.group * a.queries + row) * dim;
    const float* factor = factors(a.key, a, b, h);
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < dim; ++c) {
        q[r * dim + c] = from[r * dim + c] * a.scale;
        q_code[r * dim + c] = factor ? q[r * dim + c] * factor[c] : q[r * dim + c];
      }
      into_codes(a.key, b, h, q_code + r * dim, dim);
    }
    MeanTerm mean;
    if (a.mean) mean = MeanTerm(a.mean, b, h, q, rows, dim, more);

    int64_t first = 0;  // token at which the piece begins
    const Piece* pieces = a.pieces + b * a.pieces_each;
    for (int i = 0; i < a.pieces_each && first < end; first += pieces[i++].count) {
      const Piece& piece = pieces[i];
      int64_t t = std::max(begin, first);
      const int64_t last = std::min(end, first + piece.count);
      while (t < last) {
        const int64_t key = moved(piece.key, t - first), value = moved(piece.value, t - first);
        const int count = (int)std::min({(int64_t)TILE, last - t, left(key), left(value)});
        const bool coded = fill(a.key, key, count, tile);
        Ahead soon = key >= 0 ? ahead(key, count, key + last - t) : Ahead{};
        const float* against = coded ? q_code : q;
        by_four(rows, [&](auto n, int r) { score<n>(against + r * dim, tile, count, dim, s + r * TILE, soon); });
        if (coded && a.mean) mean.add(s, TILE, piece.position + t - first, count);
        soften(s, t, count, part, total, acc, acc_code);
        float* into = fill(a.value, value, count, tile) ? acc_code : acc;
        by_four(rows, [&](auto n, int r) { gather_all<n>(s + r * TILE, tile, count, dim, into + r * dim, soon); });
        soon.fetch(1 << 20);
        t += count;
      }
    }
    factor = factors(a.value, a, b, h);
    for (int r = 0; r < rows; ++r) {
      part.total[r] = sum(load(total + r * LANES));
      out_of_codes(a.value, b, h, acc_code + r * dim, dim);
      for (int c = 0; c < dim; ++c) {
        const float x = acc_code[r * dim + c];
        acc[r * dim + c] += factor ? x * factor[c] : x;
      }
    }
  }

  static int64_t moved(int64_t at, int64_t by) { return at < 0 ? at - by : at + by; }
  int64_t left(int64_t at) const { return at < 0 ? TILE : a.page_tokens - at % a.page_tokens; }

  // the part of the next page that matches these tokens' part of this one; the run ends before slot `end_slot`
  Ahead ahead(int64_t slot, int count, int64_t end_slot) const {
    const int64_t next = slot + a.page_tokens, place = slot % a.page_tokens;
    if (next - place >= end_slot) return {};
    const uint8_t* p = page(next);
    return {p + place * a.page_bytes / a.page_tokens, p + (place + count) * a.page_bytes / a.page_tokens};
  }

  static void scaled(float* x, int n, float by) {
    for (int i = 0; i < n; i += LANES) store(x + i, load(x + i) * splat(by));
  }

  // scores s [rows, TILE] of the tokens [t, t + count) to weights, which are added to total [rows, LANES]; what was
  // summed before is scaled
  void soften(float* s, int64_t t, int count, const Part& part, float* total, float* acc, float* acc_code) const {
    const int dim = (int)a.dim;
    const int padded = (count + LANES - 1) / LANES * LANES;
    for (int r = 0; r < rows; ++r) {
      float* x = s + r * TILE;
      if (a.softcap > 0)
        for (int i = 0; i < padded; i += LANES) store(x + i, splat(a.softcap) * tanh(load(x + i) / splat(a.softcap)));
      const int query = (int)((row + r) % a.queries), head = (int)(h * a.group + (row + r) / a.queries);
      if (a.mask) {
        const float* m = a.mask + b * a.mask_batch + head * a.mask_head + query * a.mask_row + t;
        for (int i = 0; i < count; ++i) x[i] += m[i];
      }
      for (int i = count; i < padded; ++i) x[i] = -INFINITY;
      if (a.low) {
        const int64_t low = a.low[b * a.queries + query] - t, high = a.high[b * a.queries + query] - t;
        for (int i = 0; i < count && i < low; ++i) x[i] = -INFINITY;
        for (int i = (int)std::max<int64_t>(high, 0); i < count; ++i) x[i] = -INFINITY;
      }
      const float before = part.most[r];
      I above{};
      for (int i = 0; i < padded; i += LANES) above |= load(x + i) > splat(before);
      if (any(above)) {
        F most = splat(before);
        for (int i = 0; i < padded; i += LANES) most = max(load(x + i), most);
        const float now = largest(most), rescale = before == -INFINITY ? 0.0f : std::exp(before - now);
        part.most[r] = now;
        scaled(total + r * LANES, LANES, rescale), scaled(acc + r * dim, dim, rescale);
        scaled(acc_code + r * dim, dim, rescale);
      }
      const F base = splat(part.most[r] == -INFINITY ? 0.0f : part.most[r]);
      F weights = load(total + r * LANES);
      for (int i = 0; i < padded; i += LANES) {
        const F p = exp(load(x + i) - base);
        store(x + i, p);
        weights += p;
      }
      store(total + r * LANES, weights);
    }
  }
};

}  // namespace kv
