// One head's attention on the host, in double: what chapters 6 to 8 compare with.
#pragma once

#include <algorithm>

#include "learn.cuh"

struct HostAttention {
  std::vector<double> p, out, lse;
};

// q (seqlen_q, headdim), k and v (seqlen_k, headdim); query i sees key j when j <= i + seqlen_k -
// seqlen_q, if causal.
inline HostAttention host_attention(const Array<>& q, const Array<>& k, const Array<>& v,
                                    int seqlen_q, int seqlen_k, int headdim, bool causal) {
  double scale = 1.0 / std::sqrt(headdim);
  HostAttention result{std::vector<double>(static_cast<size_t>(seqlen_q) * seqlen_k),
                       std::vector<double>(static_cast<size_t>(seqlen_q) * headdim),
                       std::vector<double>(seqlen_q)};
  for (int i = 0; i < seqlen_q; ++i) {
    double* p = &result.p[static_cast<size_t>(i) * seqlen_k];
    double largest = -INFINITY, sum = 0.0;
    int visible = causal ? std::max(0, std::min(seqlen_k, i + seqlen_k - seqlen_q + 1)) : seqlen_k;
    for (int j = 0; j < visible; ++j) {
      double s = 0.0;
      for (int d = 0; d < headdim; ++d) s += q.host[i * headdim + d] * k.host[j * headdim + d];
      p[j] = scale * s;
      largest = std::max(largest, p[j]);
    }
    for (int j = 0; j < visible; ++j) sum += p[j] = std::exp(p[j] - largest);
    result.lse[i] = visible ? largest + std::log(sum) : -INFINITY;
    for (int j = 0; j < visible; ++j) {
      p[j] /= sum;
      for (int d = 0; d < headdim; ++d) {
        result.out[i * headdim + d] += p[j] * v.host[j * headdim + d];
      }
    }
  }
  return result;
}
