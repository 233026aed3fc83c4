// What a reader gets: tokens of one role of one page and head, to be unpacked to float32 in the basis of the codes.
//
// A reader is a function `void unpack(const Rows&)` in read_<name>.h; readers.h lists them by name. Its numbers are
// those of the codec's `decode`, bit by bit where that only looks up, multiplies and adds. It reads the tokens that it
// is asked for and nothing behind them: other slots hold arbitrary bytes.
//
// Codes lie side by side in bytes, numbers in lanes of vectors. So a reader may write a row's channels in another
// order, which spares it shuffles; a function `void order(const int32_t* options, int dim, int16_t* channel)` beside it
// says which channel lies at each place.
#pragma once
#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>

namespace kv {

constexpr int PLANES = 8, OPTIONS = 8;
constexpr int TILE = 32;  // most tokens unpacked at a time
constexpr int WIDEST = 512;  // most channels
constexpr int OVER = 16;

struct Rows {
  const uint8_t* page;    // planes of this head's page
  const uint8_t* tables;  // the layer's look-up tables for this head, as kernels/codecs/<stem>.py made them; or null
  const int64_t* planes;  // byte of the page at which each plane of the role begins
  const int32_t* options; // numbers that kernels/codecs/<stem>.py chose
  int dim;                // D, a multiple of 16
  int first, count;       // places in the page
  float* out;             // [count, D], channels in the reader's order; up to OVER numbers behind may be overwritten

  const uint8_t* plane(int p) const { return page + planes[p]; }
  const uint8_t* row(int p, int place, int64_t bytes) const { return page + planes[p] + place * bytes; }
};

// A reader's parts are joined whatever the compiler's limits say, so that it knows their constants.
#define KV_JOINED __attribute__((always_inline))
#define KV_INLINE inline KV_JOINED
#define KV_APART __attribute__((noinline))

// with(dim) gets the commonest head_dims as constants: loops whose length is known take up to a third less time
template <class With> KV_INLINE void known_dim(int dim, const With& with) {
  if (dim == 128) with(std::integral_constant<int, 128>());
  else if (dim == 64) with(std::integral_constant<int, 64>());
  else with(dim);
}

using Unpack = void (*)(const Rows&);
using Order = void (*)(const int32_t* options, int dim, int16_t* channel);

inline void order_straight(const int32_t*, int dim, int16_t* channel) {
  for (int c = 0; c < dim; ++c) channel[c] = (int16_t)c;
}

// place of a name in READERS or ENCODERS, -1: it is not there
template <class Table> inline int number_of(const Table& table, const char* name) {
  for (int i = 0; i < (int)std::size(table); ++i)
    if (!strcmp(table[i].name, name)) return i;
  return -1;
}

}  // namespace kv
