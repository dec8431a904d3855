// What both forms of the backward for sm_90a have: dQ's warpgroup, what is done to the scores of a
// warp's 16 keys, and the store of a gradient.
#pragma once

#include "kernels/backward_sm90_load.cuh"
#include "tile/mask_apply.cuh"
#include "tile/score_gradients.cuh"
#include "tile/store.cuh"
#include "tile/warpgroup_mma.cuh"

namespace flashattn {

template <DType kType, int kHeadDim, int kHeadDimV>
struct BackwardSm90Parts : BackwardSm90Load<kType, kHeadDim, kHeadDimV> {
  using Base = BackwardSm90Load<kType, kHeadDim, kHeadDimV>;
  using Base::address, Base::wait, Base::arrive;
  using Base::kBlockM, Base::kBlockN, Base::kStages;
  using typename Base::E, typename Base::Shared;
  using typename Base::TileDs, typename Base::TileK, typename Base::TileQ;
  template <int kSlots>
  using Place = typename Base::template Place<kSlots>;

  static constexpr int kQueries = Base::kTile.queries;
  using Scores = tile::Accumulator<16, kQueries>;
  using Packed = tile::PackedAccumulator<16, kQueries>;

  // A warpgroup: dQ = dS K, in pieces of 64 queries and some columns.
  struct DqSums {
    Shared& shared;
    const BackwardWork& work;
    static constexpr int kColumns = Base::kTile.dq_columns;

    __device__ __forceinline__ void add_piece(const BackwardStep& step, int row, int col) const {
      uint64_t ds =
          ptx::wgmma_descriptor(address(shared.ds[step.index % 2]) + row * TileDs::kPitch);
      uint64_t k =
          ptx::wgmma_descriptor(address(shared.k) + col / 64 * TileK::kSlabBytes + col % 64 * 2);
      tile::Accumulator<16, kColumns> dq;
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kBlockN / 16; ++i) {
        ptx::Wgmma<E, kColumns>::template ss<true>(
            dq[0], ptx::wgmma_advance(ds, i / 4 * TileDs::kSlabBytes + i % 4 * 32),
            ptx::wgmma_advance(k, i * 16 * TileK::kPitch), i > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::hold(dq[0]);
      bool last = row + 64 == kBlockM && col + kColumns == kHeadDim;
      if (last) arrive(shared.ds_empty[step.index % 2]);
      int first_row = step.block * kBlockM;
      tile::add_dq<kHeadDim, 1>(work.dq_sums(step.head, kHeadDim) + int64_t{first_row} * kHeadDim,
                                row + tile::warp_index() % 4 * 16, work.q_rows.length - first_row,
                                col / 16, dq);
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
        for (int row = 0; row < kBlockM; row += 64)
#pragma unroll 1
          for (int col = 0; col < kHeadDim; col += kColumns) add_piece(step, row, col);
      }
    }
  };

  // A warp's 16 keys, from `row` of the CTA's on, and the queries of a block from `first` on.
  struct ScoreWarp {
    const Shared& shared;
    const BackwardWork& work;
    int first_key;
    uint32_t ds_lane;  // a lane's address for stmatrix in the first buffer of dS

    __device__ __forceinline__ ScoreWarp(const Shared& shared_memory, const BackwardWork& a_work,
                                         int row)
        : shared(shared_memory),
          work(a_work),
          first_key(a_work.first_key + row),
          ds_lane(address(shared_memory.ds) + row / 64 * TileDs::kSlabBytes +
                  tile::LaneOffsets<64>(tile::LaneOrder::kChunkThenRows, row % 64).bytes[0]) {}

    // Zeroes hidden pairs, in partial blocks; after the arithmetic, see BackwardSm80::hide.
    __device__ __forceinline__ void hide(int block, int first, Scores& x) const {
      if (!work.blocks.partial(block)) return;
      tile::apply_mask<true>(x, work.mask, first_key, block * kBlockM + first, 0.f);
    }

    // P^T of S^T, in place.
    __device__ __forceinline__ void probabilities(int block, int first, int slot, Scores& p) const {
      uint32_t lse_log2 = address(shared.lse_log2[slot]);
      tile::probabilities(p, lse_log2, first, work.params.shape.softmax_scale,
                          tile::any_large_lse<kQueries>(lse_log2 + first * 4));
      hide(block, first, p);
    }

    // dS^T of dP^T, in place.
    __device__ __forceinline__ void score_gradients(int block, int first, int slot, const Packed& p,
                                                    Scores& ds) const {
      tile::score_gradients<E>(ds, p, address(shared.delta[slot]), first);
      hide(block, first, ds);
    }

    // dS^T to shared memory; with the block's last queries it is full.
    __device__ __forceinline__ void store_ds(int index, int first, const Packed& ds) const {
      Place<2> place(index);
      if (first == 0) wait(shared.ds_empty[place.slot], place.parity ^ 1);
#pragma unroll
      for (int i = 0; i < kQueries / 16; ++i) {
        ptx::stmatrix_x4_trans(
            ds_lane + place.slot * TileDs::kBytes + (first + i * 16) * TileDs::kPitch, ds[i][0]);
      }
      ptx::fence_async_shared();
      if (first + kQueries == kBlockM) arrive(shared.ds_full[place.slot]);
    }
  };

  // A warp's 16 keys, from `row` of the CTA's on.
  template <class Gradient>
  static __device__ __forceinline__ void store(const BackwardWork& work, const MutableTensor& grad,
                                               int row, int headdim, const Gradient& x) {
    row += work.first_key;
    E* out = static_cast<E*>(grad.data) +
             grad.stride.offset(work.keys.batch, work.keys.rows.begin + row, work.keys.head);
    tile::store_accumulator_rows(out, grad.stride.row, work.keys.rows.length - row, headdim, x);
  }
};

}  // namespace flashattn
