"""Runs a command and says how long it took and how much memory it held; and ``cp`` beside it, for comparison.

This process imports nothing large and holds no large buffer: a child's peak, as the kernel counts it, starts with
its parent's.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a command: wall and processor time in seconds, peak memory in MiB, exit code and what it printed."""

    seconds: float
    cpu: float
    peak: float
    code: int
    output: str


def run(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Run:
    """Run a command to its end; its output goes to ``log``.

    Dirty pages of what ran before are written first, so that nobody pays for a neighbour.
    """
    os.sync()
    environment = {**os.environ, **(env or {})}
    with open(log, "wb") as out:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    peak = usage.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
    return Run(seconds, usage.ru_utime + usage.ru_stime, peak, process.returncode, log.read_text(errors="replace"))


def size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@dataclass(slots=True)
class Ballast:
    """A file of a wanted size for ``cp``, kept between rows as long as the size stays nearly the same."""

    folder: Path
    path: Path | None = field(default=None)

    def of(self, nbytes: int, source: Path) -> Path:
        """A file of ``nbytes``, filled from ``source`` again and again."""
        if self.path is not None and abs(self.path.stat().st_size - nbytes) < nbytes // 1000:
            return self.path
        self.drop()
        self.path = self.folder / "ballast"
        with open(self.path, "wb") as out:
            while out.tell() < nbytes:
                with open(source, "rb") as data:
                    while out.tell() < nbytes and (block := data.read(min(1 << 20, nbytes - out.tell()))):
                        out.write(block)
        return self.path

    def drop(self) -> None:
        """Free the disk."""
        if self.path is not None:
            remove(self.path)
            self.path = None


def copy(source: Path, target: Path, log: Path) -> float:
    """Seconds of ``cp`` and ``sync`` of the copy."""
    remove(target)
    done = run(["sh", "-c", 'cp "$1" "$2" && sync "$2"', "sh", str(source), str(target)], log)
    remove(target)
    if done.code:
        raise RuntimeError(f"cp failed: {done.output}")
    return done.seconds


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)
