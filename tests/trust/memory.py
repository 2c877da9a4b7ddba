"""``python -m tests.trust.memory [--limit 400] [--by auto|cgroup|data] [--only NAME] [--workdir DIR]``.

Every conversion that runs no model, on a source of 2.5 GB, in a control group with a memory limit (where none can be
made, under RLIMIT_DATA, which counts the memory that a process asks for). Prints peak memory and time. Needs 9 GB of
disk, which it empties at the end.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmark.measure import remove
from tests.benchmark.sources import Sources

ROOT = Path(__file__).resolve().parents[2]
GROUPS = Path("/sys/fs/cgroup")
#: Source, then the words of the command; ``scratch`` and ``split`` are made on the way.
ROWS = (
    ("hf", "hf-to-scratch"),
    ("hf", "hf-to-scratch --format pth"),
    ("hf", "hf-to-scratch --format dcp"),
    ("hf", "hf-to-scratch --dtype float16 --clamp"),
    ("hf", "hf-to-scratch --dtype float32"),
    ("hf", "hf-to-scratch --check full --hash"),
    ("hf", "hf-to-meta --model-parallel 8"),
    ("hf", "hf-to-meta"),
    ("meta", "meta-to-hf --max-shard-size 500MB"),
    ("meta", "meta-to-scratch"),
    ("scratch", "scratch-to-hf"),
    ("scratch", "scratch-to-meta --model-parallel 2"),
    ("hf", "hf-to-gguf"),
    ("hf", "hf-to-gguf --type q8_0"),
    ("hf", "hf-to-gguf --type q4_k_m --split-max-size 300MB"),
    ("scratch", "scratch-to-gguf --type f16"),
    ("meta", "meta-to-gguf --type q8_0"),
    ("gguf", "gguf-to-hf"),
    ("gguf", "gguf-to-scratch --dtype float32"),
    ("gguf", "gguf-to-meta"),
    ("gguf", "gguf-to-gguf --type f16"),
)


@dataclass(frozen=True, slots=True)
class Limited:
    """What a limited run took: exit code, seconds, peak MiB of the process, and what it said."""

    code: int
    seconds: float
    peak: float
    said: str


def make_group(mib: int) -> Path | None:
    """A control group with the limit below our own, or None where we may not make one (version 2, then 1)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            parent, limit = GROUPS / path.lstrip("/"), "memory.max"
        elif "memory" in controllers.split(","):
            parent, limit = GROUPS / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
        else:
            continue
        group = parent / f"convert-trust-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(mib << 20))
            return group
        except OSError:
            if group.is_dir():
                group.rmdir()
    return None


def run_limited(command: Sequence[str], mib: int, group: Path | None) -> Limited:
    """Run a command in the group, or under RLIMIT_DATA."""

    def limit() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (mib << 20, mib << 20))

    started = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, preexec_fn=limit)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        said = log.read().decode(errors="replace").strip()
    return Limited(child.returncode, time.perf_counter() - started, usage.ru_maxrss / 1024, said)


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=400, help="MiB")
    parser.add_argument("--by", choices=["auto", "cgroup", "data"], default="auto")
    parser.add_argument("--only", default="", help="only conversions with this in their command")
    parser.add_argument("--workdir", type=Path)
    args = parser.parse_args()
    folder = Path(args.workdir or tempfile.mkdtemp(prefix="memory-"))
    folder.mkdir(parents=True, exist_ok=True)
    group = None if args.by == "data" else make_group(args.limit)
    if group is None and args.by == "cgroup":
        raise SystemExit("no control group can be made here")
    print(f"limit: {args.limit} MiB by {'a control group' if group else 'RLIMIT_DATA'}", flush=True)
    sources = Sources(folder)
    failed = 0
    try:
        for name, words in ROWS:
            if args.only not in words:
                continue
            source = _scratch(sources, folder) if name == "scratch" else sources.get(name)
            out = folder / ("out.gguf" if "-to-gguf" in words else "out")
            command, *options = words.split()
            options += ["--no-tokenizer", "--verify", "never", "--quiet"]
            line = [sys.executable, "-m", "convert", command, str(source), str(out), *options]
            done = run_limited(line, args.limit, group)
            made = [p for p in folder.iterdir() if p.name.startswith("out")]
            size = sum(f.stat().st_size for p in made for f in (p.rglob("*") if p.is_dir() else [p]) if f.is_file())
            ok = done.code == 0 and size > 1 << 28
            failed += not ok
            verdict = "finished" if ok else f"exit code {done.code}: {done.said[-300:]}"
            print(
                f"{words}: peak {done.peak:.0f} MiB, {size / 1e9:.2f} GB in {done.seconds:.0f} s: {verdict}", flush=True
            )
            for path in made:
                remove(path)
    finally:
        if group is not None:
            group.rmdir()
    print(f"{len([w for _, w in ROWS if args.only in w]) - failed} finished, {failed} did not")
    if args.workdir is None:
        shutil.rmtree(folder)


def _scratch(sources: Sources, folder: Path) -> Path:
    path = folder / "source-scratch"
    if not path.exists():
        words = ["hf-to-scratch", str(sources.get("hf")), str(path), "--format", "pth", "--no-tokenizer", "--quiet"]
        subprocess.run([sys.executable, "-m", "convert", *words, "--verify", "never"], cwd=ROOT, check=True)
    return path


if __name__ == "__main__":
    main()
