#include "ops/inputs.h"
#include "ops/ops.h"

namespace flashattn {

namespace {

// What the forward gave and what came back for it.
struct Outputs {
  Operand dout, out, lse;
  std::optional<Operand> dlse;
};

void check_outputs(const Outputs& outputs, const View& q, const ProblemShape& shape) {
  check_tensor("dout", outputs.dout.view, out_sizes(q, shape), q.dtype, q);
  check_tensor("out", outputs.out.view, out_sizes(q, shape), q.dtype, q);
  const int32_t float32 = aoti_torch_dtype_float32();
  check_tensor("lse", outputs.lse.view, lse_sizes(q, shape), float32, q);
  if (outputs.dlse) check_tensor("dlse", outputs.dlse->view, lse_sizes(q, shape), float32, q);
}

// A gradient like `input`; zero where `zeroed`. Of shape (0,) when it isn't needed.
Tensor make_gradient(const View& input, bool needed, bool zeroed) {
  if (!needed) return empty({1, {0}}, input.dtype, input);
  Tensor gradient = empty(sizes_of(input), input.dtype, input);
  if (zeroed) fill(gradient, 0);
  return gradient;
}

Tensor make_workspace(const Plan& plan, const View& like) {
  const int64_t floats = plan.workspace.bytes / static_cast<int64_t>(sizeof(float));
  return empty({1, {floats}}, aoti_torch_dtype_float32(), like);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> backward(
    const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& out, const Tensor& lse,
    const std::optional<Tensor>& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
    const std::optional<Tensor>& seqused_q, const std::optional<Tensor>& seqused_k,
    double softmax_scale, int64_t window_left, int64_t window_right, bool deterministic,
    bool need_dq, bool need_dkv) {
  const Inputs inputs = {
      q,           k,           v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale,
      window_left, window_right};
  const View &query = inputs.q.view, &key = inputs.k.view, &value = inputs.v.view;
  BackwardParams params;
  params.shape = check_inputs(inputs);
  const Outputs outputs = {dout, out, lse, dlse};
  check_outputs(outputs, query, params.shape);

  std::optional<DeviceGuard> guard;
  if (query.is_cuda()) guard.emplace(query.device_index);
  const bool nothing = nothing_to_attend(params.shape);
  const bool zero_dq = nothing || has_rows_outside(params.shape.seqlens_q);
  const bool zero_dkv = nothing || has_rows_outside(params.shape.seqlens_k);
  Tensor dq = make_gradient(query, need_dq, zero_dq);
  Tensor dk = make_gradient(key, need_dkv, zero_dkv);
  Tensor dv = make_gradient(value, need_dkv, zero_dkv);
  if (nothing || !(need_dq || need_dkv)) return {dq, dk, dv};

  params.q = const_tensor(query);
  params.k = const_tensor(key);
  params.v = const_tensor(value);
  params.out = const_tensor(outputs.out.view);
  params.dout = const_tensor(outputs.dout.view);
  params.lse = row_stats(outputs.lse.view);
  if (outputs.dlse) params.dlse = row_stats(outputs.dlse->view);
  if (need_dq) params.dq = mutable_tensor(dq);
  if (need_dkv) {
    params.dk = mutable_tensor(dk);
    params.dv = mutable_tensor(dv);
  }

  const Executor executor = make_executor(query);
  Problem problem =
      make_problem(params.shape, {params.q, params.k, params.v, params.out, params.dout});
  problem.deterministic = deterministic;
  problem.need_dq = need_dq;
  problem.need_dkv = need_dkv;
  const Plan plan = make_backward_plan(problem, device_of(executor));
  std::optional<Tensor> workspace;
  if (plan.workspace.bytes > 0) workspace = make_workspace(plan, query);
  run_backward(plan, params, workspace ? workspace->mutable_data_ptr() : nullptr, executor);
  return {dq, dk, dv};
}

}  // namespace flashattn
