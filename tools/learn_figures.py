"""Writes the figures of docs/learn from the JSON that they name; run it after a new benchmark.

A figure stands before a comment that says where it is from:
322<!--benchmarks/results/h200.json d64-full-s16384-b1-h32-bf16 fwd flashattn tflops-->
It keeps the number of decimals that it is written with.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHAPTERS = ROOT / "docs" / "learn"
FIGURE = re.compile(r"(\d[\d.]*)<!--(\S+\.json) ([^>]+?)-->")


def value(file: str, path: list[str]) -> float:
    """A benchmark's figure is named by cell, pass, attention and metric, others by their keys."""
    data = json.loads((ROOT / file).read_text())
    if "cells" in data:
        data = {cell["name"]: cell["passes"] for cell in data["cells"]}
    for key in path:
        data = data[key]
    return data


def with_figures(text: str) -> str:
    def write(match: re.Match) -> str:
        written, file, path = match.groups()
        decimals = len(written.partition(".")[2])
        return f"{value(file, path.split()):.{decimals}f}<!--{file} {path}-->"

    return FIGURE.sub(write, text)


if __name__ == "__main__":
    for chapter in sorted(CHAPTERS.glob("*.md")):
        text = chapter.read_text()
        if with_figures(text) != text:
            chapter.write_text(with_figures(text))
            print(chapter.relative_to(ROOT))
