// What both ops are given, checked and put into the kernels' words. Every misfit of q, k and v is
// refused here, before anything runs; Python only says it better.
#pragma once

#include <initializer_list>
#include <optional>

#include "dispatch/dispatch.h"
#include "ops/stable.h"

namespace flashattn {

struct Inputs {
  Operand q, k, v;  // (batch, seqlen, heads, headdim), or (total, heads, headdim) with cu_seqlens
  std::optional<Operand> cu_seqlens_q, cu_seqlens_k;  // (batch + 1,) int32
  std::optional<Operand> seqused_q, seqused_k;        // (batch,) int32
  double softmax_scale;
  int64_t window_left, window_right;
};

// Throws std::runtime_error when the inputs do not fit each other.
ProblemShape check_inputs(const Inputs& inputs);

// Throws unless `tensor` has these sizes, this dtype and the device of q.
void check_tensor(const char* name, const View& tensor, const Sizes& sizes, int32_t dtype,
                  const View& q);

Sizes sizes_of(const View& tensor);
Sizes out_sizes(const View& q, const ProblemShape& shape);
Sizes lse_sizes(const View& q, const ProblemShape& shape);

// No query, or no key: nothing to launch.
bool nothing_to_attend(const ProblemShape& shape);

// Whether some rows may lie outside all sequences: no kernel writes those.
bool has_rows_outside(const SeqLens& lengths);

// A (.., rows, heads, headdim) tensor for a kernel.
ConstTensor const_tensor(const View& tensor);
MutableTensor mutable_tensor(const Tensor& tensor);

// A (batch, heads, rows) or (heads, rows) fp32 tensor for a kernel.
RowStats row_stats(const View& tensor);

// The planner's view of a call.
Problem make_problem(const ProblemShape& shape, std::initializer_list<ConstTensor> tensors);

// The current stream of the tensors' device, or torch's CPU threads.
Executor make_executor(const View& tensor);

}  // namespace flashattn
