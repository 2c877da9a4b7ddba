# ruff: noqa: E501, SIM223 (tables of inputs: one to a line)
"""Formats in each other's place, pieces that do not belong together, caches, and files that users name themselves."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from convert.journal import JOURNAL_NAME
from tests.trust.hostile import base, folder_cases, link_cases, torch_cases
from tests.trust.hostile.harness import LATER, Case
from tests.trust.hostile.sparse import hole

_CALL = b"\x80\x02" + torch_cases.CALLS["os.system"]("touch canary") + b"."
_U16 = struct.Struct("<H").pack


def _piece(number: int, count: int, **more: Any) -> bytes:
    values = [*base.gguf_values(), base.keyed("split.no", 2, _U16(number)), base.keyed("split.count", 2, _U16(count))]
    return base.gguf([*values, base.keyed("split.tensors.count", 5, struct.pack("<i", 12))], **more)


#: The second of two pieces of a GGUF file, beside a sound first one that holds all tensors.
PIECES: dict[str, Callable[[], bytes]] = {
    "a pickle": lambda: base.archive(_CALL),
    "safetensors": base.safetensors,
    "nothing": lambda: b"",
    "zeros": lambda: bytes(100_000),
    "only the magic": lambda: b"GGUF",
    "the first one again": lambda: _piece(0, 2),
    "the same tensors": lambda: _piece(1, 2),
    "a piece of three": lambda: _piece(2, 3),
    "a piece of 65,535": lambda: _piece(65_534, 65_535),
    "2^60 tensors": lambda: _piece(1, 2, counts=(1 << 60, 3)),
    "2^60 key-values": lambda: _piece(1, 2, counts=(12, 1 << 60)),
    "the other byte order": lambda: base.gguf(order=">"),
    "no number": lambda: base.gguf([]),
}


def _pieces(second: Callable[[], bytes]) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        (folder / "m-00001-of-00002.gguf").write_bytes(_piece(0, 2))
        (folder / "m-00002-of-00002.gguf").write_bytes(second())
        return folder / "m-00001-of-00002.gguf"

    return build


def _sharded(suffix: str, name: str, second: Callable[[], bytes]) -> Callable[[Path], Path]:
    """Two shards and their index; the second one is something else."""

    def build(folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps(base.CONFIG))
        first = f"{name}-00001-of-00002.{suffix}"
        (folder / first).write_bytes(base.safetensors() if suffix == "safetensors" else base.archive())
        (folder / f"{name}-00002-of-00002.{suffix}").write_bytes(second())
        where = {n: first for n in base.SHAPES} | {"lm_head.weight": f"{name}-00002-of-00002.{suffix}"}
        (folder / f"{name}.{suffix}.index.json").write_text(json.dumps({"weight_map": where}))
        return folder

    return build


_SHARDS: dict[str, Callable[[], bytes]] = {
    "a pickle that calls": lambda: base.archive(_CALL),
    "a bare pickle that calls": lambda: _CALL,
    "a GGUF file": base.gguf,
    "a zip bomb": torch_cases.ARCHIVES["a deflated bomb for a tree"],
    "a list": lambda: json.dumps([1, 2, 3]).encode(),
}


def _metadata(value: Any) -> Callable[[Path], Path]:
    return lambda folder: base.hf(folder, base.safetensors({**base.header(), "__metadata__": value}))


#: ``__metadata__`` of a safetensors file; what is sound by the format's rules passes.
METADATA: dict[str, Any] = {
    "a text of 20 MB": {"format": "x" * (20 << 20)},
    "100,000 keys": {f"k{i}": "x" for i in range(100_000)},
    "a key of a megabyte": {"k" * 1_000_000: "x"},
    "terminal codes": {"format": "\x1b[2J", "\x1b]0;x\x07": "\x1b[2J"},
    "JSON nested deep": {"config": "[" * 100_000, "format": "pt"},
    "a record that lies": {"conversion.json": json.dumps(folder_cases.RECORD), "format": "pt"},
}


def _hub(change: Callable[[Path], None], *, level: int = 0) -> Callable[[Path], Path]:
    """A cache of the Hub's client in which something is changed; given at a level above the snapshot."""

    def build(folder: Path) -> Path:
        snapshot = link_cases.cached(folder)
        storage = snapshot.parent.parent
        (storage / "refs").mkdir()
        (storage / "refs" / "main").write_text(snapshot.name)
        change(storage)
        return [storage, storage.parent, snapshot.parent, snapshot][level]

    return build


def _put(name: str, content: bytes | str) -> Callable[[Path], None]:
    def change(storage: Path) -> None:
        (storage / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def _blob(storage: Path, make: Callable[[Path], None]) -> None:
    """Make the weights' blob something else."""
    snapshot = next((storage / "snapshots").iterdir())
    blob = (snapshot / "model.safetensors").resolve()
    blob.unlink()
    make(blob)


def _second(storage: Path, target: str) -> None:
    (storage / "snapshots" / ("b" * 40)).symlink_to(target)
    (storage / "refs" / "main").write_text("b" * 40)


#: Name → change, and at which level the folder is given.
HUB: dict[str, tuple[Callable[[Path], None], int]] = {
    "a branch with ..": (_put("refs/main", "../../../in/models--org--tiny/snapshots"), 0),
    "a branch that is absolute": (_put("refs/main", "/etc"), 0),
    "a branch of terminal codes": (_put("refs/main", "\x1b[2J"), 0),
    "a branch of a megabyte": (_put("refs/main", "a" * 1_000_000), 0),
    "a branch that is no UTF-8": (_put("refs/main", b"\xff\xfe"), 0),
    "a branch of zero bytes": (_put("refs/main", bytes(40)), 0),
    "a branch of 1 GB": (lambda s: hole(s / "refs" / "main", 1 << 30) and None, 0),
    "a branch that is a pipe": (lambda s: ((s / "refs" / "main").unlink(), os.mkfifo(s / "refs" / "main")) and None, 0),
    "a snapshot that is a link to a device's folder": (lambda s: _second(s, "/dev"), 0),
    "a snapshot that is a link to itself": (lambda s: _second(s, "b" * 40), 0),
    "a blob that is a link to a device": (lambda s: _blob(s, lambda p: p.symlink_to("/dev/zero")), 0),
    "a blob that is a link to a private text": (lambda s: _blob(s, lambda p: p.symlink_to("/etc/passwd")), 3),
    "a blob that is a pipe": (lambda s: _blob(s, lambda p: os.mkfifo(p)), 3),
    "a blob that is a folder": (lambda s: _blob(s, lambda p: p.mkdir()), 1),
    "a blob that is not there": (lambda s: _blob(s, lambda p: None), 2),
    "a blob that is a pickle": (lambda s: _blob(s, lambda p: p.write_bytes(base.archive(_CALL)) and None), 0),
    "5,000 empty snapshots": (lambda s: [(s / "snapshots" / f"{i:040x}").mkdir() for i in range(5000)] and _put("refs/main", "0" * 40)(s), 0),
}  # fmt: skip


def _chk(content: bytes | int) -> Callable[[Path], Path]:
    """A Meta folder with its list of hashes."""

    def build(folder: Path) -> Path:
        base.hf(folder)
        if isinstance(content, int):
            hole(folder / "checklist.chk", content)
        else:
            (folder / "checklist.chk").write_bytes(content)
        return folder

    return build


CHECKLISTS: dict[str, bytes | int] = {
    "binary": bytes(range(256)) * 100,
    "zeros": bytes(10_000),
    "1 GB": 1 << 30,
    "a million lines": (b"0" * 32 + b"  x\n") * 1_000_000,
    "names with ..": b"0" * 32 + b"  ../../x\n" + b"0" * 32 + b"  /dev/zero\n",
    "another hash": b"0" * 32 + b"  model.safetensors\n",
    "two hashes for one file": b"0" * 32 + b"  model.safetensors\n" + b"1" * 32 + b"  model.safetensors\n",
}
#: Files of prompts that are none.
PROMPTS: dict[str, bytes | int] = {
    "deep lists": b"[" * 1_000_000,
    "lists of lists": b"[[[1]]]",
    "no UTF-8": b"\xff\xfe" * 100,
    "zero bytes": bytes(100_000),
    "1 GB": 1 << 30,
    "terminal codes": b'["\x1b[2J"]',
    "ids of 4,000 digits": b"[[" + b"9" * 4000 + b"]]",
    "ids that are negative": b"[[-1]]",
    "a megabyte that is no prompt": b'[{"a": "' + b"x" * 1_000_000 + b'"}]',
    "nothing": b"",
}


def _named(content: bytes | int) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        path = folder / "evil.txt"
        if isinstance(content, int):
            return hole(path, content)
        path.write_bytes(content)
        return path

    return build


def _meta(second: Callable[[Path], None], count: int = 2) -> Callable[[Path], Path]:
    """Model-parallel files, of which the second is something else."""

    def build(folder: Path) -> Path:
        params = {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 40, "norm_eps": 1e-5}
        (folder / "params.json").write_text(json.dumps(params))
        for number in range(count):
            (folder / f"consolidated.{number:02d}.pth").write_bytes(base.archive())
        (folder / "consolidated.01.pth").unlink(missing_ok=True)
        second(folder / "consolidated.01.pth")
        return folder

    return build


META: dict[str, Callable[[Path], None]] = {
    "a pickle that calls": lambda p: p.write_bytes(base.archive(_CALL)) and None,
    "nothing": lambda p: None,
    "a pipe": lambda p: os.mkfifo(p),
    "a folder": lambda p: p.mkdir(),
    "a device": lambda p: p.symlink_to("/dev/zero"),
    "safetensors": lambda p: p.write_bytes(base.safetensors()) and None,
    "the first half": lambda p: p.write_bytes(base.archive()[:20_000]) and None,
}


def _beside(name: str, content: bytes | int | Callable[[Path], None]) -> Callable[[Path], Path]:
    """A sound model with one more file."""

    def build(folder: Path) -> Path:
        base.hf(folder)
        (folder / name).parent.mkdir(exist_ok=True)
        if callable(content):
            content(folder / name)
        elif isinstance(content, int):
            hole(folder / name, content)
        else:
            (folder / name).write_bytes(content)
        return folder

    return build


BESIDE: dict[str, tuple[str, bytes | int | Callable[[Path], None]]] = {
    "adapter_config.json: deep lists": ("adapter_config.json", b"[" * 1_000_000),
    "adapter_config.json: 1 GB": ("adapter_config.json", 1 << 30),
    "adapter_config.json: a list": ("adapter_config.json", b"[]"),
    "quantize_config.json: deep lists": ("quantize_config.json", b"[" * 1_000_000),
    "README.md: 1 GB": ("README.md", 1 << 30),
    "README.md: a list without end": ("README.md", b"---\na:\n" + b"- x\n" * 200_000 + b"---\n"),
    "merges.txt: 1 GB": ("merges.txt", 1 << 30),
    "vocab.json: 1 GB": ("vocab.json", 1 << 30),
    "vocab.json: deep lists": ("vocab.json", b"[" * 1_000_000),
    "chat_template.json: deep lists": ("chat_template.json", b"[" * 1_000_000),
    "10,000 chat templates": ("additional_chat_templates/x.jinja", lambda p: [p.with_name(f"{i}.jinja").write_text("x") for i in range(10_000)] and None),
    "20,000 files": ("x", lambda p: [p.with_name(f"f{i}.txt").touch() for i in range(20_000)] and None),
    "10,000 weights": ("x", lambda p: [p.with_name(f"w{i}.safetensors").touch() for i in range(10_000)] and None),
    "hparams.yaml": ("hparams.yaml", b"a: &a [*a, *a]\n!!python/object/apply:os.system ['touch canary']\n"),
    "latest with ..": ("latest", b"../../../../etc"),
    "optimizer.pt that calls": ("optimizer.pt", base.archive(_CALL)),
    "training_args.bin that calls": ("training_args.bin", base.archive(_CALL)),
    "pytorch_model.bin that calls": ("pytorch_model.bin", base.archive(_CALL)),
    "a module to import": ("modeling_llama.py", b"import os; os.system('touch canary')"),
    "a hidden metadata that calls": (".metadata", _CALL),
}  # fmt: skip


def _scales(name: str, kind: str, shape: list[int], raw: bytes) -> Callable[[Path], Path]:
    """FP8 weights with block scales, of which one is not as it should be."""

    def build(folder: Path) -> Path:
        head: dict[str, Any] = {}
        body = b""
        for tensor, data in base.DATA.items():
            eight = "proj" in tensor
            part = bytes(base.count(base.SHAPES[tensor])) if eight else data
            head[tensor] = {
                "dtype": "F8_E4M3" if eight else "F32",
                "shape": list(base.SHAPES[tensor]),
                "data_offsets": [len(body), len(body) + len(part)],
            }
            body += part
            if eight:
                one = raw if name in tensor else struct.pack("<f", 1.0)
                what = (kind, shape) if name in tensor else ("F32", [1, 1])
                head[tensor + "_scale_inv"] = {
                    "dtype": what[0],
                    "shape": what[1],
                    "data_offsets": [len(body), len(body) + len(one)],
                }
                body += one
        quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        return base.hf(folder, base.safetensors(head, body=body), {**base.CONFIG, "quantization_config": quantised})

    return build


SCALES: dict[str, tuple[str, list[int], bytes]] = {
    "of no elements": ("F32", [0, 1], b""),
    "of three dimensions": ("F32", [1, 1, 1], struct.pack("<f", 1.0)),
    "that are texts of bytes": ("U8", [1, 1], b"x"),
    "that are NaN": ("F32", [1, 1], struct.pack("<f", float("nan"))),
    "that are infinite": ("F32", [1, 1], struct.pack("<f", float("inf"))),
    "of 100,000 blocks": ("F32", [100_000, 1], bytes(400_000)),
}


def _journal(content: bytes | int) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        base.hf(folder)
        partial = folder.parent / "out" / "m.partial"
        partial.mkdir(parents=True)
        if isinstance(content, int):
            hole(partial / JOURNAL_NAME, content)
        else:
            (partial / JOURNAL_NAME).write_bytes(content)
        return folder

    return build


JOURNALS: dict[str, bytes | int] = {
    "1 GB": 1 << 30,
    "a million lines": b'{"schema":"convert.journal/1"}\n' + b"0 0 1\n" * 1_000_000,
    "deep lists": b"[" * 1_000_000 + b"\n",
    "no UTF-8": b"\xff\xfe\n" * 1000,
}
_EVERY = ("inspect", "validate", "to-scratch", "to-hf", "to-gguf", "diff", "diagnose", "check")


def cases() -> Iterator[Case]:
    """Every one of them."""
    for name, piece in PIECES.items():
        yield Case(
            f"gguf: second piece is {name}",
            _pieces(piece),
            ("inspect", "validate", "to-scratch", "metadata", "to-gguf"),
            frozenset(("metadata",)),
        )
    for name, shard in _SHARDS.items():
        yield Case(f"safetensors: second shard is {name}", _sharded("safetensors", "model", shard))
        yield Case(f"torch: second shard is {name}", _sharded("bin", "pytorch_model", shard))
    yield Case("torch: second shard is safetensors", _sharded("bin", "pytorch_model", base.safetensors))
    yield Case("safetensors: second shard is a torch file", _sharded("safetensors", "model", base.archive))
    for name, value in METADATA.items():
        yield Case(
            f"safetensors: __metadata__ of {name}",
            _metadata(value),
            (*_EVERY[:5], "inspect-json"),
            frozenset((*_EVERY, "inspect-json")),
        )
    for name, (change, level) in HUB.items():
        yield Case(
            f"hub cache: {name}",
            _hub(change, level=level),
            ("inspect", "validate", "to-scratch"),
            frozenset(("inspect", "validate", "to-scratch", "diff", "diagnose", "to-gguf", "check")),
            usage=frozenset((*_EVERY, *LATER)),
        )
    for name, text in CHECKLISTS.items():
        harmless = frozenset((*_EVERY, *(("hash",) if name == "names with .." else ())))
        yield Case(
            f"list of hashes: checklist.chk, {name}", _chk(text), ("hash", "validate", "to-scratch"), harmless, ()
        )
    for name, text in PROMPTS.items():
        both = frozenset(("prompts", "text"))
        yield Case(f"prompts: {name}", _named(text), ("prompts", "text"), frozenset(), (), both)
    for name, second in META.items():
        # The first holds all of the model; what is no file is none.
        whole = frozenset(_EVERY) if name in ("nothing", "a pipe", "a folder", "a device") else frozenset()
        yield Case(f"torch: second of two Meta files is {name}", _meta(second), ("inspect", "validate", "to-hf"), whole)
    yield Case(
        "torch: 300 Meta files",
        _meta(lambda p: p.write_bytes(base.archive()) and None, 300),
        ("inspect", "validate", "to-hf"),
        frozenset(("inspect",)),
    )
    for name, (file, content) in BESIDE.items():
        yield Case(
            f"files beside a model: {name}",
            _beside(file, content),
            ("inspect", "validate", "to-scratch", "to-hf"),
            frozenset(_EVERY),
        )
    for name, scale in SCALES.items():
        # Values are read by conversions; one number in three dimensions is one number.
        seen = frozenset(("inspect", "diff", *(("validate",) if name.startswith("that are ") else ())))
        seen |= frozenset(_EVERY) if "three dimensions" in name else frozenset()
        yield Case(
            f"safetensors: FP8 scales {name}",
            _scales("q_proj", *scale),
            ("inspect", "validate", "to-scratch"),
            seen,
            ("to-gguf", "to-hf", "diff"),
        )
    for name, text in JOURNALS.items():
        both = frozenset(("to-scratch", "resume"))
        yield Case(f"partial folder: a journal of {name}", _journal(text), ("to-scratch", "resume"), both, (), both)
