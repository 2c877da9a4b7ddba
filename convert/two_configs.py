"""A config beside the weights and another one inside their file: which counts, and where they disagree.

The file beside them counts, since it is the one that people edit. Nothing is merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convert.config import layout_of
from convert.table import MappingTable

#: Not about the model, or spelt in more than one way.
_PASSED_OVER = ("dtype", "torch_dtype")
_SHOWN = 8


def disagreement(
    table: MappingTable, layout: str | None, beside: Mapping[str, Any], inside: Mapping[str, Any], *, name: str
) -> str | None:
    """A note on the two configs; None where they agree in all that both state, or the inner one is no model's.

    Args:
        table: The family.
        layout: Whose spelling ``beside`` is in.
        beside: The config that counts.
        inside: The config that lies in the file of the weights.
        name: What to call the one that counts.
    """
    other = layout_of(inside, [table])
    if other is None or layout is None:
        return None
    if other == layout:
        first, second = dict(beside), dict(inside)
    else:
        first, second = _stated(table, layout, beside), _stated(table, other, inside)
    differing = [k for k in first if k in second and k not in _PASSED_OVER and first[k] != second[k]]
    if not differing:
        return None
    said = ", ".join(f"{key} = {_short(first[key])} (inside {_short(second[key])})" for key in differing[:_SHOWN])
    more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    return f"{name} counts, and the config inside the file of the weights disagrees with it: {said}{more}"


def _stated(table: MappingTable, layout: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The quantities of the table that a config states, under the hub's names."""
    out: dict[str, Any] = {}
    for row in table.config.values():
        spellings = (row.names.get(layout, row.key), *row.also.get(layout, ()))
        value = next((raw[s] for s in spellings if raw.get(s) is not None), None)
        if value is not None:
            out[row.key] = value
    base = next((raw[k] for k in ("rope_theta", "rope_base") if raw.get(k) is not None), None)
    return out | ({} if base is None else {"rope_theta": base})


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
