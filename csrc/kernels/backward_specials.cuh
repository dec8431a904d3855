// What tile/special.cuh leaves to the CUDA backward: after a CTA stored its gradients, it adds the
// NaN and Inf that partial blocks kept out of the products. (Where a CTA sums dq of whole heads,
// its dq has them already.) Seldom run: it reads global memory element by element.
#pragma once

#include "kernels/backward_work.cuh"
#include "tile/softmax.cuh"
#include "tile/special.cuh"

namespace flashattn {

// The threads that do it: `thread` of `threads`, who meet at a named barrier of their own.
struct SpecialThreads {
  int thread, threads, barrier;

  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(barrier, threads); }
};

template <class E, int kBlockM, int kBlockN, int kHeadDim>
struct BackwardSpecials {
  const BackwardWork& work;
  const SpecialThreads& team;
  const BackwardParams& params = work.params;
  const ProblemShape& shape = params.shape;
  const tile::TileCoord& keys = work.keys;
  int rows = min(kBlockN, keys.rows.length - work.first_key);
  int first_head = work.first_head, end_head = first_head + shape.heads_per_group();
  tile::GlobalRows k{params.k, keys.batch, keys.rows, keys.head, shape.headdim};

  __device__ __forceinline__ E* gradient_row(const MutableTensor& grad, int key) const {
    return static_cast<E*>(grad.data) +
           grad.stride.offset(keys.batch, keys.rows.begin + key, keys.head);
  }

  __device__ __forceinline__ void fill_row(const MutableTensor& grad, int key, int headdim,
                                           float value) const {
    E* row = gradient_row(grad, key);
#pragma unroll 1
    for (int col = 0; col < headdim; ++col) row[col] = tile::from_float<E>(value);
  }

  // Keys with a special value in k: their pairs have probability 0, or NaN with their row, and what
  // was computed from the rest of k is neither.
  __device__ __forceinline__ void store_keys() const {
#pragma unroll 1
    for (int i = team.thread; i < rows; i += team.threads) {
      int key = work.first_key + i;
      bool special = false, nan = false;
#pragma unroll 1
      for (int col = 0; col < shape.headdim; ++col) {
        special |= tile::is_special(tile::element_at<E>(k, key, col));
      }
      if (!special) continue;
      KeyRange seen = work.mask.visible_rows(key);
#pragma unroll 1
      for (int head = first_head; head < end_head; ++head)
#pragma unroll 1
        for (int row = seen.begin; row < seen.end; ++row) {
          int64_t at = work.stats_row(params, head) + row;
          nan |= isnan(params.lse_log2[at]) || isnan(params.delta[at]);
        }
      fill_row(params.dk, key, shape.headdim, nan ? tile::kNan : 0.f);
      fill_row(params.dv, key, shape.headdim_v, nan ? tile::kNan : 0.f);
    }
  }

  // dv: the special values of dO in partial blocks.
  __device__ __forceinline__ void add_to_dv() const {
#pragma unroll 1
    for (int index = team.thread; index < rows * shape.headdim_v; index += team.threads) {
      int key = work.first_key + index / shape.headdim_v, col = index % shape.headdim_v;
      float sum = 0.f;
#pragma unroll 1
      for (int head = first_head; head < end_head; ++head) {
        tile::GlobalRows dout(params.dout, keys.batch, work.q_rows, head, shape.headdim_v);
        sum += tile::sum_specials<E>(dout, work.mask.visible_rows(key), work.blocks, kBlockM, col);
      }
      if (sum == 0.f) continue;
      E* dv = gradient_row(params.dv, key) + col;
      *dv = tile::from_float<E>(tile::to_float(*dv) + sum);
    }
  }

  // dq: the special values of k, for the rows with a score of -inf there.
  __device__ __forceinline__ void add_to_dq() const {
#pragma unroll 1
    for (int index = team.thread; index < rows * shape.headdim; index += team.threads) {
      int key = work.first_key + index / shape.headdim, col = index % shape.headdim;
      if (!tile::is_special(tile::element_at<E>(k, key, col))) continue;
      KeyRange seen = work.mask.visible_rows(key);
#pragma unroll 1
      for (int head = first_head; head < end_head; ++head)
#pragma unroll 1
        for (int row = seen.begin; row < seen.end; ++row) {
          atomicAdd(
              work.dq_sums(params, head, kHeadDim) + tile::dq_accum_offset(row, col, kHeadDim),
              tile::kNan);
        }
    }
  }

  // `dq`: to its sums, too.
  __device__ __forceinline__ void store(bool dq) const {
    team.sync();
    if (params.dk.data != nullptr) {
      store_keys();
      team.sync();
      add_to_dv();
    }
    if (dq) add_to_dq();
  }
};

}  // namespace flashattn
