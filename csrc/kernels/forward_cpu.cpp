// Forward on the CPU: cuts the problem into blocks of queries. The kernel is in forward_cpu.h.
#include "kernels/cpu_kernels.h"
#include "kernels/cpu_tasks.h"
#include "kernels/kernels.h"
#include "plan/tile_config.h"

namespace flashattn {

void run_forward_cpu(const ForwardParams& params, const ParallelFor& parallel) {
  const CpuKernels& kernels = cpu_kernels();
  const ProblemShape& shape = params.shape;
  RowBlocks blocks(shape.seqlens_q, shape.batch, shape.heads_q, kCpuForwardTile.block_m);

  ForwardWorkspace workspace;
  FloatMemory k_memory, v_memory;
  bool keys_read_again = blocks.count() > shape.batch * shape.heads_k;
  if (keys_read_again) {
    k_memory = allocate_rows(workspace.k, shape.seqlens_k, shape.batch, shape.heads_k,
                             padded_stride(shape.headdim));
    v_memory = allocate_rows(workspace.v, shape.seqlens_k, shape.batch, shape.heads_k,
                             padded_stride(shape.headdim_v));
    RowBlocks keys(shape.seqlens_k, shape.batch, shape.heads_k, kCpuForwardTile.block_n);
    run_tasks(parallel, keys.count(), 0, [&](int64_t index, float*) {
      auto [batch, head_k, row_begin] = keys[index];
      kernels.pack_keys(params, workspace, batch, head_k, row_begin);
    });
  }

  run_tasks(parallel, blocks.count(), kernels.forward_scratch(shape),
            [&](int64_t index, float* scratch) {
              auto [batch, head, row_begin] = blocks[index];
              kernels.forward(params, workspace, batch, head, row_begin, scratch);
            });
}

}  // namespace flashattn
