// What both forms of the backward for sm_90a have: dQ's warpgroup, what is done to the scores of a
// warp's 16 keys, and the store of a tile's gradients.
#pragma once

#include "kernels/backward_sm90_load.cuh"
#include "kernels/backward_specials.cuh"
#include "tile/mask_apply.cuh"
#include "tile/score_gradients.cuh"
#include "tile/store.cuh"
#include "tile/warpgroup_mma.cuh"

namespace flashattn {

template <DType kType, int kHeadDim, int kHeadDimV, bool kWhole>
struct BackwardSm90Parts : BackwardSm90Load<kType, kHeadDim, kHeadDimV, kWhole> {
  using Base = BackwardSm90Load<kType, kHeadDim, kHeadDimV, kWhole>;
  using Base::address, Base::arrive;
  using Base::kBlockM, Base::kBlockN, Base::kStored, Base::kTiles;
  using typename Base::E, typename Base::Shared;
  using typename Base::ScorePlace, typename Base::StepPlace, typename Base::Tiles;
  using typename Base::TileDs, typename Base::TileK, typename Base::TileQ;

  static constexpr int kQueries = Base::kTile.queries;
  using Scores = tile::Accumulator<16, kQueries>;
  using Packed = tile::PackedAccumulator<16, kQueries>;

  // A warpgroup: dQ = dS K, in pieces of 64 queries and some columns. Few instructions and
  // registers: a step takes as long as this.
  struct DqSums {
    static constexpr int kColumns = Base::kTile.dq_columns;
    using Dq = tile::Accumulator<16, kColumns>;

    const BackwardParams& params;
    Tiles tiles;
    ScorePlace at;
    Shared& shared = tiles.shared;

    // dQ = dS K, or with what is in `dq` before.
    template <int kBuffer>
    __device__ __forceinline__ void multiply(Dq& dq, int row, int col, bool from_zero) const {
      uint64_t ds = ptx::wgmma_descriptor(address(shared.ds[at.slot()]) + row * TileDs::kPitch);
      uint64_t k = ptx::wgmma_descriptor(address(shared.k[kBuffer]) + col / 64 * TileK::kSlabBytes +
                                         col % 64 * 2);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kBlockN / 16; ++i) {
        ptx::Wgmma<E, kColumns>::template ss<true>(
            dq[0], ptx::wgmma_advance(ds, i / 4 * TileDs::kSlabBytes + i % 4 * 32),
            ptx::wgmma_advance(k, i * 16 * TileK::kPitch), i > 0 || !from_zero);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::hold(dq[0]);
      bool last = row + 64 == kBlockM && col + kColumns == kHeadDim;
      if (last) arrive(shared.ds_empty[at.slot()]);
    }

    // NaN where a special value of K was set apart: its rows have a score of -inf, or a NaN, there.
    __device__ __forceinline__ void poison(const BackwardItem& item, int first_row, int first_col,
                                           Dq& dq) const {
      tile::GlobalRows k(params.k, item.keys.batch, item.keys.rows, item.keys.head,
                         params.shape.headdim);
      // Opaque: what follows from it would take registers through the loop.
      int lane = static_cast<int>(ptx::opaque(threadIdx.x)) % 32;
      int row = first_row + lane / 4, col = first_col + lane % 4 * 2;
      int end = min(item.first_key + kBlockN, item.keys.rows.length);
#pragma unroll 1
      for (int key = item.first_key; key < end; ++key) {
        bool visible[2] = {item.mask.visible(row, key), item.mask.visible(row + 8, key)};
        const uint16_t* elements = k.data + key * k.row_stride + col;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          if (col + 8 * n >= params.shape.headdim) break;
          // One by one: K may be aligned to no more.
          uint32_t pair = elements[8 * n] | static_cast<uint32_t>(elements[8 * n + 1]) << 16;
          uint32_t special = tile::special_bits<E>(pair);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            bool here = special & (e % 2 == 0 ? 0x8000u : 0x80000000u);
            if (here && visible[e / 2]) dq[0][n][e] = tile::kNan;
          }
        }
      }
    }

    __device__ __forceinline__ void store_rows(const BackwardItem& item, int head, int row, int col,
                                               Dq& dq) const {
      tile::scale(dq, params.shape.softmax_scale);
      const MutableTensor& grad = params.dq;
      E* out = static_cast<E*>(grad.data) +
               grad.stride.offset(item.keys.batch, item.q_rows.begin + row, head) + col;
      tile::store_accumulator_rows(out, grad.stride.row, item.q_rows.length - row,
                                   params.shape.headdim - col, dq);
    }

    // The row of a piece's queries, of the block's, that is the warp's first.
    static __device__ __forceinline__ int warp_row(int row) {
      return row + tile::warp_index() % 4 * 16;
    }

    // A piece to which other CTAs add. `sums`: of the block; `rows`: its queries.
    template <int kBuffer>
    __device__ __forceinline__ void add_piece(float* sums, int rows, int row, int col) const {
      Dq dq;
      multiply<kBuffer>(dq, row, col, true);
      tile::add_dq<kHeadDim, 1>(sums, warp_row(row), rows, col / 16, dq);
    }

    // Whether the tile is the first or the last one that the queries of a block see.
    struct Order {
      bool first, last;
    };
    __device__ __forceinline__ Order order(const BackwardItem& item, int block) const {
      BlockRange keys = item.mask.key_blocks(block * kBlockM, kBlockM, kBlockN);
      return {__any_sync(~0u, item.keys.block == keys.begin) != 0,
              __any_sync(~0u, item.keys.block == keys.end - 1) != 0};
    }

    // A piece to which this CTA alone adds, tile by tile; with the last one it is dQ.
    template <int kBuffer>
    __device__ __forceinline__ void own_piece(const BackwardItem& item, const BackwardStep& step,
                                              const Order& order, float* sums, int rows,
                                              int piece_row, int col) const {
      int row = warp_row(piece_row);
      bool ends_sums = order.last && !order.first;
      Dq dq;
      tile::clear(dq);
      if (ends_sums) tile::load_dq<kHeadDim, 1>(sums, row, rows, col / 16, dq);
      ptx::hold(dq[0]);
      multiply<kBuffer>(dq, piece_row, col, !ends_sums);
      int first_row = step.block * kBlockM + row;
      if (tiles.template special<kBuffer>()) poison(item, first_row, col, dq);
      if (order.last) {
        store_rows(item, step.head, first_row, col, dq);
      } else if (order.first) {
        tile::store_dq<kHeadDim, 1>(sums, row, rows, col / 16, dq);
      } else {
        tile::add_dq<kHeadDim, 1>(sums, row, rows, col / 16, dq);
      }
    }

    // dQ of a step. `sums`: of its block of queries.
    template <int kBuffer>
    __device__ __forceinline__ void add(const BackwardItem& item, const BackwardStep& step,
                                        float* sums) const {
      int rows = item.q_rows.length - step.block * kBlockM;
      Order place{};
      if constexpr (kWhole) place = order(item, step.block);
      at.wait_full(shared.ds_full);
#pragma unroll 1
      for (int row = 0; row < kBlockM; row += 64)
#pragma unroll 1
        for (int col = 0; col < kHeadDim; col += kColumns) {
          if constexpr (kWhole) {
            own_piece<kBuffer>(item, step, place, sums, rows, row, col);
          } else {
            add_piece<kBuffer>(sums, rows, row, col);
          }
        }
    }

    template <int kBuffer>
    __device__ __forceinline__ void add_tile(int steps) {
      const BackwardItem& item = shared.item[kBuffer];
      tiles.template wait_k<kBuffer>();
      BackwardStep step(item);
#pragma unroll 1
      for (; steps > 0; --steps, step.advance(item), at.advance()) {
        at = at.uniform();
        if (params.dq_accum != nullptr) {
          add<kBuffer>(
              item, step,
              item.dq_sums(params, step.head, kHeadDim) + int64_t{step.block} * kBlockM * kHeadDim);
        } else {
          at.wait_full(shared.ds_full);
          arrive(shared.ds_empty[at.slot()]);
        }
      }
      tiles.template release<kBuffer>();
      ++tiles.count;
    }

    __device__ __forceinline__ void run() {
#pragma unroll 1
      while (true) {
        int steps = tiles.template wait_next<0>();
        if (steps == 0) return;
        add_tile<0>(steps);
        if constexpr (kTiles == 2) {
          steps = tiles.template wait_next<1>();
          if (steps == 0) return;
          add_tile<1>(steps);
        }
      }
    }
  };

  // What the computing warps have in common: 16 keys of a tile each, from `row` on.
  struct ScoreWarp {
    const BackwardParams& params;
    Tiles tiles;
    Shared& shared;
    int row;
    uint32_t ds_lane;  // a lane's address for stmatrix in the first buffer of dS
    StepPlace step;    // whose scores are computed

    __device__ __forceinline__ ScoreWarp(const BackwardParams& backward, Shared& shared_memory,
                                         int warp_row)
        : params(backward),
          tiles{shared_memory},
          shared(shared_memory),
          row(warp_row),
          ds_lane(address(shared_memory.ds) + row / 64 * TileDs::kSlabBytes +
                  tile::LaneOffsets<64>(tile::LaneOrder::kChunkThenRows, row % 64).bytes[0]) {}

    static __device__ __forceinline__ bool partial(const BackwardItem& item, int block) {
      return __any_sync(~0u, item.blocks.partial(block));
    }

    // Zeroes hidden pairs of the queries from `first` of a block on; after the arithmetic, see
    // BackwardSm80::hide.
    __device__ __forceinline__ void hide(const BackwardItem& item, int block, int first,
                                         Scores& x) const {
      tile::apply_mask<true>(x, item.mask, item.first_key + row, block * kBlockM + first, 0.f);
    }

    // P^T of S^T, in place.
    __device__ __forceinline__ void probabilities(int first, Scores& p) const {
      uint32_t lse_log2 = address(shared.lse_log2[step.slot()]);
      tile::probabilities(p, lse_log2, first, params.shape.softmax_scale,
                          tile::any_large_lse<kQueries>(lse_log2 + first * 4));
    }

    // dS^T of dP^T, in place.
    __device__ __forceinline__ void score_gradients(int first, const Packed& p, Scores& ds) const {
      tile::score_gradients<E>(ds, p, address(shared.delta[step.slot()]), first);
    }

    // dS^T to shared memory; with the block's last queries it is full.
    __device__ __forceinline__ void store_ds(int first, const Packed& ds) const {
      ScorePlace place{step.count};
      if (first == 0) place.wait_empty(shared.ds_empty);
#pragma unroll
      for (int i = 0; i < kQueries / 16; ++i) {
        ptx::stmatrix_x4_trans(
            ds_lane + place.slot() * TileDs::kBytes + (first + i * 16) * TileDs::kPitch, ds[i][0]);
      }
      ptx::fence_async_shared();
      if (first + kQueries == kBlockM) arrive(shared.ds_full[place.slot()]);
    }

    // A gradient of a tile's keys.
    template <class Gradient>
    __device__ __forceinline__ void store(const BackwardItem& item, const MutableTensor& grad,
                                          int headdim, const Gradient& x) const {
      int first = item.first_key + row;
      E* out = static_cast<E*>(grad.data) +
               grad.stride.offset(item.keys.batch, item.keys.rows.begin + first, item.keys.head);
      tile::store_accumulator_rows(out, grad.stride.row, item.keys.rows.length - first, headdim, x);
    }

    // Releases a tile; `store_gradients(item)` stores what the warp has. `ended`: with its count.
    template <int kBuffer, class Store>
    __device__ __forceinline__ void end_tile(const Tiles& ended,
                                             const Store& store_gradients) const {
      BackwardWork work(params, shared.item[kBuffer]);
      bool special = ended.template special<kBuffer>();
      ended.template release<kBuffer>();
      if (params.dk.data != nullptr) store_gradients(work);
      if (!special) return;
      bool adds_dq = params.dq_accum != nullptr && !kWhole;
      SpecialThreads team{static_cast<int>(threadIdx.x), kBackwardSm90MathThreads, kStored};
      BackwardSpecials<E, kBlockM, kBlockN, kHeadDim>{work, team}.store(adds_dq);
    }
  };
};

}  // namespace flashattn
