"""FP8 weights as sources: a value is its code times its scale.

A scale that is no number stops, and so does a product that float32 cannot hold. Which scales belong to which weight is
:mod:`convert.float8_scales`'s business.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from convert.cast import Array, CastLoss, to_float32
from convert.errors import ConvertError, Problem
from convert.formats.spec import TensorSpec
from convert.source import FilePool, Source, read_rows

#: Types of scales that are exponents; bytes are where the checkpoint says so.
EXPONENT_TYPES = ("F8_E8M0", "U8")
_SCAN_BYTES = 1 << 20


def _table_e4m3() -> NDArray[np.float32]:
    """Values of the 256 codes: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, 0x7F and 0xFF are NaN."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    positive = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    positive[127] = math.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


def _table_e5m2() -> NDArray[np.float32]:
    """Values of the 256 codes: the upper half of a float16, infinities and NaN included."""
    return (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)


def _table_e8m0() -> NDArray[np.float32]:
    """Values of the 256 codes: powers of two from 2^-127 to 2^127; the last code is NaN (OCP Microscaling, 5.4.1)."""
    return np.append(np.ldexp(1.0, np.arange(255) - 127), math.nan).astype(np.float32)


TABLES = {"F8_E4M3": _table_e4m3(), "F8_E5M2": _table_e5m2()}
EXPONENTS = _table_e8m0()

#: Largest and smallest finite value but zero of the codes.
_RANGES = {name: (float(t[np.isfinite(t)].max()), float(t[t > 0].min())) for name, t in TABLES.items()}
_MOST, _LEAST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).smallest_subnormal)


class Float8(Source):
    """The values of an FP8 weight, in float32 (exact: 4 bits of mantissa times 24, rounded once).

    Codes that are no number, or infinite (E5M2), are values like others and come out as they are.

    Args:
        spec: The codes; ``spec.scale`` tells the scales, of which only those of the rows asked for are read.
        pool: Open files.

    Attributes:
        loss: Products that float32 could not hold: too large (where clamped), or zero although the code is not.
        clamp: Whether products that are too large become float32's largest value; else they stop.
    """

    def __init__(self, spec: TensorSpec, pool: FilePool) -> None:
        assert spec.scale is not None
        self.codes = pool.source(replace(spec, scale=None))
        self.scales = pool.source(spec.scale.spec)
        self.block = spec.scale.block
        self.shape = self.codes.shape
        self.dtype = "F32"
        self.names = spec.name, spec.scale.spec.name
        self.file = str(spec.file)
        self.loss = CastLoss()
        self.clamp = False
        self._lock = threading.Lock()

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`."""
        return self.codes.whole

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`.

        Raises:
            ConvertError: A scale is NaN or infinite, or a product is too large for float32 (unless clamped).
        """
        raw, out, grid = self._products(start, stop)
        most, least = _RANGES[self.codes.dtype]
        sizes = np.abs(grid)
        # Both extremes of the scales tell whether any product can leave float32's range; hardly ever one can.
        if sizes.size and not (float(sizes.max()) * most <= _MOST and float(sizes.min()) * least >= _LEAST):
            self._judge(raw, out, sizes)
        return out

    def _products(self, start: int, stop: int) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
        """The codes of some rows, their values, and the scales that were taken."""
        raw = self.codes.read(start, stop).view(np.uint8)
        out: NDArray[np.float32] = np.take(TABLES[self.codes.dtype], raw)
        if out.ndim == 3:  # experts: one matrix of scales each
            grids = self._grid(start, stop).reshape(stop - start, *self._cells((out.shape[1], out.shape[2])))
            for matrix, scales in zip(out, grids, strict=True):
                self._multiply(matrix, scales, 0)
            return raw, out, grids
        rows = out.reshape(stop - start, -1)
        cells = self._cells((self.shape[0], rows.shape[1]))
        first = min(start // self.block[0], cells[0] - 1)
        last = min(-(-stop // self.block[0]), cells[0])
        if cells[0] == 1 or math.prod(self.scales.shape) == 1:
            grid = self._grid(0, self.scales.shape[0]).reshape(cells)
            first = 0
        else:
            grid = self._grid(first, last).reshape(last - first, cells[1])
        self._multiply(rows, grid, start - first * self.block[0])
        return raw, out, grid

    def _cells(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])

    def _grid(self, start: int, stop: int) -> NDArray[np.float32]:
        stored = read_rows(self.scales, start, stop)
        if self.scales.dtype in EXPONENT_TYPES:
            return np.take(EXPONENTS, stored.view(np.uint8))
        return to_float32(stored, self.scales.dtype)

    def _multiply(self, rows: NDArray[np.float32], grid: NDArray[np.float32], skip: int) -> None:
        """Multiply ``[n, cols]`` in place by ``grid``, of whose first row of scales ``skip`` rows lie before."""
        height, width = self.block
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # judged afterwards
            if height == 1:
                rows *= np.repeat(grid, width, axis=1)[:, : rows.shape[1]] if grid.shape[1] > 1 else grid
                return
            for cell, scales in enumerate(grid):
                part = rows[max(0, cell * height - skip) : max(0, (cell + 1) * height - skip)]
                part *= np.repeat(scales, width)[: rows.shape[1]] if scales.size > 1 else scales

    def _too_large(self, raw: NDArray[np.uint8], out: NDArray[np.float32]) -> NDArray[np.bool_]:
        return np.isinf(out) & np.isfinite(np.take(TABLES[self.codes.dtype], raw))

    def _judge(self, raw: NDArray[np.uint8], out: NDArray[np.float32], sizes: NDArray[np.float32]) -> None:
        """Count what became infinite or zero, and clamp or refuse the former."""
        large = self._too_large(raw, out)
        if not np.isfinite(sizes).all() or (large.any() and not self.clamp):
            raise self._refusal()
        out[large] = np.copysign(np.float32(_MOST), out[large])
        zero = (out == 0) & ((raw & np.uint8(0x7F)) != 0)
        with self._lock:
            self.loss.add(CastLoss(int(np.count_nonzero(large)), int(np.count_nonzero(zero))))

    def _refusal(self) -> ConvertError:
        """What is wrong with the tensor; reads all of it. Rows are counted over all leading dimensions."""
        name, scale = self.names
        grid = self._grid(0, self.scales.shape[0])
        if bad := int(grid.size - np.count_nonzero(np.isfinite(grid))):
            nan = int(np.count_nonzero(np.isnan(grid)))
            at = int((~np.isfinite(grid)).reshape(-1).argmax())
            return ConvertError(
                Problem(
                    "scale",
                    f"{scale!r}: {bad:,} of {grid.size:,} scales of {name!r} are not finite ({nan:,} NaN), the first "
                    f"is number {at:,}; whole blocks of weights would be none.",
                    hint="The file is damaged, or quantising it went wrong: take another copy.",
                    found={"count": bad, "first": at},
                    tensor=name,
                    file=self.file,
                    wanted=0,
                )
            )
        step = max(1, _SCAN_BYTES // max(1, self.codes.row_bytes))
        step = self.shape[0] if self.whole else -(-step // self.codes.align) * self.codes.align
        inner = math.prod(self.shape[1:-1])
        count, first = 0, None
        for start in range(0, self.shape[0], step):
            stop = min(start + step, self.shape[0])
            large = self._too_large(*self._products(start, stop)[:2]).reshape((stop - start) * inner, -1)
            count += int(np.count_nonzero(large))
            if first is None and large.any():
                first = start * inner + int(large.any(axis=1).argmax())
        return ConvertError(
            Problem(
                "overflow",
                f"{name!r}: {count:,} products of FP8 codes and scales (up to {float(np.abs(grid).max()):.4g}) are too "
                f"large for F32 and would become infinite, the first in row {first}.",
                hint="Its scales are likely damaged; --clamp stores the largest value instead.",
                found={"row": first, "count": count},
                tensor=name,
                file=self.file,
                wanted=0,
            )
        )
