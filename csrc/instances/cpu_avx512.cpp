// x86-64 with AVX-512. A tile's 24 sums leave 8 of 32 registers to B and A.
#if defined(__x86_64__)
#include <cstdint>

#include "common/params.h"
#include "kernels/cpu_kernels.h"
#include "plan/tile_config.h"

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif

#define FLASHATTN_CPU_ISA cpu_avx512
#define FLASHATTN_CPU_LANES 16
#define FLASHATTN_CPU_TILE_ROWS 8
#define FLASHATTN_CPU_TILE_VECS 3
#include "kernels/cpu_isa.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__
