"""Interleaved timing: every candidate is measured in every round, so that clocks, heat and the
power limit, which move during a run, weigh on all alike."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

ROUND_SECONDS = 0.010  # GPU time that a candidate gets in a round; a slow one runs once
MAX_SAMPLES = 20  # a candidate and round
MIN_ROUNDS = 3


@dataclass
class Candidate:
    """Something to time. `context` is entered around a round, outside of the timed calls."""

    name: str
    run: Callable[[], object]
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


@dataclass
class Timing:
    """Seconds a call: one figure a round, the median of the round's samples."""

    rounds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def summary(self, flops: float | None = None) -> dict:
        low, middle, high = quartiles(self.rounds)
        figures = {
            "us": _round(middle * 1e6),
            "us_quartiles": [_round(low * 1e6), _round(high * 1e6)],
            "rounds": len(self.rounds),
        }
        if flops is not None:
            figures["tflops"] = _round(flops / middle / 1e12)
        return figures


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def speed_ratio(ours: Timing, peer: Timing) -> dict:
    """How many times as fast as the peer, taken round by round: both halves share their clocks."""
    low, middle, high = quartiles([b / a for a, b in zip(ours.rounds, peer.rounds, strict=True)])
    return {"median": _round(middle), "quartiles": [_round(low), _round(high)]}


def _round(value: float) -> float:
    return float(f"{value:.5g}")


class CudaClock:
    """Times GPU work with events, each sample behind a flush of the L2 cache. The flush also gives
    the host the time to enqueue the call, so launch latency isn't measured in its place."""

    def __init__(self) -> None:
        l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        self._flush = torch.empty(max(4 * l2_bytes, 2**28), dtype=torch.int8, device="cuda")

    def samples(self, run: Callable[[], object], count: int) -> list[float]:
        marks = []
        for _ in range(count):
            self._flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in marks]


class CpuClock:
    def samples(self, run: Callable[[], object], count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return seconds


def measure(
    candidates: Sequence[Candidate],
    clock: CudaClock | CpuClock,
    max_rounds: int,
    deadline: float = math.inf,
) -> dict[str, Timing]:
    """Rounds over all candidates: `max_rounds`, or until perf_counter's deadline, at least 3."""
    counts = {}
    for candidate in candidates:
        with candidate.context():
            estimate = min(clock.samples(candidate.run, 2))
        counts[candidate.name] = max(1, min(MAX_SAMPLES, round(ROUND_SECONDS / estimate)))

    timings = {candidate.name: Timing() for candidate in candidates}
    for number in range(max_rounds):
        if number >= MIN_ROUNDS and time.perf_counter() > deadline:
            break
        first = number % len(candidates)  # nobody always follows the same neighbour's heat
        for candidate in (*candidates[first:], *candidates[:first]):
            count = counts[candidate.name]
            with candidate.context():
                if count > 1:
                    candidate.run()
                samples = clock.samples(candidate.run, count)
            timings[candidate.name].rounds.append(statistics.median(samples))
    return timings


def measure_host(candidates: Sequence[Candidate], calls: int, rounds: int) -> dict[str, Timing]:
    """Host time of one call: the time that Python takes to return from it, with nothing awaited."""
    timings = {candidate.name: Timing() for candidate in candidates}
    cuda = torch.cuda.is_available()
    for number in range(rounds + 1):
        for candidate in candidates:
            with candidate.context():
                if cuda:
                    torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    candidate.run()
                elapsed = time.perf_counter() - start
            if number > 0:  # the first round warms up
                timings[candidate.name].rounds.append(elapsed / calls)
    return timings
