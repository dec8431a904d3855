"""docs/learn and examples/learn: every block of code and every program runs and is right, what the
text quotes is what the files say, and its figures are those of the JSON that it names."""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parent.parent
DOCS, EXAMPLES = ROOT / "docs" / "learn", ROOT / "examples" / "learn"
CHAPTERS = sorted(DOCS.glob("[0-9]*.md"))
TEXTS = [*CHAPTERS, DOCS / "README.md"]
# Not programs that check themselves; the last one needs a GPU, and minutes.
HELPERS = ("device", "run_chapter", "tune_triton_attention")
PROGRAMS = sorted(path for path in EXAMPLES.glob("*.py") if path.stem not in HELPERS)
CUDA_PROGRAMS = sorted(EXAMPLES.glob("*.cu"))
HOPPER_ONLY = ("hopper",)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="this torch comes without triton"
)


def stem(path):
    return path.stem


def run(command, device="cpu"):
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_INTERPRET": "1" if device == "cpu" else "0",
    }
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def load(folder, name):
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_ten_chapters():
    assert [path.name[:2] for path in CHAPTERS] == [f"{number:02}" for number in range(1, 11)]


@pytest.mark.cpu
@needs_triton
@pytest.mark.parametrize("chapter", CHAPTERS, ids=stem)
def test_chapter(chapter):
    run([sys.executable, EXAMPLES / "run_chapter.py", int(chapter.name[:2])])


@needs_triton
@pytest.mark.parametrize("program", PROGRAMS, ids=stem)
def test_program(program, device):
    run([sys.executable, program], device)


@functools.cache
def nvcc():
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    found = (shutil.which("nvcc", path=f"{home}/bin") for home in filter(None, homes))
    return shutil.which("nvcc") or next(filter(None, found), None)


@pytest.mark.parametrize("program", CUDA_PROGRAMS, ids=stem)
def test_cuda_program(program, device, tmp_path):
    """Compiles; on a GPU it runs too."""
    if nvcc() is None:
        pytest.skip("no nvcc")
    arch = "90a" if program.stem in HOPPER_ONLY else "80"
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        if program.stem in HOPPER_ONLY and major != 9:
            pytest.skip("for compute capability 9.0 alone")
        arch = "90a" if major == 9 else f"{major}{minor}"
    command = [nvcc(), "-std=c++17", f"-gencode=arch=compute_{arch},code=sm_{arch}"]
    command += ["-Werror", "all-warnings", program, "-o", tmp_path / program.stem]
    run(command + ["-c"] * (device == "cpu"))
    if device == "cuda":
        run([tmp_path / program.stem])


def blocks(text):
    """(line, language, the line of text before, code) of every fenced block."""
    lines, start = text.splitlines(), None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        before = next((x for x in reversed(lines[:start]) if x.strip()), "")
        yield start + 1, lines[start][3:], before, "\n".join(lines[start + 1 : number])
        start = None


def prose(text):
    """Without the fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


QUOTED = re.compile(r"From \[`[^`]+`\]\(([^)]+)\).*:$")


@pytest.mark.parametrize("chapter", CHAPTERS, ids=stem)
def test_quoted_code_is_that_of_the_files(chapter):
    for line, language, before, code in blocks(chapter.read_text()):
        quoted = QUOTED.match(before)
        assert quoted or language != "cuda", f"{chapter.name}:{line}: which file is this from?"
        if quoted:
            file = (DOCS / quoted[1]).resolve()
            assert code in file.read_text(), f"{chapter.name}:{line}: not in {file.name}"


@pytest.mark.parametrize("text", TEXTS, ids=stem)
def test_links(text):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose(text.read_text())):
        if not target.startswith("http"):
            assert (DOCS / target).exists(), f"{text.name}: {target}"


UNITS = r"(?:[TG]FLOP/s|[TGM]B/s|[KMG]i?B|us|ms|W|MHz)"


@pytest.mark.parametrize("text", TEXTS, ids=stem)
def test_figures_are_those_of_the_json(text):
    """A measured or a machine's figure carries the JSON that it is from; tables hold no others."""
    figures = load(ROOT / "tools", "learn_figures")
    whole = text.read_text()
    assert figures.with_figures(whole) == whole, "python tools/learn_figures.py puts them right"
    said = prose(whole)
    assert not re.search(rf"\d\s?{UNITS}\b", said), re.search(rf".*\d\s?{UNITS}\b", said)[0]
    bare = re.search(r"^\|.*\|\s*[\d.]+\s*\|.*$", said, re.MULTILINE)
    assert not bare, bare[0]


@pytest.mark.cpu
@given(st.lists(st.one_of(st.floats(-1e4, 1e4), st.just(float("-inf"))), max_size=12), st.data())
def test_merging_states_of_softmax_is_associative(values, data):
    """Any cut of a row in three, merged from either side, is the state of the whole row."""
    softmax = load(EXAMPLES, "online_softmax")
    cuts = sorted(data.draw(st.tuples(*[st.integers(0, len(values))] * 2)))
    parts = torch.tensor(values, dtype=torch.float64).tensor_split(cuts)
    a, b, c = map(softmax.state_of, parts)
    left = softmax.merge(softmax.merge(a, b), c)
    right = softmax.merge(a, softmax.merge(b, c))
    whole = softmax.state_of(torch.cat(parts))
    for got in (left, right):
        torch.testing.assert_close(got, whole, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(softmax.merge(a, b), softmax.merge(b, a), rtol=0.0, atol=0.0)
