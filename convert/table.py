"""Mapping tables: what each tensor of a family is, and how every layout names and stores it.

Reads ``mappings/<family>.toml`` into frozen dataclasses, strictly: an unknown key, an unknown row, two rows
giving one name, or an expression over a config key that does not exist, are errors that name file and row.
It expands nothing (:mod:`convert.layout` does) and reads no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from convert.errors import TableError, UsageError
from convert.expr import Expr
from convert.layered_rope import RopeKind, read_section
from convert.resources import mappings_dir
from convert.table_files import load_head, plain_name, resolve
from convert.table_parts import Alias as Alias
from convert.table_parts import BufferRow as BufferRow
from convert.table_parts import ConfigRow as ConfigRow
from convert.table_parts import Fused as Fused
from convert.table_parts import Ignore as Ignore
from convert.table_parts import Metadata as Metadata
from convert.table_parts import Refuse as Refuse
from convert.table_parts import TensorRow as TensorRow
from convert.table_types import check_types

LAYOUTS = ("hf", "meta", "scratch", "gguf", "openai")
#: Layouts that are understood and never written.
READ_ONLY = ("openai",)
CONVENTIONS = {
    "rope": ("half", "interleaved"),
    "norm": ("plain", "zero_centered"),
    "linear": ("out_in", "in_out"),
}
#: What the values of a config's key may be.
CONFIG_KINDS = ("number", "numbers", "flag", "text", "texts", "ids")
#: Names every table may use in expressions beside its own dims: the layer, the period of full layers
#: (:func:`convert.normalisers.layer_period`), and the RoPE settings that :mod:`convert.rope` brings into one form.
COMMON_NAMES = frozenset(
    {"l", "layer_period", "kv_donor", "rope_theta", "rope_type", "tie_word_embeddings", "true", "false"}
)

_STORIES = {"when", "rope", "rotary", "role", "tied_to", "copy", "always", "zeros", "parallel", "norm", "linear", "to"}
_STORIES |= {"twin"}
_ROW_KEYS = frozenset({"shape", *_STORIES, *LAYOUTS})


@dataclass(frozen=True, slots=True)
class MappingTable:
    """A family: its rows, dims, config keys, conventions and sizes. See the class attributes' types."""

    family: str
    title: str
    source: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    gguf_arch: str | None
    gguf_tokenizer: str | None
    reference: str | None
    layouts: tuple[str, ...]
    dims: Mapping[str, tuple[Expr, ...]]
    config: Mapping[str, ConfigRow]
    defaults: Mapping[str, Mapping[str, Any]]
    presence: Mapping[str, str]
    prefix: Mapping[str, str]
    convention: Mapping[str, Mapping[str, str]]
    rows: Mapping[str, TensorRow]
    fused: tuple[Fused, ...] = ()
    ignore: tuple[Ignore, ...] = ()
    refuse: tuple[Refuse, ...] = ()
    classes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    template: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    normalise: tuple[str, ...] = ()
    alias: tuple[Alias, ...] = ()
    metadata: tuple[Metadata, ...] = ()
    buffers: Mapping[str, BufferRow] = field(default_factory=dict)
    book_class: str | None = None
    rope: Mapping[str, RopeKind] = field(default_factory=dict)
    names_file: str | None = None
    names: Mapping[str, Any] | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def has_rope(self) -> bool:
        """Whether positions enter by rotation; else configs have no word about RoPE."""
        return any(row.rope is not None for row in self.rows.values())

    def convention_of(self, layout: str, kind: str) -> str:
        """The layout's convention of this kind; the first of :data:`CONVENTIONS` where the table is silent."""
        return self.convention.get(layout, {}).get(kind, CONVENTIONS[kind][0])


def families() -> list[str]:
    """The names of all families that have a table."""
    return sorted(heads())


def heads() -> dict[str, dict[str, Any]]:
    """What each family's file says before its first table (model types, architectures), by family."""
    found = {p.stem: load_head(p) for p in mappings_dir().glob("*.toml")}
    return {name: head for name, head in sorted(found.items()) if "family" in head}


@cache
def load_table(family: str) -> MappingTable:
    """The table of a family.

    Raises:
        UsageError: There is none of that name.
        TableError: The table is wrong.
    """
    path = mappings_dir() / f"{family}.toml"
    if not plain_name(family) or not path.is_file():
        raise UsageError(f"there is no family {family!r:.100}.", hint=f"Families: {', '.join(families())}.")
    return read_table(path)


def read_table(path: Path) -> MappingTable:
    """Read and check one table file (``extends`` is looked up beside it, then among ours)."""
    return build(resolve(path), path.name)


def build(raw: Mapping[str, Any], source: str, *, names_file: str | None = None) -> MappingTable:
    """Check a merged table and freeze it.

    Raises:
        TableError: With file and row.
    """
    for key in ("family", "dims", "prefix", "top", "block"):
        if key not in raw:
            raise TableError(f"{source}: the key {key!r} is missing.")
    check_types(raw, source)
    layouts = tuple(raw.get("layouts", LAYOUTS))
    dims = {k: _alternatives(v, f"{source}: dims.{k}") for k, v in raw["dims"].items()}
    rows = {row.id: row for row in _rows(raw, source)}
    table = MappingTable(
        family=raw["family"],
        title=raw.get("title", raw["family"]),
        source=source,
        model_types=tuple(raw.get("model_types", ())),
        architectures=tuple(raw.get("architectures", ())),
        gguf_arch=raw.get("gguf_arch"),
        gguf_tokenizer=raw.get("gguf_tokenizer"),
        reference=raw.get("reference"),
        layouts=layouts,
        dims=dims,
        config={k: _config_row(k, v, source) for k, v in raw.get("config", {}).items() if v is not False},
        defaults=raw.get("defaults", {}),
        presence=raw.get("presence", {}),
        prefix=raw["prefix"],
        convention=raw.get("convention", {}),
        rows=rows,
        fused=tuple(_item(Fused, x, source, "fused") for x in raw.get("fused", ())),
        ignore=tuple(_item(Ignore, x, source, "ignore") for x in raw.get("ignore", ())),
        refuse=tuple(_refuse(x, source) for x in raw.get("refuse", ())),
        classes=raw.get("classes", {}),
        sizes=raw.get("sizes", {}),
        template=raw.get("template", {}),
        normalise=tuple(raw.get("normalise", ())),
        alias=tuple(_item(Alias, x, source, "alias") for x in raw.get("alias", ())),
        metadata=tuple(_metadata(x, source) for x in raw.get("metadata", ())),
        buffers={k: _buffer(k, x, source) for k, x in raw.get("buffers", {}).items()},
        rope=read_section(raw.get("rope", {}), source),
        names_file=names_file,
        raw=raw,
    )
    from convert.table_check import check_table

    check_table(table)
    return table


def _alternatives(value: Any, where: str) -> tuple[Expr, ...]:
    return tuple(Expr(v, where) for v in (value if isinstance(value, list) else [value]))


def _rows(raw: Mapping[str, Any], source: str) -> Iterator[TensorRow]:
    layouts = tuple(raw.get("layouts", LAYOUTS))
    for section in ("top", "block"):
        yield from _walk(raw[section], (section,), (), source, layouts)


def _walk(
    tree: Mapping[str, Any], path: tuple[str, ...], when: tuple[Expr, ...], source: str, layouts: tuple[str, ...]
) -> Iterator[TensorRow]:
    for key, value in tree.items():
        if key == "when" or value is False:
            continue
        where = f"{source}: {'.'.join((*path, key))}"
        if not isinstance(value, dict):
            raise TableError(f"{where}: unknown key {key!r}.", hint="A row has a shape; a block holds rows and `when`.")
        conditions = (*when, Expr(value["when"], where)) if "when" in value else when
        if "shape" not in value:
            yield from _walk(value, (*path, key), conditions, source, layouts)
            continue
        unknown = sorted(set(value) - _ROW_KEYS)
        if unknown:
            raise TableError(f"{where}: unknown key {unknown[0]!r}.", hint=f"A row has {', '.join(sorted(_ROW_KEYS))}.")
        yield TensorRow(
            id=".".join((*path, key)),
            shape=tuple(Expr(s, where) for s in value["shape"]),
            when=conditions,
            names={layout: value[layout] for layout in LAYOUTS if layout in layouts and value.get(layout)},
            rope=Expr(value["rope"], where) if value.get("rope") else None,
            rotary=Expr(value["rotary"], where) if value.get("rotary") else None,
            role=value.get("role") or _role((*path, key)),
            tied_to=value.get("tied_to"),
            copy=value.get("copy"),
            parallel=Expr(value["parallel"], where) if "parallel" in value else None,
            norm=bool(value.get("norm")),
            linear=bool(value.get("linear")),
            to={layout: tuple(ops) for layout, ops in (value.get("to") or {}).items()},
            always=tuple(value.get("always", ())),
            zeros=tuple(value.get("zeros") or ()),
            twin=value.get("twin") or None,
        )


def _role(path: tuple[str, ...]) -> str:
    if path[0] == "block":
        return "norm" if "norm" in path[-1] and len(path) > 2 and path[-1] == "norm" else path[1]
    return "norm" if "norm" in path[-1] else path[-1]


def _config_row(key: str, value: Mapping[str, Any], source: str) -> ConfigRow:
    where = f"{source}: config.{key}"
    names: dict[str, str] = {}
    gguf_type: str | None = None
    also: dict[str, tuple[str, ...]] = {}
    kind = value.get("kind", CONFIG_KINDS[0])
    if kind not in CONFIG_KINDS:
        raise TableError(f"{where}: kind {kind!r} is none of {', '.join(CONFIG_KINDS)}.")
    for layout, name in value.items():
        if layout == "kind":
            continue
        if layout not in LAYOUTS:
            raise TableError(f"{where}: unknown layout {layout!r}.")
        if isinstance(name, dict):
            if set(name) - {"key", "type", "also"}:
                raise TableError(f"{where}: {layout} has the keys key, type and also, not {sorted(name)}.")
            names[layout], gguf_type = name["key"], name.get("type", gguf_type)
            also[layout] = tuple(name.get("also", ()))
        else:
            names[layout] = name
    return ConfigRow(key, names, gguf_type, also, kind)


def _item(kind: type, value: Mapping[str, Any], source: str, section: str) -> Any:
    try:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in value.items()})
    except TypeError as error:
        raise TableError(f"{source}: [[{section}]] {dict(value)}: {str(error).split('() ')[-1]}.") from None


def _metadata(value: Mapping[str, Any], source: str) -> Metadata:
    where = f"{source}: [[metadata]] {value.get('key')!r}"
    parsed = {k: _alternatives(v, where) for k, v in value.items() if k in ("value", "when")}
    expressions = {k: v if isinstance(value[k], list) else v[0] for k, v in parsed.items()}
    found: Metadata = _item(Metadata, {**value, **expressions}, source, "metadata")
    return found


def _buffer(kind: str, value: Mapping[str, Any], source: str) -> BufferRow:
    where = f"{source}: buffers.{kind}"
    if set(value) != {"name", "shape"} or not isinstance(value["shape"], list):
        raise TableError(f"{where}: needs a name and a shape, and nothing else.")
    return BufferRow(kind, str(value["name"]), tuple(Expr(s, where) for s in value["shape"]))


def _refuse(value: Mapping[str, Any], source: str) -> Refuse:
    where = f"{source}: [[refuse]] for {value.get('layout')!r}"
    unknown = sorted(set(value) - {"layout", "when", "reason", "class", "reference", "note"})
    if unknown or not {"layout", "when", "reason"} <= set(value):
        raise TableError(f"{where}: needs layout, when and reason; unknown {unknown}.")
    return Refuse(
        value["layout"],
        Expr(value["when"], where),
        value["reason"],
        value.get("class"),
        bool(value.get("reference", False)),
        bool(value.get("note", False)),
    )
