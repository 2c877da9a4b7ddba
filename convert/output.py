"""The target of a conversion: whether it may be written, the partial folder beside it, and the rename at the end.

Output goes to a partial folder and is renamed when it is complete; a failure at any point removes it, and nothing
half-written is left under the target's name. What is written into it is :mod:`convert.run`'s business.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from convert.errors import ConvertError, Problem, UsageError
from convert.plan import ConversionPlan
from convert.platform import sync_folder


def check_target(plan: ConversionPlan, out: Path, *, overwrite: bool, force: bool = False) -> None:
    """Everything that can forbid writing to ``out``, before a byte is written.

    Raises:
        UsageError: It exists and ``overwrite`` is not given, or it is the source.
        ConvertError: The disk is too full.
    """
    if plan.single_file:
        _check_files(plan, out, overwrite=overwrite)
    else:
        _check_folder(plan, out, overwrite=overwrite)
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
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
    occupied = out.is_file() or (out.is_dir() and any(out.iterdir()))
    if occupied and not overwrite:
        raise UsageError(f"{out} exists already.", hint="--overwrite replaces it.")
    if occupied and out.is_dir():
        _refuse_foreign(plan, out)


def _check_files(plan: ConversionPlan, out: Path, *, overwrite: bool) -> None:
    """A single file, or its pieces: nothing of the source is among them, and nothing is replaced unasked."""
    if out.is_dir():
        raise UsageError(f"{out} is a folder.", hint="Name the file that shall be made.")
    paths = [out.with_name(name) for name in (*(f.name for f in plan.files), *plan.sidecars)]
    if any(_same(path, source) for path in paths for source in plan.source.files):
        raise UsageError(f"{out} is the source itself.", hint="Choose another output.")
    there = [path for path in paths if path.exists()]
    if there and not overwrite:
        raise UsageError(f"{there[0]} exists already.", hint="--overwrite replaces it.")
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
    foreign = [p.name for p in out.iterdir() if p.is_dir() or (p.name not in known and p.suffix not in harmless)]
    if foreign:
        raise UsageError(
            f"{out} holds more than a checkpoint ({', '.join(sorted(foreign)[:5])}); --overwrite does not replace it.",
            hint="Remove the folder yourself, or choose another output.",
        )


def claim(out: Path) -> Path:
    """Make the partial folder; its existence keeps a second run to the same target out."""
    partial = out.with_name(out.name + ".partial")
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    lock = partial / ".lock"
    if partial.exists():
        if _alive(lock):
            raise ConvertError(
                Problem(
                    "busy",
                    f"another conversion is writing {out}.",
                    file=str(partial),
                    hint="Wait for it, or choose another output.",
                )
            )
        remove(partial)
    try:
        partial.mkdir()
    except FileExistsError:
        raise ConvertError(Problem("busy", f"another conversion is writing {out}.", file=str(partial))) from None
    lock.write_text(str(os.getpid()))
    return partial


def _alive(lock: Path) -> bool:
    try:
        pid = int(lock.read_text())
        os.kill(pid, 0)
    except (OSError, ValueError):
        return False
    return pid != os.getpid()


def remove(path: Path) -> None:
    """Delete a folder, whatever is in it; quietly."""
    shutil.rmtree(path, ignore_errors=True)


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


def commit(partial: Path, out: Path, *, single: bool) -> None:
    """Give a complete partial folder its name (or move its files beside each other), durably."""
    (partial / ".lock").unlink(missing_ok=True)
    sync_folder(partial)
    if single:
        # Weights come last, the piece that a loader opens last of all.
        weights = sorted((p for p in partial.iterdir() if p.suffix == ".gguf"), reverse=True)
        for path in [*(p for p in partial.iterdir() if p not in weights), *weights]:
            os.replace(path, out.with_name(path.name))
        partial.rmdir()
    elif out.exists():
        old = out.with_name(out.name + ".replaced")
        remove(old)
        os.replace(out, old)
        os.replace(partial, out)
        remove(old)
    else:
        os.replace(partial, out)
    sync_folder(out.absolute().parent)
