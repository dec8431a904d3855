"""Runs the Python code of a chapter of docs/learn, block after block.

python examples/learn/run_chapter.py 5      # chapter 5, in Triton's interpreter without a GPU
"""

import linecache
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = ROOT / "docs" / "learn"


def code_of(chapter: Path) -> str:
    """The python blocks, each on its own lines of the chapter, so that errors name those."""
    lines, inside = [], False
    for line in chapter.read_text().splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        if fence:
            inside = not inside and line == "```python"
    return "\n".join(lines) + "\n"


def run(chapter: Path) -> None:
    os.chdir(ROOT)  # chapters name files from there
    name, code = str(chapter), code_of(chapter)
    # Triton reads the sources of kernels through linecache, where prose would not parse.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    exec(compile(code, name, "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdigit():
        sys.exit(__doc__)
    found = list(CHAPTERS.glob(f"{int(sys.argv[1]):02}-*.md"))
    if not found:
        sys.exit(f"no chapter {sys.argv[1]} in {CHAPTERS}")
    run(found[0])
    print(f"{found[0].name}: every block ran")
