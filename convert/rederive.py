"""A plan against files that exist: every byte that the plan would write, compared with what lies there.

Streaming, by several threads, in bounded memory. ``convert check --source`` and the full check at the end of a
conversion both use it. Only tensor data is compared here, no headers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from convert.choices import require_positive
from convert.plan import ConversionPlan, Output, Target, piece_rows
from convert.platform import read_at
from convert.stops import put_off, still_pending

#: Bytes per piece of a tensor that is only compared (what is computed comes in the plan's own, smaller pieces).
COMPARE_BYTES = 4 << 20

#: Where a tensor's data begins: an open descriptor and an offset; None where there is no such tensor.
Place = tuple[int, int] | None


@dataclass(slots=True)
class Difference:
    """One tensor that is not what the plan would write.

    Attributes:
        file: The planned file.
        tensor: Its name there.
        nbytes: How many of its bytes differ, those past the end of a short file among them.
        first: Offset of the first of them within the tensor.
        row: The row that it lies in.
        total: Bytes of the tensor.
    """

    file: str
    tensor: str
    nbytes: int
    first: int
    row: int
    total: int

    def add(self, other: Difference) -> None:
        """Join what another piece of the same tensor showed."""
        self.nbytes += other.nbytes
        if other.first < self.first:
            self.first, self.row = other.first, other.row


@dataclass(slots=True)
class Rederived:
    """What a comparison found.

    Attributes:
        tensors: Tensors compared.
        nbytes: Bytes compared.
        differences: Those that differ, in the order of the plan.
        absent: Planned tensors for which there was no place: ``(file, tensor)``.
    """

    tensors: int = 0
    nbytes: int = 0
    differences: list[Difference] = field(default_factory=list)
    absent: list[tuple[str, str]] = field(default_factory=list)


def rederive(
    plan: ConversionPlan,
    place: Callable[[Target], Place],
    *,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
    chosen: Callable[[Output, int], bool] | None = None,
) -> Rederived:
    """Compute every tensor of ``plan`` again and compare it with the bytes at its place.

    Args:
        plan: What is to be there; its source is read.
        place: Where each target lies.
        threads: Workers; memory grows by some pieces of :data:`COMPARE_BYTES` with each.
        progress: Called with the bytes compared since the last call, from any thread.
        cancel: When set, the comparison ends early with what it has.
        chosen: Whether the piece of an output that begins at a row is compared; all are, where this is not given.

    Raises:
        ConvertError: The source cannot be read, or holds values that cannot be written.
    """
    job = _Job(plan, place, progress or (lambda _: None))
    stop = cancel or threading.Event()
    require_positive("threads", threads)
    with ThreadPoolExecutor(threads) as pool:
        pending: set[Future[None]] = set()
        try:
            with put_off() as check:
                for piece in job.pieces():
                    if chosen is not None and not chosen(piece[0], piece[1]):
                        continue
                    while len(pending) >= 4 * threads:
                        pending = still_pending(pending, check)
                    if stop.is_set():
                        break
                    pending.add(pool.submit(job.compare, *piece))
                while pending:
                    pending = still_pending(pending, check)
        except BaseException:
            job.stopped.set()
            raise
    return job.result()


class _Job:
    """The state of one comparison."""

    def __init__(self, plan: ConversionPlan, place: Callable[[Target], Place], progress: Callable[[int], None]) -> None:
        self.plan = plan
        self.progress = progress
        self.stopped = threading.Event()
        self.places = {(t.file, t.name): place(t) for output in plan.outputs for t in output.targets}
        self.sizes = {(n, e.name): e.nbytes for n, file in enumerate(plan.files) for e in file.entries}
        self._found: dict[tuple[int, str], Difference] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    def pieces(self) -> Iterator[tuple[Output, int, int]]:
        """Every output in blocks of rows."""
        for output in self.plan.outputs:
            rows = output.source.shape[0]
            step = max(1, piece_rows(output.source))
            row = max(1, output.source.row_bytes)
            if not output.source.whole and output.source.extent(0, min(step, rows)) is not None:
                step = max(step, COMPARE_BYTES // row // step * step)
            for start in range(0, rows, step):
                yield output, start, min(start + step, rows)

    def compare(self, output: Output, start: int, stop: int) -> None:
        """One block against all its targets."""
        if self.stopped.is_set():
            return
        block = output.source.read(start, stop)
        for target in output.targets:
            place = self.places[target.file, target.name]
            if place is None:
                continue
            part = block if target.columns is None else block[:, slice(*target.columns)]
            wanted = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            row = len(wanted) // max(1, stop - start)
            found = np.empty(len(wanted), np.uint8)
            at = start * row
            got = read_at(place[0], found.data, place[1] + at)
            count, first = _differing(wanted[:got], found[:got])
            if got < len(wanted):
                count, first = count + len(wanted) - got, first if count else got
            with self._lock:
                self._nbytes += len(wanted)
                if count:
                    self._note(target, Difference("", target.name, count, at + first, start + first // max(1, row), 0))
            self.progress(len(wanted))

    def _note(self, target: Target, found: Difference) -> None:
        key = (target.file, target.name)
        if key in self._found:
            self._found[key].add(found)
            return
        found.file = self.plan.files[target.file].name
        found.total = self.sizes[key]
        self._found[key] = found

    def result(self) -> Rederived:
        """What was found, in the order of the plan."""
        order = list(self.places)
        return Rederived(
            tensors=sum(place is not None for place in self.places.values()),
            nbytes=self._nbytes,
            differences=[self._found[key] for key in order if key in self._found],
            absent=[(self.plan.files[f].name, name) for (f, name), place in self.places.items() if place is None],
        )


def _differing(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> tuple[int, int]:
    """How many bytes differ, and which is the first of them."""
    whole = len(a) // 8 * 8
    same = np.array_equal(a[:whole].view(np.uint64), b[:whole].view(np.uint64)) and np.array_equal(a[whole:], b[whole:])
    if same:  # by far the usual case, and eight times cheaper to find than single bytes
        return 0, 0
    wrong = np.flatnonzero(a != b)
    return len(wrong), int(wrong[0])
