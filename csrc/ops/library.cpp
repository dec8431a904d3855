// Schemas and implementations of torch.ops.flashattn. The fake implementations and autograd are
// Python's (flashattn/_fakes.py, flashattn/_autograd.py).
#include "ops/ops.h"

STABLE_TORCH_LIBRARY(flashattn, m) {
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
      "Tensor? seqused_q, Tensor? seqused_k, float softmax_scale, int window_left, "
      "int window_right) -> (Tensor out, Tensor lse)");
  m.def(
      "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
      "float softmax_scale, int window_left, int window_right, bool deterministic, bool need_dq, "
      "bool need_dkv) -> (Tensor dq, Tensor dk, Tensor dv)");
  m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn, CPU, m) {
  m.impl("forward", TORCH_BOX(&flashattn::forward));
  m.impl("backward", TORCH_BOX(&flashattn::backward));
}

#ifdef FLASHATTN_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(flashattn, CUDA, m) {
  m.impl("forward", TORCH_BOX(&flashattn::forward));
  m.impl("backward", TORCH_BOX(&flashattn::backward));
}
#endif

STABLE_TORCH_LIBRARY_IMPL(flashattn, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&flashattn::build_info));
}
