#include "kernels/cpu_kernels.h"

namespace flashattn {
namespace {

const CpuKernels& choose_kernels() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return cpu_avx512::kKernels;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return cpu_avx2::kKernels;
#endif
  return cpu_baseline::kKernels;
}

}  // namespace

const CpuKernels& cpu_kernels() {
  static const CpuKernels& kernels = choose_kernels();
  return kernels;
}

}  // namespace flashattn
