// Encoder of ghost (packedkv/codecs/ghost.py): six scales are tried, each code is the nearest level's number.
#pragma once
#include <algorithm>

#include "encoder.h"

namespace kv {

constexpr int GHOST_WIDEST = 7, GHOST_SCALES = 15, GHOST_TRIED = 6;

// The sum by halves (ops/sums.py) of dim numbers, which are overwritten; s has 2 WIDEST.
inline float sum_by_halves(float* s, int dim) {
  int size = 1;
  while (size < dim) size *= 2;
  std::fill(s + dim, s + size, 0.0f);
  while (size /= 2)
    for (int c = 0; c < size; ++c) s[c] += s[c + size];
  return s[0];
}

// from[at[0]], from[at[1]], ...
inline F gathered(const float* from, I at) {
#if defined(__AVX512F__)
  return (F)_mm512_i32gather_ps((__m512i)at, from, 4);
#elif defined(__AVX2__)
  return (F)_mm256_i32gather_ps(from, (__m256i)at, 4);
#else
  F x;
  for (int i = 0; i < LANES; ++i) x[i] = from[at[i]];
  return x;
#endif
}

// Options: 0 T, bits of a field; 1 whether there is a mean. Tables of a head: int16 [D] channel of each place; uint8 [D]
// widths; float, in this order: a 0, then cuts of widths 0 to 7 [255], of which that behind a width's last is infinite;
// levels of the same widths [256]; walls between the energies of scales 1 to 15 [16]; the scales [16]; weights [D]; with
// a mean its numbers [D]
inline void encode_ghost(const New& n) {
  const int dim = n.dim, total = n.options[0], fields = dim / 2;
  const int16_t* channel = (const int16_t*)n.tables;
  const uint8_t* widths = n.tables + 2 * dim;
  const float *cuts = (const float*)(widths + dim), *levels = cuts + 256, *walls = levels + 256, *scales = walls + 16;
  const float *weight = scales + 16, *centre = weight + dim;
  alignas(64) float y[WIDEST], s[2 * WIDEST];
  alignas(64) int32_t begin[WIDEST], half[WIDEST], code[WIDEST], best[WIDEST];
  int most[WIDEST / 4];  // widest of each vector
  for (int c = 0; c < dim; ++c) begin[c] = (1 << widths[c]) - 1, half[c] = widths[c] ? 1 << (widths[c] - 1) : 0;
  for (int c = 0; c < dim; c += LANES) most[c / LANES] = *std::max_element(widths + c, widths + c + LANES);

  // numbers of the levels nearest to y / scale; the cost
  const auto quantize = [&](float scale) {
    for (int c = 0; c < dim; c += LANES) {
      const F v = load(y + c), x = v / scale;
      I first, step, found{};
      memcpy(&first, begin + c, sizeof first), memcpy(&step, half + c, sizeof step);
      for (int i = 0; i < most[c / LANES]; ++i, step >>= 1)
        found += (I)(gathered(cuts, first + found + step) < x) & step;
      memcpy(code + c, &found, sizeof found);
      const F error = v - scale * gathered(levels, first + found);
      store(s + c, load(weight + c) * (error * error));
    }
    return sum_by_halves(s, dim);
  };

  for (int t = 0; t < n.count; ++t) {
    const float* row = n.rows + t * dim;
    int coded = 0;
    for (int c = 0; c < dim; ++c) {
      y[c] = n.options[1] ? row[channel[c]] - centre[c] : row[channel[c]];
      s[c] = widths[c] ? y[c] * y[c] : 0.0f, coded += widths[c] > 0;
    }
    const float energy = sum_by_halves(s, dim);
    int nearest = 1, number = 0;
    for (int i = 0; i < GHOST_SCALES - 1; ++i) nearest += energy > (float)coded * walls[i];
    for (int c = 0; c < dim; ++c) s[c] = weight[c] * (y[c] * y[c]), best[c] = half[c] ? half[c] - 1 : 0;
    float least = sum_by_halves(s, dim);
    for (int i = 0; i < GHOST_TRIED; ++i) {
      const int tried = std::min(std::max(nearest + i - 1, 1), GHOST_SCALES);
      const float cost = quantize(scales[tried]);
      if (cost < least) least = cost, number = tried, memcpy(best, code, sizeof(int32_t) * dim);
    }
    uint8_t* to = n.at(0, t);
    uint32_t bits = 0;
    int held = 0;
    for (int p = 0; p < fields; ++p) {
      uint32_t field = (uint32_t)(best[2 * p] | best[2 * p + 1] << widths[2 * p]);
      if (p >= fields - 4) field |= (uint32_t)(number >> (p - fields + 4) & 1) << (total - 1);
      bits |= field << held, held += total;
      for (; held >= 8; held -= 8, bits >>= 8) *to++ = (uint8_t)bits;
    }
  }
}

}  // namespace kv
