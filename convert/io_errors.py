"""System errors of files as findings: which file, what the system said, and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from convert.errors import ConvertError, Problem

#: Kinds of problems after which the same run may succeed, and so be resumed.
TRANSIENT = frozenset({"disk_full", "exists", "write", "read", "memory", "rank_lost", "rank_stopped"})

_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


def advice(error: OSError) -> str | None:
    """What to do about a file that the system does not let be read, where there is something to do."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return "Let this user read it (chmod u+r, for a folder u+rx), or give another copy."
    return "Is the disk failing, or was it taken away?" if error.errno == errno.EIO else None


def io_problem(error: OSError, path: Path, *, writing: bool) -> Problem:
    """The finding for a failed read or write of ``path``."""
    said = error.strerror or str(error)
    if error.errno in _FULL:
        return Problem(
            "disk_full",
            f"{path.name} could not be written: {said}.",
            file=str(path),
            hint=f"Free some space on the disk of {path.parent}, or choose another disk.",
        )
    if error.errno == errno.EFBIG:
        return Problem(
            "write",
            f"{path.name} could not be written: {said}; this disk or this user may not have files so large.",
            file=str(path),
            hint="Smaller pieces may fit: --max-shard-size, --split-max-size.",
        )
    verb = "written" if writing else "read"
    hint = None if writing and error.errno != errno.EIO else advice(error)
    kind = "write" if writing else "read"
    return Problem(kind, f"{path.name} could not be {verb}: {said}.", file=str(path), hint=hint)


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn a system error in the block into a finding about ``path``, which is being written."""
    try:
        yield
    except OSError as error:
        raise ConvertError(io_problem(error, Path(path), writing=True)) from error


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn a system error in the block into a finding about the file it names, or ``path``, which is read."""
    try:
        yield
    except OSError as error:
        raise ConvertError(io_problem(error, Path(error.filename or path), writing=False)) from error
