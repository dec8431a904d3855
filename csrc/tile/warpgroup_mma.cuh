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

// acc += A B: A is in registers, B is [k][n] of TileB.
template <class E, class TileB, int KT, int NT>
__device__ __forceinline__ void start_ab(float (&acc)[1][NT][4], const uint32_t (&a)[KT][1][4],
                                         uint64_t b) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < KT; ++i) {
    ptx::Wgmma<E, 8 * NT>::rs(acc[0], a[i][0], ptx::wgmma_advance(b, i * 16 * TileB::kPitch));
  }
  ptx::wgmma_commit();
}

}  // namespace flashattn::tile
