// Chapter 2: how fast memory is read and written, by width of the loads.
#include "learn.cuh"

template <typename T>
__global__ void copy(const T* in, T* out, int64_t n) {
  int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < n; i += threads) out[i] = in[i];
}

// Neighbouring threads read addresses `stride` elements apart: each takes a sector of its own.
__global__ void copy_scattered(const float* in, float* out, int64_t n, int64_t stride) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i % (n / stride) * stride + i / (n / stride)];
}

template <typename Run>
void report(const char* name, int64_t bytes, Run run) {
  std::printf("%-28s %8.1f GB/s\n", name, bytes / time_ms(run) / 1e6);
}

int main() {
  int64_t n = int64_t{1} << 26;  // 256 MiB: more than L2 holds
  Array in(n), out(n);
  in.fill(0);
  int threads = 256, blocks = 2048;
  int64_t bytes = 2 * n * sizeof(float);  // each element is read once and written once

  report("copy, 4 bytes a load", bytes,
         [&] { copy<<<blocks, threads>>>(in.device, out.device, n); });
  report("copy, 16 bytes a load", bytes, [&] {
    copy<<<blocks, threads>>>(reinterpret_cast<float4*>(in.device),
                              reinterpret_cast<float4*>(out.device), n / 4);
  });
  finish_kernel();
  expect_close("copy", out, {in.host.begin(), in.host.end()}, 0.0);
  report("copy, loads 128 bytes apart", bytes,
         [&] { copy_scattered<<<n / threads, threads>>>(in.device, out.device, n, 32); });
  finish_kernel();
}
