"""The source checkpoints of a benchmark: made when first needed, kept while they are, removed at the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.benchmark.measure import remove, size

ROOT = Path(__file__).resolve().parents[2]
FILES = {"hf": "model.safetensors", "deep": "model.safetensors", "meta": "consolidated.00.pth"}


class Sources:
    """Checkpoints by name: ``hf``, ``meta``, ``deep`` (twice the layers), ``gguf`` (made from ``hf`` by ourselves)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, name: str) -> Path:
        return self.folder / ("source.gguf" if name == "gguf" else f"source-{name}")

    def get(self, name: str) -> Path:
        """The folder (or file) of a checkpoint."""
        path = self._path(name)
        if name == "gguf":
            if not path.exists():
                words = ["hf-to-gguf", str(self.get("hf")), str(path), "--type", "q8_0", "--no-tokenizer", "--quiet"]
                self._make("convert", *words)
        elif not (path / ("params.json" if name == "meta" else "config.json")).exists():  # written last
            remove(path)
            kind = "meta" if name == "meta" else "hf"
            self._make("tests.benchmark.checkpoint", kind, str(path), *(["32"] if name == "deep" else []))
        return path

    def _make(self, module: str, *words: str) -> None:
        print(f"making {words[-1] if module == 'convert' else words[1]} …", file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, check=False)
        if done.returncode:
            raise SystemExit(f"could not make the source: {module} {' '.join(words)}")

    def data(self, name: str) -> Path:
        """The large file of a checkpoint."""
        return self.get(name) / FILES[name]

    def bytes(self, name: str) -> int:
        """Bytes of a checkpoint."""
        return size(self.get(name))

    def drop(self, name: str) -> None:
        """Free the disk."""
        remove(self._path(name))

    def drop_all(self) -> None:
        """Free the disk of every checkpoint."""
        for name in ("hf", "meta", "deep", "gguf"):
            self.drop(name)
