// From a problem to a launch: which kernel, which tile, how much workspace, and why. Pure C++: no
// torch, no CUDA; the ops call it before every launch, explain() and the tests through pybind11.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/params.h"
#include "plan/tile_config.h"

namespace flashattn {

enum class Arch : int32_t { kCpu = 0, kSm80 = 80, kSm90 = 90 };

// Which passes take kernels for sm_90a (wgmma, TMA) where one serves the problem.
struct Sm90aPasses {
  bool forward = false, backward = false;
};

struct Device {
  std::string name = "cpu";
  Arch arch = Arch::kCpu;  // whose code it runs: the build has a say in it
  Sm90aPasses sm90a = {};
  int compute_capability = 0;  // 80, 86, 89, 90, 100, ...
  int sm_count = 0;            // CPU: threads
  int64_t smem_per_block = 0;  // bytes a CTA may ask for
  int64_t smem_per_sm = 0;
};

// Devices known by name, for explain() on a machine without them: "cpu", "a100", "rtx4090", "h100",
// "h200". Null: unknown.
const Device* device_by_name(std::string_view name);

// The family of kernels for a compute capability (80 stands for 8.0).
Arch arch_of(int compute_capability);
// The one that a build for `archs` runs there: that of sm_80 where it has none for sm_90, that of
// sm_90 on newer GPUs where "90+PTX" is its newest. kCpu: none.
Arch arch_of(int compute_capability, std::string_view archs);

// Both, where the code that a build for `archs` runs there is that for sm_90a. To compare kernels
// the environment variable FLASHATTN_NO_SM90 excludes "forward", "backward" or, as "1", both.
Sm90aPasses sm90a_passes(int compute_capability, std::string_view archs);

// Whether a binary built for `archs` ("80+PTX;90a", the form of FLASHATTN_CUDA_ARCHS) runs on a
// GPU: machine code runs on its own major version from its minor on ("a": on that very one alone),
// PTX is compiled by the driver for anything newer.
bool kernel_image_available(std::string_view archs, int compute_capability);

// The host's view of ProblemShape: packed lengths are known in sum only.
struct Problem {
  DType dtype = DType::kBFloat16;
  bool packed = false;
  bool partly_used = false;  // seqused
  int64_t batch = 1;
  int64_t seqlen_q = 0;  // fixed: rows a sequence; packed: rows in all
  int64_t seqlen_k = 0;
  int64_t heads_q = 1, heads_k = 1;
  int headdim = 0, headdim_v = 0;
  MaskSpec mask;
  bool aligned16 = true;  // 16-byte loads and TMA possible for q, k, v
  // Backward only.
  bool deterministic = false;
  bool need_dq = true;
  bool need_dkv = true;

  int64_t rows_q() const { return packed ? seqlen_q : batch * seqlen_q; }
};

enum class Kernel : int32_t {
  kForwardCpu,
  kBackwardCpu,
  kForwardSm80,
  kBackwardSm80,
  kForwardSm90,
  kBackwardSm90
};
const char* kernel_name(Kernel kernel);

// Byte offsets into the one workspace buffer of the CUDA backward. What must start at zero comes
// first: the bytes [0, zeroed_bytes).
struct WorkspaceLayout {
  int64_t pieces_dealt = 0;  // kBackwardSm90 alone
  int64_t dq_turn = 0;       // unless sm_80's is deterministic: of size 0
  int64_t dq_accum = 0;      // without need_dq: of size 0; whole_heads: not zeroed
  int64_t lse_log2 = 0;
  int64_t delta = 0;
  int64_t zeroed_bytes = 0;
  int64_t bytes = 0;
};

struct Plan {
  Kernel kernel = Kernel::kForwardCpu;
  int head_dims_index = 0;  // into kHeadDims (CUDA)
  int block_m = 0, block_n = 0, warps = 0, stages = 0;
  int64_t tiles = 0;                   // that the grid takes
  int64_t grid = 0;                    // CTAs (CUDA), tasks (CPU)
  int64_t smem_bytes = 0;              // a CTA
  SmemClass smem = SmemClass::k99KB;   // which tile the backward takes
  int accum_headdim = 0;               // columns of dq_accum
  int64_t accum_rows = 0;              // and rows of it, lse_log2 and delta: grouped_begin()
  int64_t dq_turns_per_head = 0;       // and blocks of block_m, each with its counter
  ForwardSchedule schedule;            // kForwardSm90
  BackwardSchedule backward_schedule;  // kBackwardSm90
  WorkspaceLayout workspace;
  bool supported = true;
  const char* unsupported_reason = nullptr;
};

// Why a pass for sm_90a does not take a problem; null: it does.
const char* why_not_forward_sm90(const Problem& problem);
const char* why_not_backward_sm90(const Problem& problem, const Device& device);

// Both are cheap (no allocation): every launch calls them.
Plan make_forward_plan(const Problem& problem, const Device& device);
Plan make_backward_plan(const Problem& problem, const Device& device);

// Figures and reasons that only explain() needs. Packed problems are counted as `batch` sequences
// of the mean length.
struct PlanReport {
  double flops = 0;  // of the matmuls, for visible (query, key) pairs only
  double bytes = 0;  // each input read once, each output written once
  // Pairs of a query block and a key block, over all heads and sequences.
  int64_t visited_blocks = 0, full_blocks = 0, all_blocks = 0;
  std::vector<std::string> reasons;
};
PlanReport report(const Plan& plan, const Problem& problem, const Device& device);

}  // namespace flashattn
