// What a CTA of the CUDA backward works on, whatever its kernel: one block of keys of one KV head,
// for every query that sees them.
#pragma once

#include "common/params.h"
#include "tile/dq_accum.cuh"
#include "tile/scheduler.cuh"

namespace flashattn {

// `blocks`: the query blocks to visit, for each of the group's heads.
struct BackwardWork {
  const BackwardParams& params;
  tile::TileCoord keys;
  int first_key;
  SeqRows q_rows;
  SequenceMask mask;
  BlockRange blocks;

  __device__ __forceinline__ BackwardWork(const BackwardParams& p, int block_m, int block_n)
      : params(p),
        keys(tile::tile_of_cta(p.shape.seqlens_k, p.shape.batch, p.shape.heads_k, block_n)),
        first_key(keys.block * block_n),
        q_rows(tile::uniform(p.shape.seqlens_q.sequence(keys.batch))),
        mask{p.shape.mask, q_rows.length, keys.rows.length},
        blocks(mask.query_blocks(first_key, block_n, block_m)) {}

  __device__ __forceinline__ bool empty() const {
    return keys.block < 0 || first_key >= keys.rows.length;
  }

  __device__ __forceinline__ int blocks_per_head() const { return blocks.end - blocks.begin; }
  __device__ __forceinline__ int steps() const {
    return blocks_per_head() * params.shape.heads_per_group();
  }
  // Query rows before this sequence's, when sequences start groups of rows.
  __device__ __forceinline__ int64_t rows_before(int group) const {
    return params.shape.seqlens_q.grouped_begin(keys.batch, q_rows.begin, group);
  }
  // The row of the workspace where a head's statistics and sums of dq start.
  __device__ __forceinline__ int64_t sums_row(int head) const {
    return head * params.accum_rows + rows_before(kDqRowGroup);
  }
  __device__ __forceinline__ float* dq_sums(int head, int accum_headdim) const {
    return params.dq_accum + sums_row(head) * accum_headdim;
  }
};

// One query block of one head; the heads of the group follow each other.
struct BackwardStep {
  int head;
  int block;
  int index = 0;

  __device__ __forceinline__ explicit BackwardStep(const BackwardWork& work)
      : head(work.keys.head * work.params.shape.heads_per_group()), block(work.blocks.begin) {}

  __device__ __forceinline__ void advance(const BackwardWork& work) {
    ++index;
    if (++block == work.blocks.end) {
      block = work.blocks.begin;
      ++head;
    }
  }
};

}  // namespace flashattn
