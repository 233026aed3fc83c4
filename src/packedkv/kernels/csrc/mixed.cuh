// Products of rows with a [D, D] matrix of their KV head, for codecs that mix all channels of a head: queries into the
// basis of the codes, outputs and unpacked tokens out of it, new tokens into it.
//
// A matrix lies in lines of eight numbers in fp16: line (k, c), the c-th of D in the k-th of D / 8 runs, has rows 8 k
// to 8 k + 7 of column c. So a lane reads 16 bytes of its column, and four lanes those of the tensor core's operand.
// Readers have `MixedBy::BYTES` for each head: float unit, 12 bytes, then lines of the matrix over the unit. Encoders
// have lines of integers of 8 bits, those of the high halves of 2^15 times the matrix, then those of the low halves.
#pragma once
#include "args.cuh"

namespace kv {

// A reader or an encoder whose channels are mixed by a matrix of the head, in place of a factor and a rotation.
template <class R> struct Mixed : R {
  KV_CONST bool MIXED = true;
};
template <class R> KV_CONSTEXPR auto is_mixed(int) -> decltype(R::MIXED) { return R::MIXED; }
template <class R> KV_CONSTEXPR bool is_mixed(...) { return false; }

template <int D> struct MixedBy {
  KV_CONST int BYTES = 16 + 2 * D * D;
  const uint8_t* base;
  KV_DEV MixedBy(const uint8_t* matrix, int head) : base(matrix + (int64_t)head * BYTES) {}
  KV_DEV float unit() const { return *(const float*)base; }
  KV_DEV Words4 line(int k, int c) const { return ((const Words4*)(base + 16))[k * D + c]; }

  KV_DEV static float number(const Words4& w, int e) {
    const uint32_t two = e < 2 ? w.a : e < 4 ? w.b : e < 6 ? w.c : w.d;
    return half_float((uint16_t)(e % 2 ? two >> 16 : two));
  }
};

// x <- x M, of which a lane has channels lane + 32 i
template <int D> KV_DEV void mix_row(float (&x)[D / 32], const MixedBy<D>& by, int lane) {
  constexpr int N = D / 32;
  float y[N];
  KV_UNROLL
  for (int i = 0; i < N; ++i) y[i] = 0.0f;
  KV_UNROLL
  for (int i = 0; i < N; ++i) {
    KV_NO_UNROLL
    for (int k = 0; k < 4; ++k) {
      Words4 w[N];
      KV_UNROLL
      for (int c = 0; c < N; ++c) w[c] = by.line(4 * i + k, lane + 32 * c);
      KV_UNROLL
      for (int e = 0; e < 8; ++e) {
        const float own = shfl(x[i], 8 * k + e);
        KV_UNROLL
        for (int c = 0; c < N; ++c) y[c] += own * MixedBy<D>::number(w[c], e);
      }
    }
  }
  KV_UNROLL
  for (int i = 0; i < N; ++i) x[i] = y[i] * by.unit();
}

// Sixteen rows of D halves in shared memory, `stride` apart, times the matrix and in 16 bits again: `put` rounds.
template <int D, class Put> KV_DEV void mix_tile(uint16_t* rows, int stride, const MixedBy<D>& by, int lane, Put put) {
  const int g = lane / 4, j = lane % 4;
  const float unit = by.unit();
  uint32_t a[D / 16][4];
  KV_UNROLL
  for (int k = 0; k < D / 16; ++k) {
    KV_UNROLL
    for (int i = 0; i < 4; ++i)
      a[k][i] = *(const uint32_t*)(rows + (g + i % 2 * 8) * stride + 16 * k + i / 2 * 8 + 2 * j);
  }
  sync_warp();  // all have been read
  const uint32_t* words = (const uint32_t*)(by.base + 16) + j;
  KV_NO_UNROLL
  for (int c = 0; c < D; c += 8) {
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    KV_UNROLL
    for (int k = 0; k < D / 16; ++k)
      mma(d, a[k][0], a[k][1], a[k][2], a[k][3], words[4 * (2 * k * D + c + g)], words[4 * ((2 * k + 1) * D + c + g)]);
    KV_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint32_t low = put(d[2 * half] * unit), high = put(d[2 * half + 1] * unit);
      *(uint32_t*)(rows + (g + 8 * half) * stride + c + 2 * j) = low | high << 16;
    }
  }
  sync_warp();
}

}  // namespace kv
