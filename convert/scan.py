"""Reads every value of a checkpoint and finds what no trained model has: NaN, infinities, tensors of zeros.

Streams blocks of a few MiB through threads, so memory does not depend on the model. Plain types are judged by their
bit patterns, one integer maximum per block; nothing is converted unless something is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from convert.errors import ConvertError, Problem
from convert.formats.spec import TensorSpec
from convert.match import values
from convert.source import FilePool, Source, open_source

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint

Seen = Callable[[TensorSpec, int, NDArray[Any]], None]

BLOCK_BYTES = 4 << 20
#: Per type: the unsigned integer of its size, the mask that drops the sign, and the pattern of infinity; all above it
#: are NaN (IEEE 754; bfloat16 is the upper half of float32).
_PATTERNS = {
    "F64": (np.uint64, 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
}
_SIGNED = {"F64": np.int64, "F32": np.int32, "F16": np.int16, "BF16": np.int16}


@dataclass(slots=True)
class Counts:
    """What one tensor's values are.

    Attributes:
        nan: How many are no number.
        infinite: How many are infinite.
        first_row: The first row that holds one of these, or None.
        zero: Whether all are zero.
    """

    nan: int = 0
    infinite: int = 0
    first_row: int | None = None
    zero: bool = True

    def add(self, other: Counts) -> None:
        """Join the counts of two blocks."""
        self.nan += other.nan
        self.infinite += other.infinite
        self.zero &= other.zero
        rows = [r for r in (self.first_row, other.first_row) if r is not None]
        self.first_row = min(rows, default=None)


def count(block: NDArray[Any], dtype: str, start: int = 0) -> Counts:
    """Count in a block of rows.

    Args:
        block: Raw storage values, rows first.
        dtype: F64, F32, F16 or BF16.
        start: The number of the block's first row.
    """
    kind, mask, infinity = _PATTERNS[dtype]
    raw = np.ascontiguousarray(block).view(kind)
    if not raw.size:
        return Counts()
    # Two maxima without a copy: as signed numbers the positive values come out on top, as unsigned the negative.
    positive, negative = int(raw.view(_SIGNED[dtype]).max()), int(raw.max())
    largest = max(positive, negative & mask if negative > mask else 0)
    if largest < infinity:
        return Counts(zero=largest == 0)
    bits = raw & kind(mask)
    bad = bits >= kind(infinity)
    infinite = int(np.count_nonzero(bits == kind(infinity)))
    rows = bad.reshape(len(bits), -1).any(axis=1)
    return Counts(int(np.count_nonzero(bad)) - infinite, infinite, start + int(rows.argmax()), False)


def scan(
    specs: Iterable[TensorSpec],
    pool: FilePool,
    *,
    may_be_zero: frozenset[str] = frozenset(),
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
    seen: Seen | None = None,
) -> tuple[list[Problem], list[str]]:
    """Read all values of the tensors.

    Args:
        specs: What to read; integer types are passed over.
        pool: Open files.
        may_be_zero: Tensors in which zeros throughout are only worth a note (biases).
        threads: Blocks read at once.
        progress: Called with the bytes read since the last call, from any thread.
        seen: Called with every block that was read, from any thread: the tensor, the block's first row, its values.

    Returns:
        A problem of kind ``nan``, ``inf`` or ``zeros`` per tensor that has them, and the names of the tensors of zeros
        that may be so.
    """
    found: dict[int, Counts] = {}
    named: list[TensorSpec] = []

    def pieces() -> Iterator[tuple[int, Source, int, int]]:
        for spec in specs:
            known = spec.type.is_float or spec.type.is_quantized or spec.scale is not None
            if not known or 0 in spec.shape:
                continue
            named.append(spec)
            source = values(open_source(spec, pool))
            rows = source.shape[0]
            step = rows if source.whole else max(1, BLOCK_BYTES // max(1, source.row_bytes))
            step = -(-step // source.align) * source.align
            for start in range(0, rows, step):
                yield len(named) - 1, source, start, min(start + step, rows)

    def work(piece: tuple[int, Source, int, int]) -> tuple[int, Counts | ConvertError]:
        number, source, start, stop = piece
        try:
            block = source.read(start, stop)
            result: Counts | ConvertError = count(block, source.dtype, start)
            if seen is not None:
                seen(named[number], start, block)
        except ConvertError as error:
            result = error
        if progress is not None:
            progress(source.row_bytes * (stop - start))
        return number, result

    broken: dict[str, Problem] = {}
    with ThreadPoolExecutor(threads) as workers:
        for number, result in workers.map(work, pieces()):
            if isinstance(result, Counts):
                found.setdefault(number, Counts()).add(result)
            else:
                broken.update({p.message: p for p in result.problems})
    problems: list[Problem] = list(broken.values())
    zeros: list[str] = []
    for number, counts in found.items():
        spec = named[number]
        if counts.zero and spec.name in may_be_zero:
            zeros.append(spec.name)
        else:
            problems += _judge(spec, counts)
    return problems, zeros


def scan_checkpoint(
    ckpt: Checkpoint,
    *,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
    seen: Seen | None = None,
) -> tuple[list[Problem], list[str]]:
    """:func:`scan` of all weights of a checkpoint: biases may be zeros, and norms that are stored less one."""
    matched = ckpt.match
    dropped = {name for name, _ in matched.ignored}
    spared = set()
    for slot in matched.slots.values():
        row = ckpt.table.rows[slot.keys[0][0]]
        if len(slot.shape) == 1 and (row.role != "norm" or ckpt.norm == "zero_centered"):
            spared.add(slot.name)
    specs = [s for name, parts in ckpt.tensors.items() if name not in dropped for s in parts]
    return scan(specs, ckpt.pool, may_be_zero=frozenset(spared), threads=threads, progress=progress, seen=seen)


def _judge(spec: TensorSpec, counts: Counts) -> Iterator[Problem]:
    about = {"tensor": spec.name, "file": str(spec.file)}
    for kind, number, word in (("nan", counts.nan, "NaN"), ("inf", counts.infinite, "infinite values")):
        if number:
            yield Problem(
                kind,
                f"{spec.name!r} holds {number:,} {word}; the first bad row is {counts.first_row}.",
                found=number,
                wanted=0,
                hint="A diverged training run, a cast that overflowed, or damage; no conversion can mend it.",
                **about,
            )
    if counts.zero:
        yield Problem(
            "zeros",
            f"{spec.name!r} is all zeros.",
            found=0,
            hint="A tensor that was never filled, or a file with a hole (an interrupted download).",
            **about,
        )
