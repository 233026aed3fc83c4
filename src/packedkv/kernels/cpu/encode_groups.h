// Encoders of codes of which groups of channels, or of tokens, share a map: int, kivi (packedkv/codecs/group_int.py),
// innerq, ultraquant, ultra-tq, q4_0.
#pragma once
#include <algorithm>

#include "encode_linear.h"

namespace kv {

// codecs/group_int.py: codes of 2 or 3 bits of runs of 128 channels
template <int BITS> inline void interleave(const uint8_t* codes, int dim, uint8_t* to) {
  for (int run = 0; run < dim; run += 128, codes += 128, to += 16 * BITS) {
    uint16_t unit[BITS][8];
    for (int g = 0; g < 8; ++g) {
      uint32_t quad[4];
      for (int q = 0; q < 4; ++q) {
        const uint8_t* p = codes + 32 * q + 4 * g;
        quad[q] = (uint32_t)(p[0] | p[1] << BITS | p[2] << 2 * BITS | p[3] << 3 * BITS);
      }
      if constexpr (BITS == 2) {
        unit[0][g] = (uint16_t)(quad[0] | quad[1] << 8), unit[1][g] = (uint16_t)(quad[2] | quad[3] << 8);
      } else {
        const uint32_t last = quad[3] >> 9;
        unit[0][g] = (uint16_t)(((quad[0] | quad[1] << 12) & 0x7fff) | (last & 1) << 15);
        unit[1][g] = (uint16_t)(((quad[1] >> 3 | quad[2] << 9) & 0x7fff) | (last >> 1 & 1) << 15);
        unit[2][g] = (uint16_t)(((quad[2] >> 6 | quad[3] << 6) & 0x7fff) | (last >> 2 & 1) << 15);
      }
    }
    memcpy(to, unit, sizeof unit);
  }
}

// each(g, first, end, range) for every group of channels [first, end) of a row
template <class Each> inline void each_group(const float* row, int dim, int group, const Each& each) {
  for (int g = 0, first = 0; first < dim; ++g, first += group) {
    const int end = std::min(first + group, dim);
    each(g, first, end, range_of(row + first, end - first));
  }
}

template <int BITS, bool SYMMETRIC> struct Int {
  static constexpr int STEPS = SYMMETRIC ? (1 << (BITS - 1)) - 1 : (1 << BITS) - 1;
  float scale, zero = 0;

  // The map of numbers of this range; stored as number `at` of the scales, and of the zeros, of token t's block
  Int(const New& n, int t, int at, Range r) {
    uint16_t held;
    if (SYMMETRIC) {
      held = group_scale(r.high > -r.low ? r.high : -r.low, STEPS, 0.0f);
    } else {
      const uint16_t low = to_half(r.low < -65504.0f ? -65504.0f : r.low > 65504.0f ? 65504.0f : r.low);
      zero = from_half(low);
      held = group_scale(r.high - zero, STEPS, zero);
      memcpy(n.at(2, t) + 2 * at, &low, 2);
    }
    memcpy(n.at(1, t) + 2 * at, &held, 2);
    scale = from_half(held);
  }

  // Codes of (number - zero) / scale; clipped first: the quotient may be too large to be rounded
  static void store(uint8_t* to, F quotient) {
    const I q = whole(nearest(clip(quotient, SYMMETRIC ? -STEPS : 0, STEPS)));
    store_codes(to, SYMMETRIC ? q + (1 << (BITS - 1)) : q);
  }
};

// Options: 0 channels of a group, 0 for all; 1 interleaved
template <int BITS, bool SYMMETRIC> inline void encode_int(const New& n) {
  uint8_t codes[WIDEST];
  for (int t = 0; t < n.count; ++t) {
    const float* y = n.rows + t * n.dim;
    each_group(y, n.dim, n.options[0] ? n.options[0] : n.dim, [&](int g, int first, int end, Range r) {
      const Int<BITS, SYMMETRIC> map(n, t, g, r);
      for (int c = first; c < end; c += LANES) map.store(codes + c, (load(y + c) - map.zero) / map.scale);
    });
    if constexpr (BITS == 2 || BITS == 3)
      if (n.options[1]) {
        interleave<BITS>(codes, n.dim, n.at(0, t));
        continue;
      }
    pack<BITS>(codes, n.dim, n.at(0, t));
  }
}

// Along the tokens of a block, for each channel
template <int BITS, bool SYMMETRIC> inline void encode_tokens_int(const New& n) {
  const int group = n.block, dim = n.dim;
  uint8_t codes[WIDEST];
  float scales[WIDEST], zeros[WIDEST];
  for (int first = 0; first < n.count; first += group) {
    const float* rows = n.rows + first * dim;
    for (int c = 0; c < dim; c += LANES) {
      F low = load(rows + c), high = low;
      for (int t = 1; t < group; ++t) {
        const F y = load(rows + t * dim + c);
        // -0 is below 0
        low = choose((y < low) | ((y == low) & ((I)y < (I)low)), y, low), high = max(y, high);
      }
      for (int i = 0; i < LANES; ++i) {
        const Int<BITS, SYMMETRIC> map(n, first, c + i, {low[i], high[i]});
        scales[c + i] = map.scale, zeros[c + i] = map.zero;
      }
    }
    for (int t = 0; t < group; ++t) {
      for (int c = 0; c < dim; c += LANES)
        Int<BITS, SYMMETRIC>::store(codes + c, (load(rows + t * dim + c) - load(zeros + c)) / load(scales + c));
      pack<BITS>(codes, dim, n.at(0, first) + t * (dim * BITS / 8));
    }
  }
}

// E2M1 in groups. Options: 0 channels of a group; 2 scales are powers of two. tables: c and the scales' unit, double
inline void encode_e2m1(const New& n) {
  double numbers[2];
  memcpy(numbers, n.tables, sizeof numbers);
  const float unit = (float)numbers[1];
  uint8_t codes[WIDEST];
  for (int t = 0; t < n.count; ++t) {
    const float* y = n.rows + t * n.dim;
    each_group(y, n.dim, n.options[0], [&](int g, int first, int end, Range r) {
      const double wanted = (double)(r.high > -r.low ? r.high : -r.low) * numbers[0];
      float s = 0, reciprocal = 0;
      if (n.options[2]) {
        int exponent;
        if (std::frexp(wanted, &exponent) < std::sqrt(0.5)) --exponent;  // codecs/ultraquant.py, nearest_ue8m0
        const int byte = wanted > 0 ? std::max(0, std::min(254, exponent + 127)) : 0, back = 254 - byte;
        n.at(1, t)[g] = (uint8_t)byte;
        reciprocal = float_of(back ? (uint32_t)back << 23 : 1u << 22);
      } else {
        const float held = (float)(wanted / numbers[1]);
        const uint16_t scale = to_half(held < 0x1p-24f ? 0x1p-24f : held > 65504.0f ? 65504.0f : held);
        memcpy(n.at(1, t) + 2 * g, &scale, 2);
        s = from_half(scale) * unit;
      }
      for (int c = first; c < end; c += LANES) {
        const F x = load(y + c), q = n.options[2] ? x * reciprocal : x / s;
        const F size = min((F)((I)q & 0x7fffffff), splat(16.0f));
        F code = min(nearest(size * 2.0f), nearest(size) + 2.0f);
        code = min(min(code, nearest(size / 2.0f) + 4.0f), splat(7.0f));
        store_codes(codes + c, whole(code) | ((I)(q < splat(0.0f)) & 8));
      }
    });
    pack<4>(codes, n.dim, n.at(0, t));
  }
}

// The nearest of 16 levels of y over the group's root mean square, as that is held (packedkv/codecs/ultra_tq.py).
// Option 0: channels of a group, 0 for all. tables, double: the walls, then the norms' unit
inline void encode_group_levels(const New& n) {
  double numbers[17];
  memcpy(numbers, n.tables, sizeof numbers);
  const Nearest<4> nearest(numbers);
  const int group = n.options[0] ? n.options[0] : n.dim;
  uint8_t codes[WIDEST];
  for (int t = 0; t < n.count; ++t) {
    for (int g = 0, first = 0; first < n.dim; ++g, first += group) {
      const float* y = n.rows + t * n.dim + first;
      const int size = std::min(group, n.dim - first);
      const uint16_t norm = to_half((float)(std::sqrt(square_sum(y, size) / size) / numbers[16]));
      memcpy(n.at(1, t) + 2 * g, &norm, 2);
      nearest(y, size, from_half(norm) * numbers[16], codes + first);
    }
    pack<4>(codes, n.dim, n.at(0, t));
  }
}

// ggml's q4_0, the operations of packedkv/codecs/q4_0.py
inline void encode_q4_0(const New& n) {
  for (int t = 0; t < n.count; ++t)
    for (int g = 0; g < n.dim / 32; ++g) {
      const float* y = n.rows + t * n.dim + 32 * g;
      float loudest = 0;
      for (int c = 0; c < 32; ++c)
        if (std::fabs(y[c]) > std::fabs(loudest)) loudest = y[c];
      const float d = std::min(std::max(loudest / -8, -65504.0f), 65504.0f);
      const float inverse = std::fabs(d) >= 0x1p-120f ? 1 / d : 0;
      const uint16_t scale = to_half(d);
      memcpy(n.at(1, t) + 2 * g, &scale, 2);
      const auto code = [=](int c) { return (int)std::min(std::max(y[c] * inverse + 8.5f, 0.0f), 15.0f); };
      for (int c = 0; c < 16; ++c) n.at(0, t)[16 * g + c] = (uint8_t)(code(c) | code(c + 16) << 4);
    }
}

}  // namespace kv
