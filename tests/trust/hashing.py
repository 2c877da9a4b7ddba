"""``python -m tests.trust.hashing [--mib 1500] [--runs 3] [--workdir DIR]``.

What hashing costs in ``convert validate --hash``, beside hashlib and ``sha256sum`` on one file of random bytes: the
command with ``--hash`` minus the command without, so that what validating itself takes is not counted. Prints medians
of processor and wall seconds, their ratio to hashlib's, and peak memory (of a child never less than this script's own
36 MiB: Linux counts from the fork on). Needs 1.6 GB of disk, which it empties.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmark.checkpoint import CONFIG, DIM, hf_shapes
from tests.benchmark.measure import remove

ROOT = Path(__file__).resolve().parents[2]
HASHLIB = "import hashlib, sys; print(hashlib.file_digest(open(sys.argv[1], 'rb'), 'sha256').hexdigest())"
_BLOCK = 8 << 20


@dataclass(frozen=True, slots=True)
class Took:
    """One child: processor and wall seconds, peak MiB, and what it said."""

    cpu: float
    wall: float
    peak: float
    said: str


def make(folder: Path, mib: int) -> Path:
    """A sound checkpoint of about so many MiB whose weights are random bytes; its one weight file."""
    folder.mkdir(parents=True)
    shapes = {n: s for n, s in hf_shapes(1).items() if n != "model.embed_tokens.weight"}
    rows = ((mib << 20) - sum(2 * s[0] * (s[1] if len(s) > 1 else 1) for s in shapes.values())) // (2 * DIM)
    if rows < 1:
        raise SystemExit("--mib: at least 150")
    shapes = {"model.embed_tokens.weight": (rows, DIM), **shapes}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": rows, "num_hidden_layers": 1}))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        end = at + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        while at:
            out.write(os.urandom(min(at, _BLOCK)))
            at -= min(at, _BLOCK)
        out.flush()
        os.fsync(out.fileno())
    return path


def once(command: Sequence[str]) -> Took:
    """Run a command to its end, and count what it alone took."""
    started = time.perf_counter()
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {child.returncode}\n{said}")
    scale = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return Took(used.ru_utime + used.ru_stime, seconds, used.ru_maxrss / scale, said)


def medians(found: Sequence[Took]) -> tuple[float, float]:
    """Of processor and of wall seconds."""
    return statistics.median(t.cpu for t in found), statistics.median(t.wall for t in found)


def measure(path: Path, runs: int) -> float:
    """Print what each way takes; the ratio of our processor seconds to hashlib's."""
    validate = [sys.executable, "-m", "convert", "validate", str(path.parent)]
    commands = {
        "convert validate": validate,
        "convert validate --hash": [*validate, "--hash"],
        "hashlib.file_digest": [sys.executable, "-c", HASHLIB, str(path)],
        "python that does nothing": [sys.executable, "-c", ""],
    }
    if shutil.which("sha256sum"):
        commands["sha256sum"] = ["sha256sum", str(path)]
    once([sys.executable, "-c", HASHLIB, str(path)])  # so that all find the file in memory
    found: dict[str, list[Took]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            found[name].append(once(command))
    digest = found["hashlib.file_digest"][0].said.strip()
    for name in ("convert validate --hash", "sha256sum"):
        assert all(digest in took.said for took in found.get(name, [])), f"{name} has another hash"
    print(f"{path.stat().st_size:,} bytes, medians of {runs} runs:")
    for name, took in found.items():
        cpu, wall = medians(took)
        peak = max(t.peak for t in took)
        print(f"  {name:<26}{cpu:7.2f} s of processor {wall:7.2f} s wall {peak:7.0f} MiB peak")
    plain, hashed = medians(found["convert validate"]), medians(found["convert validate --hash"])
    empty, theirs = medians(found["python that does nothing"]), medians(found["hashlib.file_digest"])
    ratios = [(hashed[i] - plain[i]) / (theirs[i] - empty[i]) for i in (0, 1)]
    more = max(t.peak for t in found["convert validate --hash"]) - max(t.peak for t in found["convert validate"])
    print(
        f"--hash takes {hashed[0] - plain[0]:.2f} s of processor, {hashed[1] - plain[1]:.2f} s wall, {more:+.0f} MiB: "
        f"{ratios[0]:.2f} × hashlib's processor time, {ratios[1]:.2f} × its wall time"
    )
    return ratios[0]


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1500)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workdir", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hashing-", dir=args.workdir))
    try:
        measure(make(folder / "source", args.mib), args.runs)
    finally:
        remove(folder)


if __name__ == "__main__":
    main()
