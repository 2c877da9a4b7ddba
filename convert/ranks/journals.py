"""Journals of several ranks in one partial folder: each rank appends to its own, and a resumed run joins them.

Rank 0's is the ordinary one (:mod:`convert.journal`); rank *k* has ``.journal.k``. A run that is resumed may have any
other number of ranks, or be a single process.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from convert.journal import JOURNAL_NAME
from convert.platform import sync_data


def part_name(rank: int) -> str:
    """The name of one rank's journal."""
    return f"{JOURNAL_NAME}.{rank}" if rank else JOURNAL_NAME


def parts(folder: Path) -> list[Path]:
    """The journals of all ranks but the first."""
    with contextlib.suppress(OSError):
        return sorted(p for p in folder.iterdir() if p.name.startswith(JOURNAL_NAME + "."))
    return []


def join_parts(folder: Path) -> None:
    """Append what the ranks have listed to the first one's journal, and remove theirs.

    A part that belongs to another run is dropped; should this be cut off in the middle, pieces are listed twice, which
    does no harm.

    Raises:
        OSError: The folder may not be written.
    """
    main = folder / JOURNAL_NAME
    for path in parts(folder):
        head, _, lines = path.read_bytes().partition(b"\n")
        lines = lines[: lines.rfind(b"\n") + 1]  # the last line may have been cut off
        if main.exists():
            data = main.read_bytes()
            same = data[: data.find(b"\n")] == head
        else:
            data, same = head + b"\n", True
            main.write_bytes(data)
        if same and lines:
            fd = os.open(main, os.O_WRONLY | getattr(os, "O_BINARY", 0))
            try:
                os.ftruncate(fd, data.rfind(b"\n") + 1)
                os.lseek(fd, 0, os.SEEK_END)
                while lines:
                    lines = lines[os.write(fd, lines) :]
                sync_data(fd)
            finally:
                os.close(fd)
        path.unlink()
