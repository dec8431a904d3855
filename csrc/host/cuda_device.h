// What launches need of the CUDA runtime: a GPU's properties, the current device, memory set to 0.
#pragma once

#include <cstdint>
#include <string>

namespace flashattn {

struct CudaProperties {
  std::string name;
  int compute_capability;  // 90 stands for 9.0
  int sm_count;
  int64_t smem_per_block;  // bytes a CTA may ask for
  int64_t smem_per_sm;
};

CudaProperties read_cuda_properties(int index);

// torch has its own copy of the CUDA runtime, whose current device this one need not share.
void set_cuda_device(int index);

void zero_async(void* data, int64_t bytes, void* stream);

}  // namespace flashattn
