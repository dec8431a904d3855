"""Builds flashattn/_C.so (the operators, on LibTorch's stable ABI) and flashattn._plan (pybind11).

Read from the environment: FLASHATTN_BUILD (auto: CUDA where nvcc is; cpu; cuda),
FLASHATTN_CUDA_ARCHS (default "80+PTX;90a"), FLASHATTN_WERROR=1 (warnings are errors), MAX_JOBS
(default: a compiler for each core, as memory allows), CXX, CUDA_HOME.

torch's BuildExtension isn't used: it refuses a CUDA other than torch's own, and a torch without
CUDA, though neither matters to a library on the stable ABI with a static CUDA runtime.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "tools"))
from compile_objects import compile_objects

PLAN = ["plan/device.cpp", "plan/plan.cpp", "plan/report.cpp"]
OPS = ["ops/library.cpp", "ops/forward.cpp", "ops/backward.cpp", "ops/inputs.cpp"]
OPS += ["ops/build_info.cpp", "dispatch/dispatch.cpp"]
CPU = ["kernels/forward_cpu.cpp", "kernels/backward_cpu.cpp", "instances/cpu_baseline.cpp"]
CPU += ["instances/cpu_avx2.cpp", "instances/cpu_avx512.cpp", "kernels/cpu_kernels.cpp"]
CUDA = ["host/cuda_device.cpp", "host/tensor_map.cpp", "instances/backward_rows.cu"]
for dtype in ("fp16", "bf16"):
    for dims in ("d64", "d96", "d128", "d192_128", "d192", "d256"):
        CUDA += [f"instances/{name}_sm80_{dtype}_{dims}.cu" for name in ("forward", "backward")]
        CUDA += [f"instances/forward_sm90_{dtype}_{dims}.cu"]
    for dims in ("d64", "d128", "d192_128", "d256"):
        CUDA += [f"instances/backward_sm90_{dtype}_{dims}.cu"]

STRICT = os.environ.get("FLASHATTN_WERROR") == "1"
CXX = [*shlex.split(os.environ.get("CXX", "g++")), "-O3", "-std=c++20", "-fPIC", "-Icsrc"]
CXX += ["-fvisibility=hidden", "-Wall", "-Wextra", *(["-Werror"] if STRICT else [])]
NVCC = ["-O3", "-std=c++20", "--expt-relaxed-constexpr", "-lineinfo", "-Xfatbin=-compress-all"]
NVCC += ["-Icsrc", "-Xcompiler=-fPIC,-fvisibility=hidden"]
NVCC += ["-Werror=all-warnings"] if STRICT else []


def find_nvcc():
    """The path of nvcc; None for a build without CUDA, which says so."""
    wanted = os.environ.get("FLASHATTN_BUILD", "auto")
    if wanted not in ("auto", "cpu", "cuda"):
        raise SystemExit(f"FLASHATTN_BUILD must be auto, cpu or cuda, got {wanted!r}")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc", path=f"{home}/bin") or shutil.which("nvcc")
    if wanted == "cuda" and nvcc is None:
        raise SystemExit("FLASHATTN_BUILD=cuda needs nvcc: set CUDA_HOME or put nvcc on PATH")
    if wanted == "auto" and nvcc is None:
        print("flashattn: no nvcc found, so this build is for the CPU alone", file=sys.stderr)
    return None if wanted == "cpu" else nvcc


def cuda_archs():
    """FLASHATTN_CUDA_ARCHS as a list, and as flags of nvcc."""
    archs = re.split(r"[;,\s]+", os.environ.get("FLASHATTN_CUDA_ARCHS", "80+PTX;90a").strip())
    flags = []
    for arch in archs:
        match = re.fullmatch(r"(\d+)(a|\+PTX)?", arch)
        if not match or int(match[1]) < 80:
            form = '"80+PTX;90a" (a: for that one alone; +PTX: for newer ones too)'
            raise SystemExit(f"FLASHATTN_CUDA_ARCHS must list 80 or newer, like {form}: {arch!r}")
        name = arch.removesuffix("+PTX")
        code = f"[sm_{name},compute_{name}]" if arch.endswith("+PTX") else f"sm_{name}"
        flags.append(f"-gencode=arch=compute_{name},code={code}")
    return archs, flags


def operator_flags(version, nvcc):
    """Flags for C++, for CUDA and for the linker."""
    import torch  # here, so that metadata needs no torch

    if tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 10):
        raise SystemExit(f"flashattn needs torch 2.10 or newer, found {torch.__version__}")
    root = Path(torch.__file__).parent
    archs, gencode = cuda_archs() if nvcc else ([], [])
    values = {"VERSION": version, "CUDA_ARCHS": ";".join(archs), "CUDA_VERSION": ""}
    cxx = [f"-isystem{root}/include", "-DUSE_CUDA", "-DTORCH_STABLE_ONLY"]
    cxx += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
    link = [f"-L{root}/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-Wl,--as-needed"]
    if nvcc:
        home = Path(nvcc).resolve().parent.parent
        words = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True)
        values["CUDA_VERSION"] = re.search(r"release (\S+),", words.stdout)[1]
        cxx += [f"-isystem{home}/include", "-DFLASHATTN_WITH_CUDA"]
        link += [f"-L{home}/lib64", "-lcudart_static", "-lrt", "-lpthread", "-ldl"]
        link += ["-Wl,--exclude-libs,ALL"]  # keeps this runtime apart from torch's
    return cxx + [f'-DFLASHATTN_{name}="{text}"' for name, text in values.items()], gencode, link


class Build(build_ext):
    def get_ext_filename(self, fullname):
        if fullname.endswith("_C"):  # knows no Python: one file for all versions
            return fullname.replace(".", os.sep) + ".so"
        return super().get_ext_filename(fullname)

    def build_extension(self, ext):
        if ext.name == "flashattn._C":
            nvcc = find_nvcc()
            cxx, gencode, link = operator_flags(self.distribution.get_version(), nvcc)
        else:
            import pybind11

            nvcc, gencode, link = None, [], []
            cxx = [f"-isystem{sysconfig.get_path('include')}", f"-isystem{pybind11.get_include()}"]
        compilers = {".cpp": [*CXX, *cxx], ".cu": [nvcc, *NVCC, *gencode]}
        sources = [path for path in ext.sources if nvcc or path.removeprefix("csrc/") not in CUDA]
        objects = compile_objects(sources, Path("build/objects", ext.name), compilers)
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([*CXX, "-shared", "-o", library, *objects, *link], check=True)


setup(
    ext_modules=[
        Extension("flashattn._C", [f"csrc/{name}" for name in OPS + PLAN + CPU + CUDA]),
        Extension("flashattn._plan", [f"csrc/{n}" for n in ["python/plan_module.cpp", *PLAN]]),
    ],
    cmdclass={"build_ext": Build},
)
