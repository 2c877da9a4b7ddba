"""Turning findings into text: folding layers, sizes, numbers. No printing; :mod:`convert.cli` does that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from convert.errors import Problem


def fold_names(names: Iterable[str]) -> list[str]:
    """Fold names that differ in one number: ``model.layers.{0-2,20-31}.self_attn.k_proj.weight``.

    The first all-digit path part is folded; order of first appearance is kept.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        head, number, tail = _split(name)
        groups.setdefault((head, tail), []).append(-1 if number is None else number)
    out = []
    for (head, tail), numbers in groups.items():
        if set(numbers) == {-1}:
            out.append(head)
        elif len(set(numbers)) == 1:
            out.append(f"{head}{numbers[0]}{tail}")
        else:
            out.append(f"{head}{{{ranges(numbers)}}}{tail}")
    return out


def _split(name: str) -> tuple[str, int | None, str]:
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            head = "".join(p + "." for p in parts[:i])
            tail = "".join("." + p for p in parts[i + 1 :])
            return head, int(part), tail
    return name, None, ""


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
    """Join problems that say the same of several layers into one each."""
    groups: dict[tuple[str, ...], list[Problem]] = {}
    for p in problems:
        if p.tensor is None:
            groups[(p.message,)] = [p]
            continue
        head, _, tail = _split(p.tensor)
        generic = p.message.replace(repr(p.tensor), "{}")
        groups.setdefault((p.kind, head, tail, generic, str(p.hint)), []).append(p)
    out = []
    for members in groups.values():
        first = members[0]
        if len(members) == 1 or first.tensor is None:
            out.append(first)
            continue
        names = fold_names(m.tensor for m in members if m.tensor)
        name = names[0]
        out.append(replace(first, tensor=name, message=first.message.replace(repr(first.tensor), repr(name))))
    return out


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
