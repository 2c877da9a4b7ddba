"""What an earlier run had fetched and written: believed only where it still has the CRCs that its journal lists.

What lies on this machine is compared with the source instead (:mod:`convert.writer`); this is for sources elsewhere,
of which nothing is fetched twice to be compared.
"""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from convert.io_errors import reading
from convert.journal import Finished
from convert.platform import read_at

if TYPE_CHECKING:
    from convert.plan import Output
    from convert.writer import Writer

_READ = 1 << 20


def confirm(writer: Writer, threads: int) -> None:
    """Compare what the journal lists with its CRCs; the rest it then no longer lists, so it is fetched again.

    Pieces whose values are narrowed are left listed: they are computed again, for the sake of what is counted.

    Args:
        writer: Of the run that goes on, its files open; of a source on this machine nothing is done.
        threads: Pieces read at once, through buffers of 1 MiB.

    Raises:
        ConvertError: The system cannot read what was written.
        Cancelled: The caller's event was set.
    """
    from convert.writer import casts_within

    journal = writer.journal
    if journal is None or not journal.finished or writer.plan.source.pool.local:
        return
    listed, kept = journal.finished, Finished()
    kept.crcs = listed.crcs
    todo: list[tuple[Output, int, int]] = []
    for piece in writer.pieces():
        output, start, stop = piece
        number = writer.number(output)
        if not listed.covers(number, start, stop):
            continue
        if any(True for _ in casts_within(output.source)):
            kept.add(number, start, stop)
        else:
            todo.append(piece)
    with ThreadPoolExecutor(max(1, threads)) as workers:
        same = list(workers.map(lambda piece: _same(writer, listed, *piece), todo))
    if writer.cancel.is_set():
        raise writer.cancelled
    for (output, start, stop), right in zip(todo, same, strict=True):
        if right:
            kept.add(writer.number(output), start, stop)
        else:
            writer.redone += sum(writer.extent(output, target, start, stop)[1] for target in output.targets)
    journal.finished = kept


def _same(writer: Writer, listed: Finished, output: Output, start: int, stop: int) -> bool:
    """Whether a piece lies there as it was written; not where it was listed without CRCs, or as part of another."""
    crcs = listed.crcs.get((writer.number(output), start, stop), ())
    if len(crcs) != len(output.targets):
        return False
    buffer = memoryview(bytearray(_READ))
    for target, wanted in zip(output.targets, crcs, strict=True):
        at, count = writer.extent(output, target, start, stop)
        crc = 0
        with reading(writer.folder / writer.plan.files[target.file].name):
            for low in range(at, at + count, _READ):
                if writer.cancel.is_set():
                    return False
                part = buffer[: min(_READ, at + count - low)]
                if read_at(writer.fds[target.file], part, low) < len(part):
                    return False
                crc = zlib.crc32(part, crc)
        if crc != wanted:
            return False
    return True
