// Masks on accumulators: the pairs that SequenceMask hides take `hidden`.
#pragma once

#include "common/mask.h"
#include "ptx/sm80.cuh"

namespace flashattn::tile {

// A bit for each column of a lane, which has two of eight, that comes before `end`: 32 at most.
__device__ __forceinline__ uint32_t columns_before(int end) {
  int count = max(0, end / 8 * 2 + min(end % 8, 2));
  return ~__funnelshift_lc(0u, ~0u, count);
}

// Accumulators with queries as rows: row and column of the first element in the sequence.
// kKeysAreRows: transposed scores, rows are keys and columns are queries.
template <bool kKeysAreRows, int MT, int NT>
__device__ __forceinline__ void apply_mask(float (&acc)[MT][NT][4], const SequenceMask& mask,
                                           int first_row, int first_col, float hidden) {
  static_assert(kKeysAreRows || 2 * NT <= 32, "a bit for each column of a lane");
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
      uint32_t visible = columns_before(end) & ~columns_before(begin);
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int col = 8 * n + e;
          // Bits go to predicates seven at a time. The backward has no register for them.
          bool hide = kKeysAreRows ? col < begin || col >= end : !(visible >> (2 * n + e) & 1);
          if (hide) acc[m][n][2 * half + e] = hidden;
        }
    }
}

}  // namespace flashattn::tile
