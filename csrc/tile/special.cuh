// NaN and Inf behind a mask. On the tensor cores a hidden pair contributes 0 * B, which is NaN
// where B isn't finite; but a NaN must reach the rows that see it and no others. So in partial
// blocks the special values of B are set to 0 in shared memory, by the thread that copied them
// there (sm_90a: by helpers, TMA copies) and before the barrier that publishes them; afterwards the
// kernel adds them, from global memory, to the results that see them. In full blocks the products
// do the right thing by themselves.
#pragma once

#include "common/mask.h"
#include "ptx/sm90.cuh"
#include "tile/copy.cuh"

namespace flashattn::tile {

// Nonzero if one of the pair's two elements is NaN or Inf: its exponent is all ones, and adding 1
// to the exponent carries into the sign.
template <class E>
__device__ __forceinline__ uint32_t special_bits(uint32_t pair);
template <>
__device__ __forceinline__ uint32_t special_bits<__nv_bfloat16>(uint32_t pair) {
  return ((pair & 0x7fff7fff) + 0x00800080) & 0x80008000;
}
template <>
__device__ __forceinline__ uint32_t special_bits<__half>(uint32_t pair) {
  return ((pair & 0x7fff7fff) + 0x04000400) & 0x80008000;
}

// Of 16 bytes: those of their pairs together.
template <class E>
__device__ __forceinline__ uint32_t special_bits(const uint4& x) {
  return special_bits<E>(x.x) | special_bits<E>(x.y) | special_bits<E>(x.z) | special_bits<E>(x.w);
}

template <class E>
__device__ __forceinline__ uint32_t without_special(uint32_t pair) {
  uint32_t bits = special_bits<E>(pair);
  return pair & ~(bits & 0x8000 ? 0xffffu : 0u) & ~(bits & 0x80000000 ? 0xffff0000u : 0u);
}
template <class E>
__device__ __forceinline__ uint4 without_special(const uint4& x) {
  return make_uint4(without_special<E>(x.x), without_special<E>(x.y), without_special<E>(x.z),
                    without_special<E>(x.w));
}

// Zeroes the special values that this thread copied; returns whether there was one. Looks at all of
// it before it branches: the loads wait for each other otherwise.
template <class E, class Tile, int kThreads>
__device__ __forceinline__ bool zero_specials(uint32_t tile) {
  ThreadChunks<Tile, kThreads> chunks;
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < chunks.kRows; ++i)
#pragma unroll
    for (int slab = 0; slab < chunks.kSlabs; ++slab) {
      bits |= special_bits<E>(ptx::load_shared_v4(tile + chunks.offset(i, slab)));
    }
  if (bits == 0) return false;
#pragma unroll 1
  for (int i = 0; i < chunks.kRows * chunks.kSlabs; ++i) {
    uint32_t address = tile + chunks.offset(i / chunks.kSlabs, i % chunks.kSlabs);
    ptx::store_shared_v4(address, without_special<E>(ptx::load_shared_v4(address)));
  }
  return true;
}

// Whether one of `threads` threads finds a NaN or Inf in its share of a whole tile. Kernels wait
// for the answer: one instruction a pair, and no branch that later loads would have to wait for.
template <class E, class Tile>
__device__ __forceinline__ bool any_special(uint32_t tile, int thread, int threads) {
  constexpr int kChunks = Tile::kBytes / 16;
  uint4 max = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int first = 0; first < kChunks; first += threads) {
    int chunk = first + thread;
    bool inside = first + threads <= kChunks || chunk < kChunks;
    uint4 x = ptx::load_shared_v4(tile + 16 * (inside ? chunk : thread));
    max = make_uint4(ptx::max_magnitudes<E>(max.x, x.x), ptx::max_magnitudes<E>(max.y, x.y),
                     ptx::max_magnitudes<E>(max.z, x.z), ptx::max_magnitudes<E>(max.w, x.w));
  }
  return special_bits<E>(max) != 0;
}

// Zeroes the special values of a whole tile whose slabs are 64 columns wide; returns whether this
// thread, one of `threads`, found one in the first `rows` rows.
template <class E, class Tile>
__device__ __forceinline__ bool zero_specials_below(uint32_t tile, int rows, int thread,
                                                    int threads) {
  static_assert(Tile::kSlabCols == 64, "8 chunks of 16 bytes a row");
  if (!any_special<E, Tile>(tile, thread, threads)) return false;
  bool found = false;
#pragma unroll 1
  for (int chunk = thread; chunk < Tile::kBytes / 16; chunk += threads) {
    uint4 x = ptx::load_shared_v4(tile + 16 * chunk);
    uint4 kept = without_special<E>(x);
    if (kept.x == x.x && kept.y == x.y && kept.z == x.z && kept.w == x.w) continue;
    ptx::store_shared_v4(tile + 16 * chunk, kept);
    found |= chunk / 8 % Tile::kRows < rows;
  }
  return found;
}

template <class E>
__device__ __forceinline__ E element_at(const GlobalRows& rows, int row, int col) {
  return reinterpret_cast<const E*>(rows.data)[row * rows.row_stride + col];
}

template <class E>
__device__ __forceinline__ bool is_special(E x) {
  return special_bits<E>(reinterpret_cast<const uint16_t&>(x)) != 0;
}

// The sum of the special values in column `col` of `rows`, over `seen` and the partial blocks; 0 if
// there is none.
template <class E>
__device__ inline float sum_specials(const GlobalRows& rows, KeyRange seen,
                                     const BlockRange& blocks, int block_rows, int col) {
  float sum = 0.f;
#pragma unroll 1
  for (int row = seen.begin; row < seen.end; ++row) {
    if (!blocks.partial(row / block_rows)) continue;
    E x = element_at<E>(rows, row, col);
    if (is_special(x)) sum += to_float(x);
  }
  return sum;
}

}  // namespace flashattn::tile
