// Scores of a warp's 16 queries once more, by mma.m16n8k16 and from global memory: for the rare
// block whose scores turned into probabilities that overflow. wgmma can't be used under a
// condition, and the block's keys may have left shared memory.
#pragma once

#include "tile/copy.cuh"

namespace flashattn::tile {

// Four elements side by side.
template <bool kAligned>
__device__ __forceinline__ uint2 load_4(const uint16_t* from) {
  if constexpr (kAligned) {
    return *reinterpret_cast<const uint2*>(from);
  } else {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = from[i];
    return make_uint2(x[0] | x[1] << 16, x[2] | x[3] << 16);
  }
}

// kAligned: 8-byte loads reach the keys. kTogether: steps whose loads wait together.
template <class E, class TileQ, int kHeadDim, bool kAligned, int kTogether, int NT>
__device__ __forceinline__ void rescore_keys(float (&scores)[1][NT][4], uint32_t q_tile, int row,
                                             const GlobalRows& keys, int first_key) {
  int group = threadIdx.x % 32 / 4, first_col = threadIdx.x % 4 * 4;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    int key = min(first_key + 8 * n + group, keys.rows - 1);  // past the end: masked afterwards
    const uint16_t* from = keys.data + key * keys.row_stride;
#pragma unroll kTogether
    for (int step = 0; step < kHeadDim / 16; ++step) {
      int col = first_col + 16 * step;
      uint2 b = make_uint2(0, 0);
      if (col < keys.cols) b = load_4<kAligned>(from + col);
      uint32_t q = q_tile + TileQ::element_offset(row + group, col);
      uint2 low = ptx::load_shared_v2(q), high = ptx::load_shared_v2(q + 8 * TileQ::kPitch);
      uint32_t a[4] = {low.x, high.x, low.y, high.y};
      ptx::mma_m16n8k16<E>(scores[0][n], a, b.x, b.y);
    }
  }
}

// Queries lie in rows [row, row + 16) of the tile; keys from first_key on, their columns are a
// multiple of 4. Both operands take the columns in the same order, 4 in a row for each lane of a
// quad.
template <class E, class TileQ, int kHeadDim, int NT>
__device__ __forceinline__ void rescore(float (&scores)[1][NT][4], uint32_t q_tile, int row,
                                        const GlobalRows& keys, int first_key) {
  constexpr int kTogether = kHeadDim == 128 ? 4 : 2;  // as many as registers are left for
  clear(scores);
  if (keys.aligned16) {
    rescore_keys<E, TileQ, kHeadDim, true, kTogether>(scores, q_tile, row, keys, first_key);
  } else {
    rescore_keys<E, TileQ, kHeadDim, false, 1>(scores, q_tile, row, keys, first_key);
  }
}

}  // namespace flashattn::tile
