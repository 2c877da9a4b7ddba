"""The CRC-32 that a ``torch.save`` archive states of each storage, compared with the storage's bytes.

torch itself does not look at them when it loads. Every conversion of files on this machine does, chunks of
``torch.distributed.checkpoint`` included: of a small source before anything is written, of a larger one beside the
writing, in the order in which the plan reads, so that one read from the disk serves both. Of several ranks each
compares a share. ``validate --scan`` and ``--hash`` do so too. ``load_into``, ``verify``, ``diff`` and ``inspect`` do
not: they leave no file that would outlive the damaged one.

What comes from the Hub without being kept here is compared as it passes (:mod:`convert.hub.crcs`).
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from convert.errors import ConvertError, Problem
from convert.source import FilePool
from convert.storages import Storage, put_in_order, storages
from convert.workers import Workers

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.plan import ConversionPlan
    from convert.writer import Writer

#: Up to so many bytes of storages are compared before anything is written (about a quarter of a second on one core).
SMALL = 256 << 20
#: How many bytes of a source are read ahead of what writes it: the system's cache has to hold them until then.
_AHEAD = 256 << 20
_PIECE = 16 << 20
_READ = 1 << 20


def compare_crcs(
    ckpt: Checkpoint,
    *,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
) -> tuple[int, list[Problem]]:
    """Compare the storages that hold the checkpoint's tensors with their CRCs, all of them.

    Args:
        ckpt: Of any format; only archives of ``torch.save`` on this machine have such CRCs.
        threads: Pieces read at once, through buffers of 1 MiB.
        progress: Called with the bytes read since the last call, from any thread.
        cancel: When set, reading stops; nothing is found then.

    Returns:
        How many storages were compared, and a problem of kind ``crc`` for each that is not what its archive states.

    Raises:
        ConvertError: The system cannot read a file, or it is damaged or shorter than before.
    """
    reader = _Reader(
        ckpt.pool, storages(ckpt) if ckpt.pool.local else [], cancel or threading.Event(), progress or (lambda _: None)
    )
    try:
        reader.start(threads)
        reader.wait()
    finally:
        reader.stop()
    if cancel is not None and cancel.is_set():
        return 0, []
    return len(reader.storages), reader.problems()


class Beside:
    """The comparison that goes on beside one conversion, and ends it where a storage is not what it should be.

    Args:
        plan: What is carried out.
        cancel: When set, reading stops.
    """

    def __init__(self, plan: ConversionPlan, cancel: threading.Event) -> None:
        self._storages = storages(plan.source) if plan.source.pool.local else []
        self._bytes = put_in_order(self._storages, plan)
        self._small = sum(s.nbytes for s in self._storages) <= SMALL
        self._reader = _Reader(plan.source.pool, self._storages, cancel)
        self._cancel = cancel
        self._writer: Writer | None = None

    def follow(self, progress: Callable[[int], None] | None) -> Callable[[int], None]:
        """What a writer is to call with the bytes that it has written: it stops the work when a problem was found."""

        def wrote(count: int) -> None:
            self._reader.advance(count)
            self._reader.check()
            if progress is not None:
                progress(count)

        return wrote

    def begin(self, writer: Writer, threads: int) -> None:
        """Before anything is written: compare a small source, and begin with the writer's share of a larger one.

        Raises:
            ConvertError: Of a small source: a storage is not what its archive states, or cannot be read.
            MemoryError: There is none for a thread.
        """
        self._writer = writer
        if self._small:
            if writer.leads:
                self._reader.start(threads)
                self.finish()
            return
        self._reader.storages = [self._storages[n] for n in writer.deal([s.nbytes for s in self._storages])]
        self._reader.pace = self._bytes / max(1, writer.nbytes)
        self._reader.start(max(1, threads // 2))

    def finish(self) -> None:
        """Everything is written: wait for the rest of the comparison.

        Raises:
            ConvertError: A storage is not what its archive states, or cannot be read.
            Cancelled: The caller's event was set.
        """
        self._reader.wait()
        if self._writer is not None and self._cancel.is_set():
            raise self._writer.cancelled
        self._reader.check()

    def stop(self) -> None:
        """End all threads; after this no file is read any more."""
        self._reader.stop()


class _Reader(Workers):
    """Threads that read storages in order, a piece each at a time; ``pace`` is source bytes per byte written."""

    def __init__(
        self,
        pool: FilePool,
        wanted: list[Storage],
        cancel: threading.Event,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.storages = wanted
        self.pace: float | None = None
        self._pool = pool
        self._cancel = cancel
        self._progress = progress
        self._pieces: Iterator[tuple[Storage, int, int]] = iter(())
        self._written = 0
        self._wrong = False
        self._error: BaseException | None = None

    def start(self, threads: int) -> None:
        """Begin to read.

        Raises:
            MemoryError: There is none for a thread.
        """
        self._pieces = (
            (storage, at, min(_PIECE, storage.nbytes - at))
            for storage in self.storages
            for at in range(0, storage.nbytes, _PIECE)
        )
        self._begin(self._work, max(1, threads) if self.storages else 0, "crc")

    def advance(self, count: int) -> None:
        """So many more bytes are written."""
        with self._news:
            self._written += count
            self._news.notify_all()

    def check(self) -> None:
        """Raise what was found so far.

        Raises:
            ConvertError: Storages that are not what their archives state, or that cannot be read.
        """
        if self._error is not None:
            raise self._error
        if self._wrong:
            raise ConvertError(self.problems())

    def problems(self) -> list[Problem]:
        """What was found so far."""
        with self._news:
            return [p for p in (s.problem() for s in self.storages) if p is not None]

    def wait(self) -> None:
        """Wait until all has been read, or reading was stopped.

        Raises:
            BaseException: What a thread was ended by.
        """
        with self._news:
            self.pace = None
            self._news.notify_all()
        self._join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            buffer = memoryview(bytearray(_READ))
            while (piece := self._next()) is not None:
                storage, at, length = piece
                crc = self._crc(storage, at, length, buffer)
                if crc is None:
                    return
                with self._news:
                    storage.add(at, length, crc)
                    self._wrong = self._wrong or storage.problem() is not None
                self._progress(length)
        except BaseException as error:
            with self._news:
                self._error = error
                self._stop = True
                self._news.notify_all()

    def _next(self) -> tuple[Storage, int, int] | None:
        with self._news:
            piece = next(self._pieces, None)
            while piece is not None and not self._stopped() and self._early(piece[0].due + piece[1]):
                self._news.wait()
        return piece

    def _early(self, due: int) -> bool:
        return self.pace is not None and due > self._written * self.pace + _AHEAD

    def _stopped(self) -> bool:
        return self._stop or self._cancel.is_set()

    def _crc(self, storage: Storage, start: int, length: int, buffer: memoryview) -> int | None:
        """The CRC-32 of a piece; None when reading was stopped."""
        found = 0
        for at in range(start, start + length, _READ):
            if self._stopped():
                return None
            part = buffer[: min(_READ, start + length - at)]
            self._pool.read_into(storage.key[0], part, storage.offset + at)
            found = zlib.crc32(part, found)
        return found
