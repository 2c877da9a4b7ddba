"""The target of a conversion: whether it may be written, the partial folder beside it, and the rename at the end.

Output goes to a partial folder and is renamed when it is complete; a failure at any point removes it, and nothing
half-written is left under the target's name. What is written into it is :mod:`convert.run`'s business.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from pathlib import Path

from convert.errors import ConvertError, Problem, UsageError
from convert.plan import ConversionPlan
from convert.platform import lock_file, sync_folder

#: Held by the run that writes into a partial folder.
LOCK_NAME = ".lock"


def check_target(plan: ConversionPlan, out: Path, *, overwrite: bool, force: bool = False) -> None:
    """Everything that can forbid writing to ``out``, before a byte is written.

    Raises:
        UsageError: It exists and ``overwrite`` is not given, or it is the source.
        ConvertError: The disk is too full.
    """
    try:
        out.resolve()
    except (OSError, RuntimeError):  # Python before 3.13 raises RuntimeError for links that go in circles
        raise UsageError(f"{out} is a link that leads nowhere.", hint="Choose another output.") from None
    if plan.single_file:
        _check_files(plan, out, overwrite=overwrite)
    else:
        _check_folder(plan, out, overwrite=overwrite)
    parent = landing(out, single=plan.single_file).parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise UsageError(f"{parent} is a file, so {out} cannot be made.", hint="Choose another output.")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"{parent} may not be written, so {out} cannot be made.", hint="Choose another output.")
    free = shutil.disk_usage(parent).free
    if free < plan.nbytes and not force:
        raise ConvertError(
            Problem(
                "disk_full",
                f"the output needs {plan.nbytes:,} bytes and {parent} has {free:,} free.",
                found=free,
                wanted=plan.nbytes,
                hint="Free some space or choose another disk; --force tries all the same.",
            )
        )


def _check_folder(plan: ConversionPlan, out: Path, *, overwrite: bool) -> None:
    sources = [plan.source.path, *plan.source.files]
    if out.exists() and any(_same(out, s) for s in (*sources, plan.source.folder)):
        raise UsageError(f"{out} is the source itself.", hint="Choose another output.")
    if any(s.is_dir() is False and out.resolve() == s.resolve().parent and out.exists() for s in plan.source.files):
        raise UsageError(f"{out} holds the source.", hint="Choose another output.")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; this layout is a folder.", hint="Choose another output.")
    if out.exists() and _same(out, Path.cwd()):
        raise UsageError(f"{out} is the current folder.", hint="Name a folder that shall be made.")
    occupied = out.is_dir() and any(out.iterdir())
    if occupied and not overwrite:
        raise UsageError(f"{out} exists already.", hint="--overwrite replaces it.")
    if occupied:
        _refuse_foreign(plan, out)


def _check_files(plan: ConversionPlan, out: Path, *, overwrite: bool) -> None:
    """A single file, or its pieces: nothing of the source is among them, and nothing is replaced unasked."""
    if out.is_dir():
        raise UsageError(f"{out} is a folder.", hint="Name the file that shall be made.")
    paths = [out.with_name(name) for name in (*(f.name for f in plan.files), *plan.sidecars)]
    if any(_same(path, source) for path in paths for source in plan.source.files):
        raise UsageError(f"{out} is the source itself.", hint="Choose another output.")
    there = [path for path in paths if path.exists()]
    # A record without its file (deleted or moved) is in nobody's way.
    asked = [path for path in there if not path.name.endswith(".gguf.conversion.json")]
    if asked and not overwrite:
        raise UsageError(f"{asked[0]} exists already.", hint="--overwrite replaces it.")
    folders = [path for path in there if path.is_dir()]
    if folders:
        raise UsageError(f"{folders[0]} is a folder.", hint="Choose another output.")


def _same(a: Path, b: Path) -> bool:
    try:
        return a.samefile(b)
    except OSError:
        return False


def _refuse_foreign(plan: ConversionPlan, out: Path) -> None:
    """``--overwrite`` replaces a checkpoint, never a folder in which somebody keeps other things."""
    from convert.locate import CONFIG_NAMES, INDEX_NAMES, RECORD_NAME, SUFFIXES

    known = {f.name for f in plan.files} | set(plan.sidecars) | {RECORD_NAME, *CONFIG_NAMES, *INDEX_NAMES}
    harmless = (".json", ".txt", ".model", ".jinja", ".md", *SUFFIXES)
    inside = list(out.iterdir())
    foreign = [p.name for p in inside if p.is_dir() or (p.name not in known and p.suffix not in harmless)]
    if not any(p.name in known or p.suffix in SUFFIXES for p in inside):  # notes are harmless beside weights only
        foreign = [p.name for p in inside]
    if foreign:
        raise UsageError(
            f"{out} holds more than a checkpoint ({', '.join(sorted(foreign)[:5])}); --overwrite does not replace it.",
            hint="Remove the folder yourself, or choose another output.",
        )


def landing(out: Path, *, single: bool) -> Path:
    """Where ``out`` really is: a folder reached through a link is replaced there, and the link stays."""
    return out.resolve() if out.is_symlink() and not single else Path(os.path.abspath(out))


class Claim:
    """The right to write one output: a partial folder beside it, locked while this run lasts.

    The lock is the system's own, so that it ends with its process however that ends; the remains of a killed run are
    cleared away.

    Args:
        out: The output.
        single: Whether it is a file or files beside each other, not a folder.

    Attributes:
        folder: The partial folder.

    Raises:
        ConvertError: Another run is writing the same output.
        UsageError: Something that is no conversion's lies where the partial folder belongs.
    """

    def __init__(self, out: Path, *, single: bool) -> None:
        self.out = landing(out, single=single)
        self.single = single
        self.folder = self.out.with_name(self.out.name + ".partial")
        missing = [p for p in self.out.parents if not p.exists()]
        if not _ours(self.folder):
            raise UsageError(
                f"{self.folder} is in the way, and no conversion left it there.",
                hint="Rename it or remove it yourself.",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._made = missing
        self._lock = self.folder / LOCK_NAME
        self._fd = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        if not lock_file(self._fd) or not _same_file(self._fd, self._lock):
            os.close(self._fd)
            raise ConvertError(
                Problem(
                    "busy",
                    f"another conversion is writing {out}.",
                    file=str(self.folder),
                    hint="Wait for it, or choose another output.",
                )
            )
        for path in self.folder.iterdir():
            if path != self._lock:
                remove(path)

    def abandon(self) -> None:
        """Leave nothing behind, neither the partial folder nor folders that were made to hold it."""
        for path in self.folder.glob("*"):  # the lock goes last: what lies here without one is somebody else's
            if path != self._lock:
                remove(path)
        self._release()
        remove(self.folder)
        for parent in self._made:
            with contextlib.suppress(OSError):  # something else may be in it by now
                parent.rmdir()

    def _release(self) -> None:
        with contextlib.suppress(OSError):
            self._lock.unlink()
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def commit(self) -> None:
        """Give the complete output its name (or move its files beside each other), durably."""
        self._release()
        sync_folder(self.folder)
        if self.single:
            self._move_files()
        elif self.out.exists():
            self._replace_folder()
        else:
            os.replace(self.folder, self.out)
        sync_folder(self.out.parent)

    def _move_files(self) -> None:
        # Weights come last, the piece that a loader opens last of all.
        weights = sorted((p for p in self.folder.iterdir() if p.suffix == ".gguf"), reverse=True)
        for path in [*(p for p in self.folder.iterdir() if p not in weights), *weights]:
            os.replace(path, self.out.with_name(path.name))
        self.folder.rmdir()

    def _replace_folder(self) -> None:
        names = (f"{self.out.name}.replaced{number or ''}" for number in itertools.count())
        old = next(path for path in map(self.out.with_name, names) if not os.path.lexists(path))
        os.replace(self.out, old)
        try:
            os.replace(self.folder, self.out)
        except BaseException:
            if not self.out.exists():
                os.replace(old, self.out)
            raise
        remove(old)


def _ours(folder: Path) -> bool:
    """Whether a partial folder may be cleared: there is none, it is empty, or a conversion was killed in it.

    Such a folder holds the lock, or, killed between the last check and the rename, a complete output with its record.
    """
    from convert.locate import RECORD_NAME

    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        return False
    try:
        inside = os.listdir(folder)
    except FileNotFoundError:  # not there, or just renamed by the run that made it
        return True
    return not inside or any(name == LOCK_NAME or name.endswith(RECORD_NAME) for name in inside)


def _same_file(fd: int, path: Path) -> bool:
    """Whether the open file still has this name (the run that held it may just have ended)."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def remove(path: Path) -> None:
    """Delete a folder with whatever is in it, or a file; quietly."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def write_sidecar(folder: Path, name: str, value: bytes | Path) -> None:
    """Write a small file, or copy one, and sync it."""
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        if isinstance(value, bytes):
            file.write(value)
        else:
            with value.open("rb") as source:
                shutil.copyfileobj(source, file)
        file.flush()
        os.fsync(file.fileno())
