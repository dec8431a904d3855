#include "host/cuda_device.h"

#include <cuda_runtime_api.h>

#include "host/cuda_check.h"

namespace flashattn {

CudaProperties read_cuda_properties(int index) {
  cudaDeviceProp properties;
  FLASHATTN_CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
  return {.name = properties.name,
          .compute_capability = 10 * properties.major + properties.minor,
          .sm_count = properties.multiProcessorCount,
          .smem_per_block = static_cast<int64_t>(properties.sharedMemPerBlockOptin),
          .smem_per_sm = static_cast<int64_t>(properties.sharedMemPerMultiprocessor)};
}

void set_cuda_device(int index) {
  int current = -1;
  FLASHATTN_CUDA_CHECK(cudaGetDevice(&current));
  if (current != index) FLASHATTN_CUDA_CHECK(cudaSetDevice(index));
}

void zero_async(void* data, int64_t bytes, void* stream) {
  if (bytes == 0) return;
  FLASHATTN_CUDA_CHECK(
      cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)));
}

}  // namespace flashattn
