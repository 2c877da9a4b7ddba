"""Sets of byte ranges: which parts of a file are there."""

from __future__ import annotations

import bisect
from collections.abc import Iterator


class Intervals:
    """Half-open ranges that do not touch, in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        """Add ``start`` to ``stop``."""
        if start >= stop:
            return
        low = bisect.bisect_left(self._stops, start)
        high = bisect.bisect_right(self._starts, stop)
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._starts[low:high] = [start]
        self._stops[low:high] = [stop]

    def covers(self, start: int, stop: int) -> bool:
        """Whether all of it is in."""
        at = bisect.bisect_right(self._starts, start) - 1
        return start >= stop or (at >= 0 and self._stops[at] >= stop)

    def gaps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """What of ``start`` to ``stop`` is not in."""
        at = max(0, bisect.bisect_right(self._stops, start))
        for low, high in zip(self._starts[at:], self._stops[at:], strict=True):
            if low >= stop:
                break
            if start < low:
                yield start, low
            start = max(start, high)
        if start < stop:
            yield start, stop

    def overlap(self, start: int, stop: int) -> int:
        """How many bytes of ``start`` to ``stop`` are in."""
        return max(0, stop - start) - sum(b - a for a, b in self.gaps(start, stop))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))
