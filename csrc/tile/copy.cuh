// Copies of tiles between global and shared memory. Rows and columns past the end of a tensor are
// zeros in shared memory (0 * Inf would be NaN) and are not stored.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "ptx/sm80.cuh"
#include "tile/element.cuh"
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

// 16-byte copies, asynchronous: the caller commits and waits.
template <class Tile, int kThreads>
__device__ __forceinline__ void load_tile_async(uint32_t tile, const GlobalRows& source,
                                                int first_row) {
  constexpr int kChunks = Tile::kCols / 8;  // a row
  constexpr int kTotal = Tile::kRows * kChunks;
  static_assert(kTotal % kThreads == 0, "threads share a tile's chunks evenly");
  int thread = threadIdx.x;
  if constexpr (kThreads % kChunks == 0) {
    // Every thread keeps its column and steps down the rows.
    constexpr int kRowStep = kThreads / kChunks;
    int row = thread / kChunks, col = thread % kChunks * 8;
    const uint16_t* global = source.data + (first_row + row) * source.row_stride + col;
    uint32_t shared = tile + Tile::chunk_offset(row, col);
    int64_t step = kRowStep * source.row_stride;
    bool whole = first_row + Tile::kRows <= source.rows && Tile::kCols == source.cols;
    bool col_valid = col < source.cols;
#pragma unroll
    for (int i = 0; i < kTotal / kThreads; ++i) {
      // The row step is a multiple of the swizzle's period: only the row's offset changes.
      uint32_t target = kRowStep % 8 == 0 ? shared + i * kRowStep * Tile::kPitch
                                          : tile + Tile::chunk_offset(row + i * kRowStep, col);
      if (whole) {
        ptx::cp_async_16(target, global);
      } else {
        bool valid = col_valid && first_row + row + i * kRowStep < source.rows;
        ptx::cp_async_16(target, valid ? global : source.data, valid);
      }
      global += step;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kTotal / kThreads; ++i) {
      int index = thread + i * kThreads;
      int row = index / kChunks, col = index % kChunks * 8;
      bool valid = col < source.cols && first_row + row < source.rows;
      const uint16_t* global = source.data + (first_row + row) * source.row_stride + col;
      ptx::cp_async_16(tile + Tile::chunk_offset(row, col), valid ? global : source.data, valid);
    }
  }
}

// Element by element, for tensors that 16-byte copies can't reach. Done when it returns, for the
// thread itself.
template <class Tile, int kThreads>
__device__ __noinline__ void load_tile_elements(uint32_t tile, const GlobalRows& source,
                                                int first_row) {
  for (int index = threadIdx.x; index < Tile::kRows * Tile::kCols; index += kThreads) {
    int row = index / Tile::kCols, col = index % Tile::kCols;
    bool valid = col < source.cols && first_row + row < source.rows;
    uint16_t value = valid ? source.data[(first_row + row) * source.row_stride + col] : 0;
    ptx::store_shared_u16(tile + Tile::element_offset(row, col), value);
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
    for (int index = lane; index < kRows * Tile::kCols; index += kLanes) {
      int row = first_row + index / Tile::kCols, col = index % Tile::kCols;
      if (row < rows && col < cols) {
        out[row * row_stride + col] = ptx::load_shared_u16(tile + Tile::element_offset(row, col));
      }
    }
  }
}

// Rounds a warp's accumulators into the tile's rows from `first_row` on. kColStep and col_group:
// the warp's columns, as in gemm_ab_step.
template <class E, class Tile, int kColStep = 1, int MT, int NT>
__device__ __forceinline__ void store_accumulator(uint32_t tile, int first_row,
                                                  const float (&acc)[MT][NT][4],
                                                  int col_group = 0) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = first_row + 16 * m + lane / 4 + 8 * half;
        int col = 16 * (n / 2 * kColStep + col_group) + n % 2 * 8;
        ptx::store_shared_u32(tile + Tile::chunk_offset(row, col) + lane % 4 * 4,
                              pack<E>(acc[m][n][2 * half], acc[m][n][2 * half + 1]));
      }
}

}  // namespace flashattn::tile
