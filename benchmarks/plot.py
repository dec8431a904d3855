"""Plots from the JSON that run.py writes, beside it: `python benchmarks/plot.py results/x.json`."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from report import OURS, UNITS, passes_of, peers_of

STYLE = {OURS: {"color": "black", "linewidth": 2.2, "zorder": 3}}


def _figure_of(cell: dict, which: str, name: str, metric: str) -> float | None:
    return cell["passes"].get(which, {}).get(name, {}).get(metric)


def _kind(cell: dict) -> str:
    """What the cells of one panel share: everything but the sequence length and the batch."""
    headdim_v = f" (v {cell['headdim_v']})" if cell["headdim_v"] else ""
    return f"headdim {cell['headdim']}{headdim_v}, {'causal' if cell['causal'] else 'full'}"


def _label_lengths(axes: plt.Axes, seqlens: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(seqlens, [f"{s // 1024}k" if s >= 1024 else str(s) for s in seqlens])
    axes.set_xlabel("sequence length")


def plot_by_seqlen(report: dict, which: str) -> plt.Figure:
    """A panel for each head dim and mask, a line for each attention."""
    metric = report["metric"]
    kinds = list(dict.fromkeys(map(_kind, report["cells"])))
    rows = 2 if len(kinds) > 3 else 1
    columns = -(-len(kinds) // rows)
    size = (4 * columns + 0.5, 3.2 * rows)
    figure, panels = plt.subplots(rows, columns, figsize=size, squeeze=False)
    panels = panels.T.flat  # a column a head dim, full above causal
    for kind, axes in zip(kinds, panels, strict=False):
        cells = [cell for cell in report["cells"] if _kind(cell) == kind]
        for name in peers_of(report, which):
            points = [(c["seqlen"], _figure_of(c, which, name, metric)) for c in cells]
            points = [point for point in points if point[1] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name, **STYLE.get(name, {}))
        _label_lengths(axes, sorted({cell["seqlen"] for cell in cells}))
        axes.set_title(kind)
        if metric == "peak_mib":
            axes.set_yscale("log", base=2)
        else:
            axes.set_ylim(bottom=0)
        axes.set_ylabel(UNITS[metric])
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    return figure


def plot_bars(report: dict, which: str) -> plt.Figure:
    """A group of bars for each cell, for presets whose cells form no series."""
    metric, names = report["metric"], peers_of(report, which)
    cells, width = report["cells"], 0.8 / len(names)
    figure, axes = plt.subplots(figsize=(2 + 1.6 * len(cells), 4))
    for number, name in enumerate(names):
        heights = [_figure_of(cell, which, name, metric) or 0.0 for cell in cells]
        places = [i + (number - (len(names) - 1) / 2) * width for i in range(len(cells))]
        axes.bar(places, heights, width, label=name, color=STYLE.get(name, {}).get("color"))
    labels = [cell["name"].replace("-", "\n") for cell in cells]
    axes.set_xticks(range(len(cells)), labels, fontsize="small")
    axes.set_ylabel(UNITS[metric])
    axes.legend(fontsize="small")
    return figure


def plot_for(report: dict) -> Callable[[dict, str], plt.Figure]:
    lengths = {}
    for cell in report["cells"]:
        lengths.setdefault(_kind(cell), set()).add(cell["seqlen"])
    series = report["metric"] != "us" and all(len(found) > 1 for found in lengths.values())
    return plot_by_seqlen if series else plot_bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        report = json.loads(path.read_text())
        for which in passes_of(report):
            figure = plot_for(report)(report, which)
            machine = report["machine"].get("gpu", report["machine"]["cpu"])
            figure.suptitle(f"{report['about']}\n{which}, {machine}", fontsize="medium")
            figure.tight_layout()
            target = path.with_name(f"{path.stem}-{which}.png")
            figure.savefig(target, dpi=120)
            plt.close(figure)
            print(target)


if __name__ == "__main__":
    main()
