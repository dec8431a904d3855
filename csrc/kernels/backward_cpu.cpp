// Backward on the CPU: q, dout and delta packed, then dk, dv and sums of dq by key blocks, then dq.
// The kernels are in backward_cpu.h.
#include "kernels/cpu_kernels.h"
#include "kernels/cpu_tasks.h"
#include "kernels/kernels.h"
#include "plan/heuristics.h"
#include "plan/tile_config.h"

namespace flashattn {

void run_backward_cpu(const BackwardParams& params, const ParallelFor& parallel) {
  const CpuKernels& kernels = cpu_kernels();
  const ProblemShape& shape = params.shape;
  constexpr CpuTile kTile = kCpuBackwardTile;

  BackwardWorkspace workspace;
  int64_t key_blocks = (shape.seqlens_k.rows + kTile.block_n - 1) / kTile.block_n;
  workspace.splits = cpu_backward_splits(shape.batch * shape.heads_k, key_blocks, parallel.threads);
  auto allocate = [&](PackedRows& rows, int64_t heads, int stride, Fill fill = Fill::kNone) {
    return allocate_rows(rows, shape.seqlens_q, shape.batch, heads, stride, fill);
  };
  FloatMemory q = allocate(workspace.q, shape.heads_q, padded_stride(shape.headdim));
  FloatMemory dout = allocate(workspace.dout, shape.heads_q, padded_stride(shape.headdim_v));
  FloatMemory delta = allocate(workspace.delta, shape.heads_q, 1);
  FloatMemory lse_rest = allocate(workspace.lse_rest, shape.heads_q, 1, Fill::kZero);
  FloatMemory dq;
  bool dq_wanted = params.dq.data != nullptr;
  if (dq_wanted) {
    int64_t parts = static_cast<int64_t>(workspace.splits) * shape.heads_q;
    dq = allocate(workspace.dq, parts, (shape.headdim + 15) / 16 * 16, Fill::kZero);
  }

  RowBlocks blocks(shape.seqlens_q, shape.batch, shape.heads_q, kTile.block_m);
  run_tasks(parallel, blocks.count(), 0, [&](int64_t index, float*) {
    auto [batch, head, row_begin] = blocks[index];
    kernels.prepare_backward(params, workspace, batch, head, row_begin);
  });

  RowBlocks forward_blocks(shape.seqlens_q, shape.batch, shape.heads_q, kCpuForwardTile.block_m);
  run_tasks(parallel, forward_blocks.count(), kernels.forward_scratch(shape),
            [&](int64_t index, float* scratch) {
              auto [batch, head, row_begin] = forward_blocks[index];
              kernels.refine_lse(params, workspace, batch, head, row_begin, scratch);
            });

  int64_t tasks = shape.batch * shape.heads_k * workspace.splits;
  run_tasks(parallel, tasks, kernels.backward_scratch(shape), [&](int64_t index, float* scratch) {
    int split = static_cast<int>(index % workspace.splits);
    int64_t head_k = index / workspace.splits % shape.heads_k;
    int64_t batch = index / workspace.splits / shape.heads_k;
    kernels.backward(params, workspace, batch, static_cast<int>(head_k), split, scratch);
  });

  if (!dq_wanted) return;
  run_tasks(parallel, blocks.count(), 0, [&](int64_t index, float*) {
    auto [batch, head, row_begin] = blocks[index];
    kernels.store_dq(params, workspace, batch, head, row_begin);
  });
}

}  // namespace flashattn
