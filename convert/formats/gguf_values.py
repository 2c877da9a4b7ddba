"""GGUF's typed key-values: what a metadata entry is, in memory and in bytes.

Readers of GGUF are strict about types (a ``u32`` where an ``i32`` stands is an exception in llama.cpp), so a value
never loses its type: :class:`KeyValues` is a dict with the types beside it. Vocabularies have hundreds of thousands
of strings; :class:`StringArray` keeps them as the bytes of the file until somebody looks. This module knows nothing
of files or tensors.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

#: The scalar types: our name, id in the file (``enum gguf_type``), and struct code ('' for strings).
SCALARS = {
    "u8": (0, "B"),
    "i8": (1, "b"),
    "u16": (2, "H"),
    "i16": (3, "h"),
    "u32": (4, "I"),
    "i32": (5, "i"),
    "f32": (6, "f"),
    "bool": (7, "?"),
    "str": (8, ""),
    "u64": (10, "Q"),
    "i64": (11, "q"),
    "f64": (12, "d"),
}
ARRAY_ID = 9
NAMES = {number: name for name, (number, _) in SCALARS.items()}


@dataclass(frozen=True, slots=True)
class Value:
    """A value with its type.

    Attributes:
        type: ``"u32"``, ``"str"`` … or ``"arr:<scalar>"``.
        value: int, float, bool, str, or a sequence of those.
    """

    type: str
    value: Any


def U8(value: int) -> Value:
    """An 8-bit unsigned integer."""
    return Value("u8", value)


def U16(value: int) -> Value:
    """A 16-bit unsigned integer (the split counters)."""
    return Value("u16", value)


def U32(value: int) -> Value:
    """A 32-bit unsigned integer: what llama.cpp wants for every count and id."""
    return Value("u32", value)


def I32(value: int) -> Value:
    """A 32-bit signed integer."""
    return Value("i32", value)


def U64(value: int) -> Value:
    """A 64-bit unsigned integer."""
    return Value("u64", value)


def F32(value: float) -> Value:
    """A 32-bit float: what llama.cpp wants for every real number."""
    return Value("f32", value)


def Bool(value: bool) -> Value:
    """A boolean."""
    return Value("bool", value)


def Str(value: str) -> Value:
    """A UTF-8 string."""
    return Value("str", value)


def Array(of: str, values: Sequence[Any]) -> Value:
    """An array of scalars of type ``of`` (``"i32"``, ``"str"`` …)."""
    return Value(f"arr:{of}", values)


class StringArray(Sequence[str]):
    """Strings as they lie in a file, decoded when they are looked at.

    Bytes that are not UTF-8 (byte pieces of some vocabularies) come back with Python's ``surrogateescape``, and are
    written back unchanged.

    Args:
        data: The array's payload: for each string, its length (8 bytes) and its bytes.
        starts: The position of each length in ``data``.
    """

    __slots__ = ("data", "starts")

    def __init__(self, data: bytes, starts: array[int]) -> None:
        self.data = data
        self.starts = starts

    @classmethod
    def of(cls, values: Iterable[str]) -> StringArray:
        """The same strings, encoded."""
        starts = array("q")
        data = bytearray()  # a list of parts would cost ten times the bytes
        pack = struct.Struct("<Q").pack
        for value in values:
            raw = value.encode("utf-8", "surrogateescape")
            starts.append(len(data))
            data += pack(len(raw))
            data += raw
        return cls(bytes(data), starts)

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start = self.starts[index]
        end = start + 8 + int.from_bytes(self.data[start : start + 8], "little")
        return self.data[start + 8 : end].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        data = self.data
        ends = array("q", self.starts[1:])
        ends.extend([len(data)] if self.starts else [])
        for start, end in zip(self.starts, ends, strict=True):
            yield data[start + 8 : end].decode("utf-8", "surrogateescape")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StringArray):
            return self.data == other.data
        if isinstance(other, Sequence) and not isinstance(other, str | bytes):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.data)

    def __repr__(self) -> str:
        head = ", ".join(repr(s) for s in self[:4])
        return f"StringArray([{head}{', …' if len(self) > 4 else ''}], {len(self):,} strings)"


class KeyValues(dict[str, Any]):
    """GGUF metadata in file order: a dict of plain values, and the type of each.

    Change it with :meth:`put` and :meth:`drop`, which keep the types; ``f32`` scalars are read as the shortest decimal
    that is the same ``f32`` (``1e-05``, not ``9.999999747378752e-06``).

    Attributes:
        types: ``{key: type}``, the types of :class:`Value`.
    """

    def __init__(self, items: Mapping[str, Value] | None = None) -> None:
        super().__init__()
        self.types: dict[str, str] = {}
        for key, value in (items or {}).items():
            self.put(key, value)

    def put(self, key: str, value: Value) -> None:
        """Set ``key`` (its position stays when it exists)."""
        self[key] = value.value
        self.types[key] = value.type

    def drop(self, key: str) -> None:
        """Remove ``key`` if it is there."""
        self.pop(key, None)
        self.types.pop(key, None)

    def typed(self) -> Iterator[tuple[str, Value]]:
        """Every key with its typed value, in order."""
        return ((key, Value(self.types[key], value)) for key, value in self.items())

    def copy(self) -> KeyValues:
        """A copy that can be changed by itself."""
        return KeyValues(dict(self.typed()))


def shortest(value: float) -> float:
    """The shortest decimal that rounds to the same ``f32``; a config then says 1e-05."""
    return float(str(np.float32(value)))


def encode_string(text: str) -> bytes:
    """Length and bytes of one string."""
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def encode(key: str, value: Value) -> bytes:
    """One key-value as it stands in a file.

    Raises:
        ValueError: The value does not fit its type.
    """
    kind, _, of = value.type.partition(":")
    try:
        if kind != "arr":
            number, _ = SCALARS[kind]
            return encode_string(key) + struct.pack("<I", number) + _scalar(kind, value.value)
        number, _ = SCALARS[of]
        head = struct.pack("<IIQ", ARRAY_ID, number, len(value.value))
        return encode_string(key) + head + _items(of, value.value)
    except KeyError:
        raise ValueError(f"{key!r}: {value.type!r} is not a GGUF type") from None
    except (struct.error, TypeError, OverflowError, AttributeError, UnicodeEncodeError) as error:
        shown = repr(value.value)
        raise ValueError(f"{key!r}: {shown[:60]} is not a {value.type} ({error})") from None


def _scalar(kind: str, value: Any) -> bytes:
    if kind == "str":
        return encode_string(value)
    if kind == "bool" and not isinstance(value, bool | np.bool_):
        raise TypeError("wanted True or False")
    if kind[0] in "ui" and isinstance(value, bool):
        raise TypeError("wanted an integer")
    return struct.pack("<" + SCALARS[kind][1], value)


def _items(of: str, values: Sequence[Any]) -> bytes:
    if of == "str":
        if isinstance(values, str | bytes):
            raise TypeError("wanted a sequence of strings")
        return values.data if isinstance(values, StringArray) else StringArray.of(values).data
    if of == "bool":
        return bytes(bool(v) for v in values)
    code = SCALARS[of][1]
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in ("f" if of[0] == "f" else "iu"):
            raise TypeError(f"wanted an array of {of}")
        values = values.tolist()
    return struct.pack(f"<{len(values)}{code}", *values)


def infer(text: str, *, like: str | None = None) -> Value:
    """The typed value that a person means by ``text`` on a command line.

    Args:
        text: ``5``, ``1e-5``, ``true``, words; ``u32:5`` states the type; arrays are written ``arr:i32:1,2,3``.
        like: The type that the key has already; it wins over guessing.

    Raises:
        ValueError: The text does not fit the type.
    """
    head, colon, rest = text.partition(":")
    if colon and head in SCALARS:
        return _typed(head, rest)
    if colon and head == "arr":
        of, _, items = rest.partition(":")
        if of not in SCALARS:
            raise ValueError(f"{of!r} is not a type of array elements; there are {', '.join(SCALARS)}")
        return Value(f"arr:{of}", [_typed(of, item).value for item in items.split(",")] if items else [])
    if like is not None:
        if like.startswith("arr:"):
            return infer(f"{like}:{text}")
        return _typed(like, text)
    if text in ("true", "false"):
        return Value("bool", text == "true")
    for kind in ("u32", "i32", "i64", "f32") if any(c.isdigit() for c in text) else ():
        try:
            value = _typed(kind, text)
            encode("", value)
        except ValueError:
            continue
        return value
    return Value("str", text)


def _whole(kind: str, text: str) -> int:
    bits, signed = int(kind[1:]), kind[0] == "i"
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    try:
        number = int(text)
    except ValueError:
        number = most + 1
    if not least <= number <= most:
        raise ValueError(f"{text[:60]!r} is no {kind}, which is a whole number from {least:,} to {most:,}")
    return number


def _typed(kind: str, text: str) -> Value:
    if kind == "str":
        return Value(kind, text)
    if kind == "bool":
        if text not in ("true", "false"):
            raise ValueError(f"{text!r} is not true or false")
        return Value(kind, text == "true")
    if kind[0] != "f":
        return Value(kind, _whole(kind, text))
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number, and a {kind} is one") from None
    if math.isinf(number) and any(c.isdigit() for c in text):
        raise ValueError(f"{text} is too large for {kind}")
    return Value(kind, number)
