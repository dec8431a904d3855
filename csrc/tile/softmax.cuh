// Online softmax (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1), for accumulators
// with queries as rows. -inf is guarded here and in tile/reference_softmax.cuh alone.
//
// Probabilities are kept relative to a reference, not to the running maximum itself: exp2 stays in
// range as long as no score is more than kSlackLog2 octaves above it, so the output is rescaled
// only when one is. Each row decides for itself: its bits don't depend on its neighbours.
#pragma once

#include "ptx/sm80.cuh"

namespace flashattn::tile {

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kNan = __builtin_nanf("");
constexpr float kLog2E = 1.4426950408889634f;

// exp2(fma(score, scale, -reference)) rounds the reference's product but not the score's: what is
// left, half a unit in the product's last place, is nothing for small products and everything for
// large ones. Rows with a product above this take all products rounded, in natural units: those of
// lse, from which the backward has them again.
constexpr float kLargeProductLog2 = 65536.f;

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// A row's lse as the backward keeps it: in log2 units; or, where it is large, twice the lse itself,
// so that probabilities come from the rounded products of the forward.
struct LseLog2 {
  static constexpr float kLarge = kLargeProductLog2;

  static __device__ __forceinline__ float encode(float lse) {
    return fabsf(lse) > kLarge ? 2.f * lse : lse * kLog2E;
  }
  static __device__ __forceinline__ bool large(float encoded) {
    return fabsf(encoded) > 2.f * kLarge;  // above what log2 units reach
  }
  // Of a row that may be large or not.
  static __device__ __forceinline__ float probability(float score, float scale, float encoded) {
    float x = large(encoded) ? (__fmul_rn(score, scale) - 0.5f * encoded) * kLog2E
                             : fmaf(score, scale * kLog2E, -encoded);
    return ptx::exp2_approx(x);
  }
};

template <int MT>
struct OnlineSoftmax {
  static constexpr float kSlackLog2 = 8.f;

  float reference[MT][2];  // of rows g and g + 8, in units of the raw score; -inf: no key yet
  float sum[MT][2];        // this lane's part of the row's sum

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      reference[m][0] = reference[m][1] = -kInfinity;
      sum[m][0] = sum[m][1] = 0.f;
    }
  }

  // Scores become probabilities, relative to the reference; `out` follows the reference.
  template <int NT, int OT>
  __device__ __forceinline__ void step(float (&scores)[MT][NT][4], float (&out)[MT][OT][4],
                                       float scale) {
    float scale_log2 = scale * kLog2E;
    float alpha[MT][2];
    bool rare = false;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = scores[m][0][2 * half];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          highest = fmaxf(highest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        }
        highest = quad_max(highest);
        float old = reference[m][half];
        bool above = (highest - old) * scale_log2 > kSlackLog2;
        if (above) reference[m][half] = highest;
        alpha[m][half] = above ? ptx::exp2_approx((old - highest) * scale_log2) : 1.f;
        rare |= above || large(m, half, scale_log2);
      }
    if (__any_sync(~0u, rare)) {  // both leave the other rows' bits alone
      rescale(out, alpha);
      subtract_large(scores, scale);
    }
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float offset = large(m, half, scale_log2) ? 0.f : finite_reference(m, half) * scale_log2;
        float total = 0.f;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            scores[m][n][e] = ptx::exp2_approx(fmaf(scores[m][n][e], scale_log2, -offset));
            total += scores[m][n][e];
          }
        sum[m][half] += total;
      }
  }

  // Divides `out` by the row sums and returns the rows' lse (natural log), of use in lane t = 0.
  template <int OT>
  __device__ __forceinline__ void finish(float (&out)[MT][OT][4], float (&lse)[MT][2],
                                         float scale) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = quad_sum(sum[m][half]);
        float inverse = total == 0.f ? 0.f : 1.f / total;
        lse[m][half] = row_lse(m, half, total, scale);
#pragma unroll
        for (int n = 0; n < OT; ++n) {
          out[m][n][2 * half] *= inverse;
          out[m][n][2 * half + 1] *= inverse;
        }
      }
  }

 private:
  // -inf - -inf is NaN: a row without a visible key is taken relative to 0.
  __device__ __forceinline__ float finite_reference(int m, int half) const {
    return reference[m][half] == -kInfinity ? 0.f : reference[m][half];
  }

  // A score of +inf makes the row's outputs NaN, but not its lse.
  __device__ __forceinline__ float row_lse(int m, int half, float total, float scale) const {
    if (reference[m][half] == kInfinity) return kInfinity;
    if (total == 0.f) return -kInfinity;
    return finite_reference(m, half) * scale + logf(total);
  }

  __device__ __forceinline__ bool large(int m, int half, float scale_log2) const {
    return fabsf(finite_reference(m, half) * scale_log2) > kLargeProductLog2;
  }

  // Scores of rows with a large product become differences of rounded products, in units of the raw
  // score.
  template <int NT>
  __device__ __forceinline__ void subtract_large(float (&scores)[MT][NT][4], float scale) const {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!large(m, half, scale * kLog2E)) continue;
        float product = __fmul_rn(finite_reference(m, half), scale);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            scores[m][n][e] = __fdividef(__fmul_rn(scores[m][n][e], scale) - product, scale);
          }
      }
  }

  template <int OT>
  __device__ __forceinline__ void rescale(float (&out)[MT][OT][4], const float (&alpha)[MT][2]) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      sum[m][0] *= alpha[m][0];
      sum[m][1] *= alpha[m][1];
#pragma unroll
      for (int n = 0; n < OT; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][n][e] *= alpha[m][e / 2];
    }
  }
};

}  // namespace flashattn::tile
