"""The conversions that the trust scripts disturb: one of each kind of reading, computing and writing, a few MB each."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import convert
from convert import journal, plan, platform, writer
from convert.hub import stream
from convert.run import Summary, run
from tests.fixtures import Shape, make_gguf, make_hf, make_meta, make_scratch

#: All dimensions different, 32 heads on 8 kv heads of 8: divides over 8 files.
SHAPE = Shape(256, 32, 8, 8, 576, 800, layers=3)


@dataclass(frozen=True, slots=True)
class Kind:
    """One conversion.

    Attributes:
        name: What it is called in figures.
        source: A name of :data:`SOURCES`.
        to: The target layout.
        options: Options of the conversion.
        overwrite: Whether an older output lies there, made of ``older``.
        older: The source of that older output.
        way: ``plain``; ``hub``: read from a hub on loopback, nothing downloaded; ``repair``: by ``options["fixes"]``.
        missing: Calls that this system does not have (:data:`convert.platform.DISABLED`).
    """

    name: str
    source: str
    to: str
    options: Mapping[str, Any] = field(default_factory=dict)
    overwrite: bool = False
    older: str = "other"
    way: str = "plain"
    missing: frozenset[str] = frozenset()

    def out(self, folder: Path) -> Path:
        """Where its output goes."""
        return folder / ("out.gguf" if self.to == "gguf" else "out")


SPLIT = {"type": "auto", "split_max_size": 800_000, "tokenizer": False}
KINDS = (
    Kind("hf-to-scratch", "hf", "scratch"),
    Kind("hf-to-scratch --format pth", "hf", "scratch", {"format": "pth"}),
    Kind("hf-to-scratch --dtype float16", "hf", "scratch", {"dtype": "float16"}),
    Kind("scratch-to-hf", "scratch", "hf"),
    Kind("scratch-to-meta", "scratch", "meta"),
    Kind("hf-to-meta, 8 files", "hf", "meta", {"model_parallel": 8}),
    Kind("meta-to-hf, 8 files to shards", "meta", "hf", {"max_shard_size": 800_000}),
    Kind("meta-to-scratch", "meta", "scratch"),
    Kind("gguf-to-hf", "gguf", "hf", {"tokenizer": False}),
    Kind("hf-to-gguf --type q8_0", "hf", "gguf", {"type": "q8_0", "tokenizer": False}),
    Kind("hf-to-gguf, split", "hf", "gguf", SPLIT),
    Kind("gguf-to-gguf --type q8_0", "gguf", "gguf", {"type": "q8_0", "tokenizer": False}),
    Kind("hf-to-scratch --overwrite", "hf", "scratch", overwrite=True),
    Kind("hf-to-gguf --overwrite", "hf", "gguf", {"type": "q8_0", "tokenizer": False}, overwrite=True),
    Kind("hf-to-gguf, split, --overwrite", "hf", "gguf", SPLIT, overwrite=True),
)
#: As on a system that cannot exchange two names in one step: for a moment there is no output.
_ASIDE = "out.replaced/"
_NO_EXCHANGE = frozenset({"renameat2"})
#: Other ways to the same engine: killed and cut as those above are, and not subjected to every other fault.
MORE_KINDS = (
    Kind("repair", "hf", "hf", {"fixes": ("swap-gate-up", "unpermute-qk")}, way="repair"),
    Kind("repair --overwrite, a GGUF file", "gguf", "gguf", {"fixes": ("unpermute-qk",)}, overwrite=True, way="repair"),
    Kind("hf-to-scratch --no-download", "hf", "scratch", way="hub"),
    Kind("hf-to-gguf --type q8_0 --no-download", "hf", "gguf", {"type": "q8_0", "tokenizer": False}, way="hub"),
    Kind("hf-to-scratch --overwrite, no renameat2", "hf", "scratch", overwrite=True, missing=_NO_EXCHANGE),
)
ALL_KINDS = (*KINDS, *MORE_KINDS)

SOURCES = {
    "hf": lambda path: make_hf(path, SHAPE, dtype="bfloat16", sharded=2),
    "other": lambda path: make_hf(path, SHAPE, dtype="bfloat16", seed=9),
    "scratch": lambda path: make_scratch(path, SHAPE, dtype="bfloat16", format="pth"),
    "meta": lambda path: make_meta(path, SHAPE, dtype="bfloat16", mp=8),
    "gguf": lambda path: make_gguf(path / "model.gguf", SHAPE, type="bf16"),
}


def make_source(name: str, folder: Path) -> Path:
    """A source checkpoint, made when it is first needed."""
    path = folder / f"source-{name}"
    if not path.exists():
        path.mkdir(parents=True)
        SOURCES[name](path)
    return path


def small_pieces() -> None:
    """Many small pieces, listed in the journal at once: so that a small model has as many moments as a large one."""
    plan.PIECE_BYTES = 32 << 10
    writer.COPY_BYTES = 64 << 10
    journal.BATCH_BYTES = 128 << 10
    stream.CHUNK_BYTES, stream.WINDOW_BYTES = 256 << 10, 2 << 20


@contextlib.contextmanager
def kept_sizes() -> Iterator[None]:
    """Afterwards pieces are as large as before: for tests that call :func:`small_pieces`."""
    before = plan.PIECE_BYTES, writer.COPY_BYTES, journal.BATCH_BYTES
    chunks = stream.CHUNK_BYTES, stream.WINDOW_BYTES
    try:
        yield
    finally:
        plan.PIECE_BYTES, writer.COPY_BYTES, journal.BATCH_BYTES = before
        stream.CHUNK_BYTES, stream.WINDOW_BYTES = chunks


@functools.cache
def hub() -> Any:
    """A hub on loopback, to which ``huggingface_hub`` is turned for as long as this process lasts."""
    from huggingface_hub import constants

    from tests.hub.server import Hub

    server = Hub()
    cache = tempfile.mkdtemp(prefix="hub-cache-")
    atexit.register(shutil.rmtree, cache, True)
    for name, value in {
        "HF_HUB_OFFLINE": False,
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": cache,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_SHARED_BLOBS": True,
        "HF_TOKEN_PATH": os.path.join(cache, "no token"),
    }.items():
        if hasattr(constants, name):
            setattr(constants, name, value)
    os.environ.pop("HF_TOKEN", None)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    tempfile.tempdir = cache  # what killed runs have there goes, too
    return server


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder (of a file: its own), by relative name."""
    files = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def outputs(place: Path) -> dict[str, str]:
    """SHA-256 of everything in the place of outputs but partial folders and what replaced outputs lie in."""
    return {k: v for k, v in hashes(place).items() if not Path(k).parts[0].endswith(".partial")}


class Scene:
    """One kind of conversion, prepared: its source, an undisturbed output, and the older output it replaces."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self.source = make_source(kind.source, folder)
        self.intact = hashes(self.source)
        self.place = folder / "place"
        self.old: dict[str, str] = {}
        self.kept = folder / f"older-{abs(hash(kind.name))}"
        if kind.overwrite:
            self.clear()
            options = kind.options if kind.way != "repair" else {"tokenizer": False}
            convert.convert_checkpoint(make_source(kind.older, folder), kind.out(self.place), to=kind.to, **options)
            self.old = outputs(self.place)
            shutil.rmtree(self.kept, ignore_errors=True)
            self.place.rename(self.kept)
        self.clear()
        self.convert()
        self.wanted = outputs(self.place)
        self.clear()

    def clear(self) -> None:
        """The place of outputs as it is before a run."""
        shutil.rmtree(self.place, ignore_errors=True)
        if self.old:
            shutil.copytree(self.kept, self.place)
        else:
            self.place.mkdir(parents=True)

    def convert(self, *, resume: bool = False, check: str = "sampled", overwrite: bool | None = None) -> Summary:
        """Run the conversion; ``overwrite``: otherwise than its kind says."""
        kind, out = self.kind, self.kind.out(self.place)
        how: dict[str, Any] = {"overwrite": kind.overwrite if overwrite is None else overwrite, "resume": resume}
        platform.DISABLED.update(kind.missing)
        try:
            if kind.way == "repair":
                return convert.repair(self.source, out, **kind.options, **how).summary
            source = self.source if kind.way == "plain" else self._on_the_hub()
            with convert.open_checkpoint(source) as opened:
                return run(convert.plan_conversion(opened, kind.to, **kind.options), out, check=check, **how)
        finally:
            platform.DISABLED.difference_update(kind.missing)

    def _on_the_hub(self) -> Any:
        from huggingface_hub.utils import close_session

        from convert.hub.place import place
        from tests.hub.server import Repo

        repo = f"org/{self.kind.source}"
        files = {p.relative_to(self.source).as_posix(): p for p in self.source.rglob("*") if p.is_file()}
        hub().repos.setdefault(repo, Repo({name: path.read_bytes() for name, path in files.items()}))
        close_session()  # a forked process has no use for its parent's connections
        return place(repo, way="stream")

    def there(self) -> dict[str, str]:
        """As :func:`outputs`, but for an older output that stands aside while names cannot be exchanged."""
        return {k: v for k, v in outputs(self.place).items() if not (self.kind.missing and k.startswith(_ASIDE))}

    def judge(self) -> str | None:
        """What is wrong with what lies under the output's name after a run ended anywhere; None if nothing is.

        Right is nothing, or all of the new output, or all of the old one; of a split file, nothing that a reader of
        piece 1 would take for a whole.
        """
        if hashes(self.source) != self.intact:
            return "the source is damaged"
        there = outputs(self.place)
        if self.kind.to != "gguf":
            there = {k: v for k, v in there.items() if Path(k).name != ".lock"}  # says whose the folder is
            if self.kind.missing:  # the older output, whole while there is no other; the next run brings it back
                aside = {k[len(_ASIDE) :]: v for k, v in there.items() if k.startswith(_ASIDE)}
                there = {k: v for k, v in there.items() if not k.startswith(_ASIDE)}
                if aside and {f"out/{k}": v for k, v in aside.items()} != self.old and there != self.wanted:
                    return f"the older output is no more, and there is no other: {sorted(there)}"
            return None if there in ({}, self.old, self.wanted) else f"half an output: {sorted(there)}"
        weights = {k: v for k, v in there.items() if k.endswith(".gguf")}
        for whole in (self.old, self.wanted):
            if weights == {k: v for k, v in whole.items() if k.endswith(".gguf")}:
                return None
        first = next((k for k in weights if k == "out.gguf" or "-00001-of-" in k), None)
        return f"piece 1 without the others, or with pieces of another output: {sorted(weights)}" if first else None

    def judge_finished(self) -> str | None:
        """What is wrong with what lies there after a run that succeeded."""
        if hashes(self.source) != self.intact:
            return "the source is damaged"
        there = hashes(self.place)
        if there == self.wanted:
            return None
        other = sorted(k for k in {*there, *self.wanted} if there.get(k) != self.wanted.get(k))
        return f"not the bytes of an undisturbed run: {other[:5]}"
