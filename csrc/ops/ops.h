// The ops of torch.ops.flashattn; library.cpp has their schemas.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "ops/stable.h"

namespace flashattn {

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const std::optional<Tensor>& cu_seqlens_q,
                                   const std::optional<Tensor>& cu_seqlens_k,
                                   const std::optional<Tensor>& seqused_q,
                                   const std::optional<Tensor>& seqused_k, double softmax_scale,
                                   int64_t window_left, int64_t window_right);

std::tuple<Tensor, Tensor, Tensor> backward(
    const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& out, const Tensor& lse,
    const std::optional<Tensor>& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
    const std::optional<Tensor>& seqused_q, const std::optional<Tensor>& seqused_k,
    double softmax_scale, int64_t window_left, int64_t window_right, bool deterministic,
    bool need_dq, bool need_dkv);

std::string build_info();

}  // namespace flashattn
