"""What lies beside a path that is not there: its name may only be misspelt, or be that of a file written in pieces."""

from __future__ import annotations

import difflib
from pathlib import Path

#: A folder may hold millions of names, and a message has room for a few.
_MOST_NAMES, _MOST_SHOWN = 1000, 3


def hint_of(absent: Path) -> str:
    """What to do about a path that does not exist; the names that are like its own, pieces of a split file first."""
    try:
        beside = [p.name for p, _ in zip(absent.parent.iterdir(), range(_MOST_NAMES), strict=False)]
    except OSError:
        return "Give a checkpoint folder or file."
    weights = [name for name in beside if not name.endswith(".json")]
    pieces = sorted(n for n in weights if n.startswith(f"{absent.stem}-") and Path(n).suffix == absent.suffix != "")
    near = pieces[:1] or difflib.get_close_matches(absent.name, weights, n=_MOST_SHOWN)
    return f"Beside it there is {', '.join(near)}." if near else "Give a checkpoint folder or file."
