"""The right to write one output: a partial folder beside it, locked while the run lasts, renamed when it is complete.

Nothing half-written ever lies under the output's name. Whether the output may be written at all is
:mod:`convert.output`'s business, what goes into the folder :mod:`convert.writer`'s.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from convert.errors import ConvertError, Problem, UsageError
from convert.io_errors import io_problem
from convert.journal import JOURNAL_NAME, read_commit
from convert.output import LOCK_NAME, landing, partial_folder, remove
from convert.owners import disown, ours, own, replaced, same_file
from convert.platform import exchange, lock_file, sync_folder

#: Within the partial folder: the files of an older output, while those of the new one take their places.
_OLD = "replaced"


class Claim:
    """The right to write one output: none until :meth:`take`, so that a signal finds a claim to abandon.

    The locks are the system's own, so that they end with their process however that ends. The folder itself is locked,
    too: that lock survives the rename, so nobody can take the folder over while it gets its name. Where there are none,
    the lock's file says whose it is (:mod:`convert.owners`), and goes after the rename.

    Args:
        out: The output.
        single: Whether it is a file or files beside each other, not a folder.

    Attributes:
        folder: The partial folder.
        held: Whether it was taken, and is this run's to clear.
        done: Whether the output has its name.
        given_back: Whether an older output got its name back, which a killed run had taken.
    """

    def __init__(self, out: Path, *, single: bool) -> None:
        self.out = landing(out, single=single)
        self.single = single
        self.folder = partial_folder(out, single=single)
        self.held = self.done = self.given_back = False
        self._made = [p for p in self.out.parents if not p.exists()]
        self._seen = self._lying()
        self._lock = self.folder / LOCK_NAME
        self._fds: list[int] = []
        self._lockless = self._owned = False  # the system has no locks; it is ours by what the lock's file says
        self._other = ""

    def take(self) -> None:
        """Make the partial folder and lock it.

        Raises:
            ConvertError: Another run is writing the same output, or the system makes no folder there.
            UsageError: Something that is no conversion's lies where the partial folder belongs.
        """
        if not ours(self.folder):
            raise UsageError(
                f"{self.folder} is in the way, and no conversion left it there.",
                hint="Rename it or remove it yourself.",
            )
        try:
            self.held = self._acquire()
        except OSError as error:
            self._close()
            raise ConvertError(io_problem(error, self.folder, writing=True)) from error
        if not self.held:
            self._close()
            said, hint = f"another conversion is writing {self.out}", "Wait for it, or choose another output."
            if self._other:
                said, hint = f"{said}: {self._other}", f"{hint} If it is no more, remove {self._lock}."
            raise ConvertError(Problem("busy", f"{said}.", file=str(self.folder), hint=hint))
        self._give_back()

    def _give_back(self) -> None:
        """Where names are not exchanged in one step, a run may have been killed between the two, or at what follows."""
        for old in () if self.single else replaced(self.out):
            if os.path.lexists(self.out):
                _clear(old)
                continue
            with contextlib.suppress(OSError):
                os.replace(old, self.out)
                (self.out / LOCK_NAME).unlink()
                sync_folder(self.out.parent)
                self._seen, self.given_back = self._lying(), True

    def _lying(self) -> frozenset[str]:
        """What lies in the output, or where its files will be."""
        try:
            return frozenset(os.listdir(self.out.parent if self.single else self.out))
        except OSError:
            return frozenset()

    def _refuse_newcomers(self) -> None:
        """What somebody has put there since the run began was not there to be asked about: it is never replaced."""
        new = self._lying() - self._seen
        if self.single:
            new &= set(os.listdir(self.folder)) - {LOCK_NAME, JOURNAL_NAME, _OLD}
            found = [self.out.with_name(name) for name in sorted(new)]
        else:
            found = [self.out / name for name in sorted(new)]
            if os.path.lexists(self.out) and not self.out.is_dir():
                found = [self.out]
        if found:
            raise ConvertError(
                Problem(
                    "exists",
                    f"{found[0]} was put there while this ran, and is not replaced.",
                    file=str(found[0]),
                    hint="Move it away, or choose another output.",
                )
            )

    def clear(self, *, keep: Collection[str] = ()) -> int:
        """Clear away what an earlier, unfinished run has left in the partial folder, but for files called ``keep``.

        Returns:
            How many files and folders that were.
        """
        gone = [path for path in self.folder.iterdir() if path != self._lock and path.name not in keep]
        for path in gone:
            remove(path)
        return len(gone)

    def _acquire(self) -> bool:
        for _ in range(3):  # whoever holds the folder may rename or remove it at any moment
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                if not self._hold(os.open(self.folder, os.O_RDONLY), self.folder):
                    return False
            except FileNotFoundError:
                continue
            except OSError:  # Windows opens no folders
                pass
            try:
                held = self._hold_lock()
                sync_folder(self.folder)  # whose the folder is lasts before anything else that lies in it
                return held
            except FileNotFoundError:
                self._close()
        return False

    def _hold(self, fd: int, path: Path) -> bool:
        self._fds.append(fd)
        locked = lock_file(fd)
        self._lockless = locked is None
        return locked is not False and same_file(fd, path)

    def _hold_lock(self) -> bool:
        try:
            fd, made = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        except FileExistsError:
            fd, made = os.open(self._lock, os.O_RDWR), False
        if not self._hold(fd, self._lock):
            return False
        if self._lockless and os.name != "nt":
            self._other = own(fd, self._lock, made=made)
            self._owned = not self._other
        return not self._other and same_file(fd, self._lock)

    def _close(self) -> None:
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds = []

    def abandon(self) -> None:
        """Leave nothing behind, neither the partial folder nor folders that were made to hold it.

        A claim that was not (or, when a signal came, not quite) taken leaves what may be another run's.
        """
        if self.held and not self.done:
            _clear(self.folder)
        elif not self.held and self._owned:
            disown(self._lock)
        self._close()
        if not self.held:
            sweep(self.out, single=self.single)
        if not self.done:
            for folder in self._made:
                with contextlib.suppress(OSError):  # something else may be in it by now
                    folder.rmdir()

    def leave(self) -> None:
        """Give it up, and leave what is there for a later run."""
        if self._owned:
            disown(self._lock)
        self._close()

    def take_back(self, moved: Mapping[str, list[int]]) -> None:
        """Bring back what a killed run had moved to its place already, the first piece first.

        The output is then as it was before that run's last step, and no reader finds a piece without the others.

        Args:
            moved: Name → ``[inode, bytes]``, as the journal has them.
        """
        back = 0
        for name in sorted(moved, key=lambda name: (not name.endswith(".gguf"), name)):
            place, inside = self.out.with_name(name), self.folder / name
            both = is_moved(inside, moved[name])  # half of a move, after a power cut: to rename it would do nothing
            if is_moved(place, moved[name]) and (both or not inside.exists()):
                if both:
                    os.unlink(place)
                else:
                    os.replace(place, inside)
                back += 1
                if back == 1:  # after a power cut, too, the first piece is not there without the others
                    sync_folder(place.parent)
        if back:
            sync_folder(self.folder)
            sync_folder(self.out.parent)

    def commit(self, announce: Callable[[Mapping[str, list[int]]], None] | None = None) -> None:
        """Give the complete output its name (or move its files beside each other), durably.

        Args:
            announce: Told, before the first of several files is moved, which they are: name → ``[inode, bytes]``.

        Raises:
            ConvertError: Something has been put there meanwhile.
        """
        self._refuse_newcomers()
        for folder in (*(p for p in self.folder.rglob("*") if p.is_dir()), self.folder):
            sync_folder(folder)  # the files' names last, before what tells whose they are goes
        if self.single:
            self._move_files(announce)
            self.done = True
            sync_folder(self.out.parent)
            _clear(self.folder)
        else:
            listed = self._strip()
            try:
                if self.out.exists():
                    self._replace_folder()
                else:
                    os.replace(self.folder, self.out)
            except BaseException:
                if not self.done and listed is not None:
                    with contextlib.suppress(OSError):  # with it, --resume has nothing to do but this step
                        (self.folder / JOURNAL_NAME).write_bytes(listed)
                raise
            self.done = True
            if self._owned:
                with contextlib.suppress(OSError):
                    (self.out / LOCK_NAME).unlink()
            sync_folder(self.out.parent)
        for folder in self._made:  # their own names have to last, too
            sync_folder(folder.parent)
        self._close()

    def _strip(self) -> bytes | None:
        """Remove what is not the output's, for good; returns the journal."""
        listed = None
        with contextlib.suppress(OSError):
            listed = (self.folder / JOURNAL_NAME).read_bytes()
        for name in (JOURNAL_NAME, *(() if self._owned else (LOCK_NAME,))):
            with contextlib.suppress(FileNotFoundError):
                (self.folder / name).unlink()
        sync_folder(self.folder)
        return listed

    def _move_files(self, announce: Callable[[Mapping[str, list[int]]], None] | None) -> None:
        """Weights come last, the piece that a loader opens last of all: who finds it finds all of them.

        The pieces of an older output go first, in the opposite order, and come back if anything fails.
        """
        inside = [p for p in self.folder.iterdir() if p.name not in (LOCK_NAME, JOURNAL_NAME, _OLD)]
        weights = sorted((p for p in inside if p.suffix == ".gguf"), reverse=True)
        new = [*(p for p in inside if p not in weights), *weights]
        away = new if len(weights) > 1 else new[:-1]  # one file takes the place of another in one step
        if announce is not None:
            announce({p.name: identity(p) for p in new})
        (self.folder / _OLD).mkdir(exist_ok=True)
        steps = [(self.out.with_name(p.name), self.folder / _OLD / p.name) for p in reversed(away)]
        steps = [(a, b) for a, b in steps if os.path.lexists(a)]
        # The piece that goes first and comes last does so on the disk, too, in whatever order that writes names.
        barriers = {1, len(steps), len(steps) + len(new) - 1} - {0} if len(weights) > 1 else set()
        steps += [(p, self.out.with_name(p.name)) for p in new]
        begun = []
        try:
            for number, step in enumerate(steps):
                if number in barriers:
                    sync_folder(self.out.parent)
                begun.append(step)
                os.replace(*step)
        except BaseException:
            for a, b in reversed(begun):
                if not os.path.lexists(a):
                    with contextlib.suppress(OSError):
                        os.replace(b, a)
            raise

    def _replace_folder(self) -> None:
        """The old folder goes when the new one has its name; where the system can, they change names in one step."""
        try:
            held = os.open(self.out, os.O_RDONLY)
            self._fds.append(held)
            lock_file(held)  # after the exchange it is the partial folder, and still ours
        except OSError:
            pass
        marker = self.out / LOCK_NAME
        with contextlib.suppress(OSError):
            marker.touch()  # says that the old folder may be cleared away, should we be killed at it
            sync_folder(self.out)
        try:
            exchanged = exchange(self.folder, self.out)
        except BaseException:
            with contextlib.suppress(OSError):
                marker.unlink()
            raise
        if exchanged:
            self.done = True
            sync_folder(self.out.parent)
            _clear(self.folder)
            return
        names = (f"{self.out.name}.replaced{number or ''}" for number in itertools.count())
        old = next(path for path in map(self.out.with_name, names) if not os.path.lexists(path))
        os.replace(self.out, old)
        try:
            os.replace(self.folder, self.out)
        except BaseException:
            if not self.out.exists():
                os.replace(old, self.out)
                with contextlib.suppress(OSError):
                    marker.unlink()
            raise
        self.done = True
        sync_folder(self.out.parent)  # before anything of the old one goes
        _clear(old)


def sweep(out: Path, *, single: bool) -> None:
    """Remove a partial folder in which nothing lies any more: its run was killed when all but that was done."""
    try:
        folder = partial_folder(out, single=single)
        spent = not folder.is_symlink() and _is_spent(out, folder)
    except (OSError, RuntimeError, ValueError):  # a link that goes in circles; no name at all
        return
    if spent:
        claim = Claim(out, single=single)
        with contextlib.suppress(ConvertError):  # somebody is about to write there
            claim.take()
            claim.abandon()


def _is_spent(out: Path, folder: Path) -> bool:
    """Whether a run had done all but clear the folder: nothing is in it, or all that was is in its place."""
    if set(os.listdir(folder)) <= {LOCK_NAME}:
        return True
    moved = read_commit(folder)
    return bool(moved) and all(is_moved(out.with_name(name), moved[name]) for name in moved)


def identity(path: Path) -> list[int]:
    """``[inode, bytes]`` of a file: by these a run that goes on knows what the one before it had moved."""
    found = path.lstat()
    return [found.st_ino, found.st_size]


def is_moved(path: Path, listed: list[int]) -> bool:
    """Whether a file is the one that a killed run had moved there (``[inode, bytes]``)."""
    try:
        return identity(path) == list(listed)
    except OSError:
        return False


def _clear(folder: Path) -> None:
    """Remove a partial folder; what tells that it is ours goes last."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name not in (LOCK_NAME, JOURNAL_NAME):
                remove(path)
    sync_folder(folder)
    for name in (JOURNAL_NAME, LOCK_NAME):
        remove(folder / name)
    with contextlib.suppress(OSError):
        folder.rmdir()
