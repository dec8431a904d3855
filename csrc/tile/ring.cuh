// Rings of slots in shared memory: one side fills them, the other takes what is in them, each slot
// with a barrier `full` and a barrier `empty`.
#pragma once

#include "ptx/sm80.cuh"
#include "ptx/sm90.cuh"

namespace flashattn::tile {

// A place in a ring of kSlots: how often it was advanced.
template <int kSlots>
struct RingPlace {
  uint32_t count = 0;

  __device__ __forceinline__ void advance() { ++count; }
  __device__ __forceinline__ RingPlace before() const { return {count - 1}; }
  __device__ __forceinline__ int slot() const { return count % kSlots; }
  __device__ __forceinline__ uint32_t parity() const { return count / kSlots & 1; }

  // The same place. After a loop whose end the compiler can't prove to be that of all lanes, it no
  // longer takes a count for the same in all lanes, and keeps addresses and descriptors out of
  // uniform registers; a shuffle tells it.
  __device__ __forceinline__ RingPlace uniform() const { return {__shfl_sync(~0u, count, 0)}; }

  // For those who take: the slot was filled.
  __device__ __forceinline__ void wait_full(uint64_t (&full)[kSlots]) const {
    ptx::mbarrier_wait(ptx::shared_address(&full[slot()]), parity());
  }
  // For those who fill: the slot was released, or never used.
  __device__ __forceinline__ void wait_empty(uint64_t (&empty)[kSlots]) const {
    ptx::mbarrier_wait(ptx::shared_address(&empty[slot()]), parity() ^ 1);
  }
  // An arrival of every lane, behind what it read itself.
  __device__ __forceinline__ void release_all(uint64_t (&empty)[kSlots]) const {
    ptx::mbarrier_arrive(ptx::shared_address(&empty[slot()]));
  }
  // One arrival for the warp.
  __device__ __forceinline__ void release(uint64_t (&empty)[kSlots], bool wanted = true) const {
    if (wanted && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty[slot()]));
  }
};

}  // namespace flashattn::tile
