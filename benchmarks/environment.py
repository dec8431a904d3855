"""What a figure depends on and a reader has to know: machine, clocks, versions, commit, date."""

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch

import flashattn

ROOT = Path(__file__).resolve().parent.parent
CLOCK_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def machine(device: str) -> dict:
    facts = {"cpu": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties()
        facts |= {
            "gpu": properties.name,
            "sm_count": properties.multi_processor_count,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "driver": _output_of(
                "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
            ),
        }
    return facts


def clocks(device: str) -> dict | None:
    """Clocks, power and temperature at this moment, with their units, as nvidia-smi tells them."""
    if device != "cuda":
        return None
    line = _output_of(
        "nvidia-smi", f"--query-gpu={','.join(CLOCK_FIELDS)}", "--format=csv,noheader"
    )
    if line is None:
        return None
    return dict(zip(CLOCK_FIELDS, line.splitlines()[0].split(", "), strict=True))


def versions() -> dict:
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {
        "flashattn": flashattn.__version__,
        "build": str(flashattn.build_info()),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit measured; FLASHATTN_COMMIT names it where the sources came without their git."""
    named = os.environ.get("FLASHATTN_COMMIT")
    if named:
        return named
    revision = _output_of("git", "rev-parse", "--short=12", "HEAD") or "unknown"
    return revision + ("+changes" if _output_of("git", "status", "--porcelain", "-uno") else "")


def date() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
