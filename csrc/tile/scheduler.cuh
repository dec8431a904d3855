// Which tile a CTA works on. Grids are one-dimensional (B and H may exceed 65535); packed lengths
// are read on the device, so a packed grid is an upper bound and its last CTAs find nothing.
#pragma once

#include <cstdint>

#include "common/seqlen.h"

namespace flashattn::tile {

// All lanes hold the same values; the compiler learns it from the shuffle, and keeps what follows
// from them in uniform registers.
__device__ __forceinline__ SeqRows uniform(const SeqRows& rows) {
  return {__shfl_sync(~0u, rows.begin, 0), __shfl_sync(~0u, rows.length, 0)};
}

struct TileCoord {
  int64_t batch;
  int head;
  int block;   // of queries (forward) or keys (backward) in the sequence; -1: nothing to do
  int blocks;  // of that sequence
  SeqRows rows;

  __device__ __forceinline__ TileCoord uniform() const {
    return {__shfl_sync(~0u, batch, 0), __shfl_sync(~0u, head, 0), __shfl_sync(~0u, block, 0),
            __shfl_sync(~0u, blocks, 0), tile::uniform(rows)};
  }
};

// Finds block `index` among all sequences' blocks, 32 sequences at a time; every warp does it for
// itself.
__device__ inline TileCoord find_packed_block(const SeqLens& lens, int64_t batch, int block_rows,
                                              int64_t index) {
  int lane = threadIdx.x % 32;
  int64_t before = 0;
  for (int64_t first = 0; first < batch; first += 32) {
    int64_t b = first + lane;
    int blocks = b < batch ? (lens.sequence(b).length + block_rows - 1) / block_rows : 0;
    int inclusive = blocks;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(~0u, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    int total = __shfl_sync(~0u, inclusive, 31);
    if (index < before + total) {
      int within = static_cast<int>(index - before);
      int owner = __popc(__ballot_sync(~0u, inclusive <= within));
      int start = __shfl_sync(~0u, inclusive - blocks, owner);
      int count = __shfl_sync(~0u, blocks, owner);
      return {first + owner, 0, within - start, count, lens.sequence(first + owner)};
    }
    before += total;
  }
  return {0, 0, -1, 0, {0, 0}};
}

// Number of blocks a head: the rows of all sequences, an upper bound when packed.
FLASHATTN_HOST_DEVICE int64_t blocks_per_head(const SeqLens& lens, int64_t batch, int block_rows) {
  return lens.packed() ? lens.rows / block_rows + batch
                       : batch * ((lens.rows + block_rows - 1) / block_rows);
}

// Items in the order in which they start: `heads_together` heads of all (batch, head) take turns,
// item by item, so that K and V of few heads at a time are in L2. With 1, a head's items follow
// each other; those of packed sequences always do so. `rotated`: a head's items start at another
// one in each round of CTAs. An item is `parts` blocks of block_rows rows: `block` of the result
// counts items.
__device__ inline TileCoord ordered_item(const SeqLens& lens, int64_t batch, int heads,
                                         int block_rows, int parts, int heads_together,
                                         bool rotated, uint32_t index) {
  int item_rows = block_rows * parts;
  if (lens.packed()) {
    uint32_t per_head = static_cast<uint32_t>(blocks_per_head(lens, batch, item_rows));
    TileCoord item = find_packed_block(lens, batch, item_rows, index % per_head);
    item.head = static_cast<int>(index / per_head);
    return item;
  }
  uint32_t blocks = static_cast<uint32_t>((lens.rows + block_rows - 1) / block_rows);
  uint32_t items = (blocks + parts - 1) / parts;
  uint32_t group = index / (items * heads_together), within = index % (items * heads_together);
  uint32_t first_head = group * heads_together;
  uint32_t here =
      min(static_cast<uint32_t>(heads_together), static_cast<uint32_t>(batch) * heads - first_head);
  uint32_t batch_head = first_head + within % here, b = batch_head / heads, item = within / here;
  // A CTA takes every gridDim.x-th item: the same of every head where one number divides the other.
  // So with each round of CTAs they move on by one.
  if (rotated) item = (item + batch_head * items / gridDim.x) % items;
  return {b, static_cast<int>(batch_head % heads), static_cast<int>(item), static_cast<int>(blocks),
          lens.sequence(b)};
}

// Tiles of one head follow each other, so that they share its other operand in L2.
__device__ inline TileCoord ordered_tile(const SeqLens& lens, int64_t batch, int heads,
                                         int block_rows, int64_t index) {
  if (lens.packed()) {
    int64_t per_head = blocks_per_head(lens, batch, block_rows);
    TileCoord tile = find_packed_block(lens, batch, block_rows, index % per_head);
    tile.head = static_cast<int>(index / per_head);
    return tile.uniform();
  }
  int blocks = static_cast<int>((lens.rows + block_rows - 1) / block_rows);
  int block = static_cast<int>(index % blocks);
  int64_t batch_head = index / blocks;
  int64_t b = batch_head / heads;
  TileCoord tile{b, static_cast<int>(batch_head % heads), block, blocks, lens.sequence(b)};
  return tile.uniform();
}

// Where each CTA has one.
__device__ inline TileCoord tile_of_cta(const SeqLens& lens, int64_t batch, int heads,
                                        int block_rows) {
  return ordered_tile(lens, batch, heads, block_rows, blockIdx.x);
}

}  // namespace flashattn::tile
