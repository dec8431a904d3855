// Matrix products of one warp by mma.m16n8k16. Accumulators: acc[m][n][4] covers rows 16 m and
// columns 8 n; with g = lane / 4 and t = lane % 4, elements 0 and 1 are (row g, columns 2t, 2t+1),
// elements 2 and 3 the same columns of row g + 8. wgmma's accumulators lie in the same way.
#pragma once

#include <cstdint>

#include "ptx/sm80.cuh"
#include "tile/element.cuh"
#include "tile/smem_layout.cuh"

namespace flashattn::tile {

template <int kM, int kN>
using Accumulator = float[kM / 16][kN / 8][4];

// An accumulator rounded to the A operand of a following product: its columns become k, and the
// first index counts steps of 16 of them.
template <int kM, int kN>
using PackedAccumulator = uint32_t[kN / 16][kM / 16][4];

template <int MT, int NT>
__device__ __forceinline__ void clear(float (&acc)[MT][NT][4]) {
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.f;
}

template <int MT, int NT>
__device__ __forceinline__ void scale(float (&acc)[MT][NT][4], float factor) {
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] *= factor;
}

template <class E, int MT, int NT>
__device__ __forceinline__ void pack_accumulator(uint32_t (&packed)[NT / 2][MT][4],
                                                 const float (&acc)[MT][NT][4]) {
#pragma unroll
  for (int k = 0; k < NT / 2; ++k)
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      packed[k][m][0] = pack<E>(acc[m][2 * k][0], acc[m][2 * k][1]);
      packed[k][m][1] = pack<E>(acc[m][2 * k][2], acc[m][2 * k][3]);
      packed[k][m][2] = pack<E>(acc[m][2 * k + 1][0], acc[m][2 * k + 1][1]);
      packed[k][m][3] = pack<E>(acc[m][2 * k + 1][2], acc[m][2 * k + 1][3]);
    }
}

// acc += A B^T over kK columns: A is [m][k] (kRowsThenChunk), B is [n][k] (kChunkThenRows).
template <class E, int kK, int MT, int NT, class TileA, class TileB>
__device__ __forceinline__ void gemm_abt(float (&acc)[MT][NT][4], LaneAddress<TileA> a,
                                         LaneAddress<TileB> b) {
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    uint32_t fa[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) ptx::ldmatrix_x4(fa[m], a.at(16 * m, 16 * k));
#pragma unroll
    for (int n = 0; n < NT / 2; ++n) {
      uint32_t fb[4];
      ptx::ldmatrix_x4(fb, b.at(16 * n, 16 * k));
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        ptx::mma_m16n8k16<E>(acc[m][2 * n], fa[m], fb[0], fb[1]);
        ptx::mma_m16n8k16<E>(acc[m][2 * n + 1], fa[m], fb[2], fb[3]);
      }
    }
  }
}

// acc += A B for one step of k: B is [k][n] (kRowsThenChunk), rows from `row` on. kColStep: warps
// that share B's columns take every kColStep-th group of 16 (LaneAddress's first_col picks which).
template <class E, int kColStep = 1, int MT, int NT, class TileB>
__device__ __forceinline__ void gemm_ab_step(float (&acc)[MT][NT][4], const uint32_t (&fa)[MT][4],
                                             LaneAddress<TileB> b, int row) {
#pragma unroll
  for (int n = 0; n < NT / 2; ++n) {
    uint32_t fb[4];
    ptx::ldmatrix_x4_trans(fb, b.at(row, 16 * kColStep * n));
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      ptx::mma_m16n8k16<E>(acc[m][2 * n], fa[m], fb[0], fb[1]);
      ptx::mma_m16n8k16<E>(acc[m][2 * n + 1], fa[m], fb[2], fb[3]);
    }
  }
}

// acc += A B: A is in registers.
template <class E, int kColStep = 1, int MT, int KT, int NT, class TileB>
__device__ __forceinline__ void gemm_ab(float (&acc)[MT][NT][4], const uint32_t (&a)[KT][MT][4],
                                        LaneAddress<TileB> b) {
#pragma unroll
  for (int k = 0; k < KT; ++k) gemm_ab_step<E, kColStep>(acc, a[k], b, 16 * k);
}

// The A operand of gemm_ab, from shared memory into registers.
template <int MT, int KT, class TileA>
__device__ __forceinline__ void load_a(uint32_t (&a)[KT][MT][4], LaneAddress<TileA> address) {
#pragma unroll
  for (int k = 0; k < KT; ++k)
#pragma unroll
    for (int m = 0; m < MT; ++m) ptx::ldmatrix_x4(a[k][m], address.at(16 * m, 16 * k));
}

// acc += A^T B over kK: A is [k][m] in shared memory (kChunkThenRows).
template <class E, int kK, int kColStep, int MT, int NT, class TileA, class TileB>
__device__ __forceinline__ void gemm_atb(float (&acc)[MT][NT][4], LaneAddress<TileA> a,
                                         LaneAddress<TileB> b) {
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    uint32_t fa[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) ptx::ldmatrix_x4_trans(fa[m], a.at(16 * k, 16 * m));
    gemm_ab_step<E, kColStep>(acc, fa, b, 16 * k);
  }
}

}  // namespace flashattn::tile
