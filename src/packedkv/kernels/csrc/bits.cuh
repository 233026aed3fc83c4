// Dense bit streams (packedkv/ops/bitpack.py) and look-up tables that all lanes of a warp read at once.
#pragma once
#include "platform.cuh"

namespace kv {

// COUNT parts of C neighbouring codes of a row of D, one for each lane that shares it. Where they are more than D, the
// last live part may begin inside the one before, whose codes are padding there, and parts behind it are padding.
template <int D, int C, int COUNT> struct Parts {
  KV_CONST bool EXACT = C * COUNT == D;
  // byte at which a part of codes of BITS bits begins
  template <int BITS> KV_DEV static int place(int part) {
    if constexpr (EXACT) return part * (C * BITS / 8);
    else return ((part + 1) * C <= D ? part * C : D - C) * BITS / 8;
  }
  KV_FUNCTION int channel(int part, int n) {  // of a part's n-th code
    if (EXACT || (part + 1) * C <= D) return part * C + n;
    return D - C + n >= part * C ? D - C + n : -1;
  }
};

KV_CONSTEXPR int low_bit(int n) { return n & -n; }

// The bits of one part of a token's row: PART_BITS from bit part * PART_BITS on, of rows of ROW_BYTES bytes, eight of
// which are whole words. Where a part begins inside a word depends on the lane alone: the words are shifted once, by an
// amount that is invariant in the loop, and the place of every field is then a compile-time constant. `own` is what of
// `token` depends on the lane, less than 8; the rest is a number after unrolling. May read up to 7 bytes behind a row;
// what it finds there is not used. WHOLE: of rows of whole words, where the token's place and the part's are a sum, and
// `own` does not matter.
template <int ROW_BYTES, int PART_BITS, bool WHOLE = false> struct Stream {
  KV_CONST int GRAIN = low_bit(ROW_BYTES * 8 | PART_BITS | 128);  // every part begins at a multiple of this many bits
  KV_CONST int WORDS = (PART_BITS + 31) / 32;
  KV_CONST int LOADS = GRAIN >= 32 ? WORDS : (PART_BITS + 32 - GRAIN + 31) / 32;
  KV_CONST bool NARROW = GRAIN == PART_BITS && (PART_BITS == 8 || PART_BITS == 16);  // one byte, or two
  // Where one part alone of either half of a row needs the last load, all of that half read its word: banks of their
  // own words would be shared with other rows.
  KV_CONST int PARTS = ROW_BYTES * 8 / PART_BITS;
  KV_FUNCTION bool needs_all(int part) { return part * PART_BITS % 32 + PART_BITS > 32 * (LOADS - 1); }
  KV_FUNCTION int needing(int part, int end) { return part < end ? needs_all(part) + needing(part + 1, end) : 0; }
  KV_FUNCTION int last_word(int part) {
    return needs_all(part) ? part * PART_BITS / 32 + LOADS - 1 : last_word(part + 1);
  }
  KV_CONST bool ONE_LAST = WHOLE && GRAIN < 32 && needing(0, PARTS / 2) == 1 && needing(PARTS / 2, PARTS) == 1;
  // Of the other loads, some lanes (a bit each) have the first and the last one in reverse order and exchange them:
  // words of rows of 11 words, of which a warp reads eight or four at once, then lie in banks of their own (a test
  // counts).
  KV_CONST uint32_t TURNED = ROW_BYTES != 44 || !ONE_LAST ? 0u : PARTS == 4 ? 0x1540a815u : 0x01181180u;
  uint32_t w[WORDS];

  // Where a lane's loads begin, and its shift. `rest` is a number after unrolling, and of whole words without effect:
  // then all this depends on the lane alone, and can be held throughout a loop.
  struct Place {
    uint32_t first, middle, last, one, shift;
    KV_DEV Place(int rest, int own, int part) {
      constexpr uint32_t END = TURNED != 0 ? 4 * (LOADS - 2) : 0;
      const uint32_t from = (uint32_t)part * PART_BITS, row = WHOLE ? (uint32_t)own * ROW_BYTES : 0u;
      const uint32_t bit = WHOLE ? from : (uint32_t)(rest % 8 + own) * (ROW_BYTES * 8) + from;
      const bool turned = TURNED >> (PARTS == 4 ? 4 * own + part : 4 * part + own / 2) & 1;  // bit of the lane
      middle = row + (NARROW ? bit / 8 : bit / 32 * 4), shift = bit % 32;
      first = middle + (turned ? END : 0), last = middle + (turned ? 0 : END);
      one = ONE_LAST ? row + 4 * (part < PARTS / 2 ? last_word(0) : last_word(PARTS / 2)) : 0;
    }
    KV_DEV void hold() {
      if (TURNED != 0) first = held(first), last = held(last);
      if (TURNED == 0 || LOADS > 3) middle = held(middle);
      if (ONE_LAST) one = held(one);
      if (GRAIN < 32) shift = held(shift);
    }
  };
  KV_DEV Stream(const uint8_t* plane, int token, int own, int part)
      : Stream(plane, token - own, Place(token - own, own, part)) {}
  KV_DEV Stream(const uint8_t* plane, int rest, const Place& place) {
    static_assert(!WHOLE || ROW_BYTES % 4 == 0, "whole words");
    const uint8_t* row = plane + (WHOLE ? rest * ROW_BYTES : rest / 8 * (8 * ROW_BYTES));
    const uint8_t* at = row + place.middle;
    if (NARROW) {
      w[0] = PART_BITS == 8 ? *at : *(const uint16_t*)at;
      return;
    }
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
      for (int i = TURNED != 0; i < LOADS - ONE_LAST - (TURNED != 0); ++i) x[i] = ((const uint32_t*)at)[i];
      if constexpr (ONE_LAST) x[LOADS - 1] = *(const uint32_t*)(row + place.one);
      if constexpr (TURNED != 0) {
        const bool turned = place.first > place.last;
        const uint32_t a = *(const uint32_t*)(row + place.first), b = *(const uint32_t*)(row + place.last);
        x[0] = turned ? b : a, x[LOADS - 2] = turned ? a : b;
      }
    }
    KV_UNROLL
    for (int i = 0; i < WORDS; ++i)
      w[i] = GRAIN >= 32 ? x[i] : funnel(x[i], i + 1 < LOADS ? x[i + 1] : 0u, place.shift);
  }

  // the field of `count` bits from bit `from` on, moved to bit `to` of a word; other bits of the word are undefined
  KV_DEV uint32_t field(int from, int count, int to) const {
    const int i = from / 32, off = from % 32;
    if (off + count > 32) return funnel(w[i], w[i + 1 < WORDS ? i + 1 : i], off - to);
    return off >= to ? w[i] >> (off - to) : w[i] << (to - off);
  }
};

// Values, rows of 64 bytes in eight parts of two words. The four tokens that a warp reads at once are an even number of
// rows apart, in the same banks; so a part has words 4 (part / 2) + part % 2 and that plus two, and lanes of the
// later two tokens read them in reverse order and swap them back.
struct CrossedWords {
  KV_FUNCTION int word(int part, int i) { return part / 2 * 4 + part % 2 + 2 * i; }
  // `own` is what of `token` depends on the lane
  KV_DEV static void load(const uint8_t* plane, int token, int own, int part, int lane, uint32_t (&w)[2]) {
    const int first = lane & 2, rest = 64 * (token - own);
    const uint8_t* at = plane + (64 * own + 4 * word(part, 0) + 4 * first);
    const uint8_t* other = plane + (64 * own + 4 * word(part, 0) + 8 - 4 * first);
    const uint32_t x = *(const uint32_t*)(at + rest), y = *(const uint32_t*)(other + rest);
    w[0] = first ? y : x;
    w[1] = first ? x : y;
  }
};

// Reads of tables in dynamic shared memory. The compiler for sm_90 keeps its base address in a register (blocks of a
// cluster have different ones) and adds it to every address, one instruction per row. Here the base is a constant
// instead, behind the 1024 bytes that the system reserves, and a kernel that finds another base traps.
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
// for addresses that are sums anyway: `origin` is a term of them, once for a lane
KV_DEV uint32_t table_origin(const uint8_t* table) { return shared_address(table, 0); }
KV_DEV Words2 load_from2(const uint8_t*, uint32_t at) {
  Words2 x;
  asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.a), "=r"(x.b) : "r"(at));
  return x;
}
template <int BEHIND> KV_DEV uint32_t load_table(const uint8_t* table, uint32_t at) {
  uint32_t x;
  asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(x) : "r"(shared_address(table, at)), "n"(BEHIND));
  return x;
}
template <int BEHIND> KV_DEV Words2 load_table2(const uint8_t* table, uint32_t at) {
  Words2 x;
  asm("ld.shared.v2.u32 {%0, %1}, [%2 + %3];" : "=r"(x.a), "=r"(x.b) : "r"(shared_address(table, at)), "n"(BEHIND));
  return x;
}
#else
KV_DEV void check_shared_base() {}
KV_DEV uint32_t table_origin(const uint8_t*) { return 0; }
KV_DEV Words2 load_from2(const uint8_t* table, uint32_t at) { return *(const Words2*)(table + at); }
KV_DEV Words2 load_table2(const uint8_t* table, uint32_t at) { return *(const Words2*)(table + at); }
KV_DEV uint32_t load_table(const uint8_t* table, uint32_t at) { return *(const uint32_t*)(table + at); }
template <int BEHIND> KV_DEV uint32_t load_table(const uint8_t* table, uint32_t at) {
  return *(const uint32_t*)(table + BEHIND + at);
}
template <int BEHIND> KV_DEV Words2 load_table2(const uint8_t* table, uint32_t at) {
  return *(const Words2*)(table + BEHIND + at);
}
#endif

// How often the room of look-up tables is halved: GPUs with less shared memory have fewer copies of them.
#ifndef KV_HALVINGS
#define KV_HALVINGS 0
#endif

// LEAST: what a reader needs
KV_CONSTEXPR int table_copies(int entries, int room, int least = 1) {
  int n = 16;
  while (n > least && entries * 8 * n > room >> KV_HALVINGS) n /= 2;
  return n == 2 && least == 1 ? 1 : n;  // two copies would save only one pass in twenty
}

// Tables of 8-byte entries in COPIES interleaved copies: entry i of copy c lies at (i * COPIES + c) * 8. A half-warp
// reads in one pass when its lanes access 16 different pairs of banks, so each lane has a copy, hence banks, of its
// own, or shares it with few. BESIDE tables of one size may be interleaved: entry i at i * COPIES * BESIDE. AHEAD:
// loads that a thread which fills them has under way.
template <int ENTRIES, int BUDGET, int BESIDE = 1, int AHEAD = 4, int LEAST = 1> struct Table8 {
  KV_CONST int COPIES = table_copies(ENTRIES, BUDGET, LEAST);
  KV_CONST int BYTES = ENTRIES * 8 * COPIES;
  KV_CONST int STRIDE = 8 * COPIES * BESIDE;  // bytes from entry to entry
  KV_FUNCTION int bit_of(int stride) { return stride == 1 ? 0 : 1 + bit_of(stride / 2); }
  KV_CONST int STRIDE_BIT = bit_of(STRIDE);

  KV_DEV static uint32_t copy(int lane) { return lane % COPIES * 8; }
  KV_DEV static Words2 get(const uint8_t* table, uint32_t at) { return load_table2(table, at); }

  // DOWN: the last row first
  template <bool DOWN = false> KV_DEV static void fill(uint8_t* to, const uint8_t* from, int thread, int threads) {
    check_shared_base();
    const int turn = thread * (STRIDE < 128 ? STRIDE : 128) / 128;
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
          for (int c = 0; c < COPIES / 2; ++c)  // eight neighbouring threads, and entries, in all banks
            ((Words4*)to)[i * (STRIDE / 16) + (c + turn) % (COPIES / 2)] = Words4{x[n].a, x[n].b, x[n].a, x[n].b};
        }
      }
    }
  }
};

}  // namespace kv
