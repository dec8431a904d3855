// Tiles that TMA brings: boxes of 64 columns, one below the other.
#pragma once

#include "ptx/sm90.cuh"

namespace flashattn::tile {

// One thread starts the copies of a tile, whose bytes `barrier` counts. kUnroll: 1 where registers
// are few.
template <class Tile, int kUnroll = Tile::kCols / 64>
__device__ __forceinline__ void start_load(const void* tensor_map, uint32_t tile, uint32_t barrier,
                                           int row, int head, int batch) {
#pragma unroll kUnroll
  for (int slab = 0; slab < Tile::kCols / 64; ++slab) {
    ptx::tma_load_4d(tile + slab * Tile::kSlabBytes, tensor_map, barrier, 64 * slab, row, head,
                     batch);
  }
}

}  // namespace flashattn::tile
