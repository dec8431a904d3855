#include "ops/ops.h"

namespace flashattn {

namespace {

#ifdef __x86_64__
constexpr const char* kCpuIsas = "baseline avx2 avx512";
#else
constexpr const char* kCpuIsas = "baseline";
#endif

}  // namespace

// JSON, one value a line. setup.py defines the values: without CUDA, cuda and archs are empty.
std::string build_info() {
  std::string json;
  auto add = [&json](const char* name, const char* value) {
    json += json.empty() ? "{\n" : ",\n";
    json += std::string("  \"") + name + "\": \"" + value + "\"";
  };
  add("version", FLASHATTN_VERSION);
  add("cuda", FLASHATTN_CUDA_VERSION);
  add("archs", FLASHATTN_CUDA_ARCHS);
  add("cpu_isas", kCpuIsas);
  add("compiler", __VERSION__);
  return json + "\n}";
}

}  // namespace flashattn
