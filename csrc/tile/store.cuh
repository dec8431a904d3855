// Results from the registers of a warp to rows in global memory, without shared memory.
#pragma once

#include "tile/fragment.cuh"

namespace flashattn::tile {

// Four words of each lane of a quad, transposed: lane t gets word t of lanes 0 to 3.
__device__ __forceinline__ uint4 transpose_quad(uint32_t w0, uint32_t w1, uint32_t w2,
                                                uint32_t w3) {
  bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  uint32_t a = __shfl_xor_sync(~0u, odd ? w0 : w1, 1), b = __shfl_xor_sync(~0u, odd ? w2 : w3, 1);
  w0 = odd ? a : w0, w1 = odd ? w1 : a;
  w2 = odd ? b : w2, w3 = odd ? w3 : b;
  uint32_t c = __shfl_xor_sync(~0u, upper ? w0 : w2, 2),
           d = __shfl_xor_sync(~0u, upper ? w1 : w3, 2);
  return upper ? make_uint4(c, d, w2, w3) : make_uint4(w0, w1, c, d);
}

// A warp's 16 rows of accumulators, of which the first `rows` exist, and `cols` columns of each.
// `out` and the rows are multiples of 16 bytes.
template <class E, int NT>
__device__ __forceinline__ void store_accumulator_rows(E* out, int64_t row_stride, int rows,
                                                       int cols, const float (&acc)[1][NT][4]) {
  static_assert(NT % 4 == 0, "a lane of a quad writes one of four groups of 8 columns");
  int group = threadIdx.x % 32 / 4, first_col = threadIdx.x % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int row = group + 8 * half;
    E* to = out + row * row_stride + first_col;
#pragma unroll
    for (int n = 0; n < NT; n += 4) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[i] = pack<E>(acc[0][n + i][2 * half], acc[0][n + i][2 * half + 1]);
      }
      uint4 chunk = transpose_quad(w[0], w[1], w[2], w[3]);
      if (row < rows && first_col + 8 * n < cols) *reinterpret_cast<uint4*>(to + 8 * n) = chunk;
    }
  }
}

}  // namespace flashattn::tile
