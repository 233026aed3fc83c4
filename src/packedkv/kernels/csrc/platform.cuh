// Hardware primitives of the kernels: half-precision registers, tensor cores, warp exchange,
// asynchronous copies. Inline PTX and no header, so that NVRTC compiles it without a CUDA toolkit. A host compiler
// gets the same names from an emulator (tests/kernels/emulator.h), which runs a block's threads one after another.
//
// A half2 is held as uint32_t, low half first.
#pragma once

#ifdef KV_EMULATE
#include "emulator.h"
#else

#ifdef __CUDACC_RTC__
using uint8_t = unsigned char;
using int8_t = signed char;
using uint16_t = unsigned short;
using int16_t = short;
using uint32_t = unsigned int;
using int32_t = int;
using uint64_t = unsigned long long;
using int64_t = long long;
#else
#include <cstdint>
#endif

#define KV_DEV __device__ __forceinline__
#define KV_CONST static constexpr                            // a class's number
#define KV_FUNCTION __host__ __device__ static constexpr     // a class's function of constants
#define KV_CONSTEXPR __host__ __device__ constexpr           // a namespace's function of constants
#define KV_KERNEL extern "C" __global__
#define KV_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define KV_GRID_CONSTANT const __grid_constant__
#define KV_UNROLL _Pragma("unroll")
#define KV_NO_UNROLL _Pragma("unroll 1")
#define KV_UNROLL_8 _Pragma("unroll 8")
#define KV_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define KV_SHARED(type, name, count) __shared__ __align__(16) type name[count]  // of a block, inside a function

namespace kv {

KV_DEV int thread() { return threadIdx.x; }
// x, with its range hidden from the compiler except that it is small: otherwise 16 + x for x < 16 becomes an "or", and
// the constant part of an address can no longer be an immediate of the load
KV_DEV int opaque(int x) {
  int y;
  asm("mov.s32 %0, %1;" : "=r"(y) : "r"(x));
  __builtin_assume(y >= 0 && y < 65536);
  return y;
}
// x, computed here and kept, not again where it is used
KV_DEV uint32_t held(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
KV_DEV int block_x() { return blockIdx.x; }
KV_DEV int block_y() { return blockIdx.y; }
KV_DEV int block_z() { return blockIdx.z; }
KV_DEV int grid_x() { return gridDim.x; }
KV_DEV int grid_y() { return gridDim.y; }

KV_DEV void sync_threads() { __syncthreads(); }
// of the `threads` threads, whole neighbouring warps from a multiple of so many on, that name barrier `id` (1 to 15)
KV_DEV void sync_some(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
KV_DEV void sync_warp() { __syncwarp(); }
KV_DEV bool any(bool p) { return __any_sync(0xffffffffu, p); }
KV_DEV bool all(bool p) { return __all_sync(0xffffffffu, p); }
KV_DEV uint32_t ballot(bool p) { return __ballot_sync(0xffffffffu, p); }
KV_DEV float shfl_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
KV_DEV double shfl_xor(double x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
KV_DEV uint32_t shfl_xor(uint32_t x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
KV_DEV float shfl(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
KV_DEV double shfl(double x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
KV_DEV uint32_t shfl(uint32_t x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

// -- numbers ----------------------------------------------------------------------------------------------------------
KV_DEV uint32_t float_bits(float x) { return __float_as_uint(x); }
KV_DEV float bits_float(uint32_t x) { return __uint_as_float(x); }
KV_DEV uint64_t double_bits(double x) { return (uint64_t)__double_as_longlong(x); }
KV_DEV double bits_double(uint64_t x) { return __longlong_as_double((int64_t)x); }
KV_DEV float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
KV_DEV float log2_fast(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// correctly rounded, never contracted to a multiply-add: for bit-exact encoders
KV_DEV float add(float a, float b) { return __fadd_rn(a, b); }
KV_DEV float sub(float a, float b) { return __fsub_rn(a, b); }
KV_DEV float mul(float a, float b) { return __fmul_rn(a, b); }
KV_DEV float div(float a, float b) { return __fdiv_rn(a, b); }
KV_DEV float sqrt(float a) { return __fsqrt_rn(a); }
KV_DEV double add(double a, double b) { return __dadd_rn(a, b); }
KV_DEV double sub(double a, double b) { return __dsub_rn(a, b); }
KV_DEV double mul(double a, double b) { return __dmul_rn(a, b); }
KV_DEV double div(double a, double b) { return __ddiv_rn(a, b); }
KV_DEV double sqrt(double a) { return __dsqrt_rn(a); }
KV_DEV float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
KV_DEV double fma(double a, double b, double c) { return __fma_rn(a, b, c); }
// within an ulp
KV_DEV float rcp_fast(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
KV_DEV float round_even(float a) { float y; asm("cvt.rni.f32.f32 %0, %1;" : "=f"(y) : "f"(a)); return y; }
KV_DEV double round_even(double a) { double y; asm("cvt.rni.f64.f64 %0, %1;" : "=d"(y) : "d"(a)); return y; }
KV_DEV float magnitude(float a) { return fabsf(a); }
KV_DEV double magnitude(double a) { return fabs(a); }
KV_DEV float saturate(float x) { return __saturatef(x); }  // to [0, 1]
KV_DEV float minimum(float a, float b) { return fminf(a, b); }
KV_DEV float maximum(float a, float b) { return fmaxf(a, b); }
KV_DEV double minimum(double a, double b) { return fmin(a, b); }
KV_DEV double maximum(double a, double b) { return fmax(a, b); }

// -- 16-bit floating point --------------------------------------------------------------------------------------------
KV_DEV uint16_t half_bits(float x) { uint16_t y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
KV_DEV uint16_t half_bits(double x) { uint16_t y; asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y) : "d"(x)); return y; }
KV_DEV float half_float(uint16_t x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
KV_DEV uint16_t bf16_bits(float x) { uint16_t y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
KV_DEV float bf16_float(uint16_t x) { return __uint_as_float((uint32_t)x << 16); }
KV_DEV uint32_t pack_half2(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
KV_DEV uint32_t hadd2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
KV_DEV uint32_t hmul2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
KV_DEV uint32_t hmax2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
KV_DEV uint32_t hfma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
// a b - c
KV_DEV uint32_t hfms2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("{.reg .b32 n; neg.f16x2 n, %3; fma.rn.f16x2 %0, %1, %2, n;}" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

// -- one word for all threads -----------------------------------------------------------------------------------------
KV_DEV void atomic_max(int32_t* at, int32_t x) { atomicMax(at, x); }
// one half of x twice, as an operand of hmul2 and hfma2 without an instruction of its own
KV_DEV uint32_t low2(uint32_t x) {
  uint32_t y;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(y) : "r"(x));
  return y;
}
KV_DEV uint32_t high2(uint32_t x) {
  uint32_t y;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(y) : "r"(x));
  return y;
}

// -- bits -------------------------------------------------------------------------------------------------------------
// selector: in each of four nibbles 0..7 for a byte of b:a; 8 more for its highest bit, eight times
KV_DEV uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector));
  return y;
}
// c + the sum of products of unsigned bytes: picks and scales a byte in one operation, which does not use the pipe of
// shifts and masks
KV_DEV uint32_t dot4(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
// c + the low half of a times the lowest byte of b + the high half times the second byte, all unsigned
KV_DEV uint32_t dot2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
// (x & mask) | bits in one instruction, though both are constants
KV_DEV uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
  return y;
}
// (~x & mask) | bits
KV_DEV uint32_t not_and_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xae;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
  return y;
}
// by so many bits modulo 32
KV_DEV uint32_t rotate_left(uint32_t x, uint32_t by) { return __funnelshift_l(x, x, by); }
// bits [shift, shift + 32) of high:low, shift taken modulo 32
KV_DEV uint32_t funnel(uint32_t low, uint32_t high, uint32_t shift) { return __funnelshift_r(low, high, shift); }

// number of the lowest bit that is set; 32 for none
KV_DEV int first_bit(uint32_t x) { return __clz((int)__brev(x)); }

// -- tensor cores and matrices of 16-bit numbers ----------------------------------------------------------------------
// d [16 x 8] += a [16 x 16] b [16 x 8]; with lane = 4 g + j
//   a0 row g, columns 2j 2j+1;  a1 row g+8;  a2 row g, columns 2j+8 2j+9;  a3 row g+8
//   b0 rows 2j 2j+1, column g;  b1 rows 2j+8 2j+9      d0 d1 row g, columns 2j 2j+1;  d2 d3 row g+8
KV_DEV void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// the same with a [16 x 8] and b [8 x 8]
KV_DEV void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b0));
}
// transpose of an 8 x 8 matrix of 16-bit numbers: lane 4 g + j holds row g, columns 2j 2j+1
KV_DEV uint32_t transpose8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// N transposed 8 x 8 matrices of 16-bit numbers: lane 8 i + r gives where row r of matrix i lies, 16 bytes of shared
// memory (lanes from 8 N on: anywhere readable); r[i]: lane 4 g + j has column g, rows 2j 2j+1
template <int N> KV_DEV void load_transposed(uint32_t* r, const void* row) {
  static_assert(N == 2 || N == 4, "what the instruction has");
  uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
  if constexpr (N == 4) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
        : "=r"(r[0]), "=r"(r[1]) : "r"(at) : "memory");
  }
}

// prefetch 128 bytes, or as many as lie between multiples of 128, into the L2
KV_DEV void prefetch(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// -- copies from global to shared memory, 16 bytes each, that run beside other work -----------------------------------
KV_DEV void copy16(void* shared, const void* global) {
  uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(global) : "memory");
}
// from byte FROM behind `global` to byte TO behind `shared`
template <int TO, int FROM> KV_DEV void copy16(void* shared, const void* global) {
  uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16;" ::"r"(at), "l"(global), "n"(TO), "n"(FROM)
               : "memory");
}
KV_DEV void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> KV_DEV void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// -- between kernels of a stream: the next one may be launched early, and waits for the results of this one -----------
KV_DEV void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
KV_DEV void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace kv
#endif

namespace kv {

struct alignas(16) Words4 { uint32_t a, b, c, d; };
struct alignas(8) Words2 { uint32_t a, b; };

// a 16-bit or 32-bit floating point number in memory, by its code: 0 fp16, 1 bf16, 2 fp32
KV_DEV float load_real(const void* at, int64_t i, int kind) {
  if (kind == 2) return ((const float*)at)[i];
  uint16_t x = ((const uint16_t*)at)[i];
  return kind == 0 ? half_float(x) : bf16_float(x);
}
// beyond the range of fp16 its largest number, not Inf; NaN stays
KV_DEV void store_real(void* at, int64_t i, float x, int kind) {
  const float near = x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
  if (kind == 2) ((float*)at)[i] = x;
  else ((uint16_t*)at)[i] = kind == 0 ? half_bits(near) : bf16_bits(x);
}

// N neighbouring 32-bit words, in loads as wide as their alignment is known to be: the address is a multiple of 4 N
// bytes, or of 4
template <int N> KV_DEV void load_words(uint32_t (&w)[N], const void* at) {
  if (N % 4 == 0) {
    KV_UNROLL
    for (int i = 0; i < N / 4; ++i) {
      const Words4 x = ((const Words4*)at)[i];
      w[4 * i] = x.a, w[4 * i + 1] = x.b, w[4 * i + 2] = x.c, w[4 * i + 3] = x.d;
    }
  } else if (N == 2) {
    const Words2 x = *(const Words2*)at;
    w[0] = x.a, w[N - 1] = x.b;
  } else {
    KV_UNROLL
    for (int i = 0; i < N; ++i) w[i] = ((const uint32_t*)at)[i];
  }
}

// two E4M3 bytes, the first one low: nearest, ties to even, saturated at 448; not for NaN
KV_DEV uint32_t e4m3_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
#else
  float x[2] = {low, high};
  uint32_t y = 0;
  for (int i = 0; i < 2; i++) {
    float a = minimum(magnitude(x[i]), 448.0f);
    uint32_t bits = float_bits(a), code;
    if (a < 0.015625f) code = float_bits(add(mul(a, 512.0f), 12582912.0f)) & 15;  // subnormal: units of 2^-9
    else code = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    y |= (code | (float_bits(x[i]) >> 24 & 0x80)) << 8 * i;
  }
  return y;
#endif
}

KV_CONSTEXPR int align16(int n) { return (n + 15) / 16 * 16; }

}  // namespace kv
