// Tiles of 16-bit elements in shared memory, swizzled so that ldmatrix and 16-byte copies meet no
// bank conflict. A tile is cut into slabs of 64 columns (128-byte rows) or, where the columns are
// no multiple of 64, of 32 columns (64-byte rows); within a slab the 16-byte chunks of a row are
// permuted by an exclusive or with the row's number.
#pragma once

#include <cstdint>

#include "ptx/sm80.cuh"

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

// What a lane adds to the address of a 16x16 piece, for each of the pieces side by side in a slab.
// All tiles of one slab width share these few registers: the swizzle has the period of the rows'
// steps. `first_col`, a multiple of 16, moves the pieces within the slab.
template <int kSlabCols>
struct LaneOffsets {
  static constexpr int kPieces = kSlabCols / 16;
  uint32_t bytes[kPieces];

  __device__ __forceinline__ explicit LaneOffsets(LaneOrder order, int first_col = 0) {
    using Slab = SmemTile<16, kSlabCols>;
    int lane = threadIdx.x % 32;
    bool rows_first = order == LaneOrder::kRowsThenChunk;
    int row = rows_first ? lane % 16 : lane % 8 + lane / 16 * 8;
    int second_chunk = rows_first ? lane / 16 : lane / 8 % 2;
    uint32_t chunk = (second_chunk << 4) ^ (first_col * 2) ^ Slab::swizzle(row);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      // Opaque, or the compiler spreads the sum over each tile's address again.
      bytes[piece] = ptx::opaque(row * Slab::kPitch + (chunk ^ (piece * 32)));
    }
  }
};

// One lane's addresses for ldmatrix over a tile from row `first_row` (a multiple of 16) on.
template <class Tile>
struct LaneAddress {
  uint32_t tile;  // the same in all lanes: it stays in a uniform register
  LaneOffsets<Tile::kSlabCols> lanes;

  __device__ __forceinline__ LaneAddress(uint32_t tile_address, int first_row,
                                         const LaneOffsets<Tile::kSlabCols>& lane_offsets)
      : tile(tile_address + first_row * Tile::kPitch), lanes(lane_offsets) {}

  // Address of the 16x16 piece at (first_row + row, col), both multiples of 16. With a first_col in
  // the offsets, the piece's column is the exclusive or of the two.
  __device__ __forceinline__ uint32_t at(int row, int col) const {
    constexpr int kSlabCols = Tile::kSlabCols;
    return lanes.bytes[col % kSlabCols / 16] + tile + (col / kSlabCols) * Tile::kSlabBytes +
           row * Tile::kPitch;
  }

  // The same where `col` is known at run time only, and the offsets have no first_col.
  __device__ __forceinline__ uint32_t at_any(int row, int col) const {
    constexpr int kSlabCols = Tile::kSlabCols;
    return (lanes.bytes[0] ^ (col % kSlabCols * 2)) + tile + (col / kSlabCols) * Tile::kSlabBytes +
           row * Tile::kPitch;
  }
};

// The warp's number, known to be the same in all its lanes.
__device__ __forceinline__ int warp_index() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }

}  // namespace flashattn::tile
