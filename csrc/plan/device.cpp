#include <algorithm>
#include <charconv>
#include <thread>

#include "plan/plan.h"

namespace flashattn {

Arch arch_of(int compute_capability) {
  if (compute_capability == 0) return Arch::kCpu;
  return compute_capability / 10 == 9 ? Arch::kSm90 : Arch::kSm80;
}

const Device* device_by_name(std::string_view name) {
  static const Device devices[] = {
      {.name = "cpu", .sm_count = static_cast<int>(std::thread::hardware_concurrency())},
      {"a100", Arch::kSm80, 80, 108, 163 * 1024, 164 * 1024},
      {"rtx4090", Arch::kSm80, 89, 128, 99 * 1024, 100 * 1024},
      {"h100", Arch::kSm90, 90, 132, 227 * 1024, 228 * 1024},
      {"h200", Arch::kSm90, 90, 132, 227 * 1024, 228 * 1024},
  };
  for (const Device& device : devices) {
    if (device.name == name) return &device;
  }
  return nullptr;
}

namespace {

// The architecture of one target of a build ("90a", "80+PTX") if its code runs on a GPU, else 0.
int target_that_runs(std::string_view target, int compute_capability) {
  int arch = 0;
  auto [suffix, error] = std::from_chars(target.data(), target.data() + target.size(), arch);
  if (error != std::errc()) return 0;
  std::string_view kind(suffix, target.data() + target.size() - suffix);
  bool same_major = arch / 10 == compute_capability / 10;
  bool runs = kind == "a" ? arch == compute_capability
                          : (same_major || kind == "+PTX") && arch <= compute_capability;
  return runs ? arch : 0;
}

// Of the targets that run the newest, which is the one that CUDA takes; 0 when there is none.
int newest_that_runs(std::string_view archs, int compute_capability) {
  int newest = 0;
  while (!archs.empty()) {
    size_t length = archs.find(';');
    newest = std::max(newest, target_that_runs(archs.substr(0, length), compute_capability));
    archs.remove_prefix(length == std::string_view::npos ? archs.size() : length + 1);
  }
  return newest;
}

}  // namespace

bool kernel_image_available(std::string_view archs, int compute_capability) {
  return newest_that_runs(archs, compute_capability) != 0;
}

Arch arch_of(int compute_capability, std::string_view archs) {
  return arch_of(newest_that_runs(archs, compute_capability));
}

}  // namespace flashattn
