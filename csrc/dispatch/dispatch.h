// From a plan to the kernels it names: all that ops/ sees of them.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "kernels/kernels.h"
#include "plan/plan.h"

namespace flashattn {

// Where a call runs: on a GPU's stream, or on the caller's CPU threads.
struct Executor {
  bool cuda = false;
  int device_index = 0;
  void* stream = nullptr;  // cudaStream_t
  ParallelFor parallel;    // CPU only
};

// The properties of that place, read once a process. Throws when this build has no kernel for it.
const Device& device_of(const Executor& executor);

void run_forward(const Plan& plan, const ForwardParams& params, const Executor& executor);

// `workspace`: plan.workspace.bytes of device memory, any content (CUDA only).
void run_backward(const Plan& plan, BackwardParams params, void* workspace,
                  const Executor& executor);

}  // namespace flashattn
