// Errors of the CUDA runtime, thrown with the call, its place and CUDA's own words.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace flashattn {

[[noreturn]] inline void throw_cuda_error(cudaError_t error, const char* call, const char* file,
                                          int line) {
  throw std::runtime_error(std::string("flashattn: ") + call + " failed at " + file + ":" +
                           std::to_string(line) + ": " + cudaGetErrorString(error));
}

}  // namespace flashattn

#define FLASHATTN_CUDA_CHECK(call)                                               \
  do {                                                                           \
    const cudaError_t flashattn_error = (call);                                  \
    if (flashattn_error != cudaSuccess) {                                        \
      ::flashattn::throw_cuda_error(flashattn_error, #call, __FILE__, __LINE__); \
    }                                                                            \
  } while (0)
