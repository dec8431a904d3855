// The fp32 sums of dq in global memory. Their order is private to the backward: rows in groups of
// 16, a sequence's first row starting one (SeqLens::grouped_begin); in a group, tiles of 8 columns;
// in a tile, the accumulators of mma.m16n8k16 as they lie in registers, lane by lane. A warp adds
// 512 bytes side by side, 16 a lane, with no move between registers.
#pragma once

#include "common/params.h"
#include "ptx/sm80.cuh"
#include "tile/fragment.cuh"

namespace flashattn::tile {

constexpr int kDqTileCols = 8;
constexpr int kDqTileFloats = kDqRowGroup * kDqTileCols;

// Where a group's values of rows g and g + 8, columns 8 tile .. 8 tile + 7, begin: 16 floats, in
// turn two columns of row g and the same of row g + 8.
__device__ __forceinline__ int dq_accum_row_pair(int g, int tile) {
  return tile * kDqTileFloats + g * 16;
}

// Where one value lies in the sums of a sequence and head.
__device__ __forceinline__ int64_t dq_accum_offset(int row, int col, int headdim) {
  return int64_t{row / kDqRowGroup} * kDqRowGroup * headdim +
         dq_accum_row_pair(row % 8, col / kDqTileCols) + col % 8 / 2 * 4 + row % 16 / 8 * 2 +
         col % 2;
}

__device__ __forceinline__ void add_float4(float* global, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  ptx::red_add_v4(global, x);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(global + i, x[i]);
#endif
}

// Calls each(place, values) for a warp's accumulators (rows: queries) and their places in the sums
// at `sums`, where the first of `rows` rows starts a group. first_row: of the accumulators, a
// multiple of 16.
template <int kHeadDim, int kColStep, class Values, int MT, int NT, class Each>
__device__ __forceinline__ void for_dq_sums(float* sums, int first_row, int rows, int col_group,
                                            Values (&acc)[MT][NT][4], const Each& each) {
  float* lane_sums =
      sums + first_row * kHeadDim + col_group * 2 * kDqTileFloats + threadIdx.x % 32 * 4;
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    if (first_row + 16 * m >= rows) break;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      int tile = n / 2 * 2 * kColStep + n % 2;
      each(lane_sums + 16 * m * kHeadDim + tile * kDqTileFloats, acc[m][n]);
    }
  }
}

// Adds to the sums; rows past the end hold zeros.
template <int kHeadDim, int kColStep, int MT, int NT>
__device__ __forceinline__ void add_dq(float* sums, int first_row, int rows, int col_group,
                                       const float (&acc)[MT][NT][4]) {
  for_dq_sums<kHeadDim, kColStep>(sums, first_row, rows, col_group, acc, add_float4);
}

// What a warp alone reads and writes meanwhile.
template <int kHeadDim, int kColStep, int MT, int NT>
__device__ __forceinline__ void load_dq(float* sums, int first_row, int rows, int col_group,
                                        float (&acc)[MT][NT][4]) {
  for_dq_sums<kHeadDim, kColStep>(sums, first_row, rows, col_group, acc,
                                  [](const float* place, float(&x)[4]) {
                                    float4 y = __ldcg(reinterpret_cast<const float4*>(place));
                                    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
                                  });
}
template <int kHeadDim, int kColStep, int MT, int NT>
__device__ __forceinline__ void store_dq(float* sums, int first_row, int rows, int col_group,
                                         const float (&acc)[MT][NT][4]) {
  for_dq_sums<kHeadDim, kColStep>(
      sums, first_row, rows, col_group, acc, [](float* place, const float(&x)[4]) {
        __stcg(reinterpret_cast<float4*>(place), make_float4(x[0], x[1], x[2], x[3]));
      });
}

}  // namespace flashattn::tile
