// Between the model's basis and a codec's, for one row of D numbers: lane holds channels lane + 32 i. Of 80 channels
// the last run of 32 has 16: what the other lanes have there is a number, which nothing stores.
#pragma once
#include "args.cuh"

namespace kv {

template <int D> constexpr int RUNS_OF = (D + 31) / 32;
template <int D> KV_DEV bool is_channel(int c) { return D % 32 == 0 || c < D; }
// the lane's channel of run i, or its first one where there is none
template <int D> KV_DEV int channel_or_first(int lane, int i) {
  if constexpr (D % 32 == 0) return lane + 32 * i;
  else return lane + 32 * i < D ? lane + 32 * i : lane;
}

// order ** -0.5 of a power of two, exact or rounded once
KV_DEV float orthonormal(int order) {
  float unit = 1.0f;
  for (; order >= 4; order >>= 2) unit *= 0.5f;
  return order == 2 ? unit * 0.70710678118654752f : unit;
}

// x <- diag(H, ..., H) x for N rows at once, whose exchanges then wait for one another no longer than those of one row;
// H the orthonormal Sylvester-Hadamard matrix of that order, its own inverse
template <int D, int N> KV_DEV void hadamard_rows(float (&x)[N][RUNS_OF<D>], int order, int lane) {
  KV_UNROLL
  for (int bit = 1; bit < 32; bit *= 2) {
    if (bit < order) {
      KV_UNROLL
      for (int i = 0; i < N * RUNS_OF<D>; ++i) {
        float& own = x[i / RUNS_OF<D>][i % RUNS_OF<D>];
        const float other = shfl_xor(own, bit);
        own = lane & bit ? other - own : own + other;
      }
    }
  }
  KV_UNROLL
  for (int step = 1; step < RUNS_OF<D>; step *= 2) {
    if (32 * step < order) {
      KV_UNROLL
      for (int i = 0; i < N * RUNS_OF<D>; ++i) {
        const int row = i / RUNS_OF<D>, at = i % RUNS_OF<D>;
        if (!(at & step) && at + step < RUNS_OF<D>) {
          const float a = x[row][at], b = x[row][at + step];
          x[row][at] = a + b;
          x[row][at + step] = a - b;
        }
      }
    }
  }
  if (order > 1) {
    const float unit = orthonormal(order);
    KV_UNROLL
    for (int i = 0; i < N * RUNS_OF<D>; ++i) x[i / RUNS_OF<D>][i % RUNS_OF<D>] *= unit;
  }
}
template <int D> KV_DEV void hadamard_row(float (&x)[RUNS_OF<D>], int order, int lane) {
  float rows[1][RUNS_OF<D>];
  KV_UNROLL
  for (int i = 0; i < RUNS_OF<D>; ++i) rows[0][i] = x[i];
  hadamard_rows<D>(rows, order, lane);
  KV_UNROLL
  for (int i = 0; i < RUNS_OF<D>; ++i) x[i] = rows[0][i];
}

template <int D> KV_DEV void multiply_row(float (&x)[RUNS_OF<D>], const Side& side, int batch, int head, int lane) {
  if (!side.factor) return;
  const float* at = side.factor + batch * side.factor_batch + (int64_t)head * D;
  KV_UNROLL
  for (int i = 0; i < RUNS_OF<D>; ++i)
    if (is_channel<D>(lane + 32 * i)) x[i] *= at[lane + 32 * i];
}

// Rows of D floats of 8 heads in shared memory, spread so that lanes 4 g + j, which read head g or 2j and distant
// channels, access different banks.
KV_CONSTEXPR int skew(int channel) { return channel + channel / 4; }
KV_CONSTEXPR int row_floats(int head_dim) { return head_dim + head_dim / 4 + 1; }

KV_DEV float warp_sum(float x) {
  KV_UNROLL
  for (int bit = 16; bit; bit /= 2) x += shfl_xor(x, bit);
  return x;
}
KV_DEV float warp_max(float x) {
  KV_UNROLL
  for (int bit = 16; bit; bit /= 2) x = maximum(x, shfl_xor(x, bit));
  return x;
}

// How a warp holds rows: a lane has EACH neighbouring channels, LANES lanes a row, of which the last may have none.
template <int D> struct RowLanes {
  KV_CONST int EACH = D > 256 ? D / 32 : 8, USED = D / EACH;
  KV_CONST int LANES = USED > 16 ? 32 : USED > 8 ? 16 : USED > 4 ? 8 : 4, ROWS = 32 / LANES;
  static_assert(D % EACH == 0 && USED <= 32, "whole vectors of channels");
};

// E neighbouring numbers; `wide`: they begin at 16 bytes
template <int E> KV_DEV void load_numbers(float (&x)[E], const void* from, int64_t at, int kind, bool wide) {
  KV_UNROLL
  for (int i = 0; i < E; i += 8) {
    if (kind == 2) {
      KV_UNROLL
      for (int k = 0; k < 8; k += 4) {
        const uint32_t* f = (const uint32_t*)from + at + i + k;
        const Words4 w = wide ? *(const Words4*)f : Words4{f[0], f[1], f[2], f[3]};
        x[i + k] = bits_float(w.a), x[i + k + 1] = bits_float(w.b);
        x[i + k + 2] = bits_float(w.c), x[i + k + 3] = bits_float(w.d);
      }
      continue;
    }
    const uint16_t* f = (const uint16_t*)from + at + i;
    auto pair = [f](int k) { return (uint32_t)f[k] | (uint32_t)f[k + 1] << 16; };
    const Words4 w = wide ? *(const Words4*)f : Words4{pair(0), pair(2), pair(4), pair(6)};
    const uint32_t words[4] = {w.a, w.b, w.c, w.d};
    KV_UNROLL
    for (int k = 0; k < 4; ++k) {
      const uint16_t low = (uint16_t)words[k], high = (uint16_t)(words[k] >> 16);
      x[i + 2 * k] = kind == 0 ? half_float(low) : bf16_float(low);
      x[i + 2 * k + 1] = kind == 0 ? half_float(high) : bf16_float(high);
    }
  }
}

// fp16 saturates, because a rotated row may exceed what it was made of; NaN stays, and what is copied
KV_DEV uint32_t number16(float x, int kind, bool copied) {
  const float near = x != x || copied ? x : minimum(maximum(x, -65504.0f), 65504.0f);
  return kind == 0 ? half_bits(near) : bf16_bits(x);
}
template <int E>
KV_DEV void store_numbers(const float (&x)[E], void* to, int64_t at, int kind, bool copied, bool wide) {
  KV_UNROLL
  for (int i = 0; i < E; i += 8) {
    if (kind == 2) {
      uint32_t* f = (uint32_t*)to + at + i;
      uint32_t words[8];
      KV_UNROLL
      for (int k = 0; k < 8; ++k) words[k] = float_bits(x[i + k]);
      if (wide) {
        *(Words4*)f = Words4{words[0], words[1], words[2], words[3]};
        *(Words4*)(f + 4) = Words4{words[4], words[5], words[6], words[7]};
      } else {
        KV_UNROLL
        for (int k = 0; k < 8; ++k) f[k] = words[k];
      }
      continue;
    }
    uint16_t* f = (uint16_t*)to + at + i;
    uint32_t words[4];
    KV_UNROLL
    for (int k = 0; k < 4; ++k)
      words[k] = number16(x[i + 2 * k], kind, copied) | number16(x[i + 2 * k + 1], kind, copied) << 16;
    if (wide) {
      *(Words4*)f = Words4{words[0], words[1], words[2], words[3]};
    } else {
      KV_UNROLL
      for (int k = 0; k < 8; ++k) f[k] = (uint16_t)(words[k / 2] >> k % 2 * 16);
    }
  }
}

// as hadamard_row, for rows held so
template <int D, int E> KV_DEV void rotate(float (&x)[E], int order, int lane) {
  KV_UNROLL
  for (int step = 1; step < E; step *= 2) {
    if (step >= order) continue;
    KV_UNROLL
    for (int e = 0; e < E; ++e) {
      if (e & step) continue;
      const float a = x[e], b = x[e + step];
      x[e] = a + b;
      x[e + step] = a - b;
    }
  }
  KV_UNROLL
  for (int bit = 1; bit < RowLanes<D>::LANES; bit *= 2) {
    if (bit * E >= order) continue;
    KV_UNROLL
    for (int e = 0; e < E; ++e) {
      const float other = shfl_xor(x[e], bit);
      x[e] = lane & bit ? other - x[e] : x[e] + other;
    }
  }
  if (order > 1) {
    const float unit = orthonormal(order);
    KV_UNROLL
    for (int e = 0; e < E; ++e) x[e] *= unit;
  }
}

}  // namespace kv
