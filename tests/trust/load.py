"""``python -m tests.trust.load [--count 8] [--layers 4] [--runs 3] [--workdir DIR]``.

Conversions of one source to different targets, one after another and then all at once: the time of both, and whether
the bytes are the same. With 4 layers the source has 1 GB and 8 outputs need 8 GB of disk twice.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmark.measure import remove

ROOT = Path(__file__).resolve().parents[2]
ROWS = (
    "hf-to-scratch",
    "hf-to-meta --model-parallel 2",
    "hf-to-gguf --type q8_0",
    "hf-to-scratch --format pth",
    "hf-to-scratch --dtype float16 --clamp",
    "hf-to-gguf --type f16 --clamp",
    "hf-to-meta --model-parallel 8",
    "hf-to-gguf",
)


def start(source: Path, folder: Path, words: str) -> subprocess.Popen[bytes]:
    """Begin one conversion."""
    command, *options = words.split()
    folder.mkdir(parents=True)
    out = folder / ("out.gguf" if "gguf" in command else "out")
    options += ["--no-tokenizer", "--verify", "never", "--quiet"]
    return subprocess.Popen([sys.executable, "-m", "convert", command, str(source), str(out), *options], cwd=ROOT)


def finish(child: subprocess.Popen[bytes], words: str) -> None:
    """Wait for it."""
    if child.wait():
        raise SystemExit(f"{words}: exit code {child.returncode}")


def digest(folder: Path) -> dict[str, str]:
    """SHA-256 of every file, by relative name."""
    out = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            out[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return out


def once(source: Path, folder: Path, count: int, *, together: bool) -> tuple[float, float, dict[str, str]]:
    """Wall seconds and processor seconds of all conversions, and the hashes of what they made."""
    remove(folder) if folder.exists() else None
    os.sync()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    rows = [(f"{number}", ROWS[number % len(ROWS)]) for number in range(count)]
    if together:
        children = [(start(source, folder / name, words), words) for name, words in rows]
        for child, words in children:
            finish(child, words)
    else:
        for name, words in rows:
            finish(start(source, folder / name, words), words)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = digest(folder)
    remove(folder)
    return seconds, after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime, found


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workdir", type=Path)
    args = parser.parse_args()
    folder = Path(args.workdir or tempfile.mkdtemp(prefix="load-"))
    source = folder / "source"
    if not source.exists():
        words = ["-m", "tests.benchmark.checkpoint", "hf", str(source), str(args.layers)]
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    ratios = []
    for number in range(args.runs):
        alone, cpu, wanted = once(source, folder / "out", args.count, together=False)
        together, more, found = once(source, folder / "out", args.count, together=True)
        assert found == wanted, sorted(k for k in wanted if found.get(k) != wanted[k])
        ratios.append(together / alone)
        print(
            f"run {number + 1}: one after another {alone:.1f} s ({cpu:.1f} s of processor), {args.count} at once "
            f"{together:.1f} s ({more:.1f} s): {ratios[-1]:.2f} ×; {len(found)} files, identical bytes",
            flush=True,
        )
    print(f"median: {statistics.median(ratios):.2f} × (at most 1.1)")
    remove(folder)


if __name__ == "__main__":
    main()
