"""The orders in which the rotary rows of a head can lie in a file: the two that layouts have, and those mistakes make.

A converter that turns one order into the other may be forgotten, used the wrong way round, used twice, or given the
head count of Q for K. Each outcome is one :class:`Order`: which frequency each row of a head turns at. Which of them a
file has is :mod:`convert.qk_probe`'s to find.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
BASES = ("half", "interleaved")


@dataclass(frozen=True, slots=True)
class Order:
    """An order of the rows of a head.

    Attributes:
        base: ``half``, pairs (i, i + d/2), or ``interleaved``, pairs (2i, 2i + 1).
        moved: What was then done to the rows once more: reordered as if from the other order ``to`` this one; or None.
        block: In blocks of how many rows that was done; None: in whole heads.
    """

    base: str
    moved: str | None = None
    block: int | None = None

    def __str__(self) -> str:
        if self.moved is None:
            return self.base
        return f"{self.base}+to_{self.moved}" + (f"/{self.block}" if self.block else "")

    @property
    def words(self) -> str:
        """The order for people."""
        if self.moved is None:
            return f"{self.base} order"
        how = f" in blocks of {self.block} rows (with another head count)" if self.block else ""
        if self.moved == self.base:
            return f"{self.base} order, reordered{how} as if it had still to become that"
        return f"{self.base} order, reordered{how} to {self.moved} order"


def reorder(width: int, to: str, block: int) -> Integers:
    """``new[p] = old[index[p]]`` for rows put ``to`` an order from the other one, in blocks of ``block`` rows."""
    rows = np.arange(width).reshape(-1, block)
    shape = (-1, block // 2, 2) if to == "half" else (-1, 2, block // 2)
    return rows.reshape(shape).transpose(0, 2, 1).reshape(-1)


@cache
def frequencies(order: Order, width: int) -> Integers:
    """The number of the frequency at which each of ``width`` rows of a head turns."""
    row = np.arange(width)
    found = row % (width // 2) if order.base == "half" else row // 2
    return found if order.moved is None else found[reorder(width, order.moved, order.block or width)]


@cache
def distances(order: Order, width: int) -> Integers:
    """How many frequencies any two rows are apart, ``[width, width]``; 0 for the rows of one pair."""
    found = frequencies(order, width)
    return np.abs(found[:, None] - found[None, :])


@cache
def orders(width: int, blocks: tuple[int, ...] = ()) -> tuple[Order, ...]:
    """All different orders of heads of ``width`` rows; the plain ones first.

    Args:
        width: Rows that turn, even.
        blocks: Rows per head if the tensor had another number of heads; blocks as large as a head add nothing.
    """
    found = [Order("half"), Order("interleaved"), Order("half", "half"), Order("interleaved", "interleaved")]
    for block in blocks:
        if 4 <= block < width and width % block == 0 and block % 2 == 0:
            found += [Order(base, to, block) for base in BASES for to in BASES]
    seen: dict[bytes, Order] = {}
    for order in found:  # in small heads some are the same
        seen.setdefault(distances(order, width).tobytes(), order)
    return tuple(seen.values())


@cache
def classes(width: int, blocks: tuple[int, ...] = ()) -> dict[Order, tuple[Integers, Integers]]:
    """For each order of :func:`orders`: how far apart the pairs of rows are, and how many are as far apart.

    The pairs are those of the upper triangle of ``[width, width]``, row by row.
    """
    upper = np.triu_indices(width, 1)
    found = {order: distances(order, width)[upper] for order in orders(width, blocks)}
    return {order: (kind, np.maximum(np.bincount(kind), 1)) for order, kind in found.items()}


def fault(orders: Mapping[str, Order], expected: str) -> tuple[str, int | None] | None:
    """What :data:`convert.faults.FAULTS` calls rows that are in other orders than the expected one.

    Args:
        orders: Of ``q`` and ``k``, those that are not as they should be.
        expected: ``half`` or ``interleaved``.

    Returns:
        The name, and the block that it has to do with; None where it has no name.
    """
    found = set(orders.values())
    if len(found) != 1:
        return None
    order, side = found.pop(), "".join(sorted(orders, reverse=True))
    other = BASES[1 - BASES.index(expected)]
    names = {
        Order(other): {"qk": "qk-permuted", "k": "k-permuted", "q": "q-permuted"},
        Order(expected, expected): {"qk": "qk-permuted-twice", "k": "k-permuted-twice", "q": "q-permuted-twice"},
        Order(other, other): {"qk": "qk-inverse"},
        Order(other, expected, order.block): {"k": "k-wrong-heads"},
        Order(expected, other, order.block): {"k": "k-wrong-heads-back"},
    }
    name = names.get(order, {}).get(side)
    return (name, order.block) if name else None
