"""The CRC-32 that a ``torch.save`` archive states of each storage, compared with the storage's bytes.

torch itself does not look at them when it loads. Every conversion of files on this machine does, chunks of
``torch.distributed.checkpoint`` included: of a small source before anything is written, of a larger one beside the
writing, in the order in which the plan reads, so that one read from the disk serves both. Of several ranks each
compares a share. ``validate --scan`` and ``--hash`` do so too. ``load_into``, ``verify``, ``diff`` and ``inspect`` do
not: they leave no file that would outlive the damaged one.

A CRC of zero states nothing: it is what torch writes under ``torch.serialization.set_crc32_options(False)``, and for
storages left empty by ``torch.serialization.skip_data()``.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from convert.clamp import within
from convert.errors import ConvertError, Problem
from convert.formats.crc import crc32_combine
from convert.formats.spec import TensorSpec
from convert.formats.zip_directory import ZipDirectory
from convert.io_errors import reading
from convert.report import fold_names
from convert.source import FilePool

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


@dataclass(slots=True)
class _Storage:
    """Where a storage lies, what CRC its archive states, the tensors in it, and the CRCs of its pieces read so far.

    ``due`` is how many bytes of the source a plan reads before it comes to this one.
    """

    key: tuple[Path, str]
    offset: int
    nbytes: int
    wanted: int
    names: list[str] = field(default_factory=list)
    due: int = 0
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    seen: int = 0
    found: int | None = None

    def add(self, at: int, length: int, crc: int) -> None:
        """A piece has been read."""
        self.parts[at] = length, crc
        self.seen += length
        if self.seen == self.nbytes:
            found = 0
            for _, (length, crc) in sorted(self.parts.items()):
                found = crc32_combine(found, crc, length)
            self.found = found
            self.parts.clear()

    def problem(self) -> Problem | None:
        """What is wrong with it, once all of it has been read."""
        if self.found in (None, self.wanted):
            return None
        file = self.key[0]
        what = f"the {self.nbytes:,} bytes of {', '.join(fold_names(self.names))}"
        return Problem(
            "crc",
            f"{file.name}: {what} do not have the CRC-32 that the archive states.",
            tensor=self.names[0],
            file=str(file),
            found=f"{self.found:08x}",
            wanted=f"{self.wanted:08x}",
            hint="The file was damaged or changed after it was written: fetch it again, and compare its hash with the "
            "published one (convert validate --hash, or --checksums FILE).",
        )


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
    reader = _Reader(ckpt.pool, _storages(ckpt), cancel or threading.Event(), progress or (lambda _: None))
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
        self._storages = _storages(plan.source)
        self._bytes = _put_in_order(self._storages, plan)
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


class _Reader:
    """Threads that read storages in order, a piece each at a time; ``pace`` is source bytes per byte written."""

    def __init__(
        self,
        pool: FilePool,
        storages: list[_Storage],
        cancel: threading.Event,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.storages = storages
        self.pace: float | None = None
        self._pool = pool
        self._cancel = cancel
        self._progress = progress
        self._news = threading.Condition()
        self._pieces: Iterator[tuple[_Storage, int, int]] = iter(())
        self._running = 0
        self._written = 0
        self._stop = False
        self._wrong = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

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
        for _ in range(max(1, threads) if self.storages else 0):
            thread = threading.Thread(target=self._work, name="crc", daemon=True)
            with self._news:
                self._running += 1
            try:
                thread.start()
            except RuntimeError as error:  # so does Python say that there is no memory for a thread
                with self._news:
                    self._running -= 1
                if not self._threads:
                    raise MemoryError(str(error)) from error
                return
            self._threads.append(thread)

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
            while self._running:
                self._news.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End all threads."""
        with self._news:
            self._stop = True
            self._news.notify_all()
        for thread in self._threads:
            thread.join()

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
            self._error = error
            self._stop = True
        finally:
            with self._news:
                self._running -= 1
                self._news.notify_all()

    def _next(self) -> tuple[_Storage, int, int] | None:
        with self._news:
            piece = next(self._pieces, None)
            while piece is not None and not self._stopped() and self._early(piece[0].due + piece[1]):
                self._news.wait()
        return piece

    def _early(self, due: int) -> bool:
        return self.pace is not None and due > self._written * self.pace + _AHEAD

    def _stopped(self) -> bool:
        return self._stop or self._cancel.is_set()

    def _crc(self, storage: _Storage, start: int, length: int, buffer: memoryview) -> int | None:
        """The CRC-32 of a piece; None when reading was stopped."""
        found = 0
        for at in range(start, start + length, _READ):
            if self._stopped():
                return None
            part = buffer[: min(_READ, start + length - at)]
            self._pool.read_into(storage.key[0], part, storage.offset + at)
            found = zlib.crc32(part, found)
        return found


def _storages(ckpt: Checkpoint) -> list[_Storage]:
    """Every storage that holds a tensor of the checkpoint and has a CRC, in the order of the files."""
    if ckpt.format not in ("torch", "dcp") or not ckpt.pool.local:
        return []
    named: dict[Path, dict[str, tuple[TensorSpec, list[str]]]] = {}
    for name, specs in ckpt.tensors.items():
        for leaf in _leaves(specs):
            if leaf.storage is not None:
                names = named.setdefault(leaf.file, {}).setdefault(leaf.storage, (leaf, []))[1]
                names += [name] if name not in names else []
    found: list[_Storage] = []
    for path, storages in named.items():
        if ckpt.format == "dcp":  # each chunk is an archive of its own, and its only tensor fills its only storage
            found += [
                _Storage((path, key), spec.offset, spec.nbytes, spec.crc, names)
                for key, (spec, names) in storages.items()
                if spec.crc and spec.nbytes
            ]
            continue
        with reading(path), open(path, "rb", buffering=0) as file:
            directory = ZipDirectory(file, path)
            root = next(n for n in directory.entries if n.endswith("/data.pkl") and n.count("/") == 1)
            root = root.removesuffix("data.pkl")
            for key, (_, names) in storages.items():
                entry = directory.entries.get(f"{root}data/{key}")
                if entry is not None and entry.crc and entry.size:
                    found.append(_Storage((path, key), directory.data_offset(entry), entry.size, entry.crc, names))
    return sorted(found, key=lambda s: (str(s.key[0]), s.offset))


def _leaves(specs: Sequence[TensorSpec]) -> Iterator[TensorSpec]:
    """What lies in files: the tensors, the pieces of joined ones, the scales of FP8."""
    for spec in specs:
        if spec.parts:
            yield from _leaves(spec.parts)
        else:
            yield spec
        if spec.scale is not None:
            yield from _leaves([spec.scale.spec])


def _put_in_order(storages: list[_Storage], plan: ConversionPlan) -> int:
    """Sort storages as the plan reads them, those that it does not read last; returns the bytes that it reads."""
    first: dict[tuple[Path, str | None], int] = {}
    at = 0
    for output in plan.source.pool.ordered(plan.outputs) if storages else ():
        for source in within(output.source):
            spec = getattr(source, "spec", None)
            for leaf in _leaves([spec]) if isinstance(spec, TensorSpec) else ():
                first.setdefault((leaf.file, leaf.storage), at)
                at += leaf.nbytes
    for storage in storages:
        storage.due = first.get(storage.key, at)
    storages.sort(key=lambda s: s.due)
    return at
