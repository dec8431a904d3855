// What the CUDA programs of this folder share: checked calls, arrays on both sides, a comparison.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#define CHECK_CUDA(call)                                                                  \
  do {                                                                                    \
    cudaError_t error = (call);                                                           \
    if (error != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error)); \
      std::exit(1);                                                                       \
    }                                                                                     \
  } while (0)

// The same values on the host and on the GPU; each copy is asked for.
template <typename T = float>
struct Array {
  std::vector<T> host;
  T* device = nullptr;

  explicit Array(size_t size) : host(size) { CHECK_CUDA(cudaMalloc(&device, size * sizeof(T))); }
  ~Array() { cudaFree(device); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  size_t bytes() const { return host.size() * sizeof(T); }
  void to_device() { CHECK_CUDA(cudaMemcpy(device, host.data(), bytes(), cudaMemcpyDefault)); }
  void to_host() { CHECK_CUDA(cudaMemcpy(host.data(), device, bytes(), cudaMemcpyDefault)); }

  // Normally distributed, the same in every run.
  void fill(unsigned seed, float scale = 1.f) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal(0.f, scale);
    for (T& value : host) value = T(normal(engine));
    to_device();
  }
};

// After a launch: whether it was accepted, and whether it ran to its end.
inline void finish_kernel() {
  CHECK_CUDA(cudaGetLastError());
  CHECK_CUDA(cudaDeviceSynchronize());
}

// Compares what the GPU left in `got` with `expected`; ends the program where they differ.
inline void expect_close(const char* name, Array<float>& got, const std::vector<double>& expected,
                         double tolerance) {
  got.to_host();
  double worst = 0.0;
  for (size_t i = 0; i < expected.size(); ++i) {
    double error = std::fabs(got.host[i] - expected[i]);
    if (!(error <= tolerance)) {  // NaN is not close to anything
      std::fprintf(stderr, "%s[%zu] = %g, expected %g\n", name, i, got.host[i], expected[i]);
      std::exit(1);
    }
    worst = std::fmax(worst, error);
  }
  std::printf("%s: %zu values, largest error %.1e\n", name, expected.size(), worst);
}

// Milliseconds of one run, the mean of ten after a first one.
template <typename Run>
float time_ms(Run run) {
  constexpr int kRuns = 10;
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  run();
  CHECK_CUDA(cudaEventRecord(begin));
  for (int i = 0; i < kRuns; ++i) run();
  CHECK_CUDA(cudaEventRecord(end));
  CHECK_CUDA(cudaEventSynchronize(end));
  float ms = 0.f;
  CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
  return ms / kRuns;
}
