"""Each reader with its reference: what must hold of any bytes at all.

A :class:`Target` writes the bytes to a file, reads it with our reader, and, where that gives a result, reads it with
the format's own library too and compares every name, type, shape and byte.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from convert.errors import ConvertError
from tests.trust.fuzzing import mutations, seeds

#: What an input came to.
REFUSED, EQUAL, UNREFERENCED = "refused", "equal", "no reference"


class Mismatch(AssertionError):
    """Our reader and the reference read different things."""


class NoReference(Exception):
    """The reference does not read this file, or not in a way that can be compared."""


@dataclass
class Target:
    """A reader under test.

    Attributes:
        name: The reader.
        seeds: Makes valid files.
        change: Mutates one.
        read: Reads a file with our code.
        compare: Given our result, the bytes and the path, raises :class:`Mismatch` or :class:`NoReference`.
        suffix: Of the file.
        beside: Files that must lie beside it.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    change: mutations.Change
    read: Callable[[Path], Any]
    compare: Callable[[Any, bytes, Path], None]
    suffix: str
    beside: Callable[[Path], None] = lambda folder: None
    _folder: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)

    def path(self) -> Path:
        """Where the input is written: in memory where there is a file system for that."""
        if self._folder is None:
            shm = "/dev/shm"
            self._folder = tempfile.TemporaryDirectory(dir=shm if os.path.isdir(shm) else None)
            self.beside(Path(self._folder.name))
        return Path(self._folder.name, "m" + self.suffix)

    def judge(self, data: bytes) -> str:
        """Read ``data`` with both; anything but a :class:`ConvertError` of ours goes through to the caller."""
        path = self.path()
        path.write_bytes(data)
        try:
            found = self.read(path)
        except ConvertError as error:
            text = str(error)
            if not error.problems or not text.strip() or len(text) > 20_000:
                raise Mismatch(f"an error of {len(text)} characters") from error
            text.encode()  # it must be possible to print it
            json.dumps([p.as_json() for p in error.problems])
            return REFUSED
        try:
            self.compare(found, data, path)
        except NoReference:
            return UNREFERENCED
        return EQUAL


def same(what: str, ours: Any, theirs: Any) -> None:
    """Raise unless equal; no-number equals itself."""
    if ours != theirs and not (isinstance(ours, float) and isinstance(theirs, float) and ours != ours != theirs):
        raise Mismatch(f"{what}: {str(ours)[:200]!r}, the reference has {str(theirs)[:200]!r}")


#: Larger tensors (views of few bytes can be endless) are compared by their numbers only.
MOST_BYTES = 1 << 20


def stored(spec: Any) -> bytes | None:
    """The bytes of a tensor, read as a conversion reads them; None when that would be too many."""
    from convert.source import FilePool, open_source

    if spec.nbytes > MOST_BYTES:
        return None
    if spec.nbytes == 0:
        return b""
    pool = FilePool()
    try:
        source = open_source(spec, pool)
        return bytes(source.read(0, source.shape[0]).tobytes())
    finally:
        pool.close()


# ---- safetensors ---------------------------------------------------------------------------------------------------


def _read_safetensors(path: Path) -> Any:
    from convert.formats import safetensors

    return safetensors.read(path)


def _compare_safetensors(found: Any, data: bytes, path: Path) -> None:
    import safetensors

    try:
        theirs = {name: value for name, value in safetensors.deserialize(data)}
        with safetensors.safe_open(path, "np") as file:
            metadata = file.metadata()
    except Exception as error:
        raise Mismatch(f"read here, and refused by the safetensors library: {error}") from error
    same("names", set(found.tensors), set(theirs))
    for name, spec in found.tensors.items():
        value = theirs[name]
        same(f"{name} shape", list(spec.shape), list(value["shape"]))
        same(f"{name} type", spec.dtype, value["dtype"])
        same(f"{name} bytes", data[spec.offset : spec.offset + spec.nbytes], bytes(value["data"]))
    same("metadata", found.metadata or {}, metadata or {})


# ---- GGUF ----------------------------------------------------------------------------------------------------------


def _read_gguf(path: Path) -> Any:
    from convert.formats import gguf

    return gguf.read(path)


def _compare_gguf(found: Any, data: bytes, path: Path) -> None:
    from gguf import GGUFReader, GGUFValueType

    from convert.formats.gguf_values import SCALARS

    try:
        theirs = GGUFReader(path)
    except UnicodeDecodeError:
        raise NoReference from None  # names of bytes that are no UTF-8 are kept here
    except Exception as error:
        raise Mismatch(f"read here, and refused by the gguf package: {type(error).__name__}: {error}") from error
    fields = {k: v for k, v in theirs.fields.items() if not k.startswith("GGUF.")}
    ours = {k: v for k, v in found.metadata.items() if not k.startswith("GGUF.")}
    same("keys", list(ours), list(fields))
    types = {number: name for name, (number, _) in SCALARS.items()}
    for key, value in ours.items():
        entry = fields[key]
        kind = found.metadata.types[key]
        array = entry.types[0] == GGUFValueType.ARRAY
        of = types[int(entry.types[-1])] if len(entry.types) > array else None
        if of is not None:
            same(f"{key} type", kind, f"arr:{of}" if array else of)
        items = [entry.parts[i] for i in entry.data]
        held = list(value) if array else [value]
        same(f"{key} length", len(held), len(items))
        for mine, part in zip(held, items, strict=True):
            if of == "str":
                same(key, mine.encode("utf-8", "surrogateescape"), bytes(part))
            elif of == "f32":
                import numpy as np

                same(key, float(np.float32(mine)), float(part[0]))
            else:
                same(key, mine, part[0].item())
    same("tensors", list(found.tensors), [t.name for t in theirs.tensors])
    for tensor in theirs.tensors:
        spec = found.tensors[tensor.name]
        same(f"{tensor.name} shape", list(spec.shape), list(reversed(tensor.shape.tolist())))
        same(f"{tensor.name} type", spec.dtype, tensor.tensor_type.name)
        same(f"{tensor.name} offset", spec.offset, int(tensor.data_offset))
        same(f"{tensor.name} bytes", data[spec.offset : spec.offset + spec.nbytes], tensor.data.tobytes())


# ---- indexes and configs -------------------------------------------------------------------------------------------


def _read_index(path: Path) -> Any:
    from convert.locate import weight_map

    return weight_map(path)


def _compare_index(found: Any, data: bytes, path: Path) -> None:
    raw = json.loads(data.decode("utf-8-sig"))
    same("map", found, raw["weight_map"])
    for name in found.values():
        same("folder", (path.parent / name).parent, path.parent)
        name.encode()


def _read_config(path: Path) -> Any:
    from convert import config as configs
    from convert.locate import Found
    from convert.opening import find_config

    raw, layout = find_config(Found(path.parent, "safetensors", [path], config=path), [], _options(), {})
    hubs = {}
    for table in _tables():
        if layout in table.layouts:
            try:
                hubs[table.family] = configs.to_hub(table, layout, raw)
            except ConvertError as error:
                str(error).encode()
    return raw, hubs


def _options() -> Any:
    from convert.checkpoint import Options

    return Options()


def _tables() -> list[Any]:
    from convert.table import load_table

    return [load_table(name) for name in ("llama", "qwen3", "gemma3")]


def _compare_config(found: Any, data: bytes, path: Path) -> None:
    raw, hubs = found
    theirs = json.loads(data.decode("utf-8-sig"))
    if json.dumps(raw) != json.dumps(theirs):
        raise Mismatch("another text")
    for hub in hubs.values():
        json.dumps(hub)
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            value = hub.get(key, 1)
            if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 2**40:
                raise Mismatch(f"{key} became {value!r}")
            if key in hub and theirs.get(key) is not None:
                same(key, value, theirs[key])
        theta = hub.get("rope_theta")
        if theta is not None and not (isinstance(theta, (int, float)) and math.isfinite(theta)):
            raise Mismatch(f"rope_theta became {theta!r}")


# ---- SentencePiece and TensorFlow ----------------------------------------------------------------------------------


def _read_sentencepiece(path: Path) -> Any:
    from convert.tokenizer import sentencepiece_model

    return sentencepiece_model.parse(path.read_bytes(), origin=path.name)


def _compare_sentencepiece(found: Any, data: bytes, path: Path) -> None:
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor()
    try:
        if not theirs.LoadFromSerializedProto(data):
            raise NoReference
    except RuntimeError:
        raise NoReference from None
    same("pieces", len(found.tokens), theirs.GetPieceSize())
    from convert.tokenizer.tokenizer import SPACE, USER_DEFINED

    for i, token in enumerate(found.tokens):
        text = token.replace(" ", SPACE) if found.types[i] == USER_DEFINED else token
        try:
            same(f"piece {i}", text, theirs.IdToPiece(i))
        except UnicodeDecodeError:
            raise NoReference from None
        same(f"score {i}", found.scores[i], theirs.GetScore(i))


def _read_tensorflow(path: Path) -> Any:
    from convert.formats import tf_checkpoint

    return tf_checkpoint.read(path)


def _compare_tensorflow(found: Any, data: bytes, path: Path) -> None:
    for spec in found.tensors.values():
        if not 0 <= spec.offset <= spec.offset + spec.nbytes <= spec.file.stat().st_size:
            raise Mismatch(f"{spec.name} lies outside its file")
    raise NoReference


def _tensorflow_data(folder: Path) -> None:
    for path in seeds.DATA.glob("openai/*.data-*"):
        (folder / ("m" + path.name[path.name.index(".data-") :])).write_bytes(path.read_bytes())


def _read_torch(path: Path) -> Any:
    from convert.formats import torch_zip

    return torch_zip.read(path)


def _compare_torch(found: Any, data: bytes, path: Path) -> None:
    from tests.trust.fuzzing import unpicklers

    unpicklers.compare(found, data, path)


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("safetensors", seeds.safetensors, mutations.safetensors_changed, _read_safetensors,
               _compare_safetensors, ".safetensors"),
        Target("torch", seeds.torch_files, mutations.torch_changed, _read_torch, _compare_torch, ".pth"),
        Target("gguf", seeds.gguf, mutations.gguf_changed, _read_gguf, _compare_gguf, ".gguf"),
        Target("index", seeds.index, mutations.json_changed, _read_index, _compare_index, ".index.json"),
        Target("config", seeds.configs, mutations.json_changed, _read_config, _compare_config, ".json"),
        Target("sentencepiece", seeds.sentencepiece, mutations.protobuf_changed, _read_sentencepiece,
               _compare_sentencepiece, ".model"),
        Target("tensorflow", seeds.tensorflow, mutations.table_changed, _read_tensorflow, _compare_tensorflow,
               ".index", _tensorflow_data),
    )
}  # fmt: skip


def mutated(target: Target, files: list[bytes], rng: Random) -> bytes:
    """One of the valid files with one to three changes, or a valid file itself."""
    data = rng.choice(files)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        data = target.change(data, rng)
    return data
