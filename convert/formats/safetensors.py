"""The safetensors container: header reader and writer.

The header is read by our own code, because a mistake in it must be named and because it is all that is needed:
an 8-byte little-endian length, that many bytes of JSON, then the data without gaps (safetensors' own format
description). No tensor data is read here.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.dtypes import DTYPES
from convert.errors import FormatError, Problem
from convert.formats.spec import Container, Entry, FileLayout, TensorSpec

#: The limit of the safetensors library on a header's length.
MAX_HEADER = 100_000_000
#: More tensors than any file has (the largest models have 200,000, in a hundred files). Of a JSON text that says more
#: no objects are made, which would take thirty times its bytes.
MAX_TENSORS = 100_000
_MAX_MARKS = {b"{": 1, b"[": 2, b",": 8, b'"': 16}
_MAX_DIMS = 64
_MAX_NAME = 10_000
_SPOILT = "The file is damaged or was written wrongly: fetch it again, or save it again with safetensors."
_UNKNOWN = (
    "The file may be whole, but nothing here reads that type: cast or dequantise the tensors with the library that "
    "wrote them, or take the unquantised model."
)


def read(path: Path) -> Container:
    """Read the header of one safetensors file.

    Returns:
        A container whose tensors are in file order, checked to lie in the file without gap or overlap.

    Raises:
        FormatError: Every way in which the header and the file do not fit, all at once.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if len(start) < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
            raise _broken(
                path,
                f"states a header of {length:,} bytes, but {max(size - 8, 0):,} follow and {MAX_HEADER:,} is the limit",
                "The file is truncated or is no safetensors file; fetch it again.",
            )
        header = _parse(path, file.read(length))
    metadata = header.pop("__metadata__", {}) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _broken(path, "has a __metadata__ that is not a map of strings", "Rewrite the file with safetensors.")
    tensors, spare, problems = _tensors(path, header, 8 + length)
    if spare is not None:
        problems += _coverage(path, tensors, spare, 8 + length, size)
    if problems:
        raise FormatError(problems)
    return Container("safetensors", (path,), tensors, metadata)


def _broken(path: Path, what: str, hint: str, tensor: str | None = None) -> FormatError:
    return FormatError(Problem("header", f"{path.name} {what}.", tensor=tensor, file=str(path), hint=hint))


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            names = [k for k, _ in items]
            twice = next(k for k in found if names.count(k) > 1)
            raise _broken(
                path, f"names {twice!r} twice in its header", "Rewrite the file; one of the two would win silently."
            )
        return found

    if any(raw.count(mark) > MAX_TENSORS * count + 10_000 for mark, count in _MAX_MARKS.items()):
        raise _broken(
            path, f"has a header of more than {MAX_TENSORS:,} tensors", "No checkpoint has that many in one file."
        )
    odd = _whole if b"-0" in raw else None  # a hook for every number takes time
    escaped = b"\\u" in raw
    try:
        text = raw.decode("utf-8")
        del raw  # of 100 MB of one string there would be three copies, which is more than a header may take
        header = json.loads(text, object_pairs_hook=pairs, parse_constant=lambda c: None, parse_int=odd)
        if escaped:
            json.dumps(header, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise _broken(path, f"has a header that is not JSON ({error})", "Fetch the file again.") from None
    if not isinstance(header, dict):
        raise _broken(path, "has a header that is not a JSON object", "Fetch the file again.")
    return header


def _whole(text: str) -> int | None:
    """A whole number of the header; the safetensors library takes -0 for a fraction and refuses it."""
    return int(text) if text != "-0" else None


_Span = tuple[int, int, str]


def _tensors(
    path: Path, header: Mapping[str, Any], base: int
) -> tuple[dict[str, TensorSpec], list[_Span] | None, list[Problem]]:
    """The readable tensors by offset, where the others lie (None: one of them does not say), and what is wrong."""
    tensors: dict[str, TensorSpec] = {}
    spare: list[_Span] = []
    placed = True
    problems: list[Problem] = []
    begin: Any = None
    end: Any = None

    def bad(name: str, what: str, hint: str = _SPOILT) -> None:
        nonlocal placed
        problems.append(Problem("header", f"{path.name}: {name!r} {what}.", tensor=name, file=str(path), hint=hint))
        if _is_count(begin) and _is_count(end) and begin <= end:
            spare.append((base + begin, base + end, name))
        else:
            placed = False

    for name, value in header.items():
        begin = end = None
        try:
            kind, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        except (TypeError, KeyError, ValueError):
            bad(name, "lacks dtype, shape or two data_offsets")
            continue
        if type(kind) is not str or kind not in DTYPES or DTYPES[kind].block > 1:
            bad(name, f"has the unknown dtype {kind!r:.200}", _UNKNOWN)
            continue
        if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_is_count, shape)):
            bad(name, f"has the impossible shape {shape!r:.200}")
            continue
        if not _is_count(begin) or not _is_count(end) or begin > end:
            bad(name, f"has the impossible data_offsets {[begin, end]!r:.200}")
            continue
        if len(name) > _MAX_NAME:
            bad(name[:100], f"has a name of {len(name):,} letters")
            continue
        want = math.prod(shape) * DTYPES[kind].block_bytes
        if end - begin != want:
            needs = f"{want:,}" if want < 1 << 64 else "more than 2^64"
            bad(name, f"takes {end - begin:,} bytes, but {kind} {shape!r:.200} needs {needs}")
            continue
        tensors[name] = TensorSpec(name, kind, tuple(shape), path, base + begin)
    return dict(sorted(tensors.items(), key=lambda item: item[1].offset)), spare if placed else None, problems


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _coverage(path: Path, tensors: Mapping[str, TensorSpec], spare: list[_Span], base: int, size: int) -> list[Problem]:
    """Data, also that of tensors that are not readable, must lie one after the other from the header to the end."""
    at, problems = base, []
    spans = [(spec.offset, spec.offset + spec.nbytes, name) for name, spec in tensors.items()]
    for begin, end, name in sorted([*spans, *spare], key=lambda span: span[0]) if spare else spans:
        if begin != at:
            word = "overlaps the tensor before it" if begin < at else f"leaves a gap of {begin - at:,} bytes"
            what = f"{path.name}: {name!r} {word}."
            problems.append(Problem("header", what, tensor=name, file=str(path), hint=_SPOILT))
        at = end
    if at != size and not problems:
        what = f"ends {at - size:,} bytes early" if at > size else f"has {size - at:,} bytes too many"
        problems.append(
            Problem(
                "truncated" if at > size else "header",
                f"{path.name} {what}: it has {size:,} bytes and its header describes {at:,}.",
                file=str(path),
                found=size,
                wanted=at,
                hint="The download or copy did not finish; fetch the file again.",
            )
        )
    return problems


def layout(name: str, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """Plan a safetensors file.

    Args:
        name: File name, relative to the output.
        entries: The tensors in the order in which their data is to lie.
        metadata: More for ``__metadata__``; ``format: pt`` is always there, as transformers requires it.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offsets: dict[str, int] = {}
    at = 0
    for entry in entries:
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, at + entry.nbytes]}
        offsets[entry.name] = at
        at += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)

    def frame(_: dict[str, int]) -> Iterable[tuple[int, bytes]]:
        yield 0, struct.pack("<Q", len(text)) + text

    return FileLayout(
        name=name,
        format="safetensors",
        size=base + at,
        offsets={k: base + v for k, v in offsets.items()},
        entries=tuple(entries),
        frame=frame,
    )
