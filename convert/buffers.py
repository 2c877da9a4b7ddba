"""What some of the book's classes keep in their state dict beside weights: causal masks and rotary tables.

A state dict without them does not load strictly into such a class, so ``--buffers`` writes them. Their values follow
from the config; on reading they are dropped (``[[ignore]]`` of the table).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from convert.layout import Dims
from convert.source import Array, Source
from convert.table import MappingTable

Rows = Callable[[int, int, int, Dims], NDArray[np.float32]]


def _causal_mask(start: int, stop: int, width: int, dims: Dims) -> NDArray[np.float32]:
    """1 where a query may not look: right of the diagonal (``torch.triu(torch.ones(C, C), diagonal=1)``)."""
    return np.triu(np.ones((stop - start, width), np.float32), k=start + 1)


def _angles(start: int, stop: int, width: int, dims: Dims) -> NDArray[np.float32]:
    from convert import rope

    frequencies = np.array(rope.inverse_frequencies(rope.primary(dims.config["rope_parameters"]), width), np.float32)
    angles = np.arange(start, stop, dtype=np.float32)[:, None] * frequencies
    return np.concatenate([angles, angles], axis=1)


def _cos(start: int, stop: int, width: int, dims: Dims) -> NDArray[np.float32]:
    return np.cos(_angles(start, stop, width, dims))


def _sin(start: int, stop: int, width: int, dims: Dims) -> NDArray[np.float32]:
    return np.sin(_angles(start, stop, width, dims))


#: What ``[buffers.<kind>]`` may say: rows ``start`` to ``stop`` of a matrix of ``width`` columns.
KINDS: Mapping[str, Rows] = {"causal_mask": _causal_mask, "cos": _cos, "sin": _sin}


class Buffer(Source):
    """A matrix that is computed, a block of rows at a time."""

    def __init__(self, kind: str, shape: tuple[int, ...], dims: Dims) -> None:
        self.kind = kind
        self.dims = dims
        self.shape = shape
        self.dtype = "F32"

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        return KINDS[self.kind](start, stop, self.shape[1], self.dims)


def buffers(table: MappingTable, dims: Dims, book_class: str | None) -> list[tuple[str, Source]]:
    """Names and values of the buffers that one of the book's classes has in its state dict.

    Args:
        table: The family.
        dims: Its dims for this config.
        book_class: The class; the family's first when None.
    """
    name = book_class or next(iter(table.classes), "")
    out: list[tuple[str, Source]] = []
    for layer in range(dims.n_layers):
        prefix = table.prefix["scratch"].replace("{l}", str(layer))
        for kind in table.classes.get(name, {}).get("buffers", ()):
            row = table.buffers[kind]
            shape = tuple(int(dims.value(s, layer)) for s in row.shape)
            out.append((prefix + row.name, Buffer(kind, shape, dims)))
    return out
