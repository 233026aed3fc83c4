// The machine of platform.cuh on a host CPU: every name of its CUDA half, for g++ (C++17 and up). A block's threads are
// fibers that run one at a time and change hands only where threads wait for one another, so that a kernel runs
// complete, and whatever it does wrong shows alike on every run:
//   warp exchange  a lane leaves its operands and waits until all 32 have come; different operations at once, a lane
//                  that left the kernel, or nobody able to go on are errors
//   copies         copy16 fills its target with 0xff and moves the bytes at the wait that covers them: a missing wait
//                  reads 0xff. Targets outside the shared memory and addresses off 16 bytes are errors
//   memory         shared memory ends at a page nobody may touch, global buffers from kv_emulated_alloc too; shared
//                  memory starts every block as 0xff; a fault becomes an error with the thread's number
//   order          KV_EMULATE_SEED or kv_emulated_seed(n): 0 takes lanes and warps in order, another number a random
//                  order of blocks, warps and lanes, changed at every exchange: outputs that differ are a race
//   time           an endless loop is an error after KV_EMULATE_SECONDS (120) of processor time
// Limits: a loop that waits for another thread's store never ends (only exchanges hand over); every exchange orders
// memory, on the hardware only sync_warp and sync_threads do; plain a * b + c is not contracted; mma sums in double and
// rounds to fp32 once (hardware keeps fewer bits); exp2_fast and log2_fast are libm's.
// The first error stops the launch and those behind it until kv_emulated_clear(); kv_emulated_error() has its text.
// A library has one translation unit of this header, and launches from one thread at a time.
#pragma once

#include "fibers.h"

#ifdef __FAST_MATH__
#error "the emulator's arithmetic needs IEEE rounding: no -ffast-math"
#endif

#define KV_DEV inline
#define KV_CONST static constexpr
#define KV_FUNCTION static constexpr
#define KV_CONSTEXPR constexpr
#define KV_KERNEL extern "C"
#define KV_BOUNDS(threads, blocks)
#define KV_GRID_CONSTANT const
#define KV_UNROLL
#define KV_NO_UNROLL
#define KV_UNROLL_8
#define KV_SHARED(type, name, count) alignas(16) static type name[count]
#define KV_DYNAMIC_SHARED(name) unsigned char* name = kv::emulated::machine.shared

namespace kv {

inline int thread() { return emulated::machine.current->index; }
inline int opaque(int x) { return x; }
inline uint32_t held(uint32_t x) { return x; }
inline int block_x() { return emulated::machine.block[0]; }
inline int block_y() { return emulated::machine.block[1]; }
inline int block_z() { return emulated::machine.block[2]; }
inline int grid_x() { return emulated::machine.grid[0]; }
inline int grid_y() { return emulated::machine.grid[1]; }

__attribute__((noinline)) inline void sync_threads() {
  emulated::Machine& m = emulated::machine;
  uint32_t bit = 1u << emulated::lane();
  m.warp->barrier |= bit;
  m.warp->ready &= ~bit;
  m.waiting++;
  emulated::release_if_complete();
  if (!(m.warp->ready & bit) || m.random) emulated::yield();
}
__attribute__((noinline)) inline void sync_some(int id, int threads) {
  emulated::Machine& m = emulated::machine;
  int warps = threads / 32, first = (int)(m.warp - m.warps) / warps * warps;
  if (threads % 32 || id < 1 || id > 15) emulated::fail("sync_some(%d, %d)", id, threads);
  uint32_t bit = 1u << emulated::lane();
  m.warp->some |= bit;
  m.warp->ready &= ~bit;
  bool complete = true;
  for (int w = first; w < first + warps; w++) {
    if (m.warps[w].some && m.warps[w].some_id && m.warps[w].some_id != id) emulated::fail("two barriers in one team");
    complete = complete && m.warps[w].some == emulated::ALL;
  }
  m.warp->some_id = id;
  if (complete) {
    for (int w = first; w < first + warps; w++) m.warps[w].ready = emulated::ALL, m.warps[w].some = 0;
    for (int w = first; w < first + warps; w++) m.warps[w].some_id = 0;
  }
  if (!(m.warp->ready & bit) || m.random) emulated::yield();
}
__attribute__((noinline)) inline void sync_warp() {
  emulated::exchange("sync_warp", [](emulated::Warp&) {});
}
__attribute__((noinline)) inline uint32_t ballot(bool p) {
  emulated::operands()[0] = p;
  return emulated::exchange("a vote", [](emulated::Warp& w) {
    uint32_t set = 0;
    for (int i = 0; i < 32; i++) set |= w.in[i][0] << i;
    for (int i = 0; i < 32; i++) w.out[i][0] = set;
  })[0];
}
inline bool any(bool p) { return ballot(p) != 0; }
inline bool all(bool p) { return ballot(p) == 0xffffffffu; }

namespace emulated {
__attribute__((noinline)) inline uint64_t shuffle(const char* name, uint64_t x, int from) {
  uint32_t* in = operands();
  in[0] = (uint32_t)x, in[1] = (uint32_t)(x >> 32), in[2] = (uint32_t)from & 31;
  const uint32_t* out = exchange(name, [](Warp& w) {
    for (int i = 0; i < 32; i++) w.out[i][0] = w.in[w.in[i][2]][0], w.out[i][1] = w.in[w.in[i][2]][1];
  });
  return out[0] | (uint64_t)out[1] << 32;
}
template <class To, class From> inline To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
}  // namespace emulated

// -- numbers ----------------------------------------------------------------------------------------------------------
inline uint32_t float_bits(float x) { return emulated::bits_as<uint32_t>(x); }
inline float bits_float(uint32_t x) { return emulated::bits_as<float>(x); }
inline uint64_t double_bits(double x) { return emulated::bits_as<uint64_t>(x); }
inline double bits_double(uint64_t x) { return emulated::bits_as<double>(x); }

inline uint32_t shfl_xor(uint32_t x, int mask) {
  return (uint32_t)emulated::shuffle("shfl_xor of 32 bits", x, emulated::lane() ^ mask);
}
inline float shfl_xor(float x, int mask) { return bits_float(shfl_xor(float_bits(x), mask)); }
inline double shfl_xor(double x, int mask) {
  return bits_double(emulated::shuffle("shfl_xor of 64 bits", double_bits(x), emulated::lane() ^ mask));
}
inline uint32_t shfl(uint32_t x, int lane) { return (uint32_t)emulated::shuffle("shfl of 32 bits", x, lane); }
inline float shfl(float x, int lane) { return bits_float(shfl(float_bits(x), lane)); }
inline double shfl(double x, int lane) {
  return bits_double(emulated::shuffle("shfl of 64 bits", double_bits(x), lane));
}

inline float exp2_fast(float x) {
  float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;  // the instruction has no subnormal results
}
inline float log2_fast(float x) { return log2f(x); }
inline float add(float a, float b) { return a + b; }
inline float sub(float a, float b) { return a - b; }
inline float mul(float a, float b) { return a * b; }
inline float div(float a, float b) { return a / b; }
inline float sqrt(float a) { return __builtin_sqrtf(a); }
inline double add(double a, double b) { return a + b; }
inline double sub(double a, double b) { return a - b; }
inline double mul(double a, double b) { return a * b; }
inline double div(double a, double b) { return a / b; }
inline double sqrt(double a) { return __builtin_sqrt(a); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float saturate(float x) { return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f; }
inline uint32_t rotate_left(uint32_t x, uint32_t by) { return by % 32 ? x << by % 32 | x >> (32 - by % 32) : x; }
inline float rcp_fast(float x) { return 1.0f / x; }
inline float round_even(float a) { return nearbyintf(a); }
inline double round_even(double a) { return nearbyint(a); }
inline float magnitude(float a) { return __builtin_fabsf(a); }
inline double magnitude(double a) { return __builtin_fabs(a); }
inline float minimum(float a, float b) { return fminf(a, b); }
inline float maximum(float a, float b) { return fmaxf(a, b); }
inline double minimum(double a, double b) { return fmin(a, b); }
inline double maximum(double a, double b) { return fmax(a, b); }

// -- 16-bit floating point --------------------------------------------------------------------------------------------
inline uint16_t half_bits(double x) {
  uint64_t bits = double_bits(x), size = bits & ~(1ull << 63);
  uint16_t sign = (uint16_t)(bits >> 48 & 0x8000);
  if (size > 0x7ffull << 52) return 0x7fff;                                  // the machine's one NaN
  if (size >= (uint64_t)(1023 + 16) << 52) return sign | 0x7c00;             // 65536 and up
  if (size < (uint64_t)(1023 - 14) << 52) {                                  // a multiple of 2^-24; scaling is exact
    return sign | (uint16_t)nearbyint(bits_double(size) * 0x1p24);
  }
  size -= (uint64_t)(1023 - 15) << 52;
  return sign | (uint16_t)((size + (1ull << 41) - 1 + (size >> 42 & 1)) >> 42);  // to even; a carry moves the exponent
}
inline uint16_t half_bits(float x) { return half_bits((double)x); }
inline float half_float(uint16_t x) {
  uint32_t size = x & 0x7fffu;
  if (size > 0x7c00) return bits_float(0x7fffffff);
  float y = size == 0x7c00 ? __builtin_inff() : bits_float(size << 13) * 0x1p112f;  // exact, subnormals too
  return x & 0x8000 ? -y : y;
}
inline uint16_t bf16_bits(float x) {
  uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float bf16_float(uint16_t x) { return bits_float((uint32_t)x << 16); }
inline uint32_t pack_half2(float low, float high) { return half_bits(low) | (uint32_t)half_bits(high) << 16; }

namespace emulated {
inline double low(uint32_t x) { return half_float((uint16_t)x); }
inline double high(uint32_t x) { return half_float((uint16_t)(x >> 16)); }
// a * b + c of halves, rounded once although double stands between: the product is exact there, and so is the sum
// unless its terms are 53 bits apart from end to end, that is for a product below 2^-20 of c's last bit (both roundings
// give c) and for one above 2^29 (infinity).
inline uint16_t fused(double a, double b, double c) { return half_bits(a * b + c); }
}  // namespace emulated

inline uint32_t hfma2(uint32_t a, uint32_t b, uint32_t c) {
  using namespace emulated;
  return fused(low(a), low(b), low(c)) | (uint32_t)fused(high(a), high(b), high(c)) << 16;
}
inline uint32_t hfms2(uint32_t a, uint32_t b, uint32_t c) { return hfma2(a, b, c ^ 0x80008000u); }
inline uint32_t low2(uint32_t x) { return (x & 0xffffu) * 0x10001u; }
inline uint32_t high2(uint32_t x) { return (x >> 16) * 0x10001u; }
inline uint32_t hadd2(uint32_t a, uint32_t b) {  // the sum of two halves is exact in double
  using namespace emulated;
  return half_bits(low(a) + low(b)) | (uint32_t)half_bits(high(a) + high(b)) << 16;
}
inline uint32_t hmul2(uint32_t a, uint32_t b) {
  using namespace emulated;
  return half_bits(low(a) * low(b)) | (uint32_t)half_bits(high(a) * high(b)) << 16;
}
inline uint32_t hmax2(uint32_t a, uint32_t b) {  // a number wins over NaN
  using namespace emulated;
  return half_bits(fmax(low(a), low(b))) | (uint32_t)half_bits(fmax(high(a), high(b))) << 16;
}

// -- one word for all threads -----------------------------------------------------------------------------------------
inline void atomic_max(int32_t* at, int32_t x) { *at = x > *at ? x : *at; }

// -- bits -------------------------------------------------------------------------------------------------------------
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t both = a | (uint64_t)b << 32;
  uint32_t y = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t byte = (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 0xff);
    if (selector >> 4 * i & 8) byte = byte & 0x80 ? 0xff : 0;
    y |= byte << 8 * i;
  }
  return y;
}
inline uint32_t dot4(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 0xff) * (b >> i & 0xff);
  return c;
}
inline uint32_t dot2(uint32_t a, uint32_t b, uint32_t c) {
  return c + (a & 0xffff) * (b & 0xff) + (a >> 16) * (b >> 8 & 0xff);
}
inline uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) | bits; }
inline uint32_t not_and_or(uint32_t x, uint32_t mask, uint32_t bits) { return (~x & mask) | bits; }
inline uint32_t funnel(uint32_t low, uint32_t high, uint32_t shift) {
  return (uint32_t)((low | (uint64_t)high << 32) >> (shift & 31));
}
inline int first_bit(uint32_t x) { return x ? __builtin_ctz(x) : 32; }

// -- tensor cores and matrices of 16-bit numbers ----------------------------------------------------------------------
namespace emulated {
inline float truncated(double x) {
  float y = (float)x;
  if (__builtin_fabs((double)y) > __builtin_fabs(x)) y = __builtin_nextafterf(y, 0.0f);
  return y;
}
}  // namespace emulated

__attribute__((noinline)) inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                          uint32_t b0, uint32_t b1) {
  uint32_t* in = emulated::operands();
  in[0] = a0, in[1] = a1, in[2] = a2, in[3] = a3, in[4] = b0, in[5] = b1;
  memcpy(in + 6, d, 16);
  const uint32_t* out = emulated::exchange("mma", [](emulated::Warp& w) {
    double a[16][16], b[16][8];
    for (int l = 0; l < 32; l++) {
      int g = l / 4, j = l % 4;
      for (int i = 0; i < 4; i++) {
        int row = g + i % 2 * 8, column = 2 * j + i / 2 * 8;
        a[row][column] = emulated::low(w.in[l][i]), a[row][column + 1] = emulated::high(w.in[l][i]);
      }
      for (int i = 0; i < 2; i++) {
        b[2 * j + 8 * i][g] = emulated::low(w.in[l][4 + i]), b[2 * j + 8 * i + 1][g] = emulated::high(w.in[l][4 + i]);
      }
    }
    double sum[16][8] = {};
    for (int m = 0; m < 16; m++) {
      for (int k = 0; k < 16; k++) {
        for (int n = 0; n < 8; n++) sum[m][n] += a[m][k] * b[k][n];
      }
    }
    for (int l = 0; l < 32; l++) {
      for (int i = 0; i < 4; i++) {
        double total = sum[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2] + (double)bits_float(w.in[l][6 + i]);
        w.out[l][i] = float_bits(emulated::truncated(total));
      }
    }
  });
  memcpy(d, out, 16);
}
inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) { mma(d, a0, a1, 0, 0, b0, 0); }
__attribute__((noinline)) inline uint32_t transpose8(uint32_t x) {
  emulated::operands()[0] = x;
  return emulated::exchange("transpose8", [](emulated::Warp& w) {
    uint16_t at[8][8];
    for (int l = 0; l < 32; l++) memcpy(&at[l / 4][l % 4 * 2], &w.in[l][0], 4);
    for (int l = 0; l < 32; l++) w.out[l][0] = at[l % 4 * 2][l / 4] | (uint32_t)at[l % 4 * 2 + 1][l / 4] << 16;
  })[0];
}
template <int N> inline void load_transposed(uint32_t* r, const void* row) {
  static_assert(N == 2 || N == 4);
  uint32_t* in = emulated::operands();
  if (emulated::lane() < 8 * N) {
    if ((uintptr_t)row % 16) emulated::fail("load_transposed off 16 bytes: from %p", row);
    memcpy(in, row, 16);
  }
  const uint32_t* out = emulated::exchange("load_transposed", [](emulated::Warp& w) {
    for (int i = 0; i < N; i++) {
      uint16_t at[8][8];
      for (int k = 0; k < 8; k++) memcpy(at[k], w.in[8 * i + k], 16);
      for (int l = 0; l < 32; l++) w.out[l][i] = at[l % 4 * 2][l / 4] | (uint32_t)at[l % 4 * 2 + 1][l / 4] << 16;
    }
  });
  memcpy(r, out, 4 * N);
}

inline void prefetch(const void* global) { (void)*(const volatile uint8_t*)global; }

// -- copies from global to shared memory ------------------------------------------------------------------------------
__attribute__((noinline)) inline void copy16(void* shared, const void* global) {
  emulated::Machine& m = emulated::machine;
  int64_t at = (int64_t)((uintptr_t)shared - (uintptr_t)m.shared);
  if (at < 0 || at + 16 > (int64_t)m.shared_bytes) {
    emulated::fail("copy16 to byte %lld of %zu of the shared memory", (long long)at, m.shared_bytes);
  }
  if (at % 16 || (uintptr_t)global % 16) {
    emulated::fail("copy16 off 16 bytes: to byte %lld from %p", (long long)at, global);
  }
  for (int i = 0; i < 2; i++) (void)((const volatile uint64_t*)global)[i];  // a fault shows here, not at the wait
  memset(shared, 0xff, 16);
  m.current->copies.push_back({shared, global, m.current->group});
}
template <int TO, int FROM> inline void copy16(void* shared, const void* global) {
  copy16((uint8_t*)shared + TO, (const uint8_t*)global + FROM);
}
inline void copy_commit() { emulated::machine.current->group++; }
namespace emulated {
__attribute__((noinline)) inline void wait_copies(int pending) {
  Fiber& f = *machine.current;
  size_t n = 0;
  for (; n < f.copies.size() && f.copies[n].group < f.group - pending; n++) {
    memcpy(f.copies[n].to, f.copies[n].from, 16);
  }
  f.copies.erase(f.copies.begin(), f.copies.begin() + (std::ptrdiff_t)n);
}
}  // namespace emulated
template <int PENDING> inline void copy_wait() { emulated::wait_copies(PENDING); }

// -- between kernels of a stream: launches run one after another here -------------------------------------------------
inline void launch_dependents() {}
inline void wait_for_previous() {}

}  // namespace kv
