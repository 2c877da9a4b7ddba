"""Which file each line of a published list of hashes speaks of, by the longest common end of the two paths.

Lists are made in one place and used in another: Meta's ``checklist.chk`` lies beside its files, ``sha256sum */*`` was
run one folder above, and one list may speak of several models whose files are all called alike. Nothing is hashed and
no list is parsed here: those are :mod:`convert.hashing` and :mod:`convert.checksums`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Assigned:
    """What the lines of a list speak of.

    Attributes:
        certain: Files, with the one line that speaks of each.
        unsure: Files that have the base name of lines which name other folders, or several equally near ones.
        absent: Lines of files that should be here and are not.
    """

    certain: dict[Path, str] = field(default_factory=dict)
    unsure: dict[Path, list[str]] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)


def assign(lines: Mapping[str, str], *, place: Path, weights: Sequence[Path]) -> Assigned:
    """Find the file of each line.

    A path from the list's own folder counts first. Else the line is of a file that has its base name; of several
    lines the one whose folders agree with the file's, from the end, in most parts. A line without folders fits a file
    in any. Lines of other folders are no business of this checkpoint.

    Args:
        lines: Names as the list has them, and their hashes.
        place: The folder that the list lies in.
        weights: The weight files; what lies beside them is looked at, too.
    """
    found = Assigned()
    folders = {folder: folder.resolve() for folder in dict.fromkeys(p.parent for p in weights)}
    own = {w.absolute(): w for w in weights}
    near: dict[Path, list[str]] = {}
    foreign: list[str] = []
    missing: list[str] = []
    for name in lines:
        direct = _inside(place, name)
        there = direct is not None and direct.is_file()
        if direct is not None and there and any(direct.parent.resolve().is_relative_to(f) for f in folders.values()):
            same = next((w for w in _called(direct.name, weights, folders) if w.samefile(direct)), direct)
            found.certain[own.get(same.absolute(), same)] = name
            continue
        files = list(_called(_parts(name)[-1] if _parts(name) else "", weights, folders))
        for file in files:
            near.setdefault(file, []).append(name)
        if not files and not there:
            agree = len(_parts(name)) < 2 or any(_agreement(name, f / _parts(name)[-1]) > 1 for f in folders)
            (missing if agree else foreign).append(name)
    for file, names in near.items():
        if file not in found.certain:
            _choose(found, file, names, lines)
    found.absent = missing if found.certain or found.unsure else [*missing, *foreign]
    return found


def _choose(found: Assigned, file: Path, names: list[str], lines: Mapping[str, str]) -> None:
    """The nearest of a file's lines, where there is one."""
    ranks = {name: _agreement(name, file) for name in names}
    best = [name for name in names if ranks[name] == max(ranks.values())]
    fits = max(ranks.values()) > 1
    bare = [name for name in names if len(_parts(name)) == 1]
    best = best if fits else bare or best
    if (fits or bare) and len({lines[name] for name in best}) == 1:
        found.certain[file] = best[0]
    else:
        found.unsure[file] = best


def _inside(place: Path, name: str) -> Path | None:
    """The path that a line gives from its list's folder, unless it leads out of that."""
    path = Path(name)
    return None if path.is_absolute() or ".." in path.parts else place / path


def _called(name: str, weights: Sequence[Path], folders: Iterable[Path]) -> Iterable[Path]:
    """Weight files of a base name; else the files beside them that have it."""
    mine = [w for w in weights if w.name == name]
    return mine or [f / name for f in folders if name and (f / name).is_file()]


def _parts(name: str) -> list[str]:
    """The folders and the base name of a line, without what only says how to get there."""
    return [p for p in Path(name).parts if p not in ("/", "..", ".")]


def _agreement(name: str, file: Path) -> int:
    """How many parts two paths have in common, from the end; links count under either name."""
    wanted = _parts(name)[::-1]
    best = 0
    for path in (file.absolute(), file.parent.resolve() / file.name):
        same = 0
        for a, b in zip(wanted, reversed(path.parts), strict=False):
            if a != b:
                break
            same += 1
        best = max(best, same)
    return best
