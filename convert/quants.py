"""Block-quantised tensors as sources: dequantised on the way in, quantised on the way out.

ggml does the arithmetic where it is installed, the ``gguf`` package's numpy otherwise (same bytes, several times
slower, and it cannot write the K types). Which tensor gets which type is decided in :mod:`convert.mixtures`.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convert import ggml
from convert.cast import Array, CastLoss, cast, to_float32
from convert.clamp import clamp
from convert.dtypes import DTYPES
from convert.errors import ConvertError, Problem
from convert.finite import largest as largest_of
from convert.finite import refusal
from convert.q8_0 import quantize_q8_0
from convert.source import FileSource, Source

#: Elements worked on at once: input, float32 values and output together stay in a core's own cache. Much
#: smaller pieces make threads queue for the interpreter lock. A multiple of every block.
PIECE = 128 * 1024

#: What ``gguf.quants`` (0.17 and later) can write; it reads everything in :data:`ggml.DEQUANTIZES` that it knows.
_PACKAGE_WRITES = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"})

#: While all values are smaller, no scale or minimum of a block (at most max - min) can overflow float16.
_SAFE = 32752.0

#: No block type holds more: Q6_K's float16 scale times 128 times 32. Far beyond it ggml's search for a scale meets
#: infinite sums and writes a block of near zeros (Q3_K, Q6_K).
_MOST = 65504.0 * 128 * 32

#: NVFP4's scales are E4M3 (448) and its codes at most 6: what is larger is cut off, without a NaN to tell.
_NVFP4_MOST = 448.0 * 6

#: Where in a block its float16 scale lies, in bytes (ggml-common.h); zero or subnormal, it has few bits or none.
_SCALE_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "TQ1_0": 52, "TQ2_0": 64} | dict.fromkeys(
    ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K"), 0
)

#: The share of a block's energy that its error must have for the block to be lost: hardly better than zeros.
_LOST = 0.9


def writable_types() -> frozenset[str]:
    """The block types that can be written on this machine (without ggml: no K types)."""
    return ggml.QUANTIZES if ggml.available() else _PACKAGE_WRITES


def dequantize(blocks: NDArray[np.uint8], name: str, *, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Values of ``uint8 [rows, bytes per row]`` as float32 ``[rows, cols]`` (into ``out`` where given).

    Raises:
        ConvertError: Nothing installed can read the type.
    """
    if ggml.available() and name in ggml.DEQUANTIZES:
        return ggml.dequantize_rows(blocks, name, out=out)
    from gguf import GGMLQuantizationType, quants

    try:
        with np.errstate(all="ignore"):  # a damaged scale is the reader's business, not numpy's
            values = quants.dequantize(blocks, GGMLQuantizationType[name])
    except (KeyError, NotImplementedError):
        raise ConvertError(
            Problem("type", f"the gguf package cannot read {name}.", hint="Install the extra: quantize.", found=name)
        ) from None
    if out is None:
        return values
    out[...] = values
    return out


def quantize(values: NDArray[np.float32], name: str, *, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Blocks of finite float32 ``[rows, cols]`` as ``uint8 [rows, bytes per row]`` (into ``out`` where given).

    Raises:
        ConvertError: Nothing installed can write the type.
    """
    if ggml.available() and name in ggml.QUANTIZES:
        return ggml.quantize_rows(values, name, out=out)
    _check_writable(name)
    from gguf import GGMLQuantizationType, quants

    with np.errstate(all="ignore"):  # 1 / 0 for a block of zeros, answered by the package itself
        blocks = quants.quantize(values, GGMLQuantizationType[name])
    if out is None:
        return blocks
    out[...] = blocks
    return out


def _check_writable(name: str) -> None:
    if name.startswith("IQ"):
        why = "IQ types are made with an importance matrix, which this program does not take"
        raise ConvertError(Problem("type", f"{name} cannot be written: {why}.", found=name, hint="Take a K type."))
    if name not in writable_types():
        hint = "Install the extra: quantize." if name in ggml.QUANTIZES else None
        raise ConvertError(Problem("type", f"nothing installed can write {name}.", found=name, hint=hint))


class Dequantized(Source):
    """The values of a block-quantised source.

    Args:
        source: Rows of blocks (``uint8 [rows, …, bytes per row]``).
        dtype: ``F32``, ``F16`` or ``BF16``; what narrowing lost is counted in :attr:`loss`.

    Attributes:
        loss: Overflow and underflow in narrowing to ``dtype``; values that a damaged scale makes NaN or infinite.
        clamp: Whether what overflows becomes the type's largest value.
    """

    def __init__(self, source: Source, dtype: str = "F32") -> None:
        if not DTYPES[source.dtype].is_quantized:
            raise ValueError(f"{source.dtype} is not a block-quantised type")
        self.shape = source.shape
        self.single = len(source.shape) == 1
        if self.single:
            # The engine sees single elements as its rows, blocks have none: read them all, and slice.
            if not isinstance(source, FileSource):
                raise ValueError("a one-dimensional quantised tensor must come straight from a file")
            source = FileSource(replace(source.spec, shape=(1, *source.shape)), source.pool)
        self.source = source
        self.dtype = dtype
        self.align = self.shape[0] if self.single else source.align
        self.loss = CastLoss()
        self.clamp = False
        self._lock = threading.Lock()

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`."""
        return self.single or self.source.whole

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        if self.single:
            return self._values(self.source.read(0, 1), self.shape)[start:stop]
        return self._values(self.source.read(start, stop), (stop - start, *self.shape[1:]))

    def _values(self, raw: Array, shape: tuple[int, ...]) -> Array:
        kind, name = DTYPES[self.source.dtype], self.source.dtype
        blocks = np.ascontiguousarray(raw, np.uint8).reshape(-1)
        out = np.empty(math.prod(shape), DTYPES[self.dtype].storage)
        scratch = None if self.dtype == "F32" else np.empty(min(PIECE, out.size), np.float32)
        loss = CastLoss()
        for at in range(0, out.size, PIECE):
            count = min(PIECE, out.size - at)
            first = at // kind.block * kind.block_bytes
            piece = blocks[first : first + count // kind.block * kind.block_bytes].reshape(1, -1)
            values: NDArray[Any] = out[at : at + count] if scratch is None else scratch[:count]
            dequantize(piece, name, out=values.reshape(1, -1))
            if scratch is None and not math.isfinite(largest_of(values, "F32")):
                loss.not_finite += int(np.count_nonzero(~np.isfinite(values)))
            if scratch is not None:
                narrow = cast(values, "F32", self.dtype, loss)
                if self.clamp and loss.overflowed:
                    narrow = clamp(values, "F32", narrow, self.dtype)
                out[at : at + count] = narrow
        if loss != CastLoss():
            with self._lock:
                self.loss.add(loss)
        return out.reshape(shape)


class Quantized(Source):
    """Floating-point rows as blocks of a quantised type.

    The bytes are those of ggml's reference routines, whichever library writes them.

    Args:
        source: Rows of ``F32``, ``F16``, ``BF16`` or ``F64``; at least two dimensions.
        dtype: A block type.
        tensor: The tensor's name, for messages.

    Attributes:
        loss: As underflow, the values of blocks that come back no better than zeros would be: too small for the scale.
        clamp: Changes nothing here: what is too large for a scale is refused.

    Raises:
        ValueError: The rows are not whole blocks (falling back is the planner's business).
        ConvertError: The type cannot be written on this machine.
    """

    def __init__(self, source: Source, dtype: str, *, tensor: str) -> None:
        kind = DTYPES[dtype]
        if len(source.shape) < 2 or source.shape[-1] % kind.block:
            raise ValueError(f"{tensor!r}: {list(source.shape)} has no rows of whole {dtype} blocks of {kind.block}")
        if not DTYPES[source.dtype].is_float:
            raise ValueError(f"{tensor!r}: {source.dtype} cannot be quantised")
        _check_writable(dtype)
        self.source = source
        self.dtype = dtype
        self.tensor = tensor
        self.shape = source.shape
        self.align = source.align
        self.loss = CastLoss()
        self.clamp = False
        self._lock = threading.Lock()
        self._safe = _NVFP4_MOST if dtype == "NVFP4" else _SAFE

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`."""
        return self.source.whole

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`; ``uint8 [rows, …, bytes per row]``.

        Raises:
            ConvertError: Values are NaN or infinite, or a block's scale would be (ggml would write a block of NaN
                without a word); with the tensor, the first row and the count.
        """
        kind = DTYPES[self.dtype]
        values = np.ascontiguousarray(self.source.read(start, stop)).reshape(-1)
        out = np.empty(values.size // kind.block * kind.block_bytes, np.uint8)
        fast = self.dtype == "Q8_0" and self.source.dtype in ("F16", "BF16") and ggml.available()
        scratch = np.empty(min(PIECE, values.size), np.float32)
        lost = 0
        for at in range(0, values.size, PIECE):
            piece = values[at : at + PIECE]
            largest = largest_of(piece, self.source.dtype)
            if not math.isfinite(largest):
                raise refusal(self.source, self.dtype, tensor=self.tensor)
            wide = to_float32(piece, self.source.dtype, scratch[: piece.size])
            first = at // kind.block * kind.block_bytes
            blocks = out[first : first + piece.size // kind.block * kind.block_bytes]
            if fast:
                quantize_q8_0(wide, piece, self.source.dtype, blocks)
            else:
                quantize(wide.reshape(1, -1), self.dtype, out=blocks.reshape(1, -1))
            if largest > self._safe:
                self._check_scales(blocks, wide, start, at)
            lost += self._lost(blocks, wide)
        if lost:
            with self._lock:
                self.loss.underflowed += lost
        return out.reshape(stop - start, *self.shape[1:-1], -1)

    def _lost(self, blocks: NDArray[np.uint8], wide: NDArray[np.float32]) -> int:
        """How many values lie in blocks whose scale float16 could not hold, so that zeros would do as well."""
        kind = DTYPES[self.dtype]
        at = _SCALE_AT.get(self.dtype)
        if at is None:  # scales of other types
            few = np.arange(wide.size // kind.block)
        else:
            scales = blocks.view(np.uint16)[at // 2 :: kind.block_bytes // 2]
            few = np.flatnonzero((scales & np.uint16(0x7C00)) == 0)
        if not few.size:
            return 0
        before = wide.reshape(-1, kind.block)[few]
        there = before.any(axis=1)  # of zeros nothing is lost
        if not there.any():
            return 0
        before, few = before[there], few[there]
        back = dequantize(blocks.reshape(-1, kind.block_bytes)[few].reshape(1, -1), self.dtype).reshape(before.shape)
        before, back = before.astype(np.float64), back.astype(np.float64)
        gone = np.square(back - before).sum(axis=1) >= _LOST * np.square(before).sum(axis=1)
        return int(np.count_nonzero(before[gone]))

    def _row(self, start: int, element: int) -> int:
        """The row, counted over all leading dimensions, of an element of the block that begins at ``start``."""
        return start * math.prod(self.shape[1:-1]) + element // self.shape[-1]

    def _check_scales(self, blocks: NDArray[np.uint8], wide: NDArray[np.float32], start: int, at: int) -> None:
        """Judge large values by what comes back: an infinite scale makes a whole block NaN or infinite."""
        back = dequantize(blocks.reshape(1, -1), self.dtype)[0]
        most = _NVFP4_MOST if self.dtype == "NVFP4" else _MOST
        bad = np.flatnonzero(~np.isfinite(back) | (np.abs(wide) > most))
        if not bad.size:
            return
        row = self._row(start, at + int(bad[0]))
        block = DTYPES[self.dtype].block
        lost = np.unique(bad // block).size
        largest = float(np.abs(wide[bad // block * block]).max(initial=0.0))
        largest = max(largest, float(np.abs(wide[bad]).max()))
        raise ConvertError(
            Problem(
                "scale_overflow",
                f"{self.tensor!r} cannot be quantised to {self.dtype}: values up to {largest:.4g} are too large "
                f"for the scale of {lost:,} blocks of {block}, the first in row {row:,}.",
                tensor=self.tensor,
                found={"row": row, "count": int(lost), "largest": largest},
                hint=f"Keep this tensor wider: `--tensor-type {self.tensor}=f32`.",
            )
        )
