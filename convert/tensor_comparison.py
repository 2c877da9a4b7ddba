"""Compares two checkpoints tensor by tensor: streaming, in bounded memory, by several threads, without a model.

Blocks of both sides are first compared as bytes where both are stored alike; only blocks that differ are brought into
the common layout and measured (:mod:`convert.tensor_delta`). Which tensors belong together is
:mod:`convert.tensor_pairs`'s business.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convert.cast import to_float32
from convert.choices import require_positive
from convert.dtypes import DTYPES
from convert.platform import keep_freed_memory
from convert.source import Source
from convert.tensor_delta import BLOCK_MARGIN, Rules, Tally, TensorDelta, energy, measure, same_bits
from convert.tensor_pairs import Pair, Side, experts_of, pair_tensors

#: Values of one block of each side. A scattered tensor is read whole, up to 64 MiB (see :attr:`Source.whole`).
BLOCK = 1 << 20

Progress = Callable[[int], None]


@dataclass(slots=True)
class _Part:
    """Two sources of one shape: a tensor, or one of its experts. ``stored``: the same two as the files have them."""

    a: Source
    b: Source
    stored: tuple[Source, Source] | None
    offset: int

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows that all four can read."""
        sources = [self.a, self.b, *(self.stored or ())]
        rows = self.a.shape[0]
        if any(s.whole for s in sources):
            yield 0, rows
            return
        unit = math.lcm(*(s.align for s in sources))
        step = max(unit, BLOCK // max(1, math.prod(self.a.shape[1:])) // unit * unit)
        for start in range(0, rows, step):
            yield start, min(start + step, rows)


@dataclass(slots=True)
class _Work:
    """A pair while its blocks are compared: the relation is known at once where there is nothing to compare."""

    pair: Pair
    relation: str | None = None
    rules: Rules = field(default_factory=lambda: Rules(("F32", "F32"), ("F32", "F32")))
    parts: list[_Part] = field(default_factory=list)
    left: int = 0
    hope: list[bool] = field(default_factory=lambda: [True, True])
    tally: Tally = field(default_factory=Tally)
    equal: list[_Block] = field(default_factory=list)


_Block = tuple[_Part, int, int]


def compare_tensors(
    a: Any,
    b: Any,
    *,
    only: str | None = None,
    tolerance: tuple[float, float] | None = None,
    threads: int = 2,
    progress: Progress | None = None,
) -> Iterator[TensorDelta]:
    """Compare all tensors of two opened checkpoints, of any layouts and formats.

    Args:
        a: The original (:class:`convert.checkpoint.Checkpoint`; two objects that merely have ``reference_tensors`` are
            compared under the reference model's names).
        b: What is compared with it.
        only: Compare tensors whose name in the common layout matches this pattern.
        tolerance: ``(atol, rtol)``: values of B may lie within ``atol + rtol * |a|``. None: bits decide.
        threads: Workers.
        progress: Called with the bytes read since the last call (of A and B together, as stored), from any thread.

    Yields:
        One delta per tensor, in the order of A; tensors of B alone at the end.
    """
    require_positive("threads", threads)
    keep_freed_memory()
    pool = ThreadPoolExecutor(max(1, threads))
    pending: deque[tuple[_Work, _Block | None, Future[Tally | None] | None]] = deque()

    def settle() -> Iterator[TensorDelta]:
        work, block, future = pending.popleft()
        if block is not None and future is not None:
            found = future.result()
            work.left -= 1
            if found is None:
                work.equal.append(block)
            else:
                work.tally.add(found)
        if not work.left:
            yield _finished(work, pool)

    try:
        for pair in pair_tensors(a, b, only=only):
            work = _begin(pair, tolerance)
            blocks = [(part, *rows) for part in work.parts for rows in part.blocks()]
            work.left = len(blocks)
            if not blocks:
                pending.append((work, None, None))
            for block in blocks:
                while len(pending) >= 4 * threads:
                    yield from settle()
                pending.append((work, block, pool.submit(_compare, block, work, progress)))
        while pending:
            yield from settle()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(pair: Pair, tolerance: tuple[float, float] | None) -> _Work:
    a, b = pair.a, pair.b
    if a is None or b is None:
        return _Work(pair, "only_b" if a is None else "only_a")
    if a.shape != b.shape:
        return _Work(pair, "shape")
    if a.source is None or b.source is None:
        if not (pair.alike and a.stored is not None and b.stored is not None):
            return _Work(pair, "different")
        rules = Rules((a.dtype, b.dtype), (a.dtype, b.dtype))
        return _Work(
            pair, None, rules, [_Part(a.stored, b.stored, (a.stored, b.stored), 0)] if 0 not in a.shape else []
        )
    rules = Rules((a.source.dtype, b.source.dtype), (a.dtype, b.dtype), tolerance, a.computed or b.computed)
    return _Work(pair, None, rules, list(_parts(pair, a, b)))


def _parts(pair: Pair, a: Side, b: Side) -> Iterator[_Part]:
    assert a.source is not None and b.source is not None
    if 0 in a.shape:
        return
    if not pair.experts or len(a.shape) < 3:
        stored = (a.stored, b.stored) if pair.alike and a.stored is not None and b.stored is not None else None
        if stored is None and a.source.dtype == b.source.dtype:
            stored = (a.source, b.source)
        yield _Part(a.source, b.source, stored, 0)
        return
    size = math.prod(a.shape[1:])
    pairs = zip(experts_of(a.source), experts_of(b.source), strict=True)
    bare: list[tuple[Source, Source]] = []
    if pair.alike and a.stored is not None and b.stored is not None:
        bare = list(zip(experts_of(a.stored), experts_of(b.stored), strict=True))
    for number, (one, other) in enumerate(pairs):
        same = (one, other) if one.dtype == other.dtype else None
        yield _Part(one, other, bare[number] if bare else same, number * size)


def _compare(block: _Block, work: _Work, progress: Progress | None) -> Tally | None:
    """The figures of a block, or None where its bytes are equal."""
    part, start, stop = block
    row = math.prod(part.a.shape[1:])
    if progress is not None:
        progress(round((stop - start) * row * sum(map(_bytes_each, work.rules.stored))))
    if part.stored is not None:
        a, b = (s.read(start, stop) for s in part.stored)
        if same_bits(a, b):
            return None
    if part.stored != (part.a, part.b):
        a, b = part.a.read(start, stop), part.b.read(start, stop)
    return measure(a, b, work.rules, part.offset + start * row, work.hope)


def _bytes_each(dtype: str) -> float:
    """Bytes of one value as stored."""
    return DTYPES[dtype].block_bytes / DTYPES[dtype].block


def _finished(work: _Work, pool: ThreadPoolExecutor) -> TensorDelta:
    pair, total = work.pair, work.tally
    sides = (pair.a, pair.b)
    shapes = (pair.a.shape if pair.a else None, pair.b.shape if pair.b else None)
    types = (pair.a.dtype if pair.a else None, pair.b.dtype if pair.b else None)
    delta = partial(TensorDelta, pair.name, pair.row, pair.column, shapes=shapes, dtypes=types, turned=pair.turned)
    notes = [
        f"{side} stores none and takes {s.instead}" for side, s in zip("AB", sides, strict=True) if s and s.instead
    ]
    if work.relation is not None:
        if work.relation == "shape" and any(s is not None and s.source is None for s in sides):
            notes.append("its shape does not fit the config beside it")
        elif work.relation == "different":
            notes.append("of these types not even the bytes can be compared")
        return delta(work.relation, note="; ".join(notes) or None)
    if not total.changed:
        return delta("turned" if pair.turned else "equal", **_NONE, note="; ".join(notes) or None)
    if not DTYPES[work.rules.types[0]].is_float:
        notes.append("compared as bytes, for the type is none of weights")
        share = total.changed / math.prod(shapes[0] or ())
        return delta("different", changed=share, count=total.changed, note="; ".join(notes))
    for found in pool.map(lambda block: energy(block[0].a.read(*block[1:]), block[0].a.dtype), work.equal):
        total.add(found)
    relation, why = _relation(work)
    if why:
        notes.append(why)
    if total.not_finite:
        notes.append(f"NaN or infinite on one side, and not in these numbers: {total.not_finite:,}")
    return delta(
        relation,
        max_abs=total.largest,
        error=math.sqrt(total.dd / total.aa) if total.aa else math.inf,
        cosine=_cosine(total),
        changed=total.changed / total.size,
        count=total.changed,
        beyond=None if work.rules.tolerance is None else total.beyond,
        not_finite=total.not_finite,
        where=tuple(int(i) for i in np.unravel_index(total.at, shapes[0] or ())),
        note="; ".join(notes) or None,
    )


#: Figures of a pair without a difference.
_NONE: dict[str, Any] = {"max_abs": 0.0, "error": 0.0, "cosine": 1.0, "changed": 0.0, "count": 0}


def _cosine(total: Tally) -> float | None:
    """None where one side is all zeros: it has no direction."""
    size = math.sqrt(total.aa) * math.sqrt(total.bb)
    return max(-1.0, min(1.0, total.ab / size)) if size else None


def _relation(work: _Work) -> tuple[str, str | None]:
    """What a pair with differing bits is, and a word on it."""
    total, rules = work.tally, work.rules
    types = rules.types
    if not total.not_finite:
        for good, target in zip(total.rounds, types[::-1], strict=True):
            if good:
                return "rounded", f"equal after rounding to {_SHORT[target]}"
        if rules.computed and total.near:
            return "rounded", "equal within the rounding of float32, in which it is computed"
    if rules.tolerance is not None and not total.beyond:
        return "close", "within the tolerance"
    if not total.not_finite and rules.quantized and total.dd <= BLOCK_MARGIN * total.expected:
        kinds = " and ".join(s.lower() for s in rules.stored if s in _BLOCKS)
        return "close", f"within the rounding of {kinds}"
    if not total.not_finite and _same_rows(work):
        return "reordered", "the same rows in another order"
    return "different", "only signs of zeros differ" if not total.largest and not total.not_finite else None


_SHORT = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BLOCKS = frozenset(name for name, kind in DTYPES.items() if kind.is_quantized)


def _same_rows(work: _Work) -> bool:
    """Whether columns have the same sums, and the same sums of squares, which do not depend on the order of rows.

    All is read once more, so only where the total of squares does not tell them apart.
    """
    total = work.tally
    if len(work.parts) != 1 or abs(total.aa - total.bb) > 1e-5 * total.aa or total.dd <= 1e-6 * total.aa:
        return False
    part = work.parts[0]
    columns = math.prod(part.a.shape[1:])
    sums, squares = np.zeros((2, columns)), np.zeros((2, columns))
    for start, stop in part.blocks():
        for number, source in enumerate((part.a, part.b)):
            rows = source.read(start, stop).reshape(stop - start, -1)
            step = max(1, BLOCK // max(1, columns))
            for at in range(0, len(rows), step):
                wide = _wide(rows[at : at + step], source.dtype)
                sums[number] += wide.sum(0)
                squares[number] += np.einsum("ij,ij->j", wide, wide)
    slack = 1e-9 * np.sqrt(squares[0] * part.a.shape[0])  # rounding, of sums in another order
    near = np.abs(sums[0] - sums[1]) <= slack
    return bool(near.all() and np.allclose(squares[0], squares[1], rtol=1e-9, atol=0))


def _wide(rows: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    return rows if dtype == "F64" else to_float32(rows, dtype).astype(np.float64)
