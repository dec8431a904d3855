// Chapter 8: the gradients of attention from q, k, v, out and lse. Two kernels: one thread keeps a
// key and value while queries pass by, or a query while keys and values pass by.
#include "attention.cuh"

constexpr int kHeadDim = 32, kThreads = 64, kBlock = 32;

struct Params {
  const float *q, *k, *v, *dout;  // (seqlen, headdim)
  const float *lse, *delta;       // (seqlen_q,)
  float *dq, *dk, *dv;
  int seqlen_q, seqlen_k;
  float scale;
  bool causal;
};

__device__ bool visible(const Params& params, int row, int key) {
  return row < params.seqlen_q && key < params.seqlen_k &&
         (!params.causal || key <= row + params.seqlen_k - params.seqlen_q);
}

__device__ float dot(const float* a, const float* b) {
  float sum = 0.f;
  for (int d = 0; d < kHeadDim; ++d) sum += a[d] * b[d];
  return sum;
}

__device__ void load_row(float (&row)[kHeadDim], const float* rows, int index, int seqlen) {
  for (int d = 0; d < kHeadDim; ++d) row[d] = index < seqlen ? rows[index * kHeadDim + d] : 0.f;
}

__device__ void load_block(float (*block)[kHeadDim], const float* rows, int first, int seqlen) {
  for (int i = threadIdx.x; i < kBlock * kHeadDim; i += blockDim.x) {
    int row = i / kHeadDim, col = i % kHeadDim;
    block[row][col] = first + row < seqlen ? rows[(first + row) * kHeadDim + col] : 0.f;
  }
}

__global__ void row_products(const float* out, const float* dout, float* delta, int seqlen_q) {
  int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < seqlen_q) delta[row] = dot(out + row * kHeadDim, dout + row * kHeadDim);
}

__global__ void gradient_of_k_and_v(Params params) {
  __shared__ float q_block[kBlock][kHeadDim], dout_block[kBlock][kHeadDim];
  int first_key = blockIdx.x * kThreads, key = first_key + threadIdx.x;
  float k[kHeadDim], v[kHeadDim], dk[kHeadDim] = {}, dv[kHeadDim] = {};
  load_row(k, params.k, key, params.seqlen_k);
  load_row(v, params.v, key, params.seqlen_k);
  // The first query that sees the first key of this block; those before it see none of them.
  int begin = params.causal ? max(0, first_key + params.seqlen_q - params.seqlen_k) : 0;
  for (int first = begin / kBlock * kBlock; first < params.seqlen_q; first += kBlock) {
    __syncthreads();
    load_block(q_block, params.q, first, params.seqlen_q);
    load_block(dout_block, params.dout, first, params.seqlen_q);
    __syncthreads();
    for (int i = 0; i < kBlock; ++i) {
      int row = first + i;
      if (!visible(params, row, key)) continue;
      float p = expf(params.scale * dot(q_block[i], k) - params.lse[row]);
      float ds = p * (dot(dout_block[i], v) - params.delta[row]);
      for (int d = 0; d < kHeadDim; ++d) {
        dv[d] += p * dout_block[i][d];
        dk[d] += ds * q_block[i][d];
      }
    }
  }
  if (key >= params.seqlen_k) return;
  for (int d = 0; d < kHeadDim; ++d) {
    params.dk[key * kHeadDim + d] = params.scale * dk[d];
    params.dv[key * kHeadDim + d] = dv[d];
  }
}

__global__ void gradient_of_q(Params params) {
  __shared__ float k_block[kBlock][kHeadDim], v_block[kBlock][kHeadDim];
  int first_row = blockIdx.x * kThreads, row = first_row + threadIdx.x;
  float q[kHeadDim], dout[kHeadDim], dq[kHeadDim] = {};
  load_row(q, params.q, row, params.seqlen_q);
  load_row(dout, params.dout, row, params.seqlen_q);
  float lse = row < params.seqlen_q ? params.lse[row] : 0.f;
  float delta = row < params.seqlen_q ? params.delta[row] : 0.f;
  int end = params.seqlen_k;
  if (params.causal) end = min(end, first_row + kThreads + params.seqlen_k - params.seqlen_q);
  for (int first = 0; first < end; first += kBlock) {
    __syncthreads();
    load_block(k_block, params.k, first, params.seqlen_k);
    load_block(v_block, params.v, first, params.seqlen_k);
    __syncthreads();
    for (int j = 0; j < kBlock; ++j) {
      if (!visible(params, row, first + j)) continue;
      float p = expf(params.scale * dot(q, k_block[j]) - lse);
      float ds = p * (dot(dout, v_block[j]) - delta);
      for (int d = 0; d < kHeadDim; ++d) dq[d] += ds * k_block[j][d];
    }
  }
  if (row >= params.seqlen_q) return;
  for (int d = 0; d < kHeadDim; ++d) params.dq[row * kHeadDim + d] = params.scale * dq[d];
}

void check(int seqlen_q, int seqlen_k, bool causal) {
  int size_q = seqlen_q * kHeadDim, size_k = seqlen_k * kHeadDim;
  Array q(size_q), k(size_k), v(size_k), dout(size_q), out(size_q), lse(seqlen_q), delta(seqlen_q);
  Array dq(size_q), dk(size_k), dv(size_k);
  q.fill(0);
  k.fill(1);
  v.fill(2);
  dout.fill(3);
  HostAttention forward = host_attention(q, k, v, seqlen_q, seqlen_k, kHeadDim, causal);
  out.host.assign(forward.out.begin(), forward.out.end());
  lse.host.assign(forward.lse.begin(), forward.lse.end());
  out.to_device();
  lse.to_device();

  float scale = 1.f / std::sqrt(float(kHeadDim));
  Params params{q.device,  k.device,  v.device, dout.device, lse.device, delta.device, dq.device,
                dk.device, dv.device, seqlen_q, seqlen_k,    scale,      causal};
  int blocks_q = (seqlen_q + kThreads - 1) / kThreads,
      blocks_k = (seqlen_k + kThreads - 1) / kThreads;
  row_products<<<blocks_q, kThreads>>>(out.device, dout.device, delta.device, seqlen_q);
  gradient_of_k_and_v<<<blocks_k, kThreads>>>(params);
  gradient_of_q<<<blocks_q, kThreads>>>(params);
  finish_kernel();

  std::vector<double> expected_dq(size_q), expected_dk(size_k), expected_dv(size_k);
  for (int i = 0; i < seqlen_q; ++i) {
    const float* dout_row = &dout.host[i * kHeadDim];
    double row_product = 0.0;
    for (int d = 0; d < kHeadDim; ++d) row_product += dout_row[d] * forward.out[i * kHeadDim + d];
    for (int j = 0; j < seqlen_k; ++j) {
      double p = forward.p[static_cast<size_t>(i) * seqlen_k + j], dp = 0.0;
      for (int d = 0; d < kHeadDim; ++d) dp += dout_row[d] * v.host[j * kHeadDim + d];
      double ds = p * (dp - row_product) * scale;
      for (int d = 0; d < kHeadDim; ++d) {
        expected_dq[i * kHeadDim + d] += ds * k.host[j * kHeadDim + d];
        expected_dk[j * kHeadDim + d] += ds * q.host[i * kHeadDim + d];
        expected_dv[j * kHeadDim + d] += p * dout_row[d];
      }
    }
  }
  std::printf("%d x %d, %s\n", seqlen_q, seqlen_k, causal ? "causal" : "full");
  expect_close("  dq", dq, expected_dq, 1e-4);
  expect_close("  dk", dk, expected_dk, 1e-4);
  expect_close("  dv", dv, expected_dv, 1e-4);
}

int main() {
  for (bool causal : {false, true}) {
    check(128, 128, causal);
    check(70, 100, causal);
  }
  check(100, 70, true);  // the first 30 queries see no key
}
