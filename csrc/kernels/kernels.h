// Every kernel's launcher: all that dispatch sees of kernels/. `stream` is a cudaStream_t, given as
// void* so that a build without CUDA compiles this too.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "plan/tile_config.h"

namespace flashattn {

// Runs body(context, begin, end) over [0, n) in pieces, on the caller's threads.
struct ParallelFor {
  using Body = void (*)(void* context, int64_t begin, int64_t end);
  void (*run)(int64_t n, Body body, void* context) = nullptr;
  int threads = 1;
};

void run_forward_cpu(const ForwardParams& params, const ParallelFor& parallel);

// Needs no workspace from the caller: dq_accum, lse_log2, delta and dq_turn are not read.
void run_backward_cpu(const BackwardParams& params, const ParallelFor& parallel);

template <DType kType, int kHeadDim, int kHeadDimV>
void run_forward_sm80(const ForwardParams& params, void* stream);

// Head dims are multiples of 8.
template <DType kType, int kHeadDim, int kHeadDimV>
void run_forward_sm90(const ForwardParams& params, const ForwardSchedule& schedule, void* stream);

// Fills lse_log2 and delta.
template <DType kType>
void run_backward_preprocess(const BackwardParams& params, void* stream);

// Adds into dq_accum (in the order of tile/dq_accum.cuh), writes dk and dv. `smem`: k227KB
// where the device runs code for sm_90.
template <DType kType, int kHeadDim, int kHeadDimV>
void run_backward_sm80(const BackwardParams& params, SmemClass smem, void* stream);

// The same for head dims that are multiples of 8 and tensors aligned to 16 bytes; dq's sums are in
// no fixed order.
template <DType kType, int kHeadDim, int kHeadDimV>
void run_backward_sm90(const BackwardParams& params, void* stream);

// dq = softmax_scale * dq_accum, in dq's dtype and order.
template <DType kType>
void run_backward_postprocess(const BackwardParams& params, int accum_headdim, void* stream);

}  // namespace flashattn
