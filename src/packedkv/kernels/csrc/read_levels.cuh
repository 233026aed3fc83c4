// Readers of codes that are levels of a table: turboquant, and the keys of ultra-tq.
//
// A byte of codes (two of 4 bits, four of 2, eight of 1) or a pair of 3-bit codes is looked up at once. An entry has
// the levels in fp16 and is held in as many copies as fill the 128 bytes of all banks, so that no two lanes share a
// bank: entry i begins at 128 i, a lane's copy at lane * size. For bytes one operation is the whole address: dot4 =
// byte * 128 + copy.
//
// Numbers: a level is rounded to fp16 once, by 2^-11 of it at most; norms stay in fp32. With norms per block of 32
// channels a key is fp16(fp16(level / 4) * norm), two roundings, exact to 2^-25 where it is subnormal.
#pragma once
#include "bits.cuh"

namespace kv {

// A part's RUN bits of a row that is cut into PARTS runs, first bit lowest; rows are whole 32-bit words.
template <int RUN, int PARTS> struct PartStream {
  KV_CONST int WORDS = (RUN + 31) / 32;
  KV_FUNCTION int words_read() {
    int most = 0;
    for (int part = 0; part < PARTS; ++part) {
      const int words = (part * RUN % 32 + RUN + 31) / 32;
      most = words > most ? words : most;
    }
    return most;
  }
  KV_DEV static void load(const uint8_t* row, int part, uint32_t (&w)[WORDS]) {
    const uint8_t* at = row + part * RUN / 8;
    if (RUN == 8) {
      w[0] = at[0];
    } else if (RUN == 16) {
      w[0] = *(const uint16_t*)at;
    } else if (RUN % 128 == 0) {
      KV_UNROLL
      for (int i = 0; i < WORDS / 4; ++i) {
        const Words4 x = ((const Words4*)at)[i];
        w[4 * i] = x.a, w[4 * i + 1] = x.b, w[4 * i + 2] = x.c, w[4 * i + 3] = x.d;
      }
    } else if (RUN % 64 == 0) {
      KV_UNROLL
      for (int i = 0; i < WORDS / 2; ++i) {
        const Words2 x = ((const Words2*)at)[i];
        w[2 * i] = x.a, w[2 * i + 1] = x.b;
      }
    } else if (RUN % 32 == 0) {
      KV_UNROLL
      for (int i = 0; i < WORDS; ++i) w[i] = ((const uint32_t*)at)[i];
    } else {
      constexpr int READ = words_read(), ROW = RUN * PARTS / 32, SURE = ROW - RUN * (PARTS - 1) / 32;
      const uint32_t* from = (const uint32_t*)row + part * RUN / 32;
      const int shift = part * RUN % 32;
      uint32_t x[READ];
      KV_UNROLL
      for (int i = 0; i < READ; ++i) x[i] = from[i < SURE ? i : part * RUN / 32 + i < ROW ? i : 0];
      KV_UNROLL
      for (int i = 0; i < WORDS; ++i) w[i] = funnel(x[i], i + 1 < READ ? x[i + 1] : 0u, shift);
    }
  }
};

// Levels of codes of BITS bits. In global memory: one copy of each entry, the codes of its index from the lowest bits
// up, see level_table in packedkv/kernels/codecs/tables.py.
template <int BITS> struct LevelTable {
  KV_CONST bool BYTEWISE = BITS == 1 || BITS == 2 || BITS == 4;
  KV_CONST int PER = BYTEWISE ? 8 / BITS : BITS == 3 ? 2 : 1;  // codes of an entry
  KV_CONST int INDEX = PER * BITS;
  KV_CONST int ENTRY = PER > 1 ? 2 * PER : 4;                  // bytes; a single level fills both halves
  KV_CONST int COPIES = 128 / ENTRY;
  KV_CONST int BYTES = 128 << INDEX;

  KV_DEV static Words4 entry(const uint8_t* from, int i) {
    if (ENTRY == 16) return ((const Words4*)from)[i];
    if (ENTRY == 8) {
      const Words2 y = ((const Words2*)from)[i];
      return {y.a, y.b, y.a, y.b};
    }
    const uint32_t y = ((const uint32_t*)from)[i];
    return {y, y, y, y};
  }
  KV_DEV static void fill(uint8_t* to, const uint8_t* from, int thread, int threads) {
    check_shared_base();
    constexpr int ALL = BYTES / 16, STEP = 4;  // loads of four turns under way at once
    KV_NO_UNROLL
    for (int first = thread; first < ALL; first += STEP * threads) {
      Words4 x[STEP];
      KV_UNROLL
      for (int i = 0; i < STEP; ++i) {
        if (first + i * threads < ALL) x[i] = entry(from, (first + i * threads) / 8);
      }
      KV_UNROLL
      for (int i = 0; i < STEP; ++i) {
        if (first + i * threads < ALL) ((Words4*)to)[first + i * threads] = x[i];
      }
    }
  }

  // where the entry of the i-th index of a stream of words lies
  template <int N> KV_DEV static uint32_t address(const uint32_t (&w)[N], int i, uint32_t copy) {
    if (BYTEWISE) return dot4(w[i / 4], 0x80u << i % 4 * 8, copy);
    const int at = i * INDEX / 32, bit = i * INDEX % 32;
    uint32_t x;
    if (bit + INDEX > 32) x = funnel(w[at], w[at + 1 < N ? at + 1 : at], bit - 7);
    else x = bit < 7 ? w[at] << (7 - bit) : w[at] >> (bit - 7);
    return (x & ((1u << INDEX) - 1) << 7) | copy;
  }

  // levels of the first 2 REGS codes; codes behind the run's end give levels too, of whatever bits are there
  template <int N, int REGS>
  KV_DEV static void look_up(const uint32_t (&w)[N], const uint8_t* table, int lane, uint32_t (&r)[REGS]) {
    const uint32_t copy = lane % COPIES * ENTRY;
    if (PER == 1) {
      KV_UNROLL
      for (int i = 0; i < REGS; ++i) {
        const uint32_t low = load_table(table, address(w, 2 * i, copy));
        r[i] = prmt(low, load_table(table, address(w, 2 * i + 1, copy)), 0x7610);
      }
    } else {
      KV_UNROLL
      for (int i = 0; i < 2 * REGS / PER; ++i) {
        const uint32_t at = address(w, i, copy);
        if (PER == 2) {
          r[i] = load_table(table, at);
        } else if (PER == 4) {
          const Words2 x = load_table2(table, at);
          r[2 * i % REGS] = x.a, r[(2 * i + 1) % REGS] = x.b;
        } else {
          const Words4 x = *(const Words4*)(table + at);
          r[4 * i % REGS] = x.a, r[(4 * i + 1) % REGS] = x.b, r[(4 * i + 2) % REGS] = x.c, r[(4 * i + 3) % REGS] = x.d;
        }
      }
    }
  }
};

// Rows of D codes, channel 0 in the lowest bits: a part is a run of neighbouring channels, or two crossed words.
template <int D, int BITS> struct LevelRows {
  using Table = LevelTable<BITS>;
  KV_CONST int ROW = D * BITS / 8;
  KV_FUNCTION int regs(int codes) {  // whole entries, an even number of registers
    const int per = Table::PER > 4 ? Table::PER : 4;
    return (codes + per - 1) / per * per / 2;
  }
  KV_CONST int K_REGS = regs(D / 4);
  KV_CONST int V_REGS = regs(D / 8);
  KV_FUNCTION int k_channel(int part, int e) { return e < D / 4 ? part * (D / 4) + e : -1; }
  KV_CONST bool CROSSED = D * BITS == 512;
  KV_FUNCTION int v_channel(int part, int e) {
    constexpr int PER = CROSSED ? 32 / BITS : 1;  // codes of a word
    if (CROSSED) return CrossedWords::word(part, e / PER) * PER + e % PER;
    return e < D / 8 ? part * (D / 8) + e : -1;
  }

  KV_DEV static void keys(const uint8_t* row, const uint8_t* table, int part, int lane, uint32_t (&r)[K_REGS]) {
    uint32_t w[PartStream<D / 4 * BITS, 4>::WORDS];
    PartStream<D / 4 * BITS, 4>::load(row, part, w);
    Table::look_up(w, table, lane, r);
  }
  KV_DEV static void values(const uint8_t* row, const uint8_t* table, int part, int lane, uint32_t (&r)[V_REGS]) {
    uint32_t w[PartStream<D / 8 * BITS, 8>::WORDS];
    if constexpr (CROSSED) CrossedWords::load(row, 0, 0, part, lane, w);
    else PartStream<D / 8 * BITS, 8>::load(row, part, w);
    Table::look_up(w, table, lane, r);
  }
};

// packedkv/codecs/turboquant.py: value = level * sqrt(D) * norm; the table holds level * sqrt(D), about 0.03 to 5.
// BORROWS: values with the same levels as the keys have no table of their own, but read the keys', which lies before.
template <int D, int BITS, bool NORM32 = false, bool BORROWS = false> struct ReadTurboQuant {
  using Rows = LevelRows<D, BITS>;
  using Table = LevelTable<BITS>;
  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = 2;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? Rows::ROW : NORM32 ? 4 : 2; }
  KV_CONST int TABLE = BORROWS ? 0 : Table::BYTES;
  KV_DEV static void fill(uint8_t* to, const uint8_t* from, int thread, int threads) {
    Table::fill(to, from, thread, threads);
  }

  template <class P> KV_DEV static float norm(const P& planes, int token) {
    if (NORM32) return ((const float*)planes[1])[token];
    return half_float(((const uint16_t*)planes[1])[token]);
  }

  KV_CONST int GROUPS = 1;
  KV_CONST int K_REGS = Rows::K_REGS;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = false;
  KV_FUNCTION int k_channel(int part, int e) { return Rows::k_channel(part, e); }
  KV_FUNCTION float k_weight(int) { return 1.0f; }
  template <class P>
  KV_DEV static void keys(const P& planes, const uint8_t* table, int token, int part, int lane, uint32_t (&r)[K_REGS]) {
    Rows::keys(planes[0] + token * Rows::ROW, table, part, lane, r);
  }
  template <class P> KV_DEV static float k_scale(const P& planes, int token, int) { return norm(planes, token); }

  KV_CONST int V_REGS = Rows::V_REGS;
  KV_CONST bool V_BLOCKED = false;
  KV_CONST bool V_BLOCK_ZERO = false;
  KV_CONST bool HAS_V_SCALE = true;
  KV_CONST bool HAS_V_ZERO = false;
  KV_FUNCTION int v_channel(int part, int e) { return Rows::v_channel(part, e); }
  KV_FUNCTION float v_weight(int) { return 1.0f; }
  template <class P>
  KV_DEV static void values(const P& planes, const uint8_t* table, int token, int part, int lane,
                            uint32_t (&r)[V_REGS]) {
    Rows::values(planes[0] + token * Rows::ROW, BORROWS ? table - Table::BYTES : table, part, lane, r);
  }
  template <class P> KV_DEV static float v_scale(const P& planes, int token) { return norm(planes, token); }
};

// packedkv/codecs/ultra_tq.py, keys: key = level * norm, one norm per token; BLOCK_NORM: per 32 channels, times 2^r.
template <int D, bool BLOCK_NORM = false> struct ReadUltraTQ {
  using Rows = LevelRows<D, 4>;
  using Table = LevelTable<4>;
  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = 2;
  KV_CONST int NORMS = BLOCK_NORM ? D / 32 : 1;
  KV_FUNCTION int plane_bytes(int p) { return p == 0 ? Rows::ROW : 2 * NORMS; }
  KV_CONST int TABLE = Table::BYTES;
  KV_DEV static void fill(uint8_t* to, const uint8_t* from, int thread, int threads) {
    Table::fill(to, from, thread, threads);
  }

  // 4 * 2^r: the table holds level / 4, so that a product with any norm is an fp16 number; 4^r >= rotation's order / 32
  KV_FUNCTION float unit() {
    float u = 4.0f;
    for (int spread = 1; D % (64 * spread) == 0; spread *= 4) u *= 2.0f;
    return u;
  }

  KV_CONST int GROUPS = 1;
  KV_CONST int K_REGS = Rows::K_REGS;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = false;
  KV_FUNCTION int k_channel(int part, int e) { return Rows::k_channel(part, e); }
  KV_FUNCTION float k_weight(int) { return 1.0f; }
  template <class P>
  KV_DEV static void keys(const P& planes, const uint8_t* table, int token, int part, int lane, uint32_t (&r)[K_REGS]) {
    Rows::keys(planes[0] + token * Rows::ROW, table, part, lane, r);
    if (BLOCK_NORM) {
      // runs of eight channels that share a norm in every part
      constexpr int SPAN = NORMS % 4 == 0 ? 4 : NORMS % 2 == 0 ? 2 : 1;
      KV_UNROLL
      for (int i = 0; i < D / 32; i += SPAN) {
        const int group = (part * (D / 32 / SPAN) + i / SPAN) / (4 / SPAN);
        const uint32_t norm = ((const uint16_t*)planes[1])[token * NORMS + group] * 0x10001u;
        KV_UNROLL
        for (int k = 4 * i; k < 4 * (i + SPAN); ++k) r[k] = hmul2(r[k], norm);
      }
    }
  }
  template <class P> KV_DEV static float k_scale(const P& planes, int token, int) {
    return BLOCK_NORM ? unit() : half_float(((const uint16_t*)planes[1])[token]);
  }
};

}  // namespace kv
