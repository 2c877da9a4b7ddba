"""The open files of one run, and the pieces that go into them: copied, computed, or found there and compared.

In parallel, in bounded memory. What lies before and after this, checks, names and clean-up, is in :mod:`convert.run`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from convert.cast import CastLoss
from convert.clamp import within
from convert.errors import ConvertError, Problem
from convert.fetched import confirm
from convert.formats.crc import crc32_combine
from convert.hashing import Hasher, Hashes
from convert.io_errors import io_problem, writing
from convert.journal import Journal
from convert.plan import ConversionPlan, Output, Target, piece_rows
from convert.platform import copy_range, read_at, reserve, write_at
from convert.source import Source
from convert.stops import put_off, still_pending

#: Bytes per piece that is copied inside the kernel.
COPY_BYTES = 32 << 20
#: What --dtype may be instead where values are too large for a type.
_WIDER = {"F16": "bfloat16 or float32", "BF16": "float32"}

Progress = Callable[[int], None]


@runtime_checkable
class Lossy(Protocol):
    """A source that narrows values and counts what that did to them."""

    dtype: str
    loss: CastLoss
    clamp: bool


class Cancelled(Exception):
    """The caller's event was set; the partial output has been removed, or kept where the run can be resumed."""


class Writer:
    """The open files of one run and the pieces that go into them.

    Args:
        plan: What is written.
        folder: The partial folder.
        progress: Called with bytes written since the last call, from any thread.
        cancel: Stops the work when set.
        journal: Where finished pieces are listed; those that it lists already are compared instead of written.

    Attributes:
        fds: Descriptors of the plan's files, in their order.
        casts: Every source that narrows values.
        found: Bytes that an earlier run had written and that are right.
        redone: Bytes that it had listed, and that were not there or not right.
    """

    #: Whether this writer answers for the files' sizes and headers (of several ranks one does).
    leads = True

    def __init__(
        self,
        plan: ConversionPlan,
        folder: Path,
        progress: Progress | None,
        cancel: threading.Event,
        journal: Journal | None = None,
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.progress = progress or (lambda _: None)
        self.cancel = cancel
        self.journal = journal
        self.failed = threading.Event()
        self.fds: list[int] = []
        self.found = self.redone = 0
        self.casts = list(_casts(plan))
        for cast in self.casts:  # a plan may be carried out more than once
            cast.loss = CastLoss()
        self._numbers = {id(output): number for number, output in enumerate(plan.outputs)}
        self._crcs: list[dict[str, list[tuple[int, int, int]]]] = [{} for _ in plan.files]
        self._lock = threading.Lock()
        self._hasher: Hasher | None = None

    @property
    def cancelled(self) -> BaseException:
        """What is raised when ``cancel`` was set."""
        return Cancelled()

    def mine(self, output: Output, row: int) -> bool:
        """Whether this row of an output is this writer's to write and to check."""
        return True

    @property
    def nbytes(self) -> int:
        """About how many bytes are this writer's to write."""
        return sum(file.size for file in self.plan.files)

    def deal(self, sizes: Sequence[int]) -> list[int]:
        """Of jobs of these sizes, the numbers of those that are this writer's to do."""
        return list(range(len(sizes)))

    def together(self, checked: int) -> int:
        """How many blocks have been checked, by all that write."""
        return checked

    def stop(self, error: BaseException) -> None:
        """The run has failed: end what goes on, and close the files."""
        self.close()

    def close(self) -> None:
        """Close the files."""
        if self._hasher is not None:  # before the files that it reads are closed
            self._hasher.close()
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds = []

    def write(self, threads: int, *, hashes: bool = False) -> Hashes | None:
        """Write every weight file and sync it.

        Args:
            threads: Workers.
            hashes: Take the SHA-256 of every source and output file in the same pass.

        Returns:
            The hashes, if they were asked for.

        Raises:
            ConvertError: Reading or writing failed, or values do not fit their type.
            Cancelled: The caller's event was set.
        """
        fresh = 0 if self.journal is not None and self.journal.finished else os.O_TRUNC
        # Whoever put a link there meant another file (Windows has no such flag, and asks for binary).
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        for file in self.plan.files:
            path = self.folder / file.name
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                fd = os.open(path, flags | fresh, 0o666)
                self.fds.append(fd)
                reserve(fd, file.size)
        if self.journal is not None:
            self.journal.follow(self.fds)
        pool = self.plan.source.pool
        if hashes:
            beside = self.plan.source.files if pool.local else ()  # what comes from elsewhere is hashed as it passes
            self._hasher = Hasher(self.plan.files, self.fds, beside, threads=threads)
        confirm(self, threads)
        pool.begin(self.plan, self.journal.finished if self.journal is not None else None)
        with ThreadPoolExecutor(max(1, threads)) as workers:
            self._drain(workers, threads)
        pool.finish()
        self._stop_on_overflow()
        for number, (file, fd) in enumerate(zip(self.plan.files, self.fds, strict=True)):
            with writing(self.folder / file.name):
                for offset, data in file.frame(self.crcs(number)):
                    write_at(fd, data, offset)
        for file, fd in zip(self.plan.files, self.fds, strict=True):
            with writing(self.folder / file.name):
                os.fsync(fd)
        if self.journal is not None:
            self.journal.settle()
        if self._hasher is None:
            return None
        found = self._hasher.finish()
        found.sources |= pool.hashes
        return found

    def _drain(self, pool: ThreadPoolExecutor, threads: int) -> None:
        """Feed pieces to the workers, a few at a time, so that a failure stops at once."""
        pending: set[Future[None]] = set()
        try:
            with put_off() as check:
                for piece in self.pieces():
                    while len(pending) >= 4 * threads:
                        pending = still_pending(pending, check)
                    if self.cancel.is_set():
                        raise Cancelled
                    try:
                        pending.add(pool.submit(self._guarded, *piece))
                    except RuntimeError as error:  # so does Python say that there is no memory for a thread
                        raise MemoryError(str(error)) from error
                while pending:
                    pending = still_pending(pending, check)
        except BaseException:
            self.failed.set()
            raise
        if self.cancel.is_set():
            raise Cancelled

    def pieces(self) -> Iterator[tuple[Output, int, int]]:
        """Every output in blocks of rows, in order."""
        for output in self.plan.source.pool.ordered(self.plan.outputs):
            rows = output.source.shape[0]
            small = max(1, piece_rows(output.source))
            large = max(small, COPY_BYTES // max(1, output.source.row_bytes)) // small * small
            start = 0
            while start < rows:
                stop = min(start + large, rows)
                # What has to pass through this process, be it where two files of a joined tensor meet, comes in small.
                if not self._kernel(output, start, stop):
                    stop = min(start + small, rows)
                yield output, start, stop
                start = stop

    def _kernel(self, output: Output, start: int, stop: int) -> bool:
        """Whether these rows can move without passing through this process."""
        plain = len(output.targets) == 1 and output.targets[0].columns is None
        seen = self.plan.files[output.targets[0].file].needs_crc or not self.plan.source.pool.local
        return plain and not seen and output.source.extent(start, stop) is not None

    def _guarded(self, output: Output, start: int, stop: int) -> None:
        if self.cancel.is_set() or self.failed.is_set():
            return
        crcs = self.write_piece(output, start, stop)
        if self.journal is not None:
            files = frozenset(target.file for target in output.targets)
            nbytes = (stop - start) * output.source.row_bytes
            self.journal.add(self.number(output), start, stop, files=files, nbytes=nbytes, crcs=crcs)

    def number(self, output: Output) -> int:
        """The output's number in the plan, by which the journal knows it."""
        return self._numbers[id(output)]

    def write_piece(self, output: Output, start: int, stop: int) -> tuple[int, ...]:
        """Bring rows ``start`` to ``stop`` of an output to all its places; CRCs of what came from elsewhere."""
        listed = self.journal is not None and self.journal.finished.covers(self.number(output), start, stop)
        if listed and not self.plan.source.pool.local and not any(True for _ in casts_within(output.source)):
            return self._skip(output, start, stop)
        if not self._kernel(output, start, stop):
            return self._compute(output, start, stop, listed=listed)
        if not listed:
            self._copy(output, start, stop)
        else:  # to be compared, the bytes have to be seen: in small blocks, like all that is
            small = max(1, piece_rows(output.source))
            for low in range(start, stop, small):
                self._compute(output, low, min(low + small, stop), listed=True)
        return ()

    def _skip(self, output: Output, start: int, stop: int) -> tuple[int, ...]:
        """What came from elsewhere is not fetched again: it has the CRCs that it had (:mod:`convert.fetched`)."""
        assert self.journal is not None
        crcs = self.journal.finished.crcs[self.number(output), start, stop]
        for target, crc in zip(output.targets, crcs, strict=True):
            at, count = self.extent(output, target, start, stop)
            with self._lock:
                self._crcs[target.file].setdefault(target.name, []).append((start, count, crc))
                self.found += count
            self._wrote(target.file, at, count)
        return crcs

    def extent(self, output: Output, target: Target, start: int, stop: int) -> tuple[int, int]:
        """Where rows ``start`` to ``stop`` of an output lie in a target's file: offset and length."""
        nbytes = next(e.nbytes for e in self.plan.files[target.file].entries if e.name == target.name)
        row = nbytes // max(1, output.source.shape[0])
        return self._offset(target) + start * row, (stop - start) * row

    def _copy(self, output: Output, start: int, stop: int) -> None:
        extent = output.source.extent(start, stop)
        assert extent is not None
        path, offset, count = extent
        target = output.targets[0]
        at = self._offset(target) + start * output.source.row_bytes
        try:
            copied = copy_range(self.plan.source.pool.fd(path), self.fds[target.file], offset, at, count)
        except OSError as error:
            raise ConvertError(self._copy_problem(error, path, target)) from error
        if copied != count:
            raise ConvertError(
                Problem(
                    "truncated",
                    f"{path.name} became shorter while it was being read.",
                    file=str(path),
                    hint="Another program may be writing it; try again when it has finished.",
                )
            )
        self._wrote(target.file, at, count)

    def _copy_problem(self, error: OSError, path: Path, target: Target) -> Problem:
        made = self.folder / self.plan.files[target.file].name
        if error.errno != errno.EIO:
            return io_problem(error, made, writing=True)
        said = f"{path.name} could not be copied into {made.name}: {error.strerror}."
        return Problem("read", said, file=str(path), hint="Is one of the two disks failing, or was it taken away?")

    def _compute(self, output: Output, start: int, stop: int, *, listed: bool) -> tuple[int, ...]:
        block = output.source.read(start, stop)
        crcs = []
        for target in output.targets:
            part = block if target.columns is None else np.ascontiguousarray(block[:, slice(*target.columns)])
            raw = np.ascontiguousarray(part).view(np.uint8).data.cast("B")
            row = len(raw) // max(1, stop - start)
            self._put(target, raw, self._offset(target) + start * row, listed=listed)
            if self.plan.files[target.file].needs_crc or not self.plan.source.pool.local:
                crcs.append(zlib.crc32(raw))
                with self._lock:
                    self._crcs[target.file].setdefault(target.name, []).append((start, len(raw), crcs[-1]))
            self._wrote(target.file, self._offset(target) + start * row, len(raw))
        return tuple(crcs)

    def _wrote(self, file: int, at: int, count: int) -> None:
        if self._hasher is not None:
            self._hasher.wrote(file, at, count)
        self.progress(count)

    def _put(self, target: Target, raw: memoryview, at: int, *, listed: bool) -> None:
        """Write bytes, unless an earlier run left just these here."""
        path = self.folder / self.plan.files[target.file].name
        if listed:
            there = bytearray(len(raw))
            try:
                read_at(self.fds[target.file], memoryview(there), at)
            except OSError as error:
                raise ConvertError(io_problem(error, path, writing=False)) from error
            same = there == raw
            with self._lock:
                self.found += len(raw) if same else 0
                self.redone += 0 if same else len(raw)
            if same:
                return
        with writing(path):
            write_at(self.fds[target.file], raw, at)

    def _offset(self, target: Target) -> int:
        return self.plan.files[target.file].offsets[target.name]

    def crcs(self, number: int) -> dict[str, int]:
        """CRC-32 of each tensor of a file that wants them, joined from its pieces."""
        out = {}
        for name, pieces in self._crcs[number].items():
            crc = 0
            for _, length, value in sorted(pieces):
                crc = crc32_combine(crc, value, length)
            out[name] = crc
        return out

    def losses(self) -> dict[str, int]:
        """What narrowing did to values so far, by kind; kinds that did not occur are left out."""
        counts = {
            "underflowed": sum(c.loss.underflowed for c in self.casts),
            "clamped": sum(c.loss.overflowed for c in self.casts if c.clamp),
            "not_finite": sum(c.loss.not_finite for c in self.casts),
        }
        return {kind: count for kind, count in counts.items() if count}

    def _stop_on_overflow(self) -> None:
        problems = []
        seen: set[int] = set()  # the ranks of one tensor share its casts
        for output in self.plan.outputs:
            for cast in casts_within(output.source):
                if cast.loss.overflowed and not cast.clamp and id(cast) not in seen:
                    seen.add(id(cast))
                    name = output.targets[0].name
                    problems.append(
                        Problem(
                            "overflow",
                            f"{name!r}: {cast.loss.overflowed:,} values are too large for {cast.dtype} "
                            "and would become infinite.",
                            tensor=name,
                            found=cast.loss.overflowed,
                            wanted=0,
                            hint=f"Choose --dtype {_WIDER.get(cast.dtype, 'keep')}; "
                            "--clamp stores the largest value instead.",
                        )
                    )
        if problems:
            raise ConvertError(problems)


def _casts(plan: ConversionPlan) -> Iterator[Lossy]:
    seen: set[int] = set()
    for output in plan.outputs:
        for cast in casts_within(output.source):
            if id(cast) not in seen:
                seen.add(id(cast))
                yield cast


def casts_within(source: Source) -> Iterator[Lossy]:
    """The sources inside a composed one that narrow values."""
    for inner in within(source):
        if isinstance(inner, Lossy):
            yield inner
