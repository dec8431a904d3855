// Backward on the CPU: one task is every splits-th key block of one sequence and KV head. It
// computes five products a pair of blocks: scores, dprobs, dv, dk and dq. dk and dv stay in scratch
// for the whole key block, dq is added to the workspace in the order of the key blocks.
#pragma once

#include "kernels/cpu_convert.h"
#include "kernels/cpu_matmul.h"
#include "kernels/forward_cpu.h"

namespace flashattn::FLASHATTN_CPU_ISA {

struct BackwardScratch {
  static constexpr int kRows = kCpuBackwardTile.block_m, kKeys = kCpuBackwardTile.block_n;

  Matrix k, k_transposed, v_transposed;  // (block_n, headdim), (headdim, block_n), (headdim_v, ..)
  Matrix dk, dv;                         // (block_n, headdim), (block_n, headdim_v)
  Matrix probs, dscores;                 // (block_m, block_n)
  Matrix finite;  // (either block, either headdim): an operand with NaN or Inf behind a mask

  static int64_t floats(const ProblemShape& shape) {
    BackwardScratch scratch;
    return scratch.place(nullptr, shape);
  }

  // Lays the matrices out in `memory`; returns the floats needed.
  int64_t place(float* memory, const ProblemShape& shape) {
    int row_capacity = capacity(shape.seqlens_q, kRows);
    int key_capacity = capacity(shape.seqlens_k, kKeys);
    int64_t used = 0;
    auto take = [&](int rows, int columns) {
      Matrix part = {memory + used, padded_stride(columns)};
      used += static_cast<int64_t>(rows) * part.stride;
      return part;
    };
    k = take(key_capacity, shape.headdim);
    k_transposed = take(shape.headdim, key_capacity);
    v_transposed = take(shape.headdim_v, key_capacity);
    dk = take(key_capacity, shape.headdim);
    dv = take(key_capacity, shape.headdim_v);
    probs = take(row_capacity, key_capacity);
    dscores = take(row_capacity, key_capacity);
    finite = take(max(row_capacity, key_capacity), max(shape.headdim, shape.headdim_v));
    return used;
  }
};

// One row: scores and dprobs become p = exp(scale * score - lse - lse_rest) and ds = p * (dprob -
// delta).
FLASHATTN_CPU_INLINE void row_gradient(float* scores, float* dprobs, int begin, int end,
                                       float scale, float lse, float lse_rest, float delta) {
  if (lse > kLargeScore || lse < -kLargeScore) {  // as in the forward: products rounded
    for (int n = begin; n < end; n += kLanes) store(scores + n, load(scores + n) * scale);
    scale = 1.f;
  }
  for (int n = begin; n < end; n += kLanes) {
    Vec p = exp(load(scores + n) * scale - lse - lse_rest);
    store(scores + n, p);
    store(dprobs + n, p * (load(dprobs + n) - delta));
  }
}

template <typename T>
class BackwardBlocks {
 public:
  BackwardBlocks(const BackwardParams& params, const BackwardWorkspace& workspace, int64_t batch,
                 int head_k, int split, float* memory)
      : params_(params),
        shape_(params.shape),
        workspace_(workspace),
        batch_(batch),
        head_k_(head_k),
        split_(split),
        queries_(shape_.seqlens_q.sequence(batch)),
        keys_(shape_.seqlens_k.sequence(batch)),
        mask_{shape_.mask, queries_.length, keys_.length} {
    scratch_.place(memory, shape_);
  }

  void run() {
    constexpr int kKeys = BackwardScratch::kKeys;
    for (int block = split_; block * kKeys < keys_.length; block += workspace_.splits) {
      run_keys(block * kKeys, min(kKeys, keys_.length - block * kKeys));
    }
  }

 private:
  // A block of queries, and of the key block in scratch the keys that any of them sees.
  struct Pair {
    int head, row, rows;
    Matrix q, dout;
    const float *lse, *lse_rest, *delta;
    int begin, keys;  // from the first key of the block on
    bool masked;      // some pairs are hidden
  };

  void run_keys(int key_begin, int keys) {
    constexpr int kRows = BackwardScratch::kRows;
    key_begin_ = key_begin;
    load_keys(keys);
    fill(scratch_.dk.data, static_cast<int64_t>(keys) * scratch_.dk.stride, 0.f);
    fill(scratch_.dv.data, static_cast<int64_t>(keys) * scratch_.dv.stride, 0.f);
    BlockRange range = mask_.query_blocks(key_begin, keys, kRows);
    int group = shape_.heads_per_group();
    for (int head = head_k_ * group; head < (head_k_ + 1) * group; ++head) {
      for (int block = range.begin; block < range.end; ++block) {
        Pair pair = make_pair(head, block * kRows, keys);
        if (range.partial(block)) narrow(pair);
        if (pair.keys > 0) run_pair(pair);
      }
    }
    if (params_.dk.data != nullptr) store_keys(keys);
  }

  Pair make_pair(int head, int row, int keys) const {
    int64_t packed_row = PackedRows::first_row(shape_.seqlens_q, batch_, queries_.begin) + row;
    return {.head = head,
            .row = row,
            .rows = min(BackwardScratch::kRows, queries_.length - row),
            .q = {workspace_.q.at(head, packed_row), workspace_.q.stride},
            .dout = {workspace_.dout.at(head, packed_row), workspace_.dout.stride},
            .lse = params_.lse.data + params_.lse.offset(batch_, head, queries_.begin + row),
            .lse_rest = workspace_.lse_rest.at(head, packed_row),
            .delta = workspace_.delta.at(head, packed_row),
            .begin = 0,
            .keys = keys,
            .masked = false};
  }

  void narrow(Pair& pair) const {
    KeyRange first = mask_.visible_keys(pair.row);
    KeyRange last = mask_.visible_keys(pair.row + pair.rows - 1);
    // Whole tiles from the start of the block on.
    pair.begin = max(first.begin - key_begin_, 0) / kLanes * kLanes;
    int end = min(last.end - key_begin_, pair.keys);
    pair.masked = last.begin - key_begin_ > pair.begin || first.end - key_begin_ < end;
    pair.keys = max(end - pair.begin, 0);
  }

  void load_keys(int keys) {
    int64_t row = keys_.begin + key_begin_;
    const T* k = row_pointer<T>(params_.k, batch_, row, head_k_);
    const T* v = row_pointer<T>(params_.v, batch_, row, head_k_);
    load_rows(scratch_.k.data, scratch_.k.stride, k, params_.k.stride.row, keys, shape_.headdim);
    load_transposed(scratch_.k_transposed.data, scratch_.k_transposed.stride, k,
                    params_.k.stride.row, keys, shape_.headdim);
    load_transposed(scratch_.v_transposed.data, scratch_.v_transposed.stride, v,
                    params_.v.stride.row, keys, shape_.headdim_v);
  }

  void store_keys(int keys) {
    int64_t row = keys_.begin + key_begin_;
    store_rows(row_pointer<T>(params_.dk, batch_, row, head_k_), params_.dk.stride.row,
               scratch_.dk.data, scratch_.dk.stride, keys, shape_.headdim, shape_.softmax_scale);
    store_rows(row_pointer<T>(params_.dv, batch_, row, head_k_), params_.dv.stride.row,
               scratch_.dv.data, scratch_.dv.stride, keys, shape_.headdim_v);
  }

  void run_pair(Pair& pair) {
    Matrix probs = scratch_.probs, dscores = scratch_.dscores;
    multiply_headdim(probs, pair.q, scratch_.k_transposed.from(0, pair.begin), pair.rows, pair.keys,
                     shape_.headdim);
    multiply_headdim(dscores, pair.dout, scratch_.v_transposed.from(0, pair.begin), pair.rows,
                     pair.keys, shape_.headdim_v);
    differentiate_softmax(pair);
    if (params_.dk.data != nullptr) {
      add_to_keys(scratch_.dv, probs, pair.dout, pair, shape_.headdim_v);
      add_to_keys(scratch_.dk, dscores, pair.q, pair, shape_.headdim);
    }
    if (params_.dq.data != nullptr) add_to_dq(pair);
  }

  // Scores and dprobs become probs and dscores; 0 where a row doesn't see a key.
  void differentiate_softmax(Pair& pair) {
    const float* lse = pair.lse;
    for (int i = 0; i < pair.rows; ++i) pair.masked |= lse[i] == -kInfinity;
    int padded_keys = round_up(pair.keys, kLanes);
    for (int i = 0; i < pair.rows; ++i) {
      float* p = scratch_.probs.at(i, 0);
      float* ds = scratch_.dscores.at(i, 0);
      KeyRange seen = pair.masked ? seen_keys(pair, i) : KeyRange{0, pair.keys};
      // A score of inf makes the whole row of the softmax NaN.
      float row_lse = lse[i] == kInfinity ? __builtin_nanf("") : lse[i];
      row_gradient(p, ds, seen.begin / kLanes * kLanes, seen.end, shape_.softmax_scale, row_lse,
                   pair.lse_rest[i], pair.delta[i]);
      if (!pair.masked) continue;
      fill(p, seen.begin, 0.f);
      fill(ds, seen.begin, 0.f);
      fill(p + seen.end, padded_keys - seen.end, 0.f);
      fill(ds + seen.end, padded_keys - seen.end, 0.f);
    }
  }

  // Of the pair's keys those that row i sees. One with lse = -inf sees none: either the mask hides
  // them all, or all its scores are -inf.
  KeyRange seen_keys(const Pair& pair, int i) const {
    if (pair.lse[i] == -kInfinity) return {0, 0};
    KeyRange range = mask_.visible_keys(pair.row + i);
    int offset = key_begin_ + pair.begin;
    int begin = min(max(range.begin - offset, 0), pair.keys);
    return {begin, max(begin, min(range.end - offset, pair.keys))};
  }

  bool visible(const Pair& pair, int i, int n) const {
    KeyRange seen = seen_keys(pair, i);
    return n >= seen.begin && n < seen.end;
  }

  // x, or where a mask could hide special values of it a copy without them.
  Matrix finite_factor(Matrix x, int rows, int columns, const Pair& pair) const {
    if (!pair.masked || all_finite(x, rows, columns)) return x;
    copy_finite(scratch_.finite, x, rows, columns);
    return scratch_.finite;
  }

  // grad (keys, columns) += weights^T (keys, rows) * rows_of (rows, columns)
  void add_to_keys(Matrix grad, Matrix weights, Matrix rows_of, const Pair& pair, int columns) {
    grad = grad.from(pair.begin, 0);
    Matrix factor = finite_factor(rows_of, pair.rows, columns, pair);
    multiply<LeftOperand::kTransposed, Update::kAdd>(grad, weights, factor, pair.keys, columns,
                                                     pair.rows);
    if (factor.data == rows_of.data) return;
    for_each_special(rows_of, pair.rows, columns, [&](int i, int c, float value) {
      KeyRange seen = seen_keys(pair, i);
      for (int n = seen.begin; n < seen.end; ++n) *grad.at(n, c) += *weights.at(i, n) * value;
    });
  }

  // Without softmax_scale, as dk: it is applied once, when the sum is stored.
  void add_to_dq(const Pair& pair) {
    int64_t row = PackedRows::first_row(shape_.seqlens_q, batch_, queries_.begin) + pair.row;
    int64_t part = static_cast<int64_t>(split_) * shape_.heads_q + pair.head;
    Matrix dq = {workspace_.dq.at(part, row), workspace_.dq.stride};
    Matrix k = scratch_.k.from(pair.begin, 0), dscores = scratch_.dscores;
    Matrix factor = finite_factor(k, pair.keys, shape_.headdim, pair);
    multiply<LeftOperand::kPlain, Update::kAdd>(dq, dscores, factor, pair.rows, shape_.headdim,
                                                pair.keys);
    if (factor.data == k.data) return;
    for_each_special(k, pair.keys, shape_.headdim, [&](int n, int c, float value) {
      for (int i = 0; i < pair.rows; ++i) {
        if (visible(pair, i, n)) *dq.at(i, c) += *dscores.at(i, n) * value;
      }
    });
  }

  const BackwardParams& params_;
  const ProblemShape& shape_;
  const BackwardWorkspace& workspace_;
  int64_t batch_;
  int head_k_, split_;
  SeqRows queries_, keys_;
  SequenceMask mask_;
  BackwardScratch scratch_;
  int key_begin_ = 0;
};

template <typename T>
void prepare_rows(const BackwardParams& params, const BackwardWorkspace& workspace, int64_t batch,
                  int head, int row_begin) {
  const ProblemShape& shape = params.shape;
  constexpr int kRows = BackwardScratch::kRows;
  pack_rows<T>(params.q, shape.seqlens_q, workspace.q, batch, head, row_begin, kRows,
               shape.headdim);
  pack_rows<T>(params.dout, shape.seqlens_q, workspace.dout, batch, head, row_begin, kRows,
               shape.headdim_v);
  SeqRows queries = shape.seqlens_q.sequence(batch);
  int64_t packed_row = PackedRows::first_row(shape.seqlens_q, batch, queries.begin) + row_begin;
  int rows = min(kRows, queries.length - row_begin);
  for (int i = 0; i < rows; ++i) {
    int64_t row = queries.begin + row_begin + i;
    float delta = dot(row_pointer<T>(params.out, batch, row, head),
                      row_pointer<T>(params.dout, batch, row, head), shape.headdim_v);
    const RowStats& dlse = params.dlse;
    if (dlse.data != nullptr) delta -= dlse.data[dlse.offset(batch, head, row)];
    *workspace.delta.at(head, packed_row + i) = delta;
  }
}

template <typename T>
void store_dq_rows(const BackwardParams& params, const BackwardWorkspace& workspace, int64_t batch,
                   int head, int row_begin) {
  const ProblemShape& shape = params.shape;
  SeqRows queries = shape.seqlens_q.sequence(batch);
  int rows = min(BackwardScratch::kRows, queries.length - row_begin);
  int64_t packed_row = PackedRows::first_row(shape.seqlens_q, batch, queries.begin) + row_begin;
  const PackedRows& dq = workspace.dq;
  float* sum = dq.at(head, packed_row);
  for (int split = 1; split < workspace.splits; ++split) {
    const float* part = dq.at(static_cast<int64_t>(split) * shape.heads_q + head, packed_row);
    for (int i = 0; i < rows * dq.stride; ++i) sum[i] += part[i];
  }
  store_rows(row_pointer<T>(params.dq, batch, queries.begin + row_begin, head),
             params.dq.stride.row, sum, dq.stride, rows, shape.headdim, shape.softmax_scale);
}

inline void prepare_backward(const BackwardParams& params, const BackwardWorkspace& workspace,
                             int64_t batch, int head, int row_begin) {
  for_dtype(params.shape.dtype, [&]<typename T>(TypeTag<T>) {
    prepare_rows<T>(params, workspace, batch, head, row_begin);
  });
}

// Where |lse| is large, fp32 rounds it so coarsely that probabilities would be wrong by as much.
inline void refine_lse(const BackwardParams& params, const BackwardWorkspace& workspace,
                       int64_t batch, int head, int row_begin, float* scratch) {
  const ProblemShape& shape = params.shape;
  float exact_enough = shape.dtype == DType::kFloat32 ? 32.f : 512.f;
  SeqRows queries = shape.seqlens_q.sequence(batch);
  int rows = min(kCpuForwardTile.block_m, queries.length - row_begin);
  const float* lse = params.lse.data + params.lse.offset(batch, head, queries.begin + row_begin);
  bool needed = false;
  for (int i = 0; i < rows; ++i) {
    float size = lse[i] < 0.f ? -lse[i] : lse[i];
    needed |= size > exact_enough && size < kInfinity;
  }
  if (!needed) return;
  ForwardParams forward = {
      .shape = shape, .q = params.q, .k = params.k, .v = params.v, .out = {}, .lse = params.lse};
  int64_t packed_row = PackedRows::first_row(shape.seqlens_q, batch, queries.begin) + row_begin;
  float* lse_rest = workspace.lse_rest.at(head, packed_row);
  for_dtype(shape.dtype, [&]<typename T>(TypeTag<T>) {
    ForwardBlock<T>(forward, ForwardWorkspace(), batch, head, row_begin, scratch)
        .run_lse_rest(lse, lse_rest);
  });
}

inline void backward(const BackwardParams& params, const BackwardWorkspace& workspace,
                     int64_t batch, int head_k, int split, float* scratch) {
  for_dtype(params.shape.dtype, [&]<typename T>(TypeTag<T>) {
    BackwardBlocks<T>(params, workspace, batch, head_k, split, scratch).run();
  });
}

inline void store_dq(const BackwardParams& params, const BackwardWorkspace& workspace,
                     int64_t batch, int head, int row_begin) {
  for_dtype(params.shape.dtype, [&]<typename T>(TypeTag<T>) {
    store_dq_rows<T>(params, workspace, batch, head, row_begin);
  });
}

}  // namespace flashattn::FLASHATTN_CPU_ISA
