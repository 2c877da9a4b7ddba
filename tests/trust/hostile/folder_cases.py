# ruff: noqa: E501, SIM223 (tables of inputs: one to a line)
"""Folders that lead elsewhere or hold what they should not: indexes, links, pipes, records, partial folders."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from convert.journal import JOURNAL_NAME
from tests.trust.hostile import base
from tests.trust.hostile.harness import Case
from tests.trust.hostile.sparse import hole

INDEX = "model.safetensors.index.json"


def _index(folder: Path, target: Any, *, text: bytes | None = None) -> Path:
    """A folder whose index sends one tensor to ``target``, beside a sound shard and a decoy outside."""
    (folder / "config.json").write_text(json.dumps(base.CONFIG))
    head = base.header()
    (folder / "a.safetensors").write_bytes(base.safetensors(head))
    (folder.parent / "decoy.safetensors").write_bytes(base.safetensors())
    mapping = {n: "a.safetensors" for n in base.SHAPES} | {"lm_head.weight": target}
    (folder / INDEX).write_bytes(text if text is not None else json.dumps({"weight_map": mapping}).encode())
    return folder


TARGETS: dict[str, Any] = {
    "an absolute path": "/etc/passwd",
    "the absolute path of weights": "{parent}/decoy.safetensors",
    "..": "../decoy.safetensors",
    "a path below with ..": "x/../../decoy.safetensors",
    "only ..": "..",
    "only .": ".",
    "nothing": "",
    "Windows' ..": "..\\decoy.safetensors",
    "Windows' drive": "C:\\decoy.safetensors",
    "a server": "\\\\server\\decoy.safetensors",
    "a zero byte": "a\0.safetensors",
    "a device": "/dev/zero",
    "a number": 5,
    "a list": ["a.safetensors"],
    "null": None,
    "a megabyte of name": "a" * 1_000_000,
    "terminal codes": "\x1b[2J.safetensors",
    "half a surrogate": "\ud800.safetensors",
    "a URL": "https://example.invalid/a.safetensors",
}


def _linked(make: Callable[[Path], None]) -> Callable[[Path], Path]:
    """An index to ``b.safetensors``, which ``make`` makes something else than a file."""

    def build(folder: Path) -> Path:
        _index(folder, "b.safetensors")
        make(folder / "b.safetensors")
        return folder

    return build


LINKS: dict[str, Callable[[Path], None]] = {
    "a link to a device": lambda p: p.symlink_to("/dev/zero"),
    "a link to a text elsewhere": lambda p: p.symlink_to("/etc/passwd"),
    "a link to itself": lambda p: p.symlink_to(p.name),
    "a link to a folder": lambda p: p.symlink_to(".."),
    "a link to nothing": lambda p: p.symlink_to("../nothing"),
    "a pipe": lambda p: os.mkfifo(p),
    "a link to a pipe": lambda p: (os.mkfifo(p.with_name("pipe")), p.symlink_to("pipe")) and None,
    "a folder": lambda p: p.mkdir(),
    "nothing": lambda p: None,
}


def _special(name: str, make: Callable[[Path], None]) -> Callable[[Path], Path]:
    """A sound folder in which one file became something else."""

    def build(folder: Path) -> Path:
        base.hf(folder)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        return folder

    return build


def _million(folder: Path) -> Path:
    rows = ",".join(f'"t{i}":"f{i}.safetensors"' for i in range(1_000_000))
    return _index(
        folder, "", text=('{"weight_map":{' + rows[:31_000_000] + ('"}}' if len(rows) > 31_000_000 else "}}")).encode()
    )


def _many(folder: Path) -> Path:
    rows = ",".join(f'"t{i}":"f{i}"' for i in range(1_000_000))
    return _index(folder, "", text=('{"weight_map":{' + rows + "}}").encode())


INDEXES: dict[str, bytes] = {
    "deep lists": b'{"weight_map":' + b"[" * 1_000_000,
    "deep objects": b'{"weight_map":' * 200_000,
    "a list": b"[]",
    "a map that is a list": b'{"weight_map":["a.safetensors"]}',
    "a map that is empty": b'{"weight_map":{}}',
    "no map": b"{}",
    "no UTF-8": b'{"weight_map":{"\xff\xfe":"a"}}',
    "no JSON": b"\0" * 1000,
    "nothing": b"",
    "total_size of 10^4000": b'{"metadata":{"total_size":' + b"9" * 4000 + b'},"weight_map":{"a":"a.safetensors"}}',
    "total_size of a list": b'{"metadata":{"total_size":[[]]},"weight_map":{"a":"a.safetensors"}}',
    "metadata of a number": b'{"metadata":5,"weight_map":{"a":"a.safetensors"}}',
}


# ---- records, lists of hashes, partial folders -----------------------------------------------------------------------

_WEIGHTS = base.safetensors()
#: What there is: a record that says so is believed as far as it goes, and only the rest of it is hostile.
_FILE = {
    "name": "model.safetensors",
    "bytes": len(_WEIGHTS),
    "head_sha256": hashlib.sha256(_WEIGHTS[: 1 << 20]).hexdigest(),
    "sha256": hashlib.sha256(_WEIGHTS).hexdigest(),
}
_SOURCE: dict[str, Any] = {"path": "/dev/zero", "layout": "hf", "format": "safetensors", "files": [_FILE]}
_TARGET: dict[str, Any] = {"layout": "hf", "files": [_FILE], "beside": []}
RECORD: dict[str, Any] = {
    "schema": "convert.record/1",
    "tool": "convert 0.1.0",
    "source": _SOURCE,
    "target": _TARGET,
    "config": base.CONFIG,
}


def _source(**more: Any) -> dict[str, Any]:
    return {**RECORD, "source": {**_SOURCE, **more}}


def _target(**more: Any) -> dict[str, Any]:
    return {**RECORD, "target": {**_TARGET, **more}}


RECORDS: dict[str, Any] = {
    "files with ..": _target(files=[{"name": "../decoy.safetensors", "bytes": len(_WEIGHTS)}]),
    "files beside with ..": _target(beside=[{"name": "../decoy.safetensors", "bytes": 1}, {"name": "../../x"}]),
    "absolute files": _target(files=[{"name": "/etc/passwd", "bytes": len(_WEIGHTS)}]),
    "absolute files beside": _target(beside=[{"name": "/dev/zero", "sha256": "0" * 64}]),
    "files that are numbers": _target(files=[5, None, [], {"name": 7}]),
    "files beside that are a number": _target(beside=9),
    "hashes that are numbers": _target(files=[{**_FILE, "sha256": 5}]),
    "sizes that are texts": _target(files=[{**_FILE, "bytes": "x"}]),
    "sizes of 10^400": _target(files=[{**_FILE, "bytes": 10**400}]),
    "sizes of 10^60": _target(beside=[{"name": "config.json", "bytes": 10**60}]),
    "a source that is a list": {**RECORD, "source": ["/dev/zero"]},
    "terminal codes": _target(beside=[{"name": "\x1b[2J", "bytes": 1}]),
    "options that are numbers": _target(options=5),
    "options of the source that are numbers": _source(options=5),
    "decisions that are a list": {**RECORD, "decisions": [5]},
    "a config that is a list": {**RECORD, "config": [5]},
    "names that are a list": _source(names=[5]),
    "notes that are a number": {**RECORD, "notes": 5, "family": [5]},
    "another hash": _target(files=[{**_FILE, "head_sha256": "1" * 64, "sha256": "1" * 64}]),
}  # fmt: skip
#: These are believed where files are compared, since the files are as they say; no command takes up the rest.
HARMLESS: dict[str, Any] = {
    "a source that is a device": _source(path="/dev/zero"),
    "a hub that is a list": _source(hub={"repo": [5], "commit": {}}),
    "a tool of terminal codes": {**RECORD, "tool": "\x1b[2J"},
    "names files elsewhere": {**_target(options={"names": "/dev/zero", "config": "/etc/passwd"}), "options": {"names": "/dev/zero"}},
    "a config of texts": {**RECORD, "config": {k: "x" for k in base.CONFIG}},
}  # fmt: skip


def _recorded(record: Any) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        base.hf(folder)
        (folder.parent / "decoy.safetensors").write_bytes(base.safetensors())
        text = record if isinstance(record, bytes) else json.dumps(record).encode()
        (folder / "conversion.json").write_bytes(text)
        return folder

    return build


SUMS: dict[str, bytes] = {
    "..": b"0" * 64 + b"  ../decoy.safetensors\n",
    "an absolute path": b"0" * 64 + b"  /etc/passwd\n",
    "a device": b"0" * 64 + b" */dev/zero\n",
    "no hashes": b"hello\n" * 1000,
    "no UTF-8": b"\xff\xfe" * 1000,
    "terminal codes": b"0" * 64 + b"  \x1b[2J\n",
    "zero bytes": bytes(1000),
    "another hash": b"0" * 64 + b"  model.safetensors\n",
    "a line of 50 MB": b"0" * (50 << 20),
    "a million lines": (b"0" * 64 + b"  x\n") * 1_000_000,
}


def _sums(text: bytes) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        base.hf(folder)
        (folder.parent / "decoy.safetensors").write_bytes(base.safetensors())
        (folder / "sums.txt").write_bytes(text)
        return folder

    return build


def _partial(make: Callable[[Path], None]) -> Callable[[Path], Path]:
    """Somebody made the partial folder of the coming output first."""

    def build(folder: Path) -> Path:
        base.hf(folder)
        (folder.parent / "precious").mkdir()
        (folder.parent / "precious" / "decoy").write_bytes(b"x" * 100)
        partial = folder.parent / "out" / "m.partial"
        partial.mkdir(parents=True)
        make(partial)
        return folder

    return build


def _journal(partial: Path, lines: bytes) -> None:
    for name in (".lock", ".journal", "journal", "lock"):
        (partial / name).write_bytes(lines)


PARTIALS: dict[str, Callable[[Path], None]] = {
    "a link as the output's file": lambda p: (p / "model.pth").symlink_to("../../precious/decoy"),
    "a link as the lock": lambda p: (p / ".lock").symlink_to("../../precious/decoy"),
    "a link to nothing as the lock": lambda p: (p / ".lock").symlink_to("../../precious/new"),
    "a link as the journal": lambda p: (p / JOURNAL_NAME).symlink_to("../../precious/decoy"),
    "a link to nothing as the journal": lambda p: (p / JOURNAL_NAME).symlink_to("../../precious/new"),
    "a pipe as the lock": lambda p: os.mkfifo(p / ".lock"),
    "a pipe as the journal": lambda p: os.mkfifo(p / JOURNAL_NAME),
    "a folder as the lock": lambda p: (p / ".lock").mkdir(),
    "a hard link as the output's file": lambda p: os.link(p.parent.parent / "precious/decoy", p / "model.pth"),
    "a pipe as the output's file": lambda p: os.mkfifo(p / "model.pth"),
    "a folder as the output's file": lambda p: (p / "model.pth").mkdir(),
    "somebody's files": lambda p: (p / "thesis.txt").write_text("x") and None,
    "a journal of nothing": lambda p: _journal(p, b"\0" * 1000),
    "a journal that lies": lambda p: _journal(p, b'{"schema":"convert.journal/1"}\n0 0 99999999\n'),
    "a journal of huge numbers": lambda p: _journal(p, b'{"schema":"convert.journal/1"}\n' + b"9" * 5000 + b" 0 1\n"),
    "a journal that moves files elsewhere": lambda p: _journal(p, b'{"schema":"convert.journal/1"}\ncommit {"../../precious/decoy":[1,2]}\n'),
}  # fmt: skip


def _instead(make: Callable[[Path], None]) -> Callable[[Path], Path]:
    """The partial folder itself is something else."""

    def build(folder: Path) -> Path:
        base.hf(folder)
        (folder.parent / "precious").mkdir()
        (folder.parent / "precious" / "decoy").write_bytes(b"x" * 100)
        (folder.parent / "out").mkdir()
        make(folder.parent / "out" / "m.partial")
        return folder

    return build


INSTEAD: dict[str, Callable[[Path], None]] = {
    "a link to somebody's folder": lambda p: p.symlink_to("../precious"),
    "a link to itself": lambda p: p.symlink_to(p.name),
    "a pipe": lambda p: os.mkfifo(p),
    "a file": lambda p: p.write_text("x") and None,
}


def _tensorflow(folder: Path) -> Path:
    """A sorted table whose blocks lie at 2^60."""
    from convert.formats import sstable

    (folder / "hparams.json").write_text("{}")
    (folder / "m.ckpt.data-00000-of-00001").write_bytes(b"")
    far = b"\xff" * 8 + b"\x0f"
    (folder / "m.ckpt.index").write_bytes((far * 4).ljust(40, b"\0")[:40] + sstable.MAGIC)
    return folder


def cases() -> Iterator[Case]:
    """Every folder."""
    for name, target in TARGETS.items():

        def build(folder: Path, target: Any = target) -> Path:
            value = target.format(parent=folder.parent) if isinstance(target, str) and "{parent}" in target else target
            return _index(folder, value)

        yield Case(f"index: {name}", build)
    for name, make in LINKS.items():
        yield Case(f"index to {name}", _linked(make))
    for name, text in INDEXES.items():
        yield Case(
            f"index: {name}, as text",
            lambda f, text=text: _index(f, "", text=text),
            passes=frozenset(("inspect", *(("diff",) if "total_size of a" in name or "metadata of" in name else ()))),
        )  # type: ignore[misc]
    yield Case("index: a million entries", _million)
    yield Case("index: a million entries, short", _many)
    yield Case("index: 1 GB of blanks", lambda f: hole(_index(f, "") / INDEX, 1 << 30, b'{"weight_map":') and f)
    for name in ("model.safetensors", "config.json"):
        for what in ("a link to a device", "a pipe", "a link to itself", "a folder"):
            # Without a config (a pipe is none) a model has no head counts: refused for that, but a module has its own.
            own = frozenset(("load-into",)) if name == "config.json" else frozenset()
            yield Case(f"{name} is {what}", _special(name, LINKS[what]), passes=own)
    for name in ("tokenizer.json", "conversion.json", "generation_config.json", "tokenizer_config.json"):
        for what in ("a link to a device", "a pipe", "a link to itself", "a folder"):
            # What is in the place of a record is passed over with a note; there is no tokenizer, else.
            passes = {"inspect", "diff", "diagnose", "to-gguf"}
            passes |= {"validate", "to-scratch", "to-hf"} if name == "conversion.json" else set()
            ways = ("inspect", "validate", "check", "to-scratch", "to-hf", "to-gguf-vocabulary")
            yield Case(f"{name} is {what}", _special(name, LINKS[what]), ways, frozenset(passes))
    ways = ("inspect", "validate", "check", "check-source", "to-scratch", "push")
    # A record that cannot be used is passed over with a note where the weights are what is asked for.
    passes = {"inspect", "validate", "to-scratch", "to-gguf", "diff", "diagnose", "push"}
    for name, record in RECORDS.items():
        yield Case(f"record: {name}", _recorded(record), ways, frozenset(passes))
    for name, record in HARMLESS.items():
        yield Case(f"record: {name}", _recorded(record), ways, frozenset(passes | {"check", "check-source"}))
    for name, text in (
        ("no JSON", b"{"),
        ("deep lists", b"[" * 1_000_000),
        ("40 MB", b" " * (40 << 20)),
        ("no UTF-8", b"\xff\xfe"),
    ):
        yield Case(f"record: {name}", _recorded(text), ways)
    for name, text in SUMS.items():
        yield Case(f"list of hashes: {name}", _sums(text), ("hashes",), more=())
    for name, make in PARTIALS.items():
        yield Case(
            f"partial folder: {name}",
            _partial(make),
            ("to-scratch", "resume"),
            frozenset(("to-scratch", "resume")),
            (),
            frozenset(("to-scratch", "resume")),  # the place is taken, as by an output
        )
    for name, make in INSTEAD.items():
        yield Case(
            f"partial folder is {name}",
            _instead(make),
            ("to-scratch", "resume"),
            frozenset(("to-scratch", "resume")),
            (),
            frozenset(("to-scratch", "resume")),
        )
    yield Case("tensorflow: blocks at 2^60", _tensorflow)
