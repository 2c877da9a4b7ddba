"""Rows of the embedding and of the head that stand for no token: all zeros, or all the same as each other.

Padding of the vocabulary and tokens that never occurred in training look so; it is a remark and no fault.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from convert.cast import to_float32
from convert.errors import ConvertError
from convert.match import values
from convert.source import Source

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint

_BLOCK_BYTES = 1 << 20
#: Words of eight bytes that a row is told from others by; rows that agree in them are compared as a whole.
_WORDS = 8
#: So many equal rows are worth a word; fewer are chance meetings of rare tokens.
_FEW = 4


def dead_rows(ckpt: Checkpoint, *, threads: int = 2) -> Iterator[dict[str, Any]]:
    """The fields of a :class:`~convert.errors.Problem` of kind ``dead_rows`` for each matrix that has such rows."""
    pair = ckpt.match.tied_pair()
    found: set[int] = set()
    for key in pair or ():
        source = ckpt.match.logical.get(key)
        if source is None or id(source) in found or len(source.shape) != 2 or source.whole:
            continue
        found.add(id(source))
        name = next((s.name for s in ckpt.match.slots.values() if key in s.keys), key[0])
        try:
            groups = equal_rows(source, threads=threads)
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


def equal_rows(source: Source, *, threads: int = 2) -> list[NDArray[np.int64]]:
    """The numbers of rows that are equal to each other, one array for each set of at least four; the largest first."""
    step = max(1, _BLOCK_BYTES // max(1, source.row_bytes))
    step = -(-step // source.align) * source.align
    blocks = [(i, min(i + step, source.shape[0])) for i in range(0, source.shape[0], step)]
    with ThreadPoolExecutor(max(1, threads)) as workers:
        marks = np.concatenate(list(workers.map(lambda b: _marks(source, *b), blocks)))
    _, where, count = np.unique(marks, return_inverse=True, return_counts=True)
    out = []
    for group in np.flatnonzero(count >= _FEW):
        same: dict[bytes, list[int]] = {}
        for row in np.flatnonzero(where == group):
            same.setdefault(_digest(source, int(row)), []).append(int(row))
        out += [np.array(rows) for rows in same.values() if len(rows) >= _FEW]
    return sorted(out, key=len, reverse=True)


def _marks(source: Source, start: int, stop: int) -> NDArray[np.uint64]:
    """A number for each row, equal for equal rows."""
    raw = np.ascontiguousarray(source.read(start, stop)).view(np.uint8).reshape(stop - start, -1)
    words = raw.shape[1] // 8
    if not words:
        raw, words = np.pad(raw, ((0, 0), (0, 8 - raw.shape[1]))), 1
    at = np.unique(np.linspace(0, words - 1, _WORDS).astype(np.int64))
    out = np.zeros(stop - start, np.uint64)
    for place in at:
        word = np.ascontiguousarray(raw[:, 8 * place : 8 * place + 8]).view(np.uint64)[:, 0]
        out = (out ^ word) * np.uint64(0x9E37_79B9_7F4A_7C15)
        out ^= out >> np.uint64(29)
    return out


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
