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

template <DType kType, int kHeadDim, int kHeadDimV, bool kWhole>
struct BackwardSm90ByProducts : BackwardSm90Parts<kType, kHeadDim, kHeadDimV, kWhole> {
  using Base = BackwardSm90Parts<kType, kHeadDim, kHeadDimV, kWhole>;
  using Base::address, Base::arrive;
  using Base::kBlockM, Base::kBlockN;
  using typename Base::E, typename Base::Packed, typename Base::Scores, typename Base::ScoreWarp;
  using typename Base::ScorePlace, typename Base::Shared, typename Base::StepPlace;
  using typename Base::TileDo, typename Base::TileK, typename Base::TileP, typename Base::TileQ;
  using typename Base::TileV;
  static_assert(Base::kQueries == kBlockM && kBlockN == 64, "one piece of scores a warpgroup");
  static_assert(Base::kTiles == 1, "one buffer of keys");

  using GradientK = tile::Accumulator<16, kHeadDim>;
  using GradientV = tile::Accumulator<16, kHeadDimV>;

  // Instructions that a gradient's columns take.
  static constexpr int parts(int columns) { return columns > 192 ? 2 : 1; }

  struct Math : ScoreWarp {
    using ScoreWarp::hide, ScoreWarp::partial, ScoreWarp::row;
    using ScoreWarp::params, ScoreWarp::shared, ScoreWarp::step, ScoreWarp::tiles;
    uint64_t k, v, q, dout;
    uint32_t p_lane;  // a lane's address for ldmatrix and stmatrix in the first buffer of P

    __device__ __forceinline__ Math(const BackwardParams& backward, Shared& shared_memory)
        : ScoreWarp(backward, shared_memory, tile::warp_index() % 4 * 16),
          k(ptx::wgmma_descriptor(address(shared.k))),
          v(ptx::wgmma_descriptor(address(shared.v))),
          q(ptx::wgmma_descriptor(address(shared.q), TileQ::kSlabBytes)),
          dout(ptx::wgmma_descriptor(address(shared.dout), TileDo::kSlabBytes)),
          p_lane(address(shared.p) + row * TileP::kPitch +
                 tile::LaneOffsets<64>(tile::LaneOrder::kRowsThenChunk).bytes[0]) {}

    // The step's queries.
    __device__ __forceinline__ uint64_t q_block() const {
      return ptx::wgmma_advance(q, step.slot() * TileQ::kBytes);
    }
    __device__ __forceinline__ uint64_t dout_block() const {
      return ptx::wgmma_advance(dout, step.slot() * TileDo::kBytes);
    }

    __device__ __forceinline__ void start_s(Scores& s) const {
      step.wait_full(shared.q_full);
      tile::start_abt<E, TileK, TileQ, kHeadDim>(s, k, q_block());
    }
    __device__ __forceinline__ void start_dp(Scores& dp) const {
      step.wait_full(shared.dout_full);
      tile::start_abt<E, TileV, TileDo, kHeadDimV>(dp, v, dout_block());
    }

    // The swizzle is an exclusive or: so is a step of 16 queries.
    __device__ __forceinline__ uint32_t p_address(ScorePlace place, int i) const {
      return (p_lane ^ i * 32) + place.slot() * TileP::kBytes;
    }

    __device__ __forceinline__ void store_p(const Packed& p) const {
      ScorePlace place{step.count};
      place.wait_empty(shared.p_empty);
#pragma unroll
      for (int i = 0; i < kBlockM / 16; ++i) ptx::stmatrix_x4(p_address(place, i), p[i][0]);
      arrive(shared.p_full[place.slot()]);
    }

    // dS^T of dP^T, in place.
    __device__ __forceinline__ void score_gradients(Scores& ds) const {
      ScorePlace place{step.count};
      place.wait_full(shared.p_full);
      Packed p;
#pragma unroll
      for (int i = 0; i < kBlockM / 16; ++i) ptx::ldmatrix_x4(p[i][0], p_address(place, i));
      ScoreWarp::score_gradients(0, p, ds);
      place.release_all(shared.p_empty);
    }

    // The first warpgroup's steps of a tile.
    __device__ __forceinline__ void walk_dv(int steps, GradientV& dv) {
      const BackwardItem& item = shared.item[0];
      int block = item.blocks.begin;
      Scores scores;
      Packed packed;
      tiles.template wait_k<0>();
      start_s(scores);
#pragma unroll 1
      for (int left = steps;;) {
        step = step.uniform();
        ptx::wgmma_wait<0>();
        ptx::hold(scores[0]);
        this->probabilities(0, scores);
        if (partial(item, block)) hide(item, block, 0, scores);
        step.release_all(shared.q_empty);
        tile::pack_accumulator<E>(packed, scores);
        store_p(packed);
        step.wait_full(shared.dout_full);
        tile::start_ab<E, TileDo, parts(kHeadDimV)>(dv, packed, dout_block());
        step.advance();
        if (--left == 0) break;
        start_s(scores);
        ptx::wgmma_wait<1>();
        step.before().release_all(shared.dout_empty);
        if (++block == item.blocks.end) block = item.blocks.begin;
      }
      ptx::wgmma_wait<0>();
      ptx::hold(dv[0]);
      step.before().release_all(shared.dout_empty);
    }

    // The second warpgroup's.
    __device__ __forceinline__ void walk_dk(int steps, GradientK& dk) {
      const BackwardItem& item = shared.item[0];
      int block = item.blocks.begin;
      Scores scores;
      Packed packed;
      tiles.template wait_v<0>();
      start_dp(scores);
#pragma unroll 1
      for (int left = steps;;) {
        step = step.uniform();
        ptx::wgmma_wait<0>();
        ptx::hold(scores[0]);
        score_gradients(scores);
        if (partial(item, block)) hide(item, block, 0, scores);
        step.release_all(shared.dout_empty);
        tile::pack_accumulator<E>(packed, scores);
        this->store_ds(0, packed);
        step.wait_full(shared.q_full);
        tile::start_ab<E, TileQ, parts(kHeadDim)>(dk, packed, q_block());
        step.advance();
        if (--left == 0) break;
        start_dp(scores);
        ptx::wgmma_wait<1>();
        step.before().release_all(shared.q_empty);
        if (++block == item.blocks.end) block = item.blocks.begin;
      }
      ptx::wgmma_wait<0>();
      ptx::hold(dk[0]);
      step.before().release_all(shared.q_empty);
    }

    // Tile after tile: walk(steps, gradient), then store(item, gradient).
    template <class Gradient, class Walk, class Store>
    __device__ __forceinline__ void for_tiles(const Walk& walk, const Store& store) {
#pragma unroll 1
      for (int steps; (steps = tiles.template wait_next<0>()) > 0; ++tiles.count) {
        Gradient gradient;
        tile::clear(gradient);
        walk(steps, gradient);
        this->template end_tile<0>(tiles, [&](const BackwardItem& item) { store(item, gradient); });
      }
    }

    __device__ __forceinline__ void run() {
      if (tile::warp_index() < 4) {
        for_tiles<GradientV>([&](int steps, GradientV& dv) { walk_dv(steps, dv); },
                             [&](const BackwardItem& item, GradientV& dv) {
                               this->store(item, params.dv, params.shape.headdim_v, dv);
                             });
      } else {
        for_tiles<GradientK>([&](int steps, GradientK& dk) { walk_dk(steps, dk); },
                             [&](const BackwardItem& item, GradientK& dk) {
                               tile::scale(dk, params.shape.softmax_scale);
                               this->store(item, params.dk, params.shape.headdim, dk);
                             });
      }
    }
  };
};

}  // namespace flashattn
