// Dense bit streams (kvcodec/ops/bitpack.py) and look-up tables that all lanes of a warp read at once.
#pragma once
#include "platform.cuh"

namespace kv {

KV_CONSTEXPR int low_bit(int n) { return n & -n; }

// The bits of one part of a token's row: PART_BITS from bit part * PART_BITS on, of rows of ROW_BYTES bytes, eight of
// which are whole words. Where a part begins inside a word depends on the lane alone: the words are shifted once, by an
// amount that the compiler takes out of the loop, and every field lies where it knows. `own` is what of `token` depends
// on the lane, less than 8; the rest is a number after unrolling. May read up to 7 bytes behind a row; what it finds
// there is not used.
template <int ROW_BYTES, int PART_BITS> struct Stream {
  KV_CONST int GRAIN = low_bit(ROW_BYTES * 8 | PART_BITS | 128);  // every part begins at a multiple of this many bits
  KV_CONST int WORDS = (PART_BITS + 31) / 32;
  KV_CONST int LOADS = GRAIN >= 32 ? WORDS : (PART_BITS + 32 - GRAIN + 31) / 32;
  uint32_t w[WORDS];

  KV_DEV Stream(const uint8_t* plane, int token, int own, int part) {
    const int rest = token - own;
    const uint32_t bit = (uint32_t)(rest % 8 + own) * (ROW_BYTES * 8) + (uint32_t)part * PART_BITS;
    const uint8_t* at = plane + rest / 8 * (8 * ROW_BYTES) + bit / 32 * 4;
    uint32_t x[LOADS];
    if (GRAIN == 128 && LOADS % 4 == 0) {
      load_words<LOADS>(x, at);
    } else if (GRAIN >= 64 && LOADS % 2 == 0) {
      KV_UNROLL
      for (int i = 0; i < LOADS; i += 2) {
        const Words2 pair = ((const Words2*)at)[i / 2];
        x[i] = pair.a, x[i + 1] = pair.b;
      }
    } else {
      KV_UNROLL
      for (int i = 0; i < LOADS; ++i) x[i] = ((const uint32_t*)at)[i];
    }
    KV_UNROLL
    for (int i = 0; i < WORDS; ++i) w[i] = GRAIN >= 32 ? x[i] : funnel(x[i], i + 1 < LOADS ? x[i + 1] : 0u, bit % 32);
  }

  // the field of `count` bits that begins at bit `from`, moved to bit `to` of a word; the bits around it are others'
  KV_DEV uint32_t field(int from, int count, int to) const {
    const int i = from / 32, off = from % 32;
    if (off + count > 32) return funnel(w[i], w[i + 1 < WORDS ? i + 1 : i], off - to);
    return off >= to ? w[i] >> (off - to) : w[i] << (to - off);
  }
};

// N numbers of BITS bits each as fp16 subnormals, left in place wherever they lie inside a half below the exponent:
// number k is half `high(k)` of the word that `word` leaves, times 2^(shift(k) - 24). One mask each, and a shift for
// some.
template <int ROW_BYTES, int N, int BITS> struct Small {
  Stream<ROW_BYTES, N * BITS> stream;
  KV_DEV Small(const uint8_t* plane, int token, int own, int part) : stream(plane, token, own, part) {}

  // by how much the word is shifted for number k; few different ones, so that numbers share a shifted word
  KV_FUNCTION int move(int k) {
    const int off = BITS * k % 32;
    for (int i = 0; i < 4; ++i) {
      const int by = i == 0 ? 0 : i == 1 ? 8 : i == 2 ? 4 : 12;
      if (off >= by && (off - by) % 16 + BITS <= 10 && (by || off + BITS <= 32)) return by;
    }
    return off;
  }
  KV_FUNCTION int place(int k) { return BITS * k % 32 - move(k); }
  KV_FUNCTION bool high(int k) { return place(k) >= 16; }
  KV_FUNCTION int shift(int k) { return place(k) % 16; }
  KV_DEV uint32_t word(int k) const {
    const int i = BITS * k / 32, by = move(k);
    uint32_t x = stream.w[i];
    if (by) x = BITS * k % 32 + BITS > 32 ? funnel(x, stream.w[i + 1 < stream.WORDS ? i + 1 : i], by) : x >> by;
    return x & ((1u << BITS) - 1) << place(k);
  }
};

// Reads of tables in dynamic shared memory. The compiler for sm_90 keeps where that begins in a register (blocks of a
// cluster have theirs elsewhere) and adds it to every address, an instruction for each row. There the beginning is a
// number instead, behind the 1024 bytes that the system takes, and a kernel that finds it elsewhere stops.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr uint32_t SHARED_BASE = 1024;
KV_DEV uint32_t shared_address(const uint8_t* table, uint32_t at) {
  KV_DYNAMIC_SHARED(shared);
  return SHARED_BASE + (uint32_t)(table - shared) + at;
}
KV_DEV void check_shared_base() {
  KV_DYNAMIC_SHARED(shared);
  if (((uint32_t)__cvta_generic_to_shared(shared) & 0xffffffu) != SHARED_BASE) asm volatile("trap;");
}
KV_DEV Words2 load_table2(const uint8_t* table, uint32_t at) {
  Words2 x;
  asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.a), "=r"(x.b) : "r"(shared_address(table, at)));
  return x;
}
KV_DEV uint32_t load_table(const uint8_t* table, uint32_t at) {
  uint32_t x;
  asm("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(shared_address(table, at)));
  return x;
}
template <int BEHIND> KV_DEV uint32_t load_table(const uint8_t* table, uint32_t at) {
  uint32_t x;
  asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(x) : "r"(shared_address(table, at)), "n"(BEHIND));
  return x;
}
#else
KV_DEV void check_shared_base() {}
KV_DEV Words2 load_table2(const uint8_t* table, uint32_t at) { return *(const Words2*)(table + at); }
KV_DEV uint32_t load_table(const uint8_t* table, uint32_t at) { return *(const uint32_t*)(table + at); }
template <int BEHIND> KV_DEV uint32_t load_table(const uint8_t* table, uint32_t at) {
  return *(const uint32_t*)(table + BEHIND + at);
}
#endif

KV_CONSTEXPR int table_copies(int entries, int room) {
  int n = 16;
  while (n > 1 && entries * 8 * n > room) n /= 2;
  return n > 2 ? n : 1;  // two copies save one pass in twenty
}

// Tables of 8-byte entries in COPIES interleaved copies: entry i of copy c lies at (i * COPIES + c) * 8. A half-warp
// reads in one pass when its lanes meet 16 pairs of banks, so each lane has a copy, hence banks, of its own, or shares
// it with few.
template <int ENTRIES, int ROOM> struct Table8 {
  KV_CONST int COPIES = table_copies(ENTRIES, ROOM);
  KV_CONST int BYTES = ENTRIES * 8 * COPIES;
  KV_CONST int STRIDE = 8 * COPIES;  // bytes from entry to entry
  KV_CONST int STRIDE_BIT = COPIES == 16 ? 7 : COPIES == 8 ? 6 : COPIES == 4 ? 5 : 3;

  KV_DEV static uint32_t copy(int lane) { return lane % COPIES * 8; }
  KV_DEV static Words2 get(const uint8_t* table, uint32_t at) { return load_table2(table, at); }

  // DOWN: the last row first
  template <bool DOWN = false> KV_DEV static void fill(uint8_t* to, const uint8_t* from, int thread, int threads) {
    check_shared_base();
    constexpr int AHEAD = 4;  // loads in flight
    const Words2* entries = (const Words2*)from;
    KV_NO_UNROLL
    for (int first = thread; first < ENTRIES; first += AHEAD * threads) {
      Words2 x[AHEAD];
      KV_UNROLL
      for (int n = 0; n < AHEAD; ++n) x[n] = entries[first + n * threads < ENTRIES ? first + n * threads : 0];
      KV_UNROLL
      for (int n = 0; n < AHEAD; ++n) {
        if (first + n * threads >= ENTRIES) continue;
        const int i = DOWN ? ENTRIES - 1 - first - n * threads : first + n * threads;
        if (COPIES == 1) {
          ((Words2*)to)[i] = x[n];
        } else {
          KV_UNROLL
          for (int c = 0; c < COPIES / 2; ++c)  // neighbouring threads begin at different copies: different banks
            ((Words4*)to)[i * (COPIES / 2) + (c + thread) % (COPIES / 2)] = Words4{x[n].a, x[n].b, x[n].a, x[n].b};
        }
      }
    }
  }
};

}  // namespace kv
