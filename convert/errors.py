"""The errors a user meets, and the shape every finding has.

A :class:`Problem` is one finding: what was found, what was wanted, why, and what to do. A
:class:`ConvertError` carries one or many; the command line prints them all at once and maps the class
to an exit code. This module prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding about a checkpoint, a table or a request.

    Attributes:
        kind: A stable, short identifier for programs (``missing_tensor``, ``shape``, ``truncated`` …).
        message: One sentence for people, complete in itself.
        tensor: The tensor it is about, as the source names it, or None.
        file: The file it is about, or None.
        found: What is there.
        wanted: What should be there, with the expression and its values where one exists.
        hint: What to do next.
    """

    kind: str
    message: str
    tensor: str | None = None
    file: str | None = None
    found: Any = None
    wanted: Any = None
    hint: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The finding with the keys that ``validate --json`` documents."""
        return {
            "kind": self.kind,
            "message": self.message,
            "tensor": self.tensor,
            "file": self.file,
            "found": _plain(self.found),
            "wanted": _plain(self.wanted),
            "hint": self.hint,
        }


def _plain(value: Any) -> Any:
    """A value that JSON has a word for; no-number and infinity, which it has not, become texts."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


class ConvertError(Exception):
    """Something is wrong with the input or the request; nothing was written.

    Attributes:
        problems: Every finding, in the order in which a reader should see them.
        exit_code: What the command line returns.
        source: What was being read, where that is known; the command line says it where the findings name no file.
    """

    exit_code = 1
    source: str | None = None

    def __init__(self, problems: str | Problem | Iterable[Problem], *, hint: str | None = None) -> None:
        if isinstance(problems, str):
            problems = Problem("error", problems, hint=hint)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(f"{p.message}" + (f" {p.hint}" if p.hint else "") for p in self.problems))


class UsageError(ConvertError):
    """The command line or the call does not fit the source (exit code 2)."""

    exit_code = 2


class FormatError(ConvertError):
    """A file is not what it claims to be: truncated, damaged, or something else entirely."""


class TableError(ConvertError):
    """A mapping table or a names file is wrong."""
