"""What test_platform.py compiles: each kernel does one thing of platform.cuh, MISTAKES one thing wrong."""

EXCHANGES = """
#include "platform.cuh"
using namespace kv;
KV_KERNEL void shuffles(const uint32_t* x, const double* d, uint32_t* y, double* z, int mask, const int32_t* from) {
  int l = thread() % 32;
  y += thread() * 4, z += thread() * 2;
  y[0] = kv::shfl_xor(x[thread()], mask);
  y[1] = float_bits(kv::shfl_xor(bits_float(x[thread()]), mask));
  y[2] = kv::shfl(x[thread()], from[l]);
  y[3] = float_bits(kv::shfl(bits_float(x[thread()]), from[l]));
  z[0] = kv::shfl_xor(d[thread()], mask);
  z[1] = kv::shfl(d[thread()], from[l]);
}
extern "C" void run_shuffles(const uint32_t* x, const double* d, uint32_t* y, double* z, int64_t mask,
                             const int32_t* from) {
  launch(1, 1, 1, 64, 0, shuffles, x, d, y, z, (int)mask, from);
}
KV_KERNEL void votes(const uint32_t* x, uint32_t* y) {
  bool p = x[thread()];
  y += thread() * 3;
  y[0] = kv::ballot(p), y[1] = kv::any(p), y[2] = kv::all(p);
}
extern "C" void run_votes(const uint32_t* x, uint32_t* y) { launch(1, 1, 1, 64, 0, votes, x, y); }
KV_KERNEL void multiply(const uint32_t* a, const uint32_t* b, const float* c, float* y) {
  int l = thread();
  float d[4] = {c[4 * l], c[4 * l + 1], c[4 * l + 2], c[4 * l + 3]};
  kv::mma(d, a[4 * l], a[4 * l + 1], a[4 * l + 2], a[4 * l + 3], b[2 * l], b[2 * l + 1]);
  for (int i = 0; i < 4; i++) y[4 * l + i] = d[i];
}
KV_KERNEL void multiply_half(const uint32_t* a, const uint32_t* b, const float* c, float* y) {
  int l = thread();
  float d[4] = {c[4 * l], c[4 * l + 1], c[4 * l + 2], c[4 * l + 3]};
  kv::mma(d, a[4 * l], a[4 * l + 1], b[2 * l]);
  for (int i = 0; i < 4; i++) y[4 * l + i] = d[i];
}
extern "C" void run_multiply_half(const uint32_t* a, const uint32_t* b, const float* c, float* y) {
  launch(1, 1, 1, 32, 0, multiply_half, a, b, c, y);
}
extern "C" void run_multiply(const uint32_t* a, const uint32_t* b, const float* c, float* y) {
  launch(1, 1, 1, 32, 0, multiply, a, b, c, y);
}
KV_KERNEL void transpose(const uint32_t* x, uint32_t* y) { y[thread()] = kv::transpose8(x[thread()]); }
extern "C" void run_transpose(const uint32_t* x, uint32_t* y) { launch(1, 1, 1, 32, 0, transpose, x, y); }
KV_KERNEL void places(int32_t* y) {
  int at = ((block_z() * 3 + block_y()) * grid_x() + block_x()) * 64 + thread();
  y[at] += 1 + at;
}
extern "C" void run_places(int32_t* y) { launch(5, 3, 2, 64, 0, places, y); }
"""

NUMBERS = """
#include "platform.cuh"
using namespace kv;
extern "C" void from_float(const float* x, uint16_t* half, uint16_t* bf16, int64_t n) {
  for (int64_t i = 0; i < n; i++) half[i] = half_bits(x[i]), bf16[i] = bf16_bits(x[i]);
}
extern "C" void from_double(const double* x, uint16_t* y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = half_bits(x[i]);
}
extern "C" void to_float(const uint16_t* x, float* y, float* z, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = half_float(x[i]), z[i] = bf16_float(x[i]);
}
extern "C" void pairs(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* y, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    y[4 * i] = hadd2(a[i], b[i]), y[4 * i + 1] = hmul2(a[i], b[i]), y[4 * i + 2] = hfma2(a[i], b[i], c[i]);
    y[4 * i + 3] = hfms2(a[i], b[i], c[i] ^ 0x80008000u);
  }
}
extern "C" void bits(const uint32_t* a, const uint32_t* b, const uint32_t* s, uint32_t* y, int64_t n) {
  for (int64_t i = 0; i < n; i++, y += 5) {
    y[0] = prmt(a[i], b[i], s[i]), y[1] = funnel(a[i], b[i], s[i]);
    y[2] = dot2(a[i], b[i], s[i]), y[3] = dot4(a[i], b[i], s[i]), y[4] = first_bit(a[i]);
  }
}
extern "C" void rounded(const double* x, double* y, float* z, uint32_t* packed, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    y[i] = round_even(x[i]), z[i] = round_even((float)x[i]), packed[i] = pack_half2((float)x[i], (float)-x[i] / 3);
  }
}
"""

MISTAKES = """
#include "platform.cuh"
using namespace kv;
KV_DEV int depth(volatile int* at, int n) {
  volatile int room[256];
  room[n % 256] = n;
  return n ? depth(at, n - 1) + room[n % 256] : *at;
}
KV_KERNEL void mistake(int kind, int32_t* in, int32_t* out) {
  KV_DYNAMIC_SHARED(shared);
  const int t = thread();
  if (kind == 1 && t == 3) sync_threads();
  if (kind == 2 && t == 5) any(true);
  if (kind == 3 && t == 7) return;
  if (kind == 4 && t == 9) shared[500] = 1;
  if (kind == 5 && t == 9) shared[in[0]] = 1;
  if (kind == 6 && t == 40) copy16(shared + 8, in);
  if (kind == 7 && t == 40) copy16(shared + 496, in);
  if (kind == 8) out[1] = ((const int32_t*)(shared + t))[0];
  if (kind == 9 && t == 33) out[0] = in[64];
  if (kind == 10 && t == 33) in[1] = 2;
  if (kind == 11 && t == 33) out[13] = 2;
  if (kind == 12 && t == 33) out[0] = depth(out, 100000);
  if (kind == 13 && t == 33) out[0] = in[0] / in[1];
  if (kind == 14 && t == 33) out[0] = 1 << in[2];
  if (kind == 15 && t == 33) out[in[0] * 1000] = 1;
  if (kind == 16 && t == 3) shfl_xor(1.0, 1);
  else if (kind == 16) shfl_xor(1.0f, 1);
  if (kind == 17 && t == 33) copy16(shared, out);
  for (volatile int i = 0; kind == 19 && t == 33; i = i) {}
  if (kind == 18 && t >= 32) return;  // allowed
  if (kind == 18) sync_threads();
  sync_warp();
}
extern "C" void run_mistake(int64_t kind, int32_t* in, int32_t* out) {
  launch(1, 1, 2, 64, 500, mistake, (int)kind, in, out);
}
extern "C" void run_too_many() { launch(1, 1, 1, 33, 0, mistake, 0, (int32_t*)nullptr, (int32_t*)nullptr); }
"""

COPIES = """
#include "platform.cuh"
using namespace kv;
template <int PENDING> KV_DEV void body(const uint8_t* x, uint8_t* y, int groups) {
  KV_DYNAMIC_SHARED(shared);
  for (int i = 0; i < groups; i++) {
    copy16(shared + (i * 32 + thread()) * 16, x + (i * 32 + thread()) * 16);
    copy_commit();
  }
  copy_wait<PENDING>();
  sync_warp();
  // what the neighbour's copies brought
  for (int i = 0; i < groups * 16; i++) {
    int at = (i / 16 * 32 + (thread() + 1) % 32) * 16 + i % 16;
    y[at] = shared[at];
  }
}
KV_KERNEL void wait0(const uint8_t* x, uint8_t* y, int groups) { body<0>(x, y, groups); }
KV_KERNEL void wait1(const uint8_t* x, uint8_t* y, int groups) { body<1>(x, y, groups); }
KV_KERNEL void wait3(const uint8_t* x, uint8_t* y, int groups) { body<3>(x, y, groups); }
extern "C" void run_copies(int64_t pending, const uint8_t* x, uint8_t* y, int64_t n) {
  launch(1, 1, 1, 32, n * 512, pending == 0 ? wait0 : pending == 1 ? wait1 : wait3, x, y, (int)n);
}
"""

RACE = """
#include "platform.cuh"
using namespace kv;
KV_KERNEL void reverse(const int32_t* x, int32_t* y, int sync) {
  KV_DYNAMIC_SHARED(shared);
  int32_t* at = (int32_t*)shared;
  at[thread()] = x[thread()];
  if (sync == 2) sync_threads();
  if (sync == 1) sync_warp();
  y[thread()] = at[127 - thread()];
}
extern "C" void run_reverse(const int32_t* x, int32_t* y, int64_t sync) {
  launch(1, 1, 1, 128, 512, reverse, x, y, (int)sync);
}
"""
