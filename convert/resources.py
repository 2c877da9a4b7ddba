"""Where the files that are data, not code, lie: the mapping tables.

In a checkout they are in ``mappings/`` beside the package, where people edit them; in an installed wheel they
are in ``convert/mappings``. This module finds folders and reads nothing.
"""

from __future__ import annotations

from pathlib import Path

from convert.errors import TableError


def mappings_dir() -> Path:
    """The folder that holds ``<family>.toml`` and ``names/*.toml``.

    Raises:
        TableError: There is none; the installation is broken.
    """
    package = Path(__file__).resolve().parent
    # The package's own folder first: beside an installed package lie other people's folders.
    candidates = (package / "mappings", package.parent / "mappings")
    for folder in candidates:
        if folder.is_dir() and any(folder.glob("*.toml")):
            return folder
    looked = " or ".join(repr(str(c)) for c in candidates)
    raise TableError(
        f"The mapping tables were not found in {looked}.",
        hint="Install ckpt-convert again, or run from a complete checkout.",
    )
