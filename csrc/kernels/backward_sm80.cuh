// Backward for sm_80 and later: FlashAttention-2, algorithm 2, on mma.sync. A CTA takes block_n
// keys of one KV head and walks over the queries that see them, for every query head of the group:
// dK and dV stay in registers and need no sum over heads, dQ is added up in global memory.
//
// Scores are computed transposed (keys are rows): P^T and dS^T are then the A operands of
//     dV += P^T dO     dK += dS^T Q
// as they stand in registers, and only dS^T passes through shared memory, for  dQ = dS K. Head dims
// above 128 leave no room for dK and dV in registers so: there warps share the columns, and P^T
// passes through shared memory too.
#pragma once

#include "host/launch.cuh"
#include "kernels/backward_sm80_work.cuh"
#include "kernels/backward_specials.cuh"
#include "kernels/kernels.h"
#include "tile/fragment.cuh"
#include "tile/mask_apply.cuh"
#include "tile/score_gradients.cuh"
#include "tile/turn.cuh"

namespace flashattn {

template <DType kType, int kHeadDim, int kHeadDimV, SmemClass kSmem>
struct BackwardSm80 : BackwardSm80Work<kType, kHeadDim, kHeadDimV, kSmem> {
  using Base = BackwardSm80Work<kType, kHeadDim, kHeadDimV, kSmem>;
  using Base::kBlockM, Base::kBlockN, Base::kWarps, Base::kThreads, Base::kTile;
  using Base::kGradRows, Base::kGradWarpsD, Base::kDqRows, Base::kDqWarpsD;
  using Base::kPInRegisters, Base::kScoreRows, Base::kSubM, Base::kSubs;
  using Base::kSmemV, Base::kSmemP;
  using Base::load_keys, Base::load_queries, Base::zero_hidden_specials;
  using typename Base::E, typename Base::Roles, typename Base::Step, typename Base::Work;
  using typename Base::TileDo, typename Base::TileK, typename Base::TileP, typename Base::TileQ,
      typename Base::TileV;

  using Scores = tile::Accumulator<kScoreRows, kSubM>;
  using Packed = tile::PackedAccumulator<kScoreRows, kSubM>;
  using GradK = tile::Accumulator<kGradRows, kHeadDim / kGradWarpsD>;
  using GradV = tile::Accumulator<kGradRows, kHeadDimV / kGradWarpsD>;
  using GradQ = tile::Accumulator<kDqRows, kHeadDim / kDqWarpsD>;

  // Zeroes hidden pairs, in partial blocks. After the arithmetic, not before: whatever a row's
  // statistics or a hidden pair's score and dP are, NaN included, they give exactly 0.
  static __device__ __forceinline__ void hide(const Work& work, const Roles& roles,
                                              const Step& step, int col, Scores& x) {
    if (!work.blocks.partial(step.block)) return;
    tile::apply_mask<true>(x, work.mask, work.first_key + roles.score_row, step.first_row() + col,
                           0.f);
  }

  // P^T = exp(scale K Q^T - lse), rounded, for kSubM queries from column `col` of the block on.
  static __device__ __forceinline__ void probabilities(const Work& work, const Roles& roles,
                                                       const Step& step, int col, Scores& p) {
    tile::clear(p);
    tile::gemm_abt<E, kHeadDim>(p, tile::LaneAddress<TileK>(work.smem, roles.score_row, roles.rows),
                                tile::LaneAddress<TileQ>(step.q(work), col, roles.chunks));
    tile::probabilities(p, step.stats(work), col, work.params.shape.softmax_scale, step.large_lse);
    hide(work, roles, step, col, p);
  }

  // dS^T = P^T * (V dO^T - delta), for the same pairs.
  static __device__ __forceinline__ void score_gradients(const Work& work, const Roles& roles,
                                                         const Step& step, int col, const Scores& p,
                                                         Scores& ds) {
    tile::clear(ds);
    tile::gemm_abt<E, kHeadDimV>(
        ds, tile::LaneAddress<TileV>(work.smem + kSmemV, roles.score_row, roles.rows),
        tile::LaneAddress<TileDo>(step.dout(work), col, roles.chunks));
    tile::score_gradients(ds, p, step.stats(work), kBlockM + col);
    hide(work, roles, step, col, ds);
  }

  // Where this warp's piece of P^T or dS^T lies.
  static __device__ __forceinline__ tile::LaneAddress<TileP> score_piece(const Roles& roles,
                                                                         uint32_t tile) {
    return tile::LaneAddress<TileP>(tile, roles.score_row, roles.score_rows());
  }

  // dV += P^T dO, dK += dS^T Q with both in registers; leaves dS^T in shared memory.
  static __device__ __forceinline__ void key_gradients(const Work& work, const Roles& roles,
                                                       const Step& step, GradK& dk, GradV& dv) {
    bool want_dkv = work.params.dk.data != nullptr;
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      int col = sub * kSubM;
      Scores p, ds;
      Packed packed;
      probabilities(work, roles, step, col, p);
      if (want_dkv) {
        tile::pack_accumulator<E>(packed, p);
        tile::gemm_ab<E, kGradWarpsD>(dv, packed,
                                      tile::LaneAddress<TileDo>(step.dout(work), col, roles.rows));
      }
      score_gradients(work, roles, step, col, p, ds);
      tile::pack_accumulator<E>(packed, ds);
      tile::store_packed(score_piece(roles, step.ds(work)), packed, col);
      if (want_dkv) {
        tile::gemm_ab<E, kGradWarpsD>(dk, packed,
                                      tile::LaneAddress<TileQ>(step.q(work), col, roles.rows));
      }
    }
  }

  // The same through shared memory: each warp computes a piece of P^T and dS^T, and after a barrier
  // of the warps that share those keys a piece of dV and dK.
  static __device__ __forceinline__ void share_scores(const Work& work, const Roles& roles,
                                                      const Step& step) {
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      int col = roles.score_col + sub * kSubM;
      Scores p, ds;
      Packed packed;
      probabilities(work, roles, step, col, p);
      tile::pack_accumulator<E>(packed, p);
      tile::store_packed(score_piece(roles, work.smem + kSmemP), packed, col);
      score_gradients(work, roles, step, col, p, ds);
      tile::pack_accumulator<E>(packed, ds);
      tile::store_packed(score_piece(roles, step.ds(work)), packed, col);
    }
  }

  static __device__ __forceinline__ void key_gradients_shared(const Work& work, const Roles& roles,
                                                              const Step& step, GradK& dk,
                                                              GradV& dv) {
    if (work.params.dk.data == nullptr) return;
    tile::PackedAccumulator<kGradRows, kBlockM> a;
    tile::load_a(a,
                 tile::LaneAddress<TileP>(work.smem + kSmemP, roles.grad_row, roles.score_rows()));
    tile::gemm_ab<E, kGradWarpsD>(dv, a,
                                  tile::LaneAddress<TileDo>(step.dout(work), 0, roles.grad_cols));
    tile::load_a(a, tile::LaneAddress<TileP>(step.ds(work), roles.grad_row, roles.score_rows()));
    tile::gemm_ab<E, kGradWarpsD>(dk, a,
                                  tile::LaneAddress<TileQ>(step.q(work), 0, roles.grad_cols));
  }

  // Adds this warp's piece of dQ to the sums, in turn if that is asked for.
  static __device__ __forceinline__ void add_dq(const Work& work, const Roles& roles,
                                                const Step& step, const GradQ& dq) {
    const BackwardParams& params = work.params;
    tile::Turn turn;
    if (params.dq_turn != nullptr) {
      int64_t counter =
          step.head * params.dq_turns_per_head + work.rows_before(kBlockM) / kBlockM + step.block;
      int first = work.mask.key_blocks(step.first_row(), kBlockM, kBlockN).begin;
      turn = tile::Turn(params.dq_turn + counter * kWarps + roles.warp);
      turn.wait(work.keys.block - first);
    }
    tile::add_dq<kHeadDim, kDqWarpsD>(
        work.dq_sums(work.params, step.head, kHeadDim) + int64_t{step.first_row()} * kHeadDim,
        roles.dq_row, work.q_rows.length - step.first_row(), roles.dq_group, dq);
    turn.pass();
  }

  // dQ += dS K for the step's block.
  static __device__ __forceinline__ void query_gradient(const Work& work, const Roles& roles,
                                                        const Step& step) {
    if (work.params.dq_accum == nullptr) return;
    GradQ dq;
    tile::clear(dq);
    tile::gemm_atb<E, kBlockN, kDqWarpsD>(dq,
                                          tile::LaneAddress<TileP>(step.ds(work), 0, roles.dq_rows),
                                          tile::LaneAddress<TileK>(work.smem, 0, roles.dq_cols));
    add_dq(work, roles, step, dq);
  }

  // Rounds dk and dv through the places of K and V, and writes them out.
  static __device__ __forceinline__ void store(const Work& work, const Roles& roles,
                                               const GradK& dk, const GradV& dv) {
    const BackwardParams& params = work.params;
    uint32_t k_tile = work.smem, v_tile = work.smem + kSmemV;
    tile::store_accumulator<E, TileK, kGradWarpsD>(k_tile, roles.grad_row, dk, roles.grad_group);
    tile::store_accumulator<E, TileV, kGradWarpsD>(v_tile, roles.grad_row, dv, roles.grad_group);
    __syncthreads();
    int64_t first = work.keys.rows.begin + work.first_key;
    int rows = work.keys.rows.length - work.first_key;
    auto write = [&]<class Tile>(const MutableTensor& grad, uint32_t tile, int headdim, Tile) {
      E* out =
          static_cast<E*>(grad.data) + grad.stride.offset(work.keys.batch, first, work.keys.head);
      tile::store_rows<Tile, kBlockN, kThreads>(out, grad.stride.row, grad.aligned16, tile, 0, rows,
                                                headdim, threadIdx.x);
    };
    write(params.dk, k_tile, params.shape.headdim, TileK{});
    write(params.dv, v_tile, params.shape.headdim_v, TileV{});
  }

  static __device__ __forceinline__ void run(const BackwardParams& params, uint32_t smem) {
    Work work(params, smem);
    if (work.empty()) return;
    Roles roles;
    GradK dk;
    GradV dv;
    tile::clear(dk);
    tile::clear(dv);
    bool special = false;
    load_keys(work);
    Step step(work), last = step;
    load_queries(work, step);
#pragma unroll 1
    for (int left = work.steps(); left > 0; --left) {
      step.index =
          __shfl_sync(~0u, step.index, 0);  // known to be uniform: so are buffers' addresses
      Step next = step.next(work);
      ptx::cp_async_wait<0>();
      special |= zero_hidden_specials(work, step);
      // This step's Q and dO are here, the last step's dS^T too, and its Q and dO are done with.
      __syncthreads();
      step.large_lse = tile::any_large_lse<kBlockM>(step.stats(work));
      if (kTile.stages == 2) load_queries(work, next);
      if constexpr (kPInRegisters) {
        key_gradients(work, roles, step, dk, dv);
        if (step.index > 0) query_gradient(work, roles, last);
      } else {
        share_scores(work, roles, step);
        // Between two barriers: warps that are early have something to do.
        if (step.index > 0) query_gradient(work, roles, last);
        ptx::named_barrier_sync(1 + roles.warp / kGradWarpsD, 32 * kGradWarpsD);
        key_gradients_shared(work, roles, step, dk, dv);
      }
      if (kTile.stages == 1) {
        __syncthreads();
        load_queries(work, next);
      }
      last = step;
      step = next;
    }
    ptx::cp_async_wait<0>();
    special = __syncthreads_or(special);
    if (step.index > 0) query_gradient(work, roles, last);
    if (params.dk.data != nullptr) {
      __syncthreads();
      tile::scale(dk, params.shape.softmax_scale);
      store(work, roles, dk, dv);
    }
    if (special) {
      SpecialThreads all{static_cast<int>(threadIdx.x), kThreads, 0};
      BackwardSpecials<E, kBlockM, kBlockN, kHeadDim>{work, all}.store(params.dq_accum != nullptr);
    }
  }
};

// The tile's size goes with the architecture that the code is for.
template <DType kType, int kHeadDim, int kHeadDimV, SmemClass kSmem>
__global__ void __launch_bounds__(BackwardSm80<kType, kHeadDim, kHeadDimV, kSmem>::kThreads)
    backward_sm80_kernel(const __grid_constant__ BackwardParams params) {
#if __CUDA_ARCH__ == 900
  constexpr SmemClass kExpected = SmemClass::k227KB;
#else
  constexpr SmemClass kExpected = SmemClass::k99KB;
#endif
  if constexpr (kSmem == kExpected) {
    extern __shared__ __align__(128) uint8_t smem[];
    BackwardSm80<kType, kHeadDim, kHeadDimV, kSmem>::run(params, ptx::shared_address(smem));
  } else {
    __trap();
  }
}

template <DType kType, int kHeadDim, int kHeadDimV, SmemClass kSmem>
void launch_backward_sm80(const BackwardParams& params, void* stream) {
  using Kernel = BackwardSm80<kType, kHeadDim, kHeadDimV, kSmem>;
  const ProblemShape& shape = params.shape;
  int64_t grid =
      tile::blocks_per_head(shape.seqlens_k, shape.batch, Kernel::kBlockN) * shape.heads_k;
  launch<backward_sm80_kernel<kType, kHeadDim, kHeadDimV, kSmem>>(
      grid, Kernel::kThreads, Kernel::kSmemBytes, stream, params);
}

template <DType kType, int kHeadDim, int kHeadDimV>
void run_backward_sm80(const BackwardParams& params, SmemClass smem, void* stream) {
  if (smem == SmemClass::k227KB) {
    launch_backward_sm80<kType, kHeadDim, kHeadDimV, SmemClass::k227KB>(params, stream);
  } else {
    launch_backward_sm80<kType, kHeadDim, kHeadDimV, SmemClass::k99KB>(params, stream);
  }
}

}  // namespace flashattn
