"""Values that are checked on their way into a file: all finite, and none too large for the type they become.

The check is one integer maximum over the bit patterns of a block; only when it fails is the whole tensor read, to tell
the first row and the count. Nothing is changed; narrowing is :mod:`convert.cast`, blocks are :mod:`convert.quants`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convert.cast import Array, to_float32
from convert.dtypes import DTYPES
from convert.errors import ConvertError, Problem
from convert.source import Source

#: The smallest magnitude that rounds to infinity (nearest even: half a step above the largest value).
_OVERFLOW = {"F16": 65520.0, "BF16": float.fromhex("0x1.ffp127"), "F32": float.fromhex("0x1.ffffffp127")}
_SCAN_BYTES = 4 << 20


def _limit(dtype: str, target: str) -> float:
    return math.inf if target == "F32" and dtype != "F64" else _OVERFLOW.get(target, math.inf)


def largest(values: NDArray[Any], dtype: str) -> float:
    """The largest magnitude; not finite when any value is NaN or infinite.

    On the bit patterns: without its sign, a float's bits order like its value, and everything from infinity up is
    not finite. Integer maxima take a fraction of the time of ``isfinite``.
    """
    if not values.size:
        return 0.0
    if dtype == "BF16":
        top = np.array(int((values & np.uint16(0x7FFF)).max()) << 16, np.uint32)
        return float(top.view(np.float32))
    if dtype == "F16":
        return float((values.view(np.uint16) & np.uint16(0x7FFF)).max().view(np.float16))
    if dtype == "F32":
        return float((values.view(np.uint32) & np.uint32(0x7FFFFFFF)).max().view(np.float32))
    return float((values.view(np.uint64) & np.uint64(0x7FFF_FFFF_FFFF_FFFF)).max().view(np.float64))


def _fits(values: NDArray[Any], dtype: str, target: str) -> bool:
    """Whether all values are finite and become finite ones."""
    return largest(values, dtype) < _limit(dtype, target)


class Finite(Source):
    """Plain values, unchanged; a value that ``target`` cannot hold stops the conversion.

    Args:
        source: Rows of ``F64``, ``F32``, ``F16`` or ``BF16``.
        target: The type that the values become; for block types only NaN and infinity are judged here.
        tensor: The tensor's name, for messages.

    Attributes:
        clamp: Whether finite values pass that are too large; who narrows them clamps them.
    """

    def __init__(self, source: Source, target: str, *, tensor: str) -> None:
        self.source = source
        self.target = target
        self.tensor = tensor
        self.shape = source.shape
        self.dtype = source.dtype
        self.align = source.align
        self.clamp = False

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`."""
        return self.source.whole

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`.

        Raises:
            ConvertError: A value is NaN, infinite or too large; with the tensor, the first row and the count.
        """
        block = self.source.read(start, stop)
        values = np.ascontiguousarray(block)
        if not _fits(values, self.dtype, self.target) and not (
            self.clamp and math.isfinite(largest(values, self.dtype))
        ):
            raise refusal(self.source, self.target, tensor=self.tensor)
        return block


def refusal(source: Source, target: str, *, tensor: str) -> ConvertError:
    """What is wrong with a tensor that holds values which ``target`` cannot: reads all of it.

    Rows are counted over all leading dimensions.
    """
    limit = _limit(source.dtype, target)
    rows = source.shape[0]
    inner = math.prod(source.shape[1:-1])
    step = rows if source.whole else max(1, _SCAN_BYTES // max(1, source.row_bytes))
    step = min(rows, max(1, -(-step // source.align)) * source.align)
    nan = infinite = large = 0
    first: int | None = None
    biggest = 0.0
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        values = np.ascontiguousarray(source.read(start, stop))
        if _fits(values, source.dtype, target):
            continue
        wide = np.abs(values if source.dtype == "F64" else to_float32(values, source.dtype))
        wide = wide.reshape((stop - start) * inner, -1)
        bad = ~(wide < limit)
        finite = np.isfinite(wide)
        nan += int(np.count_nonzero(np.isnan(wide)))
        infinite += int(np.count_nonzero(np.isinf(wide)))
        large += int(np.count_nonzero(bad & finite))
        biggest = max(biggest, float(wide[finite].max(initial=0)))
        if first is None:
            first = start * inner + int(bad.any(axis=1).argmax())
    count = nan + infinite + large
    found = {"row": first, "count": count}
    block = DTYPES[target].is_quantized
    if nan + infinite:  # also where others are too large: these no type can hold
        kind = "not_finite"
        verb = "quantised" if block else "written"
        message = f"{tensor!r} cannot be {verb}: {nan + infinite:,} values are not finite ({nan:,} NaN)"
        hint = "The checkpoint is damaged or its training diverged; no conversion can mend it."
    else:
        kind = "overflow"
        message = (
            f"{tensor!r}: {large:,} values of up to {biggest:.6g} are too large for {target} and would become infinite"
        )
        hint = (
            f"Keep this tensor wider: --tensor-type {tensor}={'bf16' if biggest < _OVERFLOW['BF16'] else 'f32'}, "
            f"or store {target}'s largest value instead: --clamp."
        )
    return ConvertError(
        Problem(kind, f"{message}, the first in row {first}.", tensor=tensor, found=found, wanted=0, hint=hint)
    )
