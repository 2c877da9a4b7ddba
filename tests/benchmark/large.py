"""``python -m tests.benchmark.large [--runs 3]``: how long looks and plans of the largest checkpoints take.

The checkpoints have true headers and no data (:mod:`tests.fixtures.sparse`); every command is run several times, and
the fastest run counts, since the machine may do other things meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.benchmark.holes import make
from tests.benchmark.measure import run


@dataclass(frozen=True, slots=True)
class Shape:
    """A checkpoint (config of :mod:`tests.fixtures.sparse`), and what each command may take: seconds and MiB."""

    config: str
    files: int
    seconds: float
    peak: float
    meta: bool = False


SHAPES = {
    "405B, 1,137 tensors in 191 files": Shape("LLAMA_405B", 191, 5, 400, meta=True),
    "Qwen3-235B-A22B, 36,945 tensors in 118 files": Shape("QWEN3_235B", 118, 10, 400),
    "120,003 tensors in 64 files": Shape("MANY_TENSORS", 64, 25, 700),
}
PLAN = "--dry-run --force --quiet"
COMMANDS = {
    "inspect": "inspect {src}",
    "validate": "validate {src}",
    "to scratch": f"to scratch {{src}} {{out}} {PLAN}",
    "to meta": f"to meta {{src}} {{out}} --model-parallel 8 {PLAN}",
    "to hf, float16": f"to hf {{src}} {{out}} --dtype float16 {PLAN}",
    "to gguf, q8_0": f"to gguf {{src}} {{out}}.gguf --type q8_0 --no-tokenizer {PLAN}",
    "to gguf, q4_k_m": f"to gguf {{src}} {{out}}.gguf --type q4_k_m --no-tokenizer {PLAN}",
}


def main() -> int:
    """Measure, print, and say by the exit code whether every mark was reached."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.large")
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (title, shape) in enumerate(SHAPES.items()):
            source = make(folder / str(number), shape.config, shape.files)
            print(f"{title}: at most {shape.seconds:g} s and {shape.peak:g} MiB")
            for command, arguments in COMMANDS.items():
                if command == "to meta" and not shape.meta:
                    continue
                words = [w.format(src=source, out=folder / "out") for w in arguments.split()]
                done = [run([sys.executable, "-m", "convert", *words], folder / "log") for _ in range(runs)]
                best = min(done, key=lambda r: r.seconds)
                peak = max(r.peak for r in done)
                ok = not any(r.code for r in done) and best.seconds <= shape.seconds and peak <= shape.peak
                good = good and ok
                print(
                    f"  {command:16} {best.seconds:6.2f} s, processor {best.cpu:5.2f} s, {peak:4.0f} MiB"
                    f"{'' if ok else '  MISSED ' + done[-1].output[-300:]}",
                    flush=True,
                )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
