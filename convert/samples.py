"""What the values of each tensor are like: moments, how much its rows and columns differ, the profile of square ones.

Read from rows spread over the tensor, a square matrix and a vector as a whole, in threads and bounded memory. Judges
nothing: that is :mod:`convert.oddities`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from convert.cast import to_float32
from convert.errors import ConvertError
from convert.layout import Key
from convert.match import as_reference
from convert.source import Array, Source
from convert.transforms import Expert

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint

#: Values that are looked at in a matrix, in so many places.
_VALUES, _PLACES = 1 << 18, 16
#: Bytes of a square matrix that are taken at once: they stay in the processor's cache while they are used.
_BLOCK_BYTES = 256 << 10
#: Bytes that make the fingerprint: where two agree, the tensors themselves are compared.
_PRINT_BYTES = 1 << 16

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One tensor, or one expert of it.

    Attributes:
        key: Row of the table and layer.
        expert: Which expert, where the tensor holds several.
        name: The stored tensor's name.
        source: The values, for a second look.
        shape: Of the tensor or expert.
        count: Values looked at.
        rows: Rows looked at.
        mean: Their mean.
        std: Their standard deviation.
        kurtosis: Fourth moment over the squared second: 3 for a normal distribution, 1.8 for a uniform one.
        row_spread: Standard deviation of the logarithms of the rows' norms, over what it would be in independent
            values of the same distribution; NaN for a vector.
        column_spread: The same of the columns.
        digest: Fingerprint of some of the values.
        vector: All values of a vector.
        profiles: Logarithms of the norms of all rows and of all columns of a square matrix.
    """

    key: Key
    expert: int | None
    name: str
    source: Source
    shape: tuple[int, ...]
    count: int
    rows: int
    mean: float
    std: float
    kurtosis: float
    row_spread: float
    column_spread: float
    digest: bytes
    vector: NDArray[np.float32] | None = None
    profiles: tuple[Floats, Floats] | None = None

    @property
    def rms(self) -> float:
        """Root of the mean square."""
        return math.hypot(self.mean, self.std)


def samples(ckpt: Checkpoint, *, threads: int = 2) -> list[Sample]:
    """A sample of every tensor that has a place in the table, in its order; what cannot be read is left out."""
    with ThreadPoolExecutor(max(1, threads)) as workers:
        found = workers.map(lambda item: _sample(*item), list(_tensors(ckpt)))
        return [sample for sample in found if sample is not None]


def _tensors(ckpt: Checkpoint) -> Iterator[tuple[Key, int | None, str, Source]]:
    names: dict[tuple[Key, int | None], str] = {}
    for slot in ckpt.match.slots.values():
        for key in slot.keys:
            names[key, slot.expert] = slot.name
    seen: set[int] = set()
    for key, source in ckpt.match.logical.items():
        if 0 in source.shape or id(source) in seen:
            continue
        seen.add(id(source))  # a tied head is the embedding
        row = ckpt.table.rows[key[0]]
        try:
            plain = as_reference(ckpt, row, key[1], source)
        except ConvertError:
            continue
        if not row.experts:
            yield key, None, names.get((key, None), key[0]), plain
            continue
        for e in range(plain.shape[0]):
            yield key, e, names.get((key, e)) or names.get((key, None), key[0]), Expert(plain, e)


def _runs(source: Source, *, everything: bool) -> Iterator[tuple[int, int]]:
    """Runs of rows, at multiples of what the source can be cut at."""
    rows = source.shape[0]
    width = math.prod(source.shape[1:])
    if everything or source.whole or rows * width <= _VALUES:
        step = rows if source.whole else max(1, _BLOCK_BYTES // max(1, source.row_bytes))
        step = -(-step // source.align) * source.align
        for start in range(0, rows, step):
            yield start, min(start + step, rows)
        return
    length = max(4, _VALUES // width // _PLACES)
    length = -(-length // source.align) * source.align
    last = max(0, (rows - length) // source.align)
    for start in sorted({int(x) * source.align for x in np.linspace(0, last, _PLACES)}):
        yield start, min(start + length, rows)


def _sample(key: Key, expert: int | None, name: str, source: Source) -> Sample | None:
    square = len(source.shape) == 2 and source.shape[0] == source.shape[1]
    width = math.prod(source.shape[1:])
    columns: Floats = np.zeros(width)
    norms: list[NDArray[Any]] = []
    kept: list[Array] = []
    total = fourth = 0.0
    across = np.ones(width, np.float32)  # products with it are sums, several times as fast as numpy's along an axis
    digest = hashlib.blake2b(digest_size=16)
    printed = 0
    try:
        for start, stop in _runs(source, everything=square):
            raw = source.read(start, stop)
            if printed < _PRINT_BYTES:
                part = np.ascontiguousarray(raw).view(np.uint8).reshape(-1)[: _PRINT_BYTES - printed]
                digest.update(part.data)
                printed += len(part)
            block = to_float32(np.ascontiguousarray(raw), source.dtype).reshape(stop - start, width)
            with np.errstate(all="ignore"):  # what is not finite, the scan says
                squares = block * block
                flat = squares.reshape(-1)
                total += float((block @ across).sum(dtype=np.float64))
                fourth += float(np.dot(flat, flat))
                norms.append(squares @ across)
                columns += np.ones(stop - start, np.float32) @ squares
            if len(source.shape) == 1:
                kept.append(block.reshape(-1))
    except ConvertError:
        return None
    rows = np.concatenate(norms).astype(np.float64)
    count = len(rows) * width
    mean, second = total / count, float(rows.sum()) / count
    std = math.sqrt(max(0.0, second - mean * mean))
    with np.errstate(all="ignore"):
        kurtosis = fourth / count / second**2 if second and math.isfinite(second) else math.nan
        by_row, by_column = 0.5 * np.log(rows), 0.5 * np.log(columns)
        spreads = [_spread(by_row, width, kurtosis), _spread(by_column, len(rows), kurtosis)]
    return Sample(
        key,
        expert,
        name,
        source,
        source.shape,
        count,
        len(rows),
        mean,
        std,
        kurtosis,
        spreads[0] if len(source.shape) > 1 else math.nan,
        spreads[1] if len(source.shape) > 1 else math.nan,
        digest.digest(),
        np.concatenate(kept).astype(np.float32) if kept else None,
        (by_row, by_column) if square else None,
    )


def _spread(logs: Floats, each: int, kurtosis: float) -> float:
    """Their standard deviation over that of the logarithm of the norm of ``each`` independent values.

    The square of such a norm has the relative variance (kurtosis - 1) / each; its logarithm's is a quarter of that.
    """
    expected = math.sqrt((kurtosis - 1) / (4 * each)) if kurtosis > 1 else math.nan
    finite = logs[np.isfinite(logs)]
    return float(finite.std() / expected) if len(finite) > 1 and expected else math.nan
