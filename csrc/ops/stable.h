// The one door to LibTorch's stable ABI: nothing else in csrc/ includes torch.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

// Weak: in a CPU-only libtorch it is null, and this library loads all the same.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(
    int32_t device_index, void** stream);

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "common/params.h"
#include "kernels/kernels.h"

namespace flashattn {

using torch::stable::Tensor;
using DeviceGuard = torch::stable::accelerator::DeviceGuard;

// What the ops need of a tensor, read once: each question to libtorch is a call. Borrows from it.
struct View {
  const void* data = nullptr;
  int64_t dim = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;
  int32_t dtype = 0;  // libtorch's code
  int32_t device_type = 0;
  int32_t device_index = 0;

  bool is_cuda() const { return device_type == aoti_torch_device_type_cuda(); }
};

inline View view(const Tensor& tensor) {
  View result;
  int64_t *sizes, *strides;
  AtenTensorHandle handle = tensor.get();
  TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(handle, &result.data));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &result.dim));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &result.dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &result.device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &result.device_index));
  result.sizes = sizes;
  result.strides = strides;
  return result;
}

struct Sizes {
  int64_t dim = 0;
  int64_t size[4] = {};
};

// A new contiguous tensor on the device of `like`.
inline Tensor empty(const Sizes& sizes, int32_t dtype, const View& like) {
  int64_t strides[4];
  int64_t stride = 1;
  for (int64_t d = sizes.dim - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= sizes.size[d] > 1 ? sizes.size[d] : 1;
  }
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.dim, sizes.size, strides, dtype,
                                                  like.device_type, like.device_index, &handle));
  return Tensor(handle);
}

inline void fill(const Tensor& tensor, double value) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_aten_fill__Scalar(tensor.get(), value));
}

// A tensor as kernels read it: in place, or, where its last stride isn't 1, as a contiguous copy
// that lives as long as this.
struct Operand {
  Operand(const Tensor& tensor) : view(flashattn::view(tensor)) {
    const int64_t last = view.dim - 1;
    if (last < 0 || view.strides[last] == 1 || view.sizes[last] <= 1) return;
    copy = torch::stable::contiguous(tensor);
    view = flashattn::view(*copy);
  }

  View view;
  std::optional<Tensor> copy;
};

inline void* current_cuda_stream(int device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}

// torch's own CPU threads.
inline ParallelFor torch_threads() {
  auto run = [](int64_t n, ParallelFor::Body body, void* context) {
    constexpr int64_t kGrain = 1;
    torch::stable::parallel_for(0, n, kGrain,
                                [=](int64_t begin, int64_t end) { body(context, begin, end); });
  };
  return {run, static_cast<int>(torch::stable::get_num_threads())};
}

}  // namespace flashattn
