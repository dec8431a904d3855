// What the backward for sm_80 works on: its tiles and their places in shared memory, each warp's
// share of them, the CTA's keys, its steps over query blocks and their copies.
#pragma once

#include <type_traits>

#include "kernels/backward_work.cuh"
#include "plan/tile_config.h"
#include "tile/copy.cuh"
#include "tile/softmax.cuh"
#include "tile/special.cuh"

namespace flashattn {

template <DType kType, int kHeadDim, int kHeadDimV, SmemClass kSmem>
struct BackwardSm80Work {
  static constexpr BackwardTile kTile = sm80_backward_tile(kHeadDim, kSmem);
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kThreads = kWarps * 32;

  using E = tile::Element<kType>;
  using TileK = tile::SmemTile<kBlockN, kHeadDim>;
  using TileV = tile::SmemTile<kBlockN, kHeadDimV>;
  using TileQ = tile::SmemTile<kBlockM, kHeadDim>;
  using TileDo = tile::SmemTile<kBlockM, kHeadDimV>;
  using TileP = tile::SmemTile<kBlockN, kBlockM>;  // P^T and dS^T: [key][query]

  // How warps share the three kinds of products.
  static constexpr bool kPInRegisters = kTile.p_in_registers;
  // S^T and dP^T: keys x queries, taken kSubM queries at a time.
  static constexpr int kScoreWarpsM = kPInRegisters ? 1 : 2;
  static constexpr int kScoreRows = kBlockN / (kWarps / kScoreWarpsM);
  static constexpr int kSubM = kBlockM / kScoreWarpsM < 32 ? kBlockM / kScoreWarpsM : 32;
  static constexpr int kSubs = kBlockM / kScoreWarpsM / kSubM;
  // dK and dV: keys x head dim.
  static constexpr int kGradWarpsD = kPInRegisters ? 1 : kHeadDim <= 128 ? 2 : 4;
  static constexpr int kGradRows = kBlockN / (kWarps / kGradWarpsD);
  // dQ: queries x head dim.
  static constexpr int kDqWarpsD = kHeadDim <= 96 ? 2 : 4;
  static constexpr int kDqRows = kBlockM / (kWarps / kDqWarpsD);

  static_assert(kScoreRows % 16 == 0 && kSubM % 16 == 0 && kGradRows % 16 == 0 && kDqRows % 16 == 0,
                "pieces of whole fragments");
  static_assert(kHeadDim % (16 * kGradWarpsD) == 0 && kHeadDimV % (16 * kGradWarpsD) == 0 &&
                    kHeadDim % (16 * kDqWarpsD) == 0,
                "warps share the columns evenly");
  static_assert(kGradWarpsD * 16 <= TileK::kSlabCols && kDqWarpsD * 16 <= TileK::kSlabCols,
                "warps' columns alternate within a slab");
  static_assert(kThreads >= 2 * kBlockM, "a thread copies one row statistic");

  // Shared memory: K, V, stages of Q, dO and row statistics, P^T, two buffers of dS^T. K's and V's
  // places take dK and dV in the end.
  static constexpr int kSmemV = TileK::kBytes;
  static constexpr int kSmemQ = kSmemV + TileV::kBytes;
  static constexpr int kSmemDo = kSmemQ + kTile.stages * TileQ::kBytes;
  static constexpr int kSmemStats = kSmemDo + kTile.stages * TileDo::kBytes;
  static constexpr int kStatsBytes = 2 * kBlockM * 4;  // lse_log2, delta
  static constexpr int kSmemP = kSmemStats + kTile.stages * kStatsBytes;
  static constexpr int kSmemDs = kSmemP + (kPInRegisters ? 0 : TileP::kBytes);
  static constexpr int kSmemBytes = kSmemDs + 2 * TileP::kBytes;
  static_assert(kSmemBytes == sm80_backward_smem_bytes({kHeadDim, kHeadDimV}, kSmem),
                "the planner's figure");

  // Which warp does what, and its lanes' ldmatrix offsets.
  struct Roles {
    static constexpr auto kRowsThenChunk = tile::LaneOrder::kRowsThenChunk;
    static constexpr auto kChunkThenRows = tile::LaneOrder::kChunkThenRows;
    using Offsets = tile::LaneOffsets<TileK::kSlabCols>;
    using ScoreOffsets = tile::LaneOffsets<TileP::kSlabCols>;

    int warp = tile::warp_index();
    int score_row = warp / kScoreWarpsM * kScoreRows;                // keys
    int score_col = warp % kScoreWarpsM * (kBlockM / kScoreWarpsM);  // queries
    int grad_row = warp / kGradWarpsD * kGradRows;                   // keys
    int grad_group = warp % kGradWarpsD;      // of 16 columns, every kGradWarpsD-th
    int dq_row = warp / kDqWarpsD * kDqRows;  // queries
    int dq_group = warp % kDqWarpsD;
    Offsets rows{kRowsThenChunk}, chunks{kChunkThenRows};
    Offsets grad_cols{kRowsThenChunk, grad_group * 16};
    Offsets dq_cols{kRowsThenChunk, dq_group * 16};
    ScoreOffsets dq_rows{kChunkThenRows, dq_row};
    struct Nothing {
      __device__ __forceinline__ explicit Nothing(tile::LaneOrder) {}
    };
    std::conditional_t<std::is_same_v<ScoreOffsets, Offsets>, Nothing, ScoreOffsets> own_score_rows{
        kRowsThenChunk};

    __device__ __forceinline__ Roles() {}

    // Offsets into P^T and dS^T, those of the other tiles where slabs have one width: registers are
    // what this kernel has least of.
    __device__ __forceinline__ ScoreOffsets score_rows() const {
      if constexpr (std::is_same_v<ScoreOffsets, Offsets>) {
        return rows;
      } else {
        return own_score_rows;
      }
    }
  };

  struct Work : BackwardWork {
    uint32_t smem;

    __device__ __forceinline__ Work(const BackwardParams& p, uint32_t shared_memory)
        : BackwardWork(
              p, tile::tile_of_cta(p.shape.seqlens_k, p.shape.batch, p.shape.heads_k, kBlockN),
              kBlockM, kBlockN),
          smem(shared_memory) {}
  };

  struct Step : BackwardStep {
    bool large_lse = false;  // one of its rows has a large lse

    __device__ __forceinline__ explicit Step(const Work& work) : BackwardStep(work) {}

    __device__ __forceinline__ Step next(const Work& work) const {
      Step step = *this;
      step.advance(work);
      return step;
    }
    __device__ __forceinline__ int stage() const { return index % kTile.stages; }
    __device__ __forceinline__ int first_row() const { return block * kBlockM; }
    __device__ __forceinline__ uint32_t q(const Work& work) const {
      return work.smem + kSmemQ + stage() * TileQ::kBytes;
    }
    __device__ __forceinline__ uint32_t dout(const Work& work) const {
      return work.smem + kSmemDo + stage() * TileDo::kBytes;
    }
    __device__ __forceinline__ uint32_t stats(const Work& work) const {
      return work.smem + kSmemStats + stage() * kStatsBytes;
    }
    __device__ __forceinline__ uint32_t ds(const Work& work) const {
      return work.smem + kSmemDs + index % 2 * TileP::kBytes;
    }
  };

  static __device__ __forceinline__ void load_keys(const Work& work) {
    const ProblemShape& shape = work.params.shape;
    const tile::TileCoord& keys = work.keys;
    tile::GlobalRows k(work.params.k, keys.batch, keys.rows, keys.head, shape.headdim);
    tile::GlobalRows v(work.params.v, keys.batch, keys.rows, keys.head, shape.headdim_v);
    tile::load_tile<TileK, kThreads>(work.smem, k, work.first_key);
    tile::load_tile<TileV, kThreads>(work.smem + kSmemV, v, work.first_key);
  }

  // Q, dO and the row statistics of a step, if it is one.
  static __device__ __forceinline__ void load_queries(const Work& work, const Step& step) {
    if (step.index < work.steps()) {
      const BackwardParams& params = work.params;
      int64_t batch = work.keys.batch;
      tile::GlobalRows q(params.q, batch, work.q_rows, step.head, params.shape.headdim);
      tile::GlobalRows dout(params.dout, batch, work.q_rows, step.head, params.shape.headdim_v);
      tile::load_tile<TileQ, kThreads>(step.q(work), q, step.first_row());
      tile::load_tile<TileDo, kThreads>(step.dout(work), dout, step.first_row());
      int i = threadIdx.x;
      if (i < 2 * kBlockM) {
        const float* stats = i < kBlockM ? params.lse_log2 : params.delta;
        int row = step.first_row() + i % kBlockM;
        bool valid = row < work.q_rows.length;
        int64_t offset = work.stats_row(work.params, step.head) + (valid ? row : 0);
        ptx::cp_async_4(step.stats(work) + i * 4, stats + offset, valid);
      }
    }
    ptx::cp_async_commit();
  }

  // What this thread copied for a step has arrived: sets apart the special values that a mask
  // could hide (tile/special.cuh). A row that sees such a value in q or k has a NaN lse, so that
  // its probabilities are NaN all the same; what it would miss is left to BackwardSpecials.
  static __device__ __forceinline__ bool zero_hidden_specials(const Work& work, const Step& step) {
    bool special = false;
    if (step.index == 0 && work.blocks.any_partial()) {
      special |= tile::zero_specials<E, TileK, kThreads>(work.smem);
    }
    if (work.blocks.partial(step.block)) {
      special |= tile::zero_specials<E, TileQ, kThreads>(step.q(work));
      special |= tile::zero_specials<E, TileDo, kThreads>(step.dout(work));
    }
    return special;
  }
};

}  // namespace flashattn
