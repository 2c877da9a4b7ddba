"""The largest checkpoints for measurements, made in a process of their own.

A child's peak memory, as the kernel counts it, starts with its parent's: who measures must not import what makes them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def make(folder: Path, config: str, files: int, *, fill: bool = False) -> Path:
    """A Hugging Face folder of a config of :mod:`tests.fixtures.sparse`; with ``fill``, of random values, not holes."""
    words = [str(folder), config, str(files), *(["fill"] if fill else [])]
    subprocess.run([sys.executable, "-m", "tests.benchmark.holes", *words], cwd=ROOT, check=True)
    return folder


def _fill(folder: Path) -> None:
    """Random bfloat16 of a standard deviation of 0.02 in place of the holes; another part of 64 MB for each file."""
    import numpy as np

    values = np.random.default_rng(0).normal(0, 0.02, 32 << 20).astype(np.float32)
    data = memoryview((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
        with open(path, "r+b") as file:
            file.seek(8 + int.from_bytes(file.read(8), "little"))
            left, at = path.stat().st_size - file.tell(), number * 9973 * 2
            while left:
                block = data[at : at + min(left, len(data) - at)]
                file.write(block)
                left, at = left - len(block), 0


def main(folder: str, config: str, files: str, *more: str) -> None:
    """Make one."""
    from tests.fixtures import sparse

    sparse.sparse_hf(Path(folder), getattr(sparse, config), files=int(files))
    if more:
        _fill(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
