// Spreads tasks of differing length over threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "common/seqlen.h"
#include "kernels/cpu_kernels.h"
#include "kernels/kernels.h"

namespace flashattn {

enum class Fill { kNone, kZero };

// Starts on a cache line.
class FloatMemory {
 public:
  FloatMemory() = default;
  FloatMemory(int64_t n, Fill fill) {
    // calloc's pages are zeroed by the system as threads first touch them; malloc's are often
    // those of the last call, which saves that.
    size_t bytes = (n + kLine) * sizeof(float);
    memory_.reset(fill == Fill::kZero ? std::calloc(bytes, 1) : std::malloc(bytes));
    if (memory_ == nullptr) throw std::bad_alloc();
  }
  float* data() const {
    constexpr uintptr_t kBytes = kLine * sizeof(float);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory_.get()) + kBytes - 1) /
                                    kBytes * kBytes);
  }

 private:
  static constexpr int64_t kLine = 16;  // floats
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
};

// Memory for the rows of all sequences.
inline FloatMemory allocate_rows(PackedRows& rows, const SeqLens& seqlens, int64_t batch,
                                 int64_t heads, int stride, Fill fill = Fill::kNone) {
  rows.rows = PackedRows::count_rows(seqlens, batch);
  rows.stride = stride;
  FloatMemory memory(heads * rows.rows * stride, fill);
  rows.data = memory.data();
  return memory;
}

// Runs task(index, scratch) for the indices below `tasks`. A thread takes the next task when it is
// done with one, so the longest come first. Results mustn't depend on which thread runs a task.
template <typename Task>
void run_tasks(const ParallelFor& parallel, int64_t tasks, int64_t scratch_floats,
               const Task& task) {
  struct Shared {
    const Task& task;
    int64_t tasks, scratch_floats;
    float* scratch;
    std::atomic<int64_t> next;
  };
  int64_t workers = std::min<int64_t>(tasks, parallel.threads);
  if (workers <= 0) return;
  scratch_floats = (scratch_floats + 15) / 16 * 16;
  FloatMemory scratch(workers * scratch_floats, Fill::kNone);
  Shared shared = {task, tasks, scratch_floats, scratch.data(), 0};
  auto work = [](void* context, int64_t worker, int64_t) {
    Shared& shared = *static_cast<Shared*>(context);
    float* scratch = shared.scratch + worker * shared.scratch_floats;
    for (int64_t i; (i = shared.next.fetch_add(1)) < shared.tasks;) shared.task(i, scratch);
  };
  parallel.run(workers, work, &shared);
}

// The blocks of `block` rows of all sequences and heads, numbered. Those of a sequence and head
// lie together, the last first: under a causal mask it takes longest.
class RowBlocks {
 public:
  struct Block {
    int64_t batch;
    int head, row_begin;
  };

  RowBlocks(const SeqLens& seqlens, int64_t batch, int heads, int block)
      : heads_(heads), block_(block), first_(batch + 1) {
    for (int64_t b = 0; b < batch; ++b) {
      first_[b + 1] = first_[b] + heads * blocks(seqlens.sequence(b).length);
    }
  }

  int64_t count() const { return first_.back(); }

  Block operator[](int64_t index) const {
    auto next = std::upper_bound(first_.begin(), first_.end(), index);
    int64_t batch = next - first_.begin() - 1;
    int64_t blocks_a_head = (*next - first_[batch]) / heads_;
    int64_t head = (index - first_[batch]) / blocks_a_head;
    int64_t from_last = (index - first_[batch]) % blocks_a_head;
    return {batch, static_cast<int>(head),
            static_cast<int>(blocks_a_head - 1 - from_last) * block_};
  }

 private:
  int64_t blocks(int64_t rows) const { return (rows + block_ - 1) / block_; }

  int heads_, block_;
  std::vector<int64_t> first_;  // of each sequence, and the end
};

}  // namespace flashattn
