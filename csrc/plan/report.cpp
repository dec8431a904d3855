#include <algorithm>
#include <cstdio>

#include "plan/plan.h"

namespace flashattn {

namespace {

bool is_backward(const Plan& plan) {
  return plan.kernel == Kernel::kBackwardCpu || plan.kernel == Kernel::kBackwardSm80 ||
         plan.kernel == Kernel::kBackwardSm90;
}

bool is_cpu(const Plan& plan) {
  return plan.kernel == Kernel::kForwardCpu || plan.kernel == Kernel::kBackwardCpu;
}

// One sequence that stands for all of them.
SequenceMask typical_sequence(const Problem& problem) {
  const int64_t sequences = problem.packed ? std::max<int64_t>(problem.batch, 1) : 1;
  return {problem.mask, static_cast<int>(problem.seqlen_q / sequences),
          static_cast<int>(problem.seqlen_k / sequences)};
}

double visible_pairs(const SequenceMask& mask) {
  double pairs = 0;
  for (int row = 0; row < mask.seqlen_q; ++row) {
    KeyRange keys = mask.visible_keys(row);
    pairs += keys.end - keys.begin;
  }
  return pairs;
}

void count_blocks(PlanReport& report, const Plan& plan, const Problem& problem) {
  const SequenceMask mask = typical_sequence(problem);
  const int64_t key_blocks = (mask.seqlen_k + plan.block_n - 1) / plan.block_n;
  for (int row = 0; row < mask.seqlen_q; row += plan.block_m) {
    BlockRange range = mask.key_blocks(row, plan.block_m, plan.block_n);
    report.visited_blocks += range.end - range.begin;
    report.full_blocks += range.full_end - range.full_begin;
    report.all_blocks += key_blocks;
  }
  const int64_t repeats = problem.batch * problem.heads_q;
  report.visited_blocks *= repeats;
  report.full_blocks *= repeats;
  report.all_blocks *= repeats;
}

// Two FLOPs a multiply-add. Forward: QK^T and PV. Backward: those of S, dQ and dK over headdim,
// those of dP and dV over headdim_v.
double count_flops(const Plan& plan, const Problem& problem) {
  const double pairs = visible_pairs(typical_sequence(problem)) *
                       static_cast<double>(problem.batch * problem.heads_q);
  if (!is_backward(plan)) return 2 * pairs * (problem.headdim + problem.headdim_v);
  const int over_headdim = 1 + problem.need_dq + problem.need_dkv;
  const int over_headdim_v = 1 + problem.need_dkv;
  return 2 * pairs * (over_headdim * problem.headdim + over_headdim_v * problem.headdim_v);
}

double count_bytes(const Plan& plan, const Problem& problem) {
  const double rows_q = static_cast<double>(problem.rows_q() * problem.heads_q);
  const double rows_k = static_cast<double>(
      (problem.packed ? problem.seqlen_k : problem.batch * problem.seqlen_k) * problem.heads_k);
  const int size = dtype_bytes(problem.dtype);
  const double q = rows_q * problem.headdim * size, out = rows_q * problem.headdim_v * size;
  const double kv = rows_k * (problem.headdim + problem.headdim_v) * size, lse = rows_q * 4;
  if (!is_backward(plan)) return q + kv + out + lse;
  return q + kv + 2 * out + lse + (problem.need_dq ? q : 0) + (problem.need_dkv ? kv : 0);
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

std::string dims(int qk, int v) { return std::to_string(qk) + "/" + std::to_string(v); }

std::string mib(int64_t bytes) { return number(static_cast<double>(bytes) / (1 << 20)) + " MiB"; }

std::string kib(int64_t bytes) { return number(static_cast<double>(bytes) / 1024) + " KiB"; }

bool is_sm90(const Plan& plan) {
  return plan.kernel == Kernel::kForwardSm90 || plan.kernel == Kernel::kBackwardSm90;
}

std::string why_not_sm90(const Plan& plan, const Problem& problem, const Device& device) {
  const bool possible = is_backward(plan) ? device.sm90a.backward : device.sm90a.forward;
  if (!possible) return "this build has no code for sm_90a or FLASHATTN_NO_SM90 is set";
  return is_backward(plan) ? why_not_backward_sm90(problem, device) : why_not_forward_sm90(problem);
}

std::string why_kernel(const Plan& plan, const Problem& problem, const Device& device) {
  const std::string name = kernel_name(plan.kernel);
  if (is_cpu(plan)) return name + ": the tensors are on the CPU";
  if (is_sm90(plan)) {
    return name + ": " + device.name + " has wgmma and TMA, and head dims are multiples of 8";
  }
  if (device.arch == Arch::kSm90) {
    return name + ": " + device.name + " runs the sm_80 kernel compiled for sm_90, as " +
           why_not_sm90(plan, problem, device);
  }
  return name + ": " + device.name + " has compute capability " +
         std::to_string(device.compute_capability / 10) + "." +
         std::to_string(device.compute_capability % 10);
}

std::string why_tile(const Plan& plan, const Problem& problem) {
  const std::string tile = "tile " + std::to_string(plan.block_m) + " queries x " +
                           std::to_string(plan.block_n) + " keys: ";
  if (is_cpu(plan)) return tile + "its scores and the block of K and V stay in a core's cache";
  const HeadDims compiled = kHeadDims[plan.head_dims_index];
  std::string text = tile + "the choice for head dims up to " + dims(compiled.qk, compiled.v);
  if (compiled.qk != problem.headdim || compiled.v != problem.headdim_v) {
    text += "; " + dims(problem.headdim, problem.headdim_v) + " is padded in shared memory only";
  }
  return text;
}

std::string why_shared_memory(const Plan& plan, const Device& device) {
  const int64_t reserved = 1024;  // bytes that CUDA itself takes of each CTA's share
  return kib(plan.smem_bytes) + " of shared memory, " + std::to_string(plan.stages) +
         " stage(s): " + std::to_string(device.smem_per_sm / (plan.smem_bytes + reserved)) +
         " CTA(s) fit an SM's " + kib(device.smem_per_sm);
}

std::string why_order(const ForwardSchedule& schedule) {
  const std::string items =
      schedule.parts == 2 ? "pairs of a head's longest and shortest tiles" : "tiles";
  std::string text = std::to_string(schedule.items) + " " + items + ", ";
  text += schedule.ctas < schedule.items
              ? "dealt to " + std::to_string(schedule.ctas) + " CTAs in turn: "
              : "a CTA for each: ";
  if (schedule.heads_together > 1) {
    return text + std::to_string(schedule.heads_together) +
           " heads take turns, as those of a head differ in work";
  }
  text += "head by head";
  return schedule.rotated ? text + ", rotated, as those of a head differ in work" : text;
}

std::string why_order(const BackwardSchedule& schedule) {
  const std::string ctas = std::to_string(schedule.ctas) + " CTAs";
  if (schedule.whole_heads) {
    return std::to_string(schedule.tiles / schedule.together) + " heads, whole ones for " + ctas +
           ": each sums dq by itself and rounds it";
  }
  return std::to_string(schedule.tiles) + " tiles, which " + ctas + " take head by head";
}

std::string why_loads(const Plan& plan, const Problem& problem) {
  if (is_sm90(plan)) {
    return problem.aligned16 ? "copies by TMA: pointers and strides are multiples of 16 bytes"
                             : "element-wise copies of some tensor: its pointer or a stride is no "
                               "multiple of 16 bytes, which TMA needs";
  }
  return problem.aligned16
             ? "16-byte loads: pointers, strides and rows are multiples of 16 bytes"
             : "element-wise loads: a pointer, a stride or a row is no multiple of 16 bytes";
}

std::string why_blocks(const PlanReport& report) {
  const double all = static_cast<double>(std::max<int64_t>(report.all_blocks, 1));
  const double skipped = static_cast<double>(report.all_blocks - report.visited_blocks) / all;
  return "the mask skips " + number(100 * skipped) + "% of the blocks; " +
         std::to_string(report.visited_blocks - report.full_blocks) + " of the " +
         std::to_string(report.visited_blocks) + " visited ones pay for masking";
}

std::string why_workspace(const Plan& plan, const Problem& problem) {
  std::string text = "workspace " + mib(plan.workspace.bytes) + ": lse and delta in fp32";
  if (problem.need_dq) text += ", dq summed in fp32 over key blocks";
  if (problem.deterministic && problem.need_dq) text += " in a fixed order (deterministic)";
  return text;
}

}  // namespace

PlanReport report(const Plan& plan, const Problem& problem, const Device& device) {
  PlanReport report;
  if (!plan.supported) {
    report.reasons = {plan.unsupported_reason};
    return report;
  }
  report.flops = count_flops(plan, problem);
  report.bytes = count_bytes(plan, problem);
  count_blocks(report, plan, problem);
  report.reasons = {why_kernel(plan, problem, device), why_tile(plan, problem)};
  if (!is_cpu(plan)) {
    report.reasons.push_back(why_shared_memory(plan, device));
    report.reasons.push_back(why_loads(plan, problem));
  }
  if (plan.kernel == Kernel::kForwardSm90) {
    report.reasons.push_back(why_order(plan.schedule));
  } else if (plan.kernel == Kernel::kBackwardSm90) {
    report.reasons.push_back(why_order(plan.backward_schedule));
  }
  report.reasons.push_back(why_blocks(report));
  if (is_backward(plan) && !is_cpu(plan)) {
    report.reasons.push_back(why_workspace(plan, problem));
  }
  return report;
}

}  // namespace flashattn
