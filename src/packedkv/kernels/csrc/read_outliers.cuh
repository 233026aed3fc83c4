// Reader of med (packedkv/codecs/outliers.py) around a reader of single tokens in the model's basis: chunks of four
// channels that are held in fp16 take the place of what the inner codec has there.
//
// The inner reader is not changed. Scores and outputs are sums over channels, so the differences between outliers and
// the inner codec's numbers are added in a separate product. A warp scatters the chunks of 16 tokens, one to a lane,
// into a zeroed scratch in shared memory, in the order of the tensor core's operands, multiplies, and zeroes the
// scratch again. A tile without outliers costs one vote. Numbers are held exactly and summed in fp32, without a scale.
#pragma once
#include "products.cuh"

namespace kv {

// What inner codecs decode where they were given zeros, in fp16. Hqmq and symmetric integers: 0.
struct RestZero {
  KV_CONST bool SOME = false;
  template <class P> KV_DEV static void read(const P&, int, uint32_t, uint32_t (&)[2]) {}
};
// Integers that are not symmetric: the level nearest to 0.
template <int D, int BITS> struct RestInt {
  KV_CONST bool SOME = true;
  template <class P> KV_DEV static void read(const P& planes, int token, uint32_t chunk, uint32_t (&x)[2]) {
    const uint8_t* row = planes[0] + token * (D * BITS / 8);
    uint32_t w;
    if (BITS == 8) w = ((const uint32_t*)row)[chunk];
    else if (BITS == 4) w = ((const uint16_t*)row)[chunk];
    else if (BITS == 3) w = (row[chunk * 3 / 2] | (uint32_t)row[chunk * 3 / 2 + 1] << 8) >> chunk % 2 * 4;
    else w = row[chunk];
    constexpr uint32_t MASK = (1u << BITS) - 1;
    const uint32_t scale = ((const uint16_t*)planes[1])[token], zero = ((const uint16_t*)planes[2])[token];
    KV_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t codes = (w >> 2 * i * BITS & MASK) | (w >> (2 * i + 1) * BITS & MASK) << 16;
      x[i] = hfma2(hadd2(codes | 0x64006400u, 0xe400e400u), low2(scale), low2(zero));
    }
  }
};

// one bit for each chunk of a token
template <bool LONG> struct FlagWord { using Word = uint32_t; };
template <> struct FlagWord<true> { using Word = uint64_t; };

// SLOTS as in the layout, at most D / 4. PASSES: 1, or 2 with half the scratch, each over half of the channels
template <class Inner, int D, int SLOTS, int PASSES, class Rest = RestZero> struct ReadMed : Inner {
  static_assert(Inner::BLOCK == 1 && !Inner::K_BLOCKED && !Inner::V_BLOCKED && SLOTS <= D / 4, "tokens of their own");
  static_assert(D == 64 || D == 96 || D == 128 || D == 192 || D == 256, "how flags are read");
  static_assert(PASSES == 1 || D >= 128, "whole operands");
  KV_CONST int FLAGS = Inner::PLANES, HELD = FLAGS + 1;
  KV_CONST int PLANES = HELD + 1;
  KV_FUNCTION int plane_bytes(int p) { return p < FLAGS ? Inner::plane_bytes(p) : p == FLAGS ? D / 32 : 8 * SLOTS; }

  using Bounded = ReadMed<typename Unpacks<Inner, true>::Reader, D, SLOTS, PASSES, Rest>;
  KV_CONST int K_REGS = Inner::K_REGS, V_REGS = Inner::V_REGS;
  KV_CONST int SCRATCH = 256 * (K_REGS > 2 * V_REGS ? K_REGS : 2 * V_REGS) / PASSES;  // bytes of a warp

  // whether any of TOKENS tokens, dead ones too, has an outlier
  template <int TOKENS, class P> KV_DEV static bool has_outliers(const P& planes, int lane) {
    const uint32_t* words = (const uint32_t*)planes[FLAGS];
    constexpr int COUNT = TOKENS * D / 128;
    uint32_t some = 0;
    KV_UNROLL
    for (int i = 0; i < COUNT; i += 32)
      if (i + 32 <= COUNT || i + lane < COUNT) some |= words[i + lane];
    return any(some != 0);
  }

  using Word = typename FlagWord<(D > 128)>::Word;
  template <class P> KV_DEV static Word flags(const P& planes, int token) {
    const uint8_t* plane = planes[FLAGS];
    if constexpr (D == 64) {
      return ((const uint16_t*)plane)[token];
    } else if constexpr (D == 96) {  // three bytes; what is read behind the last ones belongs to the next plane
      const uint32_t* words = (const uint32_t*)plane + 3 * token / 4;
      return funnel(words[0], words[1], 24 * token % 32) & 0xffffffu;
    } else if constexpr (D == 128) {
      return ((const uint32_t*)plane)[token];
    } else if constexpr (D == 192) {
      const uint16_t* halves = (const uint16_t*)plane + 3 * token;
      return halves[0] | (uint32_t)halves[1] << 16 | (uint64_t)halves[2] << 32;
    } else {
      const Words2 x = ((const Words2*)plane)[token];
      return x.a | (uint64_t)x.b << 32;
    }
  }

  // Outliers of 16 tokens: a lane has those of ranks lane, lane + 32 .. of all slots.
  KV_CONST int ROUNDS = (16 * SLOTS + 31) / 32;
  KV_DEV static int token_of(int round, int lane) { return (lane + 32 * round) / SLOTS; }
  KV_DEV static int slot_of(int round, int lane) { return (lane + 32 * round) % SLOTS; }
  // The chunk that a slot holds; whether it holds one. Of an empty slot it is any number up to 64.
  struct Found {
    uint32_t chunk;
    bool some;
  };
  template <class P> KV_DEV static Found find(const P& planes, int token, int round, int lane) {
    if (16 * SLOTS % 32 && token_of(round, lane) >= 16) return {0, false};
    Word left = flags(planes, token + token_of(round, lane));
    KV_UNROLL
    for (int i = 1; i < SLOTS; ++i) left = slot_of(round, lane) < i ? left : left & (left - 1);
    const uint32_t low = (uint32_t)left, high = (uint32_t)((uint64_t)left >> 32);
    return {D <= 128 || low ? first_bit(low) : 32 + first_bit(high), left != 0};
  }
  // what the slot holds; a lane without one reads on
  template <class P> KV_DEV static Words2 held(const P& planes, int token, int round, int lane) {
    return ((const Words2*)planes[HELD] + token * SLOTS)[lane + 32 * round];
  }
  // a chunk minus the inner codec's numbers
  template <class P>
  KV_DEV static Words2 surplus(const P& planes, int token, Found at, int round, int lane) {
    Words2 x = held(planes, token, round, lane);
    if constexpr (is_crossed<Inner>(0)) x = {prmt(x.a, x.b, 0x7632), prmt(x.a, x.b, 0x5410)};
    if constexpr (Rest::SOME) {
      uint32_t rest[2];
      Rest::read(planes, token + token_of(round, lane), at.some ? at.chunk : 0, rest);
      x.a = hadd2(x.a, rest[0] ^ 0x80008000u), x.b = hadd2(x.b, rest[1] ^ 0x80008000u);
    }
    return x;
  }

  // Channel i of a part's chunk c is its element first(c) + STEP i: neighbours, or every other one of eight. Of CROSSED
  // readers channels 1, 3, 0, 2 are what 0, 1, 2, 3 are here.
  KV_FUNCTION int channel(int c, int i) {
    return 4 * c + (is_crossed<Inner>(0) ? (2 * i + 1 - i / 2) % 4 : i);
  }
  KV_FUNCTION int element(bool key, int channel) {
    for (int e = 0; e < 2 * (key ? K_REGS : V_REGS); ++e)
      if ((key ? Inner::k_channel(0, e) : Inner::v_channel(0, e)) == channel) return e;
    return -1;
  }
  template <bool KEY> struct Order {
    KV_CONST int CHUNKS = (KEY ? K_REGS : V_REGS) / 2;
    KV_CONST int STEP = element(KEY, channel(0, 1));
    KV_CONST int SECOND = element(KEY, channel(1, 0));
    KV_CONST int THIRD = CHUNKS > 2 ? element(KEY, channel(2, 0)) : 0;
    KV_CONST int FOURTH = CHUNKS > 3 ? element(KEY, channel(3, 0)) : 0;
    KV_CONST uint32_t TABLE = (uint32_t)(SECOND << 8 | THIRD << 16) | (uint32_t)FOURTH << 24;
    KV_FUNCTION uint32_t first(uint32_t c) { return STEP == 1 ? 4 * c : c / 4 * 16 + (TABLE >> c % 4 * 8 & 0xffu); }
    KV_FUNCTION bool valid() {
      for (int c = 0; c < CHUNKS; ++c) {
        if (STEP == 2 && first(c) % 8 > 1) return false;
        for (int i = 0; i < 4; ++i)
          if (element(KEY, channel(c, i)) != (int)first(c) + STEP * i) return false;
      }
      return STEP == 1 || STEP == 2;
    }
  };
  using KeyOrder = Order<true>;
  using ValueOrder = Order<false>;

  // places are in the scratch of pass 0, then of pass 1
  KV_DEV static bool is_of(int at, int pass) {
    return PASSES == 1 ? at >= 0 : (uint32_t)(at - pass * SCRATCH) < (uint32_t)SCRATCH;
  }
  KV_DEV static void put(uint8_t* at, uint32_t word) { *(uint32_t*)at = word; }
  KV_DEV static void put_half(uint8_t* at, uint32_t half) { *(uint16_t*)at = (uint16_t)half; }

  // Scratch of keys. 16 bytes are an operand: registers r and r + 1 of tokens g and g + 8. Those of parts 0, 1, 2, 3
  // lie side by side; then come the next registers; then the next g. Where g is odd, neighbours are swapped, so that
  // a quarter of a warp meets all banks.
  KV_CONST int K_UNITS = K_REGS / 2 / PASSES, K_ROW = 64 * K_UNITS;
  KV_DEV static int key_place(uint32_t token, uint32_t chunk) {
    const uint32_t part = chunk / KeyOrder::CHUNKS, e = KeyOrder::first(chunk % KeyOrder::CHUNKS);
    const uint32_t pass = PASSES == 1 ? 0 : e / 4 / K_UNITS, unit = e / 4 - pass * K_UNITS;
    const uint32_t of_token = token % 8 * K_ROW + token / 8 * 4;
    return (int)(of_token + pass * SCRATCH + (unit * 64 ^ token % 2 * 64) + part * 16 + e % 2 * 2);
  }
  KV_DEV static void put_key(uint8_t* scratch, int at, Words2 x) {
    uint8_t* to = scratch + at;
    if constexpr (KeyOrder::STEP == 1) {
      put(to, x.a), put(to + 8, x.b);
    } else {
      uint8_t* other = scratch + (at ^ 64);
      put_half(to, x.a), put_half(to + 8, x.a >> 16), put_half(other, x.b), put_half(other + 8, x.b >> 16);
    }
  }

  // Weights of q, 2^-n. Where n depends on the chunk alone, or on the place in it, outliers are scaled to compensate,
  // by 2^(n - MOST): nothing overflows, and what underflows is small beside any score. Elsewhere q is divided by them.
  KV_FUNCTION int exponent(int e) {
    int n = 0;
    for (float w = Inner::k_weight(e); w < 1.0f; w *= 2.0f) ++n;
    return n;
  }
  struct Weights {
    KV_FUNCTION int of(int chunk, int i) { return exponent((int)KeyOrder::first(chunk) + KeyOrder::STEP * i); }
    KV_FUNCTION int count(bool chunk, bool place) {  // what differs from the same chunk's, or place's, first one
      int n = 0;
      for (int c = 0; c < KeyOrder::CHUNKS; ++c)
        for (int i = 0; i < 4; ++i) n += of(c, i) != of(chunk ? c : 0, place ? i : 0);
      return n;
    }
    KV_FUNCTION int most() {
      int n = 0;
      for (int e = 0; e < 2 * K_REGS; ++e) n = exponent(e) > n ? exponent(e) : n;
      return n;
    }
    KV_FUNCTION uint64_t packed() {
      uint64_t x = 0;
      for (int c = 0; c < KeyOrder::CHUNKS; ++c) x |= (uint64_t)of(c, 0) << 4 * c;
      return x;
    }
    KV_CONST bool EQUAL = count(false, false) == 0, BY_PLACE = count(false, true) == 0;
    KV_CONST bool BY_CHUNK = count(true, false) == 0, IN_QUERY = !BY_PLACE && !BY_CHUNK;
    KV_CONST int MOST = IN_QUERY ? 0 : most();
    KV_CONST uint64_t TABLE = BY_CHUNK ? packed() : 0;
    static_assert(most() < 15, "fp16 has them");
    KV_FUNCTION uint32_t up(uint32_t n) { return (n << 10) + ((15 - MOST) << 10); }
    KV_FUNCTION uint32_t place(int i) { return up(of(0, i)) | up(of(0, i + 1)) << 16; }
    KV_CONST uint32_t FIRST = BY_PLACE ? place(0) : 0, LAST = BY_PLACE ? place(2) : 0;
  };
  KV_DEV static Words2 weighted(Words2 x, uint32_t chunk) {
    if constexpr (Weights::EQUAL || Weights::IN_QUERY) return x;
    if constexpr (Weights::BY_PLACE) return {hmul2(x.a, Weights::FIRST), hmul2(x.b, Weights::LAST)};
    const uint32_t at = chunk % KeyOrder::CHUNKS * 4;
    const uint32_t n = KeyOrder::CHUNKS <= 8 ? (uint32_t)Weights::TABLE >> at % 32 : (uint32_t)(Weights::TABLE >> at);
    const uint32_t factor = low2(Weights::up(n & 15));
    return {hmul2(x.a, factor), hmul2(x.b, factor)};
  }
  KV_DEV static uint32_t inverse(int e) { return (float_bits(1.0f / Inner::k_weight(e)) >> 23) - 112 << 10; }
  KV_DEV static uint32_t unweighted(uint32_t q, int r) {
    if constexpr (Weights::IN_QUERY) return hmul2(q, inverse(2 * r) | inverse(2 * r + 1) << 16);
    else return q;
  }

  // s += q outliers of 16 tokens, in the order of `scores`; scale: of the query
  template <class P>
  KV_DEV static void add_scores(float (&s)[4], const uint32_t (&q)[K_REGS], const float (&scale)[2], const P& planes,
                                uint8_t* scratch, int token, int lane) {
    static_assert(KeyOrder::valid(), "where a part has its channels");
    int at[ROUNDS];
    Words2 x[ROUNDS];
    KV_UNROLL
    for (int i = 0; i < ROUNDS; ++i) {
      const Found found = find(planes, token, i, lane);
      at[i] = found.some ? key_place(token_of(i, lane), found.chunk) : -1;
      x[i] = weighted(surplus(planes, token, found, i, lane), found.chunk);
    }
    const uint8_t* mine = scratch + lane / 4 * K_ROW + lane % 4 * 16;
    const int swap = lane / 4 % 2 * 64;
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    KV_UNROLL
    for (int pass = 0; pass < PASSES; ++pass) {
      sync_warp();
      KV_UNROLL
      for (int i = 0; i < ROUNDS; ++i)
        if (is_of(at[i], pass)) put_key(scratch, at[i] - pass * SCRATCH, x[i]);
      sync_warp();
      KV_UNROLL
      for (int unit = 0; unit < K_UNITS; ++unit) {
        const Words4 u = *(const Words4*)(mine + (unit % 2 ? -swap : swap) + unit * 64);
        const int k = 2 * (pass * K_UNITS + unit);
        mma(d, u.a, u.b, u.c, u.d, unweighted(q[k], k), unweighted(q[k + 1], k + 1));
      }
      sync_warp();
      KV_UNROLL
      for (int i = 0; i < ROUNDS; ++i)
        if (is_of(at[i], pass)) put_key(scratch, at[i] - pass * SCRATCH, Words2{0u, 0u});
    }
    constexpr float CODES = k_scale_unit<Inner>(0) != 0.0f ? k_scale_unit<Inner>(0) : 1.0f;  // in the query's scale
    constexpr float UNIT = (float)(1 << Weights::MOST) / CODES;
    KV_UNROLL
    for (int i = 0; i < 4; ++i) s[i] += d[i] * (scale[i % 2] * UNIT);
  }

  // Scratch of values. 16 bytes are an operand: elements e and e + 2 of tokens 2j, 2j+1, 2j+8, 2j+9. Those of j = 0, 1,
  // 2, 3 lie side by side; then come e + 1, e + 4, e + 5 ..; then the next part. Neighbours are swapped as above.
  KV_CONST int V_UNITS = V_REGS / PASSES, V_PART = 64 * V_UNITS;
  KV_DEV static int value_place(uint32_t token, uint32_t chunk) {
    const uint32_t part = chunk / ValueOrder::CHUNKS, e = ValueOrder::first(chunk % ValueOrder::CHUNKS);
    const uint32_t pass = PASSES == 1 ? 0 : e / 4 * 2 / V_UNITS, unit = e / 4 * 2 - pass * V_UNITS;
    const uint32_t of_token = token % 8 / 2 * 16 + token / 8 * 8 + token % 2 * 2;
    return (int)(of_token + part * V_PART + pass * SCRATCH + unit * 64 + (e % 2 ^ part % 2) * 64);
  }
  KV_DEV static void put_value(uint8_t* scratch, int at, Words2 x) {
    uint8_t* to = scratch + at;
    if constexpr (ValueOrder::STEP == 1) {
      uint8_t* other = scratch + (at ^ 64);
      put_half(to, x.a), put_half(other, x.a >> 16), put_half(to + 4, x.b), put_half(other + 4, x.b >> 16);
    } else {
      put_half(to, x.a), put_half(to + 4, x.a >> 16), put_half(to + 128, x.b), put_half(to + 132, x.b >> 16);
    }
  }

  // out += outliers p of 16 tokens, p as `Softmax::weigh` gives it; reference, inverse: of the values' scales
  template <bool MASKED, class P>
  KV_DEV static void add_outputs(float (&out)[V_REGS / 2][2][4], const float (&p)[4], float& reference, float& inverse,
                                 const P& planes, uint8_t* scratch, int token, int lane, int live_from, int live_to) {
    static_assert(ValueOrder::valid(), "where a part has its channels");
    int at[ROUNDS];
    Words2 x[ROUNDS];
    KV_UNROLL
    for (int i = 0; i < ROUNDS; ++i) {
      const Found found = find(planes, token, i, lane);
      const int own = token_of(i, lane);
      const bool live = !MASKED || (token + own >= live_from && token + own < live_to);
      at[i] = found.some && live ? value_place(own, found.chunk) : -1;
      x[i] = surplus(planes, token, found, i, lane);
    }
    // only outliers so far
    if (Inner::HAS_V_SCALE && reference == 0.0f) reference = inverse = 1.0f;
    const float over = Inner::HAS_V_SCALE ? inverse : 1.0f;
    uint32_t b[2];
    weights(b, p);
    const uint8_t* mine = scratch + lane / 4 * V_PART + lane % 4 * 16;
    const int swap = lane / 4 % 2 * 64;
    KV_UNROLL
    for (int pass = 0; pass < PASSES; ++pass) {
      sync_warp();
      KV_UNROLL
      for (int i = 0; i < ROUNDS; ++i)
        if (is_of(at[i], pass)) put_value(scratch, at[i] - pass * SCRATCH, x[i]);
      sync_warp();
      KV_UNROLL
      for (int unit = 0; unit < V_UNITS; ++unit) {
        const Words4 u = *(const Words4*)(mine + (unit % 2 ? -swap : swap) + unit * 64);
        const int k = (pass * V_UNITS + unit) / 2, odd = unit % 2;
        float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        mma(d, u.a, u.b, u.c, u.d, b[0], b[1]);
        KV_UNROLL
        for (int i = 0; i < 4; ++i) out[k][odd][i] += d[i] * (over / Inner::v_weight(4 * k + odd + i / 2 * 2));
      }
      sync_warp();
      KV_UNROLL
      for (int i = 0; i < ROUNDS; ++i)
        if (is_of(at[i], pass)) put_value(scratch, at[i] - pass * SCRATCH, Words2{0u, 0u});
    }
  }

  // outliers of 16 tokens, each lane some: take(token of the 16, channel, number)
  template <class P, class Take> KV_DEV static void each_outlier(const P& planes, int token, int lane, Take take) {
    KV_UNROLL
    for (int i = 0; i < ROUNDS; ++i) {
      const Found found = find(planes, token, i, lane);
      if (!found.some) continue;
      const Words2 x = held(planes, token, i, lane);
      KV_UNROLL
      for (int e = 0; e < 4; ++e)
        take(token_of(i, lane), 4 * (int)found.chunk + e, half_float((uint16_t)((e < 2 ? x.a : x.b) >> e % 2 * 16)));
    }
  }
};

}  // namespace kv
