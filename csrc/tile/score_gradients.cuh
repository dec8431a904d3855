// What the backward does to a warp's transposed scores, keys as rows and queries as columns: P^T of
// S^T, dS^T of dP^T. The queries' statistics lie side by side in shared memory.
#pragma once

#include "tile/element.cuh"
#include "tile/softmax.cuh"

namespace flashattn::tile {

// Statistics of the lane's first two columns from query `first` on; those of columns 8 further are
// 32 bytes further.
__device__ __forceinline__ uint32_t lane_statistics(uint32_t stats, int first) {
  return stats + (first + threadIdx.x % 4 * 2) * 4;
}

// Whether one of kQueries has a large lse (see LseLog2).
template <int kQueries>
__device__ __forceinline__ bool any_large_lse(uint32_t lse_log2) {
  static_assert(kQueries % 32 == 0, "every lane looks at as many queries");
  bool large = false;
#pragma unroll
  for (int query = 0; query < kQueries; query += 32) {
    large |= LseLog2::large(ptx::load_shared_f32(lse_log2 + (query + threadIdx.x % 32) * 4));
  }
  return __any_sync(~0u, large);
}

template <bool kLarge, int MT, int NT>
__device__ __forceinline__ void exponentials(float (&p)[MT][NT][4], uint32_t lse_log2, int first,
                                             float scale) {
  uint32_t stats = lane_statistics(lse_log2, first);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float2 lse = ptx::load_shared_f2(stats + n * 32);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float of_query = e % 2 ? lse.y : lse.x;
        p[m][n][e] = kLarge ? LseLog2::probability(p[m][n][e], scale, of_query)
                            : ptx::exp2_approx(fmaf(p[m][n][e], scale * kLog2E, -of_query));
      }
  }
}

// P^T = exp(scale S^T - lse), in place. `large`: any_large_lse of these queries.
template <int MT, int NT>
__device__ __forceinline__ void probabilities(float (&p)[MT][NT][4], uint32_t lse_log2, int first,
                                              float scale, bool large) {
  if (large) {
    exponentials<true>(p, lse_log2, first, scale);
  } else {
    exponentials<false>(p, lse_log2, first, scale);
  }
}

// dS^T = P^T (dP^T - delta), in place of dP^T.
template <int MT, int NT>
__device__ __forceinline__ void score_gradients(float (&ds)[MT][NT][4], const float (&p)[MT][NT][4],
                                                uint32_t deltas, int first) {
  uint32_t stats = lane_statistics(deltas, first);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float2 delta = ptx::load_shared_f2(stats + n * 32);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - (e % 2 ? delta.y : delta.x));
      }
  }
}

// The same with P^T rounded, as the A operand of dV.
template <class E, int MT, int NT>
__device__ __forceinline__ void score_gradients(float (&ds)[MT][NT][4],
                                                const uint32_t (&p)[NT / 2][MT][4], uint32_t deltas,
                                                int first) {
  uint32_t stats = lane_statistics(deltas, first);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float2 delta = ptx::load_shared_f2(stats + n * 32);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 pair = unpack<E>(p[n / 2][m][n % 2 * 2 + half]);
        ds[m][n][2 * half] = pair.x * (ds[m][n][2 * half] - delta.x);
        ds[m][n][2 * half + 1] = pair.y * (ds[m][n][2 * half + 1] - delta.y);
      }
  }
}

}  // namespace flashattn::tile
