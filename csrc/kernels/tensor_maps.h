// Tensor maps of the kernels for sm_90a.
#pragma once

#include "common/params.h"
#include "host/tensor_map.h"

namespace flashattn {

// Of one of a problem's tensors, in boxes of box_rows rows and 64 columns; packed sequences are one
// batch. Empty where TMA can't reach: such a tensor is copied element by element.
inline CUtensorMap tensor_map(const ConstTensor& tensor, const SeqLens& lens,
                              const ProblemShape& shape, int heads, int columns, int box_rows) {
  if (!tensor.aligned16) return {};
  return make_tensor_map(tensor.data, lens.packed() ? 1 : shape.batch, heads, lens.rows, columns,
                         tensor.stride.batch, tensor.stride.head, tensor.stride.row, box_rows);
}

}  // namespace flashattn
