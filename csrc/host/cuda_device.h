// The GPUs at hand, as the planner sees them, and the few CUDA calls that launches need.
#pragma once

#include <cstdint>

#include "plan/plan.h"

namespace flashattn {

// Read once a process and device. Throws when this build has no kernel image for the GPU.
const Device& cuda_device(int index);

// torch has its own copy of the CUDA runtime, whose current device this one need not share.
void set_cuda_device(int index);

void zero_async(void* data, int64_t bytes, void* stream);

}  // namespace flashattn
