// The one way to launch a kernel: grid on x, dynamic shared memory, checked.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "host/cuda_check.h"

namespace flashattn {

// More than 48 KB of dynamic shared memory has to be asked for, once a kernel and device.
template <auto kKernel>
void allow_shared_memory(int bytes) {
  constexpr int kDefaultLimit = 48 * 1024;
  if (bytes <= kDefaultLimit) return;
  static std::atomic<uint64_t> done{0};
  int device = 0;
  FLASHATTN_CUDA_CHECK(cudaGetDevice(&device));
  uint64_t bit = uint64_t{1} << (device % 64);
  if (device < 64 && (done.load(std::memory_order_relaxed) & bit)) return;
  FLASHATTN_CUDA_CHECK(
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  done.fetch_or(bit, std::memory_order_relaxed);
}

template <auto kKernel, class... Args>
void launch(int64_t grid, int threads, int smem_bytes, void* stream, const Args&... args) {
  if (grid == 0) return;
  allow_shared_memory<kKernel>(smem_bytes);
  kKernel<<<static_cast<unsigned>(grid), threads, smem_bytes, static_cast<cudaStream_t>(stream)>>>(
      args...);
  FLASHATTN_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flashattn
