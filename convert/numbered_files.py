"""Model-parallel files, ``consolidated.NN.pth``: which belong together, and whether the row of numbers is whole.

Looks at names only. A file without a number (``consolidated.pth``) is a model of its own and no part of a row.
"""

from __future__ import annotations

from pathlib import Path

from convert.errors import ConvertError, Problem

_SUFFIXES = ("pth", "pt")


def number_of(path: Path) -> int | None:
    """The number in ``consolidated.03.pth``; None for another name."""
    parts = path.name.split(".")
    if len(parts) != 3 or parts[0] != "consolidated" or parts[2] not in _SUFFIXES or not parts[1].isdecimal():
        return None
    return int(parts[1])


def row_of(path: Path) -> str:
    """What all files of a row share: ``consolidated.*.pth``."""
    return f"consolidated.*{path.suffix}"


def numbered_files(one: Path) -> list[Path]:
    """The files of the row that ``one`` is in, by number.

    Args:
        one: A file for which :func:`number_of` has a number.

    Raises:
        ConvertError: Numbers are absent, or two files have the same one: each would be half of another model.
    """
    numbered: dict[int, list[Path]] = {}
    for path in sorted(one.parent.iterdir()):
        if path.suffix == one.suffix and (number := number_of(path)) is not None and path.is_file():
            numbered.setdefault(number, []).append(path)
    problems = [
        Problem(
            "two_sets",
            f"{one.parent.name} has model-parallel file number {number} {len(paths)} times: "
            f"{', '.join(p.name for p in paths)}.",
            file=str(one.parent),
            found=[p.name for p in paths],
            wanted="one file per number",
            hint="Move those away that are not meant.",
        )
        for number, paths in numbered.items()
        if len(paths) > 1
    ]
    last = max(numbered, default=-1)
    gaps = [n for n in range(min(last, 100_000)) if n not in numbered]
    if gaps:
        listed = ", ".join(map(str, gaps[:12])) + (" …" if len(gaps) > 12 else "")
        problems.append(
            Problem(
                "missing_file",
                f"{one.parent.name} has {len(numbered)} model-parallel files up to number {last}; "
                f"number {listed} is absent.",
                file=str(one.parent),
                found=sorted(numbered),
                wanted=f"0 to {last}",
                hint="An incomplete download? Fetch the missing files.",
            )
        )
    if problems:
        raise ConvertError(problems)
    return [numbered[n][0] for n in sorted(numbered)]
