// The backward for sm_90a where dK and dV of 64 keys take two warpgroups' registers. The first
// warpgroup computes P^T and holds dV, the second dS^T and dK: each has the A operand of its
// gradient in registers. P^T reaches the second, and dS^T dQ's warpgroup, through shared memory.
//
// A step of the first:   S(j) done | P | P to shared memory | start dV(j), S(j+1) | dV done.
// A step of the second:  dP(j) done | P(j) there | dS | dS to shared memory | start dK(j), dP(j+1)
// | dK done.
#pragma once

#include "kernels/backward_sm90_parts.cuh"

namespace flashattn {

template <DType kType, int kHeadDim, int kHeadDimV>
struct BackwardSm90ByProducts : BackwardSm90Parts<kType, kHeadDim, kHeadDimV> {
  using Base = BackwardSm90Parts<kType, kHeadDim, kHeadDimV>;
  using Base::address, Base::wait, Base::arrive, Base::arrive_all;
  using Base::kBlockM, Base::kBlockN, Base::kStages;
  using typename Base::E, typename Base::Packed, typename Base::Scores, typename Base::ScoreWarp;
  using typename Base::Shared, typename Base::TileP;
  using typename Base::TileDo, typename Base::TileK, typename Base::TileQ, typename Base::TileV;
  template <int kSlots>
  using Place = typename Base::template Place<kSlots>;
  static_assert(Base::kQueries == kBlockM && kBlockN == 64, "one piece of scores a warpgroup");

  using GradientK = tile::Accumulator<16, kHeadDim>;
  using GradientV = tile::Accumulator<16, kHeadDimV>;

  // Instructions that a gradient's columns take.
  static constexpr int parts(int columns) { return columns > 192 ? 2 : 1; }

  // The first of the warp's 16 keys, of the CTA's.
  static __device__ __forceinline__ int row() { return tile::warp_index() % 4 * 16; }

  struct Math {
    Shared& shared;
    const BackwardWork& work;
    ScoreWarp warp;
    uint64_t k, v, q, dout;
    uint32_t p_lane;  // a lane's address for ldmatrix and stmatrix in the first buffer of P

    __device__ __forceinline__ Math(Shared& shared_memory, const BackwardWork& a_work)
        : shared(shared_memory),
          work(a_work),
          warp(shared_memory, a_work, row()),
          k(ptx::wgmma_descriptor(address(shared.k))),
          v(ptx::wgmma_descriptor(address(shared.v))),
          q(ptx::wgmma_descriptor(address(shared.q), TileQ::kSlabBytes)),
          dout(ptx::wgmma_descriptor(address(shared.dout), TileDo::kSlabBytes)),
          p_lane(address(shared.p) + row() * TileP::kPitch +
                 tile::LaneOffsets<64>(tile::LaneOrder::kRowsThenChunk).bytes[0]) {}

    template <class Tile>
    static __device__ __forceinline__ uint64_t block(uint64_t blocks, int slot) {
      return ptx::wgmma_advance(blocks, slot * Tile::kBytes);
    }

    __device__ __forceinline__ void start_s(Scores& s, int slot) const {
      tile::start_abt<E, TileK, TileQ, kHeadDim>(s, k, block<TileQ>(q, slot));
    }
    __device__ __forceinline__ void start_dp(Scores& dp, int slot) const {
      tile::start_abt<E, TileV, TileDo, kHeadDimV>(dp, v, block<TileDo>(dout, slot));
    }

    // The swizzle is an exclusive or: so is a step of 16 queries.
    __device__ __forceinline__ uint32_t p_address(int slot, int step) const {
      return (p_lane ^ step * 32) + slot * TileP::kBytes;
    }

    __device__ __forceinline__ void store_p(int index, const Packed& p) const {
      Place<2> place(index);
      wait(shared.p_empty[place.slot], place.parity ^ 1);
#pragma unroll
      for (int i = 0; i < kBlockM / 16; ++i) {
        ptx::stmatrix_x4(p_address(place.slot, i), p[i][0]);
      }
      arrive(shared.p_full[place.slot]);
    }

    // dS^T of dP^T, in place.
    __device__ __forceinline__ void score_gradients(int block, int index, Scores& ds) const {
      Place<2> place(index);
      wait(shared.p_full[place.slot], place.parity);
      Packed p;
#pragma unroll
      for (int i = 0; i < kBlockM / 16; ++i) ptx::ldmatrix_x4(p[i][0], p_address(place.slot, i));
      warp.score_gradients(block, 0, Place<kStages>(index).slot, p, ds);
      arrive_all(shared.p_empty[place.slot]);
    }

    // The first warpgroup.
    __device__ __forceinline__ void run_dv(GradientV& dv) const {
      Scores scores;
      Packed packed;
      int steps = work.steps(), block = work.blocks.begin;
      wait(shared.k_full, 0);
      if (steps > 0) wait(shared.q_full[0], 0);
      start_s(scores, 0);
#pragma unroll 1
      for (int index = 0; index < steps; ++index) {
        ptx::wgmma_wait<0>();
        ptx::hold(scores[0]);
        Place<kStages> place(index), next(index + 1);
        warp.probabilities(block, 0, place.slot, scores);
        arrive_all(shared.q_empty[place.slot]);
        tile::pack_accumulator<E>(packed, scores);
        store_p(index, packed);
        wait(shared.dout_full[place.slot], place.parity);
        tile::start_ab<E, TileDo, parts(kHeadDimV)>(dv, packed,
                                                    Math::block<TileDo>(dout, place.slot));
        if (index + 1 < steps) wait(shared.q_full[next.slot], next.parity);
        start_s(scores, next.slot);  // in the last step of a block that is past: unused
        ptx::wgmma_wait<1>();
        arrive_all(shared.dout_empty[place.slot]);
        if (++block == work.blocks.end) block = work.blocks.begin;
      }
      ptx::wgmma_wait<0>();
      ptx::hold(dv[0]);
    }

    // The second warpgroup.
    __device__ __forceinline__ void run_dk(GradientK& dk) const {
      Scores scores;
      Packed packed;
      int steps = work.steps(), block = work.blocks.begin;
      wait(shared.v_full, 0);
      if (steps > 0) wait(shared.dout_full[0], 0);
      start_dp(scores, 0);
#pragma unroll 1
      for (int index = 0; index < steps; ++index) {
        ptx::wgmma_wait<0>();
        ptx::hold(scores[0]);
        Place<kStages> place(index), next(index + 1);
        score_gradients(block, index, scores);
        arrive_all(shared.dout_empty[place.slot]);
        tile::pack_accumulator<E>(packed, scores);
        warp.store_ds(index, 0, packed);
        wait(shared.q_full[place.slot], place.parity);
        tile::start_ab<E, TileQ, parts(kHeadDim)>(dk, packed, Math::block<TileQ>(q, place.slot));
        if (index + 1 < steps) wait(shared.dout_full[next.slot], next.parity);
        start_dp(scores, next.slot);  // in the last step of a block that is past: unused
        ptx::wgmma_wait<1>();
        arrive_all(shared.q_empty[place.slot]);
        if (++block == work.blocks.end) block = work.blocks.begin;
      }
      ptx::wgmma_wait<0>();
      ptx::hold(dk[0]);
    }
  };

  static __device__ __forceinline__ void compute(const BackwardParams& params, Shared& shared,
                                                 const BackwardWork& work) {
    if (tile::warp_index() < 4) {
      GradientV dv;
      tile::clear(dv);
      Math(shared, work).run_dv(dv);
      if (params.dv.data == nullptr) return;
      BackwardWork ended(params, kBlockM, kBlockN);  // again: nothing of it is kept over the walk
      Base::store(ended, params.dv, row(), params.shape.headdim_v, dv);
    } else {
      GradientK dk;
      tile::clear(dk);
      Math(shared, work).run_dk(dk);
      if (params.dk.data == nullptr) return;
      BackwardWork ended(params, kBlockM, kBlockN);
      tile::scale(dk, params.shape.softmax_scale);
      Base::store(ended, params.dk, row(), params.shape.headdim, dk);
    }
  }
};

}  // namespace flashattn
