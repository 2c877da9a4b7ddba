"""The orders in which the rotary rows of a head can lie in a file: the two that layouts have, and those mistakes make.

A converter that turns one order into the other may be forgotten, used the wrong way round, used twice, or given the
head count of Q for K. Each outcome is one :class:`Order`: which frequency each row of a head turns at. Which of them a
file has is :mod:`convert.qk_probe`'s to find.
"""

from __future__ import annotations

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
def orders(width: int, block: int | None = None) -> tuple[Order, ...]:
    """All different orders of heads of ``width`` rows; the plain ones first.

    Args:
        width: Rows that turn, even.
        block: Rows per block if the tensor had another number of heads; blocks as large as a head add nothing.
    """
    found = [Order("half"), Order("interleaved"), Order("half", "half"), Order("interleaved", "interleaved")]
    if block and block < width and width % block == 0 and block % 2 == 0 and block >= 4:
        found += [Order(base, to, block) for base in BASES for to in BASES]
    seen: dict[bytes, Order] = {}
    for order in found:  # in small heads some are the same
        seen.setdefault(distances(order, width).tobytes(), order)
    return tuple(seen.values())
