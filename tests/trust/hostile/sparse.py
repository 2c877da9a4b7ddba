"""Large files that take no room: their bytes are zeros, or blanks that a loop writes where that cannot be helped."""

from __future__ import annotations

from pathlib import Path


def hole(path: Path, size: int, start: bytes = b"", end: bytes = b"") -> Path:
    """A file of ``size`` bytes, zeros but for its start and end."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)
        if end:
            file.seek(size - len(end))
            file.write(end)
    return path
