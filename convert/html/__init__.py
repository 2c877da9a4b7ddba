"""Reports to look at: one self-contained HTML file from the result of verify, diagnose or diff.

A page is built from ``result.as_json()`` and ``result.detail()`` and nothing else. ``as_json()`` is the documented,
small result; ``detail()`` is plain data (dicts, lists, numbers, strings, None; no arrays, no tensors) for the figures.
Which keys of ``detail()`` the pages read is written in :mod:`convert.html.verify`, :mod:`convert.html.diagnose` and
:mod:`convert.html.diff`. A key that is missing (or empty, or None) leaves out its section, and the page says why in a
sentence; ``detail()["absent"] = {"layers": "the models ran whole"}`` gives that sentence. A number that is NaN or
infinite is allowed everywhere: it is shown as such and left out of the figure.

Whoever makes a result keeps it small: at most 2,000 sampled logits, one entry per layer and one per tensor. Longer
lists are thinned out here and the page says so. This package computes nothing about models and imports no torch.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from convert.errors import Problem, UsageError


class Result(Protocol):
    """What a report is made of."""

    def as_json(self) -> dict[str, Any]:
        """The documented result; its ``schema`` tells which page it is."""
        ...

    def detail(self) -> dict[str, Any]:
        """Plain data for the figures."""
        ...


def check_report(out: str | os.PathLike[str]) -> Path:
    """Refuse what could not be written after the work, before it.

    Args:
        out: The page that is asked for. A report that lies there is replaced; nothing else is.

    Returns:
        Where it will be written, links followed.

    Raises:
        UsageError: matplotlib is missing, or the place is a folder, another's file, or not writable.
    """
    from convert.html.canvas import require_matplotlib
    from convert.html.page import MARK

    require_matplotlib()
    path = Path(os.path.realpath(out))
    if path.is_dir():
        raise _refusal(f"{path} is a folder.", "Name the file that shall be made: report.html.")
    if path.exists():
        if not stat.S_ISREG(path.stat().st_mode):
            raise _refusal(f"{path} is no plain file.", "Choose another file.")
        with path.open("rb") as file:
            start = file.read(len(MARK))
        if start != MARK.encode():
            raise _refusal(f"{path} is there and is no report.", "Reports replace reports only; choose another name.")
    parent = path.parent
    if not parent.is_dir():
        raise _refusal(f"There is no folder {parent} for the report.", "Make it first, or choose another.")
    if not os.access(parent, os.W_OK):
        raise _refusal(f"{parent} may not be written.", "Choose another folder for the report.")
    return path


def _refusal(message: str, hint: str) -> UsageError:
    return UsageError(Problem("report", message, hint=hint))


def render(result: Result, *, extra: Mapping[str, Any] | None = None) -> str:
    """The page of a result.

    Args:
        result: Of ``verify``, ``diagnose`` or ``diff``.
        extra: More of ``detail()``, from elsewhere: ``tensors``, for a verification.

    Raises:
        ValueError: The result is of no kind that has a page.
    """
    from convert.html.diagnose import diagnose_page
    from convert.html.diff import diff_page
    from convert.html.verify import verify_page

    value = result.as_json()
    kind = str(value.get("schema", "")).removeprefix("convert.").partition("/")[0]
    pages = {"verify": verify_page, "diagnose": diagnose_page, "diff": diff_page}
    if kind not in pages:
        raise ValueError(f"results of kind {kind!r} have no report")
    make = getattr(result, "detail", None)
    return pages[kind](value, {**(make() if make else {}), **(extra or {})}).render()


def write_report(result: Result, out: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None) -> Path:
    """Write the page of a result, whole or not at all.

    Args:
        result: Of ``verify``, ``diagnose`` or ``diff``.
        out: The file; see :func:`check_report`, which is called again, for others may have written in between.
        extra: As :func:`render` takes it.

    Returns:
        Where it is.
    """
    path = check_report(out)
    data = render(result, extra=extra).encode("utf-8", "backslashreplace")
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path
