// flashattn._plan: the planner and the mask arithmetic, for explain() and for tests that need no
// GPU. No torch here: numbers, strings and lists only.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>

#include "plan/plan.h"

namespace py = pybind11;
using namespace flashattn;

namespace {

constexpr std::pair<DType, const char*> kDTypeNames[] = {
    {DType::kFloat16, "float16"}, {DType::kBFloat16, "bfloat16"}, {DType::kFloat32, "float32"}};

std::string dtype_name(DType dtype) {
  for (auto [value, name] : kDTypeNames) {
    if (value == dtype) return name;
  }
  return "unknown";
}

DType dtype_by_name(const std::string& wanted) {
  for (auto [value, name] : kDTypeNames) {
    if (wanted == name) return value;
  }
  throw std::invalid_argument("dtype must be float16, bfloat16 or float32, got " + wanted);
}

std::string arch_name(Arch arch) {
  return arch == Arch::kCpu ? "cpu" : "sm_" + std::to_string(static_cast<int>(arch));
}

std::tuple<int, int, int, int> as_tuple(const BlockRange& range) {
  return {range.begin, range.end, range.full_begin, range.full_end};
}

std::pair<int, int> as_pair(const KeyRange& range) { return {range.begin, range.end}; }

// What a kernel reads of the lengths of one side, from lists instead of device memory.
std::pair<int64_t, int> sequence(int64_t batch_index, int64_t rows,
                                 const std::optional<std::vector<int32_t>>& cu_seqlens,
                                 const std::optional<std::vector<int32_t>>& seqused) {
  SeqLens lengths{cu_seqlens ? cu_seqlens->data() : nullptr, seqused ? seqused->data() : nullptr,
                  rows};
  const size_t index = static_cast<size_t>(batch_index);
  if ((cu_seqlens && index + 1 >= cu_seqlens->size()) || (seqused && index >= seqused->size())) {
    throw py::index_error("batch_index is past the end of cu_seqlens or seqused");
  }
  SeqRows result = lengths.sequence(batch_index);
  return {result.begin, result.length};
}

void bind_mask(py::module_& module) {
  py::class_<SequenceMask>(module, "SequenceMask")
      .def(py::init([](int seqlen_q, int seqlen_k, int64_t window_left, int64_t window_right) {
             MaskSpec spec{MaskSpec::clamp_window(window_left),
                           MaskSpec::clamp_window(window_right)};
             return SequenceMask{spec, seqlen_q, seqlen_k};
           }),
           py::arg("seqlen_q"), py::arg("seqlen_k"), py::arg("window_left") = -1,
           py::arg("window_right") = -1)
      .def("visible", &SequenceMask::visible, py::arg("row"), py::arg("key"))
      .def(
          "visible_keys",
          [](const SequenceMask& mask, int row) { return as_pair(mask.visible_keys(row)); },
          py::arg("row"), "(begin, end) of the keys that a query sees")
      .def(
          "visible_rows",
          [](const SequenceMask& mask, int key) { return as_pair(mask.visible_rows(key)); },
          py::arg("key"), "(begin, end) of the queries that see a key")
      .def(
          "key_blocks",
          [](const SequenceMask& mask, int row_begin, int block_m, int block_n) {
            return as_tuple(mask.key_blocks(row_begin, block_m, block_n));
          },
          py::arg("row_begin"), py::arg("block_m"), py::arg("block_n"),
          "(begin, end, full_begin, full_end)")
      .def(
          "query_blocks",
          [](const SequenceMask& mask, int key_begin, int block_n, int block_m) {
            return as_tuple(mask.query_blocks(key_begin, block_n, block_m));
          },
          py::arg("key_begin"), py::arg("block_n"), py::arg("block_m"),
          "(begin, end, full_begin, full_end)");
  module.def("sequence", &sequence, py::arg("batch_index"), py::arg("rows"),
             py::arg("cu_seqlens") = py::none(), py::arg("seqused") = py::none(),
             "(first row, length) of a sequence, as every kernel bounds it");
}

Problem make_problem(const std::string& dtype, bool packed, int64_t batch, int64_t seqlen_q,
                     int64_t seqlen_k, int64_t heads_q, int64_t heads_k, int headdim, int headdim_v,
                     int64_t window_left, int64_t window_right, bool aligned16, bool deterministic,
                     bool need_dq, bool need_dkv, bool partly_used) {
  Problem problem;
  problem.dtype = dtype_by_name(dtype);
  problem.packed = packed;
  problem.partly_used = partly_used;
  problem.batch = batch;
  problem.seqlen_q = seqlen_q;
  problem.seqlen_k = seqlen_k;
  problem.heads_q = heads_q;
  problem.heads_k = heads_k;
  problem.headdim = headdim;
  problem.headdim_v = headdim_v;
  problem.mask = {MaskSpec::clamp_window(window_left), MaskSpec::clamp_window(window_right)};
  problem.aligned16 = aligned16;
  problem.deterministic = deterministic;
  problem.need_dq = need_dq;
  problem.need_dkv = need_dkv;
  return problem;
}

void bind_problem(py::module_& module) {
  using namespace pybind11::literals;
  py::class_<Problem>(module, "Problem")
      .def(py::init(&make_problem), py::kw_only(), "dtype"_a = "bfloat16", "packed"_a = false,
           "batch"_a, "seqlen_q"_a, "seqlen_k"_a, "heads_q"_a, "heads_k"_a, "headdim"_a,
           "headdim_v"_a, "window_left"_a = -1, "window_right"_a = -1, "aligned16"_a = true,
           "deterministic"_a = false, "need_dq"_a = true, "need_dkv"_a = true,
           "partly_used"_a = false)
      .def_property_readonly("dtype", [](const Problem& p) { return dtype_name(p.dtype); })
      .def_readonly("packed", &Problem::packed)
      .def_readonly("partly_used", &Problem::partly_used)
      .def_readonly("batch", &Problem::batch)
      .def_readonly("seqlen_q", &Problem::seqlen_q)
      .def_readonly("seqlen_k", &Problem::seqlen_k)
      .def_readonly("heads_q", &Problem::heads_q)
      .def_readonly("heads_k", &Problem::heads_k)
      .def_readonly("headdim", &Problem::headdim)
      .def_readonly("headdim_v", &Problem::headdim_v)
      .def_property_readonly("window_left", [](const Problem& p) { return p.mask.left; })
      .def_property_readonly("window_right", [](const Problem& p) { return p.mask.right; })
      .def_readonly("aligned16", &Problem::aligned16)
      .def_readonly("deterministic", &Problem::deterministic)
      .def_readonly("need_dq", &Problem::need_dq)
      .def_readonly("need_dkv", &Problem::need_dkv);
}

// Without `archs`: in a build with code for every architecture.
Device make_device(const std::string& name, int compute_capability, int sm_count,
                   int64_t smem_per_block, int64_t smem_per_sm,
                   const std::optional<std::string>& archs) {
  const Arch arch = archs ? arch_of(compute_capability, *archs) : arch_of(compute_capability);
  const Sm90aPasses sm90a = sm90a_passes(compute_capability, archs ? *archs : "80+PTX;90a");
  return {name, arch, sm90a, compute_capability, sm_count, smem_per_block, smem_per_sm};
}

void bind_device(py::module_& module) {
  py::class_<Device>(module, "Device")
      .def(py::init(&make_device), py::arg("name"), py::arg("compute_capability"),
           py::arg("sm_count"), py::arg("smem_per_block"), py::arg("smem_per_sm"),
           py::arg("archs") = py::none())
      .def_readonly("name", &Device::name)
      .def_property_readonly("arch", [](const Device& d) { return arch_name(d.arch); })
      .def_property_readonly(
          "sm90a",
          [](const Device& d) { return py::make_tuple(d.sm90a.forward, d.sm90a.backward); })
      .def_readonly("compute_capability", &Device::compute_capability)
      .def_readonly("sm_count", &Device::sm_count)
      .def_readonly("smem_per_block", &Device::smem_per_block)
      .def_readonly("smem_per_sm", &Device::smem_per_sm);
  module.def("device_by_name", &device_by_name, py::arg("name"), py::return_value_policy::copy,
             "None when the name is unknown");
  module.def("kernel_image_available", &kernel_image_available, py::arg("archs"),
             py::arg("compute_capability"));
}

void bind_plan(py::module_& module) {
  using Workspace = WorkspaceLayout;
  py::class_<Workspace>(module, "WorkspaceLayout")
      .def_readonly("dq_accum", &Workspace::dq_accum)
      .def_readonly("dq_turn", &Workspace::dq_turn)
      .def_readonly("pieces_dealt", &Workspace::pieces_dealt)
      .def_readonly("lse_log2", &Workspace::lse_log2)
      .def_readonly("delta", &Workspace::delta)
      .def_readonly("zeroed_bytes", &Workspace::zeroed_bytes)
      .def_readonly("bytes", &Workspace::bytes);
  py::class_<Plan>(module, "Plan")
      .def_property_readonly("kernel", [](const Plan& p) { return kernel_name(p.kernel); })
      .def_readonly("block_m", &Plan::block_m)
      .def_readonly("block_n", &Plan::block_n)
      .def_readonly("warps", &Plan::warps)
      .def_readonly("stages", &Plan::stages)
      .def_readonly("grid", &Plan::grid)
      .def_readonly("tiles", &Plan::tiles)
      .def_property_readonly("whole_heads",
                             [](const Plan& p) { return p.backward_schedule.whole_heads; })
      .def_readonly("smem_bytes", &Plan::smem_bytes)
      .def_readonly("accum_headdim", &Plan::accum_headdim)
      .def_readonly("accum_rows", &Plan::accum_rows)
      .def_readonly("dq_turns_per_head", &Plan::dq_turns_per_head)
      .def_readonly("workspace", &Plan::workspace)
      .def_property_readonly("workspace_bytes", [](const Plan& p) { return p.workspace.bytes; })
      .def_readonly("supported", &Plan::supported)
      .def_readonly("unsupported_reason", &Plan::unsupported_reason);
  py::class_<PlanReport>(module, "PlanReport")
      .def_readonly("flops", &PlanReport::flops)
      .def_readonly("bytes", &PlanReport::bytes)
      .def_readonly("visited_blocks", &PlanReport::visited_blocks)
      .def_readonly("full_blocks", &PlanReport::full_blocks)
      .def_readonly("all_blocks", &PlanReport::all_blocks)
      .def_readonly("reasons", &PlanReport::reasons);
  module.def("make_forward_plan", &make_forward_plan, py::arg("problem"), py::arg("device"));
  module.def("make_backward_plan", &make_backward_plan, py::arg("problem"), py::arg("device"));
  module.def("report", &report, py::arg("plan"), py::arg("problem"), py::arg("device"));
}

py::dict forward_tile(int headdim) {
  const ForwardTile tile = sm80_forward_tile(headdim);
  return py::dict(py::arg("block_m") = tile.block_m, py::arg("block_n") = tile.block_n,
                  py::arg("warps") = tile.warps, py::arg("stages") = tile.stages);
}

py::dict sm90_forward_tile_of(int headdim, int headdim_v) {
  const Sm90ForwardTile tile = sm90_forward_tile({headdim, headdim_v});
  return py::dict(py::arg("block_m") = tile.block_m, py::arg("block_n") = tile.block_n,
                  py::arg("warps") = tile.warps(), py::arg("stages") = tile.stages);
}

py::dict backward_tile(int headdim, bool sm90) {
  const BackwardTile tile =
      sm80_backward_tile(headdim, sm90 ? SmemClass::k227KB : SmemClass::k99KB);
  return py::dict(py::arg("block_m") = tile.block_m, py::arg("block_n") = tile.block_n,
                  py::arg("warps") = tile.warps, py::arg("stages") = tile.stages);
}

void bind_tiles(py::module_& module) {
  py::list head_dims;
  for (const HeadDims& dims : kHeadDims) head_dims.append(py::make_tuple(dims.qk, dims.v));
  module.attr("HEAD_DIMS") = py::tuple(head_dims);
  module.def("head_dims_index", &head_dims_index, py::arg("headdim"), py::arg("headdim_v"),
             "Which of HEAD_DIMS a problem runs in; -1: none");
  module.def("sm80_forward_tile", &forward_tile, py::arg("headdim"));
  module.def("sm90_forward_tile", &sm90_forward_tile_of, py::arg("headdim"), py::arg("headdim_v"));
  module.def("sm80_backward_tile", &backward_tile, py::arg("headdim"), py::arg("sm90"));
}

}  // namespace

PYBIND11_MODULE(_plan, module) {
  module.doc() = "The planner: from a problem to a launch, without torch and without a GPU.";
  bind_mask(module);
  bind_problem(module);
  bind_device(module);
  bind_plan(module);
  bind_tiles(module);
}
