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
from convert.table_files import load_head, resolve
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
_ROW_KEYS = frozenset({"shape", *_STORIES, *LAYOUTS})


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor's whole story.

    Attributes:
        id: Dotted path in the table (``block.attn.k``).
        shape: One expression per dimension, torch order.
        when: Conditions of the row and of the blocks around it; all must hold.
        names: Name pattern per layout, without the block's prefix.
        rope: Number of heads whose rotary pairs the rows are, or None.
        rotary: How many leading rows of each head turn, where not all do.
        role: What ``inspect`` counts it under; derived from the path if not stated.
        tied_to: The row whose values this one shares in a tied model.
        copy: The row whose values, in the layer's ``kv_donor``, fill this one where a source has none.
        always: Layouts that store it in a tied model too, because their loader asks for it.
        parallel: The axis that Meta's model-parallel files split, or None for a tensor that each holds whole.
        norm: Whether it is a norm's weight, to which the ``norm`` convention applies.
        linear: Whether it is a linear layer's weight, to which the ``linear`` convention applies.
        to: Operations (:data:`convert.transforms.OPERATIONS`) from the hub layout to another one.
        zeros: Layouts that always have this tensor, whatever ``when`` says; they hold zeros for a model without it.
    """

    id: str
    shape: tuple[Expr, ...]
    when: tuple[Expr, ...]
    names: Mapping[str, str]
    rope: Expr | None = None
    role: str = ""
    tied_to: str | None = None
    copy: str | None = None
    parallel: Expr | None = None
    norm: bool = False
    linear: bool = False
    to: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    always: tuple[str, ...] = ()
    rotary: Expr | None = None
    zeros: tuple[str, ...] = ()

    @property
    def experts(self) -> bool:
        """Whether the first dimension counts experts, because some layout stores each under its own name."""
        return any("{e}" in name for name in self.names.values())

    @property
    def in_block(self) -> bool:
        """Whether there is one per layer."""
        return self.id.startswith("block.")


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """One quantity of the config: the key each layout's config file has for it.

    Attributes:
        key: The name in ``config.json``, which is the hub's.
        names: Key per other layout; GGUF's may contain ``{arch}``. Under ``hf`` stands what this family's
            ``config.json`` calls it, where that is not the hub's name.
        gguf_type: The value type that the GGUF loader demands (``u32``, ``f32`` …).
        also: Further keys per layout that are written with the same value, and understood in the key's place.
        kind: What its values are: ``number``, ``flag``, ``text``, ``texts``, or ``ids`` (one or several).
    """

    key: str
    names: Mapping[str, str]
    gguf_type: str | None = None
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kind: str = "number"


@dataclass(frozen=True, slots=True)
class Fused:
    """Several rows stored as one tensor in a layout, joined along ``axis`` in the order of ``parts``.

    The axis is that of the stored tensors. An ``alternative`` is understood in a source and never written.
    """

    layout: str
    name: str
    parts: tuple[str, ...]
    axis: int = 0
    alternative: bool = False


@dataclass(frozen=True, slots=True)
class Ignore:
    """Source tensors that are dropped, with the reason. ``name`` may hold ``*`` for one path part."""

    layout: str
    name: str
    reason: str
    check: str | None = None

    def matches(self, name: str) -> bool:
        """Whether ``name`` is meant; a leading ``*.`` and a last ``**`` stand for any number of parts, also none."""
        pattern, parts = self.name.split("."), name.split(".")
        if pattern[-1] == "**":
            pattern = pattern[:-1]
            parts = parts[: len(pattern)]
        if pattern[0] == "*":
            pattern, parts = pattern[1:], parts[-len(pattern) + 1 :]
        return len(pattern) == len(parts) and all(p in ("*", q) for p, q in zip(pattern, parts, strict=True))


@dataclass(frozen=True, slots=True)
class BufferRow:
    """What some of the book's classes keep in their state dict beside weights; it follows from the config.

    Attributes:
        kind: How it is computed (:data:`convert.buffers.KINDS`).
        name: Its name in every block.
        shape: Like a row's.
    """

    kind: str
    name: str
    shape: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Alias:
    """Another beginning that a layout's names have in some files: ``found`` is replaced by ``name`` on reading."""

    layout: str
    found: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Metadata:
    """A GGUF key whose value is computed: a scalar, an array, or with ``each`` an array of one value per layer.

    Attributes:
        key: May contain ``{arch}``.
        type: ``u32``, ``f32``, ``bool``, ``str`` … (of an array, its elements' type).
        value: An expression over the dims; for an array several.
        when: Whether the key is written.
        each: One value per layer, as an array.
    """

    key: str
    type: str
    value: Expr | tuple[Expr, ...]
    when: Expr | None = None
    each: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """Something a layout cannot hold, with the sentence that says why."""

    layout: str
    when: Expr
    reason: str
    book_class: str | None = None
    reference: bool = False


@dataclass(frozen=True, slots=True)
class MappingTable:
    """A family: its rows, dims, config keys, conventions and sizes. See the class attributes' types."""

    family: str
    title: str
    source: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    gguf_arch: str | None
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
    if not path.is_file():
        raise UsageError(f"there is no family {family!r}.", hint=f"Families: {', '.join(families())}.")
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
    unknown = sorted(set(value) - {"layout", "when", "reason", "class", "reference"})
    if unknown or not {"layout", "when", "reason"} <= set(value):
        raise TableError(f"{where}: needs layout, when and reason; unknown {unknown}.")
    return Refuse(
        value["layout"],
        Expr(value["when"], where),
        value["reason"],
        value.get("class"),
        bool(value.get("reference", False)),
    )
