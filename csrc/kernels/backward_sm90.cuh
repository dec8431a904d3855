// Backward for sm_90a: FlashAttention-2, algorithm 2, on wgmma and TMA. A tile is a block of keys
// of one KV head: its CTA walks over the queries that see them, for every query head of the group.
// One CTA an SM takes tile after tile. Its four warpgroups:
//   two compute S^T = K Q^T and dP^T = V dO^T, P^T and dS^T of them, and  dV += P^T dO  and
//     dK += dS^T Q  in registers; dS also goes to shared memory. They share the work by keys
//     (backward_sm90_by_keys.cuh) or by products (backward_sm90_by_products.cuh);
//   one adds  dQ = dS K  to the sums in global memory, or, where the CTA takes whole heads, keeps
//     sums of its own and writes dQ;
//   one copies: a warp takes the tiles and starts the copies by TMA, three copy the rest, element
//     by element, and take NaN and Inf out of partial blocks.
#pragma once

#include "host/launch.cuh"
#include "kernels/backward_sm90_by_keys.cuh"
#include "kernels/backward_sm90_by_products.cuh"
#include "kernels/kernels.h"
#include "kernels/tensor_maps.h"

namespace flashattn {

template <DType kType, int kHeadDim, int kHeadDimV, bool kWhole>
using BackwardSm90Math =
    std::conditional_t<sm90_backward_tile({kHeadDim, kHeadDimV}).by_products,
                       BackwardSm90ByProducts<kType, kHeadDim, kHeadDimV, kWhole>,
                       BackwardSm90ByKeys<kType, kHeadDim, kHeadDimV, kWhole>>;

template <DType kType, int kHeadDim, int kHeadDimV, bool kWhole>
struct BackwardSm90 : BackwardSm90Math<kType, kHeadDim, kHeadDimV, kWhole> {
  using Base = BackwardSm90Math<kType, kHeadDim, kHeadDimV, kWhole>;
  using Base::kThreads;
  using typename Base::Copies, typename Base::DqSums, typename Base::Helpers, typename Base::Math;
  using typename Base::Shared;

  // Of a thread: two computing warpgroups, dQ, copies; 512 in all.
  static constexpr int kDqRegisters = Base::kTile.dq_columns == 64 ? 64 : 56;
  static constexpr int kCopyRegisters = Base::kTile.dq_columns == 64 ? 32 : 24;
  static constexpr int kMathRegisters = (512 - kDqRegisters - kCopyRegisters) / 2;

  static __device__ __forceinline__ void run(const BackwardSm90Params& params, Shared& shared) {
    if (threadIdx.x == 0) shared.init();
    __syncthreads();
    int warp = tile::warp_index();
    if (warp < 8) {
      ptx::increase_registers<kMathRegisters>();
      Math(params.backward, shared).run();
    } else if (warp < 12) {
      ptx::decrease_registers<kDqRegisters>();
      DqSums{params.backward, {shared}}.run();
    } else {
      ptx::decrease_registers<kCopyRegisters>();
      if (warp > 12) {
        Helpers{params.backward, shared}.run();
      } else {
        Copies{params, shared}.run();
      }
    }
  }
};

template <DType kType, int kHeadDim, int kHeadDimV, bool kWhole>
__global__ void __launch_bounds__(BackwardSm90<kType, kHeadDim, kHeadDimV, kWhole>::kThreads, 1)
    backward_sm90_kernel(const __grid_constant__ BackwardSm90Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t smem[];
  using Kernel = BackwardSm90<kType, kHeadDim, kHeadDimV, kWhole>;
  Kernel::run(params, *reinterpret_cast<typename Kernel::Shared*>(smem));
#else
  __trap();  // the planner takes this kernel on devices that run code for sm_90a only
#endif
}

template <DType kType, int kHeadDim, int kHeadDimV, bool kWhole>
void launch_backward_sm90(const BackwardParams& backward, void* stream) {
  using Kernel = BackwardSm90<kType, kHeadDim, kHeadDimV, kWhole>;
  const ProblemShape& shape = backward.shape;
  BackwardSm90Params params{
      tensor_map(backward.q, shape.seqlens_q, shape, shape.heads_q, shape.headdim, Kernel::kBlockM),
      tensor_map(backward.k, shape.seqlens_k, shape, shape.heads_k, shape.headdim, Kernel::kBlockN),
      tensor_map(backward.v, shape.seqlens_k, shape, shape.heads_k, shape.headdim_v,
                 Kernel::kBlockN),
      tensor_map(backward.dout, shape.seqlens_q, shape, shape.heads_q, shape.headdim_v,
                 Kernel::kBlockM),
      backward};
  launch<backward_sm90_kernel<kType, kHeadDim, kHeadDimV, kWhole>>(
      backward.schedule.ctas, Kernel::kThreads, static_cast<int>(sizeof(typename Kernel::Shared)),
      stream, params);
}

template <DType kType, int kHeadDim, int kHeadDimV>
void run_backward_sm90(const BackwardParams& backward, void* stream) {
  if (backward.schedule.whole_heads) {
    launch_backward_sm90<kType, kHeadDim, kHeadDimV, true>(backward, stream);
  } else {
    launch_backward_sm90<kType, kHeadDim, kHeadDimV, false>(backward, stream);
  }
}

}  // namespace flashattn
