// Chapter 4: C = A B, by single elements, by blocks in shared memory, and on tensor cores.
#include <cuda_fp16.h>
#include <mma.h>

#include "learn.cuh"

// Each thread reads a row of A and a column of B: 2 K loads for 2 K FLOPs.
__global__ void matmul_naive(const float* a, const float* b, float* c, int m, int n, int k) {
  int row = blockIdx.y * blockDim.y + threadIdx.y, col = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= m || col >= n) return;
  float sum = 0.f;
  for (int i = 0; i < k; ++i) sum += a[row * k + i] * b[i * n + col];
  c[row * n + col] = sum;
}

// A block of threads shares what it loads: each element of A and B is read by it once.
constexpr int kBlock = 16;

__global__ void matmul_blocked(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float a_block[kBlock][kBlock], b_block[kBlock][kBlock];
  int row = blockIdx.y * kBlock + threadIdx.y, col = blockIdx.x * kBlock + threadIdx.x;
  float sum = 0.f;
  for (int first = 0; first < k; first += kBlock) {
    int a_col = first + threadIdx.x, b_row = first + threadIdx.y;
    a_block[threadIdx.y][threadIdx.x] = row < m && a_col < k ? a[row * k + a_col] : 0.f;
    b_block[threadIdx.y][threadIdx.x] = b_row < k && col < n ? b[b_row * n + col] : 0.f;
    __syncthreads();  // both blocks are complete
    for (int i = 0; i < kBlock; ++i) sum += a_block[threadIdx.y][i] * b_block[i][threadIdx.x];
    __syncthreads();  // nobody reads them any more
  }
  if (row < m && col < n) c[row * n + col] = sum;
}

// One warp, one 16x16 tile of C: a call of mma_sync multiplies two 16x16 fragments that are spread
// over the registers of its 32 threads. Sizes are multiples of 16.
__global__ void matmul_tensor_cores(const half* a, const half* b, float* c, int n, int k) {
  using namespace nvcuda;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a_tile;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> b_tile;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> c_tile;
  int row = blockIdx.y * 16, col = blockIdx.x * 16;
  wmma::fill_fragment(c_tile, 0.f);
  for (int first = 0; first < k; first += 16) {
    wmma::load_matrix_sync(a_tile, a + row * k + first, k);
    wmma::load_matrix_sync(b_tile, b + first * n + col, n);
    wmma::mma_sync(c_tile, a_tile, b_tile, c_tile);
  }
  wmma::store_matrix_sync(c + row * n + col, c_tile, n, wmma::mem_row_major);
}

template <typename A, typename B>
std::vector<double> product(const Array<A>& a, const Array<B>& b, int m, int n, int k) {
  std::vector<double> c(static_cast<size_t>(m) * n);
  for (int row = 0; row < m; ++row)
    for (int i = 0; i < k; ++i)
      for (int col = 0; col < n; ++col)
        c[row * n + col] += double(float(a.host[row * k + i])) * double(float(b.host[i * n + col]));
  return c;
}

int main() {
  {
    int m = 130, n = 70, k = 100;
    Array a(m * k), b(k * n), c(m * n);
    a.fill(0);
    b.fill(1);
    dim3 threads(kBlock, kBlock), grid((n + kBlock - 1) / kBlock, (m + kBlock - 1) / kBlock);
    std::vector<double> expected = product(a, b, m, n, k);
    matmul_naive<<<grid, threads>>>(a.device, b.device, c.device, m, n, k);
    finish_kernel();
    expect_close("naive", c, expected, 1e-4);
    matmul_blocked<<<grid, threads>>>(a.device, b.device, c.device, m, n, k);
    finish_kernel();
    expect_close("blocked", c, expected, 1e-4);
  }
  int m = 128, n = 64, k = 96;
  Array<half> a(m * k), b(k * n);
  Array c(m * n);
  a.fill(0);
  b.fill(1);
  matmul_tensor_cores<<<dim3(n / 16, m / 16), 32>>>(a.device, b.device, c.device, n, k);
  finish_kernel();
  expect_close("tensor cores", c, product(a, b, m, n, k), 1e-4);
}
