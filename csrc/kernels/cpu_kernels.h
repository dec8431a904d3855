// The CPU kernels as their drivers (forward_cpu.cpp, backward_cpu.cpp) see them: one function a
// task, compiled once for each instruction set (instances/cpu_*.cpp), chosen at run time.
#pragma once

#include <cstdint>

#include "common/params.h"

namespace flashattn {

// fp32 values in rows of this stride start on different cache sets: whole cache lines, an odd
// number of them.
constexpr int padded_stride(int columns) { return (((columns + 15) / 16) | 1) * 16; }

// A tensor's rows in fp32 and without gaps, (heads, rows, stride): read many times, they are copied
// once. In the tensor a head's rows lie a stride apart, each on a page of its own at worst.
struct PackedRows {
  // After each sequence: kernels read and write whole tiles.
  static constexpr int kSpareRows = 16;

  float* data = nullptr;
  int64_t rows = 0;
  int stride = 0;

  // Where a sequence starts that starts at row `begin` of its tensor.
  static int64_t first_row(const SeqLens& seqlens, int64_t batch, int64_t begin) {
    return (seqlens.packed() ? begin : batch * seqlens.rows) + batch * kSpareRows;
  }
  static int64_t count_rows(const SeqLens& seqlens, int64_t batch) {
    return first_row(seqlens, batch, seqlens.rows);
  }
  float* at(int64_t head, int64_t row) const { return data + (head * rows + row) * stride; }
};

struct ForwardWorkspace {
  PackedRows k, v;  // null: each task reads the tensors
};

struct BackwardWorkspace {
  PackedRows q, dout;
  PackedRows delta;     // stride 1: <dout, out> - dlse
  PackedRows lse_rest;  // stride 1, zeroed: what fp32 leaves out of lse
  PackedRows dq;        // (splits * heads_q, rows, headdim), zeroed; null: dq isn't wanted
  int splits = 1;
};

// `row_begin` counts from the start of a sequence, in steps of tile_config.h's blocks.
struct CpuKernels {
  const char* isa;

  // Copies a block of keys to the workspace.
  void (*pack_keys)(const ForwardParams&, const ForwardWorkspace&, int64_t batch, int head_k,
                    int row_begin);
  // out and lse of a block of queries.
  void (*forward)(const ForwardParams&, const ForwardWorkspace&, int64_t batch, int head,
                  int row_begin, float* scratch);
  int64_t (*forward_scratch)(const ProblemShape&);  // floats

  // q, dout and delta of a block of queries.
  void (*prepare_backward)(const BackwardParams&, const BackwardWorkspace&, int64_t batch, int head,
                           int row_begin);
  // lse_rest of a block of queries (the forward's), where lse is large.
  void (*refine_lse)(const BackwardParams&, const BackwardWorkspace&, int64_t batch, int head,
                     int row_begin, float* scratch);
  // dk and dv of the key blocks split, split + splits, ... of one sequence and KV head, and their
  // part of dq.
  void (*backward)(const BackwardParams&, const BackwardWorkspace&, int64_t batch, int head_k,
                   int split, float* scratch);
  int64_t (*backward_scratch)(const ProblemShape&);  // floats
  // dq of a block of queries, from the workspace.
  void (*store_dq)(const BackwardParams&, const BackwardWorkspace&, int64_t batch, int head,
                   int row_begin);
};

// The kernels for the widest vectors that this processor has.
const CpuKernels& cpu_kernels();

namespace cpu_baseline {
extern const CpuKernels kKernels;
}
namespace cpu_avx2 {
extern const CpuKernels kKernels;
}
namespace cpu_avx512 {
extern const CpuKernels kKernels;
}

}  // namespace flashattn
