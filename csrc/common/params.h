// What a kernel is told: plain structs, filled by field name in ops/, read by every kernel. Each
// pointer has its shape beside it. Strides are in elements; the last dimension's is 1; the stride
// of a dimension of size 1 is 0. Packed tensors (total, heads, headdim) have batch stride 0.
#pragma once

#include <cstdint>

#include "common/mask.h"
#include "common/seqlen.h"

namespace flashattn {

enum class DType : int32_t { kFloat16, kBFloat16, kFloat32 };

constexpr int dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

struct Strides {
  int64_t batch = 0, row = 0, head = 0;

  FLASHATTN_HOST_DEVICE int64_t offset(int64_t b, int64_t r, int64_t h) const {
    return b * batch + r * row + h * head;
  }
};

struct ConstTensor {
  const void* data = nullptr;
  Strides stride;
  bool aligned16 = false;  // data, the strides and a row's bytes are multiples of 16 bytes
};

struct MutableTensor {
  void* data = nullptr;  // null: not wanted
  Strides stride;
  bool aligned16 = false;
};

// fp32 values a row and head: (batch, heads, seqlen) or (heads, total), row stride 1.
struct RowStats {
  float* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0;

  FLASHATTN_HOST_DEVICE int64_t offset(int64_t b, int64_t h, int64_t r) const {
    return b * batch_stride + h * head_stride + r;
  }
};

struct ProblemShape {
  DType dtype = DType::kBFloat16;
  int64_t batch = 0;  // sequences
  int heads_q = 0;
  int heads_k = 0;    // divides heads_q: query head h reads KV head h / (heads_q / heads_k)
  int headdim = 0;    // of q and k, 1..256
  int headdim_v = 0;  // of v and out, 1..256
  SeqLens seqlens_q;
  SeqLens seqlens_k;
  MaskSpec mask;
  float softmax_scale = 1.f;

  FLASHATTN_HOST_DEVICE int heads_per_group() const { return heads_q / heads_k; }
};

struct ForwardParams {
  ProblemShape shape;
  ConstTensor q;      // (batch, seqlen_q, heads_q, headdim) or (total_q, heads_q, headdim)
  ConstTensor k;      // (batch, seqlen_k, heads_k, headdim) or (total_k, heads_k, headdim)
  ConstTensor v;      // (batch, seqlen_k, heads_k, headdim_v) or (total_k, heads_k, headdim_v)
  MutableTensor out;  // (batch, seqlen_q, heads_q, headdim_v) or (total_q, heads_q, headdim_v)
  RowStats lse;       // (batch, heads_q, seqlen_q) or (heads_q, total_q), natural log
};

// Rows of the fp32 sums of dq come in groups: tile/dq_accum.cuh says why.
constexpr int kDqRowGroup = 16;

// How the CTAs of a forward share its tiles: CTA c takes the items c, c + ctas, ... An item is one
// tile, or, with two parts, a head's longest tile and its shortest, its second longest and its
// second shortest, and so on: under a causal mask they have equal work.
struct ForwardSchedule {
  int64_t ctas = 0;
  uint32_t items = 0;
  int parts = 1;
  int heads_together = 1;  // see ordered_item() in tile/scheduler.cuh
  bool rotated = false;    // likewise
};

// How the CTAs of a backward for sm_90a take its tiles: as they come. With `whole_heads` a CTA
// takes all tiles of a KV head: it then sums dq by itself, in its own part of the workspace, and
// rounds it.
struct BackwardSchedule {
  int64_t ctas = 0;
  uint32_t tiles = 0;  // of a head one after the other, from the first keys; packed: some are empty
  uint32_t together = 1;  // a piece: what a CTA takes at a time
  bool whole_heads = false;
};

struct BackwardParams {
  ProblemShape shape;
  ConstTensor q, k, v;       // as in ForwardParams
  ConstTensor out;           // as in ForwardParams
  ConstTensor dout;          // the shape of out
  RowStats lse;              // from the forward; read only
  RowStats dlse;             // gradient of lse, null: zero; read only
  MutableTensor dq, dk, dv;  // the shapes of q, k, v; dk and dv always come together
  // Workspace (sizes in plan/plan.h), by rows in groups of kDqRowGroup: row r of sequence b is
  // SeqLens::grouped_begin(b) + r.
  int64_t accum_rows = 0;
  float* dq_accum = nullptr;      // (heads_q, accum_rows, headdim rounded up to the tile's), zeroed
                                  // before; in the order of tile/dq_accum.cuh. whole_heads: (CTAs,
                                  // heads of a group, rows of a sequence, ...), not zeroed
  float* lse_log2 = nullptr;      // (heads_q, accum_rows): tile::LseLog2; +inf: a row sees nothing
  float* delta = nullptr;         // (heads_q, accum_rows): <dout, out> - dlse
  int32_t* dq_turn = nullptr;     // deterministic only, zeroed: (heads_q, dq_turns_per_head, warps)
  int64_t dq_turns_per_head = 0;  // blocks of block_m rows, grouped likewise
  BackwardSchedule schedule;      // kBackwardSm90
  uint32_t* pieces_dealt = nullptr;  // kBackwardSm90, zeroed: those after each CTA's first
};

}  // namespace flashattn
