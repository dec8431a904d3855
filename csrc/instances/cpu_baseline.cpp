// The instructions that every processor of the target has.
#include <cstdint>

#include "common/params.h"
#include "kernels/cpu_kernels.h"
#include "plan/tile_config.h"

#define FLASHATTN_CPU_ISA cpu_baseline
#define FLASHATTN_CPU_LANES 4
#define FLASHATTN_CPU_TILE_ROWS 4
#define FLASHATTN_CPU_TILE_VECS 3
#include "kernels/cpu_isa.h"
