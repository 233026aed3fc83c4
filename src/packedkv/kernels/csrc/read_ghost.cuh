// Reader of ghost (packedkv/codecs/ghost.py; Mixed with transform=klt): pairs of channels that share T bits, split by
// the kind of the pair, and a scale for each token.
//
// The T bits of a pair are looked up at once, in the table of its kind, whose entries are two levels in fp16. Which
// kind a pair has is data, the same for all tokens of a head: a lane holds where the tables of its pairs begin, a
// register for each, and an address is that plus the bits. Bits within a byte need one operation for it, dot4, and
// those of T < 8 a mask that several share.
#pragma once
#include "read_levels.cuh"

namespace kv {

// Kinds of pairs of T bits, the last one being that of a pair that gives one to the scale, and their tables of
// levels. A line of 32 words, as many as there are banks, holds the entry of the same bits of one kind in 32 copies:
// a lane reads its own bank. Where that takes too much room, rare kinds share lines. Short pairs keep own banks
// there, as few lanes read them, by token (lanes 3 of 4) or by part (the last four lanes). With half of the room
// (KV_HALVINGS) all but the most even kind share lines, with a quarter all do; a look-up in them takes two or three
// turns.
template <int T> struct GhostPairs {
  KV_CONST int WIDEST = 7;
  KV_CONST int EVEN = (T + 1) / 2;  // the wider one's bits of the most even kind
  KV_CONST int FULL = (WIDEST < T ? WIDEST : T) - EVEN + 1;
  KV_CONST int KINDS = FULL + 1;
  KV_FUNCTION int high(int kind) { return kind < FULL ? EVEN + kind : T / 2; }
  KV_FUNCTION int low(int kind) { return kind < FULL ? T - EVEN - kind : (T - 1) / 2; }

  KV_CONST int LINE_SHIFT = T < 10 ? 7 : 6;
  KV_CONST int LINE = 1 << LINE_SHIFT;  // bytes
  KV_CONST int BLOCK = LINE << T;
  KV_CONST int HALVED = T == 7 || T == 8 ? KV_HALVINGS : 0;
  KV_CONST bool SHARES = T >= 8 || HALVED;
  KV_CONST int BLOCKS = !SHARES ? KINDS : HALVED == 1 ? 2 : T == 8 && !HALVED ? 4 : 1;
  KV_CONST int BYTES = BLOCKS * BLOCK;
  KV_FUNCTION int block(int kind) { return kind < BLOCKS ? kind : BLOCKS - 1; }
  // the 21 words of such a line that are not the short pairs': 0, 1, 2, 4, 5, 6, 8, ... 26, by their number; how many a
  // kind has, and which is its first
  KV_CONST int MOST = T == 10 ? 4 : BLOCKS > 2 ? 16 : BLOCKS == 1 && FULL == 4 ? 9 : 12;
  KV_CONST int SECOND = BLOCKS == 2 ? 2 : 1;  // the kind that has half as many copies as the first one of its lines
  KV_FUNCTION int copies(int kind) { return T == 10 || BLOCKS > 2 || kind < SECOND ? MOST : kind == SECOND ? 6 : 3; }
  KV_FUNCTION int first(int kind) {
    return T == 10 ? 4 * kind : BLOCKS > 2 || kind < SECOND ? 0 : MOST + (kind == SECOND ? 0 : 3 * (kind - SECOND + 1));
  }
  // the kind whose entry is in a word of a line of the last block
  KV_FUNCTION int kind_at(int word) {
    if (T == 10) return word / 4;
    if (word % 4 == 3 || word >= 28) return FULL;
    const int n = word - word / 4;
    for (int kind = FULL - 1; kind > 0; --kind)
      if (block(kind) == BLOCKS - 1 && n >= first(kind)) return kind;
    return BLOCKS > 1 ? FULL - 1 : 0;
  }
  // where a lane reads a kind's entries, in words of a line
  KV_FUNCTION int word(int kind, int lane) {
    if (kind < BLOCKS - 1 || !SHARES) return lane;
    if (T == 10) return 4 * kind + (kind == FULL ? lane / 4 + lane : lane) % 4;
    if (kind == FULL) return lane % 4 == 3 || lane >= 28 ? lane : lane / 4 * 4 + 3;
    const int n = first(kind) + lane % copies(kind);
    return n + n / 3;
  }

  KV_FUNCTION float slope(int w) {
    return w == 0 ? 0.0f : w == 1 ? 1.5958f : w == 2 ? 0.89289f : w == 3 ? 0.47146f : w == 4 ? 0.24051f
        : w == 5 ? 0.12183f : w == 6 ? 0.061706f : 0.031279f;
  }
  KV_FUNCTION float bend(int w) {
    return w < 2 ? 0.0f : w == 2 ? 0.050693f : w == 3 ? 0.011585f : w == 4 ? 0.0020975f : w == 5 ? 0.00033676f
        : w == 6 ? 5.0861e-05f : 7.4065e-06f;
  }
  KV_DEV static float level(int w, int bits) {
    const float u = (float)(2 * (bits & ((1 << w) - 1)) + 1 - (1 << w)) * 0.5f;
    return u * (slope(w) + bend(w) * (u * u));
  }

  KV_DEV static uint32_t entry(int kind, int bits) {
    return pack_half2(level(high(kind), bits), level(low(kind), bits >> high(kind)));
  }
  KV_DEV static void fill(uint8_t* to, int thread, int threads) {
    check_shared_base();
    for (int line = thread; line < BLOCKS << T; line += threads) {
      const int bits = line & ((1 << T) - 1), own = line >> T;
      uint8_t* at = to + LINE * line;
      if (SHARES && BLOCKS > 2 && own == BLOCKS - 1) {  // 16 bytes a turn; as kind_at
        const uint32_t x = entry(FULL - 1, bits), y = entry(FULL, bits);
        KV_UNROLL
        for (int i = 0; i < LINE / 16; ++i) {
          const int to_word = 4 * ((i + thread) % (LINE / 16));
          const uint32_t z = to_word < 28 ? x : y;
          *(Words4*)(at + 4 * to_word) = Words4{z, z, z, y};
        }
      } else if (SHARES && own == BLOCKS - 1) {
        uint32_t x[KINDS];
        KV_UNROLL
        for (int kind = 0; kind < KINDS; ++kind) x[kind] = block(kind) == BLOCKS - 1 ? entry(kind, bits) : 0u;
        for (int i = 0; i < LINE / 4; ++i) {
          const int to_word = (i + thread) % (LINE / 4), of = kind_at(to_word);  // neighbours begin at different banks
          uint32_t y = x[FULL];
          KV_UNROLL
          for (int kind = 0; kind < FULL; ++kind) y = of == kind ? x[kind] : y;
          ((uint32_t*)at)[to_word] = y;
        }
      } else {
        uint32_t x = 0;
        KV_UNROLL
        for (int kind = 0; kind < KINDS; ++kind)
          if (own == kind) x = entry(kind, bits);
        KV_UNROLL
        for (int i = 0; i < LINE / 16; ++i) ((Words4*)at)[(i + thread) % (LINE / 16)] = {x, x, x, x};
      }
    }
  }
  // where the table of a kind begins, for a lane
  KV_DEV static uint32_t origin(int kind, int lane) {
    uint32_t at = 0;
    KV_UNROLL
    for (int k = 0; k < KINDS; ++k)
      if (kind == k) at = (uint32_t)(block(k) * BLOCK + 4 * word(k, lane));
    return at;
  }

  // the i-th field of a run of words lies within a byte; those of a word that one mask leaves, which are one in a byte
  KV_FUNCTION bool bytewise(int i) { return i * T % 8 + T <= 8; }
  KV_FUNCTION uint32_t mask(int i) {
    uint32_t m = 0;
    for (int bit = 0; bit < 32; ++bit) {
      const int at = i * T / 32 * 32 + bit;
      if (at % T == 0 && at % 8 + T <= 8 && at % 8 / T == i * T % 8 / T) m |= ((1u << T) - 1) << bit;
    }
    return m;
  }
  // levels of fields [I, REGS)
  template <int I, int N, int REGS>
  KV_DEV static void look_up(const uint32_t (&w)[N], const uint8_t* table, const uint32_t (&origins)[REGS],
                             uint32_t (&r)[REGS]) {
    constexpr int AT = I * T / 32, BIT = I * T % 32;
    uint32_t at;
    if constexpr (bytewise(I)) {
      constexpr uint32_t MASK = mask(I), BY = (uint32_t)(LINE >> BIT % 8) << BIT / 8 * 8;
      at = dot4(T == 8 ? w[AT] : w[AT] & MASK, BY, origins[I]);
    } else {
      uint32_t x;
      if constexpr (BIT + T > 32) x = funnel(w[AT], w[AT + 1], BIT - LINE_SHIFT);
      else if constexpr (BIT < LINE_SHIFT) x = w[AT] << (LINE_SHIFT - BIT);
      else x = w[AT] >> (BIT - LINE_SHIFT);
      at = and_or(x, ((1u << T) - 1) << LINE_SHIFT, origins[I]);
    }
    r[I] = load_table(table, at);
    if constexpr (I + 1 < REGS) look_up<I + 1>(w, table, origins, r);
  }
};

// TWICE: T = 2 b, of b bits for each channel on average; VALUES: of values, which have a mean. BORROWS: values look up
// the keys' levels, which lie before
template <int D, int TWICE, bool VALUES, bool BORROWS = false> struct ReadGhost {
  using Pairs = GhostPairs<TWICE>;
  KV_CONST int ROW = D * TWICE / 16;  // bytes

  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = 1;
  KV_FUNCTION int plane_bytes(int) { return ROW; }

  // -- tables --------------------------------------------------------------------------------------------------------
  // global: uint8 [D] channels of the model by place, uint8 [D / 2] kinds; of values then, from a multiple of 16 on,
  // float [D] means over sizes, by place
  KV_CONST int CENTRE = align16(D + D / 2);
  KV_CONST int SOURCE = CENTRE + (VALUES ? 4 * D : 0);  // bytes
  // shared: levels, unless they are borrowed; and, of each head, the same
  KV_CONST int TABLE = BORROWS ? 0 : Pairs::BYTES;
  KV_CONST int OWN = SOURCE;

  KV_DEV static void fill(uint8_t* to, const uint8_t*, int thread, int threads) {
    if (!BORROWS) Pairs::fill(to, thread, threads);
  }
  KV_DEV static void fill_own(uint8_t* to, const uint8_t* from, int thread, int threads) {
    for (int i = thread; i < SOURCE / 16; i += threads) ((Words4*)to)[i] = ((const Words4*)from)[i];
  }
  // channels have places: the model's channel of place c, and the mean that is added to a value; in shared or in global
  // memory
  KV_CONST bool ORDERED = true;
  KV_DEV static int model_channel(const uint8_t* own, int c) { return own[c]; }
  KV_CONST bool CENTRED = VALUES;
  KV_DEV static float centre(const uint8_t* own, int c) { return ((const float*)(own + CENTRE))[c]; }

  // -- codes ---------------------------------------------------------------------------------------------------------
  KV_CONST int GROUPS = 1;
  KV_CONST int K_REGS = D / 8;
  KV_CONST int V_REGS = D / 16;
  KV_FUNCTION int k_channel(int part, int e) { return part * (D / 4) + e; }
  KV_CONST bool CROSSED = D * TWICE == 1024;
  KV_FUNCTION int v_channel(int part, int e) {
    constexpr int PER = CROSSED ? 64 / TWICE : 1;  // codes of a word
    return CROSSED ? CrossedWords::word(part, e / PER) * PER + e % PER : part * (D / 8) + e;
  }

  // what a lane needs for its look-ups
  KV_CONST bool HOLDS = true;
  template <int REGS> struct Held {
    uint32_t origins[REGS];
    const uint8_t* levels;
  };
  KV_DEV static Held<K_REGS> hold_keys(const uint8_t* table, const uint8_t* own, int part, int lane) {
    Held<K_REGS> held{{}, table};
    KV_UNROLL
    for (int i = 0; i < K_REGS; ++i)
      held.origins[i] = Pairs::origin(own[D + k_channel(part, 2 * i) / 2], lane);
    return held;
  }
  KV_DEV static Held<V_REGS> hold_values(const uint8_t* table, const uint8_t* own, int part, int lane) {
    Held<V_REGS> held{{}, BORROWS ? table - Pairs::BYTES : table};
    KV_UNROLL
    for (int i = 0; i < V_REGS; ++i)
      held.origins[i] = Pairs::origin(own[D + v_channel(part, 2 * i) / 2], lane);
    return held;
  }

  // a token's scale by its number: the highest bits of the row's last four fields, times what moves them side by side
  KV_CONST bool NUMBERED = true;
  template <class P> KV_DEV static uint32_t number(const P& planes, int token) {
    constexpr uint32_t BITS = 1u << 31 | 1u << (31 - TWICE) | 1u << (31 - 2 * TWICE) | 1u << (31 - 3 * TWICE);
    constexpr uint32_t MOVE = 1u | 1u << (TWICE - 1) | 1u << (2 * TWICE - 2) | 1u << (3 * TWICE - 3);
    const uint32_t last = *(const uint32_t*)(planes[0] + token * ROW + (ROW - 4));
    return (last & BITS) * MOVE >> 28;
  }
  // 2^((n - 6) / 4), 0 for n = 0; n: the lowest four bits
  KV_DEV static float scale_of(uint32_t n) {
    const float wide = bits_float(and_or(n, 15u, 0x4b000000u));  // 2^23 + n
    const float power = exp2_fast(fma(wide, 0.25f, -2097153.5f));
    return wide == 8388608.0f ? 0.0f : power;
  }

  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = false;
  KV_FUNCTION float k_weight(int) { return 1.0f; }
  template <class P>
  KV_DEV static void keys(const P& planes, const Held<K_REGS>& held, int token, int part, int,
                          uint32_t (&r)[K_REGS]) {
    using Part = PartStream<D / 8 * TWICE, 4>;
    uint32_t w[Part::WORDS];
    Part::load(planes[0] + token * ROW, part, w);
    Pairs::template look_up<0>(w, held.levels, held.origins, r);
  }
  template <class P> KV_DEV static float k_scale(const P& planes, int token, int) {
    return scale_of(number(planes, token));
  }

  KV_CONST bool V_BLOCKED = false;
  KV_CONST bool V_BLOCK_ZERO = false;
  KV_CONST bool HAS_V_SCALE = true;
  KV_CONST bool HAS_V_ZERO = false;
  KV_FUNCTION float v_weight(int) { return 1.0f; }
  template <class P>
  KV_DEV static void values(const P& planes, const Held<V_REGS>& held, int token, int part, int lane,
                            uint32_t (&r)[V_REGS]) {
    using Part = PartStream<D / 16 * TWICE, 8>;
    uint32_t w[Part::WORDS];
    if constexpr (CROSSED) CrossedWords::load(planes[0] + token * ROW, 0, 0, part, lane, w);
    else Part::load(planes[0] + token * ROW, part, w);
    Pairs::template look_up<0>(w, held.levels, held.origins, r);
  }
  template <class P> KV_DEV static float v_scale(const P& planes, int token) { return scale_of(number(planes, token)); }
};

}  // namespace kv
