"""The writers of a run by several ranks: each writes its share; rank 0's also makes the files and their headers.

The order of the steps is the same on every rank, since they meet between them: open, write, hand over what was counted,
(rank 0: headers), hash, read back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Any

from convert.cast import CastLoss
from convert.hashing import Hashes, hash_files
from convert.io_errors import writing
from convert.plan import Output
from convert.ranks.crew import Crew
from convert.ranks.journals import join_parts
from convert.ranks.shares import Shares
from convert.writer import Cancelled, Writer


class SharedWriter(Writer):
    """What the writers of all ranks have in common.

    Args:
        *args: See :class:`convert.writer.Writer`.
        crew: This rank among the others.
    """

    def __init__(self, *args: Any, crew: Crew) -> None:
        super().__init__(*args)
        self.crew = crew
        told = self.progress

        def progress(count: int) -> None:
            crew.wrote(count)
            told(count)

        self.progress = progress
        self.leads = crew.leads
        numbered = ((self._numbers[id(output)], a, b, self._bytes(output, a, b)) for output, a, b in super().pieces())
        self.shares = Shares(numbered, crew.world)

    @property
    def cancelled(self) -> BaseException:
        """What another rank failed with."""
        return self.crew.error

    def _bytes(self, output: Output, start: int, stop: int) -> int:
        return (stop - start) * output.source.row_bytes * (1 if output.targets[0].columns else len(output.targets))

    def mine(self, output: Output, row: int) -> bool:
        """Whether this row of an output is written, and checked, by this rank."""
        return self.shares.owner(self._numbers[id(output)], row) == self.crew.rank

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's share."""
        return self.shares.nbytes[self.crew.rank]

    def deal(self, sizes: Sequence[int]) -> list[int]:
        """The jobs of this rank: every rank deals them alike, the largest first."""
        load, mine = [0] * self.crew.world, []
        for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
            rank = min(range(self.crew.world), key=load.__getitem__)
            load[rank] += sizes[number]
            if rank == self.crew.rank:
                mine.append(number)
        return sorted(mine)

    def pieces(self) -> Iterator[tuple[Output, int, int]]:
        """This rank's pieces, in order."""
        return (piece for piece in super().pieces() if self.mine(piece[0], piece[1]))

    def _drain(self, pool: ThreadPoolExecutor, threads: int) -> None:
        try:
            super()._drain(pool, threads)
        except Cancelled:
            raise self.crew.error from None

    def _part(self) -> tuple[Any, ...]:
        """What the others do not know of this rank's share."""
        return self._crcs, [astuple(c.loss) for c in self.casts], self.found, self.redone

    def hashes(self, threads: int) -> Hashes:
        """SHA-256 of every output and source file; each is read by one rank."""
        made = [self.folder / file.name for file in self.plan.files]
        paths = [*made, *self.plan.source.files]
        sizes = [*(file.size for file in self.plan.files), *(p.stat().st_size for p in self.plan.source.files)]
        mine = self.deal(sizes)
        found = hash_files([paths[n] for n in mine], threads=threads)
        known: dict[int, str] = {}
        for part in self.crew.gather({n: found[paths[n]] for n in mine}):
            known |= part
        names = [file.name for file in self.plan.files]
        return Hashes(
            {name: known[n] for n, name in enumerate(names)},
            {path: known[len(names) + n] for n, path in enumerate(self.plan.source.files)},
        )


class LeadWriter(SharedWriter):
    """Rank 0's: it makes the files, and writes what depends on all ranks."""

    def write(self, threads: int, *, hashes: bool = False) -> Hashes | None:
        """See :meth:`convert.writer.Writer.write`; returns when all ranks have written."""
        super().write(threads)
        self.crew.say("written")
        return self.hashes(threads) if hashes else None

    def _drain(self, pool: ThreadPoolExecutor, threads: int) -> None:
        self.crew.say("go")  # the files are there, in their full size
        super()._drain(pool, threads)
        for rank, (crcs, losses, found, redone) in enumerate(self.crew.gather(self._part())):
            if rank == self.crew.rank:
                continue
            for ours, theirs in zip(self._crcs, crcs, strict=True):
                for name, pieces in theirs.items():
                    ours.setdefault(name, []).extend(pieces)
            for cast, loss in zip(self.casts, losses, strict=True):
                cast.loss.add(CastLoss(*loss))
            self.found += found
            self.redone += redone

    def together(self, checked: int) -> int:
        """How many blocks all ranks have compared."""
        total = sum(self.crew.gather(checked))
        with writing(self.folder):
            join_parts(self.folder)  # should a later step fail, one journal tells all
        return total

    def stop(self, error: BaseException) -> None:
        """Let all ranks stop, and wait until they have: nothing is cleared away under their hands."""
        self.crew.fail(error)
        self.close()
        for rank in self.crew.silent(range(1, self.crew.world), "ended"):
            error.add_note(f"{self.crew.name(rank)} gave no sign of life: it was killed, or its machine is gone.")


class HelperWriter(SharedWriter):
    """Any other rank's: files are there when it begins, and headers are not its business."""

    def write(self, threads: int, *, hashes: bool = False) -> Hashes | None:
        """See :meth:`convert.writer.Writer.write`."""
        for file in self.plan.files:
            with writing(self.folder / file.name):
                self.fds.append(os.open(self.folder / file.name, os.O_RDWR | getattr(os, "O_BINARY", 0)))
        assert self.journal is not None
        self.journal.follow(self.fds)
        with ThreadPoolExecutor(max(1, threads)) as pool:
            self._drain(pool, threads)
        for file, fd in zip(self.plan.files, self.fds, strict=True):
            with writing(self.folder / file.name):
                os.fsync(fd)
        self.journal.settle()
        self.crew.gather(self._part())
        self.crew.hear("written")
        return self.hashes(threads) if hashes else None

    def together(self, checked: int) -> int:
        """See :meth:`LeadWriter.together`."""
        return sum(self.crew.gather(checked))
