// Vectors of fp32 in GCC's vector extension: code above this header is written once and compiled
// for each instruction set. Included by cpu_isa.h alone.
#pragma once

namespace flashattn::FLASHATTN_CPU_ISA {

constexpr int kLanes = FLASHATTN_CPU_LANES;
constexpr float kInfinity = __builtin_inff();

typedef float Vec __attribute__((vector_size(4 * FLASHATTN_CPU_LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * FLASHATTN_CPU_LANES)));
typedef float VecMemory
    __attribute__((vector_size(4 * FLASHATTN_CPU_LANES), aligned(4), may_alias));
typedef int32_t IntMemory
    __attribute__((vector_size(4 * FLASHATTN_CPU_LANES), aligned(4), may_alias));

// Not std::min and the like: the linker keeps one copy of a shared template, perhaps this one.
FLASHATTN_CPU_INLINE int min(int a, int b) { return a < b ? a : b; }
FLASHATTN_CPU_INLINE int max(int a, int b) { return a > b ? a : b; }
FLASHATTN_CPU_INLINE int round_up(int x, int multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

inline void fill(float* to, int64_t n, float value) {
  for (int64_t i = 0; i < n; ++i) to[i] = value;
}

FLASHATTN_CPU_INLINE Vec load(const float* p) { return *reinterpret_cast<const VecMemory*>(p); }
FLASHATTN_CPU_INLINE IntVec load(const int32_t* p) {
  return *reinterpret_cast<const IntMemory*>(p);
}
FLASHATTN_CPU_INLINE void store(float* p, Vec x) { *reinterpret_cast<VecMemory*>(p) = x; }
FLASHATTN_CPU_INLINE Vec broadcast(float x) { return x - Vec{}; }
FLASHATTN_CPU_INLINE IntVec broadcast(int32_t x) { return x - IntVec{}; }

// Of two numbers the larger; a NaN in `x` is dropped, one in `running` stays.
FLASHATTN_CPU_INLINE Vec max_into(Vec running, Vec x) { return x > running ? x : running; }

// e^x within 1 ulp for x below 88 and results that are normal numbers; smaller ones are 0. NaN for
// NaN and inf. x = n ln2 + r with |r| <= ln2 / 2; e^r = 1 + r + r^2 q(r), q a minimax polynomial.
FLASHATTN_CPU_INLINE Vec exp(Vec x) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  // 1.5 * 2^23, adding which rounds to an integer, and the exponent's bias.
  constexpr float kRound = 12582912.f + 127.f;
  constexpr float kMin = -87.3365f;
  Vec shifted = x * kLog2E + kRound;
  Vec n = shifted - kRound;
  Vec r = x - n * kLn2High;
  r = r - n * kLn2Low;
  Vec q = r * 0.0013814539f + 0.0083687454f;
  q = q * r + 0.041668389f;
  q = q * r + 0.16666521f;
  q = q * r + 0.49999994f;
  Vec e_r = (q * (r * r) + r) + 1.f;
  IntVec exponent = reinterpret_cast<IntVec>(shifted) << 23;
  Vec result = e_r * reinterpret_cast<Vec>(exponent);
  return x < kMin ? Vec{} : result;
}

}  // namespace flashattn::FLASHATTN_CPU_ISA
