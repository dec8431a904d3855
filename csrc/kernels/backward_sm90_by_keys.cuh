// The backward for sm_90a where two warpgroups hold dK and dV of 64 keys each: P^T and dS^T stay in
// registers as operands. Where dK and dV leave few registers, a block's queries are taken in parts.
//
// A step, of one part:  S(j) done | P | start dP(j), dV(j) | dP done | dS | dV done | dS to shared
// memory | start dK(j), S(j+1) | dK done.  Where there is room for the next tile's keys, S(j+1)
// after a tile's last step is the next tile's first, and runs while the gradients of this one are
// stored.
#pragma once

#include "kernels/backward_sm90_parts.cuh"

namespace flashattn {

template <DType kType, int kHeadDim, int kHeadDimV, bool kWhole>
struct BackwardSm90ByKeys : BackwardSm90Parts<kType, kHeadDim, kHeadDimV, kWhole> {
  using Base = BackwardSm90Parts<kType, kHeadDim, kHeadDimV, kWhole>;
  using Base::address;
  using Base::kBlockM, Base::kBlockN, Base::kQueries, Base::kTiles;
  using typename Base::E, typename Base::Packed, typename Base::Scores, typename Base::ScoreWarp;
  using typename Base::Shared, typename Base::StepPlace, typename Base::Tiles;
  using typename Base::TileDo, typename Base::TileK, typename Base::TileQ, typename Base::TileV;

  using GradientK = tile::Accumulator<16, kHeadDim>;
  using GradientV = tile::Accumulator<16, kHeadDimV>;

  struct Math : ScoreWarp {
    using ScoreWarp::hide, ScoreWarp::partial;
    using ScoreWarp::params, ScoreWarp::shared, ScoreWarp::step, ScoreWarp::tiles;
    // Descriptors of K's first row and of the warpgroup's: the other tiles' are at constants from
    // there, which takes fewer registers than one for each.
    uint64_t descriptor, keys;
    static_assert(TileQ::kSlabBytes == TileDo::kSlabBytes && TileK::kPitch == TileV::kPitch,
                  "one descriptor serves all");

    __device__ __forceinline__ Math(const BackwardParams& backward, Shared& shared_memory)
        : ScoreWarp(backward, shared_memory, 16 * tile::warp_index()),
          descriptor(ptx::wgmma_descriptor(address(shared.k), TileQ::kSlabBytes)),
          keys(ptx::wgmma_advance(descriptor, tile::warp_index() / 4 * 64 * TileK::kPitch)) {}

    template <int kBuffer>
    __device__ __forceinline__ uint64_t k() const {
      return ptx::wgmma_advance(keys, kBuffer * TileK::kBytes);
    }
    template <int kBuffer>
    __device__ __forceinline__ uint64_t v() const {
      return ptx::wgmma_advance(
          keys, static_cast<int>(shared.v[0] - shared.k[0]) + kBuffer * TileV::kBytes);
    }
    // The step's queries from `first` on.
    __device__ __forceinline__ uint64_t q(int first) const {
      return ptx::wgmma_advance(descriptor, static_cast<int>(shared.q[0] - shared.k[0]) +
                                                step.slot() * TileQ::kBytes +
                                                first * TileQ::kPitch);
    }
    __device__ __forceinline__ uint64_t dout(int first) const {
      return ptx::wgmma_advance(descriptor, static_cast<int>(shared.dout[0] - shared.k[0]) +
                                                step.slot() * TileDo::kBytes +
                                                first * TileDo::kPitch);
    }

    template <int kBuffer>
    __device__ __forceinline__ void start_s(Scores& s, int first) const {
      tile::start_abt<E, TileK, TileQ, kHeadDim>(s, k<kBuffer>(), q(first));
    }
    template <int kBuffer>
    __device__ __forceinline__ void start_dp(Scores& dp, int first) const {
      tile::start_abt<E, TileV, TileDo, kHeadDimV>(dp, v<kBuffer>(), dout(first));
    }

    // Waits for the next tile and starts S of its first step; past the last tile of what is there:
    // unused. Returns its steps.
    template <int kBuffer>
    __device__ __forceinline__ int start_tile(Scores& scores) const {
      int steps = tiles.template wait_next<kBuffer>();
      if (steps > 0) {
        tiles.template wait_k<kBuffer>();
        step.wait_full(shared.q_full);
      }
      start_s<kBuffer>(scores, 0);
      return steps;
    }

    // A part of a step, from S, which is under way, to the start of dK.
    template <int kBuffer>
    __device__ __forceinline__ void part(const BackwardItem& item, int block, int first,
                                         Scores& scores, GradientK& dk, GradientV& dv) const {
      Packed packed;  // of P and dS in turn
      bool hides = partial(item, block);
      ptx::wgmma_wait<0>();
      ptx::hold(scores[0]);
      this->probabilities(first, scores);
      if (hides) hide(item, block, first, scores);
      tile::pack_accumulator<E>(packed, scores);
      if (first == 0) step.wait_full(shared.dout_full);
      start_dp<kBuffer>(scores, first);
      tile::start_ab<E, TileDo>(dv, packed, dout(first));
      ptx::wgmma_wait<1>();
      ptx::hold(scores[0]);
      this->score_gradients(first, packed, scores);
      if (hides) hide(item, block, first, scores);
      ptx::hold(scores[0]);
      ptx::wgmma_wait<0>();  // dV: P's registers may take dS
      ptx::hold(scores[0]);
      if (first + kQueries == kBlockM) step.release_all(shared.dout_empty);
      tile::pack_accumulator<E>(packed, scores);
      this->store_ds(first, packed);
      tile::start_ab<E, TileQ>(dk, packed, q(first));
    }

    // The steps of a tile, from S of its first one, which is under way, to dK of its last,
    // likewise.
    template <int kBuffer>
    __device__ __forceinline__ void walk(int steps, Scores& scores, GradientK& dk, GradientV& dv) {
      const BackwardItem& item =
          shared.item[kBuffer];  // read again in each step: registers are few
      int block = item.blocks.begin;
      tiles.template wait_v<kBuffer>();
#pragma unroll 1
      for (int left = steps, first = 0;;) {
        step = step.uniform();
        part<kBuffer>(item, block, first, scores, dk, dv);
        first = first + kQueries == kBlockM ? 0 : first + kQueries;
        if (first == 0) {
          step.advance();
          if (--left == 0) return;
          step.wait_full(shared.q_full);
          if (++block == item.blocks.end) block = item.blocks.begin;
        }
        start_s<kBuffer>(scores, first);
        ptx::wgmma_wait<1>();
        if (first == 0) step.before().release_all(shared.q_empty);
      }
    }

    // A tile, from S of its first step, which is under way, to that of the next tile's. Returns
    // that one's steps.
    template <int kBuffer>
    __device__ __forceinline__ int compute_tile(int steps, Scores& scores) {
      constexpr int kNext = (kBuffer + 1) % kTiles;
      constexpr bool kAhead = kTiles > 1;  // the next tile's keys don't wait for this one
      GradientK dk;
      GradientV dv;
      tile::clear(dk);
      tile::clear(dv);
      walk<kBuffer>(steps, scores, dk, dv);
      StepPlace last = step.before();
      Tiles ended = tiles;
      ++tiles.count;
      if constexpr (kAhead) steps = start_tile<kNext>(scores);
      ptx::wgmma_wait<kAhead ? 1 : 0>();
      last.release_all(shared.q_empty);
      ptx::hold(dk[0]);
      ptx::hold(dv[0]);
      this->template end_tile<kBuffer>(ended, [&](const BackwardItem& item) {
        tile::scale(dk, params.shape.softmax_scale);
        this->store(item, params.dk, params.shape.headdim, dk);
        this->store(item, params.dv, params.shape.headdim_v, dv);
      });
      if constexpr (!kAhead) steps = start_tile<kNext>(scores);
      return steps;
    }

    __device__ __forceinline__ void run() {
      Scores scores;  // of S and dP in turn
      int steps = start_tile<0>(scores);
#pragma unroll 1
      while (steps > 0) {
        steps = compute_tile<0>(steps, scores);
        if constexpr (kTiles == 2) {
          if (steps == 0) break;
          steps = compute_tile<1>(steps, scores);
        }
      }
      ptx::wgmma_wait<0>();
      ptx::hold(scores[0]);
    }
  };
};

}  // namespace flashattn
