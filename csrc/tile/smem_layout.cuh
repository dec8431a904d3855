// Tiles of 16-bit elements in shared memory, swizzled so that ldmatrix and 16-byte copies meet no
// bank conflict. A tile is cut into slabs of 64 columns (128-byte rows) or, where the columns are
// no multiple of 64, of 32 columns (64-byte rows); within a slab the 16-byte chunks of a row are
// permuted by an exclusive or with the row's number.
#pragma once

#include <cstdint>

namespace flashattn::tile {

template <int kRows_, int kCols_>
struct SmemTile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kSlabCols = kCols % 64 == 0 ? 64 : 32;
  static constexpr int kPitch = kSlabCols * 2;  // bytes a row of a slab
  static constexpr int kSlabBytes = kRows * kPitch;
  static constexpr int kBytes = kRows * kCols * 2;
  static_assert(kCols % 32 == 0, "columns come in slabs of 64 or 32");
  static_assert(kRows % 8 == 0, "rows come in groups of 8, the period of the swizzle");

  // What a row's chunks are permuted by, in bytes.
  static __device__ __forceinline__ uint32_t swizzle(int row) {
    return kSlabCols == 64 ? (row & 7) << 4 : ((row >> 1) & 3) << 4;
  }

  // Byte offset of the 16-byte chunk that holds column `col` (a multiple of 8).
  static __device__ __forceinline__ uint32_t chunk_offset(int row, int col) {
    return (col / kSlabCols) * kSlabBytes + row * kPitch + (((col % kSlabCols) * 2) ^ swizzle(row));
  }

  static __device__ __forceinline__ uint32_t element_offset(int row, int col) {
    return chunk_offset(row, col & ~7) + (col & 7) * 2;
  }
};

// How the 32 lanes of ldmatrix.x4 spread their row addresses over a 16x16 piece of a tile.
enum class LaneOrder {
  kRowsThenChunk,  // lanes 0-15: rows 0-15 of the first 8 columns; 16-31: of the next 8
  kChunkThenRows,  // lanes 0-7: rows 0-7, first 8 columns; 8-15: next 8 columns; then rows 8-15
};

// One lane's addresses for ldmatrix over a tile: the swizzle is worked out once, what is left is
// one exclusive or a column and constants folded into the instruction.
template <class Tile>
struct LaneAddress {
  uint32_t row_base;  // of the lane's row in the first slab
  uint32_t chunk;     // the lane's chunk, permuted, in bytes

  // first_col: a multiple of 16 below Tile::kSlabCols.
  __device__ __forceinline__ LaneAddress(uint32_t tile, int first_row, LaneOrder order,
                                         int first_col = 0) {
    int lane = threadIdx.x % 32;
    bool rows_first = order == LaneOrder::kRowsThenChunk;
    int row = first_row + (rows_first ? lane % 16 : lane % 8 + lane / 16 * 8);
    int second_chunk = rows_first ? lane / 16 : lane / 8 % 2;
    row_base = tile + row * Tile::kPitch;
    chunk = (second_chunk << 4) ^ (first_col * 2) ^ Tile::swizzle(row);
  }

  // Address of the 16x16 piece at (first_row + row, first_col + col); row and col are multiples of
  // 16, and col has no bits below Tile::kSlabCols in common with first_col.
  __device__ __forceinline__ uint32_t at(int row, int col) const {
    return row_base + (col / Tile::kSlabCols) * Tile::kSlabBytes + row * Tile::kPitch +
           (chunk ^ ((col % Tile::kSlabCols) * 2));
  }
};

}  // namespace flashattn::tile
