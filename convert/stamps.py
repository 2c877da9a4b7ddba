"""Whether files are still the ones that were opened: size, time of change and identity, before and after.

A source that another program rewrites while it is being read would give a mixture of two models. Contents are not
compared here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from convert.errors import Problem


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a file system says of a file's identity and last change.

    Attributes:
        device: Number of the file system.
        inode: Number of the file on it.
        size: Bytes.
        mtime_ns: When it was last written, nanoseconds.
        ctime_ns: When anything of it was last changed: nobody can set this back.
        marks: What else a change of that time may be of: mode, number of names, owner, group.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    marks: tuple[int, int, int, int]


def stamp(file: Path | int) -> Stamp:
    """The stamp of a path (links are followed) or of an open descriptor.

    Raises:
        OSError: It is not there.
    """
    found = os.stat(file)
    marks = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid)
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, marks)


def stamps(files: Iterable[Path]) -> dict[Path, Stamp]:
    """The stamps of those files that are there."""
    out = {}
    for path in files:
        try:
            out[path] = stamp(path)
        except OSError:  # whoever opens it says so
            continue
    return out


def touched(before: Mapping[Path, Stamp]) -> bool:
    """Whether a file may have been written to by someone who set its time back, as ``cp -p`` and ``rsync -t`` do.

    Or something harmless was done to it (renamed, an attribute set): only its contents tell.
    """
    for path, old in before.items():
        try:
            new = stamp(path)
        except OSError:  # :func:`changes` says so
            continue
        if new.ctime_ns != old.ctime_ns and new.marks == old.marks:
            return True
    return False


def changes(before: Mapping[Path, Stamp], opened: Mapping[Path, int] | None = None) -> list[Problem]:
    """What has happened to files since their stamps were taken; empty if nothing has.

    Args:
        before: The stamps.
        opened: Descriptors by which some were read: another file may have had the name when these were opened.
    """
    problems = []
    for path, old in before.items():
        try:
            what = _difference(old, stamp(path))
            if what is None and opened is not None and path in opened:
                what = _difference(old, stamp(opened[path]))
        except OSError:
            what = "was removed or renamed"
        if what:
            problems.append(
                Problem(
                    "source_changed",
                    f"{path.name} {what} while it was being read; what was made of it may be a mixture.",
                    file=str(path),
                    hint="Nothing was kept. Start again when no other program writes to the source.",
                )
            )
    return problems


def _difference(old: Stamp, new: Stamp) -> str | None:
    if (old.device, old.inode) != (new.device, new.inode):
        return "was replaced by another file"
    if old.size != new.size:
        return f"changed its size from {old.size:,} to {new.size:,} bytes"
    return "was written to" if old.mtime_ns != new.mtime_ns else None
