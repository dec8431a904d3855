// Scores once more, by mma.m16n8k16 and from global memory: for the rare block whose scores turned
// into probabilities that overflow. wgmma can't be used under a condition, and the block's keys may
// have left shared memory.
#pragma once

#include "tile/copy.cuh"

namespace flashattn::tile {

// Four elements side by side, at any address.
__device__ __forceinline__ uint2 load_4(const uint16_t* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint2*>(from);
  uint2 x = make_uint2(0, 0);
#pragma unroll 1
  for (int i = 3; i >= 0; --i) x = make_uint2(x.x << 16 | from[i], x.y << 16 | x.x >> 16);
  return x;
}

// Of the 16 queries in rows [row, row + 16) of the tile and the 8 keys from first_key on; a
// multiple of 4 columns. kUnroll loads are under way at a time. Both operands take the columns in
// the same order, 4 in a row for each lane of a quad.
template <class E, class TileQ, int kHeadDim, int kUnroll>
__device__ __forceinline__ void rescore(float (&scores)[1][1][4], uint32_t q_tile, int row,
                                        const GlobalRows& keys, int first_key) {
  int group = threadIdx.x % 32 / 4, first_col = threadIdx.x % 4 * 4;
  int key = min(first_key + group, keys.rows - 1);  // past the end: masked afterwards
  const uint16_t* from = keys.data + key * keys.row_stride;
  clear(scores);
#pragma unroll kUnroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    int col = first_col + 16 * step;
    uint2 b = make_uint2(0, 0);
    if (col < keys.cols) b = load_4(from + col, keys.aligned16);
    uint32_t q = q_tile + TileQ::element_offset(row + group, col);
    uint2 low = ptx::load_shared_v2(q), high = ptx::load_shared_v2(q + 8 * TileQ::kPitch);
    uint32_t a[4] = {low.x, high.x, low.y, high.y};
    ptx::mma_m16n8k16<E>(scores[0][0], a, b.x, b.y);
  }
}

}  // namespace flashattn::tile
