"""Deliberately wrong tables: two same-shaped tensors exchanged, or a convention flipped, in one layout."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from convert.layout import Dims, row_shape
from convert.table import CONVENTIONS, MappingTable, build, load_table


def pairs(family: str, config: dict[str, Any], layout: str, *, at: int = 0) -> list[tuple[str, str]]:
    """Rows of one section that a layout stores in equal shapes, in layer ``at`` or outside the layers."""
    table = load_table(family)
    dims = Dims(table, config)
    shapes = {}
    for row in table.rows.values():
        layer = at if row.in_block else None
        if layout in row.names and all(dims.value(w, layer) for w in row.when):
            experts = "{e}" in row.names[layout]
            shapes[row.id] = (row.in_block, experts, row_shape(table, dims, (row.id, layer)))
    return [(a, b) for a, b in itertools.combinations(shapes, 2) if shapes[a] == shapes[b]]


def exchanged(family: str, layout: str, one: str, other: str) -> MappingTable:
    """The family's table with the names of two rows exchanged in one layout."""
    raw = copy.deepcopy(dict(load_table(family).raw))
    a, b = _row(raw, one), _row(raw, other)
    a[layout], b[layout] = b[layout], a[layout]
    return build(raw, "wrong.toml")


def flipped(family: str, layout: str, kind: str) -> MappingTable:
    """The family's table with one convention of one layout the other way round."""
    table = load_table(family)
    raw = copy.deepcopy(dict(table.raw))
    first, second = CONVENTIONS[kind]
    stated = raw.setdefault("convention", {}).setdefault(layout, {})
    stated[kind] = second if table.convention_of(layout, kind) == first else first
    return build(raw, "wrong.toml")


def _row(raw: dict[str, Any], row_id: str) -> dict[str, Any]:
    found = raw
    for part in row_id.split("."):
        found = found[part]
    return found
