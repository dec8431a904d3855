// The fp32 sums of dq in global memory. Their column order is private to the backward: within a
// group of 16 columns, the four values that a lane of mma.m16n8k16 holds in a row (columns 2t,
// 2t+1, 8+2t, 8+2t+1) lie together, so that a lane adds 16 bytes at once.
#pragma once

#include "ptx/sm80.cuh"

namespace flashattn::tile {

// Where column `col` of a group of 16 lies in it.
__device__ __forceinline__ int dq_accum_position(int col) {
  return col % 8 / 2 * 4 + col / 8 * 2 + col % 2;
}

__device__ __forceinline__ void add_float4(float* global, float4 x) {
#if __CUDA_ARCH__ >= 900
  ptx::red_add_v4(global, x);
#else
  atomicAdd(global, x.x);
  atomicAdd(global + 1, x.y);
  atomicAdd(global + 2, x.z);
  atomicAdd(global + 3, x.w);
#endif
}

// Adds a warp's accumulators (rows: queries) to the `rows` x kHeadDim sums of one head at `sums`.
template <int kHeadDim, int kColStep, int MT, int NT>
__device__ __forceinline__ void add_dq(float* sums, int first_row, int rows, int col_group,
                                       const float (&acc)[MT][NT][4]) {
  int lane = threadIdx.x % 32;
  int lane_row = first_row + lane / 4;
  float* lane_sums = sums + lane_row * kHeadDim + 16 * col_group + lane % 4 * 4;
  bool whole = first_row + 16 * MT <= rows;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = 16 * m + 8 * half;
      if (!whole && lane_row + row >= rows) continue;
      float* target = lane_sums + row * kHeadDim;
#pragma unroll
      for (int n = 0; n < NT; n += 2) {
        add_float4(target + 16 * kColStep * (n / 2),
                   make_float4(acc[m][n][2 * half], acc[m][n][2 * half + 1],
                               acc[m][n + 1][2 * half], acc[m][n + 1][2 * half + 1]));
      }
    }
}

}  // namespace flashattn::tile
