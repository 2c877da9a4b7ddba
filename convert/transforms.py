"""What can happen to a tensor's values and shape between two layouts, beside rotary order and type.

Each class is a :class:`~convert.source.Source` over another one and works on blocks of rows. Which of them is needed
follows from the table: a convention that differs (``norm``, ``linear``), experts stored singly or stacked, or a named
operation of a row (:data:`OPERATIONS`), every one of which has an inverse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from convert.cast import to_float32
from convert.dtypes import DTYPES
from convert.source import WHOLE_TENSOR_LIMIT, Array, Extent, FileSource, Source, StridedSource


class Slice(Source):
    """Indices ``start`` to ``stop`` of a source along ``axis`` (not 0: :class:`~convert.source.Rows` does that)."""

    def __init__(self, source: Source, axis: int, start: int, stop: int) -> None:
        self.source = source
        self.axis = axis
        self.start, self.stop = start, stop
        shape = list(source.shape)
        shape[axis] = stop - start
        self.shape = tuple(shape)
        self.dtype = source.dtype
        self.align = source.align

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`."""
        return self.source.whole

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        index = (slice(None),) * self.axis + (slice(self.start, self.stop),)
        return np.ascontiguousarray(self.source.read(start, stop)[index])


def transposed(source: Source) -> Source:
    """A matrix with its axes swapped; straight from the file where the source lies there."""
    if isinstance(source, FileSource) and not DTYPES[source.dtype].is_quantized and len(source.shape) == 2:
        rows, columns = source.shape
        return StridedSource(replace(source.spec, shape=(columns, rows), strides=(1, columns)), source.pool)
    if isinstance(source, Slice) and isinstance(source.source, FileSource) and source.axis == 1:
        inner = source.source
        offset = inner.spec.offset + source.start * DTYPES[inner.dtype].block_bytes
        shape, strides = (source.shape[1], source.shape[0]), (1, inner.shape[1])
        return StridedSource(replace(inner.spec, shape=shape, strides=strides, offset=offset), inner.pool)
    return Transposed(source)


class Zeros(Source):
    """A tensor of zeros, which no file holds."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape = shape
        self.dtype = dtype

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        return np.zeros((stop - start, *self.shape[1:]), DTYPES[self.dtype].storage)


class Transposed(Source):
    """A composed matrix with its axes swapped: read at once up to 64 MiB, else in slabs of its rows."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.shape = (source.shape[1], source.shape[0])
        self.dtype = source.dtype

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`."""
        return math.prod(self.shape) * DTYPES[self.dtype].block_bytes <= WHOLE_TENSOR_LIMIT

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        out = np.empty((stop - start, self.shape[1]), DTYPES[self.dtype].storage)
        slab = max(1, (8 << 20) // max(1, self.source.row_bytes) // self.source.align) * self.source.align
        for at in range(0, self.shape[1], slab):
            end = min(at + slab, self.shape[1])
            out[:, at:end] = self.source.read(at, end)[:, start:stop].T
        return out


class Stacked(Source):
    """Sources of one shape along a new first axis (experts stored singly, seen as one tensor)."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self.parts = list(parts)
        self.shape = (len(self.parts), *self.parts[0].shape)
        self.dtype = self.parts[0].dtype

    def extent(self, start: int, stop: int) -> Extent | None:
        """See :meth:`Source.extent`."""
        return self.parts[start].extent(0, self.shape[1]) if stop == start + 1 else None

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        return np.stack([part.read(0, self.shape[1]) for part in self.parts[start:stop]])


class Expert(Source):
    """One index of the first axis of a stacked source."""

    def __init__(self, source: Source, index: int) -> None:
        self.source = source
        self.index = index
        self.shape = source.shape[1:]
        self.dtype = source.dtype

    def extent(self, start: int, stop: int) -> Extent | None:
        """See :meth:`Source.extent`."""
        whole = self.source.extent(self.index, self.index + 1)
        if whole is None:
            return None
        file, offset, nbytes = whole
        row = nbytes // self.shape[0]
        return file, offset + start * row, (stop - start) * row

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`: an expert is read at once where it cannot be read in rows."""
        return not isinstance(self.source, Stacked)

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        if isinstance(self.source, Stacked):
            return self.source.parts[self.index].read(start, stop)
        return self.source.read(self.index, self.index + 1)[0][start:stop]


class Elementwise(Source):
    """A function of each value, computed and stored in float32."""

    def __init__(self, source: Source, function: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> None:
        self.source = source
        self.function = function
        self.shape = source.shape
        self.dtype = "F32"
        self.align = source.align

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`."""
        return self.source.whole

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        return self.function(to_float32(self.source.read(start, stop), self.source.dtype))


class Reshaped(Source):
    """The same values in another shape with the same first dimension (a size-1 axis dropped or added)."""

    def __init__(self, source: Source, shape: tuple[int, ...]) -> None:
        if math.prod(shape) != math.prod(source.shape) or shape[0] != source.shape[0]:
            raise ValueError(f"{list(source.shape)} cannot be seen as {list(shape)}")
        self.source = source
        self.shape = shape
        self.dtype = source.dtype
        self.align = source.align

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`."""
        return self.source.whole

    def extent(self, start: int, stop: int) -> Extent | None:
        """See :meth:`Source.extent`."""
        return self.source.extent(start, stop)

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        return self.source.read(start, stop).reshape(stop - start, *self.shape[1:])


class HeadsRegrouped(Source):
    """Row groups ``[outer, inner, head]`` put in the order ``[inner, outer, head]`` from row ``first`` on.

    Args:
        source: Rows; those before ``first`` stay.
        first: Where the groups begin.
        outer: Size of the slower index in the source.
        inner: Size of the faster index in the source.
        head: Rows per group member.
    """

    def __init__(self, source: Source, *, first: int, outer: int, inner: int, head: int) -> None:
        if first + outer * inner * head != source.shape[0]:
            raise ValueError(f"{source.shape[0]} rows are not {first} + {outer} x {inner} x {head}")
        self.source = source
        self.first, self.outer, self.inner, self.head = first, outer, inner, head
        self.shape = source.shape
        self.dtype = source.dtype
        self.align = math.gcd(first, head) if first else head

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        blocks = []
        row = start
        while row < stop:
            if row < self.first:
                end = min(stop, self.first)
                blocks.append(self.source.read(row, end))
            else:
                group, within = divmod(row - self.first, self.head)
                end = min(stop, row + self.head - within)
                fast, slow = divmod(group, self.outer)
                at = self.first + (slow * self.inner + fast) * self.head + within
                blocks.append(self.source.read(at, at + end - row))
            row = end
        return np.concatenate(blocks)


class ColumnsRegrouped(Source):
    """The same as :class:`HeadsRegrouped` on the columns of a matrix, row by row."""

    def __init__(self, source: Source, *, outer: int, inner: int, head: int) -> None:
        if outer * inner * head != source.shape[1]:
            raise ValueError(f"{source.shape[1]} columns are not {outer} x {inner} x {head}")
        self.source = source
        self.groups = (outer, inner, head)
        self.shape = source.shape
        self.dtype = source.dtype
        self.align = source.align

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`."""
        return self.source.whole

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        block = self.source.read(start, stop)
        return block.reshape(stop - start, *self.groups).swapaxes(1, 2).reshape(block.shape)


@dataclass(frozen=True, slots=True)
class Operation:
    """A named, invertible operation of a table row: from the hub layout to another one, and back.

    One that is not ``exact`` computes in float32, and comes back within its rounding. ``needs`` are the arguments that
    a row must give, ``takes`` those that it may.
    """

    forward: Callable[..., Source]
    inverse: Callable[..., Source]
    exact: bool = True
    needs: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()


def _negative_exponential(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return -np.exp(values)


def _log_of_negative(values: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(invalid="ignore", divide="ignore"):  # a damaged file's values become NaN, which a scan finds
        return np.log(-values)


def _regroup(source: Source, *, groups: int, per_group: int, head: int, start: int = 0) -> Source:
    dealt = HeadsRegrouped(source, first=start, outer=groups, inner=per_group, head=head)
    return source if 1 in (groups, per_group) else dealt  # nothing moves, and rows stay runs of bytes


def _regroup_columns(source: Source, *, groups: int, per_group: int, head: int) -> Source:
    dealt = ColumnsRegrouped(source, outer=groups, inner=per_group, head=head)
    return source if 1 in (groups, per_group) else dealt


def _back(function: Callable[..., Source]) -> Callable[..., Source]:
    """The inverse of a regrouping: the same with the counts exchanged."""
    return lambda source, *, groups, per_group, **more: function(source, groups=per_group, per_group=groups, **more)


_GROUPS = frozenset({"groups", "per_group", "head"})

#: What ``to.<layout> = [{ op = … }]`` may name.
OPERATIONS: dict[str, Operation] = {
    "neg_exp": Operation(
        lambda s: Elementwise(s, _negative_exponential),
        lambda s: Elementwise(s, _log_of_negative),
        exact=False,
    ),
    # The axis of size 1 that a depthwise convolution's weight has: [C, 1, K] in the hub, [C, K] there.
    "squeeze": Operation(
        lambda s: Reshaped(s, (s.shape[0], *s.shape[2:])),
        lambda s: Reshaped(s, (s.shape[0], 1, *s.shape[1:])),
    ),
    # Value heads grouped by key head in the hub, dealt out in turn there (rows).
    "tile_heads": Operation(_regroup, _back(_regroup), needs=_GROUPS, takes=frozenset({"start"})),
    # The same on columns.
    "tile_columns": Operation(_regroup_columns, _back(_regroup_columns), needs=_GROUPS),
}


def shift(source: Source, delta: float) -> Source:
    """Every value plus ``delta``, in float32 (zero-centred norm weights against plain ones)."""
    step = np.float32(delta)
    return Elementwise(source, lambda values: values + step)
