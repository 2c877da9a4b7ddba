"""Lays out GGUF files: where every byte goes, before any tensor is read.

Version 3, little endian. The result is a :class:`~convert.formats.spec.FileLayout`; the engine writes the bytes. What
metadata a model needs is decided elsewhere. Constraints checked here are those of ggml's own reader, so that a
file which cannot be loaded is not written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

from convert.dtypes import DTYPES
from convert.errors import ConvertError, Problem
from convert.formats.gguf import MAX_NAME, SPLIT_KEYS, split_name
from convert.formats.gguf_header import DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, padded
from convert.formats.gguf_values import I32, U16, U32, KeyValues, Value, encode, encode_string
from convert.formats.spec import Entry, FileLayout
from convert.ggml import TYPE_IDS

VERSION = 3
_HEAD = len(MAGIC) + 4 + 8 + 8


def layout(
    name: str,
    entries: Sequence[Entry],
    metadata: KeyValues | Mapping[str, Value],
    *,
    alignment: int = DEFAULT_ALIGNMENT,
) -> FileLayout:
    """The layout of one GGUF file.

    Args:
        name: The file's name, relative to the output folder.
        entries: The tensors in file order, shapes in torch order.
        metadata: The key-values in file order, typed. ``general.alignment`` is added when it is not 32.
        alignment: Alignment of tensor data in bytes, a power of two.

    Raises:
        ConvertError: All problems: names that ggml cannot hold, types it does not have, duplicate names, more than
            four dimensions, rows that are not whole blocks, values that do not fit their type.
    """
    values = _values(metadata, alignment)
    _check(entries)
    return _layout(name, entries, _encode(values), len(values), alignment)


def split_layouts(
    name: str,
    entries: Sequence[Entry],
    metadata: KeyValues | Mapping[str, Value],
    *,
    max_size: int,
    alignment: int = DEFAULT_ALIGNMENT,
) -> list[FileLayout]:
    """The layouts of a model in files of at most ``max_size`` bytes.

    llama.cpp's scheme: ``NAME-00001-of-0000N.gguf``; the first file has all key-values, the others only the
    three ``split.*`` ones. A single tensor larger than ``max_size`` gets a file of its own. When everything fits into
    one file, that is an ordinary file called ``name``.

    Args:
        name: The name of the unsplit file, ``NAME.gguf``.
        entries: See :func:`layout`.
        metadata: See :func:`layout`.
        max_size: Bytes per file, header included.
        alignment: See :func:`layout`.

    Raises:
        ConvertError: As :func:`layout`; and more than 65,535 files.
    """
    values = _values(metadata, alignment)
    for key in SPLIT_KEYS:
        values.drop(key)
    _check(entries)
    whole = _layout(name, entries, _encode(values), len(values), alignment)
    if whole.size <= max_size:
        return [whole]
    # The counters have fixed widths, so their bytes can be counted before their values are known.
    first_bytes = len(_encode(values)) + len(_encode(_split_values(0, 0, 0)))
    pieces = _group(entries, max_size, first_bytes, len(_encode(_split_values(0, 0, 0))), alignment)
    if len(pieces) > 0xFFFF:
        raise ConvertError(
            Problem(
                "split",
                f"{name} would become {len(pieces):,} files of {max_size:,} bytes; GGUF counts to 65,535.",
                hint="Allow larger files.",
            )
        )
    stem = name.removesuffix(".gguf")
    layouts = []
    for number, piece in enumerate(pieces):
        counters = _split_values(number, len(pieces), len(entries))
        if number == 0:
            for key, value in counters.typed():
                values.put(key, value)
            counters = values
        elif alignment != DEFAULT_ALIGNMENT:
            counters.put("general.alignment", U32(alignment))
        file = split_name(stem, number, len(pieces))
        layouts.append(_layout(file, piece, _encode(counters), len(counters), alignment))
    return layouts


def _values(metadata: KeyValues | Mapping[str, Value], alignment: int) -> KeyValues:
    if alignment <= 0 or alignment & (alignment - 1):
        raise ConvertError(Problem("alignment", f"an alignment of {alignment} is not a power of two."))
    values = metadata.copy() if isinstance(metadata, KeyValues) else KeyValues(metadata)
    values.drop("general.alignment")
    if alignment != DEFAULT_ALIGNMENT:
        values.put("general.alignment", U32(alignment))
    return values


def _split_values(number: int, count: int, tensors: int) -> KeyValues:
    return KeyValues({"split.no": U16(number), "split.count": U16(count), "split.tensors.count": I32(tensors)})


def _encode(values: KeyValues) -> bytes:
    parts, problems = [], []
    for key, value in values.typed():
        try:
            parts.append(encode(key, value))
        except ValueError as error:
            problems.append(Problem("metadata", f"the metadata value {error}.", found=str(value.value)[:200]))
    if problems:
        raise ConvertError(problems)
    return b"".join(parts)


def _check(entries: Sequence[Entry]) -> None:
    problems = []
    seen: set[str] = set()
    for entry in entries:
        name, row = entry.name, entry.shape[-1] if entry.shape else 1
        size = len(name.encode("utf-8", "surrogateescape"))
        if size > MAX_NAME:
            problems.append(_problem(entry, f"a name of {size} bytes; ggml holds {MAX_NAME}", found=size))
        if name in seen:
            problems.append(_problem(entry, "a name that another tensor has"))
        seen.add(name)
        if len(entry.shape) > MAX_DIMS:
            problems.append(_problem(entry, f"{len(entry.shape)} dimensions; GGUF holds {MAX_DIMS}"))
        if entry.dtype not in TYPE_IDS:
            problems.append(_problem(entry, f"the type {entry.dtype}, which GGUF does not have", found=entry.dtype))
        elif row % DTYPES[entry.dtype].block:
            block = DTYPES[entry.dtype].block
            problems.append(
                _problem(entry, f"rows of {row:,} elements, not a multiple of the {entry.dtype} block of {block}")
            )
    if problems:
        raise ConvertError(problems)


def _problem(entry: Entry, what: str, *, found: object = None) -> Problem:
    return Problem("gguf", f"{entry.name!r} cannot be written to GGUF: it has {what}.", tensor=entry.name, found=found)


def _info(entry: Entry, offset: int) -> bytes:
    dims = tuple(reversed(entry.shape))
    head = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return encode_string(entry.name) + head + struct.pack("<IQ", TYPE_IDS[entry.dtype], offset)


def _data_bytes(entry: Entry, alignment: int) -> int:
    return padded(entry.nbytes, alignment)


def _layout(name: str, entries: Sequence[Entry], values: bytes, count: int, alignment: int) -> FileLayout:
    relative, infos, at = [], [], 0
    for entry in entries:
        relative.append(at)
        infos.append(_info(entry, at))
        at += _data_bytes(entry, alignment)
    head = MAGIC + struct.pack("<IQQ", VERSION, len(entries), count) + values + b"".join(infos)
    start = padded(len(head), alignment)
    head += bytes(start - len(head))
    offsets = {entry.name: start + offset for entry, offset in zip(entries, relative, strict=True)}

    def frame(_: dict[str, int]) -> Iterable[tuple[int, bytes]]:
        yield 0, head
        yield from _gaps(entries, offsets, alignment)

    return FileLayout(name=name, format="gguf", size=start + at, offsets=offsets, entries=tuple(entries), frame=frame)


def _gaps(entries: Sequence[Entry], offsets: Mapping[str, int], alignment: int) -> Iterator[tuple[int, bytes]]:
    """The zeros after each tensor, the last one's included (ggml's reader wants that)."""
    for entry in entries:
        size = entry.nbytes
        gap = _data_bytes(entry, alignment) - size
        if gap:
            yield offsets[entry.name] + size, bytes(gap)


def _group(
    entries: Sequence[Entry], max_size: int, first_bytes: int, other_bytes: int, alignment: int
) -> list[list[Entry]]:
    """Consecutive tensors file by file; the first file may hold none when the vocabulary fills it."""
    if alignment != DEFAULT_ALIGNMENT:
        other_bytes += len(encode("general.alignment", U32(alignment)))
    pieces: list[list[Entry]] = [[]]
    header, data = _HEAD + first_bytes, 0
    for entry in entries:
        header += len(_info(entry, 0))
        data += _data_bytes(entry, alignment)
        if padded(header, alignment) + data > max_size and (pieces[-1] or len(pieces) == 1):
            pieces.append([])
            header, data = _HEAD + other_bytes + len(_info(entry, 0)), _data_bytes(entry, alignment)
        pieces[-1].append(entry)
    return pieces
