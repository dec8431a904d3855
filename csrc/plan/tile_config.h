// THE place of tile sizes: per architecture, pass and head dims. Pure constants, read by the
// planner (to size grids and workspace) and by instances/ (to instantiate kernels).
#pragma once

#include <cstdint>

namespace flashattn {

// A kernel is compiled for these (q/k, v) head dims; a problem takes the first that holds it, the
// columns beyond are zero in shared memory and are not stored.
struct HeadDims {
  int qk, v;
};
constexpr HeadDims kHeadDims[] = {{64, 64},   {96, 96},   {128, 128},
                                  {192, 128}, {192, 192}, {256, 256}};

constexpr int kNoHeadDims = -1;
constexpr int head_dims_index(int headdim, int headdim_v) {
  int index = 0;
  for (const HeadDims& dims : kHeadDims) {
    if (headdim <= dims.qk && headdim_v <= dims.v) return index;
    ++index;
  }
  return kNoHeadDims;
}

struct ForwardTile {
  int block_m;  // queries a CTA
  int block_n;  // keys a step
  int warps;    // each owns block_m / warps queries
  int stages;   // K/V buffers in shared memory
};

constexpr ForwardTile sm80_forward_tile(int headdim) {
  if (headdim <= 64) return {128, 128, 4, 2};
  if (headdim <= 128) return {128, 64, 4, 1};
  return {64, 64, 4, 1};
}

// Q, and `stages` pairs of K and V, in 2-byte elements.
constexpr int64_t sm80_forward_smem_bytes(HeadDims dims) {
  ForwardTile tile = sm80_forward_tile(dims.qk);
  return 2 * (int64_t{tile.block_m} * dims.qk +
              int64_t{tile.stages} * tile.block_n * (dims.qk + dims.v));
}

// Forward on sm_90a: a warpgroup for each 64 queries and one that loads.
struct Sm90ForwardTile {
  int block_m;       // queries a CTA: 128 or 192
  int block_n;       // keys a step
  int stages;        // K/V buffers in shared memory
  int query_stages;  // Q buffers: with two, the next tile's queries are there in time

  constexpr int warps() const { return block_m / 16 + 4; }
};

constexpr Sm90ForwardTile sm90_forward_tile(HeadDims dims) {
  if (dims.qk <= 64) return {192, 128, 3, 2};
  if (dims.qk <= 96) return {192, 96, 2, 2};
  if (dims.qk <= 128) return {128, 128, 2, 2};
  if (dims.v <= 128) return {128, 96, 2, 2};
  if (dims.qk <= 192) return {128, 80, 2, 2};
  return {128, 64, 2, 1};
}

// Tiles have whole slabs of 64 columns.
constexpr int round_up_64(int columns) { return (columns + 63) / 64 * 64; }

// Q, and `stages` pairs of K and V; barriers and what the warps tell each other.
constexpr int64_t sm90_forward_smem_bytes(HeadDims dims) {
  constexpr int64_t kOtherBytes = 1536;
  Sm90ForwardTile tile = sm90_forward_tile(dims);
  int64_t qk = round_up_64(dims.qk), v = round_up_64(dims.v);
  return 2 * (tile.query_stages * tile.block_m * qk + tile.stages * tile.block_n * (qk + v)) +
         kOtherBytes;
}

struct BackwardTile {
  int block_m;  // queries a step
  int block_n;  // keys a CTA
  int warps;
  int stages;           // Q/dO buffers in shared memory
  bool p_in_registers;  // a warp holds dK and dV of its keys, and P^T needs no shared memory
};

// Code for sm_90 uses tiles for its 227 KB of shared memory a CTA; code for sm_80, which runs on
// everything else, fits in the 99 KB of the smallest of them.
enum class SmemClass { k99KB, k227KB };

constexpr BackwardTile sm80_backward_tile(int headdim, SmemClass smem) {
  if (headdim <= 64) return {64, 128, 4, 2, true};
  if (smem == SmemClass::k227KB) {
    if (headdim <= 128) return {64, 128, 8, 2, false};
    return {64, 64, 8, 2, false};
  }
  if (headdim <= 96) return {64, 64, 8, 2, false};
  if (headdim <= 128) return {32, 64, 8, 2, false};
  if (headdim <= 192) return {32, 32, 4, 2, false};
  return {32, 32, 4, 1, false};
}

// sm_90a: two warpgroups compute.
struct Sm90BackwardTile {
  int block_m;       // queries a block
  int block_n;       // keys a tile
  int stages;        // Q/dO buffers
  int queries;       // of a block whose scores a warpgroup has in registers at a time
  int dq_columns;    // of dQ in registers at a time: with fewer, the computing warps have more
  bool by_products;  // one holds dV of 64 keys, the other dK of them; else each both, of 64 keys
  bool has_room;     // for the next tile's keys

  // The next tile's keys in time pay where tiles are short, as those of whole heads are.
  constexpr int key_buffers(bool whole_heads) const { return has_room && whole_heads ? 2 : 1; }
};
constexpr Sm90BackwardTile sm90_backward_tile(HeadDims dims) {
  if (dims.qk <= 64) return {128, 128, 2, 128, 64, false, true};
  if (dims.qk <= 128) return {64, 128, 2, 64, 64, false, true};
  if (dims.v <= 128) return {64, 128, 2, 32, 32, false, false};
  return {64, 64, 2, 64, 64, true, false};
}
constexpr int kSm90BackwardWarps = 16;

// It is compiled for these alone: a problem takes the first that holds it.
constexpr HeadDims sm90_backward_dims(HeadDims dims) {
  if (dims.qk <= 64 && dims.v <= 64) return {64, 64};
  if (dims.qk <= 128 && dims.v <= 128) return {128, 128};
  if (dims.qk <= 192 && dims.v <= 128) return {192, 128};
  return {256, 256};
}

// Sequences of so few keys, half of most tiles, are left to the sm_80 kernel.
constexpr int kSm80BackwardMaxKeys = 64;

// K and V, once or twice; `stages` times Q, dO and their statistics; two buffers of dS and, by
// products, of P; barriers and what the tiles are.
constexpr int64_t sm90_backward_smem_bytes(HeadDims dims, bool whole_heads) {
  constexpr int64_t kRest = 512;
  Sm90BackwardTile tile = sm90_backward_tile(dims);
  int64_t stage = 2 * tile.block_m * (dims.qk + dims.v) + 2 * 4 * tile.block_m;
  int64_t scores = 2 * tile.block_m * tile.block_n;
  return tile.key_buffers(whole_heads) * 2 * tile.block_n * (dims.qk + dims.v) +
         tile.stages * stage + (tile.by_products ? 4 : 2) * scores + kRest;
}

// K and V; `stages` times Q, dO and two fp32 statistics a row; P^T; two buffers of dS^T.
constexpr int64_t sm80_backward_smem_bytes(HeadDims dims, SmemClass smem) {
  BackwardTile tile = sm80_backward_tile(dims.qk, smem);
  int64_t scores = 2 * tile.block_m * tile.block_n;
  int64_t stage = 2 * tile.block_m * (dims.qk + dims.v) + 2 * 4 * tile.block_m;
  return 2 * tile.block_n * (dims.qk + dims.v) + tile.stages * stage +
         (tile.p_in_registers ? 2 : 3) * scores;
}

// CPU: rows and keys a block, the same for every head dim.
struct CpuTile {
  int block_m, block_n;
};
constexpr CpuTile kCpuForwardTile = {192, 128};
constexpr CpuTile kCpuBackwardTile = {64, 144};

}  // namespace flashattn
