#include "ops/inputs.h"

#include <algorithm>

namespace flashattn {

namespace {

DType kernel_dtype(int32_t code) {
  if (code == aoti_torch_dtype_float16()) return DType::kFloat16;
  if (code == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
  STD_TORCH_CHECK(code == aoti_torch_dtype_float32(),
                  "q must be float16, bfloat16 or float32, got dtype code ", code);
  return DType::kFloat32;
}

void check_same_device(const char* name, const View& tensor, const View& q) {
  STD_TORCH_CHECK(tensor.device_type == q.device_type && tensor.device_index == q.device_index,
                  name, " and q must be on the same device");
}

void check_same_kind(const char* name, const View& tensor, const View& q) {
  STD_TORCH_CHECK(tensor.dtype == q.dtype, name, " and q must have the same dtype");
  check_same_device(name, tensor, q);
  STD_TORCH_CHECK(tensor.dim == q.dim, name, " has ", tensor.dim, " dimensions, q has ", q.dim);
}

// (.., rows, heads, headdim), from the right.
int64_t rows_of(const View& tensor) { return tensor.sizes[tensor.dim - 3]; }
int64_t heads_of(const View& tensor) { return tensor.sizes[tensor.dim - 2]; }
int64_t headdim_of(const View& tensor) { return tensor.sizes[tensor.dim - 1]; }

const int32_t* check_integers(const char* name, const std::optional<Operand>& integers,
                              int64_t size, const View& q) {
  if (!integers.has_value()) return nullptr;
  check_tensor(name, integers->view, {1, {size}}, aoti_torch_dtype_int32(), q);
  return static_cast<const int32_t*>(integers->view.data);
}

void check_shapes(const View& q, const View& k, const View& v) {
  STD_TORCH_CHECK(headdim_of(q) == headdim_of(k), "headdim of q is ", headdim_of(q), ", of k ",
                  headdim_of(k));
  constexpr int64_t kMaxHeadDim = 256;
  STD_TORCH_CHECK(headdim_of(q) >= 1 && headdim_of(q) <= kMaxHeadDim && headdim_of(v) >= 1 &&
                      headdim_of(v) <= kMaxHeadDim,
                  "head dims must be in 1..256, got ", headdim_of(q), " and ", headdim_of(v));
  STD_TORCH_CHECK(heads_of(k) == heads_of(v) && rows_of(k) == rows_of(v),
                  "k and v must have the same number of rows and heads");
  STD_TORCH_CHECK(heads_of(k) >= 1 && heads_of(q) >= 1 && heads_of(q) % heads_of(k) == 0, "k has ",
                  heads_of(k), " heads, which do not divide the ", heads_of(q), " of q");
  if (q.dim == 4) {
    STD_TORCH_CHECK(q.sizes[0] == k.sizes[0] && q.sizes[0] == v.sizes[0],
                    "q, k and v must have the same batch size");
  }
  constexpr int64_t kMax = MaskSpec::kMaxBound;  // the kernels' row and head indices are int
  STD_TORCH_CHECK(rows_of(q) <= kMax && rows_of(k) <= kMax && heads_of(q) <= kMax,
                  "sequence lengths and head counts must be at most ", kMax);
}

int64_t check_batch(const Inputs& inputs, const View& q) {
  STD_TORCH_CHECK(q.dim == 3 || q.dim == 4, "q must have 3 or 4 dimensions, got ", q.dim);
  const bool packed = q.dim == 3;
  STD_TORCH_CHECK(
      inputs.cu_seqlens_q.has_value() == packed && inputs.cu_seqlens_k.has_value() == packed,
      "cu_seqlens_q and cu_seqlens_k come with tensors of 3 dimensions, and with those alone");
  if (!packed) return q.sizes[0];
  const View& cu_seqlens = inputs.cu_seqlens_q->view;
  STD_TORCH_CHECK(cu_seqlens.dim == 1 && cu_seqlens.sizes[0] >= 1,
                  "cu_seqlens_q must be of shape (batch + 1,)");
  return cu_seqlens.sizes[0] - 1;
}

// The stride of a dimension of size 1 means nothing: 0 keeps it out of offsets and alignment.
int64_t stride_of(const View& tensor, int64_t d) {
  return tensor.sizes[d] == 1 ? 0 : tensor.strides[d];
}

Strides strides_of(const View& tensor) {
  const int64_t row = tensor.dim - 3;
  return {.batch = row == 1 ? stride_of(tensor, 0) : 0,
          .row = stride_of(tensor, row),
          .head = stride_of(tensor, row + 1)};
}

bool is_aligned16(const View& tensor, const Strides& stride) {
  const int64_t size = dtype_bytes(kernel_dtype(tensor.dtype));
  const int64_t bits = (stride.batch | stride.row | stride.head | headdim_of(tensor)) * size |
                       static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.data));
  return bits % 16 == 0;
}

}  // namespace

void check_tensor(const char* name, const View& tensor, const Sizes& sizes, int32_t dtype,
                  const View& q) {
  STD_TORCH_CHECK(tensor.dtype == dtype, name, " has the wrong dtype");
  check_same_device(name, tensor, q);
  STD_TORCH_CHECK(
      tensor.dim == sizes.dim && std::equal(sizes.size, sizes.size + sizes.dim, tensor.sizes), name,
      " has the wrong shape");
}

Sizes sizes_of(const View& tensor) {
  Sizes sizes{.dim = tensor.dim};
  std::copy_n(tensor.sizes, tensor.dim, sizes.size);
  return sizes;
}

Sizes out_sizes(const View& q, const ProblemShape& shape) {
  Sizes sizes = sizes_of(q);
  sizes.size[sizes.dim - 1] = shape.headdim_v;
  return sizes;
}

Sizes lse_sizes(const View& q, const ProblemShape& shape) {
  if (q.dim == 3) return {2, {shape.heads_q, q.sizes[0]}};
  return {3, {q.sizes[0], shape.heads_q, q.sizes[1]}};
}

bool nothing_to_attend(const ProblemShape& shape) {
  return shape.batch == 0 || shape.seqlens_q.rows == 0 || shape.seqlens_k.rows == 0;
}

bool has_rows_outside(const SeqLens& lengths) {
  return lengths.packed() || lengths.seqused != nullptr;
}

ProblemShape check_inputs(const Inputs& inputs) {
  const View &q = inputs.q.view, &k = inputs.k.view, &v = inputs.v.view;
  const int64_t batch = check_batch(inputs, q);
  check_same_kind("k", k, q);
  check_same_kind("v", v, q);
  check_shapes(q, k, v);
  ProblemShape shape;
  shape.dtype = kernel_dtype(q.dtype);
  STD_TORCH_CHECK(!q.is_cuda() || shape.dtype != DType::kFloat32, "float32 has no CUDA kernel");
  shape.batch = batch;
  shape.heads_q = static_cast<int>(heads_of(q));
  shape.heads_k = static_cast<int>(heads_of(k));
  shape.headdim = static_cast<int>(headdim_of(q));
  shape.headdim_v = static_cast<int>(headdim_of(v));
  shape.seqlens_q = {
      .cu_seqlens = check_integers("cu_seqlens_q", inputs.cu_seqlens_q, batch + 1, q),
      .seqused = check_integers("seqused_q", inputs.seqused_q, batch, q),
      .rows = rows_of(q)};
  shape.seqlens_k = {
      .cu_seqlens = check_integers("cu_seqlens_k", inputs.cu_seqlens_k, batch + 1, q),
      .seqused = check_integers("seqused_k", inputs.seqused_k, batch, q),
      .rows = rows_of(k)};
  shape.mask = {.left = MaskSpec::clamp_window(inputs.window_left),
                .right = MaskSpec::clamp_window(inputs.window_right)};
  shape.softmax_scale = static_cast<float>(inputs.softmax_scale);
  return shape;
}

ConstTensor const_tensor(const View& tensor) {
  const Strides stride = strides_of(tensor);
  return {.data = tensor.data, .stride = stride, .aligned16 = is_aligned16(tensor, stride)};
}

MutableTensor mutable_tensor(const Tensor& tensor) {
  const View layout = view(tensor);
  const Strides stride = strides_of(layout);
  return {.data = tensor.mutable_data_ptr(),
          .stride = stride,
          .aligned16 = is_aligned16(layout, stride)};
}

RowStats row_stats(const View& tensor) {
  return {.data = static_cast<float*>(const_cast<void*>(tensor.data)),
          .batch_stride = tensor.dim == 3 ? stride_of(tensor, 0) : 0,
          .head_stride = stride_of(tensor, tensor.dim - 2)};
}

Problem make_problem(const ProblemShape& shape, std::initializer_list<ConstTensor> tensors) {
  Problem problem;
  problem.dtype = shape.dtype;
  problem.packed = shape.seqlens_q.packed();
  problem.partly_used = shape.seqlens_q.seqused != nullptr || shape.seqlens_k.seqused != nullptr;
  problem.batch = shape.batch;
  problem.seqlen_q = shape.seqlens_q.rows;
  problem.seqlen_k = shape.seqlens_k.rows;
  problem.heads_q = shape.heads_q;
  problem.heads_k = shape.heads_k;
  problem.headdim = shape.headdim;
  problem.headdim_v = shape.headdim_v;
  problem.mask = shape.mask;
  problem.aligned16 = std::all_of(tensors.begin(), tensors.end(),
                                  [](const ConstTensor& tensor) { return tensor.aligned16; });
  return problem;
}

Executor make_executor(const View& tensor) {
  Executor executor;
  executor.cuda = tensor.is_cuda();
  if (executor.cuda) {
    executor.device_index = tensor.device_index;
    executor.stream = current_cuda_stream(tensor.device_index);
  } else {
    executor.parallel = torch_threads();
  }
  return executor;
}

}  // namespace flashattn
