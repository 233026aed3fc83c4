// Unpack pages to dense keys and values in the basis of the codes, for a prefill over packed history; those of Mixed
// readers in the model's basis, as to bring a mean into theirs would cost as much. Or all of them in the model's basis,
// for a prefill whose queries are as many as its keys.
//
// One warp per 16 tokens of a KV head and sequence. The readers are those of decode attention; numbers are rounded
// once, to fp16 or bf16; keys with a sketch twice, because its signs are brought into the basis of the codes, and keys
// that are held without their mean (mean.cuh) once more, because it is brought there and added.
#pragma once
#include "mean.cuh"

namespace kv {

struct UnpackArgs {
  const uint8_t* pages;       // [num_pages, H, page_bytes]
  const int32_t* page_table;  // [B, columns]
  const uint8_t* k_table;     // look-up tables of KV head h at k_table + h * k_table_head, or as source_of
  const uint8_t* v_table;
  void* keys;                 // count rows of D numbers for each sequence and KV head, by the strides below
  void* values;
  int64_t k_table_head, v_table_head;
  int64_t table_row;
  int64_t page_bytes;         // from one page to the next; its codes may take less
  int64_t out_batch, out_head, out_token;  // of keys and of values, in numbers; multiples of 8
  int32_t heads;
  int32_t first;              // token of the first row, a multiple of T
  int32_t count;              // tokens to unpack; the last tile may be cut
  int32_t kind;               // 0 fp16, 1 bf16
  KeyMean mean;
  const float* factor;        // of the keys, as in Side, where they have no mean
  int64_t factor_batch, block;
  const uint8_t *k_matrix, *v_matrix;  // that bring tokens of Mixed readers back to the model's basis, as in Side
  const int32_t* ends;        // null, or [B + 1]: sequences of lengths of their own lie end to end, sequence b in the
                              // rows [ends[b], ends[b + 1]) by out_token; `count` and out_batch are not used then
  const float *k_factor, *v_factor;  // with k_order, v_order > 0: what [H, D] multiplies rows that are brought back to
  int64_t k_order, v_order;          // the model's basis, after a Hadamard rotation of that order; null: ones
  const int32_t* near;        // null, or with `ends` [B, 3]: of sequence b the tokens [near[3 b], near[3 b + 1]), whole
  void *near_keys, *near_values;  // groups of near_group tokens, are unpacked there as well: group n to the near_group
  int64_t near_group;         // rows from near[3 b + 2] + 2 n near_group on
};

// rows of a sequence: how many, and the number at which they begin in keys and in values
struct OutRows {
  int32_t count;
  int64_t begin;
};

// fp16 saturates: a rotated key may be larger than what the cache was given
KV_DEV uint16_t round16(float x, int kind) {
  return kind == 0 ? half_bits(minimum(maximum(x, -65504.0f), 65504.0f)) : bf16_bits(x);
}

template <class R, int T, class H>
KV_DEV void unpack_keys(float (&x)[2 * R::K_REGS], const Planes<R, T>& planes, const H& held, int token, int part,
                        int lane) {
  uint32_t r[R::K_REGS];
  Unpacks<R, true>::Reader::keys(planes, held, token, part, lane, r);  // dead slots as well
  if constexpr (R::K_BLOCKED) {
    uint32_t s[R::K_REGS], z[R::K_REGS];
    R::k_block(planes, token / R::BLOCK, part, s, z);
    KV_UNROLL
    for (int e = 0; e < 2 * R::K_REGS; ++e) {
      const int shift = e % 2 * 16;
      const float raw = half_float((uint16_t)(r[e / 2] >> shift)) * (R::k_weight(e) * R::K_UNIT);
      x[e] = raw * half_float((uint16_t)(s[e / 2] >> shift)) + half_float((uint16_t)(z[e / 2] >> shift));
    }
  } else {
    KV_UNROLL
    for (int e = 0; e < 2 * R::K_REGS; ++e) {
      const int group = e / 2 / (R::K_REGS / R::GROUPS);
      x[e] = half_float((uint16_t)(r[e / 2] >> e % 2 * 16)) * R::k_weight(e) * R::k_scale(planes, token, group);
      if constexpr (R::HAS_K_ZERO) x[e] += R::k_zero(planes, token, group);
    }
  }
}

template <class R, int T, class H>
KV_DEV void unpack_values(float (&x)[2 * R::V_REGS], const Planes<R, T>& planes, const H& held, int token, int part,
                          int lane) {
  if constexpr (is_paired<R>(0)) {
    R::floats(planes, token, part, x);
  } else {
    uint32_t r[R::V_REGS];
    Unpacks<R, true>::Reader::values(planes, held, token, part, lane, r);
    KV_UNROLL
    for (int e = 0; e < 2 * R::V_REGS; ++e) {
      x[e] = half_float((uint16_t)(r[e / 2] >> e % 2 * 16)) * R::v_weight(e);
      if constexpr (R::V_BLOCKED) {
        const int c = R::v_channel(part, e);
        if (c < 0) continue;
        x[e] *= R::v_bscale(planes, token / 32, c);
        if constexpr (R::V_BLOCK_ZERO) x[e] += R::v_bzero(planes, token / 32, c);
      } else {
        if constexpr (R::HAS_V_SCALE) x[e] *= R::v_scale(planes, token);
        if constexpr (R::HAS_V_ZERO) x[e] += R::v_zero(planes, token);
      }
    }
  }
}

// P tokens to a page, fetched T at a time (T = 16, or 32 where a codec has blocks of tokens);
// grid (ceil(count / (T WARPS)), H, B)
template <class K, class V, int D, int P, int T, int WARPS, int PAIRS = 0> struct Unpacker {
  using Own = OwnTables<K, V>;
  KV_CONST int TABLES = (align16(K::TABLE) + align16(V::TABLE) + Own::BYTES + 127) / 128 * 128;
  KV_CONST int TILE = (page_bytes<K, V>(T) + 127) / 128 * 128;
  KV_CONST int ROW = D + 8;  // halves; the odd 16 bytes keep rows out of each other's banks
  KV_CONST bool NEAR = K::K_BLOCKED || V::V_BLOCKED;  // there are groups of tokens
  KV_CONST int SHARED = with_reach<K, V>(TABLES + WARPS * (TILE + 16 * ROW * 2));

  KV_DEV static void store(const UnpackArgs& a, const OutRows& of, void* to, const uint16_t* rows, int h, int first,
                           int lane) {
    uint16_t* out = (uint16_t*)to + of.begin + h * a.out_head + (first - a.first) * a.out_token;
    KV_UNROLL
    for (int at = lane; at < 16 * D / 8; at += 32) {
      const int token = at / (D / 8), c = at % (D / 8) * 8;
      if (first - a.first + token < of.count)
        *(Words4*)(out + token * a.out_token + c) = *(const Words4*)(rows + token * ROW + c);
    }
  }

  // Adds the vector that a sketch's signs encode, s H sigma, whose product with q is that of sigma with H (s q). A lane
  // has the signs, times their scale, of a quarter of a token's channels: those of part j.
  KV_DEV static void add_sketch(uint16_t* row, const float (&x)[2 * K::K_REGS], const float* s, int kind, int j) {
    constexpr int N = D / 4;
    float y[N];
    KV_UNROLL
    for (int e = 0; e < 2 * K::K_REGS; ++e)
      if (K::k_channel(0, e) >= D) y[K::k_channel(0, e) - D] = x[e];
    KV_UNROLL
    for (int step = 1; step < N; step *= 2) {
      KV_UNROLL
      for (int i = 0; i < N; ++i) {
        if (i & step) continue;
        const float a = y[i], b = y[i + step];
        y[i] = a + b;
        y[i + step] = a - b;
      }
    }
    KV_UNROLL
    for (int bit = 1; bit < 4; bit *= 2) {
      KV_UNROLL
      for (int i = 0; i < N; ++i) {
        const float other = shfl_xor(y[i], bit);
        y[i] = j & bit ? other - y[i] : y[i] + other;
      }
    }
    constexpr float UNIT = D == 64 ? 0.125f : D == 128 ? 0.088388347648318441f : D == 256 ? 0.0625f
        : 0.044194173824159221f;  // D ** -0.5
    KV_UNROLL
    for (int i = 0; i < N; ++i) {
      const int c = j * N + i;
      const float stage = kind == 0 ? half_float(row[c]) : bf16_float(row[c]);
      row[c] = round16(stage + s[c] * y[i] * UNIT, kind);
    }
  }

  // outliers, in place of the codes' numbers
  template <class R, int TOKENS>
  KV_DEV static void put_back(uint16_t* rows, const Planes<R, TOKENS>& planes, int first, int kind, int lane) {
    auto take = [&](int token, int channel, float x) { rows[token * ROW + channel] = round16(x, kind); };
    R::each_outlier(planes, first, lane, take);
    sync_warp();
  }

  // adds the mean, turned to the positions of 16 tokens from `first` on, in the basis of the codes; a lane has channels
  // lane + 32 i
  KV_DEV static void add_mean(const UnpackArgs& a, uint16_t* rows, int b, int h, int first, int lane, int kind) {
    constexpr int N = RUNS_OF<D>;
    const MeanTable table(a.mean, h, PAIRS);
    const float* mean = a.mean.mean + b * a.mean.batch + (int64_t)h * D;
    float m[N], other[N], c[N], s[N], by_c[N], by_s[N], over[N];
    KV_UNROLL
    for (int i = 0; i < N; ++i) {
      const int channel = channel_or_first<D>(lane, i);
      const uint32_t of = table.of_channel(channel);
      const int pair = (int)(of >> 16 & 0x3fff);
      m[i] = mean[channel];
      other[i] = of >> 30 ? mean[of & 0xffff] : -mean[of & 0xffff];
      table.turn(a.mean.placed[b] + first, pair, c[i], s[i]);
      table.turn(1, pair, by_c[i], by_s[i]);
      over[i] = a.factor ? 1.0f / a.factor[b * a.factor_batch + (int64_t)h * D + channel] : 1.0f;
    }
    KV_NO_UNROLL
    for (int token = 0; token < 16; ++token) {
      float x[N];
      KV_UNROLL
      for (int i = 0; i < N; ++i) {
        x[i] = (m[i] * c[i] + other[i] * s[i]) * over[i];
        MeanTable::turn_by(c[i], s[i], by_c[i], by_s[i]);
      }
      hadamard_row<D>(x, (int)a.block, lane);
      KV_UNROLL
      for (int i = 0; i < N; ++i) {
        if (!is_channel<D>(lane + 32 * i)) continue;
        uint16_t& to = rows[token * ROW + lane + 32 * i];
        to = round16((kind == 0 ? half_float(to) : bf16_float(to)) + x[i], kind);
      }
    }
    sync_warp();
  }

  // back to the model's basis
  KV_DEV static void mix(uint16_t* rows, const uint8_t* matrix, int h, int lane, int kind) {
    mix_tile<D>(rows, ROW, MixedBy<D>(matrix, h), lane, [kind](float x) { return round16(x, kind); });
  }

  // back to the model's basis where a rotation and a factor were applied, from fp16
  KV_DEV static void turn(uint16_t* rows, const float* factor, int order, int kind, int lane) {
    using Held = RowLanes<D>;
    constexpr int E = Held::EACH;
    const int c = lane % Held::LANES * E;
    KV_NO_UNROLL
    for (int first = 0; first < 16; first += Held::ROWS) {
      uint16_t* row = rows + (first + lane / Held::LANES) * ROW;
      float x[E];
      KV_UNROLL
      for (int e = 0; e < E; ++e) x[e] = 0.0f;
      if (c < D) load_numbers(x, row, c, 0, true);
      rotate<D>(x, order, lane);
      if (c >= D) continue;
      if (factor) {
        KV_UNROLL
        for (int e = 0; e < E; ++e) x[e] *= factor[c + e];
      }
      store_numbers(x, row, c, kind, false, true);
    }
    sync_warp();
  }

  KV_DEV static void run(const UnpackArgs& a) {
    KV_DYNAMIC_SHARED(shared);
    const int warp = thread() / 32, lane = thread() % 32, g = lane / 4, j = lane % 4, h = block_y(), b = block_z();
    uint8_t* k_table = shared;
    uint8_t* v_table = shared + align16(K::TABLE);
    uint8_t* k_own = v_table + align16(V::TABLE);
    uint8_t* v_own = k_own + Own::VALUES;
    uint8_t* tile = shared + TABLES + warp * (TILE + 16 * ROW * 2);
    uint16_t* rows = (uint16_t*)(tile + TILE);
    const int first = a.first + (block_x() * WARPS + warp) * T;
    OutRows of{a.count, b * a.out_batch}, near{0, 0};
    int count = a.count;
    if (a.ends) {
      count = of.count = a.ends[b + 1] - a.ends[b];
      of.begin = a.ends[b] * a.out_token;
      if constexpr (NEAR) {
        if (a.near) {
          count = a.near[3 * b + 1];
          near.count = first >= a.near[3 * b] ? count : 0;
          near.begin = (a.near[3 * b + 2] + first / a.near_group * a.near_group) * a.out_token;
        }
      }
      if (block_x() * WARPS * T >= count) return;  // made for the longest sequence
    }
    const bool mine = first < a.first + count;
    if (mine) {
      const int64_t page = a.page_table[b * a.table_row + first / P];
      fetch_tile<K, V, P, T>(tile, a.pages + (page * a.heads + h) * a.page_bytes, first % P, lane);
    }
    copy_commit();
    const uint8_t* keys = source_of<K>(a.k_table, a.k_table_head, b, h);
    const uint8_t* values = source_of<V>(a.v_table, a.v_table_head, b, h);
    if (K::TABLE) K::fill(k_table, keys, thread(), WARPS * 32);
    if (V::TABLE) V::fill(v_table, values, thread(), WARPS * 32);
    Own::fill(k_own, keys, values, thread(), WARPS * 32);
    copy_wait<0>();
    sync_threads();
    if (!mine) return;
    const Planes<K, T> key_planes{tile};
    const Planes<V, T> value_planes{tile + planes_bytes<K>(T)};
    const auto k_held = held_of_keys<K>(k_table, k_own, j, lane);
    const auto v_held = held_of_values<V>(v_table, v_own, g, lane);
    const int k_kind = a.k_order ? 0 : a.kind, v_kind = a.v_order ? 0 : a.kind;  // until they are turned
    KV_NO_UNROLL
    for (int sub = 0; sub < T; sub += 16) {
      KV_UNROLL
      for (int half = 0; half < 2; ++half) {
        float x[2 * K::K_REGS];
        unpack_keys<K, T>(x, key_planes, k_held, sub + 8 * half + g, j, lane);
        KV_UNROLL
        for (int e = 0; e < 2 * K::K_REGS; ++e) {
          const int c = K::k_channel(j, e);
          const int kind = is_mixed<K>(0) ? 0 : k_kind;
          if (c >= 0 && c < D) rows[(8 * half + g) * ROW + model_channel<K>(k_own, c)] = round16(x[e], kind);
        }
        if constexpr (is_sketched<K>(0)) {
          sync_warp();
          add_sketch(rows + (8 * half + g) * ROW, x, K::sketch(a.k_table + h * a.k_table_head), k_kind, j);
        }
      }
      sync_warp();
      if constexpr (scratch_bytes<K>(0) > 0) put_back<K, T>(rows, key_planes, sub, k_kind, lane);
      if constexpr (is_mixed<K>(0)) mix(rows, a.k_matrix, h, lane, k_kind);
      if constexpr (PAIRS > 0) add_mean(a, rows, b, h, first + sub, lane, k_kind);
      if (a.k_order) turn(rows, a.k_factor ? a.k_factor + (int64_t)h * D : nullptr, (int)a.k_order, a.kind, lane);
      store(a, of, a.keys, rows, h, first + sub, lane);
      if (NEAR && near.count) store(a, near, a.near_keys, rows, h, first + sub, lane);
      sync_warp();
      KV_UNROLL
      for (int turn = 0; turn < 4; ++turn) {
        const int token = 4 * turn + j;
        float x[2 * V::V_REGS];
        unpack_values<V, T>(x, value_planes, v_held, sub + token, g, lane);
        KV_UNROLL
        for (int e = 0; e < 2 * V::V_REGS; ++e) {
          const int c = V::v_channel(g, e);
          if constexpr (is_centred<V>(0)) x[e] += V::centre(v_own, c);
          const int kind = is_mixed<V>(0) ? 0 : v_kind;
          if (c >= 0) rows[token * ROW + model_channel<V>(v_own, c)] = round16(x[e], kind);
        }
      }
      sync_warp();
      if constexpr (scratch_bytes<V>(0) > 0) put_back<V, T>(rows, value_planes, sub, v_kind, lane);
      if constexpr (is_mixed<V>(0)) mix(rows, a.v_matrix, h, lane, v_kind);
      if (a.v_order) turn(rows, a.v_factor ? a.v_factor + (int64_t)h * D : nullptr, (int)a.v_order, a.kind, lane);
      store(a, of, a.values, rows, h, first + sub, lane);
      if (NEAR && near.count) store(a, near, a.near_values, rows, h, first + sub, lane);
      sync_warp();
    }
  }
};

}  // namespace kv
