"""Who writes what: the pieces of an output dealt to ranks, balanced by the bytes that are written.

Every rank computes the same table from the same plan; nothing is sent. A share is made of stretches of whole pieces
that alternate through the output, since equal bytes of different types do not cost equal time.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

#: The largest stretch that goes to one rank in a row, in bytes, and how many stretches a rank gets at least.
STRETCH_BYTES = 64 << 20
STRETCHES = 64

#: Output number, first row, row after the last, bytes.
Piece = tuple[int, int, int, int]


class Shares:
    """The owners of all pieces.

    Args:
        pieces: Every piece of the output, in order.
        world: How many ranks.

    Attributes:
        nbytes: Bytes of each rank's share.
    """

    def __init__(self, pieces: Iterable[Piece], world: int) -> None:
        listed = list(pieces)
        stretch = min(STRETCH_BYTES, sum(p[3] for p in listed) // (world * STRETCHES) + 1)
        self.nbytes = [0] * world
        self._starts: dict[int, list[int]] = {}
        self._owners: dict[int, list[int]] = {}
        owner, taken, last = 0, stretch, -1
        for number, start, _, nbytes in listed:
            if taken >= stretch:
                owner, taken, last = min(range(world), key=self.nbytes.__getitem__), 0, -1
            if number != last:
                self._starts.setdefault(number, []).append(start)
                self._owners.setdefault(number, []).append(owner)
                last = number
            self.nbytes[owner] += nbytes
            taken += nbytes

    def owner(self, number: int, row: int) -> int:
        """The rank that writes this row of output ``number``."""
        at = bisect.bisect_right(self._starts[number], row) - 1
        return self._owners[number][at]
