"""The target of a conversion: whether it may be written, decided before a byte is, and the small files beside weights.

The partial folder, and how it gets the output's name, is :mod:`convert.claim`'s business.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from convert.errors import ConvertError, Problem, UsageError
from convert.io_errors import io_problem, writing
from convert.plan import ConversionPlan
from convert.platform import is_mount, write_at

#: Held by the run that writes into a partial folder.
LOCK_NAME = ".lock"
#: Follows an output's name while it is made.
_PARTIAL = ".partial"


#: Names that Windows keeps for devices, with any suffix; and letters that it has other uses for.
_DEVICES = frozenset({"con", "prn", "aux", "nul", *(f"{d}{n}" for d in ("com", "lpt") for n in range(1, 10))})
_RESERVED = frozenset('<>:"|?*')


def check_target(
    plan: ConversionPlan, out: Path, *, overwrite: bool, force: bool = False, resume: bool = False
) -> None:
    """Everything that can forbid writing to ``out``, before a byte is written.

    Args:
        plan: What would be written.
        out: The folder or file.
        overwrite: Whether an existing output may be replaced.
        force: Go on although the disk looks too full.
        resume: Files that a killed run had moved to their places already are no obstacle.

    Raises:
        UsageError: It exists and ``overwrite`` is not given, it is the source, or it is no name for a file here.
        ConvertError: The disk is too full.
    """
    refuse_names(plan, out, windows=os.name == "nt")
    try:
        out.resolve()
    except (OSError, RuntimeError):  # Python before 3.13 raises RuntimeError for links that go in circles
        raise UsageError(f"{out} is a link that leads nowhere.", hint="Choose another output.") from None
    place = landing(out, single=plan.single_file)
    if not place.name:
        raise UsageError(f"{out} is no name for an output.", hint="Name a folder that shall be made.")
    if place.name.endswith(_PARTIAL):  # another run would take it for its remains, and clear it away
        raise UsageError(f"{out}: names in {_PARTIAL} are for what is not finished.", hint="Choose another output.")
    if is_mount(place):  # a rename would fail in the end
        raise UsageError(f"{out} is a mount point, which cannot be replaced.", hint=f"Name a place in it: {out}/model.")
    if plan.single_file:
        _check_files(plan, out, overwrite=overwrite, resume=resume)
    else:
        _check_folder(plan, out, overwrite=overwrite)
    partial = partial_folder(out, single=plan.single_file)
    if any(_within(path, partial) for path in (plan.source.path, *plan.source.files)):
        raise UsageError(
            f"the source lies in {partial}, where this output would be prepared.",
            hint="Choose another output, or rename that folder.",
        )
    parent = place.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise UsageError(f"{parent} is a file, so {out} cannot be made.", hint="Choose another output.")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"{parent} may not be written, so {out} cannot be made.", hint="Choose another output.")
    free = shutil.disk_usage(parent).free + _allocated(partial)  # cleared away or written over
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
    for path in out.iterdir() if out.is_dir() else ():
        if any(_same(path, source) for source in plan.source.files):
            raise UsageError(
                f"{path} is a file of the source (the same, or a link to it).", hint="Choose another output."
            )
    occupied = out.is_dir() and any(out.iterdir())
    if occupied and not overwrite:
        raise UsageError(f"{out} exists already.", hint="--overwrite replaces it.")
    if occupied:
        _refuse_foreign(plan, out)


def _check_files(plan: ConversionPlan, out: Path, *, overwrite: bool, resume: bool) -> None:
    """A single file, or its pieces: nothing of the source is among them, and nothing is replaced unasked."""
    if out.is_dir():
        raise UsageError(f"{out} is a folder.", hint="Name the file that shall be made.")
    paths = [out.with_name(name) for name in (*(f.name for f in plan.files), *plan.sidecars)]
    if any(_same(path, source) for path in paths for source in plan.source.files):
        raise UsageError(f"{out} is the source itself.", hint="Choose another output.")
    moved = _moved(out) if resume else {}
    there = [path for path in paths if path.exists() and path.name not in moved]
    # A record without its file (deleted or moved) is in nobody's way.
    asked = [path for path in there if not path.name.endswith(".gguf.conversion.json")]
    if asked and not overwrite:
        raise UsageError(f"{asked[0]} exists already.", hint="--overwrite replaces it.")
    if plan.source.path.is_dir() and _same(landing(out, single=True).parent, plan.source.path):
        raise UsageError(
            f"{out} would lie among the weights of {plan.source.path}, a second model to whatever opens that folder.",
            hint="Choose another place, or name the source's file instead of its folder.",
        )
    folders = [path for path in there if path.is_dir()]
    if folders:
        raise UsageError(f"{folders[0]} is a folder.", hint="Choose another output.")


def _moved(out: Path) -> set[str]:
    """Files that a killed run had moved to their places already."""
    from convert.claim import is_moved
    from convert.journal import read_commit

    listed = read_commit(partial_folder(out, single=True))
    return {name for name, identity in listed.items() if is_moved(landing(out, single=True).with_name(name), identity)}


def refuse_names(plan: ConversionPlan, out: Path, *, windows: bool) -> None:
    """Names that would end elsewhere than they say.

    Args:
        plan: Its files and the files beside them.
        out: The output.
        windows: Whether the rules of Windows hold.

    Raises:
        UsageError: Two files differ only by capitals, or Windows would take a name for a device or cut off its end.
    """
    seen: dict[str, str] = {}
    for name in (*(f.name for f in plan.files), *plan.sidecars):
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise UsageError(f"{other} and {name} are one file where capitals do not count.", hint="Rename one.")
    if not windows:
        return
    for part in (*_parts(out), *seen.values()):
        if part.split(".")[0].rstrip(" ").lower() in _DEVICES:
            raise UsageError(f"{part!r} is a device on Windows, not a file.", hint="Choose another output.")
        odd = part[-1:] in (" ", ".") or _RESERVED & set(part) or any(letter < " " for letter in part)
        if odd and part not in (".", ".."):
            raise UsageError(f"Windows has no files called {part!r}.", hint="Choose another output.")


def _parts(out: Path) -> Iterable[str]:
    return [part for part in out.parts if part != out.anchor]


def _within(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return False


def _allocated(folder: Path) -> int:
    """Bytes of disk that the remains of an earlier run take."""
    total = 0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            found = path.lstat()
            total += min(found.st_size, getattr(found, "st_blocks", 1 << 60) * 512)
    return total


def _same(a: Path, b: Path) -> bool:
    try:
        return a.samefile(b)
    except OSError:
        return False


def _refuse_foreign(plan: ConversionPlan, out: Path) -> None:
    """``--overwrite`` replaces a checkpoint, never a folder in which somebody keeps other things."""
    from convert.locate import CONFIG_NAMES, INDEX_NAMES, RECORD_NAME, SUFFIXES

    known = {f.name for f in plan.files} | set(plan.sidecars) | {RECORD_NAME, LOCK_NAME, *CONFIG_NAMES, *INDEX_NAMES}
    known.add(".metadata")  # of a distributed checkpoint
    harmless = (".json", ".txt", ".model", ".jinja", ".md", ".distcp", *SUFFIXES)
    inside = list(out.iterdir())
    foreign = [p.name for p in inside if p.is_dir() or (p.name not in known and p.suffix not in harmless)]
    # Notes are harmless beside weights only.
    if not any(p.name in known or p.suffix in (".distcp", *SUFFIXES) for p in inside):
        foreign = [p.name for p in inside]
    if foreign:
        raise UsageError(
            f"{out} holds more than a checkpoint ({', '.join(sorted(foreign)[:5])}); --overwrite does not replace it.",
            hint="Remove the folder yourself, or choose another output.",
        )


def landing(out: Path, *, single: bool) -> Path:
    """Where ``out`` really is: a folder reached through a link is replaced there, and the link stays."""
    return out.resolve() if out.is_symlink() and not single else Path(os.path.abspath(out))


def partial_folder(out: Path, *, single: bool) -> Path:
    """Where output is prepared: beside the place where it will be."""
    place = landing(out, single=single)
    return place.with_name(place.name + _PARTIAL)


def remove(path: Path) -> None:
    """Delete a folder with whatever is in it, or a file; quietly."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def write_sidecar(folder: Path, name: str, value: bytes | Path) -> None:
    """Write a small file, or copy one, and sync it.

    Raises:
        ConvertError: The system did not let it be written, or the file to copy read.
    """
    target = folder / name
    data = value if isinstance(value, bytes) else b""
    if isinstance(value, Path):
        try:
            data = value.read_bytes()  # tens of megabytes at most: tokenizer files
        except OSError as error:
            raise ConvertError(io_problem(error, value, writing=False)) from error
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
        try:
            write_at(fd, data, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
