"""Lazy tensors: where values come from, and what happens to them on the way, a block of rows at a time.

A :class:`Source` has a shape and a type and yields blocks of rows. Compositions (join, slice, permute,
cast …) yield blocks computed from blocks, so memory depends on the block and never on the tensor. A
source whose rows lie untouched in a file also tells their byte range (:meth:`Source.extent`), and the
engine then moves them inside the kernel.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from convert.cast import CastLoss, cast
from convert.dtypes import DTYPES
from convert.errors import ConvertError, FormatError, Problem
from convert.formats.spec import TensorSpec
from convert.io_errors import io_problem

if TYPE_CHECKING:
    from convert.journal import Finished
    from convert.plan import ConversionPlan, Output

Array = NDArray[np.generic]
Extent = tuple[Path, int, int]

#: A tensor whose rows are scattered in the file is taken at once up to this many bytes (rows of a
#: transposed matrix read singly cost seven times as much).
WHOLE_TENSOR_LIMIT = 64 << 20


class FilePool:
    """Read-only file descriptors, opened once per path and shared by all threads (``pread`` has no cursor).

    Attributes:
        local: Whether a tensor's bytes lie in its file; else only :meth:`read_into` has them.
        opened, notes, hashes: Descriptors so far; what is to be said in the end; SHA-256 of files that were read whole.
    """

    local = True

    def __init__(self) -> None:
        self.opened: dict[Path, int] = {}
        self._lock = threading.Lock()
        self.notes: list[str] = []
        self.hashes: dict[Path, str] = {}

    def ordered(self, outputs: Sequence[Output]) -> Sequence[Output]:
        """The outputs of a plan in the order in which they are best written."""
        return outputs

    def begin(self, plan: ConversionPlan, finished: Finished | None) -> None:
        """A plan is about to be carried out, of which ``finished`` is done."""

    def finish(self) -> None:
        """Everything has been read that the plan needs; what was read is checked as far as it can be."""

    def fd(self, path: Path) -> int:
        """The descriptor for ``path``."""
        with self._lock:
            if path not in self.opened:
                self.opened[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            return self.opened[path]

    def read_into(self, path: Path, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset``.

        Raises:
            FormatError: The file ends first.
            ConvertError: The system cannot read it.
        """
        from convert.platform import read_at

        try:
            got = read_at(self.fd(path), buffer, offset)
        except OSError as error:
            raise ConvertError(io_problem(error, path, writing=False)) from error
        if got != len(buffer):
            raise FormatError(
                Problem(
                    "truncated",
                    f"{path.name} ended while it was being read (wanted {len(buffer):,} bytes at {offset:,}).",
                    file=str(path),
                    hint="Another program may be writing it; try again when it has finished.",
                )
            )

    def source(self, spec: TensorSpec) -> Source:
        """The source for a stored tensor."""
        if spec.parts:
            return Joined([self.source(part) for part in spec.parts], spec.axis)
        return FileSource(spec, self) if spec.strides is None else StridedSource(spec, self)

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            for fd in self.opened.values():
                os.close(fd)
            self.opened.clear()


class Source(ABC):
    """A tensor that is read in blocks of rows.

    Attributes:
        shape: Dimensions, torch order, at least one.
        dtype: Canonical type name of the blocks.
        align: Blocks must start and end at multiples of this many rows (or at the end).
    """

    shape: tuple[int, ...]
    dtype: str
    align: int = 1

    @abstractmethod
    def read(self, start: int, stop: int) -> Array:
        """Rows ``start`` to ``stop`` as raw storage values, shape ``[stop - start, *shape[1:]]``."""

    def extent(self, start: int, stop: int) -> Extent | None:
        """The byte range ``(file, offset, nbytes)`` that holds exactly these rows, or None."""
        return None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return DTYPES[self.dtype].nbytes((1, *self.shape[1:])) if DTYPES[self.dtype].block == 1 else self._block_row()

    def _block_row(self) -> int:
        if len(self.shape) == 1:
            raise ValueError("a one-dimensional quantised tensor has no rows")
        return DTYPES[self.dtype].nbytes(self.shape[1:])

    @property
    def whole(self) -> bool:
        """Whether it is better read at once than in blocks (rows scattered in the file)."""
        return False


class FileSource(Source):
    """A tensor stored contiguously in a file. A scalar is seen as one row."""

    def __init__(self, spec: TensorSpec, pool: FilePool) -> None:
        self.spec = spec
        self.pool = pool
        self.shape = spec.shape or (1,)
        self.dtype = spec.dtype

    def extent(self, start: int, stop: int) -> Extent:
        """See :meth:`Source.extent`."""
        row = self.row_bytes
        return self.spec.file, self.spec.offset + start * row, (stop - start) * row

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`; block-quantised rows come back as ``uint8 [rows, …, bytes per row]``."""
        file, offset, nbytes = self.extent(start, stop)
        raw = np.empty(nbytes, np.uint8)
        if nbytes:
            self.pool.read_into(file, raw.data, offset)
        kind = DTYPES[self.dtype]
        if kind.is_quantized:
            return raw.reshape(stop - start, *self.shape[1:-1], -1)
        return raw.view(kind.storage).reshape(stop - start, *self.shape[1:])


class StridedSource(Source):
    """A tensor stored with strides (a transposed or sliced view in a torch file)."""

    def __init__(self, spec: TensorSpec, pool: FilePool) -> None:
        assert spec.strides is not None
        self.spec = spec
        self.pool = pool
        self.shape = spec.shape or (1,)
        self.dtype = spec.dtype
        self.strides = spec.strides or (1,)

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`."""
        return self._span(0, self.shape[0]) <= WHOLE_TENSOR_LIMIT

    def _span(self, start: int, stop: int) -> int:
        size = DTYPES[self.dtype].block_bytes
        dims = (stop - start, *self.shape[1:])
        if 0 in dims:
            return 0
        return (sum((n - 1) * s for n, s in zip(dims, self.strides, strict=True)) + 1) * size

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        kind = DTYPES[self.dtype]
        size = kind.block_bytes
        shape = (stop - start, *self.shape[1:])
        offset = self.spec.offset + start * self.strides[0] * size
        span = self._span(start, stop)
        if span == 0:
            return np.empty(shape, kind.storage)
        if span <= max(2 * size * math.prod(shape), WHOLE_TENSOR_LIMIT):
            raw = np.empty(span, np.uint8)
            self.pool.read_into(self.spec.file, raw.data, offset)
            view = np.lib.stride_tricks.as_strided(raw.view(kind.storage), shape, [s * size for s in self.strides])
            return np.ascontiguousarray(view)
        return self._read_runs(shape, offset)

    def _read_runs(self, shape: tuple[int, ...], offset: int) -> Array:
        """Read a large view run by run along its densest dimension."""
        kind = DTYPES[self.dtype]
        dense = min(range(len(shape)), key=lambda d: (self.strides[d] if shape[d] > 1 else math.inf, -shape[d]))
        out = np.empty(shape, kind.storage)
        moved = np.moveaxis(out, dense, -1)
        others = [s for d, s in enumerate(self.strides) if d != dense]
        step = self.strides[dense]
        run = np.empty((shape[dense] - 1) * step + 1 if shape[dense] else 0, kind.storage)
        for index in np.ndindex(*moved.shape[:-1]):
            at = offset + sum(i * s for i, s in zip(index, others, strict=True)) * kind.block_bytes
            self.pool.read_into(self.spec.file, run.view(np.uint8).data, at)
            moved[index] = run[::step] if step > 1 else run
        return out


def open_source(spec: TensorSpec, pool: FilePool) -> Source:
    """The source for a stored tensor, FP8 already multiplied by its scales."""
    from convert.float8 import Float8

    return pool.source(spec) if spec.scale is None else Float8(spec, pool)


def read_rows(source: Source, start: int, stop: int) -> Array:
    """Rows of a source, also where they are no whole multiples of its ``align``; then some more are read."""
    low = start // source.align * source.align
    high = min(-(-stop // source.align) * source.align, source.shape[0])
    if (low, high) == (start, stop):
        return source.read(start, stop)
    return source.read(low, high)[start - low : stop - low]


class Joined(Source):
    """Sources joined along axis 0 or 1 (Meta's model-parallel files)."""

    def __init__(self, parts: Sequence[Source], axis: int) -> None:
        self.parts = list(parts)
        self.axis = axis
        first = self.parts[0]
        shape = list(first.shape)
        shape[axis] = sum(p.shape[axis] for p in self.parts)
        self.shape = tuple(shape)
        self.dtype = first.dtype
        self.align = math.lcm(*(p.align for p in self.parts))
        self._starts = [0]
        for part in self.parts:
            self._starts.append(self._starts[-1] + part.shape[axis])

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`."""
        return any(p.whole for p in self.parts)

    def _within(self, start: int, stop: int) -> list[tuple[Source, int, int]]:
        found = []
        for part, base in zip(self.parts, self._starts, strict=False):
            low, high = max(start, base), min(stop, base + part.shape[0])
            if low < high:
                found.append((part, low - base, high - base))
        return found

    def extent(self, start: int, stop: int) -> Extent | None:
        """See :meth:`Source.extent`."""
        if self.axis != 0:
            return None
        found = self._within(start, stop)
        return found[0][0].extent(found[0][1], found[0][2]) if len(found) == 1 else None

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        if self.axis == 0:
            blocks = [read_rows(part, a, b) for part, a, b in self._within(start, stop)]
            return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return np.concatenate([p.read(start, stop) for p in self.parts], axis=self.axis)


class Rows(Source):
    """Rows ``start`` to ``stop`` of another source."""

    def __init__(self, source: Source, start: int, stop: int) -> None:
        self.source = source
        self.start = start
        self.shape = (stop - start, *source.shape[1:])
        self.dtype = source.dtype
        self.align = source.align

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`."""
        return self.source.whole

    def extent(self, start: int, stop: int) -> Extent | None:
        """See :meth:`Source.extent`."""
        return self.source.extent(self.start + start, self.start + stop)

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        return read_rows(self.source, self.start + start, self.start + stop)


class RopePermuted(Source):
    """Rows of rotary pairs in another order, head by head.

    Half order keeps the pair ``(i, i + d/2)``, interleaved order keeps it as ``(2i, 2i + 1)`` (facts:
    Hugging Face's Llama uses the first, Meta's and ggml's ``llama`` the second). Rows past ``rotary_dim`` in a
    head are not rotated and stay.

    Args:
        source: Rows of ``n`` heads of ``head_dim`` rows; one-dimensional for a bias.
        head_dim: Rows per head.
        rotary_dim: How many of them are rotated; even.
        to: ``"half"`` or ``"interleaved"``.
    """

    def __init__(self, source: Source, *, head_dim: int, to: str, rotary_dim: int | None = None) -> None:
        if source.shape[0] % head_dim:
            raise ValueError(f"{source.shape[0]} rows are not whole heads of {head_dim}")
        self.source = source
        self.head_dim = head_dim
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.to = to
        self.shape = source.shape
        self.dtype = source.dtype
        self.align = math.lcm(source.align, head_dim)

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`."""
        return self.source.whole

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`; ``start`` and ``stop`` are multiples of ``head_dim``."""
        block = self.source.read(start, stop)
        heads = (stop - start) // self.head_dim
        tail = block.shape[1:]
        old = block.reshape(heads, self.head_dim, -1)
        new = np.empty_like(old)
        rotary, half = self.rotary_dim, self.rotary_dim // 2
        if self.to == "half":
            np.copyto(
                new[:, :rotary].reshape(heads, 2, half, -1),
                old[:, :rotary].reshape(heads, half, 2, -1).transpose(0, 2, 1, 3),
            )
        else:
            np.copyto(
                new[:, :rotary].reshape(heads, half, 2, -1),
                old[:, :rotary].reshape(heads, 2, half, -1).transpose(0, 2, 1, 3),
            )
        if rotary < self.head_dim:
            new[:, rotary:] = old[:, rotary:]
        return new.reshape(stop - start, *tail)


class Cast(Source):
    """Values of another source in another floating-point type; losses are counted in :attr:`loss`.

    Attributes:
        loss: What narrowing did to values.
        clamp: Whether values too large for the type become its largest value (counted all the same), not infinity.
    """

    def __init__(self, source: Source, dtype: str) -> None:
        self.source = source
        self.shape = source.shape
        self.dtype = dtype
        self.align = source.align
        self.loss = CastLoss()
        self.clamp = False
        self._lock = threading.Lock()

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`."""
        return self.source.whole

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        loss = CastLoss()
        block = self.source.read(start, stop)
        out = cast(block, self.source.dtype, self.dtype, loss)
        if self.clamp and loss.overflowed:
            from convert.clamp import clamp

            out = clamp(block, self.source.dtype, out, self.dtype)
        if loss != CastLoss():
            with self._lock:
                self.loss.add(loss)
        return out
