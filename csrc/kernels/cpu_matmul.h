// Matrix products of one block, in registers: C is cut into tiles of kTileRows x kTileVecs vectors.
// All matrices are row-major fp32 in scratch memory.
#pragma once

#include "kernels/cpu_convert.h"
#include "kernels/cpu_vector.h"

namespace flashattn::FLASHATTN_CPU_ISA {

constexpr int kTileRows = FLASHATTN_CPU_TILE_ROWS;
constexpr int kTileVecs = FLASHATTN_CPU_TILE_VECS;
constexpr int kTileColumns = kTileVecs * kLanes;

enum class LeftOperand { kPlain, kTransposed };  // stored (rows, depth), or (depth, rows)
enum class Update { kSet, kAdd, kScaleAndAdd };  // C = AB, C += AB, C = C * column_scale + AB

// Rows that scratch memory holds for blocks of `block` rows: fewer for short sequences.
FLASHATTN_CPU_INLINE int capacity(const SeqLens& seqlens, int block) {
  return seqlens.rows < block ? round_up(static_cast<int>(seqlens.rows), 16) : block;
}

struct Matrix {
  float* data;
  int stride;

  FLASHATTN_CPU_INLINE float* at(int row, int column) const {
    return data + static_cast<int64_t>(row) * stride + column;
  }
  FLASHATTN_CPU_INLINE Matrix from(int row, int column) const { return {at(row, column), stride}; }
};

template <LeftOperand kLeft, Update kUpdate, int kVecs>
FLASHATTN_CPU_INLINE void multiply_tile(float* c, int c_stride, const float* a, int a_stride,
                                        const float* b, int b_stride, int depth,
                                        const float* column_scale) {
  Vec sum[kTileRows][kVecs] = {};
  FLASHATTN_CPU_UNROLL_TWICE
  for (int k = 0; k < depth; ++k, b += b_stride) {
    Vec b_row[kVecs];
    FLASHATTN_CPU_UNROLL
    for (int j = 0; j < kVecs; ++j) b_row[j] = load(b + j * kLanes);
    FLASHATTN_CPU_UNROLL
    for (int i = 0; i < kTileRows; ++i) {
      float a_ik = kLeft == LeftOperand::kPlain ? a[i * static_cast<int64_t>(a_stride)] : a[i];
      FLASHATTN_CPU_UNROLL
      for (int j = 0; j < kVecs; ++j) sum[i][j] += a_ik * b_row[j];
    }
    a += kLeft == LeftOperand::kPlain ? 1 : a_stride;
  }
  // The sum of this block is added to C last: shorter chains of roundings than starting from C.
  FLASHATTN_CPU_UNROLL
  for (int i = 0; i < kTileRows; ++i, c += c_stride) {
    FLASHATTN_CPU_UNROLL
    for (int j = 0; j < kVecs; ++j) {
      float* to = c + j * kLanes;
      if constexpr (kUpdate == Update::kAdd) sum[i][j] += load(to);
      if constexpr (kUpdate == Update::kScaleAndAdd) {
        sum[i][j] += load(to) * load(column_scale + j * kLanes);
      }
      store(to, sum[i][j]);
    }
  }
}

template <LeftOperand kLeft, Update kUpdate, int kVecs>
void multiply_columns(Matrix c, Matrix a, Matrix b, int rows, int depth,
                      const float* column_scale) {
  for (int row = 0; row < rows; row += kTileRows) {
    const float* a_rows = kLeft == LeftOperand::kPlain ? a.at(row, 0) : a.at(0, row);
    multiply_tile<kLeft, kUpdate, kVecs>(c.at(row, 0), c.stride, a_rows, a.stride, b.data, b.stride,
                                         depth, column_scale);
  }
}

// C (rows, columns) from A (rows, depth) and B (depth, columns). `rows` is rounded up to kTileRows,
// `columns` to kLanes: C, A and B have room there, and C's values there mean nothing.
template <LeftOperand kLeft, Update kUpdate>
void multiply(Matrix c, Matrix a, Matrix b, int rows, int columns, int depth,
              const float* column_scale = nullptr) {
  for (int column = 0; column < columns; column += kTileColumns) {
    Matrix c_part = c.from(0, column), b_part = b.from(0, column);
    const float* scale = column_scale == nullptr ? nullptr : column_scale + column;
    int left = columns - column;
    if (left > 2 * kLanes) {
      multiply_columns<kLeft, kUpdate, 3>(c_part, a, b_part, rows, depth, scale);
    } else if (left > kLanes) {
      multiply_columns<kLeft, kUpdate, 2>(c_part, a, b_part, rows, depth, scale);
    } else {
      multiply_columns<kLeft, kUpdate, 1>(c_part, a, b_part, rows, depth, scale);
    }
  }
}
static_assert(kTileVecs == 3, "multiply() has a case for each number of vectors");

// C = AB over head dims: in two sums if they are long, for the sake of the roundings.
inline void multiply_headdim(Matrix c, Matrix a, Matrix b, int rows, int columns, int headdim) {
  constexpr int kChain = 128;
  multiply<LeftOperand::kPlain, Update::kSet>(c, a, b, rows, columns, min(headdim, kChain));
  if (headdim <= kChain) return;
  multiply<LeftOperand::kPlain, Update::kAdd>(c, a.from(0, kChain), b.from(kChain, 0), rows,
                                              columns, headdim - kChain);
}

// NaN and Inf in an operand whose pairs are partly hidden: a hidden pair has weight 0, and 0 * Inf
// would be NaN. The product is taken with zeros in their places, so that what doesn't see them
// keeps its bits, and what does see them has them added afterwards.
inline bool is_special(float x) {
  constexpr uint32_t kExponent = 0x7f800000;
  return (bit_cast<uint32_t>(x) & kExponent) == kExponent;
}

inline bool all_finite(Matrix x, int rows, int columns) {
  uint32_t found = 0;
  for (int r = 0; r < rows; ++r) {
    const float* row = x.at(r, 0);
    for (int c = 0; c < columns; ++c) found |= is_special(row[c]) ? 1u : 0u;
  }
  return found == 0;
}

inline void copy_finite(Matrix to, Matrix x, int rows, int columns) {
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) *to.at(r, c) = is_special(*x.at(r, c)) ? 0.f : *x.at(r, c);
  }
}

// Calls add(row, column, value) for each special value.
template <typename Add>
void for_each_special(Matrix x, int rows, int columns, Add add) {
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) {
      if (is_special(*x.at(r, c))) add(r, c, *x.at(r, c));
    }
  }
}

}  // namespace flashattn::FLASHATTN_CPU_ISA
