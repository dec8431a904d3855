// Backward for sm_90a: FlashAttention-2, algorithm 2, on wgmma and TMA. A CTA takes 128 keys of one
// KV head and walks over the queries that see them, for every query head of the group. Its four
// warpgroups:
//   two compute, 64 keys each: S^T = K Q^T and dP^T = V dO^T in one set of accumulators, whose
//     results stay in registers as the A operands of  dV += P^T dO  and  dK += dS^T Q;  dS also
//     goes to shared memory;
//   one adds  dQ = dS K  to the sums in global memory;
//   one copies: a warp starts the copies by TMA, three copy what that can't reach and take NaN and
//     Inf out of partial blocks.
//
// A step of a computing warpgroup:  S(j) done | P | start dP(j), dV(j) | dP done | dS | dV done |
// dS to shared memory | start dK(j), S(j+1) | dK done.
#pragma once

#include "host/launch.cuh"
#include "kernels/backward_sm90_load.cuh"
#include "kernels/backward_specials.cuh"
#include "kernels/kernels.h"
#include "kernels/tensor_maps.h"
#include "tile/mask_apply.cuh"
#include "tile/score_gradients.cuh"
#include "tile/store.cuh"
#include "tile/warpgroup_mma.cuh"

namespace flashattn {

template <DType kType, int kHeadDim>
struct BackwardSm90 : BackwardSm90Load<kType, kHeadDim> {
  using Base = BackwardSm90Load<kType, kHeadDim>;
  using Base::kBlockM, Base::kBlockN, Base::kStages, Base::kThreads;
  using Base::kStored, Base::address, Base::wait, Base::arrive, Base::arrive_all;
  using typename Base::Copies, typename Base::Helpers;
  using typename Base::E, typename Base::Shared;
  using typename Base::TileDs, typename Base::TileK, typename Base::TileQ;
  template <int kSlots>
  using Place = typename Base::template Place<kSlots>;

  static constexpr int kMathThreads = 256;
  // Of a thread: two computing warpgroups, dQ, copies; 512 in all.
  static constexpr int kMathRegisters = 208, kDqRegisters = 72, kCopyRegisters = 24;

  using Scores = tile::Accumulator<16, kBlockM>;
  using Packed = tile::PackedAccumulator<16, kBlockM>;
  using Gradient = tile::Accumulator<16, kHeadDim>;

  // A warpgroup: dQ = dS K, in pieces of 64 queries and 64 columns.
  struct DqSums {
    Shared& shared;
    const BackwardWork& work;

    __device__ __forceinline__ void add_piece(const BackwardStep& step, int row, int slab) const {
      uint64_t ds =
          ptx::wgmma_descriptor(address(shared.ds[step.index % 2]) + row * TileDs::kPitch);
      uint64_t k = ptx::wgmma_descriptor(address(shared.k) + slab * TileK::kSlabBytes);
      tile::Accumulator<16, 64> dq;
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kBlockN / 16; ++i) {
        ptx::Wgmma<E, 64>::template ss<true>(
            dq[0], ptx::wgmma_advance(ds, i / 4 * TileDs::kSlabBytes + i % 4 * 32),
            ptx::wgmma_advance(k, i * 16 * TileK::kPitch), i > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::hold(dq[0]);
      bool last = row + 64 == kBlockM && (slab + 1) * 64 == kHeadDim;
      if (last) arrive(shared.ds_empty[step.index % 2]);
      int first_row = step.block * kBlockM;
      tile::add_dq<kHeadDim, 1>(work.dq_sums(step.head, kHeadDim) + int64_t{first_row} * kHeadDim,
                                row + tile::warp_index() % 4 * 16, work.q_rows.length - first_row,
                                4 * slab, dq);
    }

    __device__ __forceinline__ void run() const {
      bool wanted = work.params.dq_accum != nullptr;
      BackwardStep step(work);
      wait(shared.k_full, 0);
#pragma unroll 1
      for (int left = work.steps(); left > 0; --left, step.advance(work)) {
        Place<2> place(step.index);
        wait(shared.ds_full[place.slot], place.parity);
        if (!wanted) {
          arrive(shared.ds_empty[place.slot]);
          continue;
        }
#pragma unroll 1
        for (int piece = 0; piece < kBlockM / 64 * (kHeadDim / 64); ++piece) {
          add_piece(step, kHeadDim == 64 ? 64 * piece : 0, kHeadDim == 64 ? 0 : piece);
        }
      }
    }
  };

  // A warpgroup: 64 keys.
  struct Math {
    Shared& shared;
    const BackwardWork& work;
    int warpgroup, warp;  // warp: of the CTA's computing warps, 16 keys each
    uint64_t k, v, q, dout;
    uint32_t ds_lane;  // a lane's address for stmatrix in the first buffer of dS

    __device__ __forceinline__ Math(Shared& shared_memory, const BackwardWork& a_work)
        : shared(shared_memory),
          work(a_work),
          warpgroup(tile::warp_index() / 4),
          warp(tile::warp_index()),
          k(ptx::wgmma_descriptor(address(shared.k) + warpgroup * 64 * TileK::kPitch)),
          v(ptx::wgmma_descriptor(address(shared.v) + warpgroup * 64 * TileK::kPitch)),
          q(ptx::wgmma_descriptor(address(shared.q), TileQ::kSlabBytes)),
          dout(ptx::wgmma_descriptor(address(shared.dout), TileQ::kSlabBytes)) {
      tile::LaneOffsets<64> lanes(tile::LaneOrder::kChunkThenRows, warp % 4 * 16);
      ds_lane = address(shared.ds) + warpgroup * TileDs::kSlabBytes + lanes.bytes[0];
    }

    // Starts  scores = A B^T  with A the warpgroup's keys of K or V, B a block of Q or dO.
    static __device__ __forceinline__ void start_scores(Scores& scores, uint64_t a, uint64_t b,
                                                        int slot) {
      tile::start_abt<E, TileK, TileQ, kHeadDim>(scores, a,
                                                 ptx::wgmma_advance(b, slot * TileQ::kBytes));
    }

    // Starts  gradient += A B  with A in registers, B a block of dO or Q.
    static __device__ __forceinline__ void start_gradient(Gradient& gradient, const Packed& a,
                                                          uint64_t b, int slot) {
      tile::start_ab<E, TileQ>(gradient, a, ptx::wgmma_advance(b, slot * TileQ::kBytes));
    }

    // Zeroes hidden pairs, in partial blocks; after the arithmetic, see BackwardSm80::hide.
    __device__ __forceinline__ void hide(int block, Scores& x) const {
      if (!work.blocks.partial(block)) return;
      tile::apply_mask<true>(x, work.mask, work.first_key + 16 * warp, block * kBlockM, 0.f);
    }

    // P^T of S^T, in place.
    __device__ __forceinline__ void probabilities(int block, int slot, Scores& p) const {
      uint32_t lse_log2 = address(shared.lse_log2[slot]);
      tile::probabilities(p, lse_log2, 0, work.params.shape.softmax_scale,
                          tile::any_large_lse<kBlockM>(lse_log2));
      hide(block, p);
    }

    // dS^T of dP^T, in place.
    __device__ __forceinline__ void score_gradients(int block, int slot, const Packed& p,
                                                    Scores& ds) const {
      tile::score_gradients<E>(ds, p, address(shared.delta[slot]), 0);
      hide(block, ds);
    }

    __device__ __forceinline__ void store_ds(int index, const Packed& ds) const {
      Place<2> place(index);
      wait(shared.ds_empty[place.slot], place.parity ^ 1);
#pragma unroll
      for (int i = 0; i < kBlockM / 16; ++i) {
        ptx::stmatrix_x4_trans(ds_lane + place.slot * TileDs::kBytes + i * 16 * TileDs::kPitch,
                               ds[i][0]);
      }
      ptx::fence_async_shared();
      arrive(shared.ds_full[place.slot]);
    }

    __device__ __forceinline__ void run(Gradient& dk, Gradient& dv) const {
      Scores scores;  // of S and dP in turn
      Packed packed;  // of P and dS in turn
      int steps = work.steps(), block = work.blocks.begin;
      wait(shared.k_full, 0);
      wait(shared.v_full, 0);
      if (steps > 0) wait(shared.q_full[0], 0);
      start_scores(scores, k, q, 0);
#pragma unroll 1
      for (int index = 0; index < steps; ++index) {
        ptx::wgmma_wait<0>();
        ptx::hold(scores[0]);
        Place<kStages> place(index);
        int slot = place.slot;
        probabilities(block, slot, scores);
        tile::pack_accumulator<E>(packed, scores);
        wait(shared.dout_full[slot], place.parity);
        start_scores(scores, v, dout, slot);
        start_gradient(dv, packed, dout, slot);
        ptx::wgmma_wait<1>();
        ptx::hold(scores[0]);
        score_gradients(block, slot, packed, scores);
        ptx::hold(scores[0]);
        ptx::wgmma_wait<0>();  // dV: P's registers may take dS
        ptx::hold(scores[0]);
        arrive_all(shared.dout_empty[slot]);
        tile::pack_accumulator<E>(packed, scores);
        store_ds(index, packed);
        start_gradient(dk, packed, q, slot);
        Place<kStages> next(index + 1);
        if (index + 1 < steps) wait(shared.q_full[next.slot], next.parity);
        start_scores(scores, k, q, next.slot);  // in the last step of a block that is past: unused
        ptx::wgmma_wait<1>();
        arrive_all(shared.q_empty[slot]);
        if (++block == work.blocks.end) block = work.blocks.begin;
      }
      ptx::wgmma_wait<0>();
      ptx::hold(dk[0]);
      ptx::hold(dv[0]);
    }
  };

  static __device__ __forceinline__ void store(const BackwardWork& work, const MutableTensor& grad,
                                               int headdim, const Gradient& x) {
    int row = work.first_key + 16 * tile::warp_index();
    E* out = static_cast<E*>(grad.data) +
             grad.stride.offset(work.keys.batch, work.keys.rows.begin + row, work.keys.head);
    tile::store_accumulator_rows(out, grad.stride.row, work.keys.rows.length - row, headdim, x);
  }

  static __device__ __forceinline__ void compute(const BackwardParams& params, Shared& shared,
                                                 const BackwardWork& work) {
    Gradient dk, dv;
    tile::clear(dk);
    tile::clear(dv);
    Math(shared, work).run(dk, dv);
    // Made again: nothing of it is kept in registers over the walk.
    BackwardWork ended(params, kBlockM, kBlockN);
    if (params.dk.data != nullptr) {
      tile::scale(dk, params.shape.softmax_scale);
      store(ended, params.dk, params.shape.headdim, dk);
      store(ended, params.dv, params.shape.headdim_v, dv);
    }
    if (*static_cast<volatile int*>(&shared.special) == 0) return;
    SpecialThreads team{static_cast<int>(threadIdx.x), kMathThreads, kStored};
    BackwardSpecials<E, kBlockM, kBlockN, kHeadDim>{ended, team}.store();
  }

  static __device__ __forceinline__ void run(const BackwardSm90Params& params, Shared& shared) {
    const BackwardParams& backward = params.backward;
    BackwardWork work(backward, kBlockM, kBlockN);
    if (work.empty()) return;
    if (threadIdx.x == 0) shared.init(kMathThreads / 32, 4);
    __syncthreads();
    int warp = tile::warp_index();
    if (warp < 8) {
      ptx::increase_registers<kMathRegisters>();
      compute(backward, shared, work);
    } else if (warp < 12) {
      ptx::decrease_registers<kDqRegisters>();
      DqSums{shared, work}.run();
    } else {
      ptx::decrease_registers<kCopyRegisters>();
      if (warp > 12) {
        Helpers{backward, shared, work}.run();
      } else if (threadIdx.x % 32 == 0) {
        Copies{params, shared, work}.run();
      }
    }
  }
};

template <DType kType, int kHeadDim>
__global__ void __launch_bounds__(BackwardSm90<kType, kHeadDim>::kThreads, 1)
    backward_sm90_kernel(const __grid_constant__ BackwardSm90Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t smem[];
  using Kernel = BackwardSm90<kType, kHeadDim>;
  Kernel::run(params, *reinterpret_cast<typename Kernel::Shared*>(smem));
#else
  __trap();  // the planner takes this kernel on devices that run code for sm_90a only
#endif
}

template <DType kType, int kHeadDim>
void run_backward_sm90(const BackwardParams& backward, void* stream) {
  using Kernel = BackwardSm90<kType, kHeadDim>;
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
  launch<backward_sm90_kernel<kType, kHeadDim>>(
      grid, Kernel::kThreads, static_cast<int>(sizeof(typename Kernel::Shared)), stream, params);
}

}  // namespace flashattn
