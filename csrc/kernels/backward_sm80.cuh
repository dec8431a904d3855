// Backward for sm_80 and later: FlashAttention-2, algorithm 2, on mma.sync. A CTA takes block_n
// keys of one KV head and walks over the queries that see them, for every query head of the group:
// dK and dV stay in registers and need no sum over heads, dQ is added up in global memory.
//
// Scores are computed transposed (keys are rows): P^T and dS^T are then the A operands of
//     dV += P^T dO     dK += dS^T Q
// as they stand in registers, and only dS^T passes through shared memory, for  dQ = dS K. Head dims
// above 128 leave no room for dK and dV in registers so: there warps share the columns, and P^T
// passes through shared memory too.
#pragma once

#include "common/params.h"
#include "host/launch.cuh"
#include "kernels/kernels.h"
#include "plan/tile_config.h"
#include "tile/copy.cuh"
#include "tile/dq_accum.cuh"
#include "tile/fragment.cuh"
#include "tile/mask_apply.cuh"
#include "tile/scheduler.cuh"
#include "tile/softmax.cuh"
#include "tile/special.cuh"
#include "tile/turn.cuh"

namespace flashattn {

template <DType kType, int kHeadDim, int kHeadDimV, SmemClass kSmem>
struct BackwardSm80 {
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

  using Scores = tile::Accumulator<kScoreRows, kSubM>;
  using Probabilities = tile::PackedAccumulator<kScoreRows, kSubM>;
  using GradK = tile::Accumulator<kGradRows, kHeadDim / kGradWarpsD>;
  using GradV = tile::Accumulator<kGradRows, kHeadDimV / kGradWarpsD>;
  using GradQ = tile::Accumulator<kDqRows, kHeadDim / kDqWarpsD>;

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
    ScoreOffsets score_rows{kRowsThenChunk};
    ScoreOffsets dq_rows{kChunkThenRows, dq_row};

    __device__ __forceinline__ Roles() {}
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
          q_rows(p.shape.seqlens_q.sequence(keys.batch)),
          mask{p.shape.mask, q_rows.length, keys.rows.length},
          blocks(mask.query_blocks(first_key, kBlockN, kBlockM)) {}

    __device__ __forceinline__ bool empty() const {
      return keys.block < 0 || first_key >= keys.rows.length;
    }

    __device__ __forceinline__ int blocks_per_head() const { return blocks.end - blocks.begin; }
    __device__ __forceinline__ int steps() const {
      return blocks_per_head() * params.shape.heads_per_group();
    }
    // Query rows of all sequences before this one: where its row statistics and dq sums start.
    __device__ __forceinline__ int64_t rows_before() const {
      const SeqLens& lens = params.shape.seqlens_q;
      return lens.packed() ? q_rows.begin : keys.batch * lens.rows;
    }
  };

  // One query block of one head; the heads of the group follow each other.
  struct Step {
    int head;
    int block;
    int index = 0;

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

  // Zeroes hidden pairs, in partial blocks. After the arithmetic, not before: whatever a row's
  // statistics or a hidden pair's score and dP are, NaN included, they give exactly 0.
  static __device__ __forceinline__ void hide(const Work& work, const Roles& roles,
                                              const Step& step, int col, Scores& x) {
    if (!work.blocks.partial(step.block)) return;
    tile::apply_mask<true>(x, work.mask, work.first_key + roles.score_row, step.first_row() + col,
                           0.f);
  }

  // P^T = exp(scale K Q^T - lse), rounded, for kSubM queries from column `col` of the block on.
  static __device__ __forceinline__ void probabilities(const Work& work, const Roles& roles,
                                                       const Step& step, int col, Scores& p) {
    tile::clear(p);
    tile::gemm_abt<E, kHeadDim>(p, tile::LaneAddress<TileK>(work.smem, roles.score_row, roles.rows),
                                tile::LaneAddress<TileQ>(step.q(work), col, roles.chunks));
    float scale_log2 = work.params.shape.softmax_scale * tile::kLog2E;
    uint32_t stats = step.stats(work) + (col + threadIdx.x % 4 * 2) * 4;
#pragma unroll
    for (int n = 0; n < kSubM / 8; ++n) {
      float2 lse_log2 = ptx::load_shared_f2(stats + n * 32);
#pragma unroll
      for (int m = 0; m < kScoreRows / 16; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float lse = e % 2 ? lse_log2.y : lse_log2.x;
          p[m][n][e] = ptx::exp2_approx(fmaf(p[m][n][e], scale_log2, -lse));
        }
    }
    hide(work, roles, step, col, p);
  }

  // dS^T = P^T * (V dO^T - delta), for the same pairs. P^T comes rounded: its registers are free
  // for the product that precedes this one.
  static __device__ __forceinline__ void score_gradients(const Work& work, const Roles& roles,
                                                         const Step& step, int col,
                                                         const Probabilities& p, Scores& ds) {
    tile::clear(ds);
    tile::gemm_abt<E, kHeadDimV>(
        ds, tile::LaneAddress<TileV>(work.smem + kSmemV, roles.score_row, roles.rows),
        tile::LaneAddress<TileDo>(step.dout(work), col, roles.chunks));
    uint32_t stats = step.stats(work) + (kBlockM + col + threadIdx.x % 4 * 2) * 4;
#pragma unroll
    for (int n = 0; n < kSubM / 8; ++n) {
      float2 delta = ptx::load_shared_f2(stats + n * 32);
#pragma unroll
      for (int m = 0; m < kScoreRows / 16; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float2 pair = tile::unpack<E>(p[n / 2][m][n % 2 * 2 + half]);
          ds[m][n][2 * half] = pair.x * (ds[m][n][2 * half] - delta.x);
          ds[m][n][2 * half + 1] = pair.y * (ds[m][n][2 * half + 1] - delta.y);
        }
    }
    hide(work, roles, step, col, ds);
  }

  // dV += P^T dO, dK += dS^T Q with both in registers; leaves dS^T in shared memory.
  static __device__ __forceinline__ void key_gradients(const Work& work, const Roles& roles,
                                                       const Step& step, GradK& dk, GradV& dv) {
    bool want_dkv = work.params.dk.data != nullptr;
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      int col = sub * kSubM;
      Scores scores;
      Probabilities p, ds;
      probabilities(work, roles, step, col, scores);
      tile::pack_accumulator<E>(p, scores);
      if (want_dkv) {
        tile::gemm_ab<E, kGradWarpsD>(dv, p,
                                      tile::LaneAddress<TileDo>(step.dout(work), col, roles.rows));
      }
      score_gradients(work, roles, step, col, p, scores);
      tile::pack_accumulator<E>(ds, scores);
      tile::store_packed<TileP>(step.ds(work), roles.score_row, ds, col / 16);
      if (want_dkv) {
        tile::gemm_ab<E, kGradWarpsD>(dk, ds,
                                      tile::LaneAddress<TileQ>(step.q(work), col, roles.rows));
      }
    }
  }

  // The same through shared memory: each warp computes a piece of P^T and dS^T, and after a barrier
  // a piece of dV and dK.
  static __device__ __forceinline__ void share_scores(const Work& work, const Roles& roles,
                                                      const Step& step) {
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      int col = roles.score_col + sub * kSubM;
      Scores scores;
      Probabilities p, ds;
      probabilities(work, roles, step, col, scores);
      tile::pack_accumulator<E>(p, scores);
      tile::store_packed<TileP>(work.smem + kSmemP, roles.score_row, p, col / 16);
      score_gradients(work, roles, step, col, p, scores);
      tile::pack_accumulator<E>(ds, scores);
      tile::store_packed<TileP>(step.ds(work), roles.score_row, ds, col / 16);
    }
  }

  static __device__ __forceinline__ void key_gradients_shared(const Work& work, const Roles& roles,
                                                              const Step& step, GradK& dk,
                                                              GradV& dv) {
    if (work.params.dk.data == nullptr) return;
    tile::PackedAccumulator<kGradRows, kBlockM> a;
    tile::load_a(a, tile::LaneAddress<TileP>(work.smem + kSmemP, roles.grad_row, roles.score_rows));
    tile::gemm_ab<E, kGradWarpsD>(dv, a,
                                  tile::LaneAddress<TileDo>(step.dout(work), 0, roles.grad_cols));
    tile::load_a(a, tile::LaneAddress<TileP>(step.ds(work), roles.grad_row, roles.score_rows));
    tile::gemm_ab<E, kGradWarpsD>(dk, a,
                                  tile::LaneAddress<TileQ>(step.q(work), 0, roles.grad_cols));
  }

  // Adds this warp's piece of dQ to the sums, in turn if that is asked for.
  static __device__ __forceinline__ void add_dq(const Work& work, const Roles& roles,
                                                const Step& step, const GradQ& dq) {
    const BackwardParams& params = work.params;
    tile::Turn turn;
    if (params.dq_turn != nullptr) {
      const SeqLens& lens = params.shape.seqlens_q;
      int64_t blocks_before = lens.packed()
                                  ? work.q_rows.begin / kBlockM + work.keys.batch
                                  : work.keys.batch * ((lens.rows + kBlockM - 1) / kBlockM);
      int64_t counter = step.head * params.dq_turns_per_head + blocks_before + step.block;
      int first = work.mask.key_blocks(step.first_row(), kBlockM, kBlockN).begin;
      turn = tile::Turn(params.dq_turn + counter * kWarps + roles.warp);
      turn.wait(work.keys.block - first);
    }
    int64_t row = step.head * params.rows + work.rows_before() + step.first_row();
    tile::add_dq<kHeadDim, kDqWarpsD>(params.dq_accum + row * kHeadDim, roles.dq_row,
                                      work.q_rows.length - step.first_row(), roles.dq_group, dq);
    turn.pass();
  }

  // dQ += dS K for the step's block.
  static __device__ __forceinline__ void query_gradient(const Work& work, const Roles& roles,
                                                        const Step& step) {
    if (work.params.dq_accum == nullptr) return;
    GradQ dq;
    tile::clear(dq);
    tile::gemm_atb<E, kBlockN, kDqWarpsD>(dq,
                                          tile::LaneAddress<TileP>(step.ds(work), 0, roles.dq_rows),
                                          tile::LaneAddress<TileK>(work.smem, 0, roles.dq_cols));
    add_dq(work, roles, step, dq);
  }

  // Rounds dk and dv through the places of K and V, and writes them out.
  static __device__ __forceinline__ void store(const Work& work, const Roles& roles,
                                               const GradK& dk, const GradV& dv) {
    const BackwardParams& params = work.params;
    uint32_t k_tile = work.smem, v_tile = work.smem + kSmemV;
    tile::store_accumulator<E, TileK, kGradWarpsD>(k_tile, roles.grad_row, dk, roles.grad_group);
    tile::store_accumulator<E, TileV, kGradWarpsD>(v_tile, roles.grad_row, dv, roles.grad_group);
    __syncthreads();
    int64_t first = work.keys.rows.begin + work.first_key;
    int rows = work.keys.rows.length - work.first_key;
    auto write = [&]<class Tile>(const MutableTensor& grad, uint32_t tile, int headdim, Tile) {
      E* out =
          static_cast<E*>(grad.data) + grad.stride.offset(work.keys.batch, first, work.keys.head);
      tile::store_rows<Tile, kBlockN, kThreads>(out, grad.stride.row, grad.aligned16, tile, 0, rows,
                                                headdim, threadIdx.x);
    };
    write(params.dk, k_tile, params.shape.headdim, TileK{});
    write(params.dv, v_tile, params.shape.headdim_v, TileV{});
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

  // dv: the special values of dO in partial blocks. dq: k's, for rows with a score of -inf there.
  static __device__ __forceinline__ void store_specials(const Work& work) {
    const BackwardParams& params = work.params;
    const ProblemShape& shape = params.shape;
    const tile::TileCoord& keys = work.keys;
    int rows = min(kBlockN, keys.rows.length - work.first_key);
    int group = shape.heads_per_group();
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
    tile::GlobalRows k(params.k, keys.batch, keys.rows, keys.head, shape.headdim);
#pragma unroll 1
    for (int index = threadIdx.x; params.dq_accum && index < rows * shape.headdim;
         index += kThreads) {
      int key = work.first_key + index / shape.headdim, col = index % shape.headdim;
      if (!tile::is_special(tile::element_at<E>(k, key, col))) continue;
      KeyRange seen = work.mask.visible_rows(key);
      int position = col / 16 * 16 + tile::dq_accum_position(col % 16);
#pragma unroll 1
      for (int head = keys.head * group; head < (keys.head + 1) * group; ++head)
#pragma unroll 1
        for (int row = seen.begin; row < seen.end; ++row) {
          int64_t sums_row = head * params.rows + work.rows_before() + row;
          atomicAdd(params.dq_accum + sums_row * kHeadDim + position, tile::kNan);
        }
    }
  }

  static __device__ __forceinline__ void run(const BackwardParams& params, uint32_t smem) {
    Work work(params, smem);
    if (work.empty()) return;
    Roles roles;
    GradK dk;
    GradV dv;
    tile::clear(dk);
    tile::clear(dv);
    bool special = false;
    load_keys(work);
    Step step(work), last = step;
    load_queries(work, step);
#pragma unroll 1
    for (int left = work.steps(); left > 0; --left) {
      Step next = step.next(work);
      ptx::cp_async_wait<0>();
      special |= zero_hidden_specials(work, step);
      // This step's Q and dO are here, the last step's dS^T too, and its Q and dO are done with.
      __syncthreads();
      if (kTile.stages == 2) load_queries(work, next);
      if constexpr (kPInRegisters) {
        key_gradients(work, roles, step, dk, dv);
        if (step.index > 0) query_gradient(work, roles, last);
      } else {
        share_scores(work, roles, step);
        // Between two barriers: warps that are early have something to do.
        if (step.index > 0) query_gradient(work, roles, last);
        __syncthreads();
        key_gradients_shared(work, roles, step, dk, dv);
      }
      if (kTile.stages == 1) {
        __syncthreads();
        load_queries(work, next);
      }
      last = step;
      step = next;
    }
    ptx::cp_async_wait<0>();
    special = __syncthreads_or(special);
    if (step.index > 0) query_gradient(work, roles, last);
    if (params.dk.data != nullptr) {
      __syncthreads();
      tile::scale(dk, params.shape.softmax_scale);
      store(work, roles, dk, dv);
    }
    if (special) store_specials(work);
  }
};

// The tile's size goes with the architecture that the code is for.
template <DType kType, int kHeadDim, int kHeadDimV, SmemClass kSmem>
__global__ void __launch_bounds__(BackwardSm80<kType, kHeadDim, kHeadDimV, kSmem>::kThreads)
    backward_sm80_kernel(const __grid_constant__ BackwardParams params) {
#if __CUDA_ARCH__ == 900
  constexpr SmemClass kExpected = SmemClass::k227KB;
#else
  constexpr SmemClass kExpected = SmemClass::k99KB;
#endif
  if constexpr (kSmem == kExpected) {
    extern __shared__ __align__(128) uint8_t smem[];
    BackwardSm80<kType, kHeadDim, kHeadDimV, kSmem>::run(params, ptx::shared_address(smem));
  } else {
    __trap();
  }
}

template <DType kType, int kHeadDim, int kHeadDimV, SmemClass kSmem>
void launch_backward_sm80(const BackwardParams& params, void* stream) {
  using Kernel = BackwardSm80<kType, kHeadDim, kHeadDimV, kSmem>;
  const ProblemShape& shape = params.shape;
  int64_t grid =
      tile::blocks_per_head(shape.seqlens_k, shape.batch, Kernel::kBlockN) * shape.heads_k;
  launch<backward_sm80_kernel<kType, kHeadDim, kHeadDimV, kSmem>>(
      grid, Kernel::kThreads, Kernel::kSmemBytes, stream, params);
}

template <DType kType, int kHeadDim, int kHeadDimV>
void run_backward_sm80(const BackwardParams& params, SmemClass smem, void* stream) {
  if (smem == SmemClass::k227KB) {
    launch_backward_sm80<kType, kHeadDim, kHeadDimV, SmemClass::k227KB>(params, stream);
  } else {
    launch_backward_sm80<kType, kHeadDim, kHeadDimV, SmemClass::k99KB>(params, stream);
  }
}

}  // namespace flashattn
