// The backward for sm_90a where two warpgroups hold dK and dV of 64 keys each: P^T and dS^T stay in
// registers as operands. Where dK and dV leave few registers, a block's queries are taken in parts.
//
// A step, of one part:  S(j) done | P | start dP(j), dV(j) | dP done | dS | dV done | dS to shared
// memory | start dK(j), S(j+1) | dK done.
#pragma once

#include "kernels/backward_sm90_parts.cuh"

namespace flashattn {

template <DType kType, int kHeadDim, int kHeadDimV>
struct BackwardSm90ByKeys : BackwardSm90Parts<kType, kHeadDim, kHeadDimV> {
  using Base = BackwardSm90Parts<kType, kHeadDim, kHeadDimV>;
  using Base::address, Base::wait, Base::arrive, Base::arrive_all;
  using Base::kBlockM, Base::kBlockN, Base::kQueries, Base::kStages;
  using typename Base::E, typename Base::Packed, typename Base::Scores, typename Base::ScoreWarp;
  using typename Base::Shared;
  using typename Base::TileDo, typename Base::TileK, typename Base::TileQ, typename Base::TileV;
  template <int kSlots>
  using Place = typename Base::template Place<kSlots>;

  using GradientK = tile::Accumulator<16, kHeadDim>;
  using GradientV = tile::Accumulator<16, kHeadDimV>;

  struct Math {
    Shared& shared;
    const BackwardWork& work;
    ScoreWarp warp;
    // Descriptors of K's first row and of the warpgroup's: the other tiles' are at constants from
    // there, which takes fewer registers than one for each.
    uint64_t tiles, keys;
    static_assert(TileQ::kSlabBytes == TileDo::kSlabBytes && TileK::kPitch == TileV::kPitch,
                  "one descriptor serves all");

    __device__ __forceinline__ Math(Shared& shared_memory, const BackwardWork& a_work)
        : shared(shared_memory),
          work(a_work),
          warp(shared_memory, a_work, 16 * tile::warp_index()),
          tiles(ptx::wgmma_descriptor(address(shared.k), TileQ::kSlabBytes)),
          keys(ptx::wgmma_advance(tiles, tile::warp_index() / 4 * 64 * TileK::kPitch)) {}

    __device__ __forceinline__ uint64_t k() const { return keys; }
    __device__ __forceinline__ uint64_t v() const {
      return ptx::wgmma_advance(keys, static_cast<int>(shared.v - shared.k));
    }
    // A slot's queries from `first` on.
    __device__ __forceinline__ uint64_t q(int slot, int first) const {
      return ptx::wgmma_advance(tiles, static_cast<int>(shared.q[0] - shared.k) +
                                           slot * TileQ::kBytes + first * TileQ::kPitch);
    }
    __device__ __forceinline__ uint64_t dout(int slot, int first) const {
      return ptx::wgmma_advance(tiles, static_cast<int>(shared.dout[0] - shared.k) +
                                           slot * TileDo::kBytes + first * TileDo::kPitch);
    }

    __device__ __forceinline__ void start_s(Scores& s, int slot, int first) const {
      tile::start_abt<E, TileK, TileQ, kHeadDim>(s, k(), q(slot, first));
    }
    __device__ __forceinline__ void start_dp(Scores& dp, int slot, int first) const {
      tile::start_abt<E, TileV, TileDo, kHeadDimV>(dp, v(), dout(slot, first));
    }

    // S of the part behind, if only of a block that is past the last: unused.
    __device__ __forceinline__ void start_next_s(Scores& s, int index, int steps, int first) const {
      if (first + kQueries < kBlockM) {
        start_s(s, Place<kStages>(index).slot, first + kQueries);
        return;
      }
      Place<kStages> next(index + 1);
      if (index + 1 < steps) wait(shared.q_full[next.slot], next.parity);
      start_s(s, next.slot, 0);
    }

    __device__ __forceinline__ void step(int index, int steps, int block, int first, Scores& scores,
                                         GradientK& dk, GradientV& dv) const {
      bool last = first + kQueries == kBlockM;
      Packed packed;  // of P and dS in turn
      ptx::wgmma_wait<0>();
      ptx::hold(scores[0]);
      Place<kStages> place(index);
      int slot = place.slot;
      warp.probabilities(block, first, slot, scores);
      tile::pack_accumulator<E>(packed, scores);
      if (first == 0) wait(shared.dout_full[slot], place.parity);
      start_dp(scores, slot, first);
      tile::start_ab<E, TileDo>(dv, packed, dout(slot, first));
      ptx::wgmma_wait<1>();
      ptx::hold(scores[0]);
      warp.score_gradients(block, first, slot, packed, scores);
      ptx::hold(scores[0]);
      ptx::wgmma_wait<0>();  // dV: P's registers may take dS
      ptx::hold(scores[0]);
      if (last) arrive_all(shared.dout_empty[slot]);
      tile::pack_accumulator<E>(packed, scores);
      warp.store_ds(index, first, packed);
      tile::start_ab<E, TileQ>(dk, packed, q(slot, first));
      start_next_s(scores, index, steps, first);
      ptx::wgmma_wait<1>();
      if (last) arrive_all(shared.q_empty[slot]);
    }

    __device__ __forceinline__ void run(GradientK& dk, GradientV& dv) const {
      Scores scores;  // of S and dP in turn
      int steps = work.steps(), block = work.blocks.begin;
      wait(shared.k_full, 0);
      wait(shared.v_full, 0);
      if (steps > 0) wait(shared.q_full[0], 0);
      start_s(scores, 0, 0);
#pragma unroll 1
      for (int index = 0; index < steps; ++index) {
#pragma unroll 1
        for (int first = 0; first < kBlockM; first += kQueries) {
          step(index, steps, block, first, scores, dk, dv);
        }
        if (++block == work.blocks.end) block = work.blocks.begin;
      }
      ptx::wgmma_wait<0>();
      ptx::hold(dk[0]);
      ptx::hold(dv[0]);
    }
  };

  static __device__ __forceinline__ void compute(const BackwardParams& params, Shared& shared,
                                                 const BackwardWork& work) {
    GradientK dk;
    GradientV dv;
    tile::clear(dk);
    tile::clear(dv);
    Math(shared, work).run(dk, dv);
    if (params.dk.data == nullptr) return;
    // Made again: nothing of it is kept in registers over the walk.
    BackwardWork ended(params, kBlockM, kBlockN);
    int row = 16 * tile::warp_index();
    tile::scale(dk, params.shape.softmax_scale);
    Base::store(ended, params.dk, row, params.shape.headdim, dk);
    Base::store(ended, params.dv, row, params.shape.headdim_v, dv);
  }
};

}  // namespace flashattn
