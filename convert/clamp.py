"""``--clamp``: finite values that are too large for the type they become, stored as its largest value instead.

Without it such values stop the conversion. How many there were is counted where they are narrowed (``loss``); infinity
and NaN of the source are nobody's loss and stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from convert.cast import Array, to_float32
from convert.source import Source

#: For each type: integers of its size, the bit of the sign, and the pattern of the largest finite value.
_LARGEST: dict[str, tuple[Any, int, int]] = {
    "F16": (np.uint16, 0x8000, 0x7BFF),
    "BF16": (np.uint16, 0x8000, 0x7F7F),
    "F32": (np.uint32, 0x80000000, 0x7F7FFFFF),
}


def clamp(before: Array, source: str, after: Array, target: str) -> Array:
    """Narrowed values, with the largest value where narrowing made infinity of a finite one.

    Args:
        before: Raw values of type ``source``.
        source: Canonical name.
        after: The same values as raw storage of ``target``.
        target: ``F16``, ``BF16`` or ``F32``.

    Returns:
        ``after``, changed in place where it can be.
    """
    kind, sign, most = _LARGEST[target]
    exact = before if source == "F64" else to_float32(before, source)
    finite = np.isfinite(exact)
    after = np.ascontiguousarray(after)
    bits = after.view(kind)
    lost = ((bits & kind(sign - 1)) == kind(most + 1)) & finite
    bits[lost] = (bits[lost] & kind(sign)) | kind(most)
    return after


def set_clamp(sources: Iterable[Source]) -> None:
    """Let every source within ``sources`` that narrows or judges values clamp them."""
    for source in sources:
        for inner in within(source):
            if hasattr(inner, "clamp"):
                inner.clamp = True


def within(source: Source) -> Iterator[Source]:
    """A composed source and all that it is made of."""
    yield source
    inner = getattr(source, "source", None)
    if isinstance(inner, Source):
        yield from within(inner)
    for part in getattr(source, "parts", ()):
        yield from within(part)
