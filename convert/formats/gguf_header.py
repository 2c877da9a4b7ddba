"""Parses the header of one GGUF file: key-values and tensor infos, trusting nothing.

Every count and length is checked against the bytes that are left before anything is allocated, so a damaged or
hostile file costs no more memory than its own size. What the numbers say about tensors is judged by
:mod:`convert.formats.gguf`; this module only reads them. Layout of the file: the specification in ggml's repository
(``docs/gguf.md``), versions 2 and 3, little endian.
"""

from __future__ import annotations

import os
import struct
from array import array
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from convert.errors import FormatError, Problem
from convert.formats.gguf_values import ARRAY_ID, NAMES, SCALARS, KeyValues, StringArray, Value, shortest

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
#: What to do about a file that no sound tool writes.
SPOILT = "The file is damaged or was written wrongly: fetch it again, or convert the original checkpoint again."
#: More than any model has: the largest vocabularies (262,144 tokens with scores and merges) make 20 MB and 1.3 million
#: items. What is within them is read in two seconds and 300 MB.
MAX_HEADER = 64 << 20
MAX_TENSORS = MAX_KEYS = 100_000
MAX_ITEMS = 4_000_000

#: The fewest bytes a key-value and a tensor info can have, for judging counts.
_LEAST_VALUE = 8 + 4 + 1
_LEAST_INFO = 8 + 4 + 4 + 8

#: Containers of ggml's past, by their first four bytes.
_OLD_MAGICS = {b"lmgg": "ggml", b"fmgg": "ggmf", b"tjgg": "ggjt", b"algg": "ggla"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the header states it: ``dims`` in ggml order (row length first), offset in the data section."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """One file's header.

    Attributes:
        path: The file.
        version: 2 or 3.
        metadata: All key-values.
        infos: The tensor infos in file order.
        infos_at: Byte offset of the first tensor info (the end of the key-values).
        end: Byte offset of the end of the tensor infos.
        alignment: Alignment of the data.
        data_start: Byte offset of the data section.
        size: Bytes in the file.
    """

    path: Path
    version: int
    metadata: KeyValues
    infos: tuple[TensorInfo, ...]
    infos_at: int
    end: int
    alignment: int
    data_start: int
    size: int


def padded(size: int, alignment: int) -> int:
    """``size`` rounded up to a multiple of ``alignment``."""
    return -(-size // alignment) * alignment


def read_header(path: Path) -> Header:
    """Read one file's header.

    Raises:
        FormatError: Not a GGUF file that this program reads, or a damaged one; with the names and numbers.
    """
    try:
        with path.open("rb", buffering=0) as file:
            return _parse(_Cursor(path, file))
    except OSError as error:
        raise FormatError(
            Problem("unreadable", f"{path} cannot be read: {error.strerror or error}.", file=str(path))
        ) from None


class _Cursor:
    """The bytes of a header, read on demand: how long it is shows only while parsing."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self.path = path
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        self.buffer = b""
        self.at = 0
        self.items = 0
        self.what = "the header"

    def fail(
        self, kind: str, message: str, *, hint: str | None = None, found: Any = None, wanted: Any = None
    ) -> NoReturn:
        """Refuse the file."""
        raise FormatError(
            Problem(
                kind,
                f"{self.path.name}: {message}",
                file=str(self.path),
                found=found,
                wanted=wanted,
                hint=hint or SPOILT,
            )
        )

    def need(self, count: int) -> None:
        """Have ``count`` bytes from the current position in the buffer."""
        end = self.at + count
        if end <= len(self.buffer):
            return
        if end > self.size:
            self.fail(
                "truncated",
                f"the file ends {end - self.size:,} bytes early, in {self.what} "
                f"(it has {self.size:,} bytes, the header goes on to {end:,} at least).",
                found=self.size,
                wanted=end,
                hint="The download or copy is incomplete; get the file again.",
            )
        if end > MAX_HEADER:
            self.fail("too_large", f"{self.what} reaches beyond {MAX_HEADER >> 20} MB, further than any header does.")
        # Doubling keeps the total work linear; a header is 1–20 MB with a vocabulary and a few kB without.
        wanted = min(self.size, max(end, 2 * len(self.buffer), 256 << 10))
        parts = [self.buffer]
        have = len(self.buffer)
        self.file.seek(have)
        while have < wanted:
            part = self.file.read(wanted - have)
            if not part:
                self.size = have
                return self.need(count)
            parts.append(part)
            have += len(part)
        self.buffer = b"".join(parts)

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        """The next values."""
        self.need(layout.size)
        values = layout.unpack_from(self.buffer, self.at)
        self.at += layout.size
        return values

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        self.need(count)
        self.at += count
        return self.buffer[self.at - count : self.at]

    def string(self) -> str:
        """The next length-prefixed string."""
        (length,) = self.unpack(_U64)
        return self.take(length).decode("utf-8", "surrogateescape")

    def strings(self, count: int) -> StringArray:
        """The next ``count`` strings, not decoded."""
        first = self.at
        starts: array[int] = array("q")
        append, unpack = starts.append, _U64.unpack_from
        at = first
        while len(starts) < count:
            buffer = self.buffer
            try:
                for _ in range(count - len(starts)):
                    (length,) = unpack(buffer, at)
                    append(at - first)
                    at += 8 + length
            except (struct.error, OverflowError, IndexError):  # past the buffer: read on, or find the file too short
                self.at = at
                self.need(8)
        self.at = at
        self.need(0)
        return StringArray(self.buffer[first:at], starts)


_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_TYPE_AND_COUNT = struct.Struct("<IQ")
_TYPE_AND_OFFSET = struct.Struct("<IQ")
_COUNTS = struct.Struct("<QQ")
_SCALARS = {name: struct.Struct("<" + code) for name, (_, code) in SCALARS.items() if code}


def _parse(cursor: _Cursor) -> Header:
    version = _version(cursor)
    tensor_count, value_count = cursor.unpack(_COUNTS)
    left = cursor.size - cursor.at
    if value_count * _LEAST_VALUE + tensor_count * _LEAST_INFO > left:
        cursor.fail(
            "counts",
            f"the header claims {tensor_count:,} tensors and {value_count:,} key-values, which cannot be in the "
            f"{left:,} bytes that follow.",
            hint="The file is damaged or cut.",
        )
    if value_count > MAX_KEYS or tensor_count > MAX_TENSORS:
        cursor.fail("too_large", f"the header claims {tensor_count:,} tensors and {value_count:,} key-values.")
    metadata = _metadata(cursor, value_count)
    infos_at = cursor.at
    cursor.what = "the tensor infos"
    infos = tuple(_info(cursor, number, tensor_count) for number in range(tensor_count))
    alignment = _alignment(cursor, metadata)
    return Header(
        path=cursor.path,
        version=version,
        metadata=metadata,
        infos=infos,
        infos_at=infos_at,
        end=cursor.at,
        alignment=alignment,
        data_start=padded(cursor.at, alignment),
        size=cursor.size,
    )


def _version(cursor: _Cursor) -> int:
    if cursor.size == 0:
        cursor.fail("empty", "the file is empty.")
    magic = cursor.take(min(4, cursor.size))
    if magic in _OLD_MAGICS:
        cursor.fail(
            "old_format",
            f"this is a {_OLD_MAGICS[magic]} file, a predecessor of GGUF (before August 2023).",
            found=magic.decode(),
            wanted="GGUF",
            hint="Convert the original checkpoint, or find a GGUF file of the model.",
        )
    if magic != MAGIC:
        cursor.fail("not_gguf", f"not a GGUF file: it starts with {magic!r}.", found=magic, wanted=MAGIC)
    (version,) = cursor.unpack(_U32)
    if version in (2, 3):
        return int(version)
    if version & 0xFFFF == 0 and version:
        cursor.fail(
            "big_endian",
            f"a big-endian GGUF file (version {int.from_bytes(version.to_bytes(4, 'little'), 'big')}), written for a "
            "machine such as IBM Z.",
            hint="Convert the original checkpoint here, or find the little-endian file.",
        )
    cursor.fail(
        "version",
        f"GGUF version {version}; this program reads versions 2 and 3.",
        found=version,
        wanted=[2, 3],
        hint="Version 1 was in use for a few days of August 2023; find a newer file."
        if version == 1
        else "The file is damaged, or newer than this program: fetch it again, or look for a newer version of convert.",
    )


def _metadata(cursor: _Cursor, count: int) -> KeyValues:
    metadata = KeyValues()
    repeated = []
    for number in range(count):
        cursor.what = f"key-value {number + 1} of {count}"
        key = cursor.string()
        cursor.what = f"the value of {key!r}"
        (type_id,) = cursor.unpack(_U32)
        value = _array(cursor, key) if type_id == ARRAY_ID else _scalar(cursor, key, type_id)
        if key in metadata:
            repeated.append(key)
        metadata.put(key, value)
    if repeated:
        cursor.fail("duplicate_key", f"the key {repeated[0]!r} occurs twice in the header.", found=repeated)
    return metadata


def _scalar(cursor: _Cursor, key: str, type_id: int) -> Value:
    name = NAMES.get(type_id)
    if name is None:
        cursor.fail("value_type", f"{key!r} has the unknown value type {type_id}.", found=type_id)
    if name == "str":
        return Value("str", cursor.string())
    if name == "bool":
        return Value("bool", cursor.take(1) != b"\0")
    (value,) = cursor.unpack(_SCALARS[name])
    return Value(name, shortest(value) if name == "f32" else value)


def _array(cursor: _Cursor, key: str) -> Value:
    of_id, count = cursor.unpack(_TYPE_AND_COUNT)
    name = NAMES.get(of_id)
    if name is None:
        what = "an array of arrays" if of_id == ARRAY_ID else f"an array of the unknown type {of_id}"
        cursor.fail("value_type", f"{key!r} is {what}, which no reader of GGUF accepts.", found=of_id)
    least = 8 if name == "str" else _SCALARS[name].size
    left = cursor.size - cursor.at
    if count * least > left:
        cursor.fail(
            "counts",
            f"{key!r} claims {count:,} items of type {name} ({count * least:,} bytes or more); {left:,} are left.",
            found=count,
            hint="The file is damaged or cut.",
        )
    cursor.items += count
    if cursor.items > MAX_ITEMS:
        cursor.fail("too_large", f"{key!r} makes it more than {MAX_ITEMS:,} items in arrays, which no model has.")
    if name == "str":
        return Value("arr:str", cursor.strings(count))
    raw = cursor.take(count * least)
    if name == "bool":
        return Value("arr:bool", [byte != 0 for byte in raw])
    return Value(f"arr:{name}", list(struct.unpack(f"<{count}{SCALARS[name][1]}", raw)))


def _info(cursor: _Cursor, number: int, count: int) -> TensorInfo:
    cursor.what = f"the name of tensor {number + 1} of {count}"
    name = cursor.string()
    cursor.what = f"the info of {name!r}"
    (n_dims,) = cursor.unpack(_U32)
    if n_dims > MAX_DIMS:
        cursor.fail("dims", f"{name!r} claims {n_dims:,} dimensions; GGUF has {MAX_DIMS} at most.", found=n_dims)
    dims = struct.unpack(f"<{n_dims}Q", cursor.take(8 * n_dims))
    type_id, offset = cursor.unpack(_TYPE_AND_OFFSET)
    return TensorInfo(name, dims, type_id, offset)


def _alignment(cursor: _Cursor, metadata: KeyValues) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    kind = metadata.types.get("general.alignment", "u32")
    if kind != "u32" or alignment <= 0 or alignment & (alignment - 1):
        cursor.fail(
            "alignment",
            f"general.alignment is {alignment!r} ({kind}); it must be a power of two (u32).",
            found=alignment,
        )
    return int(alignment)
