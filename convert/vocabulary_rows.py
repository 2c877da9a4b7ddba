"""Rows of the embedding and of the head that stand for no token: all zeros, or all the same as each other.

Padding of the vocabulary and tokens that never occurred in training look so; it is a remark and no fault.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from convert.cast import to_float32
from convert.errors import ConvertError
from convert.formats.spec import TensorSpec
from convert.layout import Key
from convert.match import values
from convert.source import FileSource, Source

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint

_BLOCK_BYTES = 1 << 20
#: Words of eight bytes that a row is told from others by; rows that agree in them are compared as a whole.
_WORDS = 8
_MULTIPLIERS = np.uint64(0x9E37_79B9_7F4A_7C15) ** np.arange(1, _WORDS + 1, dtype=np.uint64)
#: So many equal rows are worth a word; fewer are chance meetings of rare tokens.
_FEW = 4


class Marks:
    """A number for each row of the embedding and of the head, from blocks that somebody else reads anyway.

    Equal rows have equal numbers. Only for matrices that lie in a file as they are; the others are read for it.
    """

    def __init__(self, ckpt: Checkpoint) -> None:
        self._of: dict[tuple[Path, int], dict[int, NDArray[np.uint64]]] = {}
        for _, source in _matrices(ckpt):
            if isinstance(source, FileSource) and not source.spec.type.is_quantized:
                self._of[source.spec.file, source.spec.offset] = {}

    def add(self, spec: TensorSpec, start: int, block: NDArray[Any]) -> None:
        """Take a block of raw rows, the first of which is row ``start``; from any thread."""
        found = self._of.get((spec.file, spec.offset))
        if found is not None:
            found[start] = _marks(block)

    def of(self, source: Source) -> NDArray[np.uint64] | None:
        """The marks of all rows of a matrix; None where some are missing."""
        found = self._of.get((source.spec.file, source.spec.offset)) if isinstance(source, FileSource) else None
        if not found or sum(map(len, found.values())) != source.shape[0]:
            return None
        return np.concatenate([found[start] for start in sorted(found)])


def _matrices(ckpt: Checkpoint) -> Iterator[tuple[Key, Source]]:
    """Embedding and head, once where they are one."""
    found: set[int] = set()
    for key in ckpt.match.tied_pair() or ():
        source = ckpt.match.logical.get(key)
        if source is not None and id(source) not in found and len(source.shape) == 2 and not source.whole:
            found.add(id(source))
            yield key, source


def dead_rows(ckpt: Checkpoint, *, threads: int = 2, marks: Marks | None = None) -> Iterator[dict[str, Any]]:
    """The fields of a :class:`~convert.errors.Problem` of kind ``dead_rows`` for each matrix that has such rows."""
    for key, source in _matrices(ckpt):
        name = next((s.name for s in ckpt.match.slots.values() if key in s.keys), key[0])
        try:
            groups = equal_rows(source, threads=threads, marks=marks.of(source) if marks else None)
        except ConvertError:  # said by who checks the files
            continue
        if groups:
            count = sum(map(len, groups))
            said = [f"{len(rows):,} {_kind(source, int(rows[0]))} (ids {ranges(rows)})" for rows in groups[:3]]
            said += [f"{len(groups) - 3} sets more"] if len(groups) > 3 else []
            yield {
                "kind": "dead_rows",
                "message": f"{name!r}: {count:,} of {source.shape[0]:,} rows are like at least {_FEW - 1} others: "
                f"{', '.join(said)}; tokens that do not occur, or padding.",
                "tensor": name,
                "found": count,
                "tensors": (name,),
            }


def _kind(source: Source, row: int) -> str:
    plain = values(source)
    start = row // plain.align * plain.align
    block = plain.read(start, min(start + plain.align, plain.shape[0]))
    return "equal" if to_float32(block[row - start], plain.dtype).any() else "of zeros"


def equal_rows(source: Source, *, threads: int = 2, marks: NDArray[np.uint64] | None = None) -> list[NDArray[np.int64]]:
    """The numbers of rows that are equal to each other, one array for each set of at least four; the largest first.

    Args:
        source: A matrix.
        threads: Blocks read at once.
        marks: Of all rows (:class:`Marks`), where they are known; else all rows are read.
    """
    if marks is None:
        step = max(1, _BLOCK_BYTES // max(1, source.row_bytes))
        step = -(-step // source.align) * source.align
        starts = range(0, source.shape[0], step)
        with ThreadPoolExecutor(max(1, threads)) as workers:
            found = workers.map(lambda i: _marks(source.read(i, min(i + step, source.shape[0]))), starts)
            marks = np.concatenate(list(found))
    ordered = np.sort(marks)
    often = ordered[_FEW - 1 :][ordered[_FEW - 1 :] == ordered[: 1 - _FEW]]
    same: dict[bytes, list[int]] = {}
    for row in np.flatnonzero(np.isin(marks, often)) if often.size else ():
        same.setdefault(_digest(source, int(row)), []).append(int(row))
    return sorted((np.array(rows) for rows in same.values() if len(rows) >= _FEW), key=len, reverse=True)


def _marks(rows: NDArray[Any]) -> NDArray[np.uint64]:
    """A number for each row, equal for equal rows."""
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
    words = raw.shape[1] // 8
    if not words:
        raw, words = np.pad(raw, ((0, 0), (0, 8 - raw.shape[1]))), 1
    at = np.linspace(0, words - 1, _WORDS).astype(np.int64)
    few = raw[:, : 8 * words].view(np.uint64)[:, at]
    return few @ _MULTIPLIERS


def _digest(source: Source, row: int) -> bytes:
    start = row // source.align * source.align
    block = source.read(start, min(start + source.align, source.shape[0]))
    return hashlib.blake2b(np.ascontiguousarray(block[row - start]).tobytes(), digest_size=16).digest()


def ranges(rows: NDArray[np.int64], limit: int = 4) -> str:
    """Numbers as ranges: ``5, 128000-128255``, the first few."""
    breaks = np.flatnonzero(np.diff(rows) > 1)
    starts, stops = rows[np.r_[0, breaks + 1]], rows[np.r_[breaks, len(rows) - 1]]
    said = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True)]
    return ", ".join(said[:limit]) + (" …" if len(said) > limit else "")
