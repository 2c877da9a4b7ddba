"""What the standard library's own unpickler and torch read from a torch file, compared with what our reader says.

torch's safe loader refuses whatever it does not know, where our reader leaves a placeholder; so the second reference is
Python's C unpickler with every name replaced: tensors by their numbers, all else by objects that do nothing.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from convert.formats.placeholders import TORCH_TYPES, ElementType, Known, Placeholder, StorageType
from convert.formats.spec import TensorSpec
from tests.trust.fuzzing.targets import Mismatch, NoReference, same, stored

_NAMES = {ours: name for name, ours in TORCH_TYPES.items()}


class Numbers(NamedTuple):
    """A tensor as its pickle describes it."""

    storage: Any
    offset: Any
    shape: Any
    strides: Any


class Inert:
    """Whatever a pickle asks for and we do not know: takes everything, does nothing."""

    def __new__(cls, *args: Any, **keywords: Any) -> Inert:
        return object.__new__(cls)

    def __init__(self, *args: Any, **keywords: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Nothing."""

    def extend(self, items: Any) -> None:
        """Nothing."""

    def add(self, item: Any) -> None:
        """Nothing."""


def _rebuilt(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Numbers:
    return Numbers(storage, offset, shape, strides)


class Inspector(pickle.Unpickler):
    """The C unpickler, made harmless."""

    def find_class(self, module: str, name: str) -> Any:
        """A few names that are only data; a function that gives a tensor's numbers; else an inert class."""
        if (module, name) in (("collections", "OrderedDict"), ("builtins", "set"), ("__builtin__", "set")):
            return OrderedDict if name == "OrderedDict" else set
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _rebuilt
        return type("Inert", (Inert,), {})

    def persistent_load(self, pid: Any) -> Any:
        """A storage stays the tuple that names it."""
        return pid


def compare(found: Any, data: bytes, path: Path) -> None:
    """Compare our tree with torch's own reading, and where torch refuses with the standard library's.

    Raises:
        Mismatch: They differ, or only ours gave a result and the file has a fault that should be named.
        NoReference: Neither reads the file.
    """
    tree = found.metadata["tree"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as refusal:
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
                raw = archive.read(name)
        except NotImplementedError:
            raise NoReference("a version of zip that Python does not know") from None
        except Exception as second:
            raise Mismatch(f"read here; torch: {refusal}; zipfile: {second}") from None
        try:
            theirs = Inspector(io.BytesIO(_unframed(raw))).load()
        except Exception as second:
            raise NoReference(f"{refusal}; {second}") from None
    _Comparison().run(tree, theirs)


def _unframed(raw: bytes) -> bytes:
    """A pickle without its frames: they only say how much may be fetched at once, and our reader does not fetch."""
    cuts = [at for op, _, at in pickletools.genops(raw) if op.name == "FRAME"]
    for at in reversed(cuts):
        raw = raw[:at] + raw[at + 9 :]
    return raw


class _Comparison:
    """Two trees side by side, without recursion: hostile trees are deep, and shared parts make them wide."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()
        self.kept: list[Any] = []  # what has been seen must not be freed, or its id is given out again

    def run(self, ours: Any, theirs: Any) -> None:
        waiting = [("root", ours, theirs)]
        while waiting:
            where, a, b = waiting.pop()
            if isinstance(a, (dict, list, tuple)):
                if (id(a), id(b)) in self.seen:
                    continue
                self.seen.add((id(a), id(b)))
                self.kept += [a, b]
            waiting += self.step(where[-200:], a, b)

    def step(self, where: str, a: Any, b: Any) -> list[tuple[str, Any, Any]]:
        if isinstance(a, (Placeholder, Known, StorageType, ElementType)):
            return []  # left unread, and said so
        if isinstance(b, Inert) or (isinstance(b, type) and issubclass(b, Inert)):
            return []  # torch.Size, torch.device and the like are read here
        if isinstance(a, TensorSpec):
            self.tensor(where, a, b)
            return []
        if isinstance(a, dict):
            if isinstance(b, dict) and any(isinstance(k, Placeholder) for k in a):
                return []  # numbers beyond 64 bits as keys, each a key of its own
            if not isinstance(b, dict) or len(a) != len(b):
                raise Mismatch(f"{where}: a dict of {len(a)} against {type(b).__name__}")
            if any(isinstance(k, (Inert, torch.device)) for k in b):
                return []
            pairs = zip(a.items(), b.items(), strict=True)  # in the order of the file
            return [
                part for (k, v), (m, w) in pairs for part in ((f"{where} key", k, m), (f"{where}.{k!r}"[:300], v, w))
            ]
        if isinstance(a, (list, tuple)):
            if isinstance(b, (set, frozenset)):
                same(where, len(set(map(repr, a))), len(b)) if not any(map(_odd, a)) else None
                return []
            if not isinstance(b, (list, tuple)) or len(a) != len(b):
                raise Mismatch(f"{where}: {type(a).__name__} of {len(a)} against {type(b).__name__} {str(b)[:80]}")
            return [(f"{where}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
        if isinstance(b, torch.device):
            return []
        if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
            return []
        if isinstance(b, bytearray):
            b = bytes(b)
        if type(a).__name__ == "StorageRef":
            return []
        if type(a) is not type(b) or a != b:
            raise Mismatch(f"{where}: {str(a)[:80]!r} ({type(a).__name__}) against {str(b)[:80]!r}")
        return []

    def tensor(self, where: str, spec: TensorSpec, b: Any) -> None:
        if isinstance(b, Numbers):
            same(f"{where} shape", tuple(spec.shape), tuple(b.shape))
            same(f"{where} storage", spec.storage, b.storage[2])
            if spec.strides is not None:
                same(f"{where} strides", tuple(spec.strides), tuple(b.strides))
            return
        if not isinstance(b, torch.Tensor):
            raise Mismatch(f"{where}: a tensor against {type(b).__name__}")
        same(f"{where} type", _NAMES[spec.dtype], str(b.dtype).removeprefix("torch."))
        same(f"{where} shape", tuple(spec.shape), tuple(b.shape))
        raw = stored(spec)
        if raw is not None:
            flat = b.detach().contiguous().reshape(-1).view(torch.uint8)
            same(f"{where} bytes", raw, bytes(flat.numpy().tobytes()))


def _odd(value: Any) -> bool:
    return not isinstance(value, (str, int)) or isinstance(value, bool)
