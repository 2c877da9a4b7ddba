"""Carrying a plan out: bytes to their places, in parallel, in bounded memory, complete or not at all.

Where the output goes meanwhile, and how it gets its name, is :mod:`convert.output`'s business.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from convert.cast import CastLoss
from convert.errors import ConvertError, Problem
from convert.formats.crc import crc32_combine
from convert.hashing import Hasher, Hashes
from convert.output import Claim, check_target, write_sidecar
from convert.plan import ConversionPlan, Output, Target, piece_rows
from convert.platform import available_memory, copy_range, keep_freed_memory, write_at
from convert.readback import read_back
from convert.record import seal
from convert.source import Source

#: Bytes per piece that is copied inside the kernel.
COPY_BYTES = 32 << 20

Progress = Callable[[int], None]


@runtime_checkable
class Lossy(Protocol):
    """A source that narrows values and counts what that did to them."""

    dtype: str
    loss: CastLoss


class Cancelled(Exception):
    """A signal arrived; the partial output has been removed."""


@dataclass(slots=True)
class Summary:
    """What a conversion did (``--json`` prints it).

    Attributes:
        out: The finished folder or file.
        files: Files written.
        tensors: Tensors written.
        bytes_written: Bytes of the output.
        seconds: Wall time, plan excluded.
        notes: Everything assumed, substituted, dropped or ignored.
        underflowed: Non-zero values that became zero in a narrower type.
        checked_blocks: Blocks that were re-read and compared.
    """

    out: Path
    files: list[str]
    tensors: int
    bytes_written: int
    seconds: float
    notes: list[str] = field(default_factory=list)
    underflowed: int = 0
    checked_blocks: int = 0

    def as_json(self) -> dict[str, Any]:
        """The summary as plain data."""
        return {
            "schema": "convert.conversion/1",
            "out": str(self.out),
            "files": self.files,
            "tensors": self.tensors,
            "bytes": self.bytes_written,
            "seconds": round(self.seconds, 3),
            "underflowed": self.underflowed,
            "checked_blocks": self.checked_blocks,
            "notes": self.notes,
        }


def run(
    plan: ConversionPlan,
    out: Path,
    *,
    threads: int = 2,
    overwrite: bool = False,
    force: bool = False,
    hashes: bool = False,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> Summary:
    """Carry out ``plan``.

    Args:
        plan: From :func:`convert.plan.make_plan`.
        out: Target folder, or file for a single-file format.
        threads: Workers.
        overwrite: Replace what is there.
        force: Write although free space or memory look too small.
        hashes: Put the SHA-256 of every source and output file into the record, taken in the same pass.
        progress: Called with the number of bytes written since the last call.
        cancel: When set, work stops and the partial output is removed.

    Raises:
        ConvertError: Disk or memory are too small, values do not fit the target type, or the check after writing
            failed.
        Cancelled: ``cancel`` was set.
    """
    plan.bind(out)
    check_target(plan, out, overwrite=overwrite, force=force)
    if not force:
        refuse_memory(plan.peak_memory(threads))
    keep_freed_memory()
    started = time.perf_counter()
    claim = Claim(out, single=plan.single_file)
    try:
        stop = cancel or threading.Event()
        with contextlib.closing(_Writer(plan, claim.folder, progress, stop, hashing=hashes)) as writer:
            writer.write(threads)
            loss = sum(c.loss.underflowed for c in writer.casts)  # the check reads, and so counts, again
            seal(plan, claim.folder, writer.hashes)
            for name, value in plan.sidecars.items():
                write_sidecar(claim.folder, name, value)
            checked = read_back(plan, claim.folder, writer.fds)
        claim.commit()
    except BaseException:
        claim.abandon()
        raise
    notes = list(plan.notes)
    if loss:
        notes.append(f"{loss:,} non-zero values became zero in the narrower type")
    return Summary(
        out=out,
        files=[f.name for f in plan.files] + sorted(plan.sidecars),
        tensors=sum(len(f.entries) for f in plan.files),
        bytes_written=plan.nbytes,
        seconds=time.perf_counter() - started,
        notes=notes,
        underflowed=loss,
        checked_blocks=checked,
    )


def refuse_memory(needed: int) -> None:
    """Being killed by the system says nothing and cleans nothing; this does, before it could happen.

    Raises:
        ConvertError: Less memory is available than the ``needed`` bytes.
    """
    there = available_memory()
    if there is not None and needed > there:
        raise ConvertError(
            Problem(
                "memory",
                f"this needs about {needed:,} bytes of memory and {there:,} are available.",
                found=there,
                wanted=needed,
                hint="Use fewer --threads; --force tries all the same.",
            )
        )


class _Writer:
    """The open files of one run and the pieces that go into them."""

    def __init__(
        self,
        plan: ConversionPlan,
        folder: Path,
        progress: Progress | None,
        cancel: threading.Event,
        *,
        hashing: bool = False,
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.progress = progress or (lambda _: None)
        self.cancel = cancel
        self.failed = threading.Event()
        self.fds: list[int] = []
        self.casts = list(_casts(plan))
        for cast in self.casts:  # a plan may be carried out more than once
            cast.loss = CastLoss()
        self._crcs: list[dict[str, list[tuple[int, int, int]]]] = [{} for _ in plan.files]
        self._lock = threading.Lock()
        self._hashing = hashing
        self._hasher: Hasher | None = None
        self.hashes: Hashes | None = None

    def close(self) -> None:
        if self._hasher is not None:  # before the files that it reads are closed
            self._hasher.close()
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds = []

    def write(self, threads: int) -> None:
        for file in self.plan.files:
            path = self.folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o644)
            self.fds.append(fd)
            os.ftruncate(fd, file.size)
        if self._hashing:
            self._hasher = Hasher(self.plan.files, self.fds, self.plan.source.files, threads=threads)
        with ThreadPoolExecutor(max(1, threads)) as pool:
            self._drain(pool, threads)
        self._stop_on_overflow()
        for number, file in enumerate(self.plan.files):
            for offset, data in file.frame(self._joined_crcs(number)):
                write_at(self.fds[number], data, offset)
        for fd in self.fds:
            os.fsync(fd)
        if self._hasher is not None:
            self.hashes = self._hasher.finish()

    def _drain(self, pool: ThreadPoolExecutor, threads: int) -> None:
        """Feed pieces to the workers, a few at a time, so that a failure stops at once."""
        pending: set[Future[None]] = set()
        try:
            for piece in self._pieces():
                if len(pending) >= 4 * threads:
                    done, pending = wait(pending, return_when="FIRST_COMPLETED")
                    for future in done:
                        future.result()
                if self.cancel.is_set():
                    raise Cancelled
                pending.add(pool.submit(self._guarded, *piece))
            done, _ = wait(pending, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            self.failed.set()
            raise
        if self.cancel.is_set():
            raise Cancelled

    def _pieces(self) -> Iterator[tuple[Output, int, int]]:
        for output in self.plan.outputs:
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
        crc = self.plan.files[output.targets[0].file].needs_crc
        return plain and not crc and output.source.extent(start, stop) is not None

    def _guarded(self, output: Output, start: int, stop: int) -> None:
        if self.cancel.is_set() or self.failed.is_set():
            return
        self._write_piece(output, start, stop)

    def _write_piece(self, output: Output, start: int, stop: int) -> None:
        source = output.source
        if self._kernel(output, start, stop):
            extent = source.extent(start, stop)
            assert extent is not None
            path, offset, count = extent
            target = output.targets[0]
            at = self._offset(target) + start * source.row_bytes
            if copy_range(self.plan.source.pool.fd(path), self.fds[target.file], offset, at, count) != count:
                raise ConvertError(
                    Problem("truncated", f"{path.name} became shorter while it was being read.", file=str(path))
                )
            self._wrote(target.file, at, count)
            return
        block = source.read(start, stop)
        for target in output.targets:
            part = block if target.columns is None else np.ascontiguousarray(block[:, slice(*target.columns)])
            raw = np.ascontiguousarray(part).view(np.uint8).data.cast("B")
            row = len(raw) // max(1, stop - start)
            write_at(self.fds[target.file], raw, self._offset(target) + start * row)
            if self.plan.files[target.file].needs_crc:
                with self._lock:
                    self._crcs[target.file].setdefault(target.name, []).append((start, len(raw), zlib.crc32(raw)))
            self._wrote(target.file, self._offset(target) + start * row, len(raw))

    def _wrote(self, file: int, at: int, count: int) -> None:
        if self._hasher is not None:
            self._hasher.wrote(file, at, count)
        self.progress(count)

    def _offset(self, target: Target) -> int:
        return self.plan.files[target.file].offsets[target.name]

    def _joined_crcs(self, number: int) -> dict[str, int]:
        out = {}
        for name, pieces in self._crcs[number].items():
            crc = 0
            for _, length, value in sorted(pieces):
                crc = crc32_combine(crc, value, length)
            out[name] = crc
        return out

    def _stop_on_overflow(self) -> None:
        problems = []
        seen: set[int] = set()  # the ranks of one tensor share its casts
        for output in self.plan.outputs:
            for cast in casts_within(output.source):
                if cast.loss.overflowed and id(cast) not in seen:
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
                            hint="Choose --dtype bfloat16 or float32.",
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
    if isinstance(source, Lossy):
        yield source
    inner = getattr(source, "source", None)
    if isinstance(inner, Source):
        yield from casts_within(inner)
    for part in getattr(source, "parts", ()):
        yield from casts_within(part)
