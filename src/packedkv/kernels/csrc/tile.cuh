// Tiles: where the planes of a run of tokens lie, in a page and in shared memory, and how a warp fetches them.
//
// A reader R has BLOCK, PLANES and plane_bytes(p), the bytes of one block in plane p. Planes follow one another,
// each start a multiple of 16 bytes, in a page of P tokens as in a tile of T tokens. A tile that is part of a block has
// its own rows of the first ROW_PLANES planes, which hold a row for each token, and all bytes of the others.
#pragma once
#include "platform.cuh"

namespace kv {

template <class R> KV_CONSTEXPR auto row_planes(int) -> decltype(R::ROW_PLANES) { return R::ROW_PLANES; }
template <class R> KV_CONSTEXPR int row_planes(long) { return R::PLANES; }

// bytes of plane p for so many tokens: whole blocks, or a part of one
template <class R> KV_CONSTEXPR int plane_run(int p, int tokens) {
  return tokens >= R::BLOCK     ? R::plane_bytes(p) * (tokens / R::BLOCK)
         : p < row_planes<R>(0) ? R::plane_bytes(p) / R::BLOCK * tokens
                                : R::plane_bytes(p);
}
// where, in plane p of a page, the bytes of the tile of T tokens from token `first` on begin
template <class R, int T> KV_DEV int plane_place(int p, int first) {
  if (T >= R::BLOCK || p >= row_planes<R>(0)) return R::plane_bytes(p) * (first / R::BLOCK);
  return R::plane_bytes(p) / R::BLOCK * first;
}

// offset of plane p when every plane holds that many tokens; p = PLANES: the bytes of all
template <class R> KV_CONSTEXPR int plane_offset(int p, int tokens) {
  int at = 0;
  KV_UNROLL  // the trip count must not depend on p, or the loop is not unrolled
  for (int i = 0; i < R::PLANES; ++i) at += i < p ? align16(plane_run<R>(i, tokens)) : 0;
  return at;
}
template <class R> KV_CONSTEXPR int planes_bytes(int tokens) { return plane_offset<R>(R::PLANES, tokens); }

// A reader may have REACH: the bytes of shared memory, from its start on, that addresses made from dead slots' bits can
// reach.
template <class R> KV_CONSTEXPR auto reach(int) -> decltype(R::REACH) { return R::REACH; }
template <class R> KV_CONSTEXPR int reach(long) { return 0; }
template <class K, class V> KV_CONSTEXPR int with_reach(int shared) {
  const int most = reach<K>(0) > reach<V>(0) ? reach<K>(0) : reach<V>(0);
  return shared > most ? shared : most;
}

// the planes of one role in a tile of T tokens; planes[p] is where plane p begins
template <class R, int T> struct Planes {
  const uint8_t* base;
  // p is a constant in every call, but the compiler would still not unroll plane_offset's loop
  template <int N> KV_FUNCTION int offset_or_0() { return N < R::PLANES ? plane_offset<R>(N, T) : 0; }
  KV_DEV const uint8_t* operator[](int p) const {
    static_assert(R::PLANES <= 6, "one more case");
    constexpr int at1 = offset_or_0<1>(), at2 = offset_or_0<2>(), at3 = offset_or_0<3>(), at4 = offset_or_0<4>();
    constexpr int at5 = offset_or_0<5>();
    return base + (p == 0 ? 0 : p == 1 ? at1 : p == 2 ? at2 : p == 3 ? at3 : p == 4 ? at4 : at5);
  }
};

// A reader may have a variant, Bounded, whose look-ups stay inside its table whatever the bits: for tiles with dead
// slots.
template <class T> struct Always { using Void = void; };
template <class R, bool DEAD, class = void> struct Unpacks { using Reader = R; };
template <class R> struct Unpacks<R, true, typename Always<typename R::Bounded>::Void> {
  using Reader = typename R::Bounded;
};

// A reader of values may be V_PAIRED: registers hold one channel of two tokens; scales and zeros are by group.
template <class V> KV_CONSTEXPR auto is_paired(int) -> decltype(V::V_PAIRED) { return V::V_PAIRED; }
template <class V> KV_CONSTEXPR bool is_paired(...) { return false; }

// Bytes of shared memory, zero between uses, that a reader of outliers needs for each warp (read_outliers.cuh).
template <class R> KV_CONSTEXPR auto scratch_bytes(int) -> decltype(R::SCRATCH) { return R::SCRATCH; }
template <class R> KV_CONSTEXPR int scratch_bytes(...) { return 0; }

// A reader of values may be V_TURNED: lanes with j >= 2 take the later token of their two neighbours first. Where two
// rows fill the 128 bytes of all banks, half of the lanes then read the other half of them.
template <class V> KV_CONSTEXPR auto is_turned(int) -> decltype(V::V_TURNED) { return V::V_TURNED; }
template <class V> KV_CONSTEXPR bool is_turned(...) { return false; }

// A reader of keys may be SKETCHED: its second group of registers is multiplied by a second query, H (s q) of the query
// q in the codes' basis (packedkv/ops/qjl.py; D a power of two), whose channels are numbered from D on; sketch(source)
// tells where the D signs s lie.
template <class K> KV_CONSTEXPR auto is_sketched(int) -> decltype(K::SKETCHED) { return K::SKETCHED; }
template <class K> KV_CONSTEXPR bool is_sketched(...) { return false; }

// A reader may be CROSSED: the registers of four channels hold channels 1 and 3, and 0 and 2.
template <class R> KV_CONSTEXPR auto is_crossed(int) -> decltype(R::CROSSED) { return R::CROSSED; }
template <class R> KV_CONSTEXPR bool is_crossed(...) { return false; }

// A reader may have OWN bytes of shared memory for what of its tables belongs to a sequence and head, and differs from
// piece to piece: fill_own(to, from, thread, threads). They lie apart from its other tables.
template <class R> KV_CONSTEXPR auto own_bytes(int) -> decltype(R::OWN) { return R::OWN; }
template <class R> KV_CONSTEXPR int own_bytes(long) { return 0; }
template <class K, class V> struct OwnTables {
  KV_CONST int VALUES = align16(own_bytes<K>(0));  // where those of values begin
  KV_CONST int BYTES = VALUES + align16(own_bytes<V>(0));
  KV_DEV static void fill(uint8_t* to, const uint8_t* keys, const uint8_t* values, int thread, int threads) {
    if constexpr (own_bytes<K>(0) > 0) K::fill_own(to, keys, thread, threads);
    if constexpr (own_bytes<V>(0) > 0) V::fill_own(to + VALUES, values, thread, threads);
  }
};

// A reader may HOLD in registers what a lane needs of its tables: hold_keys(table, own, part, lane) or hold_values,
// which it then gets in the place of the table.
template <class R> KV_CONSTEXPR auto holds(int) -> decltype(R::HOLDS) { return R::HOLDS; }
template <class R> KV_CONSTEXPR bool holds(...) { return false; }
template <class K> KV_DEV auto held_of_keys(const uint8_t* table, const uint8_t* own, int part, int lane) {
  if constexpr (holds<K>(0)) return K::hold_keys(table, own, part, lane);
  else return table;
}
template <class V> KV_DEV auto held_of_values(const uint8_t* table, const uint8_t* own, int part, int lane) {
  if constexpr (holds<V>(0)) return V::hold_values(table, own, part, lane);
  else return table;
}
// A reader may be NUMBERED: a token's scale is scale_of(number), of a number(planes, token) below 16. Then the lanes of
// a warp read the numbers of a tile together, a token or two each, instead of four lanes the same one.
template <class R> KV_CONSTEXPR auto is_numbered(int) -> decltype(R::NUMBERED) { return R::NUMBERED; }
template <class R> KV_CONSTEXPR bool is_numbered(...) { return false; }
template <class K, class V, int T> struct TileNumbers {
  KV_CONST bool ANY = is_numbered<K>(0) || is_numbered<V>(0);
  KV_CONST int LANES = T < 32 ? T : 32;
  uint32_t of[ANY ? LANES / 8 : 1];  // of token 8 i + g in bits 0-3 (keys) and 4-7, of the one 32 further above
  KV_DEV TileNumbers(const Planes<K, T>& keys, const Planes<V, T>& values, int lane) {
    if constexpr (ANY) {
      uint32_t own = 0;
      KV_UNROLL
      for (int turn = 0; turn < T / LANES; ++turn) {
        const int token = 32 * turn + lane % LANES;
        if constexpr (is_numbered<K>(0)) own |= K::number(keys, token) << 8 * turn;
        if constexpr (is_numbered<V>(0)) own |= V::number(values, token) << (8 * turn + 4);
      }
      KV_UNROLL
      for (int i = 0; i < LANES / 8; ++i) of[i] = float_bits(shfl(bits_float(own), 8 * i + lane / 4));
    }
  }
  // of token 8 n + g
  KV_DEV float key_scale(int n) const { return K::scale_of(of[n % (LANES / 8)] >> n / 4 * 8); }
  KV_DEV float value_scale(int n) const { return V::scale_of(of[n % (LANES / 8)] >> (n / 4 * 8 + 4)); }
};

// A reader may be ORDERED: its channels are the model's in another order, which differs by head and lies in its own
// tables: model_channel(own, c) gives the model's channel of c, by those in shared or in global memory. A reader of
// values may be CENTRED: to every value its channel's number is added, before the factor: centre(own, c).
template <class R> KV_CONSTEXPR auto is_ordered(int) -> decltype(R::ORDERED) { return R::ORDERED; }
template <class R> KV_CONSTEXPR bool is_ordered(...) { return false; }
template <class R> KV_CONSTEXPR auto is_centred(int) -> decltype(R::CENTRED) { return R::CENTRED; }
template <class R> KV_CONSTEXPR bool is_centred(...) { return false; }
// Its tables are those of a sequence: of KV head h they lie SOURCE h bytes behind its first, and `stride` is that of
// the sequences.
template <class R> KV_DEV const uint8_t* source_of(const uint8_t* tables, int64_t stride, int b, int h) {
  if constexpr (is_ordered<R>(0)) return tables + b * stride + (int64_t)h * R::SOURCE;
  else return tables + h * stride;
}
template <class R> KV_DEV int model_channel(const uint8_t* own, int c) {
  if constexpr (is_ordered<R>(0)) return R::model_channel(own, c);
  else return c;
}

template <class K, class V>
KV_CONSTEXPR int page_bytes(int tokens) { return planes_bytes<K>(tokens) + planes_bytes<V>(tokens); }

// start copying BYTES bytes: lanes' own addresses, and what is added to them
template <int BYTES, int TO, int FROM> KV_DEV void fetch_run(uint8_t* to, const uint8_t* from, int lane) {
  if constexpr (BYTES > 0) {
    if (BYTES >= 512 || lane * 16 < BYTES) copy16<TO, FROM>(to, from);
    fetch_run<BYTES - 512, TO + 512, FROM + 512>(to, from, lane);
  }
}
// start fetching tokens [first, first + T) of planes from byte TO of a tile and FROM of a page on: one 16-byte copy per
// lane and turn. What is a constant is part of the instruction: planes with as many bytes of a token share an address.
template <class R, int P, int T, int TO, int FROM, int PLANE = 0>
KV_DEV void fetch_role(uint8_t* tile, const uint8_t* page, int first, int lane) {
  if constexpr (PLANE < R::PLANES) {
    constexpr int BYTES = align16(plane_run<R>(PLANE, T));
    fetch_run<BYTES, TO, FROM>(tile + lane * 16, page + (uint32_t)(plane_place<R, T>(PLANE, first) + lane * 16), lane);
    fetch_role<R, P, T, TO + BYTES, FROM + align16(plane_run<R>(PLANE, P)), PLANE + 1>(tile, page, first, lane);
  }
}

template <class K, class V, int P, int T>
KV_DEV void fetch_tile(uint8_t* tile, const uint8_t* page, int first, int lane) {
  if (P == T) {  // the planes of a whole page are one run
    fetch_run<page_bytes<K, V>(T), 0, 0>(tile + lane * 16, page + lane * 16, lane);
  } else {
    fetch_role<K, P, T, 0, 0>(tile, page, first, lane);
    fetch_role<V, P, T, planes_bytes<K>(T), planes_bytes<K>(P)>(tile, page, first, lane);
  }
}

}  // namespace kv
