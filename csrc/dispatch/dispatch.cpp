#include "dispatch/dispatch.h"

#include <array>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#ifdef FLASHATTN_WITH_CUDA
#include "host/cuda_device.h"
#endif

namespace flashattn {

#ifdef FLASHATTN_WITH_CUDA

namespace {

using ForwardLauncher = void (*)(const ForwardParams&, void*);
using ForwardSm90Launcher = void (*)(const ForwardParams&, const ForwardSchedule&, void*);
using BackwardLauncher = void (*)(const BackwardParams&, SmemClass, void*);
using BackwardSm90Launcher = void (*)(const BackwardParams&, void*);

constexpr size_t kHeadDimsCount = std::size(kHeadDims);
using HeadDimsSequence = std::make_index_sequence<kHeadDimsCount>;

// One launcher for each entry of kHeadDims, in its order.
template <DType kType, size_t... kIndex>
constexpr std::array<ForwardLauncher, kHeadDimsCount> forward_launchers(
    std::index_sequence<kIndex...>) {
  return {&run_forward_sm80<kType, kHeadDims[kIndex].qk, kHeadDims[kIndex].v>...};
}

template <DType kType, size_t... kIndex>
constexpr std::array<ForwardSm90Launcher, kHeadDimsCount> forward_sm90_launchers(
    std::index_sequence<kIndex...>) {
  return {&run_forward_sm90<kType, kHeadDims[kIndex].qk, kHeadDims[kIndex].v>...};
}

template <DType kType, size_t... kIndex>
constexpr std::array<BackwardLauncher, kHeadDimsCount> backward_launchers(
    std::index_sequence<kIndex...>) {
  return {&run_backward_sm80<kType, kHeadDims[kIndex].qk, kHeadDims[kIndex].v>...};
}

// Those that it is compiled for are entries too; each other one gets the one that serves it.
template <DType kType, size_t... kIndex>
constexpr std::array<BackwardSm90Launcher, kHeadDimsCount> backward_sm90_launchers(
    std::index_sequence<kIndex...>) {
  return {&run_backward_sm90<kType, sm90_backward_dims(kHeadDims[kIndex]).qk,
                             sm90_backward_dims(kHeadDims[kIndex]).v>...};
}

template <DType kType>
void forward_cuda(const Plan& plan, const ForwardParams& params, void* stream) {
  static constexpr auto launchers = forward_launchers<kType>(HeadDimsSequence());
  static constexpr auto sm90_launchers = forward_sm90_launchers<kType>(HeadDimsSequence());
  const size_t index = static_cast<size_t>(plan.head_dims_index);
  if (plan.kernel == Kernel::kForwardSm90) {
    sm90_launchers[index](params, plan.schedule, stream);
  } else {
    launchers[index](params, stream);
  }
}

template <DType kType>
void backward_cuda(const Plan& plan, const BackwardParams& params, void* stream) {
  static constexpr auto launchers = backward_launchers<kType>(HeadDimsSequence());
  static constexpr auto sm90_launchers = backward_sm90_launchers<kType>(HeadDimsSequence());
  const size_t index = static_cast<size_t>(plan.head_dims_index);
  run_backward_preprocess<kType>(params, stream);
  if (plan.kernel == Kernel::kBackwardSm90) {
    sm90_launchers[index](params, stream);
  } else {
    launchers[index](params, plan.smem, stream);
  }
  if (params.dq.data != nullptr && !params.schedule.whole_heads) {
    run_backward_postprocess<kType>(params, plan.accum_headdim, stream);
  }
}

Device read_device(int index) {
  const CudaProperties gpu = read_cuda_properties(index);
  if (!kernel_image_available(FLASHATTN_CUDA_ARCHS, gpu.compute_capability)) {
    throw std::runtime_error("flashattn was built for the architectures " FLASHATTN_CUDA_ARCHS
                             " and has no kernel for " +
                             gpu.name + ", compute capability " +
                             std::to_string(gpu.compute_capability / 10) + "." +
                             std::to_string(gpu.compute_capability % 10));
  }
  return {.name = gpu.name,
          .arch = arch_of(gpu.compute_capability, FLASHATTN_CUDA_ARCHS),
          .sm90a = sm90a_passes(gpu.compute_capability, FLASHATTN_CUDA_ARCHS),
          .compute_capability = gpu.compute_capability,
          .sm_count = gpu.sm_count,
          .smem_per_block = gpu.smem_per_block,
          .smem_per_sm = gpu.smem_per_sm};
}

const Device& cuda_device(int index) {
  constexpr size_t kMaxDevices = 64;
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<Device, kMaxDevices> devices;
  const size_t slot = static_cast<size_t>(index);
  std::call_once(once.at(slot), [&] { devices[slot] = read_device(index); });
  return devices[slot];
}

void place_workspace(const Plan& plan, BackwardParams& params, void* workspace) {
  char* base = static_cast<char*>(workspace);
  if (params.dq.data != nullptr) {
    params.dq_accum = reinterpret_cast<float*>(base + plan.workspace.dq_accum);
  }
  params.accum_rows = plan.accum_rows;
  if (plan.dq_turns_per_head > 0) {
    params.dq_turn = reinterpret_cast<int32_t*>(base + plan.workspace.dq_turn);
    params.dq_turns_per_head = plan.dq_turns_per_head;
  }
  params.schedule = plan.backward_schedule;
  params.pieces_dealt = reinterpret_cast<uint32_t*>(base + plan.workspace.pieces_dealt);
  params.lse_log2 = reinterpret_cast<float*>(base + plan.workspace.lse_log2);
  params.delta = reinterpret_cast<float*>(base + plan.workspace.delta);
}

}  // namespace

#endif  // FLASHATTN_WITH_CUDA

const Device& device_of([[maybe_unused]] const Executor& executor) {
#ifdef FLASHATTN_WITH_CUDA
  if (executor.cuda) return cuda_device(executor.device_index);
#endif
  static const Device& cpu = *device_by_name("cpu");
  return cpu;
}

void run_forward(const Plan& plan, const ForwardParams& params, const Executor& executor) {
  if (!plan.supported) throw std::runtime_error(plan.unsupported_reason);
  if (plan.kernel == Kernel::kForwardCpu) return run_forward_cpu(params, executor.parallel);
#ifdef FLASHATTN_WITH_CUDA
  set_cuda_device(executor.device_index);
  if (params.shape.dtype == DType::kFloat16) {
    forward_cuda<DType::kFloat16>(plan, params, executor.stream);
  } else {
    forward_cuda<DType::kBFloat16>(plan, params, executor.stream);
  }
#endif
}

void run_backward(const Plan& plan, BackwardParams params, [[maybe_unused]] void* workspace,
                  const Executor& executor) {
  if (!plan.supported) throw std::runtime_error(plan.unsupported_reason);
  if (plan.kernel == Kernel::kBackwardCpu) return run_backward_cpu(params, executor.parallel);
#ifdef FLASHATTN_WITH_CUDA
  set_cuda_device(executor.device_index);
  place_workspace(plan, params, workspace);
  zero_async(workspace, plan.workspace.zeroed_bytes, executor.stream);
  if (params.shape.dtype == DType::kFloat16) {
    backward_cuda<DType::kFloat16>(plan, params, executor.stream);
  } else {
    backward_cuda<DType::kBFloat16>(plan, params, executor.stream);
  }
#endif
}

}  // namespace flashattn
