// Vectors of floats, as wide as the instruction set that this is compiled for: 16 (AVX-512), 8 (AVX2) or 4 lanes
// (NEON and anything else). Compiler vectors do the arithmetic; intrinsics only what compilers do not find by themselves.
//
// Nothing is contracted by the compiler (-ffp-contract=off): numbers that readers unpack are the reference's bit by
// bit, and sums say `fma` where they mean it.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace kv {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float F __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t I __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t U __attribute__((vector_size(4 * LANES), may_alias));

inline F splat(float x) { return x - F{}; }
inline I splat_int(int32_t x) { return x - I{}; }
inline F load(const float* p) {
  F x;
  memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float* p, F x) { memcpy(p, &x, sizeof x); }
inline F choose(I mask, F a, F b) { return (F)(((I)a & mask) | ((I)b & ~mask)); }
inline F max(F a, F b) { return a > b ? a : b; }  // NaN in a gives b
inline F convert(I x) { return __builtin_convertvector(x, F); }

inline F fma(F a, F b, F c) {
#if defined(__AVX512F__)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// each lane's bits, rotated to the left
inline U rotated(U x, U by) {
#if defined(__AVX512F__)
  return (U)_mm512_rolv_epi32((__m512i)x, (__m512i)by);
#else
  return x << by | x >> (-by & 31u);
#endif
}

// 0, 1, 2, ...
inline I iota() {
  I x;
  for (int i = 0; i < LANES; ++i) x[i] = i;
  return x;
}

#if defined(__clang__)
#define KV_SHUFFLE(a, b, mask) kv::picked(a, b, mask)
inline F picked(F a, F b, I mask) {
  F x;
  for (int i = 0; i < LANES; ++i) x[i] = mask[i] < LANES ? a[mask[i]] : b[mask[i] - LANES];
  return x;
}
#else
#define KV_SHUFFLE(a, b, mask) __builtin_shuffle(a, b, mask)
#endif

// -- sums over lanes --------------------------------------------------------------------------------------------------

// Lanes whose number has the bit HALF are b's, the others a's; to each is added the lane HALF away.
template <int HALF> inline F fold(F a, F b) {
  I other;
  for (int i = 0; i < LANES; ++i) other[i] = (i & HALF ? LANES : 0) + (i ^ HALF);
#if defined(__AVX512F__)  // a blend runs on two ports, a shuffle on one
  constexpr __mmask16 B = HALF == 8 ? 0xff00 : HALF == 4 ? 0xf0f0 : HALF == 2 ? 0xcccc : 0xaaaa;
  const F first = (F)_mm512_mask_blend_ps(B, (__m512)a, (__m512)b);
#else
  I same;
  for (int i = 0; i < LANES; ++i) same[i] = (i & HALF ? LANES : 0) + i;
  const F first = KV_SHUFFLE(a, b, same);
#endif
  return first + KV_SHUFFLE(a, b, other);
}

// lane i: the sum of x[i]'s lanes; x has LANES vectors. Depth first, so that few of them are held at a time
template <int HALF = 1> inline F sums(const F* x, int first = 0) {
  if constexpr (HALF == LANES) return x[first];
  else return fold<HALF>(sums<2 * HALF>(x, first), sums<2 * HALF>(x, first + HALF));
}

// x's lanes joined in pairs, then pairs of pairs, ...; every lane has the result
template <int HALF = LANES / 2, class Join> inline F reduced(F x, const Join& join) {
  I other;
  for (int i = 0; i < LANES; ++i) other[i] = i ^ HALF;
  x = join(x, KV_SHUFFLE(x, x, other));
  if constexpr (HALF > 1) return reduced<HALF / 2>(x, join);
  else return x;
}
inline float sum(F x) {
  return reduced(x, [](F a, F b) { return a + b; })[0];
}
inline float largest(F x) {
  return reduced(x, [](F a, F b) { return max(a, b); })[0];
}

// bit i: whether lane i of a comparison is true
inline uint32_t which(I mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined(__aarch64__)
  return vaddvq_u32((uint32x4_t)(mask & (splat_int(1) << iota())));
#else
  uint32_t bits = 0;
  for (int i = 0; i < LANES; ++i) bits |= ((uint32_t)mask[i] & 1u) << i;
  return bits;
#endif
}
inline bool any(I mask) { return which(mask) != 0; }

// from[at[0]], from[at[1]], ...
inline F picked_from(const float* from, const int16_t* at) {
#if defined(__AVX512F__)
  return (F)_mm512_i32gather_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)at)), from, 4);
#else
  F x;
  for (int i = 0; i < LANES; ++i) x[i] = from[at[i]];
  return x;
#endif
}

// LANES / 4 rows of four numbers, each `at` bytes behind a table's begin
inline F four_by_four(const void* table, const uint32_t* at) {
  const char* from = (const char*)table;
#if defined(__AVX512F__)
  uint64_t first, last;  // two addresses a load: loads are what takes longest
  memcpy(&first, at, 8), memcpy(&last, at + 2, 8);
  __m512 x = _mm512_castps128_ps512(_mm_loadu_ps((const float*)(from + (uint32_t)first)));
  x = _mm512_insertf32x4(x, _mm_loadu_ps((const float*)(from + (first >> 32))), 1);
  x = _mm512_insertf32x4(x, _mm_loadu_ps((const float*)(from + (uint32_t)last)), 2);
  return (F)_mm512_insertf32x4(x, _mm_loadu_ps((const float*)(from + (last >> 32))), 3);
#else
  F x;
  for (int i = 0; i < LANES / 4; ++i) memcpy((char*)&x + 16 * i, from + at[i], 16);
  return x;
#endif
}

// quarter J of a vector, each number four times
template <int J> inline F each_four_times(F x) {
  I at;
  for (int i = 0; i < LANES; ++i) at[i] = J * LANES / 4 + i / 4;
  return KV_SHUFFLE(x, x, at);
}

// the first three of every four lanes; what lies behind them is overwritten, LANES numbers in all
inline void store_threes(float* p, F x) {
  I at;
  for (int i = 0; i < LANES; ++i) at[i] = i < LANES / 4 * 3 ? i / 3 * 4 + i % 3 : i;
  store(p, KV_SHUFFLE(x, x, at));
}

// Number i of those that are the first three of every four lanes: its lane.
constexpr int lane_of_three(int i) { return i / 3 * 4 + i % 3; }

// x, but every fourth lane is one of y's first three of every four, of which quarter J is meant
template <int J> inline F filled(F x, F y) {
  I at;
#if defined(__AVX512F__)
  for (int i = 0; i < LANES; ++i) at[i] = lane_of_three(J * LANES / 4 + i / 4);
  return (F)_mm512_mask_permutexvar_ps((__m512)x, 0x8888, (__m512i)at, (__m512)y);
#else
  for (int i = 0; i < LANES; ++i) at[i] = i % 4 < 3 ? i : LANES + lane_of_three(J * LANES / 4 + i / 4);
  return KV_SHUFFLE(x, y, at);
#endif
}

// -- functions --------------------------------------------------------------------------------------------------------

// e^x within 2 ulp for x <= 88; 0 below -64: products of such weights may be denormal, which are slow
inline F exp(F x) {
  const F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const F t = fma(x, splat(1.44269504f), magic), n = t - magic;
  F r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
  const F y = (F)((U)p + ((U)t << 23));  // any number where x is out of range
  return choose(x < splat(-64.0f), F{}, choose(x == x, y, x));
}

// tanh x within a few ulp
inline F tanh(F x) {
  const F size = (F)((I)x & 0x7fffffff), z = x * x;
  F p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  const F small = fma(p * z, x, x);
  const F bounded = choose(size > splat(40.0f), splat(40.0f), size);
  const F large = 1.0f - 2.0f / (exp(bounded + bounded) + 1.0f);
  return choose(size < splat(0.625f), small, (F)((I)large | ((I)x & (int32_t)0x80000000)));
}

// -- 16-bit numbers ---------------------------------------------------------------------------------------------------

// LANES unsigned numbers of 8 or 16 bits; compilers convert wide vectors in halves
template <class T> inline U widen(const void* p) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 1) return (U)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  else return (U)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 1) return (U)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  else return (U)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  if constexpr (sizeof(T) == 1) {
    uint32_t four;
    memcpy(&four, p, 4);
    return (U)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
  } else {
    return (U)vmovl_u16(vld1_u16((const uint16_t*)p));
  }
#else
  typedef T V __attribute__((vector_size(sizeof(T) * LANES)));
  V x;
  memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, U);
#endif
}

// LANES fp16 numbers
inline F load_halves(const void* p) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  return (F)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)));
#else
  const U h = widen<uint16_t>(p), sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
  const U up = (U)((F)(rest << 13) * splat(0x1p112f));
  return (F)(up | sign | ((U)(rest > 0x7bffu) & 0x7f800000u));
#endif
}

// LANES numbers of E4M3, whose bits are those of fp16 numbers 2^8 times as small
inline F load_e4m3(const void* p) {
#if defined(__AVX512F__)
  const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7);
  const __m256i sign = _mm256_slli_epi16(_mm256_srli_epi16(x, 7), 15);
  const __m256i most = _mm256_cmpeq_epi16(rest, _mm256_set1_epi16(0x7f << 7));
  const __m256i nan = _mm256_and_si256(most, _mm256_set1_epi16(0x4000));
  return (F)_mm512_cvtph_ps(_mm256_or_si256(_mm256_or_si256(rest, sign), nan)) * splat(256.0f);
#else
  const U x = widen<uint8_t>(p), rest = x & 0x7fu;
  const U size = (U)((F)(rest << 20) * splat(0x1p120f)) | ((U)(rest == 0x7fu) & 0x7fc00000u);
  return (F)(size | (x & 0x80u) << 24);
#endif
}
inline float half(const void* p) {
  uint16_t h;
  memcpy(&h, p, 2);
  const uint32_t rest = h & 0x7fffu, shifted = rest << 13, sign = (uint32_t)(h & 0x8000u) << 16;
  float f;
  memcpy(&f, &shifted, 4);
  f *= 0x1p112f;
  uint32_t up;
  memcpy(&up, &f, 4);
  up |= sign | (rest > 0x7bffu ? 0x7f800000u : 0u);
  memcpy(&f, &up, 4);
  return f;
}
inline float float_at(const void* p) {
  float f;
  memcpy(&f, p, 4);
  return f;
}

// n fp16 numbers to floats
inline void halves(const uint8_t* from, int n, float* to) {
  int i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, load_halves(from + 2 * i));
  for (; i < n; ++i) to[i] = half(from + 2 * i);
}

// -- codes and look-ups -----------------------------------------------------------------------------------------------

// 2^BITS numbers, BITS at most 4; 16 lanes hold them in one register, 8 lanes in two
template <int BITS> struct Table {
  static constexpr int SIZE = 1 << BITS, COUNT = 16 / LANES > 0 ? 16 / LANES : 1;
  F of[COUNT];

  // entry(i) for a vector of integers i
  template <class Entry> explicit Table(const Entry& entry) {
    for (int k = 0; k < COUNT; ++k) of[k] = entry((iota() + splat_int(k * LANES)) & splat_int(SIZE - 1));
  }
  // every number times x
  Table times(F x) const {
    Table other = *this;
    for (F& one : other.of) one *= x;
    return other;
  }
  // by the low BITS bits of each lane; bits above them may be anything
  F operator()(I at, int = 0) const {
#if defined(__AVX512F__)
    return (F)_mm512_permutexvar_ps((__m512i)at, (__m512)of[0]);
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps((__m256)of[0], (__m256i)at);
    if (BITS < 4) return (F)low;
    const __m256 high = _mm256_permutevar8x32_ps((__m256)of[1], (__m256i)at);
    return (F)_mm256_blendv_ps(low, high, (__m256)(at << 28));
#elif defined(__aarch64__)
    // bytes 4 i to 4 i + 3 of the numbers' 16 to 64
    const U bytes = (U)(at & splat_int(SIZE - 1)) * 0x04040404u + 0x03020100u;
    const auto part = [&](int i) { return (uint8x16_t)of[i]; };
    if constexpr (BITS <= 2) return (F)vqtbl1q_u8(part(0), (uint8x16_t)bytes);
    else if constexpr (BITS == 3) return (F)vqtbl2q_u8({{part(0), part(1)}}, (uint8x16_t)bytes);
    else return (F)vqtbl4q_u8({{part(0), part(1), part(2), part(3)}}, (uint8x16_t)bytes);
#else
    float all[16];
    memcpy(all, of, sizeof all);
    F x;
    for (int i = 0; i < LANES; ++i) x[i] = all[at[i] & (SIZE - 1)];
    return x;
#endif
  }
};

// a little-endian number of 1 to 4 bytes
template <int BYTES> inline uint32_t load_bytes(const uint8_t* p) {
  if constexpr (BYTES == 1) return *p;
  uint16_t two;
  uint32_t four;
  if constexpr (BYTES == 4) return memcpy(&four, p, 4), four;
  memcpy(&two, p, 2);
  return BYTES == 2 ? two : two | (uint32_t)p[2] << 16;
}

// LANES little-endian numbers of BYTES bytes
template <int BYTES> inline U lanes(const uint8_t* p) {
  if constexpr (BYTES == 1) return widen<uint8_t>(p);
  else if constexpr (BYTES == 2) return widen<uint16_t>(p);
  else if constexpr (BYTES == 4) {
    U x;
    memcpy(&x, p, sizeof x);
    return x;
  } else {
    static_assert(BYTES == 3, "1 to 4 bytes");
#if defined(__AVX512F__)
    const __m512i all = _mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 1, 2, 0, 3, 4, 5, 0, 6, 7, 8, 0, 9, 10, 11, 0), _mm512_maskz_loadu_epi32(0xfff, p));
    const __m128i apart = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
    return (U)_mm512_shuffle_epi8(all, _mm512_broadcast_i32x4(apart));
#elif defined(__aarch64__)
    const uint8x16_t apart = {0, 1, 2, 255, 3, 4, 5, 255, 6, 7, 8, 255, 9, 10, 11, 255};
    return (U)vqtbl1q_u8(vcombine_u8(vld1_u8(p), vcreate_u8(load_bytes<4>(p + 8))), apart);
#else
    U x;
    for (int i = 0; i < LANES; ++i) x[i] = load_bytes<3>(p + 3 * i);
    return x;
#endif
  }
}

// LANES codes of a little-endian bit stream (ops/bitpack.py), from code `first`, a multiple of LANES, on; only the low
// BITS bits of a lane are the code. Reads no byte behind the last code.
template <int BITS> inline I codes(const uint8_t* row, int first) {
  static_assert(BITS >= 1 && BITS <= 8, "codes of at most a byte");
  if constexpr (BITS == 8) return (I)widen<uint8_t>(row + first);
#if defined(__AVX512F__)
  if constexpr (BITS == 4) {
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)(row + first / 2)));
    return (I)_mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));  // a byte's nibbles in the two halves of 64 bits
  }
#endif
  const U places = (U)(iota() * BITS);
  if constexpr (LANES * BITS <= 32 && LANES * BITS % 8 == 0) {
    return (I)((U)splat_int((int32_t)load_bytes<LANES * BITS / 8>(row + first * BITS / 8)) >> places);
  } else if constexpr (LANES == 16 && BITS <= 4) {  // eight codes in either half
    const uint8_t* p = row + first * BITS / 8;
    const U low = (U)splat_int((int32_t)load_bytes<BITS>(p)), high = (U)splat_int((int32_t)load_bytes<BITS>(p + BITS));
    const I in = iota() < splat_int(8);
    return (I)(((low & (U)in) | (high & (U)~in)) >> (U)(iota() % 8 * BITS));
  } else {
    I x;
    for (int i = 0; i < LANES; ++i) {
      const int bit = (first + i) * BITS;
      uint32_t low = row[bit / 8];
      if (bit % 8 + BITS > 8) low |= (uint32_t)row[bit / 8 + 1] << 8;
      x[i] = (int32_t)(low >> bit % 8);
    }
    return x;
  }
}

}  // namespace kv
