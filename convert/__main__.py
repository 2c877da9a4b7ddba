"""``python -m convert``: the same as the console script."""

from __future__ import annotations

from convert.cli import main

if __name__ == "__main__":
    main()
