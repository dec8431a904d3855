// What the backward for sm_80 works on: its tiles and their places in shared memory, each warp's
// share of them, the CTA's keys, its steps over query blocks and their copies.
#pragma once

#include <type_traits>

#include "common/params.h"
#include "plan/tile_config.h"
#include "tile/copy.cuh"
#include "tile/dq_accum.cuh"
#include "tile/scheduler.cuh"
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

  // What the CTA works on: `blocks` query blocks for each of the group's heads.
  struct Work {
    const BackwardParams& params;
    uint32_t smem;
    tile::TileCoord keys;
    int first_key;
    SeqRows q_rows;
    SequenceMask mask;
    BlockRange blocks;

    __device__ __forceinline__ Work(const BackwardParams& p, uint32_t shared_memory)
        : params(p),
          smem(shared_memory),
          keys(tile::tile_of_cta(p.shape.seqlens_k, p.shape.batch, p.shape.heads_k, kBlockN)),
          first_key(keys.block * kBlockN),
          q_rows(tile::uniform(p.shape.seqlens_q.sequence(keys.batch))),
          mask{p.shape.mask, q_rows.length, keys.rows.length},
          blocks(mask.query_blocks(first_key, kBlockN, kBlockM)) {}

    __device__ __forceinline__ bool empty() const {
      return keys.block < 0 || first_key >= keys.rows.length;
    }

    __device__ __forceinline__ int blocks_per_head() const { return blocks.end - blocks.begin; }
    __device__ __forceinline__ int steps() const {
      return blocks_per_head() * params.shape.heads_per_group();
    }
    // Query rows of all sequences before this one: where its row statistics start.
    __device__ __forceinline__ int64_t rows_before() const {
      const SeqLens& lens = params.shape.seqlens_q;
      return lens.packed() ? q_rows.begin : keys.batch * lens.rows;
    }
    // The same when sequences start groups of rows: where the sums of dq start, and the turns.
    __device__ __forceinline__ int64_t rows_before(int group) const {
      return params.shape.seqlens_q.grouped_begin(keys.batch, q_rows.begin, group);
    }
    __device__ __forceinline__ float* dq_sums(int head) const {
      int64_t row = head * params.accum_rows + rows_before(kDqRowGroup);
      return params.dq_accum + row * kHeadDim;
    }
  };

  // One query block of one head; the heads of the group follow each other.
  struct Step {
    int head;
    int block;
    int index = 0;
    bool large_lse = false;  // one of its rows has a large lse

    __device__ __forceinline__ explicit Step(const Work& work)
        : head(work.keys.head * work.params.shape.heads_per_group()), block(work.blocks.begin) {}

    __device__ __forceinline__ Step next(const Work& work) const {
      Step step = *this;
      ++step.index;
      if (++step.block == work.blocks.end) {
        step.block = work.blocks.begin;
        ++step.head;
      }
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
        int64_t offset = step.head * params.rows + work.rows_before() + (valid ? row : 0);
        ptx::cp_async_4(step.stats(work) + i * 4, stats + offset, valid);
      }
    }
    ptx::cp_async_commit();
  }

  static __device__ __forceinline__ bool any_large_lse(const Work& work, const Step& step) {
    static_assert(kBlockM % 32 == 0, "every lane looks at as many rows");
    bool large = false;
#pragma unroll
    for (int row = 0; row < kBlockM; row += 32) {
      large |= tile::LseLog2::large(
          ptx::load_shared_f32(step.stats(work) + (row + threadIdx.x % 32) * 4));
    }
    return __any_sync(~0u, large);
  }

  // What this thread copied for a step has arrived: sets apart the special values that a mask
  // could hide (tile/special.cuh). A row that sees such a value in q or k has a NaN lse, so that
  // its probabilities are NaN all the same; what it would miss is left to store_specials.
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

  // Keys with a special value in k: their pairs have probability 0, or NaN with their row, and what
  // was computed from the rest of k is neither.
  static __device__ __forceinline__ void store_special_keys(const Work& work,
                                                            const tile::GlobalRows& k, int rows) {
    const BackwardParams& params = work.params;
    const ProblemShape& shape = params.shape;
    int group = shape.heads_per_group(), first_head = work.keys.head * group;
#pragma unroll 1
    for (int i = threadIdx.x; params.dk.data && i < rows; i += kThreads) {
      int key = work.first_key + i;
      bool special = false, nan = false;
#pragma unroll 1
      for (int col = 0; col < shape.headdim; ++col) {
        special |= tile::is_special(tile::element_at<E>(k, key, col));
      }
      if (!special) continue;
      KeyRange seen = work.mask.visible_rows(key);
#pragma unroll 1
      for (int head = first_head; head < first_head + group; ++head)
#pragma unroll 1
        for (int row = seen.begin; row < seen.end; ++row) {
          int64_t at = head * params.rows + work.rows_before() + row;
          nan |= isnan(params.lse_log2[at]) || isnan(params.delta[at]);
        }
      fill_row(params.dk, work, key, shape.headdim, nan ? tile::kNan : 0.f);
      fill_row(params.dv, work, key, shape.headdim_v, nan ? tile::kNan : 0.f);
    }
  }

  static __device__ __forceinline__ void fill_row(const MutableTensor& grad, const Work& work,
                                                  int key, int headdim, float value) {
    const tile::TileCoord& keys = work.keys;
    E* row = static_cast<E*>(grad.data) +
             grad.stride.offset(keys.batch, keys.rows.begin + key, keys.head);
#pragma unroll 1
    for (int col = 0; col < headdim; ++col) row[col] = tile::from_float<E>(value);
  }

  // dv: the special values of dO in partial blocks. dq: k's, for rows with a score of -inf there.
  static __device__ __forceinline__ void store_specials(const Work& work) {
    const BackwardParams& params = work.params;
    const ProblemShape& shape = params.shape;
    const tile::TileCoord& keys = work.keys;
    int rows = min(kBlockN, keys.rows.length - work.first_key);
    int group = shape.heads_per_group();
    tile::GlobalRows k(params.k, keys.batch, keys.rows, keys.head, shape.headdim);
    __syncthreads();
    store_special_keys(work, k, rows);
    __syncthreads();
#pragma unroll 1
    for (int index = threadIdx.x; params.dv.data && index < rows * shape.headdim_v;
         index += kThreads) {
      int key = work.first_key + index / shape.headdim_v, col = index % shape.headdim_v;
      float sum = 0.f;
#pragma unroll 1
      for (int head = keys.head * group; head < (keys.head + 1) * group; ++head) {
        tile::GlobalRows dout(params.dout, keys.batch, work.q_rows, head, shape.headdim_v);
        sum += tile::sum_specials<E>(dout, work.mask.visible_rows(key), work.blocks, kBlockM, col);
      }
      if (sum == 0.f) continue;
      E* dv = static_cast<E*>(params.dv.data) +
              params.dv.stride.offset(keys.batch, keys.rows.begin + key, keys.head) + col;
      *dv = tile::from_float<E>(tile::to_float(*dv) + sum);
    }
#pragma unroll 1
    for (int index = threadIdx.x; params.dq_accum && index < rows * shape.headdim;
         index += kThreads) {
      int key = work.first_key + index / shape.headdim, col = index % shape.headdim;
      if (!tile::is_special(tile::element_at<E>(k, key, col))) continue;
      KeyRange seen = work.mask.visible_rows(key);
#pragma unroll 1
      for (int head = keys.head * group; head < (keys.head + 1) * group; ++head)
#pragma unroll 1
        for (int row = seen.begin; row < seen.end; ++row) {
          atomicAdd(work.dq_sums(head) + tile::dq_accum_offset(row, col, kHeadDim), tile::kNan);
        }
    }
  }
};

}  // namespace flashattn
