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

#include <cfloat>

#include "common/params.h"
#include "host/launch.cuh"
#include "kernels/kernels.h"
#include "plan/tile_config.h"
#include "tile/copy.cuh"
#include "tile/dq_accum.cuh"
#include "tile/fragment.cuh"
#include "tile/isolate.cuh"
#include "tile/mask_apply.cuh"
#include "tile/scheduler.cuh"
#include "tile/softmax.cuh"
#include "tile/turn.cuh"

namespace flashattn {

template <DType kType, int kHeadDim, int kHeadDimV>
struct BackwardSm80 {
  static constexpr BackwardTile kTile = sm80_backward_tile(kHeadDim);
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
  static constexpr bool kPInRegisters = sm80_backward_p_in_registers(kHeadDim);
  // S^T and dP^T: keys x queries, taken kSubM queries at a time.
  static constexpr int kScoreWarpsM = kPInRegisters ? 1 : 2;
  static constexpr int kScoreRows = kBlockN / (kWarps / kScoreWarpsM);
  static constexpr int kSubM = kPInRegisters && kScoreRows < 32 ? kBlockM : 32;
  static constexpr int kSubs = kBlockM / kScoreWarpsM / kSubM;
  // dK and dV: keys x head dim.
  static constexpr int kGradWarpsD = kPInRegisters ? 1 : 4;
  static constexpr int kGradRows = kBlockN / (kWarps / kGradWarpsD);
  // dQ: queries x head dim.
  static constexpr int kDqWarpsD = kHeadDim == 96 || kWarps == 4 ? 2 : 4;
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
  static_assert(kSmemBytes == sm80_backward_smem_bytes({kHeadDim, kHeadDimV}),
                "the planner's figure");

  using Scores = tile::Accumulator<kScoreRows, kSubM>;
  using Probabilities = tile::PackedAccumulator<kScoreRows, kSubM>;
  using GradK = tile::Accumulator<kGradRows, kHeadDim / kGradWarpsD>;
  using GradV = tile::Accumulator<kGradRows, kHeadDimV / kGradWarpsD>;
  using GradQ = tile::Accumulator<kDqRows, kHeadDim / kDqWarpsD>;
  static constexpr auto kRowsThenChunk = tile::LaneOrder::kRowsThenChunk;
  static constexpr auto kChunkThenRows = tile::LaneOrder::kChunkThenRows;

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

  // One query block of one head.
  struct Step {
    int head;
    int block;
    int stage;
    int parity;

    __device__ __forceinline__ Step(const Work& work, int index) {
      int per_head = work.blocks_per_head();
      int in_group = index / per_head;
      head = work.keys.head * work.params.shape.heads_per_group() + in_group;
      block = work.blocks.begin + index - in_group * per_head;
      stage = index % kTile.stages;
      parity = index % 2;
    }
    __device__ __forceinline__ int first_row() const { return block * kBlockM; }
    __device__ __forceinline__ uint32_t q(const Work& work) const {
      return work.smem + kSmemQ + stage * TileQ::kBytes;
    }
    __device__ __forceinline__ uint32_t dout(const Work& work) const {
      return work.smem + kSmemDo + stage * TileDo::kBytes;
    }
    __device__ __forceinline__ uint32_t stats(const Work& work) const {
      return work.smem + kSmemStats + stage * kStatsBytes;
    }
    __device__ __forceinline__ uint32_t ds(const Work& work) const {
      return work.smem + kSmemDs + parity * TileP::kBytes;
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

  // Q, dO and the row statistics of step `index`, if there is one.
  static __device__ __forceinline__ void load_queries(const Work& work, int index) {
    if (index < work.steps()) {
      Step step(work, index);
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

  // P^T and dS^T of kSubM queries from column `col` of the block on.
  static __device__ __forceinline__ void probabilities(const Work& work, const Step& step, int col,
                                                       Scores& p, Scores& ds) {
    int row = threadIdx.x / 32 / kScoreWarpsM * kScoreRows;
    tile::clear(p);
    tile::gemm_abt<E, kHeadDim>(p, tile::LaneAddress<TileK>(work.smem, row, kRowsThenChunk),
                                tile::LaneAddress<TileQ>(step.q(work), col, kChunkThenRows));
    tile::clear(ds);
    tile::gemm_abt<E, kHeadDimV>(ds,
                                 tile::LaneAddress<TileV>(work.smem + kSmemV, row, kRowsThenChunk),
                                 tile::LaneAddress<TileDo>(step.dout(work), col, kChunkThenRows));
    // A scale of 0 would make hidden scores NaN, a negative one turns -inf round.
    float scale = work.params.shape.softmax_scale;
    float scale_log2 = scale == 0.f ? FLT_MIN : scale * tile::kLog2E;
    bool partial = work.blocks.partial(step.block);
    int first_row = work.first_key + row, first_col = step.first_row() + col;
    if (partial) {
      float hidden = scale < 0.f ? tile::kInfinity : -tile::kInfinity;
      tile::apply_mask<true>(p, work.mask, first_row, first_col, hidden);
    }
    uint32_t stats = step.stats(work) + (col + threadIdx.x % 4 * 2) * 4;
#pragma unroll
    for (int n = 0; n < kSubM / 8; ++n) {
      float2 lse_log2 = ptx::load_shared_f2(stats + n * 32);
      float2 delta = ptx::load_shared_f2(stats + kBlockM * 4 + n * 32);
#pragma unroll
      for (int m = 0; m < kScoreRows / 16; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float lse = e % 2 ? lse_log2.y : lse_log2.x;
          p[m][n][e] = ptx::exp2_approx(fmaf(p[m][n][e], scale_log2, -lse));
          ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - (e % 2 ? delta.y : delta.x));
        }
    }
    // 0 * NaN again: a hidden pair's dP may be anything.
    if (partial) tile::apply_mask<true>(ds, work.mask, first_row, first_col, 0.f);
  }

  template <bool kIsolate, class TileB, class Grad, int KT, int MT>
  static __device__ __forceinline__ void add_product(const Work& work, const Step& step, int col,
                                                     Grad& grad, const uint32_t (&a)[KT][MT][4],
                                                     tile::LaneAddress<TileB> b) {
    if (kIsolate && work.blocks.partial(step.block)) {
      int row = work.first_key + threadIdx.x / 32 / kGradWarpsD * kGradRows;
      tile::gemm_ab_isolated<E, true, kGradWarpsD>(grad, a, b, work.mask, row,
                                                   step.first_row() + col);
    } else {
      tile::gemm_ab<E, kGradWarpsD>(grad, a, b);
    }
  }

  // dV += P^T dO, dK += dS^T Q with both in registers; leaves dS^T in shared memory.
  template <bool kIsolate>
  static __device__ __forceinline__ void key_gradients(const Work& work, const Step& step,
                                                       GradK& dk, GradV& dv) {
    int row = threadIdx.x / 32 * kScoreRows;
    bool want_dkv = work.params.dk.data != nullptr;
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      int col = sub * kSubM;
      Scores p, ds;
      probabilities(work, step, col, p, ds);
      tile::store_accumulator<E, TileP>(step.ds(work), row, ds, col / 16);
      if (!want_dkv) continue;
      Probabilities packed;
      tile::pack_accumulator<E>(packed, p);
      add_product<kIsolate>(work, step, col, dv, packed,
                            tile::LaneAddress<TileDo>(step.dout(work), col, kRowsThenChunk));
      tile::pack_accumulator<E>(packed, ds);
      add_product<kIsolate>(work, step, col, dk, packed,
                            tile::LaneAddress<TileQ>(step.q(work), col, kRowsThenChunk));
    }
  }

  // The same through shared memory: each warp computes a piece of P^T and dS^T, then a piece of
  // dV and dK.
  template <bool kIsolate>
  static __device__ __forceinline__ void key_gradients_shared(const Work& work, const Step& step,
                                                              GradK& dk, GradV& dv) {
    int warp = threadIdx.x / 32;
    uint32_t p_tile = work.smem + kSmemP;
    {
      int row = warp / kScoreWarpsM * kScoreRows;
      int col = warp % kScoreWarpsM * kSubM;
      Scores p, ds;
      probabilities(work, step, col, p, ds);
      tile::store_accumulator<E, TileP>(p_tile, row, p, col / 16);
      tile::store_accumulator<E, TileP>(step.ds(work), row, ds, col / 16);
    }
    __syncthreads();
    if (work.params.dk.data == nullptr) return;
    int row = warp / kGradWarpsD * kGradRows, group = warp % kGradWarpsD * 16;
    tile::PackedAccumulator<kGradRows, kBlockM> a;
    tile::load_a(a, tile::LaneAddress<TileP>(p_tile, row, kRowsThenChunk));
    add_product<kIsolate>(work, step, 0, dv, a,
                          tile::LaneAddress<TileDo>(step.dout(work), 0, kRowsThenChunk, group));
    tile::load_a(a, tile::LaneAddress<TileP>(step.ds(work), row, kRowsThenChunk));
    add_product<kIsolate>(work, step, 0, dk, a,
                          tile::LaneAddress<TileQ>(step.q(work), 0, kRowsThenChunk, group));
  }

  static __device__ __forceinline__ int dq_row() { return threadIdx.x / 32 / kDqWarpsD * kDqRows; }
  static __device__ __forceinline__ int dq_group() { return threadIdx.x / 32 % kDqWarpsD; }

  // Adds this warp's piece of dQ to the sums, in turn if that is asked for.
  static __device__ __forceinline__ void add_dq(const Work& work, const Step& step,
                                                const GradQ& dq) {
    const BackwardParams& params = work.params;
    tile::Turn turn;
    if (params.dq_turn != nullptr) {
      const SeqLens& lens = params.shape.seqlens_q;
      int64_t blocks_before = lens.packed()
                                  ? work.q_rows.begin / kBlockM + work.keys.batch
                                  : work.keys.batch * ((lens.rows + kBlockM - 1) / kBlockM);
      int64_t counter = step.head * params.dq_turns_per_head + blocks_before + step.block;
      int first = work.mask.key_blocks(step.first_row(), kBlockM, kBlockN).begin;
      turn = tile::Turn(params.dq_turn + counter * kWarps + threadIdx.x / 32);
      turn.wait(work.keys.block - first);
    }
    int64_t row = step.head * params.rows + work.rows_before() + step.first_row();
    tile::add_dq<kHeadDim, kDqWarpsD>(params.dq_accum + row * kHeadDim, dq_row(),
                                      work.q_rows.length - step.first_row(), dq_group(), dq);
    turn.pass();
  }

  // dQ += dS K for the block of step `index`.
  static __device__ __forceinline__ void query_gradient(const Work& work, int index) {
    if (work.params.dq_accum == nullptr) return;
    Step step(work, index);
    GradQ dq;
    tile::clear(dq);
    tile::LaneAddress<TileP> ds(step.ds(work), 0, kChunkThenRows, dq_row());
    tile::LaneAddress<TileK> k(work.smem, 0, kRowsThenChunk, dq_group() * 16);
    tile::gemm_atb<E, kBlockN, kDqWarpsD>(dq, ds, k);
    if (work.blocks.partial(step.block) && __any_sync(~0u, tile::any_nonfinite(dq))) {
      query_gradient_isolated(work.params, work.smem, index);
    } else {
      add_dq(work, step, dq);
    }
  }

  // Out of line, as run_isolated.
  static __device__ __noinline__ void query_gradient_isolated(const BackwardParams& params,
                                                              uint32_t smem, int index) {
    Work work(params, smem);
    Step step(work, index);
    GradQ dq;
    tile::clear(dq);
    tile::PackedAccumulator<kDqRows, kBlockN> a;
    tile::load_a_transposed(a,
                            tile::LaneAddress<TileP>(step.ds(work), 0, kChunkThenRows, dq_row()));
    tile::LaneAddress<TileK> k(work.smem, 0, kRowsThenChunk, dq_group() * 16);
    tile::gemm_ab_isolated<E, false, kDqWarpsD>(dq, a, k, work.mask, step.first_row() + dq_row(),
                                                work.first_key);
    add_dq(work, step, dq);
  }

  // Rounds dk and dv through the places of K and V, and writes them out.
  static __device__ __forceinline__ void store(const Work& work, const GradK& dk, const GradV& dv) {
    const BackwardParams& params = work.params;
    int warp = threadIdx.x / 32;
    int row = warp / kGradWarpsD * kGradRows, group = warp % kGradWarpsD;
    uint32_t k_tile = work.smem, v_tile = work.smem + kSmemV;
    tile::store_accumulator<E, TileK, kGradWarpsD>(k_tile, row, dk, group);
    tile::store_accumulator<E, TileV, kGradWarpsD>(v_tile, row, dv, group);
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

  // Returns whether dk and dv have to be done again with kIsolate (which leaves dq as it is).
  template <bool kIsolate>
  static __device__ __forceinline__ bool run(const BackwardParams& params, uint32_t smem) {
    Work work(params, smem);
    if (work.empty()) return false;
    GradK dk;
    GradV dv;
    tile::clear(dk);
    tile::clear(dv);
    load_keys(work);
    load_queries(work, 0);
#pragma unroll 1
    for (int index = 0; index < work.steps(); ++index) {
      Step step(work, index);
      // This step's Q and dO are here, the last step's dS^T too, and its Q and dO are done with.
      ptx::cp_async_wait<0>();
      __syncthreads();
      load_queries(work, index + 1);
      if (!kIsolate && index > 0) query_gradient(work, index - 1);
      if constexpr (kPInRegisters) {
        key_gradients<kIsolate>(work, step, dk, dv);
      } else {
        key_gradients_shared<kIsolate>(work, step, dk, dv);
      }
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (!kIsolate && work.steps() > 0) query_gradient(work, work.steps() - 1);
    if (params.dk.data == nullptr) return false;
    bool nonfinite = tile::any_nonfinite(dk) || tile::any_nonfinite(dv);
    if (__syncthreads_or(nonfinite) && !kIsolate) return true;
    tile::scale(dk, params.shape.softmax_scale);
    store(work, dk, dv);
    return false;
  }

  // Out of line: the rare second pass costs the first no registers.
  static __device__ __noinline__ void run_isolated(const BackwardParams& params, uint32_t smem) {
    run<true>(params, smem);
  }
};

template <DType kType, int kHeadDim, int kHeadDimV>
__global__ void __launch_bounds__(BackwardSm80<kType, kHeadDim, kHeadDimV>::kThreads)
    backward_sm80_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(128) uint8_t smem[];
  using Kernel = BackwardSm80<kType, kHeadDim, kHeadDimV>;
  uint32_t address = ptx::shared_address(smem);
  if (Kernel::template run<false>(params, address)) Kernel::run_isolated(params, address);
}

template <DType kType, int kHeadDim, int kHeadDimV>
void run_backward_sm80(const BackwardParams& params, void* stream) {
  using Kernel = BackwardSm80<kType, kHeadDim, kHeadDimV>;
  const ProblemShape& shape = params.shape;
  int64_t grid =
      tile::blocks_per_head(shape.seqlens_k, shape.batch, Kernel::kBlockN) * shape.heads_k;
  launch<backward_sm80_kernel<kType, kHeadDim, kHeadDimV>>(grid, Kernel::kThreads,
                                                           Kernel::kSmemBytes, stream, params);
}

}  // namespace flashattn
