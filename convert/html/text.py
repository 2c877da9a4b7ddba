"""Texts and numbers as a page shows them: whatever a file name or a tensor name holds, it stays text.

Everything that comes from a checkpoint is hostile: it is escaped, its control and direction characters are made
visible, and it is cut where it is longer than any honest name.
"""

from __future__ import annotations

import math
import unicodedata
from html import escape as _escape
from typing import Any

#: Characters of a name that are shown; longer ones lose their middle.
LONGEST = 400


def plain(value: Any, *, longest: int = LONGEST) -> str:
    """A text without characters that act on what surrounds them (controls, direction marks, lone surrogates)."""
    text = str(value)
    if len(text) > longest:
        text = text[: longest // 2] + "…" + text[-(longest // 2) :]
    return "".join(_visible(c) for c in text)


def _visible(character: str) -> str:
    if character in "\n\t":
        return " "
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        code = ord(character)
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    return character


def escape(value: Any, *, longest: int = LONGEST) -> str:
    """A text for the inside of an element or of a quoted attribute."""
    return _escape(plain(value, longest=longest), quote=True)


def number(value: Any) -> str:
    """A figure in three digits; a dash where there is none."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return plain(value)
    if math.isnan(value):
        return "no number"
    if math.isinf(value):
        return "infinite" if value > 0 else "−infinite"
    if value == 0:
        return "0"
    if 0.001 <= abs(value) < 10000:
        return f"{value:.4g}".replace("-", "−")
    return f"{value:.2e}".replace("-", "−")


def share(value: Any) -> str:
    """A share between 0 and 1, in per cent."""
    return number(value) if not isinstance(value, (int, float)) or not math.isfinite(value) else f"{100 * value:.4g} %"


def finite(value: Any) -> float | None:
    """A number that can be drawn, or None."""
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None
