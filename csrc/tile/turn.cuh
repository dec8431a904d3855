// Adding in a fixed order: warps of different CTAs take turns at one place in global memory.
#pragma once

#include "ptx/sm80.cuh"

namespace flashattn::tile {

// A counter of the turns taken, zero at the start. Default: everybody may add at any time. A CTA
// waits only for CTAs launched before it, so that waiting ends.
class Turn {
 public:
  Turn() = default;
  __device__ __forceinline__ explicit Turn(int* counter) : counter_(counter) {}

  // Returns when `mine` turns were taken; the warp then sees what was added in them.
  __device__ __forceinline__ void wait(int mine) const {
    if (threadIdx.x % 32 == 0) {
      while (ptx::load_acquire(counter_) < mine) __nanosleep(32);
    }
    __syncwarp();
  }

  // Ends the warp's turn, once its adds are visible.
  __device__ __forceinline__ void pass() const {
    if (counter_ == nullptr) return;
    __threadfence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::add_release(counter_, 1);
  }

 private:
  int* counter_ = nullptr;
};

}  // namespace flashattn::tile
