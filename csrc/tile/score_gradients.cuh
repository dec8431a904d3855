// What the backward does to a warp's transposed scores, keys as rows and queries as columns: P^T of
// S^T, dS^T of dP^T. The queries' statistics lie side by side in shared memory.
#pragma once

#include "tile/element.cuh"
#include "tile/softmax.cuh"

namespace flashattn::tile {

// Each value x, of accumulator (m, n, e), becomes f(x, statistic of its query, m, n, e). `first`:
// the query of the first column.
template <int MT, int NT, class Function>
__device__ __forceinline__ void with_statistics(float (&x)[MT][NT][4], uint32_t stats, int first,
                                                Function f) {
  stats += (first + threadIdx.x % 4 * 2) * 4;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float2 pair = ptx::load_shared_f2(stats + n * 32);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][n][e] = f(x[m][n][e], e % 2 ? pair.y : pair.x, m, n, e);
  }
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

// P^T = exp(scale S^T - lse), in place. `large`: any_large_lse of these queries.
template <int MT, int NT>
__device__ __forceinline__ void probabilities(float (&p)[MT][NT][4], uint32_t lse_log2, int first,
                                              float scale, bool large) {
  if (large) {
    with_statistics(p, lse_log2, first, [scale](float score, float lse, int, int, int) {
      return LseLog2::probability(score, scale, lse);
    });
  } else {
    with_statistics(p, lse_log2, first, [scale](float score, float lse, int, int, int) {
      return ptx::exp2_approx(fmaf(score, scale * kLog2E, -lse));
    });
  }
}

// dS^T = P^T (dP^T - delta), in place of dP^T.
template <int MT, int NT>
__device__ __forceinline__ void score_gradients(float (&ds)[MT][NT][4], const float (&p)[MT][NT][4],
                                                uint32_t deltas, int first) {
  with_statistics(ds, deltas, first, [&p](float dp, float delta, int m, int n, int e) {
    return p[m][n][e] * (dp - delta);
  });
}

// The same with P^T rounded, as the A operand of dV.
template <class E, int MT, int NT>
__device__ __forceinline__ void score_gradients(float (&ds)[MT][NT][4],
                                                const uint32_t (&p)[NT / 2][MT][4], uint32_t deltas,
                                                int first) {
  with_statistics(ds, deltas, first, [&p](float dp, float delta, int m, int n, int e) {
    float2 pair = unpack<E>(p[n / 2][m][n % 2 * 2 + e / 2]);
    return (e % 2 ? pair.y : pair.x) * (dp - delta);
  });
}

}  // namespace flashattn::tile
