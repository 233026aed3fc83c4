// Readers of integers in groups, along channels of a token (GroupInt: values of kivi, octopus and ultra-tq; keys of
// innerq) or along tokens of a channel (keys of kivi, values of innerq). Groups of 32, of kivi also 64 and 128. Bytes:
// packedkv/codecs/group_int.py, innerq.py.
#pragma once
#include "read_int.cuh"
#include "read_levels.cuh"
#include "read_interleaved.cuh"

namespace kv {

// Keys with a scale per group of 32 channels: part j has 8 of every group's channels.
template <int D, int BITS> struct GroupKeys {
  using Part = Codes<BITS, 8>;
  KV_CONST int ROW = D * BITS / 8;
  KV_CONST int GROUPS = D / 32;
  KV_CONST int K_REGS = GROUPS * Part::REGS;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = true;
  KV_FUNCTION int k_channel(int part, int e) { return e / 8 * 32 + part * 8 + Part::place(e % 8); }
  KV_FUNCTION float k_weight(int e) { return 1.0f / Part::factor(e % 8); }
  template <class P>
  KV_DEV static void keys(const P& planes, const uint8_t*, int token, int part, int, uint32_t (&r)[K_REGS]) {
    KV_UNROLL
    for (int group = 0; group < GROUPS; ++group) {
      uint32_t x[Part::REGS];
      Part::read(planes[0] + token * ROW + group * 4 * BITS, part, x);
      KV_UNROLL
      for (int n = 0; n < Part::REGS; ++n) r[group * Part::REGS + n] = x[n];
    }
  }
  template <class P> KV_DEV static float number(const P& planes, int plane, int token, int group) {
    return half_float(((const uint16_t*)planes[plane])[token * GROUPS + group]);
  }
  KV_CONST float K_SCALE_UNIT = 16777216.0f;
  template <class P> KV_DEV static float k_scale(const P& planes, int token, int group) {
    return number(planes, 1, token, group) * K_SCALE_UNIT;
  }
  template <class P> KV_DEV static void k_scales(const P& planes, int token, float (&s)[GROUPS]) {
    if constexpr (GROUPS % 2 == 0) {
      uint32_t w[GROUPS / 2];
      load_run<GROUPS / 2>(w, planes[1] + token * (2 * GROUPS));
      KV_UNROLL
      for (int i = 0; i < GROUPS; ++i) s[i] = half_float((uint16_t)(w[i / 2] >> i % 2 * 16));
    } else {
      KV_UNROLL
      for (int i = 0; i < GROUPS; ++i) s[i] = number(planes, 1, token, i);
    }
  }
};

// Groups of GROUP channels of a token, asymmetric. Values of two bits are looked up a byte at a time: the four exact
// numbers of an entry cost two operations, masks and a subtraction cost nine.
template <int D, int BITS, int GROUP> struct ReadPlainInt : GroupKeys<D, BITS> {
  using V = Codes<BITS, D == 96 ? 16 : D == 192 ? 32 : D / 8>;
  KV_CONST int EACH = V::REGS * 2 > GROUP ? V::REGS * 2 / GROUP : 1;  // groups of a part
  static_assert(EACH > 1 ? BITS == 8 : GROUP % (V::REGS * 2) == 0, "a part lies in one group, or codes in their order");
  KV_CONST int ROW = D * BITS / 8;
  KV_CONST int SCALES = (D + GROUP - 1) / GROUP;
  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = 3;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? ROW : 2 * SCALES; }
  using Bytes = LevelTable<2>;
  KV_CONST int TABLE = BITS == 2 ? Bytes::BYTES : 0;
  KV_DEV static uint32_t number(int code) {
    return code == 3 ? 0x4200u : code == 2 ? 0x4000u : code == 1 ? 0x3c00u : 0u;
  }
  KV_DEV static void fill(uint8_t* to, const uint8_t*, int thread, int threads) {
    check_shared_base();
    for (int n = thread; n < TABLE / 16; n += threads) {
      const int byte = n / 8;
      const uint32_t low = number(byte & 3) | number(byte >> 2 & 3) << 16;
      const uint32_t high = number(byte >> 4 & 3) | number(byte >> 6) << 16;
      ((Words4*)to)[n] = {low, high, low, high};
    }
  }
  template <class P> KV_DEV static float k_zero(const P& planes, int token, int group) {
    static_assert(GROUP == 32, "keys in groups of 32");
    return GroupKeys<D, BITS>::number(planes, 2, token, group);
  }

  // registers hold S code + Z, rounded once
  KV_CONST int V_REGS = V::REGS;
  KV_CONST bool V_BLOCKED = false;
  KV_CONST bool V_BLOCK_ZERO = false;
  KV_CONST bool HAS_V_SCALE = false;
  KV_CONST bool HAS_V_ZERO = false;
  KV_FUNCTION int v_channel(int part, int e) {
    if (BITS > 2) return part_channel<D, V>(part, e);
    const int c = part * (2 * V_REGS) + e;
    return c < D ? c : -1;
  }
  KV_FUNCTION float v_weight(int) { return 1.0f; }
  template <class P>
  KV_DEV static void values(const P& planes, const uint8_t* table, int token, int part, int lane,
                            uint32_t (&r)[V_REGS]) {
    const int live = live_part<D, V>(part), at = token * SCALES + live * V::REGS * 2 / GROUP;
    uint32_t s[EACH], z[EACH];
    KV_UNROLL
    for (int i = 0; i < EACH; ++i) {
      s[i] = ((const uint16_t*)planes[1])[at + i];
      z[i] = ((const uint16_t*)planes[2])[at + i];
    }
    if constexpr (BITS == 2) {
      const uint8_t* run = planes[0] + token * ROW + live * V::BYTES;
      uint32_t w[(V::BYTES + 3) / 4];
      if constexpr (V::BYTES == 2) w[0] = *(const uint16_t*)run;
      else load_run<V::BYTES / 4>(w, run);
      Bytes::look_up(w, table, lane, r);
    } else {
      V::whole(planes[0] + token * ROW, live, r);
    }
    KV_UNROLL
    for (int n = 0; n < V_REGS; ++n) {
      const int i = n / (V_REGS / EACH);
      r[n] = hfma2(r[n], s[i] * 0x10001u, z[i] * 0x10001u);
    }
  }
};

// The reader of the codec's bytes: interleaved (of 4 bits the same) or a plain bit stream.
template <int D, int BITS, int GROUP, bool INTERLEAVED> struct GroupInt {
  using Reader = ReadPlainInt<D, BITS, GROUP>;
};
template <int D, int BITS, int GROUP> struct GroupInt<D, BITS, GROUP, true> {
  using Reader = ReadInterleaved<D, BITS, GROUP>;
};
template <int D, int BITS, int GROUP = 32>
using ReadGroupInt =
    typename GroupInt<D, BITS, GROUP, (BITS == 4 || (GROUP == 32 && BITS < 4)) && D % 128 == 0>::Reader;

// Keys in groups of GROUP tokens of a channel, asymmetric (kivi).
template <int D, int BITS, int GROUP = 32> struct ReadTokenInt {
  static_assert(GROUP == 32 || GROUP == 64 || GROUP == 128, "a group is a tile or several, or the other way round");
  using K = Codes<BITS, key_codes<D, BITS>()>;
  KV_CONST int ROW = D * BITS / 8;
  KV_CONST int BLOCK = GROUP;
  KV_CONST int PLANES = 3;
  KV_CONST int ROW_PLANES = 1;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? GROUP * ROW : 2 * D; }
  KV_CONST int TABLE = 0;
  KV_DEV static void fill(uint8_t*, const uint8_t*, int, int) {}

  KV_CONST int GROUPS = 1;
  KV_CONST int K_REGS = K::REGS;
  KV_CONST bool K_BLOCKED = true;
  KV_CONST bool HAS_K_ZERO = false;
  KV_CONST float K_UNIT = 16777216.0f;
  KV_CONST float K_MIDDLE = 0.5f * (float)((1 << BITS) - 1);  // code
  KV_FUNCTION int k_channel(int part, int e) { return part_channel<D, K>(part, e); }
  KV_FUNCTION float k_weight(int e) { return 1.0f / K::factor(e); }
  template <class P>
  KV_DEV static void keys(const P& planes, const uint8_t*, int token, int part, int, uint32_t (&r)[K_REGS]) {
    K::read(planes[0] + token * ROW, live_part<D, K>(part), r);
  }
  // numbers of a part's channels, paired as the codes are
  KV_DEV static void pairs(const uint8_t* plane, int block, int part, uint32_t (&r)[K_REGS]) {
    uint32_t w[K::REGS];
    load_run<K::REGS>(w, plane + block * (2 * D) + part * (4 * K::REGS));
    KV_UNROLL
    for (int n = 0; n < K_REGS; ++n) {
      const int a = K::place(2 * n), b = K::place(2 * n + 1);
      const uint32_t halves = (a % 2 ? 0x0032u : 0x0010u) | (b % 2 ? 0x7600u : 0x5400u);
      r[n] = b == a + 1 ? w[a / 2] : prmt(w[a / 2], w[b / 2], halves);
    }
  }
  template <class P>
  KV_DEV static void k_block(const P& planes, int block, int part, uint32_t (&s)[K_REGS], uint32_t (&z)[K_REGS]) {
    const int live = live_part<D, K>(part);
    pairs(planes[1], block, live, s);
    pairs(planes[2], block, live, z);
  }
};

// Keys of innerq: symmetric codes of WIDTH bits in groups of 32 channels.
template <int D, int WIDTH> struct ReadInnerKey : GroupKeys<D, WIDTH> {
  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = 2;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? D * WIDTH / 8 : D / 16; }
  KV_CONST int TABLE = 0;
  KV_DEV static void fill(uint8_t*, const uint8_t*, int, int) {}
  // -2^(WIDTH - 1) codes, in units of the masked ones
  KV_CONST float K_OFFSET = -(float)(1 << (WIDTH - 1)) / GroupKeys<D, WIDTH>::K_SCALE_UNIT;
  template <class P> KV_DEV static float k_zero(const P& planes, int token, int group) {
    return GroupKeys<D, WIDTH>::number(planes, 1, token, group) * -(float)(1 << (WIDTH - 1));
  }
};

// Values of innerq: groups of 32 tokens of a channel, symmetric; hybrid: asymmetric where the scale's sign bit is set.
template <int D, int WIDTH, bool HYBRID> struct ReadInnerValue {
  using V = Codes<WIDTH, value_codes<D, WIDTH>()>;
  KV_CONST int ROW = D * WIDTH / 8;
  KV_CONST int BLOCK = 32;
  KV_CONST int PLANES = HYBRID ? 3 : 2;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? 32 * ROW : 2 * D; }
  KV_CONST int TABLE = 0;
  KV_DEV static void fill(uint8_t*, const uint8_t*, int, int) {}

  KV_CONST int V_REGS = V::REGS;
  KV_CONST bool V_BLOCKED = true;
  KV_CONST bool V_BLOCK_ZERO = true;
  KV_CONST bool HAS_V_SCALE = false;
  KV_CONST bool HAS_V_ZERO = false;
  KV_FUNCTION int v_channel(int part, int e) { return part_channel<D, V>(part, e); }
  KV_FUNCTION float v_weight(int e) { return 16777216.0f / V::factor(e); }
  KV_CONST float V_OFFSET = -(float)(1 << (WIDTH - 1));
  template <class P>
  KV_DEV static void values(const P& planes, const uint8_t*, int token, int part, int, uint32_t (&r)[V_REGS]) {
    V::read(planes[0] + token * ROW, live_part<D, V>(part), r);
  }
  // plane 1 or 2 of a part's channels, in the order of the codes' places
  template <class P> KV_DEV static void words(const P& planes, int p, int block, int part, uint32_t (&w)[V_REGS]) {
    load_run<V_REGS>(w, planes[p] + block * (2 * D) + live_part<D, V>(part) * (4 * V_REGS));
  }
  KV_DEV static float number(const uint32_t (&w)[V_REGS], int e) {
    return half_float((uint16_t)(w[V::place(e) / 2] >> V::place(e) % 2 * 16));
  }
  template <class P> KV_DEV static void v_bscales(const P& planes, int block, int part, float (&s)[2 * V_REGS]) {
    uint32_t w[V_REGS];
    words(planes, 1, block, part, w);
    KV_UNROLL
    for (int n = 0; n < V_REGS; ++n) w[n] &= HYBRID ? 0x7fff7fffu : 0xffffffffu;
    KV_UNROLL
    for (int e = 0; e < 2 * V_REGS; ++e) s[e] = number(w, e);
  }
  KV_CONST bool V_UNEVEN = HYBRID;  // a sign bit anywhere; rare with literal codes
  template <class P> KV_DEV static bool v_uneven(const P& planes, int block, int part) {
    uint32_t w[V_REGS], either = 0;
    words(planes, 1, block, part, w);
    KV_UNROLL
    for (int n = 0; n < V_REGS; ++n) either |= w[n];
    return (either & 0x80008000u) != 0;
  }
  // few instructions: where this is rare they are fetched cold, which costs more than running them
  template <class P> KV_DEV static void v_surplus(const P& planes, int block, int part, float (&x)[2 * V_REGS]) {
    uint32_t s[V_REGS], z[V_REGS];
    words(planes, 1, block, part, s);
    words(planes, 2, block, part, z);
    KV_UNROLL
    for (int n = 0; n < V_REGS; ++n) {
      const uint32_t uneven = (s[n] >> 15 & 0x00010001u) * 0xffffu;
      s[n] &= uneven & 0x7fff7fffu, z[n] &= uneven;
    }
    KV_UNROLL
    for (int e = 0; e < 2 * V_REGS; ++e) x[e] = number(z, e) - V_OFFSET * number(s, e);
  }
  template <class P> KV_DEV static float v_bscale(const P& planes, int block, int channel) {
    return half_float(((const uint16_t*)planes[1])[block * D + channel] & 0x7fffu);
  }
  template <class P> KV_DEV static float v_bzero(const P& planes, int block, int channel) {
    if constexpr (HYBRID) {
      const int at = block * D + channel;
      if (((const uint16_t*)planes[1])[at] >> 15) return half_float(((const uint16_t*)planes[2])[at]);
    }
    return v_bscale(planes, block, channel) * V_OFFSET;
  }
};

}  // namespace kv
