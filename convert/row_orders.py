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
#: Width of the bell of :func:`nearness`, as a share of all frequencies. Measured on SmolLM2, Gemma 3 270M and a model
#: of four layers trained for minutes: from 0.12 to 0.3 the first two come out right, the last one at 0.2 and 0.3.
_WIDE = 0.2


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
            # Of those that small blocks make equal the first stays: what converters do, then what nobody has done yet.
            found += [Order(base, to, block) for base, to in (BASES, BASES[::-1])]
            found += [Order(base, base, block) for base in BASES]
    seen: dict[bytes, Order] = {}
    for order in found:  # in small heads some are the same
        seen.setdefault(distances(order, width).tobytes(), order)
    return tuple(seen.values())


@cache
def nearness(width: int, blocks: tuple[int, ...] = ()) -> dict[Order, NDArray[np.float64]]:
    """For each order of :func:`orders`: how near in frequency any two different rows are, ``[width, width]``.

    A bell over the number of frequencies between them, a fifth of all wide: wide enough to be no matter of neighbours
    alone, which all orders keep together. The sum over all pairs of rows is one.
    """
    found = {}
    for order in orders(width, blocks):
        near = np.exp(-((distances(order, width) / (_WIDE * (width // 2))) ** 2))
        np.fill_diagonal(near, 0)
        found[order] = near / near.sum()
    return found


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
