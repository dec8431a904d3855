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

// A query row: its place in the tensors, and the row number that workspace goes by.
struct QueryRow {
  int64_t batch, seq_row, row;
  bool valid;  // otherwise the last one, so that every lane has something to read

  // Row `i` of those from `first` on. The wide division is the same for all of a CTA's threads.
  __device__ __forceinline__ QueryRow(const BackwardParams& params, int64_t first, int i) {
    valid = first + i < params.rows;
    row = valid ? first + i : params.rows - 1;
    batch = 0;
    seq_row = row;
    if (params.shape.seqlens_q.packed()) return;
    int64_t first_batch = first / params.shape.seqlens_q.rows;
    auto rows = static_cast<uint32_t>(params.shape.seqlens_q.rows);
    auto past = static_cast<uint32_t>(row - first_batch * params.shape.seqlens_q.rows);
    batch = first_batch + past / rows;
    seq_row = past % rows;
  }
};

// A lane's part of <dout, out>.
template <class E>
__device__ __forceinline__ float partial_dot(const BackwardParams& params, const QueryRow& at,
                                             int64_t head, int lane) {
  int headdim = params.shape.headdim_v;
  const E* out =
      static_cast<const E*>(params.out.data) + params.out.stride.offset(at.batch, at.seq_row, head);
  const E* dout = static_cast<const E*>(params.dout.data) +
                  params.dout.stride.offset(at.batch, at.seq_row, head);
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

// Eight lanes a row; a CTA takes kPreprocessRows of one head, the heads of these rows follow. All
// of a thread's rows are read before the first is written: their loads wait together.
template <DType kType>
__global__ void __launch_bounds__(kPreprocessThreads)
    backward_preprocess_kernel(const __grid_constant__ BackwardParams params) {
  using E = tile::Element<kType>;
  int64_t head = blockIdx.x % params.shape.heads_q;
  int64_t first_row = int64_t{blockIdx.x / params.shape.heads_q} * kPreprocessRows;
  int lane = threadIdx.x % kLanesPerRow;
  float delta[kRowsPerThread], lse[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    QueryRow at(params, first_row, threadIdx.x / kLanesPerRow + i * kRowStep);
    lse[i] = params.lse.data[params.lse.offset(at.batch, head, at.seq_row)];
    delta[i] = partial_dot<E>(params, at, head, lane);
  }
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
    for (int step = 1; step < kLanesPerRow; step *= 2) {
      delta[i] += __shfl_xor_sync(~0u, delta[i], step);
    }
    QueryRow at(params, first_row, threadIdx.x / kLanesPerRow + i * kRowStep);
    if (!at.valid || lane != 0) continue;
    if (params.dlse.data != nullptr) {
      delta[i] -= params.dlse.data[params.dlse.offset(at.batch, head, at.seq_row)];
    }
    int64_t place = head * params.rows + at.row;
    params.delta[place] = isinf(delta[i]) ? tile::kNan : delta[i];
    params.lse_log2[place] = lse_for_exp2(lse[i]);
  }
}

template <DType kType>
void run_backward_preprocess(const BackwardParams& params, void* stream) {
  int64_t grid = (params.rows + kPreprocessRows - 1) / kPreprocessRows * params.shape.heads_q;
  launch<backward_preprocess_kernel<kType>>(grid, kPreprocessThreads, 0, stream, params);
}

}  // namespace flashattn
