// dq = softmax_scale * dq_accum, rounded, in dq's column order.
#pragma once

#include "common/params.h"
#include "host/launch.cuh"
#include "kernels/kernels.h"
#include "tile/dq_accum.cuh"
#include "tile/element.cuh"

namespace flashattn {

constexpr int kPostprocessThreads = 256;

// One thread a group of 16 columns of one row and head.
template <DType kType>
__global__ void __launch_bounds__(kPostprocessThreads)
    backward_postprocess_kernel(const __grid_constant__ BackwardParams params, int accum_headdim) {
  using E = tile::Element<kType>;
  const ProblemShape& shape = params.shape;
  int groups = (shape.headdim + 15) / 16;
  int64_t index = static_cast<int64_t>(blockIdx.x) * kPostprocessThreads + threadIdx.x;
  if (index >= params.rows * shape.heads_q * groups) return;
  int group = static_cast<int>(index % groups);
  int64_t head = index / groups % shape.heads_q, row = index / groups / shape.heads_q;
  int64_t batch = shape.seqlens_q.packed() ? 0 : row / shape.seqlens_q.rows;
  int64_t seq_row = row - batch * shape.seqlens_q.rows;

  const float4* sums = reinterpret_cast<const float4*>(
      params.dq_accum + (head * params.rows + row) * accum_headdim + group * 16);
  alignas(16) float accum[16];  // read and written 16 bytes at a time
#pragma unroll
  for (int i = 0; i < 4; ++i) reinterpret_cast<float4*>(accum)[i] = sums[i];
  alignas(16) E dq[16];
#pragma unroll
  for (int col = 0; col < 16; ++col) {
    dq[col] = tile::from_float<E>(accum[tile::dq_accum_position(col)] * shape.softmax_scale);
  }
  E* out =
      static_cast<E*>(params.dq.data) + params.dq.stride.offset(batch, seq_row, head) + group * 16;
  if (params.dq.aligned16) {
    reinterpret_cast<uint4*>(out)[0] = reinterpret_cast<const uint4*>(dq)[0];
    if (group * 16 + 8 < shape.headdim) {
      reinterpret_cast<uint4*>(out)[1] = reinterpret_cast<const uint4*>(dq)[1];
    }
  } else {
#pragma unroll
    for (int col = 0; col < 16; ++col) {
      if (group * 16 + col < shape.headdim) out[col] = dq[col];
    }
  }
}

template <DType kType>
void run_backward_postprocess(const BackwardParams& params, int accum_headdim, void* stream) {
  int64_t threads = params.rows * params.shape.heads_q * ((params.shape.headdim + 15) / 16);
  int64_t grid = (threads + kPostprocessThreads - 1) / kPostprocessThreads;
  launch<backward_postprocess_kernel<kType>>(grid, kPostprocessThreads, 0, stream, params,
                                             accum_headdim);
}

}  // namespace flashattn
