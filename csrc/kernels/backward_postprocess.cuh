// dq = softmax_scale * dq_accum, rounded, in dq's order.
#pragma once

#include "common/params.h"
#include "host/launch.cuh"
#include "kernels/kernels.h"
#include "tile/dq_accum.cuh"
#include "tile/element.cuh"
#include "tile/scheduler.cuh"

namespace flashattn {

constexpr int kPostprocessThreads = 256;
constexpr int kPostprocessRows = 64;

// Eight columns of one row.
template <class E>
__device__ __forceinline__ void store_dq(const MutableTensor& dq, E* row, int col, int headdim,
                                         const E (&values)[8]) {
  if (dq.aligned16) {
    if (col < headdim)
      *reinterpret_cast<uint4*>(row + col) = reinterpret_cast<const uint4&>(values);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (col + i < headdim) row[col + i] = values[i];
    }
  }
}

// A CTA takes kPostprocessRows of one head; a thread in turn 8 columns of rows r and r + 8.
template <DType kType>
__global__ void __launch_bounds__(kPostprocessThreads)
    backward_postprocess_kernel(const __grid_constant__ BackwardParams params, int accum_headdim) {
  using E = tile::Element<kType>;
  const ProblemShape& shape = params.shape;
  tile::TileCoord coord =
      tile::tile_of_cta(shape.seqlens_q, shape.batch, shape.heads_q, kPostprocessRows);
  if (coord.block < 0) return;
  int first_row = coord.block * kPostprocessRows;
  int64_t accum_row = coord.head * params.accum_rows +
                      shape.seqlens_q.grouped_begin(coord.batch, coord.rows.begin, kDqRowGroup) +
                      first_row;
  const float* sums = params.dq_accum + accum_row * accum_headdim;
  E* out = static_cast<E*>(params.dq.data) +
           params.dq.stride.offset(coord.batch, coord.rows.begin + first_row, coord.head);
  int rows = coord.rows.length - first_row;
  int tiles = (shape.headdim + tile::kDqTileCols - 1) / tile::kDqTileCols;
  int items = kPostprocessRows / 2 * tiles;
#pragma unroll 2
  for (int item = threadIdx.x; item < items; item += kPostprocessThreads) {
    int g = item % 8, tile = item / 8 % tiles;
    int group_row = item / 8 / tiles * kDqRowGroup, row = group_row + g;
    if (row >= rows) continue;
    const float4* from = reinterpret_cast<const float4*>(sums + group_row * accum_headdim +
                                                         tile::dq_accum_row_pair(g, tile));
    alignas(16) E upper[8], lower[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float4 x = from[i];
      upper[2 * i] = tile::from_float<E>(x.x * shape.softmax_scale);
      upper[2 * i + 1] = tile::from_float<E>(x.y * shape.softmax_scale);
      lower[2 * i] = tile::from_float<E>(x.z * shape.softmax_scale);
      lower[2 * i + 1] = tile::from_float<E>(x.w * shape.softmax_scale);
    }
    int col = tile * tile::kDqTileCols;
    E* out_row = out + row * params.dq.stride.row;
    store_dq<E>(params.dq, out_row, col, shape.headdim, upper);
    if (row + 8 < rows) {
      store_dq<E>(params.dq, out_row + 8 * params.dq.stride.row, col, shape.headdim, lower);
    }
  }
}

template <DType kType>
void run_backward_postprocess(const BackwardParams& params, int accum_headdim, void* stream) {
  const ProblemShape& shape = params.shape;
  int64_t grid =
      tile::blocks_per_head(shape.seqlens_q, shape.batch, kPostprocessRows) * shape.heads_q;
  launch<backward_postprocess_kernel<kType>>(grid, kPostprocessThreads, 0, stream, params,
                                             accum_headdim);
}

}  // namespace flashattn
