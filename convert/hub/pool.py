"""Reads of tensors that lie on the Hub: from what was kept here already, from the stream, else by a request.

To everything else it is a :class:`convert.source.FilePool`. What is read before a conversion starts (headers, the
question whether head and embedding are one) is kept in the sparse files of the shadow, so no byte is asked for twice.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from convert.errors import ConvertError, FormatError, Problem
from convert.hub.crcs import PassingCrcs
from convert.hub.intervals import Intervals
from convert.hub.ranges import Ranges
from convert.hub.repository import RemoteFile
from convert.hub.stream import Stream, Wanted
from convert.platform import read_at, write_at
from convert.source import FilePool, FileSource, Source, StridedSource
from convert.storages import storages

if TYPE_CHECKING:
    from convert.journal import Finished
    from convert.plan import ConversionPlan, Output

#: Of a file of which so little is not needed, all is fetched, so that its SHA-256 can be compared.
_SMALL_GAPS = 16 << 20
_GAP_SHARE = 50


class RemotePool(FilePool):
    """The weight files of a repository, seen as files.

    Args:
        ranges: Reads byte ranges of the repository.
        folder: The shadow's folder, removed when the pool is closed.

    Attributes:
        ranges: As given.
        notes: What is to be said of a conversion, when it has ended.
        hashes: SHA-256 of the files that passed whole and were what the repository says.
    """

    local = False

    def __init__(self, ranges: Ranges, folder: Path) -> None:
        super().__init__()
        self.ranges = ranges
        self.notes: list[str] = []
        self.hashes: dict[Path, str] = {}
        self._files: dict[Path, RemoteFile] = {}
        self._kept: dict[Path, Intervals] = {}
        self._fds: dict[Path, int] = {}
        self._keeping = threading.Lock()
        self._one: dict[Path, threading.Lock] = {}
        self._stream: Stream | None = None
        self._crcs = PassingCrcs([])
        self._begun = False  # from then on nothing more is kept
        self._remove = weakref.finalize(self, shutil.rmtree, folder, True)

    def add(self, path: Path, file: RemoteFile) -> None:
        """Make the sparse file for one of the repository's."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        os.ftruncate(fd, file.size)
        self._files[path], self._kept[path], self._fds[path] = file, Intervals(), fd
        self._one[path] = threading.Lock()
        self.dated(path)

    def dated(self, path: Path) -> None:
        """A time of change that tells contents apart, since the file's own says nothing."""
        file = self._files[path]
        os.utime(path, ns=(0, int((file.sha256 or file.blob or "0")[:13], 16)))

    def keep(self, path: Path, start: int, stop: int) -> None:
        """Have ``start`` to ``stop`` of a file in its shadow.

        Raises:
            ConvertError: It cannot be had, or the disk is full.
        """
        with self._one[path]:
            with self._keeping:
                gaps = list(self._kept[path].gaps(start, stop))
            for low, high in gaps:
                data = self.ranges.read(self._files[path], low, high)
                try:
                    write_at(self._fds[path], data, low)
                except OSError as error:
                    from convert.io_errors import io_problem

                    raise ConvertError(io_problem(error, path, writing=True)) from error
                with self._keeping:
                    self._kept[path].add(low, high)
            if gaps:
                self.dated(path)

    def read_into(self, path: Path, buffer: memoryview, offset: int) -> None:
        """See :meth:`FilePool.read_into`."""
        if path not in self._files:
            super().read_into(path, buffer, offset)
            return
        stop = offset + len(buffer)
        file = self._files[path]
        if stop > file.size:
            raise FormatError(
                Problem("truncated", f"{path.name} ends at {file.size:,}, {stop:,} was asked for.", file=str(path))
            )
        with self._keeping:
            there = self._kept[path].covers(offset, stop)
        if not there and not self._begun:
            self.keep(path, offset, stop)
            there = True
        if there:
            read_at(self._fds[path], buffer, offset)
            return
        with self._keeping:
            gaps = list(self._kept[path].gaps(offset, stop))
        read_at(self._fds[path], buffer, offset)  # what is kept; the rest is overwritten
        for low, high in gaps:
            part = buffer[low - offset : high - offset]
            if self._stream is None or not self._stream.read(path, part, low):
                self.ranges.read_into(file, part, low)

    def ordered(self, outputs: Sequence[Output]) -> Sequence[Output]:
        """See :meth:`FilePool.ordered`: as their first bytes lie in the repository's files."""
        place = {path: number for number, path in enumerate(self._files)}

        def first(output: Output) -> tuple[int, int]:
            return min(((place.get(p, 0), a) for p, a, _ in _leaves(output.source)), default=(0, 0))

        return sorted(outputs, key=first)

    def begin(self, plan: ConversionPlan, finished: Finished | None) -> None:
        """See :meth:`FilePool.begin`: what the plan's unfinished outputs need is fetched ahead, in order."""
        from convert.writer import casts_within

        needed: dict[Path, Intervals] = {path: Intervals() for path in self._files}
        whole = True
        for number, output in enumerate(plan.outputs):
            lossy = any(True for _ in casts_within(output.source))
            if finished and not lossy and finished.covers(number, 0, output.source.shape[0]):
                whole = False
                continue
            for path, start, stop in _leaves(output.source):
                if path in needed:
                    needed[path].add(start, stop)
        wanted = [self._wanted(path, needed[path]) for path in self._files]
        self._begun = True
        self._crcs = PassingCrcs(storages(plan.source))
        self._stream = Stream(self.ranges, [w for w in wanted if w is not None], self._crcs.passed)
        self.notes = [] if whole else ["pieces of an earlier run were not fetched again"]

    def _wanted(self, path: Path, needed: Intervals) -> Wanted | None:
        """The ranges to fetch of one file: all of it where hardly more than the tensors is in it."""
        file, kept = self._files[path], self._kept[path]
        have = Intervals()
        for a, b in (*kept, *needed):
            have.add(a, b)
        gap = sum(b - a for a, b in have.gaps(0, file.size))
        complete = gap <= max(_SMALL_GAPS, file.size // _GAP_SHARE) and bool(list(needed))
        span = [(0, file.size)] if complete else list(needed)
        ranges = [(a, b) for low, high in span for a, b in kept.gaps(low, high)]
        if not ranges and not complete:
            return None
        return Wanted(path, file, ranges, needed, self._fds[path] if complete and file.sha256 else None)

    def finish(self) -> None:
        """See :meth:`FilePool.finish`.

        Raises:
            ConvertError: A file's SHA-256 is not what the repository says, or a storage's CRC-32 not what its archive
                states.
        """
        if self._stream is None:
            return
        stream, self._stream = self._stream, None
        try:
            found = stream.finish()
        finally:
            stream.stop()
        problems: list[Problem] = []
        for path, sha256 in found.items():
            file = self._files[path]
            if sha256 == file.sha256:
                self.hashes[path] = sha256
                continue
            problems.append(
                Problem(
                    "hub_damaged",
                    f"{file.path} came with the SHA-256 {sha256}, and the Hub says {file.sha256}.",
                    file=str(path),
                    found=sha256,
                    wanted=file.sha256,
                    hint="Something between here and the Hub (a proxy, a mirror) changes files.",
                )
            )
        notes, wrong = self._crcs.finish(self._kept.__getitem__, self._read_kept)
        if problems or wrong:
            raise ConvertError(problems or wrong)
        self.notes += notes
        self.notes.append(
            f"{len(self.hashes)} of {len(self._files)} files passed whole, with the SHA-256 that the Hub states"
        )

    def _read_kept(self, path: Path, buffer: memoryview, offset: int) -> None:
        read_at(self._fds[path], buffer, offset)

    def close(self) -> None:
        """End the stream, close everything and remove the shadow."""
        if self._stream is not None:
            self._stream.stop()
            self._stream = None
        for fd in self._fds.values():
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds.clear()
        super().close()
        self._remove()


def _leaves(source: Source) -> Iterable[tuple[Path, int, int]]:
    """The byte ranges of the stored tensors that a composed source is made of."""
    from convert.clamp import within

    for inner in within(source):
        if isinstance(inner, FileSource):
            yield inner.spec.file, inner.spec.offset, inner.spec.offset + inner.spec.nbytes
        elif isinstance(inner, StridedSource):
            size = inner._span(0, inner.shape[0])
            yield inner.spec.file, inner.spec.offset, inner.spec.offset + size
