#include <algorithm>
#include <charconv>
#include <cstdlib>
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
      {"a100", Arch::kSm80, {}, 80, 108, 163 * 1024, 164 * 1024},
      {"rtx4090", Arch::kSm80, {}, 89, 128, 99 * 1024, 100 * 1024},
      {"h100", Arch::kSm90, {true, true}, 90, 132, 227 * 1024, 228 * 1024},
      {"h200", Arch::kSm90, {true, true}, 90, 132, 227 * 1024, 228 * 1024},
  };
  for (const Device& device : devices) {
    if (device.name == name) return &device;
  }
  return nullptr;
}

namespace {

// One target of a build: "90a" is {90, true}.
struct Target {
  int arch = 0;  // 0: none
  bool specific = false;
};

// The target, if its code runs on a GPU, else none.
Target target_that_runs(std::string_view target, int compute_capability) {
  int arch = 0;
  auto [suffix, error] = std::from_chars(target.data(), target.data() + target.size(), arch);
  if (error != std::errc()) return {};
  std::string_view kind(suffix, target.data() + target.size() - suffix);
  bool same_major = arch / 10 == compute_capability / 10;
  bool runs = kind == "a" ? arch == compute_capability
                          : (same_major || kind == "+PTX") && arch <= compute_capability;
  return runs ? Target{arch, kind == "a"} : Target{};
}

// Of the targets that run the newest, which is the one that CUDA takes; none when there is none.
Target newest_that_runs(std::string_view archs, int compute_capability) {
  Target newest;
  while (!archs.empty()) {
    size_t length = archs.find(';');
    Target target = target_that_runs(archs.substr(0, length), compute_capability);
    if (target.arch > newest.arch || (target.arch == newest.arch && target.specific)) {
      newest = target;
    }
    archs.remove_prefix(length == std::string_view::npos ? archs.size() : length + 1);
  }
  return newest;
}

}  // namespace

bool kernel_image_available(std::string_view archs, int compute_capability) {
  return newest_that_runs(archs, compute_capability).arch != 0;
}

Arch arch_of(int compute_capability, std::string_view archs) {
  return arch_of(newest_that_runs(archs, compute_capability).arch);
}

Sm90aPasses sm90a_passes(int compute_capability, std::string_view archs) {
  const Target target = newest_that_runs(archs, compute_capability);
  const bool runs = target.arch == 90 && target.specific;
  const char* value = std::getenv("FLASHATTN_NO_SM90");
  const std::string_view excluded = value == nullptr ? "" : value;
  return {.forward = runs && excluded != "1" && excluded != "forward",
          .backward = runs && excluded != "1" && excluded != "backward"};
}

}  // namespace flashattn
