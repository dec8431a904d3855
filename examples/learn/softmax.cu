// Chapter 5: softmax of rows of any length in one pass over what it reads, one warp a row.
#include "learn.cuh"

// What a part of a row is worth: its maximum, and the sum of exp(x - maximum) over it. The part
// without elements is (-inf, 0).
struct State {
  float m, l;
};

__device__ State merge(State a, State b) {
  float m = fmaxf(a.m, b.m);
  if (m == -INFINITY) return a;  // both are empty: -inf - -inf would be NaN
  return {m, a.l * expf(a.m - m) + b.l * expf(b.m - m)};
}

__global__ void softmax(const float* x, float* out, int rows, int cols) {
  int row = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x;
  if (row >= rows) return;
  x += static_cast<int64_t>(row) * cols;
  out += static_cast<int64_t>(row) * cols;
  State state{-INFINITY, 0.f};
  for (int col = lane; col < cols; col += 32) state = merge(state, {x[col], 1.f});
  // Five exchanges leave the state of the whole row in every lane, in whatever order they merge.
  for (int distance = 16; distance > 0; distance /= 2) {
    State other{__shfl_xor_sync(~0u, state.m, distance), __shfl_xor_sync(~0u, state.l, distance)};
    state = merge(state, other);
  }
  for (int col = lane; col < cols; col += 32) out[col] = expf(x[col] - state.m) / state.l;
}

int main() {
  int rows = 37, cols = 1001, warps = 4;
  Array x(rows * cols), out(rows * cols);
  x.fill(0, 100.f);  // exp(x) itself would overflow
  softmax<<<(rows + warps - 1) / warps, dim3(32, warps)>>>(x.device, out.device, rows, cols);
  finish_kernel();

  std::vector<double> expected(x.host.size());
  for (int row = 0; row < rows; ++row) {
    const float* first = &x.host[row * cols];
    double largest = -INFINITY, sum = 0.0;
    for (int col = 0; col < cols; ++col) largest = std::fmax(largest, first[col]);
    for (int col = 0; col < cols; ++col) sum += std::exp(first[col] - largest);
    for (int col = 0; col < cols; ++col)
      expected[row * cols + col] = std::exp(first[col] - largest) / sum;
  }
  expect_close("softmax", out, expected, 1e-5);
}
