// Tensor maps: what the copy engine (TMA) is told of a tensor in global memory.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashattn {

// A (batch, heads, rows, columns) tensor of 16-bit elements, column stride 1; strides in elements,
// those of a dimension of size 1 are not read. A box is box_rows rows of 64 columns, rows of 128
// bytes swizzled in shared memory; beyond the tensor's ends it has zeros.
CUtensorMap make_tensor_map(const void* data, int64_t batch, int64_t heads, int64_t rows,
                            int columns, int64_t batch_stride, int64_t head_stride,
                            int64_t row_stride, int box_rows);

}  // namespace flashattn
