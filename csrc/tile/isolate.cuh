// Products with a masked operand whose other operand holds NaN or Inf. On the tensor cores a hidden
// pair contributes 0 * B, which is NaN where B isn't finite; a NaN must reach the rows that see it
// and no others. Kernels find out afterwards (a result isn't finite), and do the tile again with
// this product in its partial blocks: B's special values are replaced by zeros, and what they do to
// a row is counted by a second product with 0/1 visibility as its A.
#pragma once

#include "common/mask.h"
#include "tile/fragment.cuh"
#include "tile/softmax.cuh"

namespace flashattn::tile {

// Codes of special values whose sums over up to 255 keys can be told apart: digits in base 256.
template <class E>
struct SpecialCode;
template <>
struct SpecialCode<__nv_bfloat16> {
  static constexpr uint32_t kExponent = 0x7f80, kOne = 0x3f80, kNan = 0x3f80;
  static constexpr uint32_t kPlusInf = 0x3b80, kMinusInf = 0x3780;  // 2^-8, 2^-16
};
template <>
struct SpecialCode<__half> {
  static constexpr uint32_t kExponent = 0x7c00, kOne = 0x3c00, kNan = 0x3c00;
  static constexpr uint32_t kPlusInf = 0x1c00, kMinusInf = 0x0100;  // 2^-8, 2^-16
};

template <class E>
__device__ __forceinline__ bool is_special(uint32_t half) {
  return (half & SpecialCode<E>::kExponent) == SpecialCode<E>::kExponent;
}

// Splits a register of two elements into its finite part and the codes of the rest.
template <class E>
__device__ __forceinline__ void split_special(uint32_t pair, uint32_t& finite, uint32_t& codes) {
  using Code = SpecialCode<E>;
  finite = codes = 0;
#pragma unroll
  for (int shift = 0; shift < 32; shift += 16) {
    uint32_t half = (pair >> shift) & 0xffff;
    if (!is_special<E>(half)) {
      finite |= half << shift;
    } else {
      bool nan = (half & 0x7fff) != Code::kExponent;
      uint32_t inf = half & 0x8000 ? Code::kMinusInf : Code::kPlusInf;
      codes |= (nan ? Code::kNan : inf) << shift;
    }
  }
}

// What the counted special values add to a sum.
__device__ __forceinline__ float special_sum(float codes) {
  int counts = static_cast<int>(codes * 65536.f);
  if (counts == 0) return 0.f;
  bool nan = counts >> 16, plus = (counts >> 8) & 255, minus = counts & 255;
  if (nan || (plus && minus)) return __int_as_float(0x7fffffff);
  return plus ? kInfinity : -kInfinity;
}

// The A operand of visibility, 1 or 0, for the 16 rows and 16 columns from (first_row, first_col).
template <class E, bool kKeysAreRows>
__device__ __forceinline__ void visibility(uint32_t (&fragment)[4], const SequenceMask& mask,
                                           int first_row, int first_col) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int row = first_row + lane / 4 + 8 * (i % 2);
    int col = first_col + lane % 4 * 2 + 8 * (i / 2);
    fragment[i] = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int query = kKeysAreRows ? col + e : row, key = kKeysAreRows ? row : col + e;
      bool seen = query < mask.seqlen_q && key < mask.seqlen_k && mask.visible(query, key);
      if (seen) fragment[i] |= SpecialCode<E>::kOne << (16 * e);
    }
  }
}

// acc += A B as gemm_ab does, hidden pairs of (first_row, first_col) contributing nothing.
template <class E, bool kKeysAreRows, int kColStep = 1, int MT, int KT, int NT, class TileB>
__device__ __forceinline__ void gemm_ab_isolated(float (&acc)[MT][NT][4],
                                                 const uint32_t (&a)[KT][MT][4],
                                                 LaneAddress<TileB> b, const SequenceMask& mask,
                                                 int first_row, int first_col) {
#pragma unroll
  for (int n = 0; n < NT / 2; ++n) {
    float codes[MT][2][4];
    clear(codes);
#pragma unroll
    for (int k = 0; k < KT; ++k) {
      uint32_t fb[4], finite[4], code[4];
      ptx::ldmatrix_x4_trans(fb, b.at(16 * k, 16 * kColStep * n));
#pragma unroll
      for (int i = 0; i < 4; ++i) split_special<E>(fb[i], finite[i], code[i]);
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        uint32_t seen[4];
        visibility<E, kKeysAreRows>(seen, mask, first_row + 16 * m, first_col + 16 * k);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          ptx::mma_m16n8k16<E>(acc[m][2 * n + pair], a[k][m], finite[2 * pair],
                               finite[2 * pair + 1]);
          ptx::mma_m16n8k16<E>(codes[m][pair], seen, code[2 * pair], code[2 * pair + 1]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[m][2 * n + pair][e] += special_sum(codes[m][pair][e]);
  }
}

template <int MT, int NT>
__device__ __forceinline__ bool any_nonfinite(const float (&acc)[MT][NT][4]) {
  // Inf - Inf and 0 * Inf are NaN: one comparison at the end is enough.
  float probe = 0.f;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) probe = fmaf(acc[m][n][e], 0.f, probe);
  return !(probe == 0.f);
}

}  // namespace flashattn::tile
