"""TensorFlow's checkpoints (version 2: ``….index`` and ``….data-00000-of-00001``), read without TensorFlow.

The index is a sorted table (:mod:`convert.formats.sstable`) from variable names to small protocol-buffer messages; the
data files hold the values, uncompressed, one after the other. Only the index is read here. Fields and numbers are those
of TensorFlow's ``tensor_bundle.proto``, ``tensor_shape.proto`` and ``types.proto``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from convert.dtypes import DTYPES
from convert.errors import FormatError, Problem
from convert.formats import sstable
from convert.formats.spec import Container, TensorSpec

#: More bytes than the index of any checkpoint of ours has (1558M parameters: 51 KB).
MAX_INDEX = 256 << 20
SUFFIX = ".index"

#: ``DataType`` of types.proto.
_TYPES = {
    1: "F32",
    2: "F64",
    3: "I32",
    4: "U8",
    5: "I16",
    6: "I8",
    8: "C64",
    9: "I64",
    10: "BOOL",
    14: "BF16",
    17: "U16",
    19: "F16",
    22: "U32",
    23: "U64",
}
_STRING = 7
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(slots=True)
class _Entry:
    """``BundleEntryProto``: what the index says of a variable."""

    dtype: int = 0
    shape: list[int] = field(default_factory=list)
    shard: int = 0
    offset: int = 0
    size: int = 0
    slices: int = 0


def read(path: Path) -> Container:
    """Read a checkpoint's index.

    A leading dimension of 1 before a matrix is left out: TensorFlow keeps the weights of a convolution of width 1, as
    which GPT-2 was written, as ``[1, in, out]``.

    Args:
        path: The ``.index`` file; the data files lie beside it.

    Returns:
        A container with the variables in the order in which they are stored. Texts (a graph of objects) are left out
        with a note.

    Raises:
        FormatError: The index or the data files are damaged, or hold what is no plain tensor; all at once.
    """
    size = path.stat().st_size
    if size > MAX_INDEX:
        raise FormatError(Problem("header", f"{path.name} has {size:,} bytes, which no index has.", file=str(path)))
    entries = sstable.read(path, path.read_bytes())
    try:
        count = _shard_count(path, entries.pop(b"", b""))
        found = {name.decode("utf-8", "replace"): _entry(value) for name, value in entries.items()}
    except sstable.Truncated:
        message = f"{path.name} describes a variable in a message that ends too early."
        raise FormatError(Problem("header", message, file=str(path), hint="Fetch the file again.")) from None
    files = [path.with_name(f"{path.name.removesuffix(SUFFIX)}.data-{i:05d}-of-{count:05d}") for i in range(count)]
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise FormatError(
            Problem(
                "missing_file",
                f"{path.name} tells of {count} data files, and {', '.join(missing[:4])} is absent.",
                file=str(path),
                found=count - len(missing),
                wanted=count,
                hint="An incomplete download? Fetch the missing files.",
            )
        )
    return _container(path, files, found)


def _container(path: Path, files: list[Path], found: dict[str, _Entry]) -> Container:
    sizes = [f.stat().st_size for f in files]
    tensors: dict[str, TensorSpec] = {}
    notes, problems = [], []

    def bad(name: str, what: str, hint: str) -> None:
        message = f"{path.name}: the variable {name!r} {what}."
        problems.append(Problem("header", message, tensor=name, file=str(path), hint=hint))

    for name, entry in sorted(found.items(), key=lambda item: (item[1].shard, item[1].offset)):
        kind = _TYPES.get(entry.dtype)
        if entry.dtype == _STRING:
            notes.append(f"{name} holds texts, no weights; it was left alone")
        elif entry.slices:
            bad(name, f"is stored in {entry.slices} slices", "Restore it and save it unpartitioned with TensorFlow.")
        elif kind is None:
            bad(name, f"has the type number {entry.dtype}, which is no plain one", "Cast it in TensorFlow first.")
        elif not 0 <= entry.shard < len(files) or entry.offset + entry.size > sizes[entry.shard]:
            bad(name, "lies beyond the end of its data file", "The download did not finish; fetch the data file again.")
        elif min(entry.shape, default=0) < 0 or DTYPES[kind].nbytes(tuple(entry.shape)) != entry.size:
            bad(name, f"has {entry.size:,} bytes, which {entry.shape} in {kind} has not", "Fetch the index again.")
        else:
            shape = tuple(entry.shape)
            shape = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
            tensors[name] = TensorSpec(name, kind, shape, files[entry.shard], entry.offset)
    if problems:
        raise FormatError(problems)
    return Container("tensorflow", tuple(files), tensors, {}, notes)


def _shard_count(path: Path, header: bytes) -> int:
    """``BundleHeaderProto``: how many data files there are; the bytes of numbers must be in today's order."""
    count, big_endian = 0, False
    for number, kind, value in _fields(header):
        if (number, kind) == (1, _VARINT):
            count = int(value)
        elif (number, kind) == (2, _VARINT):
            big_endian = bool(value)
    if big_endian or not 0 < count < 100_000:
        what = "was written on a machine with the other byte order" if big_endian else "states no number of data files"
        raise FormatError(Problem("header", f"{path.name} {what}.", file=str(path), found=count))
    return count


def _entry(message: bytes) -> _Entry:
    out = _Entry()
    for number, kind, value in _fields(message):
        if kind == _BYTES and number == 2:
            out.shape = [_dimension(v) for n, k, v in _fields(bytes(value)) if (n, k) == (2, _BYTES)]
        elif kind == _BYTES and number == 7:
            out.slices += 1
        elif kind == _VARINT:
            match number:
                case 1:
                    out.dtype = int(value)
                case 3:
                    out.shard = int(value)
                case 4:
                    out.offset = int(value)
                case 5:
                    out.size = int(value)
    return out


def _dimension(message: bytes | int) -> int:
    """``TensorShapeProto.Dim``; an absent size is 0."""
    size = next((int(v) for n, k, v in _fields(bytes(message)) if (n, k) == (1, _VARINT)), 0)
    return size - (1 << 64) if size >> 63 else size


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes | int]]:
    """A protocol-buffer message as ``(field number, wire type, value)``.

    Raises:
        sstable.Truncated: It ends too early, or has a wire type that nobody writes.
    """
    at = 0
    while at < len(message):
        tag, at = sstable.varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = sstable.varint(message, at)
            yield number, kind, value
            continue
        if kind == _BYTES:
            length, at = sstable.varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise sstable.Truncated
        if at + length > len(message):
            raise sstable.Truncated
        yield number, kind, message[at : at + length]
        at += length
