// How the backward for sm_90a fills shared memory: its tiles, barriers, and the warps that copy.
#pragma once

#include <type_traits>

#include "host/tensor_map.h"
#include "kernels/backward_work.cuh"
#include "plan/tile_config.h"
#include "ptx/sm90.cuh"
#include "tile/copy.cuh"
#include "tile/smem_layout.cuh"
#include "tile/special.cuh"
#include "tile/tma.cuh"

namespace flashattn {

struct BackwardSm90Params {
  CUtensorMap q, k, v, dout;
  BackwardParams backward;
};

constexpr int kBackwardSm90MathThreads = 256;  // that compute

// Barriers are named after the event that completes a phase. What has landed of a block that is
// partial is full once the helpers are done with it.
template <class TileQ, class TileDo, class TileK, class TileV, class TileDs, int kStages>
struct BackwardSm90Shared {
  uint8_t k[TileK::kBytes], v[TileV::kBytes];
  uint8_t q[kStages][TileQ::kBytes], dout[kStages][TileDo::kBytes];
  uint8_t ds[2][TileDs::kBytes];  // [query][key]
  float lse_log2[kStages][TileQ::kRows], delta[kStages][TileQ::kRows];
  uint64_t k_full, k_landed, v_full;
  uint64_t q_full[kStages], q_landed[kStages], q_empty[kStages];
  uint64_t dout_full[kStages], dout_landed[kStages], dout_empty[kStages];
  uint64_t ds_full[2], ds_empty[2];
  int special;  // a NaN or Inf was taken out

  static __device__ __forceinline__ void init(uint64_t& barrier, int arrivals) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
  }

  // By one thread. `ds_writers`: warps that write dS, of the eight that compute.
  __device__ __forceinline__ void init(int ds_writers = 8) {
    init(k_full, 1), init(k_landed, 1), init(v_full, 1);
    for (int i = 0; i < kStages; ++i) {
      init(q_full[i], 1), init(q_landed[i], 1), init(q_empty[i], kBackwardSm90MathThreads);
      init(dout_full[i], 1), init(dout_landed[i], 1), init(dout_empty[i], kBackwardSm90MathThreads);
    }
    for (int i = 0; i < 2; ++i) init(ds_full[i], ds_writers), init(ds_empty[i], 4);
    special = 0;
    ptx::fence_mbarrier_init();
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
    for (int i = 0; i < 2; ++i) Base::init(p_full[i], 4), Base::init(p_empty[i], 128);
    Base::init(4);
  }
};

template <DType kType, int kHeadDim, int kHeadDimV>
struct BackwardSm90Load {
  static constexpr HeadDims kDims = {kHeadDim, kHeadDimV};
  static constexpr Sm90BackwardTile kTile = sm90_backward_tile(kDims);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kThreads = 32 * kSm90BackwardWarps;

  using E = tile::Element<kType>;
  using TileK = tile::SmemTile<kBlockN, kHeadDim>;
  using TileV = tile::SmemTile<kBlockN, kHeadDimV>;
  using TileQ = tile::SmemTile<kBlockM, kHeadDim>;
  using TileDo = tile::SmemTile<kBlockM, kHeadDimV>;
  using TileP = tile::SmemTile<kBlockN, kBlockM>;
  using TileDs = tile::SmemTile<kBlockM, kBlockN>;
  using CommonShared = BackwardSm90Shared<TileQ, TileDo, TileK, TileV, TileDs, kStages>;
  using Shared =
      std::conditional_t<kTile.by_products, BackwardSm90ByProductsShared<CommonShared, TileP>,
                         CommonShared>;
  static_assert(sizeof(Shared) <= sm90_backward_smem_bytes(kDims), "the planner's figure");

  enum NamedBarrier { kHelped = 1, kStored = 2 };

  // A step's slot in a ring of kSlots, and the parity of its phase.
  template <int kSlots>
  struct Place {
    int slot;
    uint32_t parity;
    __device__ __forceinline__ explicit Place(int index)
        : slot(index % kSlots), parity(index / kSlots & 1) {}
  };

  static __device__ __forceinline__ uint32_t address(const void* shared) {
    return ptx::shared_address(shared);
  }
  static __device__ __forceinline__ void wait(const uint64_t& barrier, uint32_t parity) {
    ptx::mbarrier_wait(address(&barrier), parity);
  }
  // An arrival of every lane, behind what it read itself.
  static __device__ __forceinline__ void arrive_all(const uint64_t& barrier) {
    ptx::mbarrier_arrive(address(&barrier));
  }
  // One arrival for the warp, behind what all of its lanes wrote.
  static __device__ __forceinline__ void arrive(const uint64_t& barrier) {
    __syncwarp();
    ptx::mbarrier_arrive_elect(address(&barrier));
  }

  // One thread: starts the copies by TMA.
  struct Copies {
    const BackwardSm90Params& params;
    Shared& shared;
    BackwardWork work;

    template <class Tile>
    __device__ __forceinline__ void load(const CUtensorMap& map, const uint8_t* to,
                                         const uint64_t& full, int row, int head,
                                         const SeqLens& lens) const {
      int batch = lens.packed() ? 0 : static_cast<int>(work.keys.batch);
      tile::start_load<Tile, 1>(&map, address(to), address(&full), row, head, batch);
    }

    __device__ __forceinline__ void load_keys() const {
      const SeqLens& lens = params.backward.shape.seqlens_k;
      int row = static_cast<int>(work.keys.rows.begin) + work.first_key;
      uint64_t& k_full = work.blocks.any_partial() ? shared.k_landed : shared.k_full;
      ptx::mbarrier_arrive_expect(address(&k_full), TileK::kBytes);
      load<TileK>(params.k, shared.k, k_full, row, work.keys.head, lens);
      ptx::mbarrier_arrive_expect(address(&shared.v_full), TileV::kBytes);
      load<TileV>(params.v, shared.v, shared.v_full, row, work.keys.head, lens);
    }

    // A block of Q or dO and its row statistics.
    template <class Tile>
    __device__ __forceinline__ void load_rows(const CUtensorMap& map, const uint8_t* to,
                                              const float* stats_to, const float* stats,
                                              const uint64_t& full,
                                              const BackwardStep& step) const {
      int row = step.block * kBlockM;
      ptx::mbarrier_arrive_expect(address(&full), Tile::kBytes + 4 * kBlockM);
      load<Tile>(map, to, full, static_cast<int>(work.q_rows.begin) + row, step.head,
                 params.backward.shape.seqlens_q);
      ptx::bulk_load(address(stats_to), stats + work.sums_row(step.head) + row, 4 * kBlockM,
                     address(&full));
    }

    __device__ __forceinline__ void run() const {
      const BackwardParams& backward = params.backward;
      load_keys();
      BackwardStep step(work);
#pragma unroll 1
      for (int left = work.steps(); left > 0; --left, step.advance(work)) {
        Place<kStages> place(step.index);
        int slot = place.slot;
        bool partial = work.blocks.partial(step.block);
        wait(shared.q_empty[slot], place.parity ^ 1);
        load_rows<TileQ>(params.q, shared.q[slot], shared.lse_log2[slot], backward.lse_log2,
                         partial ? shared.q_landed[slot] : shared.q_full[slot], step);
        wait(shared.dout_empty[slot], place.parity ^ 1);
        load_rows<TileDo>(params.dout, shared.dout[slot], shared.delta[slot], backward.delta,
                          partial ? shared.dout_landed[slot] : shared.dout_full[slot], step);
      }
    }
  };

  // Three warps: set apart the special values that a mask could hide (tile/special.cuh).
  struct Helpers {
    static constexpr int kHelpers = 96;  // threads

    Shared& shared;
    const BackwardWork& work;

    // A block of K, Q or dO that has `landed`: once it is clean, it is there for the tensor cores.
    template <class Tile>
    __device__ __forceinline__ void clean(const uint8_t* block, const uint64_t& landed,
                                          uint32_t parity, const uint64_t& full) const {
      int thread = threadIdx.x % 128 - (128 - kHelpers);
      wait(landed, parity);
      bool special =
          tile::zero_specials_below<E, Tile>(address(block), Tile::kRows, thread, kHelpers);
      ptx::fence_async_shared();
      special = ptx::named_barrier_or(kHelped, kHelpers, special);
      if (thread != 0) return;
      if (special) shared.special = 1;
      ptx::mbarrier_arrive(address(&full));
    }

    __device__ __forceinline__ void run() const {
      if (!work.blocks.any_partial()) return;
      clean<TileK>(shared.k, shared.k_landed, 0, shared.k_full);
      uint32_t landed = 0;  // the parity of the phase that lands next, a bit a slot
      BackwardStep step(work);
#pragma unroll 1
      for (int left = work.steps(); left > 0; --left, step.advance(work)) {
        if (!work.blocks.partial(step.block)) continue;
        int slot = step.index % kStages;
        uint32_t parity = landed >> slot & 1;
        clean<TileQ>(shared.q[slot], shared.q_landed[slot], parity, shared.q_full[slot]);
        clean<TileDo>(shared.dout[slot], shared.dout_landed[slot], parity, shared.dout_full[slot]);
        landed ^= 1u << slot;
      }
    }
  };
};

}  // namespace flashattn
