"""Compiles the sources of an extension side by side, and only those that changed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

GIB_PER_JOB = 2


def job_count() -> int:
    """MAX_JOBS; by default a compiler for each core, as far as the free memory goes."""
    if "MAX_JOBS" in os.environ:
        return max(1, int(os.environ["MAX_JOBS"]))
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return max(1, min(len(os.sched_getaffinity(0)), int(available[1]) // (GIB_PER_JOB << 20)))


def compile_objects(sources: list[str], folder: Path, compilers: dict[str, list[str]]) -> list[str]:
    """The object files of `sources`, in `folder`; `compilers` has a command for each suffix."""
    with ThreadPoolExecutor(job_count()) as pool:
        jobs = []
        for source in sources:
            target = folder / Path(source).with_suffix(".o")
            command = [*compilers[Path(source).suffix], "-MD", "-MF", str(target.with_suffix(".d"))]
            jobs.append(pool.submit(_compile, [*command, "-c", source, "-o", str(target)], target))
        try:
            return [job.result() for job in jobs]
        except subprocess.CalledProcessError as error:
            pool.shutdown(cancel_futures=True)
            raise SystemExit(f"flashattn: this failed: {shlex.join(error.cmd)}") from None


def _compile(command: list[str], target: Path) -> str:
    record = target.with_suffix(".cmd")
    if not _is_current(command, target, record):
        target.parent.mkdir(parents=True, exist_ok=True)
        print(shlex.join(command), flush=True)
        subprocess.run(command, check=True)
        record.write_text(shlex.join(command))
    return str(target)


def _is_current(command: list[str], target: Path, record: Path) -> bool:
    """Whether this command made `target`, from files that have not changed since."""
    try:
        inputs = target.with_suffix(".d").read_text().replace("\\\n", " ").split()[1:]
        newest = max(os.stat(path).st_mtime for path in inputs)
        return record.read_text() == shlex.join(command) and newest <= target.stat().st_mtime
    except OSError:  # not built before, or a header is gone
        return False
