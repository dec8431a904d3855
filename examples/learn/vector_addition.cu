// Chapter 1: out = x + y, one element a thread.
#include "learn.cuh"

__global__ void add(const float* x, const float* y, float* out, int64_t n) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + y[i];
}

int main() {
  int64_t n = 100'003;  // no multiple of the block: the last one has threads without an element
  Array x(n), y(n), out(n);
  x.fill(0);
  y.fill(1);

  int threads = 256;
  int64_t blocks = (n + threads - 1) / threads;
  add<<<blocks, threads>>>(x.device, y.device, out.device, n);
  finish_kernel();

  std::vector<double> expected(n);
  for (int64_t i = 0; i < n; ++i) expected[i] = x.host[i] + y.host[i];
  expect_close("x + y", out, expected, 0.0);
}
