"""Folders from a stranger in which a file is a link to a private one of the reader's, outside: a decoy.

What is linked to is sound, so that only the link can be the reason of a refusal; the harness sees when it is opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.trust.hostile import base, text_cases
from tests.trust.hostile.folder_cases import INDEX, RECORD
from tests.trust.hostile.harness import SECRET, Case

_WEIGHTS = "model.safetensors"
#: Every command that opens a checkpoint, or reads what lies in its folder.
COMMANDS = ("inspect", "validate", "scan", "hashes", "to-scratch", "to-hf", "to-gguf-vocabulary", "resume", "push")
COMMANDS += ("diff", "diff-b", "check", "check-source", "check-of", "diagnose", "diagnose-against", "table-of")
#: These start torch, or take longer.
MORE = ("repair", "generate", "verify", "to-gguf")


def sound(folder: Path) -> Path:
    """An output of a conversion with all that may lie in one: index, tokenizer, template, card, record."""
    base.hf(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(base.SHAPES, _WEIGHTS)}))
    (folder / "tokenizer.json").write_text(json.dumps(text_cases._bpe()))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (folder / "sums.txt").write_text(f"{hashlib.sha256((folder / _WEIGHTS).read_bytes()).hexdigest()}  {_WEIGHTS}\n")
    names = ("config.json", INDEX, "tokenizer.json", "chat_template.jinja")
    beside = [{"name": n, "bytes": (folder / n).stat().st_size} for n in names]
    record: dict[str, Any] = {**RECORD, "target": {**RECORD["target"], "beside": beside}}
    (folder / "conversion.json").write_text(json.dumps(record))
    return folder


def _away(path: Path) -> None:
    """Move a file to a private place, and leave a link."""
    private = path.parent.parent / "decoys"
    private.mkdir(exist_ok=True)
    path.rename(private / path.name)
    path.symlink_to(private / path.name)


def _linked(*names: str) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        sound(folder)
        for name in names:
            _away(folder / name)
        return folder

    return build


def _text(folder: Path) -> Path:
    """Weights that are a private text: an error about a text quotes how it begins."""
    sound(folder)
    (folder / _WEIGHTS).write_text(f"{SECRET}\nand more of it\n")
    _away(folder / _WEIGHTS)
    return folder


def _templates(folder: Path) -> Path:
    """All chat templates of a private folder."""
    sound(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(SECRET)
    _away(folder / "additional_chat_templates")
    return folder


def _pieces(folder: Path) -> Path:
    """A split GGUF, named by its first file, whose second piece is elsewhere."""
    for number in (1, 2):
        (folder / f"m-0000{number}-of-00002.gguf").write_bytes(base.gguf())
    _away(folder / "m-00002-of-00002.gguf")
    return folder / "m-00001-of-00002.gguf"


def _distributed(name: str) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps(base.CONFIG))
        (folder / ".metadata").write_bytes(base.state())
        (folder / "__0_0.distcp").write_bytes(base.archive())
        _away(folder / name)
        return folder

    return build


def cached(folder: Path) -> Path:
    """The same model as the Hub's client keeps it: no reason to refuse anything."""
    snapshot = folder / "models--org--tiny" / "snapshots" / ("a" * 40)
    blobs = folder / "models--org--tiny" / "blobs"
    for path in (snapshot, blobs):
        path.mkdir(parents=True)
    for file in sorted(sound(snapshot).iterdir()):
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        file.symlink_to(Path("..", "..", "blobs", blob.name))
    return snapshot


def cases() -> Iterator[Case]:
    """Every one of them; each is refused by every command."""
    linked = {name: _linked(name) for name in (_WEIGHTS, INDEX, "config.json", "tokenizer.json", "conversion.json")}
    linked |= {name: _linked(name) for name in ("chat_template.jinja", "README.md")}
    linked |= {"everything": _linked(*(_WEIGHTS, INDEX, "config.json", "tokenizer.json", "conversion.json"))}
    for name, build in linked.items():
        yield Case(f"{name} is a link to a private file", build, COMMANDS, more=MORE)
    yield Case(f"{_WEIGHTS} is a link to a private text", _text, COMMANDS, more=MORE)
    yield Case("additional_chat_templates is a link to a private folder", _templates, COMMANDS, more=MORE)
    yield Case(
        f"{_WEIGHTS} is a link to a private file, and its index is named",
        lambda f: _linked(_WEIGHTS)(f) / INDEX,
        ("inspect", "validate", "to-scratch", "diff"),
        more=MORE,
    )
    few = ("inspect", "validate", "to-scratch", "diff", "check", "diagnose")
    yield Case("a piece of a split GGUF is a link to a private file", _pieces, few, more=MORE)
    for name in (".metadata", "__0_0.distcp"):
        yield Case(f"dcp: {name} is a link to a private file", _distributed(name), few, more=MORE)
