// Forward on the CPU: one task is a block of queries of one head, against the key blocks that they
// see, with the online softmax. Scores are kept transposed (keys, queries): a query is a lane, so
// that maxima, sums and masks need no step across lanes, and K and V are read as they lie.
#pragma once

#include "kernels/cpu_convert.h"
#include "kernels/cpu_matmul.h"

namespace flashattn::FLASHATTN_CPU_ISA {

// Queries are taken in panels of one tile's width.
constexpr int kPanel = kTileColumns;

struct ForwardScratch {
  static constexpr int kRows = kCpuForwardTile.block_m, kKeys = kCpuForwardTile.block_n;
  static_assert(kRows % kPanel == 0);

  Matrix k, v;          // (block_n, headdim), (block_n, headdim_v): unless they are packed
  Matrix finite_v;      // (block_n, headdim_v): where v holds NaN or Inf behind a mask
  Matrix scores;        // (block_n, kPanel): scores, then probabilities
  Matrix query_panels;  // (panels * headdim, kPanel): q transposed, with the sign of softmax_scale
  Matrix out_panels;    // (panels * headdim_v, kPanel): not yet divided by row_sum
  Matrix row_max;       // (panels, kPanel): of the scaled scores
  Matrix row_sum;       // (panels, kPanel)
  Matrix correction;    // (1, kPanel): the factor of what was summed before this block
  int headdim, headdim_v;  // rows a panel, whole tiles

  static int64_t floats(const ProblemShape& shape) {
    ForwardScratch scratch;
    return scratch.place(nullptr, shape);
  }

  // Lays the matrices out in `memory`; returns the floats needed.
  int64_t place(float* memory, const ProblemShape& shape) {
    int keys = capacity(shape.seqlens_k, kKeys);
    int panels = (capacity(shape.seqlens_q, kRows) + kPanel - 1) / kPanel;
    headdim = round_up(shape.headdim, kTileRows);
    headdim_v = round_up(shape.headdim_v, kTileRows);
    int64_t used = 0;
    auto take = [&](int rows, int stride) {
      Matrix part = {memory + used, stride};
      used += static_cast<int64_t>(rows) * stride;
      return part;
    };
    k = take(keys, padded_stride(shape.headdim));
    v = take(keys, padded_stride(shape.headdim_v));
    finite_v = take(keys, padded_stride(shape.headdim_v));
    scores = take(keys, kPanel);
    query_panels = take(panels * headdim, kPanel);
    out_panels = take(panels * headdim_v, kPanel);
    row_max = take(panels, kPanel);
    row_sum = take(panels, kPanel);
    correction = take(1, kPanel);
    return used;
  }

  Matrix query_panel(int panel) const { return query_panels.from(panel * headdim, 0); }
  Matrix out_panel(int panel) const { return out_panels.from(panel * headdim_v, 0); }
};

// Scores that a query doesn't see become -inf. Rows of `scores` are the keys from `key_begin` on.
inline void mask_scores(Matrix scores, int key_begin, int keys, const SequenceMask& mask,
                        int row_begin) {
  int32_t begin[kPanel], end[kPanel];
  for (int i = 0; i < kPanel; ++i) {
    KeyRange range = mask.visible_keys(row_begin + i);
    begin[i] = range.begin;
    end[i] = range.end;
  }
  for (int n = 0; n < keys; ++n) {
    IntVec key = broadcast(key_begin + n);
    FLASHATTN_CPU_UNROLL
    for (int j = 0; j < kTileVecs; ++j) {
      float* p = scores.at(n, j * kLanes);
      IntVec visible = (key >= load(begin + j * kLanes)) & (key < load(end + j * kLanes));
      store(p, visible ? load(p) : broadcast(-kInfinity));
    }
  }
}

// softmax_scale in two factors: q's is exact, the scores' is positive, so that their maximum can be
// taken before it is applied, in one instruction with the subtraction.
struct ScoreScale {
  float sign, magnitude;

  explicit ScoreScale(float scale)
      : magnitude(scale == 0.f ? 1.f : (scale < 0.f ? -scale : scale)) {
    sign = scale / magnitude;
  }
};

// scale * score - maximum in one rounding is not 0 where maximum is that very product, rounded, but
// half a unit in its last place: nothing for small products, everything for large ones. Rows whose
// maximum is above this take their products rounded.
constexpr float kLargeScore = 65536;

// Scores of rows with a large maximum are scaled here; `factor` is what is left to multiply with.
inline void scale_large_scores(Matrix scores, int keys, float scale, const float* row_max,
                               Vec* factor) {
  bool any = false;
  for (int i = 0; i < kPanel; ++i) any |= row_max[i] > kLargeScore || row_max[i] < -kLargeScore;
  FLASHATTN_CPU_UNROLL
  for (int j = 0; j < kTileVecs; ++j) factor[j] = broadcast(scale);
  if (!any) return;
  for (int j = 0; j < kTileVecs; ++j) {
    Vec maximum = load(row_max + j * kLanes);
    IntVec large = (maximum > kLargeScore) | (maximum < -kLargeScore);
    for (int n = 0; n < keys; ++n) {
      float* p = scores.at(n, j * kLanes);
      store(p, large ? load(p) * scale : load(p));
    }
    factor[j] = large ? broadcast(1.f) : factor[j];
  }
}

// Scores become exp(scale * score - maximum); maximum and sum of the rows move on.
inline void update_softmax(Matrix scores, int keys, float scale, float* row_max, float* row_sum,
                           float* correction) {
  Vec maximum[kTileVecs], reference[kTileVecs], sum[kTileVecs] = {};
  FLASHATTN_CPU_UNROLL
  for (int j = 0; j < kTileVecs; ++j) maximum[j] = broadcast(-kInfinity);
  for (int n = 0; n < keys; ++n) {
    FLASHATTN_CPU_UNROLL
    for (int j = 0; j < kTileVecs; ++j) {
      maximum[j] = max_into(maximum[j], load(scores.at(n, j * kLanes)));
    }
  }
  FLASHATTN_CPU_UNROLL
  for (int j = 0; j < kTileVecs; ++j) {
    Vec before = load(row_max + j * kLanes);
    maximum[j] = max_into(before, maximum[j] * scale);
    // A row without a key so far: exp(-inf - 0) is 0 where exp(-inf + inf) would be NaN.
    reference[j] = maximum[j] == -kInfinity ? Vec{} : maximum[j];
    store(correction + j * kLanes, exp(before - reference[j]));
    store(row_max + j * kLanes, maximum[j]);
  }
  Vec factor[kTileVecs];
  scale_large_scores(scores, keys, scale, row_max, factor);
  for (int n = 0; n < keys; ++n) {
    FLASHATTN_CPU_UNROLL
    for (int j = 0; j < kTileVecs; ++j) {
      float* p = scores.at(n, j * kLanes);
      Vec probability = exp(load(p) * factor[j] - reference[j]);
      store(p, probability);
      sum[j] += probability;
    }
  }
  FLASHATTN_CPU_UNROLL
  for (int j = 0; j < kTileVecs; ++j) {
    float* p = row_sum + j * kLanes;
    store(p, load(p) * load(correction + j * kLanes) + sum[j]);
  }
}

template <typename T>
class ForwardBlock {
 public:
  ForwardBlock(const ForwardParams& params, const ForwardWorkspace& workspace, int64_t batch,
               int head, int row_begin, float* memory)
      : params_(params),
        workspace_(workspace),
        shape_(params.shape),
        batch_(batch),
        head_(head),
        head_k_(head / params.shape.heads_per_group()),
        queries_(shape_.seqlens_q.sequence(batch)),
        keys_(shape_.seqlens_k.sequence(batch)),
        mask_{shape_.mask, queries_.length, keys_.length},
        scale_(shape_.softmax_scale),
        row_begin_(row_begin),
        rows_(min(kCpuForwardTile.block_m, queries_.length - row_begin)) {
    scratch_.place(memory, shape_);
    k_ = scratch_.k;
    v_ = scratch_.v;
  }

  void run() {
    load_queries();
    visit_keys(true);
    for (int panel = 0; panel * kPanel < rows_; ++panel) store_panel(panel);
  }

  // What fp32 leaves out of lse: log(sum of exp(score - lse)).
  void run_lse_rest(const float* lse, float* lse_rest) {
    load_queries();
    visit_keys(false);
    for (int i = 0; i < rows_; ++i) {
      float rest = *scratch_.row_max.at(0, i) - lse[i] + __builtin_logf(*scratch_.row_sum.at(0, i));
      lse_rest[i] = rest - rest == 0.f ? rest : 0.f;
    }
  }

 private:
  void visit_keys(bool sum_values) {
    constexpr int kKeys = kCpuForwardTile.block_n;
    BlockRange range = mask_.key_blocks(row_begin_, rows_, kKeys);
    for (int block = range.begin; block < range.end; ++block) {
      int key_begin = block * kKeys;
      int keys = min(kKeys, keys_.length - key_begin);
      load_keys(key_begin, keys);
      bool partial = range.partial(block);
      bool v_finite = !partial || all_finite(v_, keys, shape_.headdim_v);
      for (int panel = 0; panel * kPanel < rows_; ++panel) {
        KeyPart part = score(panel, key_begin, keys, partial);
        if (sum_values && part.keys > 0) add_values(panel, part, v_finite);
      }
    }
  }

  int panel_rows(int panel) const { return min(kPanel, rows_ - panel * kPanel); }

  void load_queries() {
    for (int panel = 0; panel * kPanel < rows_; ++panel) {
      int64_t row = queries_.begin + row_begin_ + panel * kPanel;
      Matrix to = scratch_.query_panel(panel);
      if (panel_rows(panel) < kPanel) fill(to.data, shape_.headdim * kPanel, 0.f);
      load_transposed(to.data, to.stride, row_pointer<T>(params_.q, batch_, row, head_),
                      params_.q.stride.row, panel_rows(panel), shape_.headdim, scale_.sign);
      fill(scratch_.out_panel(panel).data, shape_.headdim_v * kPanel, 0.f);
      fill(scratch_.row_max.at(panel, 0), kPanel, -kInfinity);
      fill(scratch_.row_sum.at(panel, 0), kPanel, 0.f);
    }
  }

  void load_keys(int key_begin, int keys) {
    int64_t row = keys_.begin + key_begin;
    if (workspace_.k.data != nullptr) {
      row = PackedRows::first_row(shape_.seqlens_k, batch_, keys_.begin) + key_begin;
      k_ = {workspace_.k.at(head_k_, row), workspace_.k.stride};
      v_ = {workspace_.v.at(head_k_, row), workspace_.v.stride};
      return;
    }
    load_rows(k_.data, k_.stride, row_pointer<T>(params_.k, batch_, row, head_k_),
              params_.k.stride.row, keys, shape_.headdim);
    load_rows(v_.data, v_.stride, row_pointer<T>(params_.v, batch_, row, head_k_),
              params_.v.stride.row, keys, shape_.headdim_v);
  }

  // Of the key block the keys that some query of a panel sees, from `begin` on.
  struct KeyPart {
    int begin, keys;
    int first_key;  // in the sequence
    bool masked;    // some pairs are hidden
  };

  // Leaves probabilities in scratch, before their division by row_sum.
  KeyPart score(int panel, int key_begin, int keys, bool partial) {
    KeyPart part = {0, keys, key_begin, false};
    int row = row_begin_ + panel * kPanel;
    if (partial) {
      KeyRange first = mask_.visible_keys(row);
      KeyRange last = mask_.visible_keys(row + panel_rows(panel) - 1);
      part.begin = max(0, first.begin - key_begin);
      int end = min(keys, last.end - key_begin);
      part.masked = last.begin - key_begin > part.begin || first.end - key_begin < end;
      part.keys = max(0, end - part.begin);
      part.first_key = key_begin + part.begin;
      if (part.keys == 0) return part;
    }
    multiply_headdim(scratch_.scores, k_.from(part.begin, 0), scratch_.query_panel(panel),
                     part.keys, kPanel, shape_.headdim);
    if (part.masked) mask_scores(scratch_.scores, part.first_key, part.keys, mask_, row);
    update_softmax(scratch_.scores, part.keys, scale_.magnitude, scratch_.row_max.at(panel, 0),
                   scratch_.row_sum.at(panel, 0), scratch_.correction.data);
    return part;
  }

  void add_values(int panel, const KeyPart& part, bool v_finite) {
    Matrix out = scratch_.out_panel(panel), v = v_.from(part.begin, 0), probs = scratch_.scores;
    bool isolate = part.masked && !v_finite;
    Matrix factor = isolate ? scratch_.finite_v : v;
    if (isolate) copy_finite(factor, v, part.keys, shape_.headdim_v);
    multiply<LeftOperand::kTransposed, Update::kScaleAndAdd>(
        out, factor, probs, shape_.headdim_v, kPanel, part.keys, scratch_.correction.data);
    if (!isolate) return;
    int row = row_begin_ + panel * kPanel;
    for_each_special(v, part.keys, shape_.headdim_v, [&](int n, int d, float value) {
      for (int i = 0; i < panel_rows(panel); ++i) {
        if (!mask_.visible(row + i, part.first_key + n)) continue;
        *out.at(d, i) += *probs.at(n, i) * value;
      }
    });
  }

  void store_panel(int panel) {
    int row = row_begin_ + panel * kPanel;
    T* to = row_pointer<T>(params_.out, batch_, queries_.begin + row, head_);
    float* lse = params_.lse.data + params_.lse.offset(batch_, head_, queries_.begin + row);
    Matrix out = scratch_.out_panel(panel);
    const float* row_sum = scratch_.row_sum.at(panel, 0);
    const float* row_max = scratch_.row_max.at(panel, 0);
    for (int j = 0; j < kPanel; j += kLanes) {
      Vec sum = load(row_sum + j);
      for (int d = 0; d < shape_.headdim_v; ++d) {
        Vec mean = load(out.at(d, j)) / sum;
        store(out.at(d, j), sum == 0.f ? Vec{} : mean);  // a row that sees no key
      }
    }
    for (int i = 0; i < panel_rows(panel); ++i, to += params_.out.stride.row) {
      for (int d = 0; d < shape_.headdim_v; ++d) from_float(*out.at(d, i), to[d]);
      // A score of inf makes row_sum NaN: e^(inf - inf).
      lse[i] = row_max[i] == kInfinity ? kInfinity : row_max[i] + __builtin_logf(row_sum[i]);
    }
  }

  const ForwardParams& params_;
  const ForwardWorkspace& workspace_;
  const ProblemShape& shape_;
  int64_t batch_;
  int head_, head_k_;
  SeqRows queries_, keys_;
  SequenceMask mask_;
  ScoreScale scale_;
  int row_begin_, rows_;
  ForwardScratch scratch_;
  Matrix k_, v_;  // the key block
};

inline void pack_keys(const ForwardParams& params, const ForwardWorkspace& workspace, int64_t batch,
                      int head_k, int row_begin) {
  const ProblemShape& shape = params.shape;
  constexpr int kKeys = kCpuForwardTile.block_n;
  for_dtype(shape.dtype, [&]<typename T>(TypeTag<T>) {
    pack_rows<T>(params.k, shape.seqlens_k, workspace.k, batch, head_k, row_begin, kKeys,
                 shape.headdim);
    pack_rows<T>(params.v, shape.seqlens_k, workspace.v, batch, head_k, row_begin, kKeys,
                 shape.headdim_v);
  });
}

inline void forward(const ForwardParams& params, const ForwardWorkspace& workspace, int64_t batch,
                    int head, int row_begin, float* scratch) {
  for_dtype(params.shape.dtype, [&]<typename T>(TypeTag<T>) {
    ForwardBlock<T>(params, workspace, batch, head, row_begin, scratch).run();
  });
}

}  // namespace flashattn::FLASHATTN_CPU_ISA
