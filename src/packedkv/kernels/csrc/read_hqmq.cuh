// Reader of hqmq (packedkv/codecs/hqmq.py, packing=ceil), keys and values: four channels are a codebook row times a
// signed radius.
//
// One mask leaves the signed radii of two chunks in the halves of a word, fp16 subnormals with a sign, and the codebook
// is held times 2^15, so that their product, one instruction for two channels, is a normal number. Radii that are
// stored higher by a power of two are corrected in q or in the output.
//
// The codebook's size limits speed: lanes read different rows, and only what fits in many copies is read without
// conflicts. Rows 2n and 2n + 1 of it are each other's negatives: half of them are held. Where those would still be
// few copies, a quarter may be: rows 4n + 2 and 4n + 3 are i times rows 4n and 4n + 1,
//
//     i (a, b, c, d) = (-b, a, -d, c)     with (b, d) and (a, c) in a register each, one of them is -(the other)
//
// so that a row is a sum of both registers, each times the radius or zero.
#pragma once
#include "bits.cuh"
#include "hqmq.cuh"

namespace kv {

// Which role's table it is. Dead slots hold arbitrary bits, and 24 S is not a power of two: their look-ups must stay
// inside shared memory.
enum Place {
  ALONE,   // addresses are bounded, by one more instruction for each row
  KEYS,    // beside the values' of the same S, which is as long and follows: rows behind the table may be read
  VALUES,  // in reverse order behind the keys': rows before it may be read
};

// CROSSED: a quarter of the codebook is held, channels 1, 3, 0, 2. BOUND: addresses are bounded wherever the table is.
template <int D, int S, int R, bool CROSS = false, Place BESIDE = ALONE, bool BOUND = false> struct ReadHqmq {
  using Fields = HqmqFields<D, S, R>;
  KV_CONST int CHUNKS = Fields::CHUNKS;
  KV_CONST bool CROSSED = CROSS;
  KV_CONST int ENTRIES = CROSSED ? 6 * S : 12 * S, ROOM = 73728;
  // a row's place in a word of 16 bits is multiplied, never divided, to become its address
  KV_CONST int FROM = Fields::HELD + CROSSED;  // the lowest bit of the place
  KV_CONST int LEAST = Fields::UNITS ? 1 << (FROM - 3) : CROSSED ? 4 : 1;
  // Rows whose low bits are a byte: keys' and values' tables are interleaved, so that rows are 256 bytes apart
  // and one prmt sets an address together, of copy, low byte and high bit.
  KV_CONST bool BYTES = !Fields::UNITS && Fields::LOW == 8;
  KV_CONST bool INTERLEAVED = BYTES && BESIDE != ALONE && table_copies(ENTRIES, ROOM) == 16;
  using Codebook = Table8<ENTRIES, ROOM, INTERLEAVED ? 2 : 1, 6, LEAST>;
  KV_CONST bool SHORT = !Fields::UNITS && CROSSED && Codebook::COPIES < 8;  // what follows may be less than is reached
  KV_CONST Place PLACE = (BYTES && !INTERLEAVED) || SHORT ? ALONE : BESIDE;

  KV_CONST int BLOCK = 1;
  KV_CONST int PLANES = Fields::PLANES;
  KV_FUNCTION int plane_bytes(int p) { return Fields::plane_bytes(p); }
  KV_CONST int TABLE = Codebook::BYTES;
  KV_CONST int REACH = INTERLEAVED ? 512 * Codebook::STRIDE : 0;  // what nine bits can address
  // where there are dead slots: what lies behind interleaved tables is being written
  using Bounded = ReadHqmq<D, S, R, CROSS, BESIDE, INTERLEAVED>;
  KV_CONST uint32_t MOST = INTERLEAVED ? (ENTRIES - 1) * Codebook::STRIDE + Codebook::STRIDE / 2 - 8 : TABLE - 8;

  // source: rows 0, 2, 4 .., or 0, 4, 8 .., of four fp16 numbers, times 2^15
  KV_DEV static void fill(uint8_t* to, const uint8_t* from, int thread, int threads) {
    constexpr bool DOWN = PLACE == VALUES && !INTERLEAVED;
    Codebook::template fill<DOWN>(INTERLEAVED && PLACE == VALUES ? to - GAP : to, from, thread, threads);
  }
  KV_CONST int GAP = TABLE - Codebook::STRIDE / 2;  // from the values' interleaved table to where it would be

  // of rows that are whole words, what depends on the lane alone is held throughout the loop
  KV_CONST bool HOLDS = !Fields::UNITS && !BYTES && Fields::SIGNED && CHUNKS * Fields::LOW % 32 == 0 && CHUNKS % 8 == 0;
  template <int ROW_BYTES, int PART_BITS> using Words = Stream<ROW_BYTES, PART_BITS, ROW_BYTES % 4 == 0>;

  // N chunks of a part: all of the eighth `part` of a row (values), or two eighths (keys)
  template <int N> struct Part {
    KV_CONST int TO = Codebook::STRIDE_BIT;
    KV_CONST uint32_t LAST = (1u << (Fields::W - 1 - CROSSED)) - 1;  // of the rows that a code can name
    // where row 0 would be
    KV_DEV static const uint8_t* begin(const uint8_t* table) {
      return PLACE != VALUES ? table : table - (INTERLEAVED ? GAP : (int)(LAST - ENTRIES + 1) * Codebook::STRIDE);
    }
    KV_DEV static uint32_t bounded(uint32_t at, uint32_t most) {
      return (PLACE != ALONE && !BOUND) || at < most ? at : most;
    }
    KV_DEV static void times(uint32_t* r, Words2 x, uint32_t lengths, bool high) {
      const uint32_t length = high ? high2(lengths) : low2(lengths);
      r[0] = hmul2(x.a, length), r[1] = hmul2(x.b, length);
    }
    // `by_i`: halves all ones where a chunk is i times the row, or zeros
    KV_DEV static void cross(uint32_t* r, Words2 x, uint32_t lengths, uint32_t by_i, bool high) {
      const uint32_t straight = lengths & ~by_i, crossed = lengths & by_i;
      const uint32_t a = high ? high2(straight) : low2(straight), b = high ? high2(crossed) : low2(crossed);
      r[0] = hfma2(x.b, b, hmul2(x.a, a));
      r[1] = hfms2(x.b, a, hmul2(x.a, b));
    }

    // chunks 2i and 2i + 1 are the halves of a word
    template <class P>
    KV_DEV static void units(const uint32_t (&w)[(N + 1) / 2], const P& planes, const uint8_t* table, int token,
                             int own, int part, int lane, uint32_t* r) {
      constexpr uint32_t BOTH = 0x10001u, ROWS = LAST << FROM, LOW = (1u << Fields::HELD) - 1;
      constexpr uint32_t HIGH = ((1u << R) - 1) & ~LOW, WEIGHT = 1u << (TO - FROM);
      const uint32_t origin = table_origin(begin(table)), mine = Codebook::copy(lane) + origin;
      uint32_t more[(N + 1) / 2];
      if (Fields::SPARE) spare(planes, token, own, part, more);
      KV_UNROLL
      for (int k = 0; k < N; ++k) {
        const uint32_t x = w[k / 2], rows = (PLACE == VALUES ? ~x : x) & ROWS * BOTH;
        uint32_t lengths = x;
        if (Fields::SPARE) lengths = (x & ~(HIGH * BOTH)) | (more[k / 2] & HIGH * BOTH);
        lengths &= (0x8000u | LOW | HIGH) * BOTH;
        const uint32_t at = bounded(dot2(rows, k % 2 ? WEIGHT << 8 : WEIGHT, mine), origin + TABLE - 8);
        const Words2 row = load_from2(begin(table), at);
        if constexpr (CROSSED) {
          cross(r + 2 * k, row, lengths, prmt(x << (15 - Fields::HELD), 0u, 0xbb99), k % 2);
        } else {
          times(r + 2 * k, row, lengths, k % 2);
        }
      }
    }
    // high bits of the radii of chunks 2i and 2i + 1, where they belong; other bits are undefined
    template <class P>
    KV_DEV static void spare(const P& planes, int token, int own, int part, uint32_t (&more)[(N + 1) / 2]) {
      constexpr int BITS = Fields::SPARE ? Fields::SPARE : 1, GROUP = 16 / BITS / 2 * 2;  // chunks of 16 bits, even
      const Words<CHUNKS * BITS / 8, N * BITS> stream(planes[1], token, own, part);
      KV_UNROLL
      for (int k = 0; k < N; k += 2) {
        const uint32_t x = stream.field(k / GROUP * GROUP * BITS, 16, 0), pair = prmt(x, x >> BITS, 0x5410);
        const int by = k % GROUP * BITS - Fields::HELD;
        more[k / 2] = by > 0 ? pair >> by : pair << -by;
      }
    }

    using Low = Words<CHUNKS * Fields::LOW / 8, N * Fields::LOW>;
    using Radii = Words<CHUNKS / 2, 4 * N>;
    // what of their places depends on the lane alone
    struct Held {
      const uint8_t* table;
      typename Low::Place low;
      typename Radii::Place radii;
      KV_DEV Held(const uint8_t* table, int own, int part) : table(table), low(0, own, part), radii(0, own, part) {
        low.hold(), radii.hold();
      }
    };
    KV_DEV static const uint8_t* table_of(const Held& held) { return held.table; }
    KV_DEV static Low low_of(const uint8_t* plane, const Held& held, int token, int own, int) {
      return Low(plane, token - own, held.low);
    }
    KV_DEV static Radii radii_of(const uint8_t* plane, const Held& held, int token, int own, int) {
      return Radii(plane, token - own, held.radii);
    }
    KV_DEV static const uint8_t* table_of(const uint8_t* table) { return table; }
    KV_DEV static Low low_of(const uint8_t* plane, const uint8_t*, int token, int own, int part) {
      return Low(plane, token, own, part);
    }
    KV_DEV static Radii radii_of(const uint8_t* plane, const uint8_t*, int token, int own, int part) {
      return Radii(plane, token, own, part);
    }

    template <class P, class H>
    KV_DEV static void apart(const P& planes, const H& held, int token, int own, int part, int lane, uint32_t* r) {
      constexpr int EIGHTH = Fields::EIGHTH, BITS = Fields::BITS ? Fields::BITS : 1;
      constexpr bool TWO = EIGHTH % 4 == 0;  // chunks k and k + 2 have their signs in one word
      const uint8_t* table = table_of(held);
      const Low low = low_of(planes[0], held, token, own, part);
      const Radii radii = radii_of(planes[1], held, token, own, part);
      const Words<BITS * EIGHTH, 8 * BITS * EIGHTH> bits(planes[Fields::BITS ? 2 : 1], token, own, 0);
      KV_UNROLL
      for (int k = 0; k < N; ++k) {
        const int g = N == EIGHTH ? part : part * (N / EIGHTH) + k / EIGHTH, i = k % EIGHTH;
        uint32_t at;
        if (BYTES) {
          at = address(low.w[k / 4], k % 4, bits.w[i / 4] >> g, i % 4, lane);
        } else {
          const uint32_t x = low.field(Fields::LOW * k, Fields::LOW, TO - CROSSED);
          const uint32_t copy = Codebook::copy(lane);
          at = PLACE == VALUES ? not_and_or(x, LAST << TO, copy) : and_or(x, LAST << TO, copy);
        }
        uint32_t lengths;
        if (Fields::SIGNED) {  // four chunks: bytes doubled
          const uint32_t x = prmt(radii.w[k / 8], 0u, k / 4 % 2 ? 0x3322 : 0x1100);
          lengths = (k % 2 ? x : x << 4) & 0x80708070u;
        } else {  // of chunks `first` and `second`: a radius, and above it a byte whose highest bit is the sign
          const int first = TWO ? k - k % 4 / 2 * 2 : k, second = TWO ? first + 2 : k;
          const int m = (BITS - 1) * EIGHTH + first % EIGHTH, n = (BITS - 1) * EIGHTH + second % EIGHTH;
          const uint32_t x = radii.w[k / 8] & (k % 2 ? 0xf0f0f0f0u : 0x0f0f0f0fu);
          const uint32_t signs = bits.w[m / 4] << (7 - g) & 0x80808080u;
          const int low = first % 8 / 2 | (4 + m % 4) << 4, high = second % 8 / 2 | (4 + n % 4) << 4;
          lengths = prmt(x, signs, (uint32_t)(low | high << 8));
        }
        const Words2 row = Codebook::get(begin(table), bounded(at, MOST));
        if constexpr (CROSSED) {
          static_assert(Fields::SIGNED, "radii of chunks k and k + 2 in a word");
          const int first = k - k % 4 / 2 * 2, second = first + 2 < N ? first + 2 : first;
          const uint32_t x = low.field(Fields::LOW * first, Fields::LOW, 7);
          const uint32_t y = low.field(Fields::LOW * second, Fields::LOW, 7);
          cross(r + 2 * k, row, lengths, prmt(x, y, 0xcc88), k % 4 / 2);
        } else {
          times(r + 2 * k, row, lengths, (Fields::SIGNED || TWO) && k % 4 / 2);
        }
      }
    }
    // of the row with byte b of `low`, and bit 8 the lowest bit of byte h of `high`
    KV_DEV static uint32_t address(uint32_t low, int b, uint32_t high, int h, int lane) {
      const uint32_t copy = Codebook::copy(lane);
      if (!INTERLEAVED) {
        const uint32_t at = prmt(low, high & 0x01010101u, (uint32_t)(b | (4 + h) << 4 | (12 + h) * 0x1100));
        return (at << TO) + copy;
      }
      // the copy takes the place of a byte of bits; it is less than 128: its highest bit makes zeros
      if (h == 0) return prmt(low, and_or(high, 1u, copy << 8), (uint32_t)(5 | b << 4 | 0xd400));
      return prmt(low, and_or(high, 0x01010100u, copy), (uint32_t)(4 | b << 4 | (4 + h) << 8 | 0xc000));
    }
  };

  // sigma / (2^R - 1), from sigma / 2, 2^-24 of a subnormal and the codebook's 2^15; radii may lie four bits higher
  KV_CONST float UNIT = 1024.0f / (float)((1 << R) - 1) * (!Fields::UNITS && Fields::SIGNED ? 0.0625f : 1.0f);
  KV_FUNCTION float weight(int e) { return !Fields::UNITS && !Fields::SIGNED && e / 4 % 2 ? 0.0625f : 1.0f; }
  template <class P> KV_DEV static float scale(const P& planes, int token) {
    return half_float(((const uint16_t*)planes[PLANES - 1])[token]);
  }

  using Keys = Part<CHUNKS / 4>;
  KV_CONST int GROUPS = 1;
  KV_CONST int K_REGS = CHUNKS / 2;
  KV_CONST bool K_BLOCKED = false;
  KV_CONST bool HAS_K_ZERO = false;
  KV_CONST float K_UNIT = 1.0f;
  KV_CONST float K_SCALE_UNIT = UNIT;
  KV_FUNCTION int turned(int e) { return CROSSED ? e / 4 * 4 + (e % 4 * 2 + 1 - e % 4 / 2) % 4 : e; }
  KV_FUNCTION int k_channel(int part, int e) { return part * (D / 4) + turned(e); }
  KV_FUNCTION float k_weight(int e) { return weight(e); }
  KV_DEV static typename Keys::Held hold_keys(const uint8_t* table, const uint8_t*, int part, int lane) {
    return {table, lane / 4, part};
  }
  template <class P, class H>
  KV_DEV static void keys(const P& planes, const H& table, int token, int part, int lane, uint32_t (&r)[K_REGS]) {
    if constexpr (Fields::UNITS) {
      const Words<2 * CHUNKS, 4 * CHUNKS> x(planes[0], token, lane / 4, part);
      Keys::units(x.w, planes, table, token, lane / 4, part, lane, r);
    } else {
      Keys::apart(planes, table, token, lane / 4, part, lane, r);
    }
  }
  template <class P> KV_DEV static void k_scales(const P& planes, int token, float (&s)[1]) {
    s[0] = scale(planes, token);
  }
  template <class P> KV_DEV static float k_scale(const P& planes, int token, int) {
    return scale(planes, token) * UNIT;
  }

  using Values = Part<CHUNKS / 8>;
  KV_CONST int V_REGS = CHUNKS / 4;
  KV_CONST bool V_BLOCKED = false;
  KV_CONST bool V_BLOCK_ZERO = false;
  KV_CONST bool HAS_V_SCALE = true;
  KV_CONST bool HAS_V_ZERO = false;
  KV_CONST bool V_TURNED = Fields::UNITS && D == 128;  // rows of 64 bytes
  KV_FUNCTION int v_channel(int part, int e) { return part * (D / 8) + turned(e); }
  KV_FUNCTION float v_weight(int e) { return weight(e) * UNIT; }
  KV_DEV static typename Values::Held hold_values(const uint8_t* table, const uint8_t*, int part, int lane) {
    return {table, lane % 4 * 2, part};
  }
  template <class P, class H>
  KV_DEV static void values(const P& planes, const H& table, int token, int part, int lane, uint32_t (&r)[V_REGS]) {
    const int own = lane % 4 * 2;
    if constexpr (Fields::UNITS) {
      const Words<2 * CHUNKS, 2 * CHUNKS> x(planes[0], token, own, part);
      Values::units(x.w, planes, table, token, own, part, lane, r);
    } else {
      Values::apart(planes, table, token, own, part, lane, r);
    }
  }
  template <class P> KV_DEV static float v_scale(const P& planes, int token) { return scale(planes, token); }
};

}  // namespace kv
