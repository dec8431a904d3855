// Copies of tiles between global and shared memory. Rows and columns past the end of a tensor are
// zeros in shared memory (0 * Inf would be NaN) and are not stored.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "ptx/sm80.cuh"
#include "tile/element.cuh"
#include "tile/fragment.cuh"
#include "tile/smem_layout.cuh"

namespace flashattn::tile {

// The rows of one head of one sequence, as a source of tiles.
struct GlobalRows {
  const uint16_t* data;  // 16-bit elements, bits only
  int64_t row_stride;
  int rows;
  int cols;
  bool aligned16;

  __device__ __forceinline__ GlobalRows(const ConstTensor& tensor, int64_t batch, SeqRows seq,
                                        int64_t head, int headdim)
      : data(static_cast<const uint16_t*>(tensor.data) +
             tensor.stride.offset(batch, seq.begin, head)),
        row_stride(tensor.stride.row),
        rows(seq.length),
        cols(headdim),
        aligned16(tensor.aligned16) {}
};

// The 16-byte chunks of a tile that a thread copies: in each slab the same column, and rows in
// steps that have the swizzle's period, so that addresses differ by constants alone.
template <class Tile, int kThreads>
struct ThreadChunks {
  static constexpr int kRowChunks = Tile::kSlabCols / 8;
  static constexpr int kRowStep = kThreads / kRowChunks;
  static constexpr int kRows = Tile::kRows / kRowStep;  // a slab
  static constexpr int kSlabs = Tile::kCols / Tile::kSlabCols;
  static_assert(kThreads % kRowChunks == 0 && kRowStep % 8 == 0, "rows step by the period");
  static_assert(Tile::kRows % kRowStep == 0, "threads share the rows evenly");

  int first_row = threadIdx.x / kRowChunks;
  int first_col = threadIdx.x % kRowChunks * 8;
  uint32_t first_offset = Tile::chunk_offset(first_row, first_col);

  __device__ __forceinline__ int row(int i) const { return first_row + i * kRowStep; }
  __device__ __forceinline__ int col(int slab) const { return first_col + slab * Tile::kSlabCols; }
  __device__ __forceinline__ uint32_t offset(int i, int slab) const {
    return first_offset + i * kRowStep * Tile::kPitch + slab * Tile::kSlabBytes;
  }
};

// 16-byte copies, asynchronous: the caller commits and waits.
template <class Tile, int kThreads>
__device__ __forceinline__ void load_tile_async(uint32_t tile, const GlobalRows& source,
                                                int first_row) {
  ThreadChunks<Tile, kThreads> chunks;
  const uint16_t* global =
      source.data + (first_row + chunks.first_row) * source.row_stride + chunks.first_col;
  int64_t step = chunks.kRowStep * source.row_stride;
  bool whole = first_row + Tile::kRows <= source.rows && Tile::kCols == source.cols;
  if (whole) {
#pragma unroll
    for (int i = 0; i < chunks.kRows; ++i, global += step)
#pragma unroll
      for (int slab = 0; slab < chunks.kSlabs; ++slab) {
        ptx::cp_async_16(tile + chunks.offset(i, slab), global + slab * Tile::kSlabCols);
      }
  } else {
#pragma unroll
    for (int i = 0; i < chunks.kRows; ++i, global += step)
#pragma unroll
      for (int slab = 0; slab < chunks.kSlabs; ++slab) {
        bool valid = first_row + chunks.row(i) < source.rows && chunks.col(slab) < source.cols;
        ptx::cp_async_16(tile + chunks.offset(i, slab),
                         valid ? global + slab * Tile::kSlabCols : source.data, valid);
      }
  }
}

// Element by element, for tensors that 16-byte copies can't reach; the same chunks a thread.
template <class Tile, int kThreads>
__device__ __forceinline__ void load_tile_elements(uint32_t tile, const GlobalRows& source,
                                                   int first_row) {
  ThreadChunks<Tile, kThreads> chunks;
#pragma unroll 1
  for (int i = 0; i < chunks.kRows * chunks.kSlabs; ++i) {
    int row = first_row + chunks.row(i / chunks.kSlabs), col = chunks.col(i % chunks.kSlabs);
    const uint16_t* from = source.data + row * source.row_stride + col;
    int cols = row < source.rows ? source.cols - col : 0;
    uint32_t pairs[4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t low = 2 * pair < cols ? from[2 * pair] : 0;
      uint32_t high = 2 * pair + 1 < cols ? from[2 * pair + 1] : 0;
      pairs[pair] = low | high << 16;
    }
    ptx::store_shared_v4(tile + chunks.offset(i / chunks.kSlabs, i % chunks.kSlabs),
                         make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
  }
}

// The same by any number of threads, in few registers.
template <class Tile>
__device__ __forceinline__ void load_tile_pairs(uint32_t tile, const GlobalRows& source,
                                                int first_row, int thread, int threads) {
#pragma unroll 1
  for (int index = thread; index < Tile::kRows * Tile::kCols / 2; index += threads) {
    int row = index / (Tile::kCols / 2), col = index % (Tile::kCols / 2) * 2;
    const uint16_t* from = source.data + (first_row + row) * source.row_stride + col;
    int cols = first_row + row < source.rows ? source.cols - col : 0;
    uint32_t low = cols > 0 ? from[0] : 0, high = cols > 1 ? from[1] : 0;
    ptx::store_shared_u32(tile + Tile::element_offset(row, col), low | high << 16);
  }
}

template <class Tile, int kThreads>
__device__ __forceinline__ void load_tile(uint32_t tile, const GlobalRows& source, int first_row) {
  if (source.aligned16) {
    load_tile_async<Tile, kThreads>(tile, source, first_row);
  } else {
    load_tile_elements<Tile, kThreads>(tile, source, first_row);
  }
}

// Writes rows [first_row, first_row + kRows) of a tile's `rows` x `cols` part that lies in shared
// memory. `lane` and kLanes: the threads that share the work.
template <class Tile, int kRows, int kLanes>
__device__ __forceinline__ void store_rows(void* data, int64_t row_stride, bool aligned16,
                                           uint32_t tile, int first_row, int rows, int cols,
                                           int lane) {
  uint16_t* out = static_cast<uint16_t*>(data);
  if (aligned16) {
    constexpr int kChunks = Tile::kCols / 8;
#pragma unroll
    for (int index = lane; index < kRows * kChunks; index += kLanes) {
      int row = first_row + index / kChunks, col = index % kChunks * 8;
      if (row < rows && col < cols) {
        *reinterpret_cast<uint4*>(out + row * row_stride + col) =
            ptx::load_shared_v4(tile + Tile::chunk_offset(row, col));
      }
    }
  } else {
#pragma unroll 1
    for (int index = lane; index < kRows * Tile::kCols; index += kLanes) {
      int row = first_row + index / Tile::kCols, col = index % Tile::kCols;
      if (row < rows && col < cols) {
        out[row * row_stride + col] = ptx::load_shared_u16(tile + Tile::element_offset(row, col));
      }
    }
  }
}

// A warp's rounded accumulators to the tile's rows from `first_row` on. kColStep and col_group: the
// warp's columns, as in gemm_ab_step.
template <class Tile, int kColStep = 1, int KT, int MT>
__device__ __forceinline__ void store_packed(uint32_t tile, int first_row,
                                             const uint32_t (&packed)[KT][MT][4],
                                             int col_group = 0) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < KT; ++k)
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int row = first_row + 16 * m + lane / 4 + i % 2 * 8;
        int col = 16 * (k * kColStep + col_group) + i / 2 * 8;
        ptx::store_shared_u32(tile + Tile::chunk_offset(row, col) + lane % 4 * 4, packed[k][m][i]);
      }
}

// The same in a loop, by addresses in ldmatrix's order (kRowsThenChunk), from column `first_col`
// on.
template <class Tile, int KT, int MT>
__device__ __forceinline__ void store_packed(LaneAddress<Tile> to,
                                             const uint32_t (&packed)[KT][MT][4], int first_col) {
#if __CUDA_ARCH__ >= 900
#pragma unroll
  for (int k = 0; k < KT; ++k)
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      ptx::stmatrix_x4(to.at_any(16 * m, first_col + 16 * k), packed[k][m]);
    }
#else
  store_packed<Tile>(to.tile, 0, packed, first_col / 16);
#endif
}

template <class E, class Tile, int kColStep = 1, int MT, int NT>
__device__ __forceinline__ void store_accumulator(uint32_t tile, int first_row,
                                                  const float (&acc)[MT][NT][4],
                                                  int col_group = 0) {
  uint32_t packed[NT / 2][MT][4];
  pack_accumulator<E>(packed, acc);
  store_packed<Tile, kColStep>(tile, first_row, packed, col_group);
}

}  // namespace flashattn::tile
