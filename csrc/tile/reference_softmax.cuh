// Softmax relative to a reference that moves rarely. Softmax needs a reference, not the maximum:
// one from which probabilities neither overflow nor lose what counts. A row's reference is the
// maximum of the first keys it sees; it moves when a score exceeds it by more than kRoom octaves.
// Few keys make a poor one: where half of the others lie just above it, their probabilities round
// twice as coarsely as below. So where a sequence has fewer than kFewKeys in its last block, which
// comes first, references follow the next block, too; rows that a mask leaves few keep theirs.
//
// Nobody looks for maxima, until a row that leaves its room shows in a block's sum; the kernel then
// computes the block's scores again and raises the reference, and the warp watches every block from
// there on. In bf16, which has fp32's exponents, probabilities are kept kBias octaves down, between
// what overflows and what underflows. In fp16 they end at 2^16, and below 2^-24 they are 0: the
// reference is where they are 1.
//
// What a row adds depends on its own scores alone: watching changes no bit of a row that stays in
// its room.
#pragma once

#include "common/params.h"
#include "tile/softmax.cuh"

namespace flashattn::tile {

template <DType kType>
struct ReferenceSoftmax {
  static constexpr bool kWide = kType == DType::kBFloat16;
  static constexpr float kBias = kWide ? 20.f : 0.f;
  static constexpr float kRoom = kWide ? 40.f : 15.f;
  static constexpr float kLimit = kWide ? 1048576.f : 32768.f;  // 2^(kRoom - kBias)
  static constexpr int kFewKeys = 16;
  enum Watch {
    kUnsettled = 1,  // a row has no reference yet, one of few keys, or a large one
    kAlarmed = 2,    // a row left its room before
  };

  // How scores become exponents: score * factor - minus, for the rows g and g + 8.
  struct Exponents {
    float factor[2];
    float minus[2];
  };

  struct Rows {
    bool is[2];
    __device__ __forceinline__ bool any() const { return __any_sync(~0u, is[0] || is[1]); }
  };

  float peak[2];           // the references: encode() of a product; -inf: no key yet
  float sum[2];            // this lane's part of the rows' sums
  int watch = kUnsettled;  // why the warp looks for maxima; the same in all lanes

  __device__ __forceinline__ ReferenceSoftmax() {
    peak[0] = peak[1] = -kInfinity;
    sum[0] = sum[1] = 0.f;
  }

  // Whether the warp looks for maxima.
  __device__ __forceinline__ bool watching() const { return watch != 0; }

  __device__ __forceinline__ Exponents exponents(float scale_log2) const {
    return {{scale_log2, scale_log2}, {peak[0] + kBias, peak[1] + kBias}};
  }

  // Raises the references of rows that leave their `room`, given the highest of the scores that
  // come: this lane's, of rows g and g + 8. `alpha`: what to scale earlier results by. Returns
  // which rows moved.
  __device__ __forceinline__ Rows raise(const float (&highest)[2], float room, float scale,
                                        float (&alpha)[2]) {
    Rows moved;
    bool unsettled = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float product = encode(quad_max(highest[half]), scale);
      float rise = decode_log2(product) - decode_log2(peak[half]);
      moved.is[half] = rise > room;
      alpha[half] = ptx::exp2_approx(moved.is[half] ? -rise : 0.f);
      peak[half] = moved.is[half] ? product : peak[half];
      sum[half] *= alpha[half];
      unsettled |= peak[half] == -kInfinity || large(peak[half]);
    }
    watch = (watch & kAlarmed) | (__any_sync(~0u, unsettled) ? kUnsettled : 0);
    return moved;
  }

  // This lane's highest scores of rows g and g + 8, in `highest` so far.
  template <int NT>
  static __device__ __forceinline__ void highest_of(const float (&scores)[1][NT][4],
                                                    float (&highest)[2]) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) highest[e / 2] = fmaxf(highest[e / 2], scores[0][n][e]);
  }

  // The form of scores where a row may have no key yet, or a large product. Scores of such rows
  // (see tile/softmax.cuh) become differences of rounded products.
  template <int NT>
  __device__ __forceinline__ Exponents careful_exponents(float (&scores)[1][NT][4],
                                                         float scale) const {
    Exponents form;
    bool any_large = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bool rounded = large(guarded(half));
      any_large |= rounded;
      form.factor[half] = rounded ? kLog2E : scale * kLog2E;
      form.minus[half] = rounded ? kBias : guarded(half) + kBias;
    }
    if (__any_sync(~0u, any_large)) subtract_large(scores, scale);
    return form;
  }

  // Scores become probabilities; returns this lane's part of their sums.
  template <int NT>
  static __device__ __forceinline__ float2 exponentiate(float (&scores)[1][NT][4],
                                                        const Exponents& form) {
    float totals[4];
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float p = ptx::exp2_approx(fmaf(scores[0][n][e], form.factor[e / 2], -form.minus[e / 2]));
        scores[0][n][e] = p;
        totals[e] = n == 0 ? p : totals[e] + p;
      }
    return {totals[0] + totals[1], totals[2] + totals[3]};
  }

  // Whether one of the warp's rows may have left its room, a NaN included, by a block's sums.
  static __device__ __forceinline__ bool left_room(float2 fresh) {
    return __any_sync(~0u, !(fresh.x + fresh.y <= kLimit));
  }

  __device__ __forceinline__ void add(float2 fresh) {
    sum[0] += fresh.x;
    sum[1] += fresh.y;
  }

  // What the output has to be scaled by in the end, and the rows' lse (natural log).
  __device__ __forceinline__ void finish(float (&inverse)[2], float (&lse)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = quad_sum(sum[half]);
      inverse[half] = total == 0.f ? 0.f : ptx::reciprocal_approx(total);
      lse[half] = row_lse(half, total);
    }
  }

 private:
  // A row's highest product: in log2 units; where that is large, twice the rounded product itself,
  // which is above what log2 units reach.
  static __device__ __forceinline__ float encode(float score, float scale) {
    float product_log2 = score * (scale * kLog2E);
    return large(product_log2) ? 2.f * __fmul_rn(score, scale) : product_log2;
  }
  static __device__ __forceinline__ bool large(float encoded) {
    return fabsf(encoded) > kLargeProductLog2;
  }
  static __device__ __forceinline__ float decode_log2(float encoded) {
    return large(encoded) ? encoded * (0.5f * kLog2E) : encoded;
  }

  // -inf - -inf is NaN: a row without a visible key is taken relative to 0.
  __device__ __forceinline__ float guarded(int half) const {
    return peak[half] == -kInfinity ? 0.f : peak[half];
  }

  // The other rows' scores are multiplied by 1.
  template <int NT>
  __device__ __forceinline__ void subtract_large(float (&scores)[1][NT][4], float scale) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bool rounded = large(guarded(half));
      float factor = rounded ? scale : 1.f, product = rounded ? 0.5f * guarded(half) : 0.f;
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          scores[0][n][e] = __fsub_rn(__fmul_rn(scores[0][n][e], factor), product);
        }
    }
  }

  // A score of +inf makes the row's outputs NaN, but not its lse. Without branches: nothing else is
  // computed meanwhile.
  __device__ __forceinline__ float row_lse(int half, float total) const {
    constexpr float kLn2 = 0.69314718055994531f;
    constexpr float kUnbias = kWide ? 1048576.f : 1.f;  // 2^kBias
    float logarithm = ptx::log2_approx(total * kUnbias), reference = guarded(half);
    float lse =
        large(reference) ? fmaf(logarithm, kLn2, 0.5f * reference) : (reference + logarithm) * kLn2;
    return peak[half] == kInfinity ? kInfinity : lse;
  }
};

}  // namespace flashattn::tile
