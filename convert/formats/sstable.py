"""Sorted tables of strings as LevelDB and TensorFlow store them: every key with its value, checksums compared.

Reads whole small tables (the index of a checkpoint); it seeks nothing, writes nothing and knows no meaning of keys or
values. Source of the facts: LevelDB's ``doc/table_format.md``; blocks and their trailers are the same in TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from convert.errors import FormatError, Problem

#: The last eight bytes of every table.
MAGIC = bytes.fromhex("57fb808b247547db")
#: Two block handles of at most 20 bytes each, and the magic.
_FOOTER = 48
#: After each block: one byte for its compression, four for its checksum.
_TRAILER = 5
_CASTAGNOLI = 0x82F63B78
_MASK_DELTA = 0xA282EAD8


class Truncated(Exception):
    """A number or text goes on beyond the end of its bytes; callers turn it into a :class:`FormatError`."""


def read(path: Path, data: bytes) -> dict[bytes, bytes]:
    """Every key and value of a table.

    Args:
        path: The file, for messages.
        data: All of its bytes.

    Raises:
        FormatError: It is no table, is damaged, or its blocks are compressed.
    """
    if len(data) < _FOOTER or not data.endswith(MAGIC):
        raise _broken(path, "does not end as a table of TensorFlow or LevelDB does")
    try:
        _, at = _handle(data, len(data) - _FOOTER)  # a table of statistics, not needed
        index, _ = _handle(data, at)
        out: dict[bytes, bytes] = {}
        for _, handle in _entries(_block(path, data, *index)):
            for key, value in _entries(_block(path, data, *_handle(handle, 0)[0])):
                out[key] = value
    except Truncated:
        raise _broken(path, "holds a block that ends within an entry") from None
    return out


def varint(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned number in groups of seven bits, lowest first, and where it ends.

    Raises:
        Truncated: The bytes end first, or the number has more than 64 bits.
    """
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise Truncated


def crc32c(data: bytes) -> int:
    """The CRC-32 with Castagnoli's polynomial."""
    table = _table()
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """A checksum as it is stored, so that checksums of data with checksums in it stay good ones."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    out = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ _CASTAGNOLI if byte & 1 else byte >> 1
        out.append(byte)
    return tuple(out)


def _handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    """A block's offset and size, and where this statement of them ends."""
    offset, at = varint(data, at)
    size, at = varint(data, at)
    return (offset, size), at


def _block(path: Path, data: bytes, offset: int, size: int) -> bytes:
    """A block's content without its trailer."""
    end = offset + size
    if end + _TRAILER > len(data):
        raise _broken(path, f"has {len(data):,} bytes, but a block reaches to {end + _TRAILER:,}")
    stored = int.from_bytes(data[end + 1 : end + _TRAILER], "little")
    if masked(crc32c(data[offset : end + 1])) != stored:
        raise _broken(path, f"has a block at byte {offset:,} whose checksum does not fit")
    if data[end]:
        raise FormatError(
            Problem(
                "compressed",
                f"{path.name} has compressed blocks (kind {data[end]}), which are not read here.",
                file=str(path),
                found=data[end],
                wanted=0,
                hint="TensorFlow stopped writing them in version 1.2; restore and save it once with a newer one.",
            )
        )
    return data[offset:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The block's keys and values; each key states how much of the one before it goes on to be its beginning."""
    if len(block) < 4:
        raise Truncated
    restarts = int.from_bytes(block[-4:], "little")
    stop = len(block) - 4 - 4 * restarts
    if stop < 0:
        raise Truncated
    at, key = 0, b""
    while at < stop:
        shared, at = varint(block, at)
        fresh, at = varint(block, at)
        length, at = varint(block, at)
        if shared > len(key) or at + fresh + length > stop:
            raise Truncated
        key = key[:shared] + block[at : at + fresh]
        at += fresh
        yield key, block[at : at + length]
        at += length


def _broken(path: Path, what: str) -> FormatError:
    return FormatError(
        Problem(
            "header",
            f"{path.name} {what}.",
            file=str(path),
            hint="The file is truncated or damaged, or no index of a checkpoint; fetch it again.",
        )
    )
