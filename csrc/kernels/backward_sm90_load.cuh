// How the backward for sm_90a fills shared memory: its tiles, barriers, and the warps that copy.
#pragma once

#include <type_traits>

#include "host/tensor_map.h"
#include "kernels/backward_work.cuh"
#include "plan/tile_config.h"
#include "ptx/sm90.cuh"
#include "tile/copy.cuh"
#include "tile/ring.cuh"
#include "tile/smem_layout.cuh"
#include "tile/special.cuh"
#include "tile/tma.cuh"

namespace flashattn {

struct BackwardSm90Params {
  CUtensorMap q, k, v, dout;
  BackwardParams backward;
};

constexpr int kBackwardSm90MathThreads = 256;  // that compute
constexpr int kBackwardSm90DqThreads = 128;    // that sum dQ
constexpr int kBackwardSm90HelperThreads = 96;

// Barriers are named after the event that completes a phase. What has landed of a block that is
// partial is full once the helpers are done with it. Steps, and buffers of dS, are counted from the
// CTA's first tile on.
template <class TileQ, class TileDo, class TileK, class TileV, class TileDs, int kStages,
          int kTiles>
struct BackwardSm90Shared {
  uint8_t k[kTiles][TileK::kBytes], v[kTiles][TileV::kBytes];
  uint8_t q[kStages][TileQ::kBytes], dout[kStages][TileDo::kBytes];
  uint8_t ds[2][TileDs::kBytes];  // [query][key]
  float lse_log2[kStages][TileQ::kRows], delta[kStages][TileQ::kRows];
  uint64_t tile_full[kTiles], tile_empty[kTiles];
  uint64_t k_full[kTiles], k_landed[kTiles], v_full[kTiles], v_landed[kTiles];
  uint64_t q_full[kStages], q_landed[kStages], q_empty[kStages];
  uint64_t dout_full[kStages], dout_landed[kStages], dout_empty[kStages];
  uint64_t ds_full[2], ds_empty[2];
  BackwardItem item[kTiles];
  int steps[kTiles];         // of the tile; 0: there are no more tiles
  uint32_t special[kTiles];  // the CTA's last tile, counted from 1, that had a NaN or Inf taken out

  // By one thread. `ds_writers`: warps that write dS, of the eight that compute.
  __device__ __forceinline__ void init(int ds_writers = kBackwardSm90MathThreads / 32) {
    init(tile_full, 1), init(k_full, 1), init(k_landed, 1), init(v_full, 1), init(v_landed, 1);
    init(tile_empty,
         kBackwardSm90MathThreads + kBackwardSm90DqThreads + kBackwardSm90HelperThreads);
    init(q_full, 1), init(q_landed, 1), init(q_empty, kBackwardSm90MathThreads);
    init(dout_full, 1), init(dout_landed, 1), init(dout_empty, kBackwardSm90MathThreads);
    init(ds_full, ds_writers), init(ds_empty, kBackwardSm90DqThreads / 32);
    for (uint32_t& tile : special) tile = 0;
    ptx::fence_mbarrier_init();
  }

 protected:
  template <int N>
  static __device__ __forceinline__ void init(uint64_t (&barriers)[N], int arrivals) {
    for (uint64_t& barrier : barriers) ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
  }
};

// A base of its own, so that P lies before the barriers, at a multiple of 1024 bytes.
template <class TileP>
struct BackwardSm90P {
  uint8_t p[2][TileP::kBytes];  // [key][query]
};

// By products: one warpgroup computes P and hands it to the other, which computes dS.
template <class Base, class TileP>
struct BackwardSm90ByProductsShared : BackwardSm90P<TileP>, Base {
  uint64_t p_full[2], p_empty[2];

  __device__ __forceinline__ void init() {
    Base::init(p_full, 4), Base::init(p_empty, 128);
    Base::init(4);
  }
};

// kWhole: the CTA takes whole heads.
template <DType kType, int kHeadDim, int kHeadDimV, bool kWhole>
struct BackwardSm90Load {
  static constexpr HeadDims kDims = {kHeadDim, kHeadDimV};
  static constexpr Sm90BackwardTile kTile = sm90_backward_tile(kDims);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages, kTiles = kTile.key_buffers(kWhole);
  static constexpr int kThreads = 32 * kSm90BackwardWarps;

  using E = tile::Element<kType>;
  using TileK = tile::SmemTile<kBlockN, kHeadDim>;
  using TileV = tile::SmemTile<kBlockN, kHeadDimV>;
  using TileQ = tile::SmemTile<kBlockM, kHeadDim>;
  using TileDo = tile::SmemTile<kBlockM, kHeadDimV>;
  using TileP = tile::SmemTile<kBlockN, kBlockM>;
  using TileDs = tile::SmemTile<kBlockM, kBlockN>;
  using CommonShared = BackwardSm90Shared<TileQ, TileDo, TileK, TileV, TileDs, kStages, kTiles>;
  using Shared =
      std::conditional_t<kTile.by_products, BackwardSm90ByProductsShared<CommonShared, TileP>,
                         CommonShared>;
  static_assert(sizeof(Shared) <= sm90_backward_smem_bytes(kDims, kWhole), "the planner's figure");

  using StepPlace = tile::RingPlace<kStages>;
  using TilePlace = tile::RingPlace<kTiles>;
  using ScorePlace = tile::RingPlace<2>;  // of P and dS

  enum NamedBarrier { kHelped = 1, kStored = 2 };

  static __device__ __forceinline__ uint32_t address(const void* shared) {
    return ptx::shared_address(shared);
  }
  // One arrival for the warp, behind what all of its lanes wrote.
  static __device__ __forceinline__ void arrive(const uint64_t& barrier) {
    __syncwarp();
    ptx::mbarrier_arrive_elect(address(&barrier));
  }
  static __device__ __forceinline__ void wait(const uint64_t& barrier, uint32_t parity) {
    ptx::mbarrier_wait(address(&barrier), parity);
  }

  // The CTA's tiles, one after the other, for those who work on them. Buffers are named by
  // constants, so that descriptors stay in uniform registers.
  struct Tiles {
    Shared& shared;
    uint32_t count = 0;  // tiles that are done

    __device__ __forceinline__ TilePlace place() const { return {count}; }
    // Waits until there is a tile, or known that there is none; returns its steps, or 0.
    template <int kBuffer>
    __device__ __forceinline__ int wait_next() const {
      wait(shared.tile_full[kBuffer], place().parity());
      return __shfl_sync(~0u, shared.steps[kBuffer], 0);
    }
    template <int kBuffer>
    __device__ __forceinline__ void wait_k() const {
      wait(shared.k_full[kBuffer], place().parity());
    }
    template <int kBuffer>
    __device__ __forceinline__ void wait_v() const {
      wait(shared.v_full[kBuffer], place().parity());
    }
    // Whether a NaN or Inf was taken out of it; until it is released.
    template <int kBuffer>
    __device__ __forceinline__ bool special() const {
      return *const_cast<volatile uint32_t*>(&shared.special[kBuffer]) == count + 1;
    }
    // By every lane, behind what it read itself.
    template <int kBuffer>
    __device__ __forceinline__ void release() const {
      ptx::mbarrier_arrive(address(&shared.tile_empty[kBuffer]));
    }
  };

  // Waits until there is a tile at `place`, or known that there is none; returns its steps, or 0.
  static __device__ __forceinline__ int wait_tile(Shared& shared, TilePlace place) {
    place.wait_full(shared.tile_full);
    return __shfl_sync(~0u, shared.steps[place.slot()], 0);
  }

  // Whether the helpers have to do with a block of a tensor: they copy what TMA can't reach, and
  // clean what is partial.
  static __device__ __forceinline__ bool by_helpers(const ConstTensor& tensor, bool partial) {
    return partial || !tensor.aligned16;
  }

  // A warp: takes pieces as they come, the first by the CTA's number, and starts the copies by TMA.
  struct Copies {
    const BackwardSm90Params& all;
    Shared& shared;
    StepPlace step;
    TilePlace tile;
    const BackwardParams& params = all.backward;

    // Starts the copy of a block, and of `others` bytes that the caller adds.
    template <class Tile>
    __device__ __forceinline__ void load(const BackwardItem& item, const ConstTensor& tensor,
                                         const CUtensorMap& map, const uint8_t* to,
                                         const uint64_t& full, int64_t row, int head,
                                         const SeqLens& lens, int others = 0) const {
      int bytes = tensor.aligned16 ? Tile::kBytes : 0;
      ptx::mbarrier_arrive_expect(address(&full), bytes + others);
      if (!tensor.aligned16) return;
      int batch = lens.packed() ? 0 : static_cast<int>(item.keys.batch);
      tile::start_load<Tile, 1>(&map, address(to), address(&full), static_cast<int>(row), head,
                                batch);
    }

    __device__ __forceinline__ void load_keys(const BackwardItem& item) const {
      const SeqLens& lens = params.shape.seqlens_k;
      int64_t row = item.keys.rows.begin + item.first_key;
      int slot = tile.slot();
      bool clean_k = by_helpers(params.k, item.blocks.any_partial());
      load<TileK>(item, params.k, all.k, shared.k[slot],
                  clean_k ? shared.k_landed[slot] : shared.k_full[slot], row, item.keys.head, lens);
      bool copy_v = by_helpers(params.v, false);
      load<TileV>(item, params.v, all.v, shared.v[slot],
                  copy_v ? shared.v_landed[slot] : shared.v_full[slot], row, item.keys.head, lens);
    }

    // A block of Q or dO and its row statistics.
    template <class Tile>
    __device__ __forceinline__ void load_rows(const BackwardItem& item, const BackwardStep& at,
                                              const ConstTensor& tensor, const CUtensorMap& map,
                                              const uint8_t* to, const float* stats_to,
                                              const float* stats, const uint64_t& full) const {
      int row = at.block * kBlockM;
      constexpr int kStatsBytes = 4 * kBlockM;
      load<Tile>(item, tensor, map, to, full, item.q_rows.begin + row, at.head,
                 params.shape.seqlens_q, kStatsBytes);
      ptx::bulk_load(address(stats_to), stats + item.stats_row(params, at.head) + row, kStatsBytes,
                     address(&full));
    }

    __device__ __forceinline__ void load_step(const BackwardItem& item,
                                              const BackwardStep& at) const {
      int slot = step.slot();
      bool partial = item.blocks.partial(at.block);
      bool q_landed = by_helpers(params.q, partial), dout_landed = by_helpers(params.dout, partial);
      step.wait_empty(shared.q_empty);
      load_rows<TileQ>(item, at, params.q, all.q, shared.q[slot], shared.lse_log2[slot],
                       params.lse_log2, q_landed ? shared.q_landed[slot] : shared.q_full[slot]);
      step.wait_empty(shared.dout_empty);
      load_rows<TileDo>(item, at, params.dout, all.dout, shared.dout[slot], shared.delta[slot],
                        params.delta,
                        dout_landed ? shared.dout_landed[slot] : shared.dout_full[slot]);
    }

    // The piece to take next.
    __device__ __forceinline__ uint32_t deal() const {
      uint32_t dealt = 0;
      if (threadIdx.x % 32 == 0) dealt = atomicAdd(params.pieces_dealt, 1);
      return gridDim.x + __shfl_sync(~0u, dealt, 0);
    }

    // The gradients of keys that no query sees.
    __device__ __forceinline__ void zero(const BackwardWork& work, const MutableTensor& grad,
                                         int headdim) const {
      int rows = min(kBlockN, work.keys.rows.length - work.first_key);
      E* out = static_cast<E*>(grad.data) +
               grad.stride.offset(work.keys.batch, work.keys.rows.begin + work.first_key,
                                  work.keys.head);
#pragma unroll 1
      for (int i = threadIdx.x % 32; i < rows * headdim; i += 32) {
        out[i / headdim * grad.stride.row + i % headdim] = tile::from_float<E>(0.f);
      }
    }

    // By one thread, once the tile is written. 0 steps end the others' work.
    __device__ __forceinline__ void announce(int steps) const {
      shared.steps[tile.slot()] = steps;
      ptx::mbarrier_arrive(address(&shared.tile_full[tile.slot()]));
    }

    // A CTA that takes whole heads has room of its own for their sums of dq.
    __device__ __forceinline__ void own_sums(BackwardItem& item) const {
      item.dq_rows = (item.q_rows.length + kDqRowGroup - 1) / kDqRowGroup * kDqRowGroup;
      item.dq_begin = blockIdx.x * item.dq_rows * params.shape.heads_per_group();
    }

    // By one thread.
    __device__ __forceinline__ void copy(const BackwardWork& work, int steps) {
      BackwardItem& item = shared.item[tile.slot()];
      tile.wait_empty(shared.tile_empty);
      item = work;
      if constexpr (kWhole) own_sums(item);
      announce(steps);
      load_keys(item);
      BackwardStep at(item);
#pragma unroll 1
      for (; steps > 0; --steps, step.advance(), at.advance(item)) load_step(item, at);
    }

    __device__ __forceinline__ void take(const BackwardWork& work) {
      if (work.empty()) return;
      int steps = work.steps();
      if (steps > 0) {
        if (threadIdx.x % 32 == 0) copy(work, steps);
        __syncwarp();
        tile.advance();
      } else if (params.dk.data != nullptr) {
        zero(work, params.dk, params.shape.headdim);
        zero(work, params.dv, params.shape.headdim_v);
      }
    }

    __device__ __forceinline__ void run() {
      uint32_t together = params.schedule.together, pieces = params.schedule.tiles / together;
      const SeqLens& lens = params.shape.seqlens_k;
#pragma unroll 1
      for (uint32_t piece = blockIdx.x; piece < pieces; piece = deal()) {
#pragma unroll 1
        for (uint32_t i = 0; i < together; ++i) {
          tile::TileCoord keys = tile::ordered_tile(lens, params.shape.batch, params.shape.heads_k,
                                                    kBlockN, piece * together + i);
          take(BackwardWork(params, keys, kBlockM, kBlockN));
        }
      }
      if (threadIdx.x % 32 != 0) return;
      tile.wait_empty(shared.tile_empty);
      announce(0);
    }
  };

  // Three warps: copy what TMA can't reach, element by element, and set apart the special values
  // that a mask could hide (tile/special.cuh).
  struct Helpers {
    static constexpr int kHelpers = kBackwardSm90HelperThreads;

    const BackwardParams& params;
    Shared& shared;
    TilePlace tile;
    StepPlace step;
    uint32_t parities = 0;  // of landed phases, a bit for each buffer
    enum FirstBit { kOfQ = 0, kOfDout = 8, kOfK = 16, kOfV = 24 };

    // Opaque: what follows from it would take registers through the loop.
    static __device__ __forceinline__ int thread() {
      return static_cast<int>(ptx::opaque(threadIdx.x)) % 128 - (128 - kHelpers);
    }

    // A block that has `landed`, but for what TMA can't reach: once it is copied, and clean if it
    // is partial, it is there for the tensor cores.
    template <class Tile>
    __device__ __forceinline__ void finish(const uint8_t* block, int bit, const uint64_t& landed,
                                           const uint64_t& full, bool partial,
                                           const ConstTensor& tensor, const SeqRows& rows, int head,
                                           int headdim, int first_row) {
      wait(landed, parities >> bit & 1);
      parities ^= 1u << bit;
      if (!tensor.aligned16) {
        tile::load_tile_pairs<Tile>(
            address(block),
            tile::GlobalRows(tensor, shared.item[tile.slot()].keys.batch, rows, head, headdim),
            first_row, thread(), kHelpers);
        ptx::named_barrier_sync(kHelped, kHelpers);
      }
      bool special = partial && tile::zero_specials_below<E, Tile>(address(block), Tile::kRows,
                                                                   thread(), kHelpers);
      ptx::fence_async_shared();
      special = ptx::named_barrier_or(kHelped, kHelpers, special);
      if (thread() != 0) return;
      if (special) shared.special[tile.slot()] = tile.count + 1;
      ptx::mbarrier_arrive(address(&full));
    }

    __device__ __forceinline__ void finish_keys(const BackwardItem& item) {
      bool partial = item.blocks.any_partial();
      int slot = tile.slot();
      if (by_helpers(params.k, partial)) {
        finish<TileK>(shared.k[slot], kOfK + slot, shared.k_landed[slot], shared.k_full[slot],
                      partial, params.k, item.keys.rows, item.keys.head, params.shape.headdim,
                      item.first_key);
      }
      if (by_helpers(params.v, false)) {
        finish<TileV>(shared.v[slot], kOfV + slot, shared.v_landed[slot], shared.v_full[slot],
                      false, params.v, item.keys.rows, item.keys.head, params.shape.headdim_v,
                      item.first_key);
      }
    }

    __device__ __forceinline__ void finish_step(const BackwardItem& item, const BackwardStep& at) {
      bool partial = item.blocks.partial(at.block);
      int slot = step.slot(), row = at.block * kBlockM;
      if (by_helpers(params.q, partial)) {
        finish<TileQ>(shared.q[slot], kOfQ + slot, shared.q_landed[slot], shared.q_full[slot],
                      partial, params.q, item.q_rows, at.head, params.shape.headdim, row);
      }
      if (by_helpers(params.dout, partial)) {
        finish<TileDo>(shared.dout[slot], kOfDout + slot, shared.dout_landed[slot],
                       shared.dout_full[slot], partial, params.dout, item.q_rows, at.head,
                       params.shape.headdim_v, row);
      }
    }

    __device__ __forceinline__ void run() {
#pragma unroll 1
      for (;; tile.advance()) {
        int steps = wait_tile(shared, tile);
        if (steps == 0) return;
        const BackwardItem& item = shared.item[tile.slot()];
        finish_keys(item);
        BackwardStep at(item);
#pragma unroll 1
        for (; steps > 0; --steps, step.advance(), at.advance(item)) finish_step(item, at);
        tile.release_all(shared.tile_empty);
      }
    }
  };
};

}  // namespace flashattn
