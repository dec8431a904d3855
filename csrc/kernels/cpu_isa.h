// All CPU kernels for one instruction set. The including file (instances/cpu_*.cpp) defines
// FLASHATTN_CPU_ISA (a namespace), FLASHATTN_CPU_LANES (fp32 values a vector) and the tile of
// cpu_matmul.h, and has told the compiler which instructions it may use. Everything that is shared
// with other files is included before that: an inline function compiled here for wide vectors might
// be the copy that the linker keeps for all.
#define FLASHATTN_CPU_INLINE [[gnu::always_inline]] inline
// Before loops over the vectors of a tile: their arrays are meant to be registers.
#if defined(__clang__)
#define FLASHATTN_CPU_UNROLL _Pragma("unroll")
#define FLASHATTN_CPU_UNROLL_TWICE _Pragma("unroll 2")
#else
#define FLASHATTN_CPU_UNROLL _Pragma("GCC unroll 16")
#define FLASHATTN_CPU_UNROLL_TWICE _Pragma("GCC unroll 2")
#endif

#include "kernels/backward_cpu.h"
#include "kernels/forward_cpu.h"

namespace flashattn::FLASHATTN_CPU_ISA {

#define FLASHATTN_CPU_NAME(isa) #isa
#define FLASHATTN_CPU_NAME_OF(isa) FLASHATTN_CPU_NAME(isa)

const CpuKernels kKernels = {
    .isa = FLASHATTN_CPU_NAME_OF(FLASHATTN_CPU_ISA),
    .pack_keys = pack_keys,
    .forward = forward,
    .forward_scratch = ForwardScratch::floats,
    .prepare_backward = prepare_backward,
    .refine_lse = refine_lse,
    .backward = backward,
    .backward_scratch = BackwardScratch::floats,
    .store_dq = store_dq,
};

}  // namespace flashattn::FLASHATTN_CPU_ISA
