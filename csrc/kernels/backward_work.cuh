// What the CUDA backward works on, whatever its kernel: one block of keys of one KV head, for every
// query that sees them.
#pragma once

#include "common/params.h"
#include "tile/dq_accum.cuh"
#include "tile/scheduler.cuh"

namespace flashattn {

struct BackwardItem {
  tile::TileCoord keys;
  int first_key;
  int first_head;  // the first query head of the group
  SeqRows q_rows;
  int64_t stats_begin;  // where the sequence starts in a head's statistics
  int64_t dq_begin;     // where the first head's sums of dq start
  int64_t dq_rows;      // and how many rows lie between heads'
  SequenceMask mask;
  BlockRange blocks;  // the query blocks to visit, for each of the group's heads

  __device__ __forceinline__ int blocks_per_head() const { return blocks.end - blocks.begin; }
  // The row of the workspace where a head's statistics start.
  __device__ __forceinline__ int64_t stats_row(const BackwardParams& params, int head) const {
    return head * params.accum_rows + stats_begin;
  }
  // Where a head's sums of dq start.
  __device__ __forceinline__ float* dq_sums(const BackwardParams& params, int head,
                                            int accum_headdim) const {
    return params.dq_accum + (dq_begin + (head - first_head) * dq_rows) * accum_headdim;
  }
};

// The same, made by a CTA.
struct BackwardWork : BackwardItem {
  const BackwardParams& params;

  __device__ __forceinline__ BackwardWork(const BackwardParams& p, const tile::TileCoord& tile,
                                          int block_m, int block_n)
      : params(p) {
    const ProblemShape& shape = p.shape;
    keys = tile;
    first_key = keys.block * block_n;
    first_head = keys.head * shape.heads_per_group();
    q_rows = tile::uniform(shape.seqlens_q.sequence(keys.batch));
    stats_begin = rows_before(kDqRowGroup);
    dq_begin = stats_row(p, first_head);
    dq_rows = p.accum_rows;
    mask = {shape.mask, q_rows.length, keys.rows.length};
    blocks = mask.query_blocks(first_key, block_n, block_m);
  }
  __device__ __forceinline__ BackwardWork(const BackwardParams& p, const BackwardItem& item)
      : BackwardItem(item), params(p) {}

  __device__ __forceinline__ bool empty() const {
    return keys.block < 0 || first_key >= keys.rows.length;
  }
  __device__ __forceinline__ int steps() const {
    return blocks_per_head() * params.shape.heads_per_group();
  }
  // Query rows before this sequence's, when sequences start groups of rows.
  __device__ __forceinline__ int64_t rows_before(int group) const {
    return params.shape.seqlens_q.grouped_begin(keys.batch, q_rows.begin, group);
  }
};

// One query block of one head; the heads of the group follow each other.
struct BackwardStep {
  int head;
  int block;
  int index = 0;

  __device__ __forceinline__ explicit BackwardStep(const BackwardItem& item)
      : head(item.first_head), block(item.blocks.begin) {}

  __device__ __forceinline__ void advance(const BackwardItem& item) {
    ++index;
    if (++block == item.blocks.end) {
      block = item.blocks.begin;
      ++head;
    }
  }
};

}  // namespace flashattn
