// Masks on accumulators: the pairs that SequenceMask hides take `hidden`.
#pragma once

#include "common/mask.h"
#include "ptx/sm80.cuh"

namespace flashattn::tile {

// Accumulators with queries as rows: row and column of the first element in the sequence.
// kKeysAreRows: transposed scores, rows are keys and columns are queries.
template <bool kKeysAreRows, int MT, int NT>
__device__ __forceinline__ void apply_mask(float (&acc)[MT][NT][4], const SequenceMask& mask,
                                           int first_row, int first_col, float hidden) {
  // Opaque in the backward: the compiler would keep what it can compute of this in registers that
  // the loop has better use for.
  int lane = (kKeysAreRows ? ptx::opaque(threadIdx.x) : threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = first_row + 16 * m + lane / 4 + 8 * half;
      KeyRange seen = kKeysAreRows ? mask.visible_rows(row) : mask.visible_keys(row);
      if (kKeysAreRows && row >= mask.seqlen_k) seen = {0, 0};
      // Relative to the lane's first column, elements are at constants: no column takes a register.
      int first = first_col + lane % 4 * 2;
      int begin = seen.begin - first, end = seen.end - first;
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int col = 8 * n + e;
          if (col < begin || col >= end) acc[m][n][2 * half + e] = hidden;
        }
    }
}

}  // namespace flashattn::tile
