#include "plan/plan.h"

#include <algorithm>

#include "plan/heuristics.h"

namespace flashattn {

namespace {

constexpr int64_t kWorkspaceAlignment = 256;  // bytes: full cache lines for vector loads and TMA

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Blocks of `block` rows in all sequences. The packed lengths are on the device: each sequence can
// leave one block partly filled, so this is the bound, and blocks past the last one return at once.
int64_t count_blocks(const Problem& problem, int64_t rows, int block) {
  return problem.packed ? rows / block + problem.batch : problem.batch * ceil_div(rows, block);
}

// Keys a sequence; packed: on average.
int64_t mean_keys(const Problem& problem) {
  return problem.packed ? problem.seqlen_k / std::max<int64_t>(problem.batch, 1) : problem.seqlen_k;
}

// All query rows when each sequence starts a group.
int64_t grouped_rows(const Problem& problem, int group) {
  return grouped_begin(problem.packed, problem.seqlen_q, problem.batch, problem.seqlen_q, group);
}

Plan unsupported(Plan plan, const char* reason) {
  plan.supported = false;
  plan.unsupported_reason = reason;
  return plan;
}

// The checks that both passes share; `plan` has kernel and smem_bytes.
Plan check_support(Plan plan, const Problem& problem, const Device& device) {
  if (plan.head_dims_index == kNoHeadDims) {
    return unsupported(plan, "head dims above 256 have no kernel");
  }
  if (device.arch == Arch::kCpu) return plan;
  if (problem.dtype == DType::kFloat32) {
    return unsupported(
        plan, "float32 has no CUDA kernel: cast to bfloat16 or float16, or run on the CPU");
  }
  if (device.compute_capability < 80) {
    return unsupported(plan, "the CUDA kernels need compute capability 8.0 or newer");
  }
  if (plan.smem_bytes > device.smem_per_block) {
    return unsupported(plan,
                       "the tile for these head dims needs more shared memory than this GPU gives "
                       "a block: use smaller head dims or another GPU");
  }
  return plan;
}

// The last check: `plan` has its grid.
Plan check_grid(Plan plan, const Device& device) {
  constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;
  if (device.arch != Arch::kCpu && plan.grid > kMaxGrid) {
    return unsupported(plan, "a launch has at most 2^31 - 1 blocks: split the batch or the heads");
  }
  return plan;
}

template <class Tile>
void set_tile(Plan& plan, const Tile& tile, int warps, int64_t smem_bytes) {
  plan.block_m = tile.block_m;
  plan.block_n = tile.block_n;
  plan.warps = warps;
  plan.stages = tile.stages;
  plan.smem_bytes = smem_bytes;
}

void set_forward_tile(Plan& plan) {
  const HeadDims dims = kHeadDims[plan.head_dims_index];
  if (plan.kernel == Kernel::kForwardSm90) {
    const Sm90ForwardTile tile = sm90_forward_tile(dims);
    set_tile(plan, tile, tile.warps(), sm90_forward_smem_bytes(dims));
  } else {
    const ForwardTile tile = sm80_forward_tile(dims.qk);
    set_tile(plan, tile, tile.warps, sm80_forward_smem_bytes(dims));
  }
}

ForwardSchedule sm90_forward_schedule(const Problem& problem, const Plan& plan,
                                      const Device& device) {
  const int64_t kv_bytes =
      problem.seqlen_k * (problem.headdim + problem.headdim_v) * dtype_bytes(problem.dtype);
  const bool unequal_tiles = problem.mask.right >= 0 && problem.mask.left < 0;
  auto items = [&](int parts) {
    return count_blocks(problem, problem.seqlen_q, plan.block_m * parts) * problem.heads_q;
  };
  ForwardSchedule schedule;
  schedule.parts = unequal_tiles && pairs_fill(items(2), device.sm_count) ? 2 : 1;
  schedule.items = static_cast<uint32_t>(items(schedule.parts));
  // Where items differ, the hardware deals them as SMs become free.
  const bool equal_items = !problem.packed && (schedule.parts == 2 || !unequal_tiles);
  schedule.ctas = equal_items ? std::min<int64_t>(schedule.items, device.sm_count) : schedule.items;
  // Items of equal work go head by head, which is best for L2. Where those of a head differ a CTA
  // must not get the same one of every head: they are rotated, or, being only two (a head's K and V
  // are small then), take turns among heads.
  const int64_t items_per_head = ceil_div(problem.seqlen_q, plan.block_m * schedule.parts);
  const bool alike = equal_items && problem.seqlen_q % (plan.block_m * schedule.parts) == 0;
  const bool rotatable = equal_items && !alike && items_per_head > (unequal_tiles ? 2 : 1);
  schedule.rotated = rotatable && schedule.ctas < schedule.items;
  schedule.heads_together = !problem.packed && unequal_tiles && !alike && !rotatable
                                ? heads_sharing_l2(problem.batch * problem.heads_q, kv_bytes)
                                : 1;
  return schedule;
}

// Floats of the sums of dq for the query heads of one KV head, in one sequence of fixed length.
int64_t head_sums(const Problem& problem, int accum_headdim) {
  return problem.heads_q / problem.heads_k * round_up(problem.seqlen_q, kDqRowGroup) *
         accum_headdim;
}

// Whether each CTA of the backward for sm_90a takes whole heads. That is also the one fixed order
// in which it can sum dq. Each query must see a key: no other writes its dq.
bool takes_whole_heads(const Problem& problem, const Device& device) {
  const MaskSpec& mask = problem.mask;
  const bool each_sees_a_key = mask.left < 0 && !problem.partly_used &&
                               (mask.right < 0 || problem.seqlen_k >= problem.seqlen_q);
  const int64_t heads = problem.batch * problem.heads_k;
  if (problem.packed || !each_sees_a_key ||
      !whole_heads_fill(heads, device.sm_count, problem.deterministic)) {
    return false;
  }
  const HeadDims dims = sm90_backward_dims({problem.headdim, problem.headdim_v});
  const int64_t tiles = ceil_div(problem.seqlen_k, sm90_backward_tile(dims).block_n);
  const int64_t sums = std::min<int64_t>(heads, device.sm_count) * head_sums(problem, dims.qk);
  return problem.deterministic || whole_heads_fit(tiles, 4 * sums, mask.right >= 0);
}

void set_backward_tile(Plan& plan, const Problem& problem, const Device& device) {
  if (plan.kernel == Kernel::kBackwardSm90) {
    const HeadDims dims = sm90_backward_dims({problem.headdim, problem.headdim_v});
    plan.head_dims_index = head_dims_index(dims.qk, dims.v);
    plan.backward_schedule.whole_heads = takes_whole_heads(problem, device);
    set_tile(plan, sm90_backward_tile(dims), kSm90BackwardWarps,
             sm90_backward_smem_bytes(dims, plan.backward_schedule.whole_heads));
  } else {
    plan.smem = device.arch == Arch::kSm90 ? SmemClass::k227KB : SmemClass::k99KB;
    const HeadDims dims = kHeadDims[plan.head_dims_index];
    const BackwardTile tile = sm80_backward_tile(dims.qk, plan.smem);
    set_tile(plan, tile, tile.warps, sm80_backward_smem_bytes(dims, plan.smem));
  }
  plan.accum_headdim = kHeadDims[plan.head_dims_index].qk;
  plan.accum_rows = grouped_rows(problem, kDqRowGroup);
}

// `plan` has its tiles, and whether CTAs take whole heads.
void set_backward_schedule(Plan& plan, const Problem& problem, const Device& device) {
  BackwardSchedule& schedule = plan.backward_schedule;
  schedule.tiles = static_cast<uint32_t>(plan.tiles);
  if (schedule.whole_heads) {
    schedule.together = static_cast<uint32_t>(ceil_div(problem.seqlen_k, plan.block_n));
  }
  schedule.ctas = std::min<int64_t>(plan.tiles / schedule.together, device.sm_count);
}

WorkspaceLayout make_workspace(const Plan& plan, const Problem& problem) {
  const int64_t rows = problem.heads_q * plan.accum_rows;
  WorkspaceLayout workspace;
  int64_t end = 0;
  auto take = [&end](int64_t elements) {  // all of them are 4 bytes each
    int64_t begin = end;
    end = round_up(end + 4 * elements, kWorkspaceAlignment);
    return begin;
  };
  workspace.pieces_dealt = take(plan.kernel == Kernel::kBackwardSm90 ? 1 : 0);
  workspace.dq_turn = take(problem.heads_q * plan.dq_turns_per_head * plan.warps);
  const bool whole_heads = plan.backward_schedule.whole_heads;
  const int64_t sums =
      whole_heads ? plan.grid * head_sums(problem, plan.accum_headdim) : rows * plan.accum_headdim;
  workspace.dq_accum = take(problem.need_dq ? sums : 0);
  workspace.zeroed_bytes = whole_heads ? workspace.dq_accum : end;
  workspace.lse_log2 = take(rows + plan.block_m);  // a block is read whole, past the last row
  workspace.delta = take(rows + plan.block_m);
  workspace.bytes = end;
  return workspace;
}

}  // namespace

const char* kernel_name(Kernel kernel) {
  switch (kernel) {
    case Kernel::kForwardCpu:
      return "forward_cpu";
    case Kernel::kBackwardCpu:
      return "backward_cpu";
    case Kernel::kForwardSm80:
      return "forward_sm80";
    case Kernel::kBackwardSm80:
      return "backward_sm80";
    case Kernel::kForwardSm90:
      return "forward_sm90";
    case Kernel::kBackwardSm90:
      return "backward_sm90";
  }
  return "unknown";
}

// By the shape alone: other strides must not change a bit. Rows of whole 16 bytes are what the
// kernels store.
const char* why_not_forward_sm90(const Problem& problem) {
  const bool whole_chunks = problem.headdim % 8 == 0 && problem.headdim_v % 8 == 0;
  return whole_chunks ? nullptr : "a head dim is no multiple of 8";
}

const char* why_not_backward_sm90(const Problem& problem, const Device& device) {
  if (const char* reason = why_not_forward_sm90(problem)) return reason;
  if (mean_keys(problem) <= kSm80BackwardMaxKeys) {
    return "sequences have at most 64 keys (packed: on average)";
  }
  // Whether dq is wanted has no say: it must not change dk.
  if (problem.deterministic && !takes_whole_heads(problem, device)) {
    return "dq is summed in a fixed order, by more than one CTA a head";
  }
  return nullptr;
}

Plan make_forward_plan(const Problem& problem, const Device& device) {
  Plan plan;
  plan.head_dims_index = head_dims_index(problem.headdim, problem.headdim_v);
  if (device.arch == Arch::kCpu) {
    plan.kernel = Kernel::kForwardCpu;
    plan.block_m = kCpuForwardTile.block_m;
    plan.block_n = kCpuForwardTile.block_n;
  } else {
    const bool sm90 = device.sm90a.forward && why_not_forward_sm90(problem) == nullptr;
    plan.kernel = sm90 ? Kernel::kForwardSm90 : Kernel::kForwardSm80;
    if (plan.head_dims_index != kNoHeadDims) set_forward_tile(plan);
  }
  plan = check_support(plan, problem, device);
  if (!plan.supported) return plan;
  plan.grid = count_blocks(problem, problem.seqlen_q, plan.block_m) * problem.heads_q;
  plan = check_grid(plan, device);
  plan.tiles = plan.grid;
  if (plan.supported && plan.kernel == Kernel::kForwardSm90) {
    plan.schedule = sm90_forward_schedule(problem, plan, device);
    plan.tiles = int64_t{plan.schedule.items} * plan.schedule.parts;
    plan.grid = plan.schedule.ctas;
  }
  return plan;
}

Plan make_backward_plan(const Problem& problem, const Device& device) {
  Plan plan;
  plan.head_dims_index = head_dims_index(problem.headdim, problem.headdim_v);
  if (device.arch == Arch::kCpu) {
    plan.kernel = Kernel::kBackwardCpu;
    plan.block_m = kCpuBackwardTile.block_m;
    plan.block_n = kCpuBackwardTile.block_n;
  } else {
    const bool sm90 = device.sm90a.backward && why_not_backward_sm90(problem, device) == nullptr;
    plan.kernel = sm90 ? Kernel::kBackwardSm90 : Kernel::kBackwardSm80;
    if (plan.head_dims_index != kNoHeadDims) set_backward_tile(plan, problem, device);
  }
  plan = check_support(plan, problem, device);
  if (!plan.supported) return plan;
  if (plan.kernel == Kernel::kBackwardCpu) {
    const int64_t key_blocks = ceil_div(problem.seqlen_k, plan.block_n);
    const int64_t sequences_and_heads = problem.batch * problem.heads_k;
    plan.grid =
        sequences_and_heads * cpu_backward_splits(sequences_and_heads, key_blocks, device.sm_count);
  } else {
    plan.grid = count_blocks(problem, problem.seqlen_k, plan.block_n) * problem.heads_k;
  }
  plan = check_grid(plan, device);
  plan.tiles = plan.grid;
  if (plan.supported && plan.kernel == Kernel::kBackwardSm90) {
    set_backward_schedule(plan, problem, device);
    plan.grid = plan.backward_schedule.ctas;
  }
  if (plan.kernel == Kernel::kBackwardCpu) return plan;
  if (plan.kernel == Kernel::kBackwardSm80 && problem.deterministic && problem.need_dq) {
    plan.dq_turns_per_head = grouped_rows(problem, plan.block_m) / plan.block_m;
  }
  plan.workspace = make_workspace(plan, problem);
  return plan;
}

}  // namespace flashattn
