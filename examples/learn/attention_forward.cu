// Chapters 6 and 7: attention without the matrix of scores. A block of threads owns 64 queries, one
// a thread; keys and values pass by in blocks of 32.
#include "attention.cuh"

constexpr int kHeadDim = 64, kBlockM = 64, kBlockN = 32;

struct Params {
  const float *q, *k, *v;  // (heads, seqlen, headdim)
  float *out, *lse;        // (heads, seqlen_q, headdim), (heads, seqlen_q)
  int seqlen_q, seqlen_k;
  float scale;
  bool causal;
};

// Keys [0, full) are visible to every query of the block that starts at first_row, those from `end`
// on to none. Both are rounded to blocks of keys by whoever asks.
struct KeyRange {
  int full, end;
};

__device__ KeyRange key_range(const Params& params, int first_row) {
  if (!params.causal) return {params.seqlen_k, params.seqlen_k};
  int diagonal = first_row + params.seqlen_k - params.seqlen_q;  // the last key of the first query
  return {max(0, min(params.seqlen_k, diagonal + 1)),
          max(0, min(params.seqlen_k, diagonal + kBlockM))};
}

// Rows beyond the end arrive as zeros: 0 * whatever lies there could be NaN.
__device__ void load_block(float (*block)[kHeadDim], const float* rows, int first, int seqlen) {
  for (int i = threadIdx.x; i < kBlockN * kHeadDim; i += blockDim.x) {
    int row = i / kHeadDim, col = i % kHeadDim;
    block[row][col] = first + row < seqlen ? rows[(first + row) * kHeadDim + col] : 0.f;
  }
}

__global__ void attention_forward(Params params) {
  __shared__ float k_block[kBlockN][kHeadDim], v_block[kBlockN][kHeadDim];
  int first_row = blockIdx.x * kBlockM, row = first_row + threadIdx.x;
  int64_t head = blockIdx.y, head_k = head * params.seqlen_k * kHeadDim;
  bool exists = row < params.seqlen_q;

  float q[kHeadDim], acc[kHeadDim];
  for (int d = 0; d < kHeadDim; ++d) {
    q[d] = exists ? params.q[(head * params.seqlen_q + row) * kHeadDim + d] : 0.f;
    acc[d] = 0.f;
  }
  float m = -INFINITY, l = 0.f;
  KeyRange keys = key_range(params, first_row);
  for (int first_key = 0; first_key < keys.end; first_key += kBlockN) {
    __syncthreads();  // nobody reads the blocks before any more
    load_block(k_block, params.k + head_k, first_key, params.seqlen_k);
    load_block(v_block, params.v + head_k, first_key, params.seqlen_k);
    __syncthreads();

    bool partial = first_key + kBlockN > keys.full;
    float s[kBlockN], m_new = m;
    for (int j = 0; j < kBlockN; ++j) {
      s[j] = 0.f;
      for (int d = 0; d < kHeadDim; ++d) s[j] += q[d] * k_block[j][d];
      s[j] *= params.scale;
      int key = first_key + j;
      bool hidden = key >= params.seqlen_k ||
                    (params.causal && key > row + params.seqlen_k - params.seqlen_q);
      if (partial && hidden) s[j] = -INFINITY;
      m_new = fmaxf(m_new, s[j]);
    }
    if (m_new == -INFINITY) continue;  // the query sees nothing yet: -inf - -inf would be NaN
    float alpha = expf(m - m_new);
    m = m_new;
    l *= alpha;
    for (int d = 0; d < kHeadDim; ++d) acc[d] *= alpha;
    for (int j = 0; j < kBlockN; ++j) {
      float p = expf(s[j] - m);
      l += p;
      for (int d = 0; d < kHeadDim; ++d) acc[d] += p * v_block[j][d];
    }
  }
  if (!exists) return;
  float inverse = l == 0.f ? 0.f : 1.f / l;
  for (int d = 0; d < kHeadDim; ++d) {
    params.out[(head * params.seqlen_q + row) * kHeadDim + d] = acc[d] * inverse;
  }
  params.lse[head * params.seqlen_q + row] = l == 0.f ? -INFINITY : m + logf(l);
}

void check(int seqlen_q, int seqlen_k, bool causal) {
  Array q(seqlen_q * kHeadDim), k(seqlen_k * kHeadDim), v(seqlen_k * kHeadDim);
  Array out(q.host.size()), lse(seqlen_q);
  q.fill(0);
  k.fill(1);
  v.fill(2);
  float scale = 1.f / std::sqrt(float(kHeadDim));
  Params params{q.device, k.device, v.device, out.device, lse.device,
                seqlen_q, seqlen_k, scale,    causal};
  dim3 grid((seqlen_q + kBlockM - 1) / kBlockM, 1);
  attention_forward<<<grid, kBlockM>>>(params);
  finish_kernel();

  HostAttention expected = host_attention(q, k, v, seqlen_q, seqlen_k, kHeadDim, causal);
  std::printf("%d x %d, %s\n", seqlen_q, seqlen_k, causal ? "causal" : "full");
  expect_close("  out", out, expected.out, 1e-5);
  lse.to_host();
  for (int i = 0; i < seqlen_q; ++i) {
    if (lse.host[i] == expected.lse[i]) continue;  // -inf
    if (!(std::fabs(lse.host[i] - expected.lse[i]) <= 1e-5)) {
      std::fprintf(stderr, "lse[%d] = %g, expected %g\n", i, lse.host[i], expected.lse[i]);
      std::exit(1);
    }
  }
}

int main() {
  for (bool causal : {false, true}) {
    check(128, 128, causal);
    check(100, 150, causal);
  }
  check(150, 100, true);  // the first 50 queries see no key
}
