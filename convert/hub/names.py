"""What a user calls a model on the Hub: ``org/name``, ``org/name@revision``, ``hf://org/name/subfolder``.

Decided without a look at the network: what is there as a path is a path, and what is written like one, too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from convert.errors import UsageError

SCHEME = "hf://"
#: What ``Path`` makes of the scheme.
_PATH_SCHEME = "hf:/"
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
#: The Hub's own limit on either part of a name.
_MOST = 96


@dataclass(frozen=True, slots=True)
class Name:
    """A repository, and what in it is meant.

    Attributes:
        repo: ``org/name``.
        revision: A branch, tag or commit; None for the default branch.
        inside: A folder or file in the repository, ``""`` for all of it.
        explicit: Whether it can be nothing else (it began with ``hf://``).
    """

    repo: str
    revision: str | None = None
    inside: str = ""
    explicit: bool = False

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{SCHEME}{self.repo}{at}/{self.inside}" if self.inside else f"{self.repo}{at}"

    def within(self, inside: str) -> Name:
        """The name of a folder or file in the same repository."""
        return Name(self.repo, self.revision, inside, self.explicit)


def parse(src: str | os.PathLike[str]) -> Name | None:
    """The repository that ``src`` names; None where it is a path.

    A path is what exists, what begins with ``.``, ``/`` or ``~``, and what lies in a folder that exists.

    Raises:
        UsageError: It begins with ``hf://`` and is no name.
    """
    text = os.fspath(src)
    if not isinstance(text, str):
        return None
    for scheme in (SCHEME, _PATH_SCHEME):
        if text.startswith(scheme):
            return _explicit(text.removeprefix(scheme))
    if text.startswith((".", "/", "~")) or "\\" in text or os.path.lexists(text):
        return None
    found = _split(text.split("/"))
    if found is None or found.inside or Path(found.repo.split("/", 1)[0]).exists():
        return None
    return found


def shadowed(src: str | os.PathLike[str]) -> bool:
    """Whether a path that exists could have been the name of a repository, too."""
    text = os.fspath(src)
    if not isinstance(text, str) or text.startswith((".", "/", "~")) or not os.path.lexists(text):
        return False
    found = _split(text.split("/"))
    return found is not None and not found.inside


def _explicit(text: str) -> Name:
    text = text.removeprefix("models/") if text.count("/") > 1 else text
    found = _split(text.strip("/").split("/"))
    if found is None:
        raise UsageError(
            f"{SCHEME}{text} names no repository.", hint="Write hf://org/name, hf://org/name@revision/folder/file.gguf."
        )
    return Name(found.repo, found.revision, found.inside, explicit=True)


def _split(parts: list[str]) -> Name | None:
    if len(parts) < 2:
        return None
    org, (name, at, revision) = parts[0], parts[1].partition("@")
    if not (_is_part(org) and _is_part(name)) or (at and not revision):
        return None
    inside = PurePosixPath(*parts[2:]).as_posix() if parts[2:] else ""
    if any(part in ("", ".", "..") for part in parts[2:]):
        return None
    return Name(f"{org}/{name}", revision or None, inside)


def _is_part(text: str) -> bool:
    return 0 < len(text) <= _MOST and not (set(text) - _LETTERS) and text[0] not in ".-" and text[-1] not in ".-"
