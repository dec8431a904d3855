"""Measures flashattn beside other attentions, in one process and interleaved round by round.

python benchmarks/run.py --preset h200 --peers fa2,cudnn --budget 150 --json results/h200.json
python benchmarks/run.py --preset cpu --filter causal-s2048
"""

import argparse
import gc
import json
import math
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

import environment
import report
import torch
from memory import peak_extra_bytes
from peers import (
    DEFAULT_PEERS,
    OURS,
    PEERS,
    Contender,
    Inputs,
    Unsupported,
    largest_difference,
    make_contender,
)
from shapes import PRESETS, Cell
from timing import CpuClock, CudaClock, Timing, measure, measure_host, speed_ratio
from tqdm import tqdm

METHODS = {
    "speed": "CUDA events behind a flush of L2 (CPU: wall clock); in a round each attention gets "
    "about 10 ms, in turn; medians and quartiles over rounds; ratios are taken within a round",
    "host": "wall clock of calls that nothing waits for; medians and quartiles over rounds",
    "memory": "peak of one call beyond its inputs, results included (CUDA: torch's allocator, CPU: "
    "resident set)",
}
DISAGREEMENT = 0.05  # of the largest value: far above rounding in bf16, far below a wrong kernel
HOST_CALLS, HOST_ROUNDS = 200, 15


def enter(
    cell: Cell, names: Iterable[str], which: str, device: str
) -> tuple[dict[str, Contender], dict[str, dict]]:
    """The contenders, each having run once, and for each peer either how far its results are from
    ours or why it is left out."""
    inputs = Inputs(cell, device)
    contenders, notes, ours = {}, {}, []
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of each backend that it rules out
                contender = make_contender(name, inputs, which)
                got = contender.results()
        except (Unsupported, RuntimeError) as error:
            if name == OURS:
                raise
            notes[name] = {"skipped": str(error).strip().splitlines()[0]}
            continue
        contenders[name] = contender
        if name == OURS:
            ours = got
        else:
            notes[name] = {"difference": float(f"{largest_difference(ours, got):.3g}")}
    return contenders, notes


def figures_of(timings: dict[str, Timing], notes: dict[str, dict], flops: float | None) -> dict:
    figures = {name: timing.summary(flops) for name, timing in timings.items()}
    for name, note in notes.items():
        figures[name] = figures.get(name, {}) | note
        if name in timings:
            figures[name]["speed_of_ours"] = speed_ratio(timings[OURS], timings[name])
    return figures


def measure_speed(cell, names, which, options, deadline) -> dict:
    contenders, notes = enter(cell, names, which, options.device)
    clock = CudaClock() if options.device == "cuda" else CpuClock()
    timings = measure(list(contenders.values()), clock, options.rounds, deadline)
    return figures_of(timings, notes, cell.flops(which))


def measure_host_time(cell, names, which, options, _deadline) -> dict:
    contenders, notes = enter(cell, names, which, options.device)
    timings = measure_host(list(contenders.values()), HOST_CALLS, HOST_ROUNDS)
    return figures_of(timings, notes, flops=None)


def measure_memory(cell, names, which, options, _deadline) -> dict:
    figures = {}
    short = Cell(1, 128, cell.heads, cell.headdim, cell.causal, dtype=cell.dtype)
    for name in names:
        # The short one warms up, so that threads and libraries aren't counted.
        able, notes = enter(short, (OURS, name), which, options.device)
        if name not in able:
            figures[name] = notes[name]
            continue
        try:
            contender = make_contender(name, Inputs(cell, options.device), which)
        except Unsupported as reason:
            figures[name] = {"skipped": str(reason)}
            continue
        gc.collect()
        with contender.context():
            peak = peak_extra_bytes(contender.run, options.device)
        figures[name] = {"peak_mib": round(peak / 2**20, 2)}
    return figures


MEASURES = {"speed": measure_speed, "host": measure_host_time, "memory": measure_memory}


def run_cells(options: argparse.Namespace) -> list[dict]:
    preset = PRESETS[options.preset]
    cells = [cell for cell in preset.cells if options.filter in cell.name]
    if not cells:
        sys.exit(f"no cell of {options.preset} has {options.filter!r} in its name")
    names = (OURS, *options.peers)
    finish = time.perf_counter() + (options.budget or math.inf)
    jobs = [(cell, which) for cell in cells for which in options.passes]
    entries = {cell: cell.as_dict() | {"passes": {}} for cell in cells}
    with tqdm(jobs, unit="job", dynamic_ncols=True, disable=None) as bar:
        for number, (cell, which) in enumerate(bar):
            bar.set_description(f"{cell.name} {which}")
            now = time.perf_counter()  # what is left of the budget is shared evenly
            deadline = now + (finish - now) / (len(jobs) - number)
            figures = MEASURES[preset.measures](cell, names, which, options, deadline)
            entries[cell]["passes"][which] = figures
    return list(entries.values())


def measure_preset(options: argparse.Namespace) -> dict:
    preset = PRESETS[options.preset]
    clocks_before = environment.clocks(options.device)
    cells = run_cells(options)
    return {
        "preset": options.preset,
        "about": preset.about,
        "metric": preset.metric,
        "method": METHODS[preset.measures],
        "date": environment.date(),
        "commit": environment.commit(),
        "machine": environment.machine(options.device),
        "versions": environment.versions(),
        "clocks": {"before": clocks_before, "after": environment.clocks(options.device)},
        "cells": cells,
    }


def disagreements(result: dict) -> list[str]:
    return [
        f"{cell['name']} {which}: {figure['difference']} of the largest value from {name}"
        for cell in result["cells"]
        for which, figures in cell["passes"].items()
        for name, figure in figures.items()
        if not figure.get("difference", 0.0) <= DISAGREEMENT  # catches NaN too
    ]


def parse_arguments() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    about = "\n".join(f"  {name:<12}{preset.about}" for name, preset in PRESETS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\npresets:\n{about}\n\npeers: {', '.join(PEERS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="h200", metavar="NAME")
    parser.add_argument("--peers", type=names, help="comma-separated; default by device")
    parser.add_argument("--passes", type=names, help="of fwd, bwd, fwdbwd; default by preset")
    parser.add_argument("--filter", default="", help="only cells with this text in their name")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default by preset")
    parser.add_argument("--budget", type=float, help="seconds for everything, shared by the cells")
    parser.add_argument("--rounds", type=int, default=20, help="at most, for each cell and pass")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    preset = PRESETS[options.preset]
    options.device = options.device or preset.device
    options.passes = options.passes or preset.passes
    options.peers = options.peers or DEFAULT_PEERS[options.device]
    unknown = set(options.peers) - (set(PEERS) - {OURS})
    if unknown:
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"preset {options.preset} needs a GPU (--device cpu runs it on the CPU)")
    return options


def main() -> None:
    options = parse_arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    result = measure_preset(options)
    result["summary"] = report.summarize(result)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report.as_text(result))
    wrong = disagreements(result)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
