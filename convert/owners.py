"""Whose a lock file is where the system has no locks (some network file systems): it says so itself.

Whoever makes the file, which only one can, writes who that is: machine, process, and when the process began. A process
of this machine that is no more has lost it; of another machine that cannot be known, and a person has to say.
Where the system has locks nothing is written (:mod:`convert.claim`). Which folders are a conversion's is told by such
a file, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from convert.journal import JOURNAL_NAME
from convert.output import LOCK_NAME

#: Whoever has made the file writes into it at once; until so many seconds have passed, an empty one is somebody's.
EMPTY_SECONDS = 10.0


def own(fd: int, path: Path, *, made: bool) -> str:
    """Take a lock file.

    Args:
        fd: It, open for writing; it may be another one after this, for which the caller looks.
        path: Its name.
        made: Whether the caller has made it.

    Returns:
        Whose it is, in words; empty if it is this process's.

    Raises:
        OSError: The system does not let it be read, written or replaced.
    """
    if not made:
        found = os.pread(fd, 4096, 0)
        if other := _alive(found, fd):
            return other
        aside = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}")
        os.rename(path, aside)
        if aside.read_bytes() != found:  # somebody was faster, and this is theirs
            with contextlib.suppress(OSError):
                os.link(aside, path)
            os.unlink(aside)
            return "another process that has just begun"
        os.unlink(aside)
        try:
            new = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return "another process that has just begun"
        os.dup2(new, fd, inheritable=False)
        os.close(new)
    os.pwrite(fd, json.dumps(_me(), sort_keys=True).encode(), 0)
    return ""


def disown(path: Path) -> None:
    """Leave a lock file to whoever comes next."""
    with contextlib.suppress(OSError):
        os.truncate(path, 0)
        os.utime(path, (0, 0))


def same_file(fd: int, path: Path) -> bool:
    """Whether the open file still has this name (the run that held it may just have ended)."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def replaced(out: Path) -> list[Path]:
    """Folders that are called, and marked, as an older output is while the new one gets its name; no links."""
    start = f"{out.name}.replaced"
    named = [
        p for p in out.parent.iterdir() if p.name.startswith(start) and not p.name[len(start) :].strip("0123456789")
    ]
    return [p for p in named if p.is_dir() and not p.is_symlink() and (p / LOCK_NAME).is_file()]


def ours(folder: Path) -> bool:
    """Whether a partial folder may be cleared: there is none, it is empty, or a conversion was killed in it.

    Such a folder holds the lock or the journal, or, killed between the last check and the rename, a complete output
    with its record. A lock or journal that is a link or a pipe is no conversion's: to open it would make or change a
    file elsewhere, or wait.
    """
    from convert.locate import RECORD_NAME

    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        return False
    try:
        inside = os.listdir(folder)
    except FileNotFoundError:  # not there, or just renamed by the run that made it
        return True
    own = [folder / name for name in (LOCK_NAME, JOURNAL_NAME) if name in inside]
    if any(path.is_symlink() or not path.is_file() for path in own if os.path.lexists(path)):
        return False
    return not inside or any(name in (LOCK_NAME, JOURNAL_NAME) or name.endswith(RECORD_NAME) for name in inside)


def _alive(said: bytes, fd: int) -> str:
    """Whose the file is; empty if nobody's."""
    try:
        owner = dict(json.loads(said))
    except (ValueError, TypeError):  # being written, or by a run that died before it had
        return "another process that has just begun" if time.time() - os.fstat(fd).st_mtime < EMPTY_SECONDS else ""
    me = _me()
    if any(owner.get(key) != me[key] for key in ("host", "boot", "namespace")):
        return f"process {owner.get('process')} on {owner.get('host')}"
    process = owner.get("process")
    if not isinstance(process, int) or owner.get("began") != _began(process):
        return ""
    try:
        os.kill(process, 0)  # where /proc does not say when it began
    except ProcessLookupError:
        return ""
    except (OSError, OverflowError):
        pass
    return f"process {process}"


def _me() -> dict[str, Any]:
    boot = namespace = None
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    me = os.getpid()
    return {"host": socket.gethostname(), "boot": boot, "namespace": namespace, "process": me, "began": _began(me)}


def _began(process: int) -> str | None:
    """When a process began, in ticks since the machine did (proc(5), field 22); None where that cannot be known."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
