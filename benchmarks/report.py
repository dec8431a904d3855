"""Tables from the JSON that run.py writes: `python benchmarks/report.py results/x.json`."""

import argparse
import json
import math
from pathlib import Path

OURS = "flashattn"
UNITS = {"tflops": "TFLOP/s", "us": "us a call", "peak_mib": "MiB at the peak"}


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def passes_of(report: dict) -> list[str]:
    return list(dict.fromkeys(which for cell in report["cells"] for which in cell["passes"]))


def peers_of(report: dict, which: str) -> list[str]:
    """Every attention with a figure in this pass, ours first."""
    names = (name for cell in report["cells"] for name in cell["passes"].get(which, {}))
    return list(dict.fromkeys((OURS, *names)))


def ratios(report: dict, which: str, peer: str, headdim: int | None = None) -> dict[str, float]:
    """How many times as fast as the peer, by cell name."""
    found = {}
    for cell in report["cells"]:
        figures = cell["passes"].get(which, {}).get(peer, {})
        if "speed_of_ours" in figures and headdim in (None, cell["headdim"]):
            found[cell["name"]] = figures["speed_of_ours"]["median"]
    return found


def summarize(report: dict) -> list[dict]:
    """A row for each pass, peer and head dim (None: all): geometric mean and the worst cell."""
    rows = []
    headdims = sorted({cell["headdim"] for cell in report["cells"]})
    for which in passes_of(report):
        for peer in peers_of(report, which)[1:]:
            for headdim in (None, *headdims) if len(headdims) > 1 else (None,):
                values = ratios(report, which, peer, headdim)
                if values:
                    worst = min(values, key=values.get)
                    rows.append(
                        {
                            "pass": which,
                            "peer": peer,
                            "headdim": headdim,
                            "cells": len(values),
                            "geometric_mean": round(geometric_mean(list(values.values())), 4),
                            "min": values[worst],
                            "min_cell": worst,
                        }
                    )
    return rows


def _figure(figures: dict, metric: str) -> str:
    if metric in figures:
        return f"{figures[metric]:.4g}"
    return "-" if "skipped" in figures else ""


def table(report: dict) -> list[list[str]]:
    """A row a cell and pass: each attention's figure, then how many times as fast ours is."""
    metric = report["metric"]
    names = list(dict.fromkeys(n for which in passes_of(report) for n in peers_of(report, which)))
    compared = list(dict.fromkeys(row["peer"] for row in report["summary"]))
    rows = [["cell", "pass", *names, *(f"x {name}" for name in compared)]]
    for cell in report["cells"]:
        for which, figures in cell["passes"].items():
            row = [cell["name"], which]
            row += [_figure(figures.get(name, {}), metric) for name in names]
            for name in compared:
                ratio = figures.get(name, {}).get("speed_of_ours")
                row.append(f"{ratio['median']:.3f}" if ratio else "")
            rows.append(row)
    return rows


def summary_table(report: dict) -> list[list[str]]:
    rows = [["pass", "ours over", "headdim", "cells", "geometric mean", "min", "min cell"]]
    for row in report["summary"]:
        headdim = "all" if row["headdim"] is None else str(row["headdim"])
        mean, least = f"{row['geometric_mean']:.3f}", f"{row['min']:.3f}"
        cells = str(row["cells"])
        rows.append([row["pass"], row["peer"], headdim, cells, mean, least, row["min_cell"]])
    return rows


def render(rows: list[list[str]], markdown: bool = False) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    edge, gap = ("| ", " | ") if markdown else ("", "  ")
    lines = [
        f"{edge}{gap.join(f'{text:<{width}}' for text, width in zip(row, widths, strict=True))}"
        for row in rows
    ]
    if markdown:
        lines = [f"{line} |" for line in lines]
        lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(line.rstrip() for line in lines)


def skipped(report: dict) -> list[str]:
    """Why a peer has no figure, each reason once."""
    reasons = {}
    for cell in report["cells"]:
        for which, figures in cell["passes"].items():
            for name, figure in figures.items():
                if "skipped" in figure:
                    key = f"{name} {which}: {figure['skipped']}"
                    reasons[key] = reasons.get(key, 0) + 1
    return [f"{reason} ({count} cells)" for reason, count in reasons.items()]


def as_text(report: dict, markdown: bool = False) -> str:
    facts = report["machine"]
    machine = facts.get("gpu", f"{facts['cpu']}, {facts['threads']} threads")
    head = "; ".join(
        (
            f"{report['preset']}: {UNITS[report['metric']]}",
            machine,
            f"torch {report['versions']['torch']}",
            f"commit {report['commit']}",
            report["date"],
        )
    )
    parts = [head, render(table(report), markdown)]
    if report["summary"]:
        parts.append(render(summary_table(report), markdown))
    return "\n\n".join(parts + skipped(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    for path in arguments.files:
        print(as_text(json.loads(path.read_text()), arguments.markdown), end="\n\n")


if __name__ == "__main__":
    main()
