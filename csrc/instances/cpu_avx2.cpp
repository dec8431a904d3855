// x86-64 with AVX2 and FMA. A tile's 12 sums, 3 vectors of B and one of A fill the 16 registers.
#if defined(__x86_64__)
#include <cstdint>

#include "common/params.h"
#include "kernels/cpu_kernels.h"
#include "plan/tile_config.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define FLASHATTN_CPU_ISA cpu_avx2
#define FLASHATTN_CPU_LANES 8
#define FLASHATTN_CPU_TILE_ROWS 4
#define FLASHATTN_CPU_TILE_VECS 3
#include "kernels/cpu_isa.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__
