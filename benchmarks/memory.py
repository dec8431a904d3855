"""Peak memory of one call beyond its inputs, which shows whether it is linear in seqlen."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import torch

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): the peak resident set starts again from the present one


def _resident_bytes(which: str) -> int:
    return int(re.search(rf"{which}:\s+(\d+) kB", STATUS.read_text()).group(1)) * 1024


def peak_extra_bytes(run: Callable[[], object], device: str) -> int:
    """Runs once. CUDA: torch's allocations. CPU: the resident set, so allocators count too."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that malloc keeps would hide a new peak
    CLEAR_REFS.write_text(RESET_PEAK)
    before = _resident_bytes("VmRSS")
    run()
    return _resident_bytes("VmHWM") - before
