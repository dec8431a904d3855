// Storage types to fp32 and back. Plain loops over bits: the compiler turns them into vectors.
#pragma once

#include "kernels/cpu_vector.h"

namespace flashattn::FLASHATTN_CPU_ISA {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename T>
struct TypeTag {};

// call(TypeTag<T>()) with the storage type T.
template <typename Call>
void for_dtype(DType dtype, Call call) {
  switch (dtype) {
    case DType::kFloat32:
      return call(TypeTag<float>());
    case DType::kFloat16:
      return call(TypeTag<Half>());
    case DType::kBFloat16:
      return call(TypeTag<BFloat16>());
  }
}

template <typename To, typename From>
FLASHATTN_CPU_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

FLASHATTN_CPU_INLINE float to_float(float x) { return x; }

FLASHATTN_CPU_INLINE float to_float(BFloat16 x) {
  return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

FLASHATTN_CPU_INLINE float to_float(Half x) {
  uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  // The exponent's bias differs by 112; the product normalises denormal numbers as well.
  uint32_t number = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);
  uint32_t inf_or_nan = magnitude | 0x7f800000;
  return bit_cast<float>(sign | (magnitude >= (0x7c00u << 13) ? inf_or_nan : number));
}

// All round to nearest, ties to even.
FLASHATTN_CPU_INLINE void from_float(float x, float& to) { to = x; }

FLASHATTN_CPU_INLINE void from_float(float x, BFloat16& to) {
  uint32_t bits = bit_cast<uint32_t>(x);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to.bits = static_cast<uint16_t>(x != x ? 0x7fc0 : rounded);
}

FLASHATTN_CPU_INLINE void from_float(float x, Half& to) {
  uint32_t bits = bit_cast<uint32_t>(x);
  uint32_t sign = (bits >> 16) & 0x8000;
  uint32_t magnitude = bits & 0x7fffffff;
  uint32_t normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  // Below 2^-14: the sum with 0.5 has halves' denormal step, 2^-24, as its last bit.
  uint32_t denormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  uint32_t result = magnitude < 0x38800000 ? denormal : normal;
  if (magnitude >= 0x47800000) result = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  to.bits = static_cast<uint16_t>(sign | result);
}

template <typename T>
FLASHATTN_CPU_INLINE const T* row_pointer(const ConstTensor& tensor, int64_t b, int64_t row,
                                          int h) {
  return static_cast<const T*>(tensor.data) + tensor.stride.offset(b, row, h);
}

template <typename T>
FLASHATTN_CPU_INLINE T* row_pointer(const MutableTensor& tensor, int64_t b, int64_t row, int h) {
  return static_cast<T*>(tensor.data) + tensor.stride.offset(b, row, h);
}

// A head's rows lie a stride apart, often on other pages, which the processor doesn't foresee.
template <typename T>
FLASHATTN_CPU_INLINE void prefetch_later_row(const T* row, int64_t stride, int columns) {
  constexpr int kRowsAhead = 8, kLine = 64 / sizeof(T);
  for (int c = 0; c < columns; c += kLine) __builtin_prefetch(row + kRowsAhead * stride + c);
}

template <typename T>
void load_rows(float* to, int to_stride, const T* from, int64_t from_stride, int rows,
               int columns) {
  for (int r = 0; r < rows; ++r, to += to_stride, from += from_stride) {
    prefetch_later_row(from, from_stride, columns);
    for (int c = 0; c < columns; ++c) to[c] = to_float(from[c]);
  }
}

// to[c][r] = scale * from[r][c]
template <typename T>
void load_transposed(float* to, int to_stride, const T* from, int64_t from_stride, int rows,
                     int columns, float scale = 1.f) {
  for (int r = 0; r < rows; ++r, from += from_stride) {
    prefetch_later_row(from, from_stride, columns);
    for (int c = 0; c < columns; ++c) to[c * to_stride + r] = to_float(from[c]) * scale;
  }
}

// to[r][c] = scale * from[r][c]
template <typename T>
void store_rows(T* to, int64_t to_stride, const float* from, int from_stride, int rows, int columns,
                float scale = 1.f) {
  for (int r = 0; r < rows; ++r, to += to_stride, from += from_stride) {
    for (int c = 0; c < columns; ++c) from_float(from[c] * scale, to[c]);
  }
}

// One block of a sequence, to the workspace.
template <typename T>
void pack_rows(const ConstTensor& from, const SeqLens& seqlens, const PackedRows& to, int64_t batch,
               int head, int row_begin, int rows, int columns) {
  SeqRows sequence = seqlens.sequence(batch);
  int64_t to_row = PackedRows::first_row(seqlens, batch, sequence.begin) + row_begin;
  load_rows(to.at(head, to_row), to.stride,
            row_pointer<T>(from, batch, sequence.begin + row_begin, head), from.stride.row,
            min(rows, sequence.length - row_begin), columns);
}

// In kLanes partial sums, for speed and for accuracy.
template <typename T>
float dot(const T* a, const T* b, int n) {
  float part[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) part[j] += to_float(a[i + j]) * to_float(b[i + j]);
  }
  float sum = 0;
  for (int j = 0; j < kLanes; ++j) sum += part[j];
  for (; i < n; ++i) sum += to_float(a[i]) * to_float(b[i]);
  return sum;
}

}  // namespace flashattn::FLASHATTN_CPU_ISA
