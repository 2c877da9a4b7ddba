"""Value conversion between the plain floating-point types, on numpy arrays.

Everything passes through float32. Narrowing rounds to nearest even, once: float64 that becomes a 16-bit type is rounded
to odd on its way through float32 (torch rounds it to nearest twice). A finite value that becomes infinite, and one that
becomes zero without being it, are counted and left to the caller to judge. The fast routine for float32 → float16 comes
from ggml's CPU library where it is installed (:mod:`convert.ggml`); numpy's gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from convert import ggml

Array = NDArray[np.generic]

#: Float64 values that are rounded to odd at a time: temporaries stay in a core's own cache.
_PIECE = 1 << 15


@dataclass(slots=True)
class CastLoss:
    """What narrowing did to values: finite → infinite, and non-zero → zero; and what was NaN or infinite before."""

    overflowed: int = 0
    underflowed: int = 0
    not_finite: int = 0

    def add(self, other: CastLoss) -> None:
        """Accumulate ``other``."""
        self.overflowed += other.overflowed
        self.underflowed += other.underflowed
        self.not_finite += other.not_finite


def to_float32(values: Array, dtype: str, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Widen raw storage of ``dtype`` to float32 (exact for F16, BF16; F64 is rounded).

    Args:
        values: Raw values in the storage type of ``dtype``.
        dtype: Canonical name: F64, F32, F16, BF16 or an integer type.
        out: A buffer of the same shape to fill.
    """
    if dtype == "BF16":
        wide = np.empty(values.shape, np.float32) if out is None else out
        np.left_shift(values, np.uint32(16), out=wide.view(np.uint32), dtype=np.uint32, casting="unsafe")
        return wide
    if dtype == "F16":
        return ggml.float16_to_float32(values, out)  # type: ignore[arg-type]
    if dtype == "F32" and out is None:
        return values  # type: ignore[return-value]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # losses are counted, NaN is no surprise
        if out is None:
            return values.astype(np.float32)
        np.copyto(out, values, casting="unsafe")
    return out


def _odd_float32(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round float64 to float32 so that a second rounding, to 16 bits, gives what rounding once would.

    What is inexact becomes the neighbour whose last bit is one ("rounding to odd"; S. Boldo, G. Melquiond, *Emulation
    of FMA and correctly rounded sums*, 2008: exact where the wider format has two bits more). A value that only the
    nearest rounding put on the middle between two 16-bit numbers stays beside it. Too large becomes the largest value,
    which either 16-bit type then makes infinite; too small the smallest one, which either makes zero.
    """
    values = np.ascontiguousarray(values)
    out = np.empty(values.shape, np.float32)
    before, after = values.reshape(-1), out.reshape(-1)
    for start in range(0, before.size, _PIECE):
        exact, wide = before[start : start + _PIECE], after[start : start + _PIECE]
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            np.copyto(wide, exact, casting="unsafe")
            inexact = exact != wide
            if not inexact.any():
                continue
            short, far = np.abs(wide) < np.abs(exact), np.abs(wide) > np.abs(exact)
        bits = wide.view(np.uint32)
        even = (bits & np.uint32(1)) == 0
        bits += short & even  # away from zero; of NaN neither is true
        bits -= far & even
    return out


def float32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to bfloat16 (nearest even), as ``uint16``; NaN stays NaN with its payload's top bits."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    lsb = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + (lsb + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        quiet = ((bits >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
        rounded = np.where(nan, quiet, rounded)
    return rounded


def cast(values: Array, source: str, target: str, loss: CastLoss | None = None) -> Array:
    """Convert raw storage of type ``source`` to raw storage of type ``target``.

    Args:
        values: Raw values in the storage type of ``source``.
        source: Canonical name of a plain type.
        target: Canonical name of a plain floating-point type.
        loss: Where overflow, underflow, and what was NaN or infinite before are counted in narrowing, if given.

    Returns:
        The values in the storage type of ``target``; ``values`` itself when the types are equal.
    """
    if source == target:
        return values
    if target == "F64":
        with np.errstate(invalid="ignore"):
            return to_float32(values, source).astype(np.float64)
    if source == "F64" and target != "F32":
        wide = _odd_float32(values)  # type: ignore[arg-type]
    else:
        wide = to_float32(values, source)
    if target == "F32":
        if loss is not None and source == "F64":
            _count(values, wide, loss)
        return wide
    narrow: Array = float32_to_bf16(wide) if target == "BF16" else ggml.float32_to_float16(wide)
    if loss is not None:
        # float64 loses values on its way to float32 already, so they are counted from where they came.
        before = values if source == "F64" else wide
        _count_narrow(before, narrow, 0x7F80 if target == "BF16" else 0x7C00, loss)
    return narrow


def _count(before: Array, after: Array, loss: CastLoss) -> None:
    _count_infinite(before, int(np.count_nonzero(~np.isfinite(after))), loss)
    zeros = int(after.size - np.count_nonzero(after))
    if zeros:
        loss.underflowed += zeros - int(before.size - np.count_nonzero(before))


def _count_narrow(before: Array, after: Array, infinity: int, loss: CastLoss) -> None:
    # On the 16-bit patterns: integer compares on half the bytes are several times faster than isinf, and comparing with
    # zero is four times faster than numpy's count of non-zero floats.
    magnitude = after.view(np.uint16) & np.uint16(0x7FFF)
    _count_infinite(before, int(np.count_nonzero(magnitude >= infinity)), loss)
    zeros = int(magnitude.size - np.count_nonzero(magnitude))
    if zeros:
        loss.underflowed += zeros - int(np.count_nonzero(before == 0))


def _count_infinite(before: Array, after: int, loss: CastLoss) -> None:
    """Tell values that became infinite from those that were no finite numbers; NaN and infinity stay what they are."""
    if after:
        there = int(np.count_nonzero(~np.isfinite(before)))
        loss.overflowed += after - there
        loss.not_finite += there
