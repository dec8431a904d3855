// Chapter 3: a kernel that takes a view, by its shape and strides, as torch hands them over.
#include "learn.cuh"

// A view of four dimensions. Strides are in elements, and 64-bit: a product of two 32-bit numbers
// would overflow in a tensor of more than 2^31 elements.
struct View {
  const float* data;
  int64_t shape[4];
  int64_t stride[4];

  __device__ int64_t offset(int64_t index) const {
    int64_t result = 0;
#pragma unroll
    for (int dim = 3; dim >= 0; --dim) {
      result += index % shape[dim] * stride[dim];
      index /= shape[dim];
    }
    return result;
  }
};

__global__ void make_contiguous(View in, float* out, int64_t n) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in.data[in.offset(i)];
}

int main() {
  // (batch, seqlen, heads, headdim) seen as (batch, heads, seqlen, headdim): x.transpose(1, 2).
  int64_t batch = 2, seqlen = 65, heads = 3, headdim = 32, n = batch * seqlen * heads * headdim;
  Array x(n), out(n);
  x.fill(0);
  View view{x.device,
            {batch, heads, seqlen, headdim},
            {seqlen * heads * headdim, headdim, heads * headdim, 1}};
  int threads = 256;
  int64_t blocks = (n + threads - 1) / threads;
  make_contiguous<<<blocks, threads>>>(view, out.device, n);
  finish_kernel();

  std::vector<double> expected;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t s = 0; s < seqlen; ++s)
        for (int64_t d = 0; d < headdim; ++d)
          expected.push_back(x.host[((b * seqlen + s) * heads + h) * headdim + d]);
  expect_close("x.transpose(1, 2)", out, expected, 0.0);
}
