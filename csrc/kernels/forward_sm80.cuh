// Forward for sm_80 and later: FlashAttention-2, algorithm 1, on mma.sync. A CTA takes block_m
// queries of one head, each warp its own rows; keys and values pass through shared memory in blocks
// of block_n by cp.async.
#pragma once

#include <cfloat>

#include "common/params.h"
#include "host/launch.cuh"
#include "kernels/kernels.h"
#include "plan/tile_config.h"
#include "tile/copy.cuh"
#include "tile/fragment.cuh"
#include "tile/mask_apply.cuh"
#include "tile/scheduler.cuh"
#include "tile/softmax.cuh"
#include "tile/special.cuh"

namespace flashattn {

template <DType kType, int kHeadDim, int kHeadDimV>
struct ForwardSm80 {
  static constexpr ForwardTile kTile = sm80_forward_tile(kHeadDim);
  using E = tile::Element<kType>;
  using TileQ = tile::SmemTile<kTile.block_m, kHeadDim>;
  using TileK = tile::SmemTile<kTile.block_n, kHeadDim>;
  using TileV = tile::SmemTile<kTile.block_n, kHeadDimV>;
  using TileO = tile::SmemTile<kTile.block_m, kHeadDimV>;  // in Q's place, at the end

  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kThreads = kTile.warps * 32;
  static constexpr int kWarpRows = kBlockM / kTile.warps;
  static constexpr int kSmemK = TileQ::kBytes;
  static constexpr int kSmemV = kSmemK + kTile.stages * TileK::kBytes;
  static constexpr int kSmemBytes = kSmemV + kTile.stages * TileV::kBytes;
  static_assert(kWarpRows % 16 == 0, "a warp owns whole 16-row fragments");
  static_assert(kTile.stages == 1 || kTile.stages == 2, "K/V buffers");
  static_assert(TileO::kBytes <= TileQ::kBytes, "the output is staged in Q's place");

  using LaneOffsets = tile::LaneOffsets<TileQ::kSlabCols>;
  using Scores = tile::Accumulator<kWarpRows, kBlockN>;
  using Output = tile::Accumulator<kWarpRows, kHeadDimV>;
  using Softmax = tile::OnlineSoftmax<kWarpRows / 16>;

  // The maximum of scores is that of scaled scores for a positive scale only: a negative one's sign
  // goes to the scores. A scale of 0 would make hidden scores NaN: the least normal number instead.
  struct ScoreScale {
    float magnitude;
    bool negate;
    __device__ __forceinline__ explicit ScoreScale(float scale)
        : magnitude(scale == 0.f ? FLT_MIN : fabsf(scale)), negate(scale < 0.f) {}
  };

  // What the CTA works on.
  struct Work {
    tile::GlobalRows q, k, v;
    SequenceMask mask;
    BlockRange keys;
    int first_row;  // of the CTA's queries in the sequence
    uint32_t smem;
  };

  static __device__ __forceinline__ uint32_t k_tile(const Work& work, int block) {
    return work.smem + kSmemK + block % kTile.stages * TileK::kBytes;
  }
  static __device__ __forceinline__ uint32_t v_tile(const Work& work, int block) {
    return work.smem + kSmemV + block % kTile.stages * TileV::kBytes;
  }
  static __device__ __forceinline__ void load_k(const Work& work, int block) {
    if (block < work.keys.end) {
      tile::load_tile<TileK, kThreads>(k_tile(work, block), work.k, block * kBlockN);
    }
  }
  static __device__ __forceinline__ void load_v(const Work& work, int block) {
    if (block < work.keys.end) {
      tile::load_tile<TileV, kThreads>(v_tile(work, block), work.v, block * kBlockN);
    }
  }

  static __device__ __forceinline__ void prologue(const Work& work) {
    tile::load_tile<TileQ, kThreads>(work.smem, work.q, work.first_row);
    load_k(work, work.keys.begin);
    if (kTile.stages == 2) load_v(work, work.keys.begin);
    ptx::cp_async_commit();
  }

  // Waits for K (and with two stages V) of `block`, and starts what comes after it.
  static __device__ __forceinline__ bool keys_arrive(const Work& work, int block) {
    ptx::cp_async_wait<0>();
    bool special = kTile.stages == 2 && zero_hidden_specials(work, block);
    __syncthreads();
    if (kTile.stages == 2) {
      load_k(work, block + 1);
      load_v(work, block + 1);
    } else {
      load_v(work, block);
    }
    ptx::cp_async_commit();
    return special;
  }

  static __device__ __forceinline__ bool values_arrive(const Work& work, int block) {
    if (kTile.stages == 2) return false;
    ptx::cp_async_wait<0>();
    bool special = zero_hidden_specials(work, block);
    __syncthreads();
    load_k(work, block + 1);
    ptx::cp_async_commit();
    return special;
  }

  static __device__ __forceinline__ bool zero_hidden_specials(const Work& work, int block) {
    return work.keys.partial(block) && tile::zero_specials<E, TileV, kThreads>(v_tile(work, block));
  }

  // The pass over the visible keys. Returns whether special values were left out for
  // store_specials.
  static __device__ __forceinline__ bool attend(const Work& work, Softmax& softmax, Output& out,
                                                ScoreScale scale) {
    int warp_row = tile::warp_index() * kWarpRows;
    int row = work.first_row + warp_row;
    LaneOffsets by_rows(tile::LaneOrder::kRowsThenChunk),
        by_chunks(tile::LaneOrder::kChunkThenRows);
    tile::LaneAddress<TileQ> q(work.smem, warp_row, by_rows);
    bool special = false;
    prologue(work);
#pragma unroll 1
    for (int block = work.keys.begin; block < work.keys.end; ++block) {
      special |= keys_arrive(work, block);
      Scores scores;
      tile::clear(scores);
      tile::LaneAddress<TileK> k(k_tile(work, block), 0, by_chunks);
      tile::gemm_abt<E, kHeadDim>(scores, q, k);
      special |= values_arrive(work, block);
      if (scale.negate) tile::scale(scores, -1.f);
      if (work.keys.partial(block)) {
        tile::apply_mask<false>(scores, work.mask, row, block * kBlockN, -tile::kInfinity);
      }
      softmax.step(scores, out, scale.magnitude);
      tile::PackedAccumulator<kWarpRows, kBlockN> p;
      tile::pack_accumulator<E>(p, scores);
      tile::LaneAddress<TileV> v(v_tile(work, block), 0, by_rows);
      tile::gemm_ab<E>(out, p, v);
    }
    ptx::cp_async_wait<0>();
    return __syncthreads_or(special);
  }

  static __device__ __forceinline__ void store(const ForwardParams& params, const Work& work,
                                               const tile::TileCoord& tile_coord, Output& out,
                                               const float (&lse)[kWarpRows / 16][2]) {
    int warp_row = tile::warp_index() * kWarpRows, lane = threadIdx.x % 32;
    tile::store_accumulator<E, TileO>(work.smem, warp_row, out);
    __syncwarp();
    int rows = tile_coord.rows.length - work.first_row;
    E* out_rows = static_cast<E*>(params.out.data) +
                  params.out.stride.offset(tile_coord.batch, tile_coord.rows.begin + work.first_row,
                                           tile_coord.head);
    tile::store_rows<TileO, kWarpRows, 32>(out_rows, params.out.stride.row, params.out.aligned16,
                                           work.smem, warp_row, rows, params.shape.headdim_v, lane);
    if (lane % 4 != 0) return;
    float* lse_rows = params.lse.data + params.lse.offset(tile_coord.batch, tile_coord.head,
                                                          tile_coord.rows.begin + work.first_row);
#pragma unroll
    for (int m = 0; m < kWarpRows / 16; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = warp_row + 16 * m + lane / 4 + 8 * half;
        if (row < rows) lse_rows[row] = lse[m][half];
      }
  }

  // Adds the NaN and Inf of partial blocks to the outputs that see them.
  static __device__ __forceinline__ void store_specials(const ForwardParams& params,
                                                        const Work& work,
                                                        const tile::TileCoord& coord) {
    __syncthreads();
    int cols = params.shape.headdim_v;
    int rows = min(kBlockM, coord.rows.length - work.first_row);
#pragma unroll 1
    for (int index = threadIdx.x; index < rows * cols; index += kThreads) {
      int row = work.first_row + index / cols, col = index % cols;
      float sum =
          tile::sum_specials<E>(work.v, work.mask.visible_keys(row), work.keys, kBlockN, col);
      if (sum == 0.f) continue;
      E* out = static_cast<E*>(params.out.data) +
               params.out.stride.offset(coord.batch, coord.rows.begin + row, coord.head) + col;
      *out = tile::from_float<E>(tile::to_float(*out) + sum);
    }
  }

  static __device__ __forceinline__ void run(const ForwardParams& params, uint32_t smem) {
    const ProblemShape& shape = params.shape;
    tile::TileCoord coord = tile::tile_of_cta(shape.seqlens_q, shape.batch, shape.heads_q, kBlockM);
    // Under a causal mask the last queries see most keys: they start first.
    int first_row = (coord.blocks - 1 - coord.block) * kBlockM;
    if (coord.block < 0 || first_row >= coord.rows.length) return;
    SeqRows k_rows = tile::uniform(shape.seqlens_k.sequence(coord.batch));
    int head_k = coord.head / shape.heads_per_group();
    SequenceMask mask{shape.mask, coord.rows.length, k_rows.length};
    Work work{tile::GlobalRows(params.q, coord.batch, coord.rows, coord.head, shape.headdim),
              tile::GlobalRows(params.k, coord.batch, k_rows, head_k, shape.headdim),
              tile::GlobalRows(params.v, coord.batch, k_rows, head_k, shape.headdim_v),
              mask,
              mask.key_blocks(first_row, kBlockM, kBlockN),
              first_row,
              smem};

    ScoreScale scale(shape.softmax_scale);
    Output out;
    tile::clear(out);
    Softmax softmax;
    bool special = attend(work, softmax, out, scale);
    float lse[kWarpRows / 16][2];
    softmax.finish(out, lse, scale.magnitude);
    store(params, work, coord, out, lse);
    if (special) store_specials(params, work, coord);
  }
};

template <DType kType, int kHeadDim, int kHeadDimV>
__global__ void __launch_bounds__(ForwardSm80<kType, kHeadDim, kHeadDimV>::kThreads)
    forward_sm80_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(128) uint8_t smem[];
  ForwardSm80<kType, kHeadDim, kHeadDimV>::run(params, ptx::shared_address(smem));
}

template <DType kType, int kHeadDim, int kHeadDimV>
void run_forward_sm80(const ForwardParams& params, void* stream) {
  using Kernel = ForwardSm80<kType, kHeadDim, kHeadDimV>;
  const ProblemShape& shape = params.shape;
  int64_t grid =
      tile::blocks_per_head(shape.seqlens_q, shape.batch, Kernel::kBlockM) * shape.heads_q;
  launch<forward_sm80_kernel<kType, kHeadDim, kHeadDimV>>(grid, Kernel::kThreads,
                                                          Kernel::kSmemBytes, stream, params);
}

}  // namespace flashattn
