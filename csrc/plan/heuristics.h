// Rules of the planner that are more than a table: pure functions, the reason beside each.
#pragma once

#include <cstdint>

namespace flashattn {

// CPU backward: into how many parts the key blocks of one sequence and KV head are dealt. Each part
// sums dq in memory of its own, so: as few as keep four of five threads busy. Depends on the number
// of threads alone, and so do dq's roundings.
constexpr int cpu_backward_splits(int64_t sequences_and_heads, int64_t key_blocks, int threads) {
  const int64_t limit = key_blocks < 2 * threads ? key_blocks : 2 * threads;
  for (int64_t splits = 1; splits < limit; ++splits) {
    int64_t tasks = sequences_and_heads * splits;
    int64_t rounds = (tasks + threads - 1) / threads;
    if (5 * tasks >= 4 * rounds * threads) return static_cast<int>(splits);
  }
  return limit > 1 ? static_cast<int>(limit) : 1;
}

// sm_90 forward under a causal mask: whether pairs of a long and a short tile, dealt to one CTA an
// SM, keep most SMs busy to the end. Otherwise single tiles go out, the longest ones first.
constexpr bool pairs_fill(int64_t pairs, int sm_count) {
  const int64_t rounds = (pairs + sm_count - 1) / sm_count;
  return 100 * pairs >= 85 * rounds * sm_count;
}

// sm_90a backward: whether CTAs that take all key blocks of a head, one after the other, pay. They
// need no zeroed sums of dq, no additions by several CTAs, and no pass that rounds dq; but there
// must be heads enough for all SMs, and the sums must stay in L2 beside what the products read.
// Under a causal mask they are needed for half of the time. Deterministic: the other way is the
// kernel for sm_80, in turns, at half of the speed.
constexpr bool whole_heads_fill(int64_t heads, int sm_count, bool deterministic) {
  const int64_t rounds = (heads + sm_count - 1) / sm_count;
  return 10 * heads >= (deterministic ? 5 : 9) * rounds * sm_count;
}
constexpr bool whole_heads_fit(int64_t key_blocks, int64_t sums_bytes, bool causal) {
  constexpr int64_t kBudget = int64_t{18} << 20;  // of 50 MB on an H100 or H200
  return key_blocks <= 8 && (causal ? sums_bytes / 2 : sums_bytes) <= kBudget;
}

// sm_90 forward under a causal mask: how many heads take turns in the order of tiles. The longest
// tiles of all heads would go first, but K and V of the heads under way have to stay in L2.
constexpr int heads_sharing_l2(int64_t heads, int64_t kv_bytes_per_head) {
  constexpr int64_t kBudget = int64_t{32} << 20;  // of 50 MB on an H100 or H200
  const int64_t fit = kv_bytes_per_head > 0 ? kBudget / kv_bytes_per_head : heads;
  return static_cast<int>(fit < 1 ? 1 : fit < heads ? fit : heads);
}

}  // namespace flashattn
