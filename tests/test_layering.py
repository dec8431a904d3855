"""Who may include and import whom, by grep: csrc/README.md explains the map."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
CODE = (".h", ".cpp", ".cu", ".cuh")

# Each folder of csrc/, and what its files may include of the others. A name with a slash is one
# file: dispatch sees the kernels' declarations and none of their code.
MAY_INCLUDE = {
    "common": (),
    "plan": ("common",),
    "host": (),
    "ptx": ("common",),
    "tile": ("common", "ptx"),
    "kernels": ("common", "host", "ptx", "tile", "plan/tile_config.h", "plan/heuristics.h"),
    "instances": ("common", "kernels", "plan/tile_config.h"),
    "dispatch": ("common", "host", "plan", "kernels/kernels.h"),
    "ops": ("common", "dispatch", "plan", "kernels/kernels.h"),
    "python": ("common", "plan"),
}


def sources(folder, suffixes=CODE):
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes)


def code(path):
    """The file without its comments."""
    text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def includes(path):
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), flags=re.MULTILINE)


def test_every_folder_has_its_rule():
    folders = {path.name for path in CSRC.iterdir() if path.is_dir()}
    assert folders == set(MAY_INCLUDE)


@pytest.mark.parametrize("folder", MAY_INCLUDE)
def test_includes(folder):
    allowed = (folder, *MAY_INCLUDE[folder])
    for path in sources(CSRC / folder):
        for name in includes(path):
            ours = (CSRC / name).exists()
            if not ours:
                assert not (path.parent / name).exists(), f"{path}: {name} is not named from csrc/"
                continue
            ok = any(name == rule or name.startswith(rule + "/") for rule in allowed)
            assert ok, f"{path.relative_to(ROOT)} includes {name}; it may see {', '.join(allowed)}"


def test_torch_is_included_by_ops_alone():
    for path in sources(CSRC):
        if path.parent.name != "ops":
            for name in includes(path):
                torch_header = name.startswith(("torch/", "ATen/", "c10/"))
                assert not torch_header, f"{path.relative_to(ROOT)} includes {name}"
    doors = {p.name for p in sources(CSRC / "ops") for n in includes(p) if n.startswith("torch/")}
    assert doors == {"stable.h"}


def test_common_and_plan_know_no_cuda():
    for folder in ("common", "plan", "python"):
        for path in sources(CSRC / folder):
            for name in includes(path):
                assert "cuda" not in name, f"{path.relative_to(ROOT)} includes {name}"


def test_python_bindings_are_in_python_alone():
    for path in sources(CSRC):
        if any(name.startswith("pybind11/") for name in includes(path)):
            assert path.parent.name == "python", path


def test_asm_is_in_ptx_alone():
    for path in sources(CSRC):
        if path.parent.name != "ptx":
            assert not re.search(r"\basm\b", code(path)), f"{path.relative_to(ROOT)} has asm"


def test_kernels_are_in_kernels_alone():
    for path in sources(CSRC):
        if path.parent.name != "kernels":
            assert "__global__" not in code(path), f"{path.relative_to(ROOT)} has a kernel"
        if path != CSRC / "host" / "launch.cuh":
            assert "<<<" not in code(path), f"{path.relative_to(ROOT)} launches unchecked"


def test_infinity_is_the_real_one():
    """Minus infinity is IEEE's, never a large finite number that stands for it."""
    for path in sources(CSRC):
        text = code(path)
        assert not re.search(r"-\s*(1e3\d|1e4|5e4|FLT_MAX|10000)\b", text), path


def test_build_lists_its_sources():
    """Everything that compiles is named in setup.py, and nothing else is."""
    text = (ROOT / "setup.py").read_text()
    assert "glob" not in text
    namespace = {}
    lists = re.findall(
        r"^(?:(?:PLAN|OPS|CPU|CUDA) \+?=|for dtype|    for dims|        CUDA).*", text, re.M
    )
    exec("\n".join(lists), namespace)
    listed = {name for key in ("PLAN", "OPS", "CPU", "CUDA") for name in namespace[key]}
    listed.add("python/plan_module.cpp")
    on_disk = {str(path.relative_to(CSRC)) for path in sources(CSRC, (".cpp", ".cu"))}
    assert listed == on_disk


PYTHON = ROOT / "flashattn"
# Each module, and the modules of the package that it may import.
MAY_IMPORT = {
    "reference": (),
    "_ops": (),
    "_autograd": ("_ops",),
    "_checks": ("_ops", "_plan"),
    "_fakes": ("_checks",),
    "_strict": (),
    "_explain": ("_checks", "_ops", "_plan"),
    "interface": ("_autograd", "_checks", "_fakes", "_strict"),
}


def imports(path):
    names = set()
    for line in re.findall(r"^\s*(?:from|import) .*?(?:\(.*?\)|$)", path.read_text(), re.M | re.S):
        if match := re.match(r"\s*from flashattn import (.*)", line, re.S):
            names |= set(re.findall(r"\w+", re.sub(r"\bas \w+", "", match[1])))
        elif match := re.match(r"\s*(?:from|import) flashattn\.(\w+)", line):
            names.add(match[1])
    return names


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_python_imports(module):
    assert imports(PYTHON / f"{module}.py") <= set(MAY_IMPORT[module])


def test_every_python_module_has_its_rule():
    modules = {path.stem for path in PYTHON.glob("*.py")} - {"__init__"}
    assert modules == set(MAY_IMPORT)


def test_others_import_the_public_functions_only():
    for folder in ("examples", "benchmarks", "flashattn/integrations", "flashattn/distributed"):
        for path in sources(ROOT / folder, (".py",)):
            private = {name for name in imports(path) if name.startswith("_")} - {"__version__"}
            assert not private, f"{path.relative_to(ROOT)} imports {private}"


def project_files():
    folders = ("csrc", "flashattn", "tests", "benchmarks", "examples", "docs", "tools", ".ci")
    suffixes = (*CODE, ".py", ".md", ".sh", ".toml", "")
    tops = [path for path in ROOT.iterdir() if path.is_file() and path.suffix in suffixes]
    nested = [path for name in folders for path in sources(ROOT / name, suffixes) if path.is_file()]
    return [path for path in tops + nested if path.suffix or path.parent.name != "results"]


def test_no_file_is_too_long():
    for path in project_files():
        if path.suffix in (*CODE, ".py"):
            lines = path.read_text().count("\n")
            assert lines <= 600, f"{path.relative_to(ROOT)} has {lines} lines"


def test_the_text_is_about_the_product():
    """No notes to oneself, no traces of where it was written, no code that is switched off."""
    words = re.compile(
        r"\b(TODO|FIXME|XXX|HACK)\b|/work/|/home/|localhost:\d|#if 0|\bissue \d|\bsession \d"
    )
    for path in project_files():
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not words.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_no_banners():
    for path in project_files():
        if path.suffix in (*CODE, ".py"):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                banner = re.match(r"^\s*(//|#)\s*[-=*#/]{8,}", line)
                assert not banner, f"{path.relative_to(ROOT)}:{number}: {line}"
