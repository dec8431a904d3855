// Matrix products of a warpgroup by wgmma.m64nNk16, started and not awaited: each is a group of its
// own. Accumulators are those of tile/fragment.cuh. Operands in shared memory are named by the
// descriptor of their first tile row and column.
#pragma once

#include "ptx/sm90.cuh"
#include "tile/smem_layout.cuh"

namespace flashattn::tile {

// acc = A B^T over kK columns: A is [64][k] of TileA, B is [n][k] of TileB.
template <class E, class TileA, class TileB, int kK, int NT>
__device__ __forceinline__ void start_abt(float (&acc)[1][NT][4], uint64_t a, uint64_t b) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kK / 16; ++i) {
    int slab = i / 4, within = i % 4 * 32;
    ptx::Wgmma<E, 8 * NT>::ss(acc[0], ptx::wgmma_advance(a, slab * TileA::kSlabBytes + within),
                              ptx::wgmma_advance(b, slab * TileB::kSlabBytes + within), i > 0);
  }
  ptx::wgmma_commit();
}

// acc += A B: A is in registers, B is [k][n] of TileB. kParts: instructions side by side, where one
// would have more accumulators than a thread has registers at the kernel's start.
template <class E, class TileB, int kParts = 1, int KT, int NT>
__device__ __forceinline__ void start_ab(float (&acc)[1][NT][4], const uint32_t (&a)[KT][1][4],
                                         uint64_t b) {
  constexpr int kTiles = NT / kParts;
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < KT; ++i)
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      int offset = i * 16 * TileB::kPitch + part * kTiles / 8 * TileB::kSlabBytes;
      ptx::Wgmma<E, 8 * kTiles>::rs(reinterpret_cast<float(&)[kTiles][4]>(acc[0][part * kTiles]),
                                    a[i][0], ptx::wgmma_advance(b, offset));
    }
  ptx::wgmma_commit();
}

}  // namespace flashattn::tile
