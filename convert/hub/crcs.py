"""The CRCs of ``torch.save`` archives on the Hub, compared as the bytes pass on their way into an output.

Nothing is fetched for this: a storage of which parts are not needed, or were fetched by an earlier run, is not
compared, and that is said. Sources on this machine are :mod:`convert.storage_crcs`' business.
"""

from __future__ import annotations

import bisect
import threading
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from convert.errors import Problem
from convert.storages import Storage

_READ = 1 << 20


class PassingCrcs:
    """Storages whose bytes pass, each once, in any order and through any threads.

    Args:
        wanted: The storages.
    """

    def __init__(self, wanted: Iterable[Storage]) -> None:
        self._files: dict[Path, list[Storage]] = {}
        for storage in wanted:
            self._files.setdefault(storage.key[0], []).append(storage)
        for found in self._files.values():
            found.sort(key=lambda s: s.offset)
        self._lock = threading.Lock()

    def passed(self, path: Path, start: int, data: bytes | bytearray | memoryview) -> None:
        """The bytes of a file from ``start`` on."""
        found = self._files.get(path, [])
        stop = start + len(data)
        view = memoryview(data)
        for storage in found[max(0, bisect.bisect_right(found, start, key=lambda s: s.offset) - 1) :]:
            if storage.offset >= stop:
                break
            low, high = max(start, storage.offset), min(stop, storage.offset + storage.nbytes)
            if low < high:
                crc = zlib.crc32(view[low - start : high - start])
                with self._lock:
                    storage.add(low - storage.offset, high - low, crc)

    def finish(
        self,
        kept: Callable[[Path], Iterable[tuple[int, int]]],
        read: Callable[[Path, memoryview, int], object],
    ) -> tuple[list[str], list[Problem]]:
        """Everything has passed, but for what lay here before.

        Args:
            kept: The ranges of a file that lay here.
            read: Fills a buffer from an offset of what lies here.

        Returns:
            What is to be said of it, and a problem of kind ``crc`` for each storage that is not what its archive
            states.
        """
        everything = [storage for found in self._files.values() for storage in found]
        if not everything:
            return [], []
        buffer = memoryview(bytearray(_READ))
        for path in self._files:
            for start, stop in kept(path):
                for at in range(start, stop, _READ):
                    part = buffer[: min(_READ, stop - at)]
                    read(path, part, at)
                    self.passed(path, at, part)
        compared = sum(storage.found is not None for storage in everything)
        left = len(everything) - compared
        notes = [f"the CRC-32 of {compared:,} storages compared as they passed"] if compared else []
        notes += [f"the CRC-32 of {left:,} storages not compared: not all of them was fetched"] if left else []
        return notes, [problem for storage in everything if (problem := storage.problem()) is not None]
