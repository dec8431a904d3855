// Backward for sm_90a: FlashAttention-2, algorithm 2, on wgmma and TMA. A CTA takes a block of keys
// of one KV head and walks over the queries that see them, for every query head of the group. Its
// four warpgroups:
//   two compute S^T = K Q^T and dP^T = V dO^T, P^T and dS^T of them, and  dV += P^T dO  and
//     dK += dS^T Q  in registers; dS also goes to shared memory. They share the work by keys
//     (backward_sm90_by_keys.cuh) or by products (backward_sm90_by_products.cuh);
//   one adds  dQ = dS K  to the sums in global memory;
//   one copies: a warp starts the copies by TMA, three take NaN and Inf out of partial blocks.
#pragma once

#include "host/launch.cuh"
#include "kernels/backward_sm90_by_keys.cuh"
#include "kernels/backward_sm90_by_products.cuh"
#include "kernels/backward_specials.cuh"
#include "kernels/kernels.h"
#include "kernels/tensor_maps.h"

namespace flashattn {

template <DType kType, int kHeadDim, int kHeadDimV>
using BackwardSm90Math = std::conditional_t<sm90_backward_tile({kHeadDim, kHeadDimV}).by_products,
                                            BackwardSm90ByProducts<kType, kHeadDim, kHeadDimV>,
                                            BackwardSm90ByKeys<kType, kHeadDim, kHeadDimV>>;

template <DType kType, int kHeadDim, int kHeadDimV>
struct BackwardSm90 : BackwardSm90Math<kType, kHeadDim, kHeadDimV> {
  using Base = BackwardSm90Math<kType, kHeadDim, kHeadDimV>;
  using Base::kBlockM, Base::kBlockN, Base::kStored, Base::kThreads;
  using typename Base::Copies, typename Base::DqSums, typename Base::Helpers;
  using typename Base::E, typename Base::Shared;

  // Of a thread: two computing warpgroups, dQ, copies; 512 in all.
  static constexpr int kDqRegisters = Base::kTile.dq_columns == 64 ? 72 : 56, kCopyRegisters = 24;
  static constexpr int kMathRegisters = (512 - kDqRegisters - kCopyRegisters) / 2;

  // By the computing warpgroups, which have stored their gradients.
  static __device__ __forceinline__ void add_specials(const BackwardParams& params,
                                                      const Shared& shared) {
    if (*static_cast<const volatile int*>(&shared.special) == 0) return;
    BackwardWork work(params, kBlockM, kBlockN);
    SpecialThreads team{static_cast<int>(threadIdx.x), kBackwardSm90MathThreads, kStored};
    BackwardSpecials<E, kBlockM, kBlockN, kHeadDim>{work, team}.store();
  }

  static __device__ __forceinline__ void run(const BackwardSm90Params& params, Shared& shared) {
    const BackwardParams& backward = params.backward;
    BackwardWork work(backward, kBlockM, kBlockN);
    if (work.empty()) return;
    if (threadIdx.x == 0) shared.init();
    __syncthreads();
    int warp = tile::warp_index();
    if (warp < 8) {
      ptx::increase_registers<kMathRegisters>();
      Base::compute(backward, shared, work);
      add_specials(backward, shared);
    } else if (warp < 12) {
      ptx::decrease_registers<kDqRegisters>();
      DqSums{shared, work}.run();
    } else {
      ptx::decrease_registers<kCopyRegisters>();
      if (warp > 12) {
        Helpers{shared, work}.run();
      } else if (threadIdx.x % 32 == 0) {
        Copies{params, shared, work}.run();
      }
    }
  }
};

template <DType kType, int kHeadDim, int kHeadDimV>
__global__ void __launch_bounds__(BackwardSm90<kType, kHeadDim, kHeadDimV>::kThreads, 1)
    backward_sm90_kernel(const __grid_constant__ BackwardSm90Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t smem[];
  using Kernel = BackwardSm90<kType, kHeadDim, kHeadDimV>;
  Kernel::run(params, *reinterpret_cast<typename Kernel::Shared*>(smem));
#else
  __trap();  // the planner takes this kernel on devices that run code for sm_90a only
#endif
}

template <DType kType, int kHeadDim, int kHeadDimV>
void run_backward_sm90(const BackwardParams& backward, void* stream) {
  using Kernel = BackwardSm90<kType, kHeadDim, kHeadDimV>;
  const ProblemShape& shape = backward.shape;
  BackwardSm90Params params{
      tensor_map(backward.q, shape.seqlens_q, shape, shape.heads_q, shape.headdim, Kernel::kBlockM),
      tensor_map(backward.k, shape.seqlens_k, shape, shape.heads_k, shape.headdim, Kernel::kBlockN),
      tensor_map(backward.v, shape.seqlens_k, shape, shape.heads_k, shape.headdim_v,
                 Kernel::kBlockN),
      tensor_map(backward.dout, shape.seqlens_q, shape, shape.heads_q, shape.headdim_v,
                 Kernel::kBlockM),
      backward};
  int64_t grid =
      tile::blocks_per_head(shape.seqlens_k, shape.batch, Kernel::kBlockN) * shape.heads_k;
  launch<backward_sm90_kernel<kType, kHeadDim, kHeadDimV>>(
      grid, Kernel::kThreads, static_cast<int>(sizeof(typename Kernel::Shared)), stream, params);
}

}  // namespace flashattn
