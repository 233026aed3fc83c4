// Encoding into pages: rows of keys and values, each one token of one head, to the bytes of the reference codec.
//
// A kernel is instantiated by a few lines of source:
//
//     #include "encode.cuh"
//     #include "encode_saw.cuh"
//     KV_KERNEL void KV_BOUNDS(kv::ENCODE_THREADS, 1) kv_encode(KV_GRID_CONSTANT kv::EncodeArgs args) {
//       kv::encode_pair<kv::Role<kv::EncodeSaw<128>, 128>, kv::Role<kv::EncodeSaw<128>>>(args);
//     }
//
//   encode_pair<K, V>          keys in block_z = 0, values in block_z = 1: one launch for both. Grid (x, B, 2)
//   encode_side<R>(args, args.key)      one role only. Grid (x, B, 1)
//   Any x >= 1 is valid, since the blocks stride over the H * N rows of a sequence; max over roles of
//   ceil(H * N / ROLE::BLOCK_ROWS) gives every warp one step. ENCODE_THREADS threads, no dynamic shared memory.
//
// Role<Codec, ORDER, FACTOR, MEAN> transforms into the code basis, bit for bit as the reference. MEAN: x less R_t mu,
// mu_c cos -+ mu_d sin of channels c, d that turn together, every product and sum rounded. Then x, by FACTOR
//   FACTOR_NONE, FACTOR_TIMES  times factor[b, h, c], float32
//   FACTOR_OVER                over factor[b, h, c], float32
//   FACTOR_INVERSE             over a float32 norm[b, h, c] of which factor holds the reciprocals, 1.0 / norm in
//                              float64: the same bits as FACTOR_OVER, for a quarter of the instructions
// then the block-diagonal Hadamard matrix of ORDER (1: none), ops/hadamard.py: sums in double, times ORDER**-0.5,
// rounded to fp32.
//
// A row holding NaN, Inf or a magnitude above 65504 is stored as zeros and raises *bad to 1; a token past the capacity
// is not stored and raises *bad to 2. Where pages keep their first tokens in 16 bit as well (`kept`), those are written
// too, as they came, or as zeros.
//
// With KV_SLOTS defined there is one sequence, and each token says where it goes (EncodeArgs::slots): the tokens of all
// requests of a step, in one launch.
//
// Row codecs: a struct template on D, in encode_<name>.cuh, lanes of a warp share a row:
//
//   TEAM = 32                  lanes of a row
//   PLANES, plane_bytes(p)     bytes of one token in plane p, as layout() of the Python codec has them
//   SCRATCH                    bytes of shared memory per warp that row() needs besides, 16-byte aligned; 0: none
//   row(const float (&y)[D / 32], int lane, const uint8_t* tables, uint8_t* out, uint8_t* scratch)
//                              y[i] is channel lane + 32 i in the code basis. All 32 lanes call it with the same row.
//                              Writes every byte of all planes of this token to `out` (shared memory: plane p starts at
//                              row_offset<Codec>(p), 4-byte aligned; `out` itself at 16). Ends with kv::sync_warp().
//
// Quad codecs do four rows per warp, eight lanes each, and pack what a lane holds without shared memory:
//
//   TEAM = 8
//   PLANES, plane_bytes(p)
//   quad(const float (&y)[numbers_of(D, 8)], int part, uint32_t keep, bool live, uint8_t* const (&at)[PLANES])
//                              y[4 i + e] is channel 32 i + 4 part + e of the row of lanes 8 r .. 8 r + 7 (part = lane
//                              % 8). at[p] is where plane p of the row lies in global memory. Stores only if live;
//                              every stored word is and-ed with keep (0 for a row that cannot be held). All lanes must
//                              reach every exchange. Of 80 channels the last four parts of the third run of 32 have
//                              what the first four have: place_of<D>(i, part) is the part of run i whose channels these
//                              are, and both write the same bytes.
#pragma once
#include "encode_args.cuh"

namespace kv {

constexpr int ENCODE_WARPS = 4;
constexpr int ENCODE_THREADS = 32 * ENCODE_WARPS;
constexpr float HALF_MAX = 65504.0f;

enum Factor { FACTOR_NONE, FACTOR_TIMES, FACTOR_OVER, FACTOR_INVERSE };

template <bool FIRST, class A, class B> struct Either { using Type = A; };
template <class A, class B> struct Either<false, A, B> { using Type = B; };
template <bool FIRST, class A, class B> using either = typename Either<FIRST, A, B>::Type;
template <class T> struct IsVoid { static constexpr bool YES = false; };
template <> struct IsVoid<void> { static constexpr bool YES = true; };

// how rows of a role are transformed into the code basis
template <class C, int ROTATION = 1, int HOW = FACTOR_NONE, bool LESS = false> struct Role {
  using Codec = C;
  KV_CONST int ORDER = ROTATION;
  KV_CONST int FACTOR = HOW;
  KV_CONST bool MEAN = LESS;
  KV_CONST int WARP_ROWS = 32 / C::TEAM;
  KV_CONST int BLOCK_ROWS = ENCODE_WARPS * WARP_ROWS;
};

// where plane p of a token begins in row()'s `out`
template <class C> KV_CONSTEXPR int row_offset(int p) {
  int offset = 0;
  for (int q = 0; q < p; q++) offset += (C::plane_bytes(q) + 3) / 4 * 4;
  return offset;
}

// 2^-k/2 as Python's (2^k)**-0.5 gives it
KV_CONSTEXPR double inverse_root(int order) {
  double c = 1.0;
  for (; order >= 4; order /= 4) c *= 0.5;
  return order == 2 ? c * 0.70710678118654757 : c;
}

// -- into the code basis ----------------------------------------------------------------------------------------------
// FOURS: a lane has four neighbouring channels, then those 4 TEAM further
template <int TEAM, bool FOURS = TEAM != 32> KV_DEV int channel_of(int part, int k) {
  return FOURS ? 4 * TEAM * (k / 4) + 4 * part + k % 4 : part + TEAM * k;
}

// numbers of a row that a lane has
KV_CONSTEXPR int numbers_of(int dim, int team) { return team == 8 ? (dim + 31) / 32 * 4 : dim / team; }
template <int D> KV_DEV int place_of(int run, int part) { return D % 32 && 32 * run + 4 * part >= D ? part - 4 : part; }
// by how many channels the lane's last four lie further ahead
template <int D, int TEAM> KV_DEV int ahead_of(int part) {
  return D % 32 && TEAM == 8 && D / 32 * 32 + 4 * part >= D ? 16 : 0;
}
template <int TEAM, int N, bool FOURS = TEAM != 32> KV_DEV int channel_at(int part, int k, int ahead) {
  return channel_of<TEAM, FOURS>(part, k) - (k / 4 == N / 4 - 1 ? ahead : 0);
}

// A lane's part of a row, as loaded, w, and in fp32, y. Two steps, so that page addresses are computed while the row
// is being loaded.
template <int TEAM, bool FOURS = TEAM != 32, int N>
KV_DEV void load_words(uint32_t (&w)[N], const void* x, int64_t at, int part, int kind, int ahead = 0) {
  if (!FOURS) {
    if (kind == 2) {
      KV_UNROLL for (int k = 0; k < N; k++) w[k] = ((const uint32_t*)x)[at + part + 32 * k];
    } else {
      KV_UNROLL for (int k = 0; k < N; k++) w[k] = ((const uint16_t*)x)[at + part + 32 * k];
    }
  } else if (kind == 2) {
    const uint64_t* from = (const uint64_t*)((const float*)x + at + 4 * part);
    KV_UNROLL for (int k = 0; k < N; k += 2) {
      uint64_t two = from[2 * TEAM * (k / 4) + k % 4 / 2 - (k / 4 == N / 4 - 1 ? ahead / 2 : 0)];
      w[k] = (uint32_t)two;
      w[k + 1] = (uint32_t)(two >> 32);
    }
  } else {
    const uint64_t* from = (const uint64_t*)((const uint16_t*)x + at + 4 * part);
    KV_UNROLL for (int i = 0; i < N / 4; i++) {
      uint64_t four = from[TEAM * i - (i == N / 4 - 1 ? ahead / 4 : 0)];
      w[2 * i] = (uint32_t)four;
      w[2 * i + 1] = (uint32_t)(four >> 32);
    }
    KV_UNROLL for (int k = N / 2; k < N; k++) w[k] = 0;
  }
}
template <int TEAM, bool FOURS = TEAM != 32, int N> KV_DEV void widen(float (&y)[N], const uint32_t (&w)[N], int kind) {
  if (kind == 2) {
    KV_UNROLL for (int k = 0; k < N; k++) y[k] = bits_float(w[k]);
  } else if (kind == 1) {
    KV_UNROLL for (int k = 0; k < N; k++) {
      y[k] = !FOURS ? bits_float(w[k] << 16) : bits_float(k % 2 ? w[k / 2] & 0xffff0000u : w[k / 2] << 16);
    }
  } else {
    KV_UNROLL for (int k = 0; k < N; k++) {
      y[k] = half_float((uint16_t)(!FOURS ? w[k] : w[k / 2] >> 16 * (k % 2)));
    }
  }
}
template <int TEAM, int N> KV_DEV void load_row(float (&y)[N], const void* x, int64_t at, int part, int kind) {
  uint32_t w[N];
  load_words<TEAM>(w, x, at, part, kind);
  widen<TEAM>(y, w, kind);
}

// x by a role's factor. Why a reciprocal in double gives the quotient as IEEE rounds it: the product is within 2^-51 of
// x / norm, relatively, and x / norm is 2^-49 or more away from where rounding to float changes: such a midpoint m has
// 25 bits, x - norm m is a multiple of the last of the 49 bits of norm m, and not 0. (Below 2^-126 floats have fewer
// bits and this does not hold; all scales are above 2^-25, and codes there 0 either way.)
template <int HOW> KV_DEV float factored(float x, const float* factor, int64_t i) {
  if (HOW == FACTOR_INVERSE) return (float)mul((double)x, ((const double*)factor)[i]);
  return HOW == FACTOR_TIMES ? mul(x, factor[i]) : div(x, factor[i]);
}

KV_DEV void load_four(uint32_t* to, const float* from) {
  const Words4 w = *(const Words4*)from;
  to[0] = w.a, to[1] = w.b, to[2] = w.c, to[3] = w.d;
}

// The mean of a head, turned to token n's position. Where all channels turn, pairs D / 2 apart, lanes with four
// neighbouring channels load those at a time: little code, because a step's few rows wait for that most of all.
template <int TEAM, int D, bool FOURS = TEAM != 32, int N>
KV_DEV void turned_mean(float (&x)[N], const EncodeMean& m, int b, int head, uint32_t n, int part, int ahead = 0) {
  const float* mean = m.mean + b * m.batch + (int64_t)head * D;
  const int64_t at = b * m.turn_batch + n * m.turn_token;
  const float *cosines = m.cosines + at, *sines = m.sines + at;
  if (FOURS && m.turning == D && !m.interleaved && ((uint64_t)cosines | (uint64_t)sines) % 16 == 0) {
    KV_UNROLL for (int k = 0; k < N; k += 4) {
      const int channel = channel_at<TEAM, N, FOURS>(part, k, ahead);
      const int pair = channel < D / 2 ? channel : channel - D / 2;
      uint32_t own[4], other[4], c[4], s[4];
      load_four(own, mean + channel);
      load_four(other, mean + (channel < D / 2 ? channel + D / 2 : channel - D / 2));
      load_four(c, cosines + pair), load_four(s, sines + pair);
      KV_UNROLL for (int e = 0; e < 4; e++) {
        const float first = mul(bits_float(own[e]), bits_float(c[e]));
        const float with = mul(bits_float(other[e]), bits_float(s[e]));
        x[k + e] = channel < D / 2 ? sub(first, with) : add(first, with);
      }
    }
  } else {
    const int half = m.turning / 2;
    KV_UNROLL for (int k = 0; k < N; k++) {
      const int c = channel_at<TEAM, N, FOURS>(part, k, ahead);
      x[k] = mean[c];
      if (c < m.turning) {
        const bool second = m.interleaved ? c % 2 : c >= half;
        const int pair = m.interleaved ? c / 2 : second ? c - half : c;
        const float other = mul(mean[m.interleaved ? c ^ 1 : second ? c - half : c + half], sines[pair]);
        x[k] = mul(x[k], cosines[pair]);
        x[k] = second ? add(x[k], other) : sub(x[k], other);
      }
    }
  }
}

// GPUs with few units for doubles, all but sm_80, 90 and 100, add integers instead where those are as exact.
#ifndef KV_FEW_DOUBLES
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 800 && __CUDA_ARCH__ != 900 && __CUDA_ARCH__ != 1000
#define KV_FEW_DOUBLES 1
#else
#define KV_FEW_DOUBLES 0
#endif
#endif

KV_DEV double plus(double s, bool minus, double other) { return fma(s, minus ? -1.0 : 1.0, other); }
KV_DEV int64_t plus(int64_t s, bool minus, int64_t other) { return (minus ? -s : s) + other; }
KV_DEV double partner(double s, int lane_bit) { return shfl_xor(s, lane_bit); }
KV_DEV int64_t partner(int64_t s, int lane_bit) {
  const uint32_t low = shfl_xor((uint32_t)s, lane_bit), high = shfl_xor((uint32_t)((uint64_t)s >> 32), lane_bit);
  return (int64_t)((uint64_t)high << 32 | low);
}

// s H, of doubles or integers
template <int TEAM, int ORDER, class T, int N> KV_DEV void butterflies(T (&s)[N], int part) {
  KV_UNROLL for (int bit = 1; bit < ORDER; bit *= 2) {
    int lane_bit = TEAM == 32 ? (bit < 32 ? bit : 0) : (bit >= 4 && bit < 32 ? bit / 4 : 0);
    int step = TEAM == 32 ? bit / 32 : bit < 4 ? bit : bit / 8;  // between partners within a lane
    if (lane_bit) {
      KV_UNROLL for (int k = 0; k < N; k++) s[k] = plus(s[k], part & lane_bit, partner(s[k], lane_bit));
    } else {
      KV_UNROLL for (int k = 0; k < N; k++) {
        if (k & step) continue;
        T a = s[k], b = s[k | step];
        s[k] = a + b;
        s[k | step] = a - b;
      }
    }
  }
}

// x 2^32, and whether that is whole and below 2^44: sums of 512 such numbers are exact as doubles too
KV_DEV bool as_integer(float x, int64_t& y) {
  const uint32_t bits = float_bits(x), exponent = bits >> 23 & 255u;
  const int64_t mantissa = (int64_t)(bits & 0x7fffffu | (exponent ? 0x800000u : 0u));
  const int by = (int)exponent - 118;  // the mantissa counts from 2^-150 on
  const int down = by < 0 ? (by > -24 ? -by : 24) : 0;
  const int64_t size = by < 0 ? mantissa >> down : mantissa << (by < 20 ? by : 20);
  y = bits >> 31 ? -size : size;
  return by <= 20 && (by >= 0 || size << down == mantissa);
}

// y H, every sum exact in double for 16-bit x, so that the order of additions does not matter
template <int TEAM, int ORDER, int N> KV_DEV void rotate_row(float (&y)[N], int part) {
  if (KV_FEW_DOUBLES && N <= 16) {  // longer rows would spill registers, as theirs are held for both ways
    int64_t s[N];
    bool whole = true;
    KV_UNROLL for (int k = 0; k < N; k++) whole &= as_integer(y[k], s[k]);
    if (!any(!whole)) {
      butterflies<TEAM, ORDER>(s, part);
      KV_UNROLL for (int k = 0; k < N; k++) y[k] = (float)mul((double)s[k], inverse_root(ORDER) * 0x1p-32);
      return;
    }
  }
  double s[N];
  KV_UNROLL for (int k = 0; k < N; k++) s[k] = (double)y[k];
  butterflies<TEAM, ORDER>(s, part);
  KV_UNROLL for (int k = 0; k < N; k++) y[k] = (float)mul(s[k], inverse_root(ORDER));
}

// -- from shared memory to a page -------------------------------------------------------------------------------------
template <class T, int BYTES> KV_DEV void copy_as(uint8_t* to, const uint8_t* from, int lane, bool keep) {
  KV_UNROLL for (int i = lane; i < BYTES / (int)sizeof(T); i += 32) ((T*)to)[i] = keep ? ((const T*)from)[i] : (T)0;
}
template <class C, int P = 0>
KV_DEV void copy_planes(uint8_t* const (&at)[C::PLANES], const uint8_t* out, int lane, bool keep) {
  if constexpr (P < C::PLANES) {
    constexpr int BYTES = C::plane_bytes(P);
    const uint8_t* from = out + row_offset<C>(P);
    if constexpr (BYTES % 4 == 0) copy_as<uint32_t, BYTES>(at[P], from, lane, keep);
    else if constexpr (BYTES % 2 == 0) copy_as<uint16_t, BYTES>(at[P], from, lane, keep);
    else copy_as<uint8_t, BYTES>(at[P], from, lane, keep);
    copy_planes<C, P + 1>(at, out, lane, keep);
  }
}

KV_DEV void raise(int32_t* bad, int32_t level) {
  if (bad) atomic_max(bad, level);
}

KV_DEV int64_t page_of(const EncodeArgs& a, int b, uint32_t slot) {
#ifdef KV_SLOTS
  return slot / (uint32_t)a.page_tokens;
#else
  return a.page_table[b * a.table_row + slot / (uint32_t)a.page_tokens];
#endif
}

// where the planes of a token, or of a block of GROUP tokens, begin in its page
template <class C, int GROUP = 1>
KV_DEV void locate(uint8_t* (&at)[C::PLANES], const EncodeArgs& a, const EncodeSide& s, int b, int head,
                   uint32_t slot) {
  int64_t page = page_of(a, b, slot);
  int32_t place = (int32_t)(slot % (uint32_t)a.page_tokens / GROUP), blocks = a.page_tokens / GROUP;
  uint8_t* plane = a.pages + (page * a.heads + head) * a.page_bytes + s.plane;
  KV_UNROLL for (int p = 0; p < C::PLANES; p++) {
    at[p] = plane + place * C::plane_bytes(p);
    plane += align16(C::plane_bytes(p) * blocks);
  }
}

// With KV_KEPT: a row as it came, if its token is among the first `kept` of its page, into the rows of 16 bit behind
// its codes. Rows that cannot be held are zeros by now.
template <int TEAM, int D, bool FOURS = TEAM != 32, int N>
KV_DEV void keep_row(const float (&y)[N], const EncodeArgs& a, const EncodeSide& s, int b, int head, uint32_t slot,
                     int part, bool live, int ahead = 0) {
#ifdef KV_KEPT
  const uint32_t place = slot % (uint32_t)a.page_tokens;
  if (!live || place >= (uint32_t)a.kept) return;
  auto bits = [&](float x) -> uint32_t { return a.kind == 1 ? bf16_bits(x) : half_bits(x); };
  uint16_t* to = (uint16_t*)(a.pages + (page_of(a, b, slot) * a.heads + head) * a.page_bytes + s.rows) + place * D;
  if constexpr (!FOURS) {
    KV_UNROLL for (int k = 0; k < N; k++) to[channel_of<TEAM, FOURS>(part, k)] = (uint16_t)bits(y[k]);
  } else {
    KV_UNROLL for (int k = 0; k < N; k += 2)
      *(uint32_t*)(to + channel_at<TEAM, N, FOURS>(part, k, ahead)) = bits(y[k]) | bits(y[k + 1]) << 16;
  }
#endif
}

template <class R> KV_DEV void encode_rows(const EncodeArgs& a, const EncodeSide& s, int kind) {
  using C = typename R::Codec;
  constexpr int TEAM = C::TEAM, N = numbers_of(C::DIM, TEAM);
  int lane = thread() % 32, warp = thread() / 32, part = lane % TEAM, b = block_y();
  const int ahead = ahead_of<C::DIM, TEAM>(part);
  uint32_t tokens = (uint32_t)s.tokens, rows = a.heads * tokens, step = (uint32_t)(grid_x() * R::BLOCK_ROWS);
  uint32_t start = (uint32_t)(block_x() * ENCODE_WARPS + warp) * R::WARP_ROWS;
  if (start >= rows) return;
#ifndef KV_SLOTS
  uint32_t first_slot = (uint32_t)s.first[b];
#endif
  for (; start < rows; start += step) {
    uint32_t row = start + lane / TEAM;
    bool live = row < rows;
    if (!live) row = start;
    uint32_t head = row / tokens, n = row - head * tokens;
    uint32_t w[N];
#ifdef KV_SLOTS
    const int64_t to = a.slots[n];
#endif
    load_words<TEAM>(w, s.x, b * s.batch + head * s.head + n * s.token, part, kind, ahead);
    float less[N];
    if constexpr (R::MEAN) turned_mean<TEAM, C::DIM>(less, a.mean, b, head, n, part, ahead);
#ifdef KV_SLOTS
    live = live && to >= 0;
    uint32_t slot = to < 0 ? 0 : (uint32_t)to;
#else
    uint32_t slot = first_slot + n;
    if (slot >= (uint32_t)a.capacity) {
      if (live && part == 0) raise(a.bad, 2);
      live = false;
      slot = 0;
    }
#endif
    if (!any(live)) continue;
    uint8_t* at[C::PLANES];
    locate<C>(at, a, s, b, head, slot);
    float y[N];
    widen<TEAM>(y, w, kind);

    bool good = true;  // false for NaN too
    KV_UNROLL for (int k = 0; k < N; k++) good &= magnitude(y[k]) <= HALF_MAX;
    good = (ballot(!good) >> (lane - part) & (uint32_t)((1ull << TEAM) - 1)) == 0;
    if (!good) {
      if (live && part == 0) raise(a.bad, 1);
      KV_UNROLL for (int k = 0; k < N; k++) y[k] = 0.0f;
    }
    keep_row<TEAM, C::DIM>(y, a, s, b, head, slot, part, live, ahead);
    if constexpr (R::MEAN) {
      KV_UNROLL for (int k = 0; k < N; k++) y[k] = sub(y[k], less[k]);
    }
    if (R::FACTOR != FACTOR_NONE) {
      int64_t at = b * s.factor_batch + head * C::DIM;
      KV_UNROLL for (int k = 0; k < N; k++)
        y[k] = factored<R::FACTOR>(y[k], s.factor, at + channel_at<TEAM, N>(part, k, ahead));
    }
    if constexpr (R::ORDER > 1) rotate_row<TEAM, R::ORDER>(y, part);

    if constexpr (TEAM == 32) {
      constexpr int OUT = align16(row_offset<C>(C::PLANES)), EACH = OUT + align16(C::SCRATCH);
      KV_SHARED(uint8_t, shared, ENCODE_WARPS * EACH);
      uint8_t* out = shared + warp * EACH;
      C::row(y, lane, s.tables + head * s.table_head, out, out + OUT);
      copy_planes<C>(at, out, lane, good);
      sync_warp();  // before the next row overwrites it
    } else {
      C::quad(y, part, good ? 0xffffffffu : 0u, live, at);
    }
  }
}

// all rows of one role
template <class R> KV_DEV void encode_side(const EncodeArgs& a, const EncodeSide& s) {
  // four rows at a time are little work: separate code for each kind of x, so that the load is waited for late
  if (R::Codec::TEAM == 32) encode_rows<R>(a, s, a.kind);
  else if (a.kind == 1) encode_rows<R>(a, s, 1);
  else if (a.kind == 0) encode_rows<R>(a, s, 0);
  else encode_rows<R>(a, s, 2);
}

// keys and values in one launch
template <class K, class V> KV_DEV void encode_pair(const EncodeArgs& a) {
  if (block_z() == 0) encode_side<K>(a, a.key);
  else encode_side<V>(a, a.value);
}

}  // namespace kv
