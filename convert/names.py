"""A user's own module names: a small TOML file that renames the ``scratch`` layout of a family.

Such a file can rename, re-prefix, state a convention and fuse, and nothing else: shapes and conditions stay the
family's, so that validation still means something.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.errors import TableError, UsageError
from convert.resources import mappings_dir
from convert.table import MappingTable, build, load_table
from convert.table_files import load_toml
from convert.table_types import check_types

_KEYS = frozenset({"extends", "prefix", "convention", "top", "block", "fused", "title"})
LAYOUT = "scratch"


def ready_made() -> list[str]:
    """The names files that come with the product."""
    return sorted(p.stem for p in (mappings_dir() / "names").glob("*.toml"))


def load_names(names: str | Path) -> MappingTable:
    """A family's table with its ``scratch`` column replaced.

    Args:
        names: A path, or the name of a ready-made file.

    Raises:
        UsageError: There is no such file.
        TableError: The file is wrong; file and row are named.
    """
    path = Path(names)
    if not path.is_file():
        path = mappings_dir() / "names" / f"{names}.toml"
    if not path.is_file():
        raise UsageError(
            f"there is no names file {str(names)!r}.", hint=f"A path, or one of: {', '.join(ready_made()) or 'none'}."
        )
    return names_table(load_toml(path), path.name)


def names_table(raw: Mapping[str, Any], source: str) -> MappingTable:
    """A family's table with the ``scratch`` column that ``raw``, the content of a names file, describes.

    Raises:
        TableError: It is wrong; ``source`` and row are named.
    """
    unknown = sorted(set(raw) - _KEYS)
    if unknown:
        raise TableError(
            f"{source}: unknown key {unknown[0]!r}.",
            hint=f"A names file can rename, re-prefix, state a convention and fuse: {', '.join(sorted(_KEYS))}.",
        )
    if "extends" not in raw:
        raise TableError(f"{source}: the key 'extends' is missing.", hint='Name the family: extends = "llama".')
    check_types(raw, source, names_file=True)
    try:
        base = load_table(raw["extends"])
    except UsageError as error:
        raise TableError(f"{source}: extends: {error.problems[0].message}", hint=error.problems[0].hint) from None
    return _apply(base, raw, source)


def class_tables(table: MappingTable) -> list[MappingTable]:
    """A table for each of the book's classes whose names are not those of the table's ``scratch`` column."""
    out = []
    for book_class, said in table.classes.items():
        if "names" in said:
            where = f"{table.source}: classes.{book_class}.names"
            check_types(said["names"], where, names_file=True)
            named = _apply(table, said["names"], where)
            out.append(replace(named, names_file=None, names=None, book_class=book_class, **_kept(table)))
    return out


def _kept(table: MappingTable) -> dict[str, Any]:
    """What a names file of a user takes away, and one for a class of the book does not."""
    return {"classes": table.classes, "refuse": table.refuse, "title": table.title}


def for_class(table: MappingTable, book_class: str | None) -> MappingTable:
    """The table with the names of one of the book's classes; itself where they are its own."""
    return next((t for t in class_tables(table) if t.book_class == book_class), table)


def _apply(base: MappingTable, raw: Mapping[str, Any], source: str) -> MappingTable:
    merged = copy.deepcopy(dict(base.raw))
    _forget(merged["top"])
    _forget(merged["block"])
    named: set[str] = set()
    for section in ("top", "block"):
        for path, name in _flat(raw.get(section, {})):
            _put(merged[section], section, path, name, source)
            named.add(f"{section}.{path}")
    if "prefix" in raw:
        prefix = raw["prefix"]
        merged["prefix"] = {**merged["prefix"], LAYOUT: prefix[LAYOUT] if isinstance(prefix, dict) else prefix}
    if "convention" in raw:
        merged["convention"] = {**merged.get("convention", {}), LAYOUT: dict(raw["convention"])}
    merged["fused"] = [f for f in merged.get("fused", []) if f.get("layout") != LAYOUT]
    for item in raw.get("fused", []):
        parts = [p if p.startswith(("top.", "block.")) else f"block.{p}" for p in item.get("parts", [])]
        merged["fused"].append({**item, "layout": LAYOUT, "parts": parts})
        named |= set(parts)
    merged["refuse"] = [r for r in merged.get("refuse", []) if r["layout"] != LAYOUT or "window" in r["when"]]
    merged.pop("classes", None)
    merged["title"] = raw.get("title", merged.get("title", base.family))
    table = replace(build(merged, source, names_file=source), names=dict(raw))
    unnamed = [r.id for r in table.rows.values() if not r.when and not r.tied_to and r.id not in named]
    if unnamed:
        raise TableError(
            f"{source}: {', '.join(unnamed)} {'has' if len(unnamed) == 1 else 'have'} no name.",
            hint="Every tensor of the family needs a name, alone or as a part of [[fused]].",
        )
    return table


def _forget(tree: dict[str, Any]) -> None:
    for value in tree.values():
        if isinstance(value, dict):
            if "shape" in value:
                value.pop(LAYOUT, None)
            else:
                _forget(value)


def _flat(tree: Mapping[str, Any], path: str = "") -> list[tuple[str, str]]:
    out = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out += _flat(value, f"{path}{key}.")
        else:
            out.append((path + key, value))
    return out


def _put(tree: dict[str, Any], section: str, path: str, name: Any, source: str) -> None:
    node: Any = tree
    for part in path.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    if not isinstance(node, dict) or "shape" not in node:
        raise TableError(
            f"{source}: {section}.{path} is not a tensor of this family.", hint="See `convert tables show`."
        )
    if not isinstance(name, str) or not name:
        raise TableError(f"{source}: {section}.{path}: the name {name!r} is no string.")
    node[LAYOUT] = name
