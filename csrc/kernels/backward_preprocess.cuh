// What the backward needs of each query row before it starts (FlashAttention-2, algorithm 2):
// delta = <dout, out> - dlse, and lse in log2 units.
#pragma once

#include "common/params.h"
#include "host/launch.cuh"
#include "kernels/kernels.h"
#include "tile/element.cuh"
#include "tile/scheduler.cuh"
#include "tile/softmax.cuh"

namespace flashattn {

constexpr int kPreprocessThreads = 256;
constexpr int kLanesPerRow = 8;
constexpr int kRowStep = kPreprocessThreads / kLanesPerRow;
constexpr int kRowsPerThread = 2;
constexpr int kPreprocessRows = kRowsPerThread * kRowStep;

template <class E>
__device__ __forceinline__ float dot_of_8(const uint4& a, const uint4& b) {
  const E* x = reinterpret_cast<const E*>(&a);
  const E* y = reinterpret_cast<const E*>(&b);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(tile::to_float(x[i]), tile::to_float(y[i]), sum);
  return sum;
}

// exp2(score - inf) is 0: a row without a score above -inf gives no gradient. A score of +inf makes
// the row's probabilities NaN.
__device__ __forceinline__ float lse_for_exp2(float lse) {
  if (lse == -tile::kInfinity) return tile::kInfinity;
  return lse == tile::kInfinity ? tile::kNan : tile::LseLog2::encode(lse);
}

// A lane's part of <dout, out>.
template <class E>
__device__ __forceinline__ float partial_dot(const BackwardParams& params, int64_t batch,
                                             int64_t row, int64_t head, int lane) {
  int headdim = params.shape.headdim_v;
  const E* out =
      static_cast<const E*>(params.out.data) + params.out.stride.offset(batch, row, head);
  const E* dout =
      static_cast<const E*>(params.dout.data) + params.dout.stride.offset(batch, row, head);
  float sum = 0.f;
  if (params.out.aligned16 && params.dout.aligned16) {
    for (int col = lane * 8; col < headdim; col += kLanesPerRow * 8) {
      sum += dot_of_8<E>(*reinterpret_cast<const uint4*>(out + col),
                         *reinterpret_cast<const uint4*>(dout + col));
    }
    return sum;
  }
  // The order of the aligned case: the layout of dout changes no bit.
  for (int col = lane * 8; col < headdim; col += kLanesPerRow * 8) {
    float part = 0.f;
    for (int i = col; i < min(col + 8, headdim); ++i) {
      part = fmaf(tile::to_float(out[i]), tile::to_float(dout[i]), part);
    }
    sum += part;
  }
  return sum;
}

// Eight lanes a row; a CTA takes kPreprocessRows of one head and sequence. All of a thread's rows
// are read before the first is written: their loads wait together.
template <DType kType>
__global__ void __launch_bounds__(kPreprocessThreads)
    backward_preprocess_kernel(const __grid_constant__ BackwardParams params) {
  using E = tile::Element<kType>;
  const ProblemShape& shape = params.shape;
  tile::TileCoord coord =
      tile::tile_of_cta(shape.seqlens_q, shape.batch, shape.heads_q, kPreprocessRows);
  int first_row = coord.block * kPreprocessRows;
  if (coord.block < 0 || first_row >= coord.rows.length) return;
  int lane = threadIdx.x % kLanesPerRow, last = coord.rows.length - 1;
  int thread_row = first_row + threadIdx.x / kLanesPerRow;
  float delta[kRowsPerThread], lse[kRowsPerThread], dlse[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {  // past the end the last row: every lane takes part
    int64_t row = coord.rows.begin + min(thread_row + i * kRowStep, last);
    lse[i] = params.lse.data[params.lse.offset(coord.batch, coord.head, row)];
    dlse[i] = params.dlse.data == nullptr
                  ? 0.f
                  : params.dlse.data[params.dlse.offset(coord.batch, coord.head, row)];
    delta[i] = partial_dot<E>(params, coord.batch, row, coord.head, lane);
  }
  int64_t sums_row = coord.head * params.accum_rows +
                     shape.seqlens_q.grouped_begin(coord.batch, coord.rows.begin, kDqRowGroup);
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
    for (int step = 1; step < kLanesPerRow; step *= 2) {
      delta[i] += __shfl_xor_sync(~0u, delta[i], step);
    }
    int row = thread_row + i * kRowStep;
    if (lane != 0 || row > last) continue;
    float sum = delta[i] - dlse[i];
    params.delta[sums_row + row] = isinf(sum) ? tile::kNan : sum;
    params.lse_log2[sums_row + row] = lse_for_exp2(lse[i]);
  }
}

template <DType kType>
void run_backward_preprocess(const BackwardParams& params, void* stream) {
  const ProblemShape& shape = params.shape;
  int64_t grid =
      tile::blocks_per_head(shape.seqlens_q, shape.batch, kPreprocessRows) * shape.heads_q;
  launch<backward_preprocess_kernel<kType>>(grid, kPreprocessThreads, 0, stream, params);
}

}  // namespace flashattn
