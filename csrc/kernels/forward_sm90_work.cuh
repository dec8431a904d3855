// What the roles of the sm_90a forward tell each other: a tile's work, shared memory, barriers.
#pragma once

#include "common/params.h"
#include "host/tensor_map.h"
#include "plan/tile_config.h"
#include "ptx/sm90.cuh"
#include "tile/element.cuh"
#include "tile/ring.cuh"
#include "tile/scheduler.cuh"
#include "tile/smem_layout.cuh"

namespace flashattn {

struct ForwardSm90Params {
  CUtensorMap q, k, v;
  ForwardParams forward;
  ForwardSchedule schedule;
};

// One tile: block_m queries of one head.
struct ForwardSm90Work {
  static constexpr int kMaxWarpgroups = 3;

  int64_t batch;
  SeqRows q_rows, k_rows;
  SequenceMask mask;
  BlockRange keys;                 // that the tile sees
  BlockRange own[kMaxWarpgroups];  // that 64 of its queries see; empty at keys.begin: they see none
  int head, head_k;
  int first_row;  // of the tile in the sequence; -1: no more tiles

  __device__ __forceinline__ bool none() const { return first_row < 0; }
};

// Deals this CTA its tiles.
template <int kBlockM, int kBlockN>
class ForwardSm90Cursor {
 public:
  __device__ __forceinline__ explicit ForwardSm90Cursor(const ForwardSm90Params& params)
      : params_(params), index_(blockIdx.x) {}

  // Writes the next tile that has rows to `work`, or that there is none. By a warp.
  __device__ __forceinline__ void next(ForwardSm90Work& work) {
    const ForwardSchedule& schedule = params_.schedule;
    const ProblemShape& shape = params_.forward.shape;
    bool found = false;
    for (; index_ < schedule.items; index_ += gridDim.x, part_ = 0) {
      if (part_ == 0) {
        item_ =
            tile::ordered_item(shape.seqlens_q, shape.batch, shape.heads_q, kBlockM, schedule.parts,
                               schedule.heads_together, schedule.rotated, index_);
      }
      if (item_.block < 0) continue;  // packed items are counted by a bound
      while (!found && part_ < schedule.parts) found = make(work, part_++);
      if (found) break;
    }
    if (!found && threadIdx.x % 32 == 0) work.first_row = -1;
    __syncwarp();
  }

 private:
  // Part 0 is the longest tile under a causal mask, part 1 the shortest.
  __device__ __forceinline__ bool make(ForwardSm90Work& work, int part) const {
    const ProblemShape& shape = params_.forward.shape;
    int blocks = (item_.rows.length + kBlockM - 1) / kBlockM;
    int block = part == 0 ? blocks - 1 - item_.block : item_.block;
    // The middle tile is a part 0. Fewer rows are used than items were counted for: some are empty.
    bool second_half = 2 * block + 1 >= blocks;
    if (block < 0 || block >= blocks) return false;
    if (params_.schedule.parts == 2 && second_half != (part == 0)) return false;
    if (threadIdx.x % 32 != 0) return true;
    SeqRows k_rows = shape.seqlens_k.sequence(item_.batch);
    SequenceMask mask{shape.mask, item_.rows.length, k_rows.length};
    int first_row = block * kBlockM;
    BlockRange keys = mask.key_blocks(first_row, kBlockM, kBlockN);
    work.batch = item_.batch;
    work.q_rows = item_.rows;
    work.k_rows = k_rows;
    work.mask = mask;
    work.keys = keys;
    work.head = item_.head;
    work.head_k = item_.head / shape.heads_per_group();
    work.first_row = first_row;
#pragma unroll 1
    for (int i = 0; i < kBlockM / 64; ++i) {
      BlockRange own = mask.key_blocks(first_row + 64 * i, 64, kBlockN);
      if (own.empty()) own.begin = own.end = keys.begin;
      work.own[i] = own;
    }
    return true;
  }

  const ForwardSm90Params& params_;
  tile::TileCoord item_;
  uint32_t index_;
  int part_ = 0;
};

// Barriers are named after the event that completes a phase.
template <class TileQ, class TileK, class TileV, int kStages, int kQueryStages>
struct ForwardSm90Shared {
  static constexpr int kWorks = 4;  // a tile's is needed until its output is stored

  uint8_t q[kQueryStages][TileQ::kBytes];
  uint8_t k[kStages][TileK::kBytes];
  uint8_t v[kStages][TileV::kBytes];
  ForwardSm90Work work[kWorks];
  uint64_t work_full[kWorks], work_empty[kWorks];
  uint64_t q_full[kQueryStages], q_empty[kQueryStages];
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
  uint64_t v_landed[kStages];  // by TMA, of partial blocks: full once they are scanned
  int special;                 // a NaN or Inf that some row may see was taken out of a block of V

  // By one thread. `consumers`, `helpers`: warps.
  __device__ __forceinline__ void init(int consumers, int helpers) {
    init(work_full, 1), init(work_empty, consumers + helpers + 1);  // and the producer
    init(q_full, 1), init(q_empty, consumers);
    init(k_full, 1), init(k_empty, consumers);
    init(v_full, 1), init(v_empty, consumers);
    init(v_landed, 1);
    special = 0;
    ptx::fence_mbarrier_init();
  }

 private:
  template <int N>
  static __device__ __forceinline__ void init(uint64_t (&barriers)[N], int arrivals) {
    for (uint64_t& barrier : barriers) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
    }
  }
};

// Sizes and types of one kernel.
template <DType kType_, int kHeadDim_, int kHeadDimV_>
struct ForwardSm90Config {
  static constexpr DType kType = kType_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr Sm90ForwardTile kTile = sm90_forward_tile({kHeadDim, kHeadDimV});
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kWarpgroups = kBlockM / 64;  // that compute
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kRegisters = kWarpgroups == 2 ? 232 : 160;
  static constexpr int kLoaderRegisters = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kHelperWarps = 2;
  // Whether blocks that a warpgroup does not see are released unread (see release_unread()): where
  // tiles have more queries than blocks have keys, and registers are left.
  static constexpr bool kUnread = kWarpgroups == 3;

  using E = tile::Element<kType>;
  using TileQ = tile::SmemTile<kBlockM, round_up_64(kHeadDim)>;
  using TileK = tile::SmemTile<kBlockN, round_up_64(kHeadDim)>;
  using TileV = tile::SmemTile<kBlockN, round_up_64(kHeadDimV)>;
  using Shared = ForwardSm90Shared<TileQ, TileK, TileV, kTile.stages, kTile.query_stages>;
  static_assert(sizeof(Shared) <= sm90_forward_smem_bytes({kHeadDim, kHeadDimV}));

  using Place = tile::RingPlace<kTile.stages>;  // of K and V
  using QueryPlace = tile::RingPlace<kTile.query_stages>;
  using WorkPlace = tile::RingPlace<Shared::kWorks>;

  enum NamedBarrier { kHelped = 1, kQueriesPrepared = 2 };  // the latter: one a warpgroup
};

}  // namespace flashattn
