// One bit per coordinate of a quantizer's residual (ops/qjl.py), behind TurboQuant and OCTOPUS.
#pragma once
#include "encode_octopus.cuh"
#include "encode_turboquant.cuh"

namespace kv {

// Table of a head: float sign[D] of +-1; where D is no power of two also uint32 rows[D][D / 32], bit j of row k set
// where the Hadamard matrix has -1 at (k, j)
template <int D> struct Sketch {
  KV_CONST bool BUTTERFLY = (D & (D - 1)) == 0;
  KV_CONST int MATRIX = 4 * D;
  KV_CONST int BYTES = MATRIX + (BUTTERFLY ? 0 : D * D / 8);
  KV_CONST int SCRATCH = BUTTERFLY ? 0 : 4 * 8 * D;

  // r[4 i + e]: the residual of channel 32 i + 4 part + e of the unit vector
  KV_DEV static void store(double (&r)[D / 8], int part, uint32_t keep, bool live, uint8_t* signs, uint8_t* length,
                           const uint8_t* table, uint8_t* scratch) {
    double s[4];
    square_sums(r, s);
    double norm = sqrt(sum_of_team(s));
    if (part == 0 && live) *(uint16_t*)length = (uint16_t)(half_by_float(norm) & keep);
    const float* flip = (const float*)table;
    KV_UNROLL for (int k = 0; k < D / 8; k++) {  // whole numbers, whose sums are exact
      r[k] = mul(round_even(mul(r[k], 0x1p30)), (double)flip[channel_of<8>(part, k)]);
    }
    if constexpr (BUTTERFLY) butterflies(r, part);
    else product(r, part, table + MATRIX, (double*)scratch + thread() % 32 / 8 * D);
    KV_UNROLL for (int i = 0; i < D / 32; i++) {
      uint32_t word = 0;
      KV_UNROLL for (int e = 0; e < 4; e++) word |= (r[4 * i + e] >= 0.0 ? 1u : 0u) << (4 * part + e);
      KV_UNROLL for (int mask = 4; mask; mask /= 2) word |= shfl_xor(word, mask);
      if (part == i % 8 && live) ((uint32_t*)signs)[i] = word & keep;
    }
  }

  KV_DEV static void square_sums(const double (&r)[D / 8], double (&s)[4]) {
    KV_UNROLL for (int e = 0; e < 4; e++) {
      s[e] = sum_of_runs<D / 32>([&](int i) { return mul(r[4 * i + e], r[4 * i + e]); });
    }
  }

  KV_DEV static void butterflies(double (&r)[D / 8], int part) {
    KV_UNROLL for (int bit = 1; bit < D; bit *= 2) {
      int lane_bit = bit >= 4 && bit < 32 ? bit / 4 : 0, step = bit < 4 ? bit : bit / 8;
      KV_UNROLL for (int k = 0; k < D / 8; k++) {
        if (lane_bit) {
          double other = shfl_xor(r[k], lane_bit);
          r[k] = part & lane_bit ? sub(other, r[k]) : add(r[k], other);
        } else if (!(k & step)) {
          double a = r[k], b = r[k | step];
          r[k] = add(a, b);
          r[k | step] = sub(a, b);
        }
      }
    }
  }

  KV_DEV static void product(double (&r)[D / 8], int part, const uint8_t* matrix, double* mine) {
    KV_UNROLL for (int k = 0; k < D / 8; k++) mine[channel_of<8>(part, k)] = r[k];
    sync_warp();
    KV_UNROLL for (int k = 0; k < D / 8; k++) {
      const uint32_t* row = (const uint32_t*)matrix + channel_of<8>(part, k) * (D / 32);
      double sum = 0.0;
      KV_NO_UNROLL for (int i = 0; i < D / 32; i++) {
        uint32_t minus = row[i];
        KV_UNROLL for (int j = 0; j < 32; j++) {
          double v = mine[32 * i + j];
          sum = add(sum, minus >> j & 1 ? -v : v);
        }
      }
      r[k] = sum;
    }
    sync_warp();
  }
};

// TurboQuant with BITS bits (one less than the scheme's), then the sketch. Table: Levels<BITS>, float levels[2^BITS]
// filled up to 16 bytes, Sketch
template <int D, int BITS, bool WIDE> struct TurboQuantQjlRow : TableRow {
  using Plain = TurboQuantRow<D, BITS, WIDE>;
  KV_CONST int DIM = D;
  KV_CONST int PLANES = 4;
  KV_FUNCTION int plane_bytes(int p) { return p < 2 ? Plain::plane_bytes(p) : p == 2 ? D / 8 : 2; }
  KV_CONST int CENTRES = Levels<BITS>::BYTES;
  KV_CONST int SKETCH = CENTRES + align16(4 << BITS);
  KV_CONST int TABLE = SKETCH + Sketch<D>::BYTES;
  KV_CONST int ROOM = stream_room(D / 4);
  KV_CONST int SCRATCH = 4 * 4 * ROOM + Sketch<D>::SCRATCH;

  KV_DEV static void quad(const float (&y)[D / 8], int part, uint32_t keep, bool live, uint8_t* const (&at)[4],
                          const uint8_t* table, uint8_t* scratch) {
    uint32_t* codes = (uint32_t*)scratch + thread() % 32 / 8 * ROOM;
    double gamma = sqrt(sum_of_squares(y)), r[D / 8];
    store_norm<WIDE>(at[1], div(gamma, root(D)), part, keep, live);
    KV_UNROLL for (int i = 0; i < D / 32; i++) {
      uint32_t four = 0;
      KV_UNROLL for (int e = 0; e < 4; e++) {
        double u = gamma > 0.0 ? div((double)y[4 * i + e], gamma) : 0.0;
        uint32_t code = Levels<BITS>::find(table, u);
        four |= code << (BITS * e);
        r[4 * i + e] = sub(u, (double)((const float*)(table + CENTRES))[code]);
      }
      codes[8 * i + part] = four;
    }
    clear_spare<D / 4>(codes, part);
    sync_warp();
    store_stream<D / 4, 4 * BITS>(at[0], codes, part, keep, live);
    Sketch<D>::store(r, part, keep, live, at[2], at[3], table + SKETCH, scratch + 4 * 4 * ROOM);
    sync_warp();
  }
};

// OCTOPUS, then the sketch. Table: OctopusRow's, float rho[2^NRM] filled up to 16 bytes, Sketch
template <int D, int DIR, int NRM, bool WIDE, int ROUNDING> struct OctopusQjlRow : TableRow {
  using Plain = OctopusRow<D, DIR, NRM, WIDE, ROUNDING>;
  KV_CONST int DIM = D;
  KV_CONST int SIGNS = Plain::PLANES;
  KV_CONST int PLANES = SIGNS + 2;
  KV_FUNCTION int plane_bytes(int p) { return p < SIGNS ? Plain::plane_bytes(p) : p == SIGNS ? D / 8 : 2; }
  KV_CONST int RHO = Plain::BYTES;
  KV_CONST int SKETCH = RHO + align16(4 << NRM);
  KV_CONST int TABLE = SKETCH + Sketch<D>::BYTES;
  KV_CONST int SCRATCH = Plain::SCRATCH + Sketch<D>::SCRATCH;

  KV_DEV static void quad(const float (&y)[D / 8], int part, uint32_t keep, bool live, uint8_t* const (&at)[PLANES],
                          const uint8_t* table, uint8_t* scratch) {
    uint16_t* codes = Plain::round_row(y, part, keep, live, at, table, scratch);
    Plain::Store::row(at, codes, part, keep, live);
    double gamma = sqrt(sum_of_squares(y)), r[D / 8];
    KV_UNROLL for (int k = 0; k < D / 8; k++) {
      int channel = channel_of<8>(part, k);
      uint32_t code = codes[channel / 3];
      typename Plain::Four n = Plain::direction(table, code >> NRM);
      float component = channel % 3 == 0 ? n.x : channel % 3 == 1 ? n.y : n.z;
      float held = mul(component, ((const float*)(table + RHO))[code & ((1u << NRM) - 1)]);
      r[k] = sub(gamma > 0.0 ? div((double)y[k], gamma) : 0.0, (double)held);
    }
    Sketch<D>::store(r, part, keep, live, at[SIGNS], at[SIGNS + 1], table + SKETCH, scratch + Plain::SCRATCH);
    sync_warp();
  }
};

}  // namespace kv
