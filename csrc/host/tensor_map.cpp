#include "host/tensor_map.h"

#include <cuda_runtime_api.h>

#include "host/cuda_check.h"

namespace flashattn {

namespace {

// Through the runtime, so that nothing links against the driver's library.
decltype(&cuTensorMapEncodeTiled) find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  FLASHATTN_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                        cudaEnableDefault, &result));
#else
  FLASHATTN_CUDA_CHECK(
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result));
#endif
  if (result != cudaDriverEntryPointSuccess) {
    throw std::runtime_error("flashattn: the CUDA driver has no cuTensorMapEncodeTiled");
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

// Makes the device's context the thread's. The runtime does so at a thread's first launch, which a
// tensor map comes before.
void bind_context() {
  int device = 0;
  FLASHATTN_CUDA_CHECK(cudaGetDevice(&device));
  FLASHATTN_CUDA_CHECK(cudaSetDevice(device));
}

}  // namespace

CUtensorMap make_tensor_map(const void* data, int64_t batch, int64_t heads, int64_t rows,
                            int columns, int64_t batch_stride, int64_t head_stride,
                            int64_t row_stride, int box_rows) {
  static const auto encode = find_encoder();
  constexpr cuuint64_t kElementBytes = 2, kAnyLegalStride = 16;
  auto stride = [](int64_t size, int64_t elements) {
    return size == 1 ? kAnyLegalStride : static_cast<cuuint64_t>(elements) * kElementBytes;
  };
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[3] = {stride(rows, row_stride), stride(heads, head_stride),
                                 stride(batch, batch_stride)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  auto try_encoding = [&] {
    return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(data), sizes, strides,
                  box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = try_encoding();
  if (result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_NOT_INITIALIZED) {
    bind_context();
    result = try_encoding();
  }
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("flashattn: cuTensorMapEncodeTiled failed with CUresult " +
                             std::to_string(result));
  }
  return map;
}

}  // namespace flashattn
