"""Lays out ``.pth`` files that ``torch.load(weights_only=True)`` accepts, without torch.

:func:`layout` knows every byte position before any data exists: the tensors are written in place by the
engine, which hands their CRC-32s back, and :attr:`FileLayout.frame` gives all other bytes. The state dict is
flat, every tensor has its own storage, storages begin at multiples of 64 bytes (as torch writes them, so that
``mmap=True`` works), and sizes beyond 4 GB use zip64. Sources of the layouts: PKWARE's APPNOTE 6.3, and what
``torch.save`` of torch 2.13 writes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha1
from pathlib import PurePath

from convert.errors import ConvertError, Problem
from convert.formats.pickle_writer import TORCH_NAMES, PickleWriter, text
from convert.formats.spec import Entry, FileLayout

ALIGNMENT = 64
#: Numbers from here on need zip64 (a 32-bit field of all ones means "see the zip64 extra field").
ZIP64_FROM = 0xFFFFFFFF
_ZIP64_COUNT = 0xFFFF

_UTF8 = 0x800
_LOCAL_SIZE = 30


@dataclass(slots=True)
class _Record:
    """One record of the archive: small ones carry their data, tensors their name."""

    name: bytes
    size: int
    data: bytes | None = None
    tensor: str | None = None
    offset: int = 0
    header_size: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.header_size + self.size

    def crc(self, crcs: dict[str, int]) -> int:
        """The CRC-32 of its data; a tensor's comes from ``crcs``."""
        if self.data is not None:
            return zlib.crc32(self.data)
        return crcs[self.tensor] if self.tensor is not None and self.size else 0


def layout(name: str, entries: Sequence[Entry], *, bare: bool = False) -> FileLayout:
    """Plan a torch zip file.

    Args:
        name: File name relative to the output folder; the archive's root folder is its stem.
        entries: The tensors, in the order of the state dict.
        bare: The object is the one tensor that there is, not a state dict.

    Returns:
        A layout that needs CRCs: ``frame({tensor: crc32})`` yields ``(offset, bytes)`` for all bytes that are
        not tensor data, one record header at a time.

    Raises:
        ConvertError: A type that torch cannot hold (block-quantised types), or a name given twice.
    """
    _check(name, entries)
    root = PurePath(name).stem or "archive"
    tree = b"\x80\x02" + PickleWriter().tensor("0", entries[0]) + b"." if bare else _state_dict(entries)
    records = [_small(root, "data.pkl", tree)]
    records += [_small(root, ".format_version", b"1"), _small(root, ".storage_alignment", b"%d" % ALIGNMENT)]
    records.append(_small(root, "byteorder", b"little"))
    tensors = [
        _Record(f"{root}/data/{index}".encode(), entry.nbytes, tensor=entry.name) for index, entry in enumerate(entries)
    ]
    records += tensors
    records.append(_small(root, "version", b"3\n"))
    # torch names the file by a hash of its records; ours is of the plan, so that equal plans give equal bytes.
    identity = sha1(records[0].data or b"", usedforsecurity=False).hexdigest()
    records.append(_small(root, ".data/serialization_id", f"{int(identity[:16], 16):020d}{'0' * 20}".encode()))
    position = 0
    for record in records:
        record.offset = position
        record.header_size = len(_local(record, 0))
        position = record.end
    directory = sum(len(_central(record, 0)) for record in records)
    size = position + directory + len(_end(len(records), directory, position))

    def frame(crcs: dict[str, int]) -> Iterator[tuple[int, bytes]]:
        central = bytearray()
        for record in records:
            crc = record.crc(crcs)
            yield record.offset, _local(record, crc) + (record.data or b"")
            central += _central(record, crc)
        yield position, bytes(central) + _end(len(records), len(central), position)

    return FileLayout(
        name=name,
        format="torch",
        size=size,
        offsets={entry.name: t.offset + t.header_size for entry, t in zip(entries, tensors, strict=True)},
        entries=tuple(entries),
        frame=frame,
        needs_crc=True,
    )


def _check(name: str, entries: Sequence[Entry]) -> None:
    problems = []
    seen: set[str] = set()
    for entry in entries:
        if entry.dtype not in TORCH_NAMES:
            hint = "Choose --dtype float32, float16 or bfloat16."
            message = f"torch has no element type {entry.dtype}; {entry.name!r} cannot be stored in {name}."
            problems.append(Problem("dtype", message, tensor=entry.name, file=name, found=entry.dtype, hint=hint))
        if entry.name in seen:
            message = f"{entry.name!r} would be stored twice in {name}."
            problems.append(Problem("duplicate", message, tensor=entry.name, file=name))
        seen.add(entry.name)
    if problems:
        raise ConvertError(problems)


def _small(root: str, name: str, data: bytes) -> _Record:
    return _Record(f"{root}/{name}".encode(), len(data), data=data)


# --- zip ---------------------------------------------------------------------------------------------------


def _flags(record: _Record) -> int:
    return 0 if record.name.isascii() else _UTF8


def _local(record: _Record, crc: int) -> bytes:
    """The local header, padded by an extra field so that the data is aligned."""
    wide = record.size >= ZIP64_FROM
    extra = struct.pack("<HHQQ", 1, 16, record.size, record.size) if wide else b""
    fixed = _LOCAL_SIZE + len(record.name) + len(extra) + 4
    padding = -(record.offset + fixed) % ALIGNMENT
    extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
    size = 0xFFFFFFFF if wide else record.size
    version = 45 if wide else 20
    return (
        struct.pack(
            "<IHHHHHIIIHH",
            0x04034B50,
            version,
            _flags(record),
            0,  # stored
            0,
            0x21,  # 1980-01-01: equal plans give equal bytes
            crc,
            size,
            size,
            len(record.name),
            len(extra),
        )
        + record.name
        + extra
    )


def _central(record: _Record, crc: int) -> bytes:
    """The directory's entry."""
    wide = [record.size, record.size] if record.size >= ZIP64_FROM else []
    size = 0xFFFFFFFF if wide else record.size
    header = record.offset
    if header >= ZIP64_FROM:
        wide.append(header)
        header = 0xFFFFFFFF
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version = 45 if wide else 20
    return (
        struct.pack(
            "<IHHHHHHIIIHHHHHII",
            0x02014B50,
            version,
            version,
            _flags(record),
            0,
            0,
            0x21,
            crc,
            size,
            size,
            len(record.name),
            len(extra),
            0,
            0,
            0,
            0,
            header,
        )
        + record.name
        + extra
    )


def _end(count: int, length: int, start: int) -> bytes:
    """The end of the directory, with the zip64 records where a number needs them."""
    wide = b""
    if count >= _ZIP64_COUNT or length >= ZIP64_FROM or start >= ZIP64_FROM:
        wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, length, start)
        wide += struct.pack("<IIQI", 0x07064B50, 0, start + length, 1)
        count, length, start = min(count, 0xFFFF), 0xFFFFFFFF, 0xFFFFFFFF
    return wide + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, length, start, 0)


def _state_dict(entries: Iterable[Entry]) -> bytes:
    writer = PickleWriter()
    parts = [b"\x80\x02", writer.once("OrderedDict", b"ccollections\nOrderedDict\n"), b")R("]
    for index, entry in enumerate(entries):
        parts += [text(entry.name), writer.tensor(str(index), entry)]
    return b"".join([*parts, b"u."])
