// What the backward needs of each query row before it starts (FlashAttention-2, algorithm 2):
// delta = <dout, out> - dlse, and lse in log2 units.
#pragma once

#include "common/params.h"
#include "host/launch.cuh"
#include "kernels/kernels.h"
#include "tile/element.cuh"
#include "tile/softmax.cuh"

namespace flashattn {

constexpr int kPreprocessThreads = 256;
constexpr int kLanesPerRow = 8;

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
  return lse == tile::kInfinity ? tile::kNan : lse * tile::kLog2E;
}

// Eight lanes a (row, head); heads of a row follow each other, as they do in memory.
template <DType kType>
__global__ void __launch_bounds__(kPreprocessThreads)
    backward_preprocess_kernel(const __grid_constant__ BackwardParams params) {
  using E = tile::Element<kType>;
  const ProblemShape& shape = params.shape;
  int64_t index = (static_cast<int64_t>(blockIdx.x) * kPreprocessThreads + threadIdx.x);
  int lane = static_cast<int>(index % kLanesPerRow);
  index /= kLanesPerRow;
  bool valid = index < params.rows * shape.heads_q;
  if (!valid) index = 0;  // every lane takes part in the shuffles
  int64_t row = index / shape.heads_q, head = index % shape.heads_q;
  int64_t batch = shape.seqlens_q.packed() ? 0 : row / shape.seqlens_q.rows;
  int64_t seq_row = row - batch * shape.seqlens_q.rows;

  const E* out =
      static_cast<const E*>(params.out.data) + params.out.stride.offset(batch, seq_row, head);
  const E* dout =
      static_cast<const E*>(params.dout.data) + params.dout.stride.offset(batch, seq_row, head);
  float sum = 0.f;
  if (params.out.aligned16 && params.dout.aligned16) {
    for (int col = lane * 8; col < shape.headdim_v; col += kLanesPerRow * 8) {
      sum += dot_of_8<E>(*reinterpret_cast<const uint4*>(out + col),
                         *reinterpret_cast<const uint4*>(dout + col));
    }
  } else {
    // The order of the aligned case: the layout of dout changes no bit.
    for (int col = lane * 8; col < shape.headdim_v; col += kLanesPerRow * 8) {
      float part = 0.f;
      for (int i = col; i < min(col + 8, shape.headdim_v); ++i) {
        part = fmaf(tile::to_float(out[i]), tile::to_float(dout[i]), part);
      }
      sum += part;
    }
  }
#pragma unroll
  for (int step = 1; step < kLanesPerRow; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (!valid || lane != 0) return;
  if (params.dlse.data != nullptr) {
    sum -= params.dlse.data[params.dlse.offset(batch, head, seq_row)];
  }
  float lse = params.lse.data[params.lse.offset(batch, head, seq_row)];
  params.delta[head * params.rows + row] = isinf(sum) ? tile::kNan : sum;
  params.lse_log2[head * params.rows + row] = lse_for_exp2(lse);
}

template <DType kType>
void run_backward_preprocess(const BackwardParams& params, void* stream) {
  int64_t threads = params.rows * params.shape.heads_q * kLanesPerRow;
  int64_t grid = (threads + kPreprocessThreads - 1) / kPreprocessThreads;
  launch<backward_preprocess_kernel<kType>>(grid, kPreprocessThreads, 0, stream, params);
}

}  // namespace flashattn
