"""Tables with one fault on purpose, made from the right ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from convert.layout import Dims, row_shape
from convert.resources import mappings_dir
from convert.table import CONVENTIONS, MappingTable, build, load_table
from convert.table_files import resolve


def flipped(family: str, layout: str, convention: str) -> MappingTable:
    """The family's table, with one convention of one layout the other way round."""
    raw = copy.deepcopy(resolve(mappings_dir() / f"{family}.toml"))
    have = load_table(family).convention_of(layout, convention)
    other = next(c for c in CONVENTIONS[convention] if c != have)
    raw.setdefault("convention", {}).setdefault(layout, {})[convention] = other
    return build(raw, "wrong.toml")


def swapped(family: str, layout: str, one: str, other: str) -> MappingTable:
    """The family's table, with the names of two rows exchanged in one layout."""
    raw = copy.deepcopy(resolve(mappings_dir() / f"{family}.toml"))
    a, b = _row(raw, one), _row(raw, other)
    a[layout], b[layout] = b[layout], a[layout]
    return build(raw, "wrong.toml")


def _row(raw: dict[str, Any], row_id: str) -> dict[str, Any]:
    for part in row_id.split("."):
        raw = raw[part]
    return raw


def alike(family: str, layout: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every pair of rows with equal shapes in layer 0 (or outside the layers), which could be taken for each other."""
    table = load_table(family)
    dims = Dims(table, config)
    seen: dict[tuple[bool, tuple[int, ...]], list[str]] = {}
    for row in table.rows.values():
        layer = 0 if row.in_block else None
        if layout not in row.names or not all(dims.value(w, layer) for w in row.when):
            continue
        rows = seen.setdefault((row.in_block, row_shape(table, dims, (row.id, layer))), [])
        yield from ((earlier, row.id) for earlier in rows)
        rows.append(row.id)
