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

}  // namespace flashattn
