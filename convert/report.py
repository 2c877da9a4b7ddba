"""Turning findings into text: folding layers, sizes, numbers. No printing; :mod:`convert.cli` does that."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace

from convert.errors import Problem


def fold_names(names: Iterable[str]) -> list[str]:
    """Fold names that differ in numbers: ``model.layers.{0-2,20-31}.mlp.experts.{0-127}.up_proj.weight``.

    All-digit path parts are folded, the last one first, so that layers are joined that have the same experts; order of
    first appearance is kept.
    """
    found = [tuple(_dotted(name).split(".")) for name in dict.fromkeys(names)]
    count = max((len(_places(parts)) for parts in found), default=0)
    for turn in reversed(range(count)):
        groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
        for parts in found:
            places = _places(parts)
            at = places[turn] if turn < len(places) and parts[places[turn]].isdecimal() else len(parts)
            number = int(parts[at]) if at < len(parts) else -1
            groups.setdefault((parts[:at], parts[at + 1 :]), []).append(number)
        found = [
            head if numbers == [-1] else (*head, _number(numbers), *tail) for (head, tail), numbers in groups.items()
        ]
    return [_undotted(".".join(parts)) for parts in found]


def _dotted(name: str) -> str:
    """A name with slashes (``model/h0/ln_1/g``) with dots around the layer's number; other names as they are."""
    if "." in name or "/" not in name:
        return name
    parts = [(part, part.rstrip("0123456789")) for part in name.split("/")]
    return "/".join(f"{stem}.{part[len(stem) :]}." if stem.isalpha() and stem != part else part for part, stem in parts)


def _undotted(name: str) -> str:
    return name.replace(".", "") if "/" in name and "./" in name else name


def _places(parts: Sequence[str]) -> list[int]:
    """Where the numbers of a name are, folded ones included."""
    return [i for i, part in enumerate(parts) if part.isdecimal() or part.startswith("{")]


def _number(numbers: list[int]) -> str:
    return str(numbers[0]) if len(set(numbers)) == 1 else f"{{{ranges(numbers)}}}"


def ranges(numbers: Iterable[int]) -> str:
    """``0-2,20-31`` for the numbers in order."""
    out: list[list[int]] = []
    for n in sorted(set(numbers)):
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def fold_problems(problems: Sequence[Problem]) -> list[Problem]:
    """Join problems that say the same of several layers or experts into one each."""
    groups: dict[tuple[str, ...], list[Problem]] = {}
    for p in problems:
        if p.tensor is None:
            groups[(p.message,)] = [p]
            continue
        name = ".".join("*" if part.isdecimal() else part for part in _dotted(p.tensor).split("."))
        generic = p.message.replace(repr(p.tensor), "{}")
        groups.setdefault((p.kind, name, generic, str(p.hint)), []).append(p)
    out = []
    for members in groups.values():
        first = members[0]
        if len(members) == 1 or first.tensor is None:
            out.append(first)
            continue
        names = fold_names(m.tensor for m in members if m.tensor)
        shown = ", ".join(map(repr, names))
        out.append(replace(first, tensor=names[0], message=first.message.replace(repr(first.tensor), shown)))
    return out


def error_lines(problems: Sequence[Problem], *, source: str | None = None, most: int = 30) -> list[str]:
    """What the command line prints of an error: ``error: …`` and its hint, findings that say the same once.

    A hint that several findings in a row share stands once, below the last of them.

    Args:
        problems: The findings.
        source: What was being read. Said, like a finding's own file, where no message names a file; once, for the
            first finding that it goes for.
        most: More findings than these are counted.
    """
    folded = fold_problems(problems)
    out: list[str] = []
    told: str | None = None
    shown = folded[:most]
    for problem, following in zip(shown, [*shown[1:], None], strict=True):
        where = problem.file or source
        lead = "" if where is None or where == told or _names(problem.message, where) else f"{where}: "
        told = where
        out.append(printable(f"error: {lead}{_cut(problem.message)}"))
        if problem.hint and (following is None or following.hint != problem.hint):
            out.append(printable(f"       {_cut(problem.hint)}"))
    if len(folded) > most:
        out.append(f"… and {len(folded) - most} more.")
    return out


def _cut(text: str, limit: int = 2000) -> str:
    """A text of a stranger's file may be in it, of any length."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text):,} characters)"


def _names(message: str, path: str) -> bool:
    name = path.rstrip("/").rpartition("/")[2]
    return path in message or ("." in name and name in message)


def printable(text: str) -> str:
    """A text without what a terminal would obey: escape sequences, half surrogates; line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def speakable(text: str) -> str:
    """What a model says, without control characters: a token may be an escape sequence. Joiners of scripts stay."""
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" else c for c in text)


def human_bytes(count: int | float) -> str:
    """``2.47 GB``: decimal units, three figures."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            return (
                f"{value:.0f} {unit}"
                if unit == "B"
                else f"{value:.3g} {unit}"
                if value < 100
                else f"{value:.0f} {unit}"
            )
        value /= 1000
    raise AssertionError
