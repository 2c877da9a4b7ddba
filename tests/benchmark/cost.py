"""``python -m tests.benchmark.cost [--check WORK] [--readme] [--workdir DIR]``: what Llama 3.1 405B costs.

The plans are those of ``--dry-run --json`` for a checkpoint of 405B in 191 files with true headers and no data. Time is
``max((read + written) / disk, processor / (2 × ranks))``: ``disk`` is what the storage gives all ranks together, reads
and writes counted together, and every rank has two threads on two cores. ``--check`` converts a 64th of the model (as
many tensors and files, every width an eighth, random values) and says what was foretold and what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmark.holes import make
from tests.benchmark.measure import remove, run, size
from tests.benchmark.table import into_readme

ROOT = Path(__file__).resolve().parents[2]
MARKS = ("<!-- cost: begin (written by python -m tests.benchmark.cost --readme) -->", "<!-- cost: end -->")
DISKS, RANKS = (0.5, 2.0, 7.0), (1, 2, 4, 8)
FILES = 191


@dataclass(frozen=True, slots=True)
class Work:
    """One conversion of a Hugging Face folder.

    Attributes:
        arguments: The command line after ``convert``.
        rate: Processor seconds of one core per GB read: of ``tests.benchmark`` on the 1B shape, on a machine whose
            ``cp`` with ``sync`` does 1.7 GB/s.
    """

    arguments: str
    rate: float


WORKS = {
    "hf-to-scratch": Work("hf-to-scratch {src} {out}", 0.65),
    "hf-to-meta --model-parallel 8": Work("hf-to-meta {src} {out} --model-parallel 8", 1.5),
    "hf-to-scratch --dtype float16": Work("hf-to-scratch {src} {out} --dtype float16", 1.7),
    "hf-to-gguf --type bf16": Work("hf-to-gguf {src} {out}.gguf --type bf16 --no-tokenizer", 1.0),
    "hf-to-gguf --type q8_0": Work("hf-to-gguf {src} {out}.gguf --type q8_0 --no-tokenizer", 1.8),
    "hf-to-gguf --type q4_k_m": Work("hf-to-gguf {src} {out}.gguf --type q4_k_m --no-tokenizer", 28.0),
}


def plan(work: Work, source: Path, out: Path) -> dict[str, Any]:
    """What a conversion would read, write and hold."""
    words = [w.format(src=source, out=out) for w in work.arguments.split()]
    command = [sys.executable, "-m", "convert", *words, "--dry-run", "--json", "--force"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def seconds(work: Work, said: dict[str, Any], *, disk: float, ranks: int) -> float:
    """The formula above; ``disk`` in GB/s."""
    read, written = said["bytes_read"] / 1e9, said["bytes_written"] / 1e9
    return max((read + written) / disk, work.rate * read / (2 * ranks))


def table(source: Path, out: Path) -> str:
    """The table in Markdown."""
    heads = [f"at {disk:g} GB/s" for disk in DISKS]
    lines = [
        f"| 405B ({FILES} files) | reads, writes | memory of each rank | {' | '.join(heads)} |",
        f"| --- | --- | --- |{' --- |' * len(DISKS)}",
    ]
    for name, work in WORKS.items():
        said = plan(work, source, out)
        cells = []
        for disk in DISKS:
            times = [_time(seconds(work, said, disk=disk, ranks=n)) for n in RANKS]
            cells.append(_together(times))
        bytes_ = f"{said['bytes_read'] / 1e9:.0f}, {said['bytes_written'] / 1e9:.0f} GB"
        lines.append(f"| `{name}` | {bytes_} | {said['peak_memory'] / 2**20:.0f} MiB | {' | '.join(cells)} |")
    return "\n".join(lines)


def _time(value: float) -> str:
    return f"{value / 3600:.1f} h" if value >= 5400 else f"{value / 60:.0f} min"


def _together(times: list[str]) -> str:
    """Times of 1, 2, 4 and 8 ranks; one where more ranks gain nothing."""
    if len(set(times)) == 1:
        return times[0]
    numbers, units = zip(*(t.split() for t in times), strict=True)
    return f"{' / '.join(numbers)} {units[0]}" if len(set(units)) == 1 else " / ".join(times)


def check(names: list[str], folder: Path) -> None:
    """Convert a 64th of 405B, beside ``cp`` of the same files in the same minutes."""
    source, out = folder / "scale", folder / "out"
    remove(source)
    make(source, "LLAMA_405B_64TH", FILES, fill=True)
    print(f"a 64th: {size(source) / 1e9:.2f} GB in {FILES} files", flush=True)
    for name in names:
        work = WORKS[name]
        said = plan(work, source, out)
        copied = run(["sh", "-c", 'cp -r "$1" "$2" && sync', "sh", str(source), str(folder / "copy")], folder / "log")
        remove(folder / "copy")
        words = [w.format(src=source, out=out) for w in work.arguments.split()]
        command = [sys.executable, "-m", "convert", *words, "--quiet", "--verify", "never"]
        done = run(["sh", "-c", '"$@" && sync', "sh", *command], folder / "log")
        if done.code:
            raise SystemExit(done.output)
        at = out if out.is_dir() else out.with_suffix(".gguf")
        beside = Path(f"{at}.conversion.json")
        written = size(at) + (beside.stat().st_size if beside.exists() else 0)
        disk = 2 * said["bytes_read"] / 1e9 / copied.seconds
        foretold = seconds(work, said, disk=disk, ranks=1)
        cpu = work.rate * said["bytes_read"] / 1e9
        print(
            f"{name}: cp {copied.seconds:.1f} s = {disk:.2f} GB/s read and written; foretold {foretold:.1f} s, "
            f"measured {done.seconds:.1f} s; processor {cpu:.1f} and {done.cpu:.1f} s; "
            f"memory {said['peak_memory'] / 2**20:.0f} and {done.peak:.0f} MiB; "
            f"bytes {said['bytes_written']} and {written}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        remove(at)
        beside.unlink(missing_ok=True)
    remove(source)


def main() -> int:
    """Parse the command line; print, write or check."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.cost")
    parser.add_argument("--check", action="append", choices=[*WORKS], help="convert a 64th in this way (repeatable)")
    parser.add_argument("--readme", action="store_true", help="put the table into README.md")
    parser.add_argument("--workdir", type=Path, help="where 26 GB are free, for --check")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.workdir) as name:
        folder = Path(name)
        if options.check:
            check(options.check, folder)
            return 0
        text = table(make(folder / "l405", "LLAMA_405B", FILES), folder / "out")
    print(text)
    if options.readme:
        into_readme(ROOT / "README.md", text, marks=MARKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
