#include <limits>

#include "ops/inputs.h"
#include "ops/ops.h"

namespace flashattn {

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const std::optional<Tensor>& cu_seqlens_q,
                                   const std::optional<Tensor>& cu_seqlens_k,
                                   const std::optional<Tensor>& seqused_q,
                                   const std::optional<Tensor>& seqused_k, double softmax_scale,
                                   int64_t window_left, int64_t window_right) {
  const Inputs inputs = {
      q,           k,           v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale,
      window_left, window_right};
  const View& query = inputs.q.view;
  ForwardParams params;
  params.shape = check_inputs(inputs);

  std::optional<DeviceGuard> guard;
  if (query.is_cuda()) guard.emplace(query.device_index);
  Tensor out = empty(out_sizes(query, params.shape), query.dtype, query);
  Tensor lse = empty(lse_sizes(query, params.shape), aoti_torch_dtype_float32(), query);
  const bool nothing = nothing_to_attend(params.shape);
  if (nothing || has_rows_outside(params.shape.seqlens_q)) {
    fill(out, 0);
    fill(lse, -std::numeric_limits<double>::infinity());
  }
  if (nothing) return {out, lse};

  params.q = const_tensor(query);
  params.k = const_tensor(inputs.k.view);
  params.v = const_tensor(inputs.v.view);
  params.out = mutable_tensor(out);
  params.lse = row_stats(view(lse));
  const Executor executor = make_executor(query);
  const Problem problem = make_problem(params.shape, {params.q, params.k, params.v});
  run_forward(make_forward_plan(problem, device_of(executor)), params, executor);
  return {out, lse};
}

}  // namespace flashattn
