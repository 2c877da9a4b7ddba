"""``python -m tests.benchmark [--only NAME] [--runs 5] [--workdir DIR] [--json FILE] [--readme]``.

Makes a Llama-3.2-1B-shaped checkpoint, runs each row alternately with ``cp``, and prints a table of ratios. Needs
20 GB of disk in the working folder, which it empties at the end, and the package ``llms-from-scratch`` (installed with
``--no-deps``) for the rows that compare with the book.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.benchmark import rows as marks
from tests.benchmark import table
from tests.benchmark.measure import Ballast, Run, copy, median, remove, run, size
from tests.benchmark.rows import (
    DIFF_PEAK,
    DIFF_RATIO,
    LOAD_EXTRA,
    LOAD_PEAK,
    LOAD_SPEEDUP,
    QUICK,
    QUICK_SECONDS,
    ROWS,
    VERIFY_PEAK,
    VERIFY_RATIO,
    Row,
)
from tests.benchmark.sources import Sources

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(__file__).resolve().parent / "peers"
PEER_RUNS = 3
Result = dict[str, Any]


class Bench:
    """The working folder and what is measured in it."""

    def __init__(self, folder: Path, runs: int) -> None:
        self.folder = folder
        self.runs = runs
        self.sources = Sources(folder)
        self.ballast = Ballast(folder)
        self.log = folder / "log"

    def _convert(self, arguments: str, **names: Path) -> list[str]:
        words = [w.format(**names) for w in arguments.split()]
        return [sys.executable, "-m", "convert", *words]

    def row(self, row: Row) -> Result:
        """One conversion against ``cp``, alternated; the first pair is dropped."""
        source = self.sources.get(row.source)
        out = self.folder / row.out
        quiet = " --quiet --verify never"
        command = self._convert(row.arguments + (" --quiet" if row.prepare else quiet), src=source, out=out)
        times, copies, peaks, cpu = [], [], [], []
        for turn in range(min(self.runs, row.runs or self.runs) + 1):
            remove(out)
            if row.prepare:
                run(self._convert(row.prepare + quiet, src=source, out=out), self.log, row.env)
            done = run(command, self.log, row.env)
            if done.code:
                return {"name": row.name, "error": done.output.strip()[-2000:] or f"exit code {done.code}"}
            written = size(out)
            remove(out)
            largest = max(self.sources.bytes(row.source), written)
            copied = copy(self.ballast.of(largest, self.sources.data("hf")), self.folder / "copy", self.log)
            if turn:
                times.append(done.seconds)
                copies.append(copied)
                cpu.append(done.cpu)
            peaks.append(done.peak)
        ours, cp = median(times), median(copies)
        raw = self._raw() if row.raw else None
        result: Result = {
            "name": row.name,
            "seconds": times,
            "cp_seconds": copies,
            "median": ours,
            "cp_median": cp,
            "cpu": median(cpu),
            "ratio": ours / cp,
            "ratio_limit": row.ratio,
            "bytes": largest,
            "peak": max(peaks),
            "peak_limit": row.peak,
            "raw": raw,
            "raw_limit": row.raw,
            "ok": max(peaks) <= row.peak
            and (row.ratio is None or ours <= row.ratio * cp + 0.5)
            and (raw is None or row.raw is None or ours <= row.raw * raw + 0.5),
        }
        if row.peer:
            result["peer"] = self._peer(row.peer, [str(source), str(out)], cp)
            remove(out)
        return result

    def _peer(self, name: str, arguments: list[str], cp: float | None = None) -> Result:
        runs = [run([sys.executable, str(PEERS / f"{name}.py"), *arguments], self.log) for _ in range(PEER_RUNS)]
        if any(r.code for r in runs):
            return {"name": name, "error": runs[-1].output.strip()[-2000:]}
        seconds = median([r.seconds for r in runs])
        return {
            "name": name,
            "median": seconds,
            "peak": max(r.peak for r in runs),
            "ratio": seconds / cp if cp else None,
        }

    def _raw(self) -> float:
        """Seconds that ggml alone needs on all cores, the better of two."""
        return min(float(run([sys.executable, str(PEERS / "raw_ggml.py")], self.log).output) for _ in range(2))

    def load(self) -> Result:
        """Filling the book's class: ours against the book's own loader."""
        source = self.sources.get("hf")
        command = [sys.executable, str(PEERS / "ours.py"), str(source)]
        runs = [run(command, self.log, {"PYTHONPATH": str(ROOT)}) for _ in range(self.runs + 1)]
        if any(r.code for r in runs):
            return {"name": "load_into", "error": runs[-1].output.strip()[-2000:]}
        peer = self._peer("book", [str(source)])
        ours = median([r.seconds for r in runs[1:]])
        peak = max(r.peak for r in runs)
        limit = LOAD_PEAK * self.sources.bytes("hf") / 2**20 + LOAD_EXTRA
        faster = peer["median"] / ours if "median" in peer else None
        return {
            "name": "load_into",
            "median": ours,
            "peak": peak,
            "peak_limit": limit,
            "speedup": faster,
            "speedup_limit": LOAD_SPEEDUP,
            "peer": peer,
            "ok": peak <= limit and faster is not None and faster >= LOAD_SPEEDUP,
        }

    def layerwise(self) -> Result:
        """Verifying HF against Meta layer by layer, alternated with a run of whole models."""
        name = "verify --layerwise"
        command = self._convert(
            "verify {src} {out} --device cpu --quiet", src=self.sources.get("hf"), out=self.sources.get("meta")
        )
        whole: list[Run] = []
        layers: list[Run] = []
        for _ in range(min(self.runs, 2) + 1):
            for runs, how in ((whole, "--whole"), (layers, "--layerwise")):
                runs.append(run([*command, how], self.log))
                if runs[-1].code:
                    return {"name": name, "error": runs[-1].output.strip()[-2000:] or f"exit code {runs[-1].code}"}
        ours, other = median([r.seconds for r in layers[1:]]), median([r.seconds for r in whole[1:]])
        peak = max(r.peak for r in layers)
        return {
            "name": name,
            "median": ours,
            "cpu": median([r.cpu for r in layers[1:]]),
            "ratio": ours / other,
            "ratio_limit": VERIFY_RATIO,
            "peak": peak,
            "peak_limit": VERIFY_PEAK,
            "whole": {"median": other, "peak": max(r.peak for r in whole)},
            "ok": peak <= VERIFY_PEAK and ours <= VERIFY_RATIO * other,
        }

    def diff(self) -> Result:
        """Comparing HF with Meta, alternated with reading both files."""
        name, paths = "diff", [self.sources.data("hf"), self.sources.data("meta")]
        command = self._convert("diff {src} {out} --quiet", src=self.sources.get("hf"), out=self.sources.get("meta"))
        ours: list[Run] = []
        reading: list[Run] = []
        for _ in range(self.runs + 1):
            for runs, words in ((ours, command), (reading, ["sh", "-c", 'cat "$@" | wc -c', "sh", *map(str, paths)])):
                runs.append(run(words, self.log))
                if runs[-1].code:
                    return {"name": name, "error": runs[-1].output.strip()[-2000:] or f"exit code {runs[-1].code}"}
        seconds, read = median([r.seconds for r in ours[1:]]), median([r.seconds for r in reading[1:]])
        peak = max(r.peak for r in ours)
        return {
            "name": name,
            "median": seconds,
            "cpu": median([r.cpu for r in ours[1:]]),
            "bytes": sum(p.stat().st_size for p in paths),
            "read_median": read,
            "ratio": seconds / read,
            "ratio_limit": DIFF_RATIO,
            "peak": peak,
            "peak_limit": DIFF_PEAK,
            "ok": peak <= DIFF_PEAK and seconds <= DIFF_RATIO * read + 0.5,
        }

    def probe(self) -> Result:
        """What the numbers alone tell, against reading the file; alternated, the first pair is dropped."""
        source = self.sources.get("hf")
        command = self._convert(marks.PROBE, src=source)
        times, reads, cpu, peaks = [], [], [], []
        for turn in range(self.runs + 1):
            done = run(command, self.log)
            if done.code != marks.PROBE_CODE:
                return {"name": "diagnose --probe-only", "error": done.output.strip()[-2000:] or f"exit {done.code}"}
            read = run(["sh", "-c", 'cat "$1" > /dev/null', "sh", str(self.sources.data("hf"))], self.log)
            peaks.append(done.peak)
            if turn:
                times.append(done.seconds)
                reads.append(read.seconds)
                cpu.append(done.cpu)
        ours, once = median(times), median(reads)
        return {
            "name": "diagnose --probe-only",
            "median": ours,
            "cpu": median(cpu),
            "read_median": once,
            "ratio": ours / once,
            "ratio_limit": marks.PROBE_RATIO,
            "peak": max(peaks),
            "peak_limit": marks.PROBE_PEAK,
            "ok": max(peaks) <= marks.PROBE_PEAK and ours <= marks.PROBE_RATIO * once + 0.5,
        }

    def quick(self) -> list[Result]:
        """Commands that must answer at once, and never import torch."""
        results = []
        for name, arguments in QUICK.items():
            command = self._convert(arguments, src=self.sources.get("hf"))
            runs = [run(command, self.log) for _ in range(self.runs + 1)]
            if any(r.code for r in runs):
                results.append({"name": name, "error": runs[-1].output.strip()[-2000:]})
                continue
            traced = run([command[0], "-X", "importtime", *command[1:]], self.log).output
            modules = {
                line.rsplit("|", 1)[-1].strip() for line in traced.splitlines() if line.startswith("import time:")
            }
            seconds = median([r.seconds for r in runs[1:]])
            results.append(
                {
                    "name": name,
                    "median": seconds,
                    "limit": QUICK_SECONDS,
                    "peak": max(r.peak for r in runs),
                    "imports_torch": "torch" in modules,
                    "ok": seconds <= QUICK_SECONDS and "torch" not in modules,
                }
            )
        return results

    def deeper(self) -> Result:
        """Peak memory of ``hf-to-scratch`` on the model and on one twice as deep."""
        self.ballast.drop()
        out, peaks = self.folder / "out", {}
        for name in ("hf", "deep"):
            command = self._convert(
                "hf-to-scratch {src} {out} --quiet --verify never", src=self.sources.get(name), out=out
            )
            runs = []
            for _ in range(2):
                remove(out)
                runs.append(run(command, self.log))
            remove(out)
            if any(r.code for r in runs):
                return {"name": "2 × deeper", "error": runs[-1].output.strip()[-2000:]}
            peaks[name] = max(r.peak for r in runs)
        self.sources.drop("deep")
        grown = peaks["deep"] - peaks["hf"]
        return {"name": "2 × deeper", "peak": peaks["hf"], "peak_deep": peaks["deep"], "ok": grown <= 8}


def versions() -> dict[str, str]:
    """What the numbers depend on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    for name in ("ckpt-convert", "numpy", "torch", "safetensors", "libggml-python", "llms-from-scratch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> int:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark")
    parser.add_argument("--only", action="append", help="rows whose name contains this (may be given several times)")
    parser.add_argument("--runs", type=int, default=5, help="pairs that count; one more is run first and dropped")
    parser.add_argument("--workdir", type=Path, default=ROOT / ".benchmark")
    parser.add_argument("--json", type=Path, help="where the numbers go (default: WORKDIR/benchmark.json)")
    parser.add_argument("--readme", action="store_true", help="put the table into README.md")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints for the next run")
    parser.add_argument("--list", action="store_true", help="list the rows")
    options = parser.parse_args()
    special = ["load_into", "verify --layerwise", "diff", "diagnose --probe-only", "quick commands", "2 × deeper"]
    names = [r.name for r in ROWS] + special
    if options.list:
        print("\n".join(names))
        return 0
    wanted = [n for n in names if not options.only or any(o in n for o in options.only)]
    if not wanted:
        parser.error(f"no row contains {options.only}; --list shows them")
    options.workdir.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(options.workdir).free < 20e9:
        parser.error(f"{options.workdir} has less than 20 GB free; name another folder with --workdir")
    bench = Bench(options.workdir.resolve(), options.runs)
    results: dict[str, Any] = {"schema": 1, "runs": options.runs, "versions": versions(), "rows": [], "quick": []}
    try:
        for row in ROWS:
            if row.name in wanted:
                results["rows"].append(report(bench.row(row)))
        if "load_into" in wanted:
            results["load"] = report(bench.load())
        if "verify --layerwise" in wanted:
            results["layerwise"] = report(bench.layerwise())
        if "diff" in wanted:
            results["diff"] = report(bench.diff())
        if "diagnose --probe-only" in wanted:
            results["probe"] = report(bench.probe())
        if "quick commands" in wanted:
            results["quick"] = [report(r) for r in bench.quick()]
        if "2 × deeper" in wanted:
            results["deeper"] = report(bench.deeper())
    finally:
        for name in ("out", "out.gguf", "copy"):
            remove(bench.folder / name)
        bench.ballast.drop()
        if not options.keep:
            bench.sources.drop_all()
    target = options.json or options.workdir / "benchmark.json"
    target.write_text(json.dumps(results, indent=2, ensure_ascii=False))
    text = table.markdown(results)
    print("\n" + text)
    if options.readme:
        table.into_readme(ROOT / "README.md", text)
    return 0 if table.all_good(results) else 1


def report(result: Result) -> Result:
    """Say on stderr how one row went."""
    if "error" in result:
        word = "ERROR " + result["error"].splitlines()[-1]
    else:
        word = "ok" if result["ok"] else "MISSED"
        for key in ("median", "cpu", "cp_median", "read_median", "ratio", "peak", "peak_deep", "speedup"):
            if result.get(key) is not None:
                word += f"  {key} {result[key]:.2f}"
    print(f"{result['name']}: {word}", file=sys.stderr, flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
