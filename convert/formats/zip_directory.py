"""The directory of a zip archive: names, sizes, CRCs and where the records lie.

Reads the central directory (with zip64) and, on demand, a record's local header; decompresses nothing, for
torch stores its tensors plainly. Every count and offset is checked against the file before it is believed.
Source of the layouts: PKWARE's APPNOTE 6.3, sections 4.3.7 to 4.3.16 and 4.5.3.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from convert.errors import FormatError, Problem

#: 250,000 records need about 150 MB here; the largest models have 40,000 tensors in all their files.
MAX_ENTRIES = 250_000
MAX_DIRECTORY = 64 << 20

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_LOCATOR = struct.Struct("<IIQI")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCAL_MAGIC, _CENTRAL_MAGIC, _END_MAGIC = 0x04034B50, 0x02014B50, 0x06054B50
_LOCATOR_MAGIC, _END64_MAGIC = 0x07064B50, 0x06064B50
_FULL32, _FULL16 = 0xFFFFFFFF, 0xFFFF
_ENCRYPTED = 0x61  # encrypted, patched, strongly encrypted: section 4.4.4


@dataclass(slots=True)
class ZipEntry:
    """One record.

    Attributes:
        name: Its name in the archive.
        header: Byte offset of its local header.
        size: Bytes of its data.
        crc: The CRC-32 that the directory states (0 where the writer computed none).
        method: 0 for plainly stored data.
        encrypted: Whether the record is encrypted.
    """

    name: str
    header: int
    size: int
    crc: int
    method: int
    encrypted: bool


class ZipDirectory:
    """The records of the archive in an open file.

    Args:
        file: Opened in binary mode, unbuffered; read by position, and not closed here.
        path: For error messages.

    Attributes:
        entries: Every record by name, in file order; none overlaps the next or the directory.
        start: Byte offset of the central directory.

    Raises:
        FormatError: Truncated, damaged, duplicate or overlapping records, several disks.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._size = file.seek(0, os.SEEK_END)
        count, length, self.start = self._find_end()
        self.entries = self._read_entries(count, length)
        self._check_order()

    def error(self, kind: str, message: str, hint: str | None = None, **more: Any) -> FormatError:
        """A finding about this archive."""
        return FormatError(Problem(kind, f"{self._path.name} {message}", file=str(self._path), hint=hint, **more))

    def _truncated(self, why: str) -> FormatError:
        return self.error(
            "truncated",
            f"is a zip archive that is incomplete or damaged: {why} (the file has {self._size:,} bytes).",
            "Download or copy it again.",
        )

    def _not_plain(self, entry: ZipEntry) -> FormatError:
        return self.error(
            "compressed",
            f"stores {entry.name[:200]!r} {'encrypted' if entry.encrypted else 'compressed'}; "
            "torch.save stores records plainly.",
            "Unpack the archive and pack it without compression (zip -0), or save it again with torch.save.",
            found=f"zip method {entry.method}",
            wanted="zip method 0 (stored)",
        )

    def _at(self, offset: int, count: int) -> bytes:
        self._file.seek(offset)
        parts = []
        while count and (part := self._file.read(count)):
            parts.append(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _find_end(self) -> tuple[int, int, int]:
        """Records, bytes and offset of the central directory."""
        window = min(self._size, _END.size + _FULL16)
        tail = self._at(self._size - window, window)
        at = len(tail)
        while (at := tail.rfind(b"PK\x05\x06", 0, at)) >= 0:
            if at + _END.size <= len(tail) and _END.unpack_from(tail, at)[7] == len(tail) - at - _END.size:
                break
        if at < 0:
            raise self._truncated("its directory, which ends the file, is missing")
        _, disk, first_disk, here, count, length, start, _ = _END.unpack_from(tail, at)
        end = self._size - window + at
        locator = self._at(end - _LOCATOR.size, _LOCATOR.size) if end >= _LOCATOR.size else b""
        if len(locator) == _LOCATOR.size and _LOCATOR.unpack(locator)[0] == _LOCATOR_MAGIC:
            _, disk, where, disks = _LOCATOR.unpack(locator)
            if disk or disks > 1:
                raise self._in_parts()
            if where + _END64.size + _LOCATOR.size != end:
                raise self._truncated("its zip64 end record lies outside the file, or not where it ends")
            fields = _END64.unpack(self._at(where, _END64.size))
            if fields[0] != _END64_MAGIC:
                raise self._truncated("its zip64 end record is not where it should be")
            disk, first_disk, here, count, length, start = fields[4:]
            end = where
        if disk or first_disk or here != count:
            raise self._in_parts()
        if start + length > end:
            raise self._truncated("its directory lies outside the file")
        if start + length < end:  # Python's zipfile would then look for it in another place
            raise self._truncated("bytes lie between its directory and its end")
        if count > MAX_ENTRIES or length > MAX_DIRECTORY:
            raise self.error("zip", f"lists {count:,} records ({length:,} bytes), more than any checkpoint has.")
        if count * _CENTRAL.size > length:
            raise self._truncated(f"its directory of {length:,} bytes cannot list {count:,} records")
        return count, length, start

    def _in_parts(self) -> FormatError:
        return self.error("zip", "is one part of a zip archive on several disks.", "Join the parts first.")

    def _read_entries(self, count: int, length: int) -> dict[str, ZipEntry]:
        data = self._at(self.start, length)
        if len(data) != length:
            raise self._truncated("its directory is cut")
        entries: dict[str, ZipEntry] = {}
        at = 0
        for _ in range(count):
            if at + _CENTRAL.size > length:
                raise self._truncated("its directory is cut")
            fields = _CENTRAL.unpack_from(data, at)
            flags, method, crc, packed, size, names, extras, comment = fields[3:5] + fields[7:13]
            header = fields[16]
            at += _CENTRAL.size
            if fields[0] != _CENTRAL_MAGIC or at + names + extras + comment > length:
                raise self._truncated("a directory record is damaged")
            try:
                name = str(data[at : at + names], "utf-8" if flags & 0x800 else "cp437")
            except UnicodeDecodeError:
                raise self._truncated("a record's name is no UTF-8") from None
            extra = data[at + names : at + names + extras]
            if not _whole_fields(extra):
                raise self._truncated(f"the extra fields of record {name[:200]!r} are damaged")
            if _FULL32 in (packed, size, header):
                size, packed, header = self._zip64(extra, size, packed, header)
            at += names + extras + comment
            if ".." in name or name[:1] == "/":
                self._check_name(name)
            if name in entries:
                raise self.error(
                    "duplicate", f"lists the record {name[:200]!r} twice.", "Save it again with torch.save."
                )
            if method == 0 and packed != size:
                raise self._truncated(f"record {name[:200]!r} is stored plainly but has two sizes")
            entries[name] = entry = ZipEntry(name, header, packed, crc, method, bool(flags & _ENCRYPTED))
            if entry.encrypted:
                raise self._not_plain(entry)
        if at != length:  # other readers go on to its end
            raise self._truncated("its directory lists more records than it says")
        return entries

    def _check_name(self, name: str) -> None:
        """Nothing is unpacked here; what would land elsewhere when unpacked was not written by torch."""
        if name.startswith("/") or ".." in name.replace("\\", "/").split("/"):
            raise self.error(
                "zip",
                f"lists the record {name[:200]!r}, which lies outside the archive: torch.save writes no such names.",
                "Do not unpack it; get the weights from somebody you trust.",
            )

    def _zip64(self, extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
        """The 64-bit numbers that replace those which are all ones, in this order."""
        at = 0
        while at + 4 <= len(extra):
            kind, count = struct.unpack_from("<HH", extra, at)
            at += 4
            if kind == 1:
                wide = list(struct.unpack_from(f"<{min(count, len(extra) - at) // 8}Q", extra, at))
                values = []
                for value in (size, packed, header):
                    if value == _FULL32 and not wide:
                        break
                    values.append(wide.pop(0) if value == _FULL32 else value)
                else:
                    return values[0], values[1], values[2]
                break
            at += count
        raise self._truncated("a large record lacks its zip64 sizes")

    def _check_order(self) -> None:
        """Records must follow each other without overlap, all before the directory."""
        ordered = sorted(self.entries.values(), key=lambda entry: entry.header)
        for entry, after in zip(ordered, [*(e.header for e in ordered[1:]), self.start], strict=True):
            if entry.header + _LOCAL.size + len(entry.name) + entry.size > after:
                raise self.error(
                    "overlap",
                    f"is damaged: record {entry.name[:200]!r} ({entry.size:,} bytes at {entry.header:,}) reaches "
                    f"beyond {after:,}, where the next one begins.",
                    "Download or copy it again.",
                    found=entry.header + entry.size,
                    wanted=f"at most {after}",
                )

    def data_offset(self, entry: ZipEntry) -> int:
        """Absolute byte offset of a record's data.

        Raises:
            FormatError: The record is compressed or encrypted, or its local header contradicts the directory.
        """
        if entry.method or entry.encrypted:
            raise self._not_plain(entry)
        wide = entry.name.encode()
        raw = self._at(entry.header, _LOCAL.size + len(wide))
        if len(raw) < _LOCAL.size:
            raise self._truncated(f"record {entry.name[:200]!r} lies outside the file")
        fields = _LOCAL.unpack_from(raw)
        name = raw[_LOCAL.size : _LOCAL.size + fields[9]]  # in the directory's encoding, which is one of two
        if fields[0] != _LOCAL_MAGIC or not (name == wide or _same_name(name, entry.name)):
            raise self._truncated(f"record {entry.name[:200]!r} is not where the directory says ({entry.header:,})")
        offset = entry.header + _LOCAL.size + fields[9] + fields[10]
        if offset + entry.size > self.start:
            raise self._truncated(f"record {entry.name[:200]!r} reaches into the directory")
        return offset

    def read(self, entry: ZipEntry) -> bytes:
        """A small record's data."""
        data = self._at(self.data_offset(entry), entry.size)
        if len(data) != entry.size:
            raise self._truncated(f"record {entry.name[:200]!r} is cut")
        return data


def _same_name(raw: bytes, name: str) -> bool:
    """Whether bytes are a name in the encoding of names without the flag for UTF-8."""
    try:
        return raw == name.encode("cp437")
    except UnicodeEncodeError:
        return False


def _whole_fields(extra: bytes) -> bool:
    """Whether a record's extra fields (kind, length, bytes) all end within them, as other readers demand."""
    at = 0
    while at + 4 <= len(extra):
        at += 4 + int.from_bytes(extra[at + 2 : at + 4], "little")
    return at <= len(extra)
