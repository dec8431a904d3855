#include "host/cuda_device.h"

#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "host/cuda_check.h"

namespace flashattn {

namespace {

int attribute(cudaDeviceAttr name, int index) {
  int value = 0;
  FLASHATTN_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, index));
  return value;
}

Device read_device(int index) {
  cudaDeviceProp properties;
  FLASHATTN_CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
  Device device;
  device.name = properties.name;
  device.compute_capability = 10 * properties.major + properties.minor;
  device.arch = arch_of(device.compute_capability);
  device.sm_count = properties.multiProcessorCount;
  device.smem_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  device.smem_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, index);
  if (!kernel_image_available(FLASHATTN_CUDA_ARCHS, device.compute_capability)) {
    throw std::runtime_error("flashattn was built for the architectures " FLASHATTN_CUDA_ARCHS
                             " and has no kernel for " +
                             device.name + " of compute capability " +
                             std::to_string(properties.major) + "." +
                             std::to_string(properties.minor));
  }
  return device;
}

}  // namespace

const Device& cuda_device(int index) {
  constexpr size_t kMaxDevices = 64;
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<Device, kMaxDevices> devices;
  const size_t slot = static_cast<size_t>(index);
  std::call_once(once.at(slot), [&] { devices[slot] = read_device(index); });
  return devices[slot];
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
