"""A table expanded for one config: every tensor of a layout with its name and shape.

The hub's unit is a *logical tensor*, a row at a layer. A layout stores it under a name, alone or fused with
others; two layouts of one config meet at their logical tensors.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from convert.errors import ConvertError, Problem, TableError
from convert.expr import Expr, MissingName
from convert.normalisers import kv_donor, layer_period
from convert.table import MappingTable, TensorRow

#: A logical tensor: row id and layer (None outside the blocks).
Key = tuple[str, int | None]


class Dims:
    """Values of a table's dims and config keys, per layer, for one config."""

    def __init__(self, table: MappingTable, config: Mapping[str, Any]) -> None:
        self.table = table
        self.config = config
        self._active: set[str] = set()

    def lookup(self, layer: int | None) -> Any:
        """The function that expressions ask for names at ``layer``."""

        def find(name: str) -> Any:
            if name == "l":
                if layer is None:
                    raise TableError(f"{self.table.source}: 'l' is used outside a block.")
                return layer
            if name in self.table.dims and name not in self._active:
                self._active.add(name)
                try:
                    return self._first(self.table.dims[name], find)
                finally:
                    self._active.discard(name)
            value = self.config.get(name)
            if name == "layer_period" and "layer_types" in self.config:
                return layer_period(self.config["layer_types"])
            if name == "kv_donor" and "layer_types" in self.config and layer is not None:
                return kv_donor(self.config["layer_types"], self.config.get("num_kv_shared_layers"), layer)
            if value is None:
                raise MissingName(name)
            return value

        return find

    @staticmethod
    def _first(alternatives: tuple[Expr, ...], find: Any) -> Any:
        for expr in alternatives[:-1]:
            try:
                return expr.evaluate(find)
            except MissingName:
                continue
        return alternatives[-1].evaluate(find)

    def value(self, expr: Expr, layer: int | None = None) -> Any:
        """An expression's value.

        Raises:
            ConvertError: The config lacks a key that it needs.
        """
        try:
            return expr.evaluate(self.lookup(layer))
        except MissingName as missing:
            key = str(missing)
            raise ConvertError(
                Problem(
                    "config",
                    f"the config has no {key!r}, needed for {expr.text!r} ({expr.where}).",
                    found=None,
                    wanted=key,
                    hint="Give a config with --config FILE, or a published size with --size NAME.",
                )
            ) from None

    def __getitem__(self, name: str) -> Any:
        return self.value(Expr(name, self.table.source))

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a dim or config key, or ``default`` where the config lacks it."""
        try:
            return Expr(name).evaluate(self.lookup(None))
        except MissingName:
            return default

    def turning(self, size: str = "hd") -> int:
        """How many rows turn of a head of ``size`` (a dim), where a config says which part of it does."""
        part = self.config.get("partial_rotary_factor", 1) if "rope_extras" in self.table.normalise else 1
        return int(self[size] * part)

    @property
    def n_layers(self) -> int:
        """The number of layers."""
        return int(self["L"])


@dataclass(frozen=True, slots=True)
class Slot:
    """One stored tensor of a layout.

    Attributes:
        name: The full name.
        shape: What it must be.
        keys: The logical tensors it holds; more than one when fused.
        shapes: Their shapes.
        axis: The axis of the stored tensor they are joined along.
        stored: Shapes of the parts as stored (experts one by one, matrices in the layout's orientation).
        transposed: Whether matrices are stored with their axes swapped (the ``linear`` convention ``in_out``).
        expert: Which expert of the logical tensor this is, where each has a name of its own.
        why: The shape's expressions with their values, for messages.
    """

    name: str
    shape: tuple[int, ...]
    keys: tuple[Key, ...]
    shapes: tuple[tuple[int, ...], ...]
    axis: int = 0
    why: str = ""
    stored: tuple[tuple[int, ...], ...] = ()
    transposed: tuple[bool, ...] = ()
    expert: int | None = None


def expand(table: MappingTable, dims: Dims, layout: str, present: Container[str] = ()) -> dict[str, Slot]:
    """Every tensor that ``layout`` stores for this config, tied heads included, by name.

    Args:
        table: The family.
        dims: Its dims for one config.
        layout: Whose names.
        present: Names that a source has; an alternative fused tensor among them takes the place of its parts.

    Raises:
        ConvertError: The config lacks a needed key.
        TableError: Two rows give one name.
    """
    slots: dict[str, Slot] = {}
    always = [f for f in table.fused if f.layout == layout and not f.alternative]
    perhaps = [f for f in table.fused if f.layout == layout and f.alternative]
    swapped = table.convention_of(layout, "linear") == "in_out"

    def put(slot: Slot) -> None:
        if slot.name in slots:
            first, second = slots[slot.name].keys[0][0], slot.keys[0][0]
            raise TableError(f"{table.source}: {layout}: {slot.name!r} is given by {first} and by {second}.")
        slots[slot.name] = slot

    def emit(rows: list[TensorRow], layer: int | None, prefix: str) -> None:
        shapes: dict[str, tuple[int, ...]] = {}
        joins = [*always, *(f for f in perhaps if _place(prefix + f.name, layer) in present)]
        fused = {part for f in joins for part in f.parts}
        for row in rows:
            if layout not in row.zeros and not all(dims.value(w, layer) for w in row.when):
                continue
            if row.id not in fused and layout not in row.names:
                continue
            shape = tuple(int(dims.value(s, layer)) for s in row.shape)
            if row.id in fused:
                shapes[row.id] = shape
                continue
            why = f"[{', '.join(e.explain(dims.lookup(layer)) for e in row.shape)}]"
            name = _place(prefix + row.names[layout], layer)
            stored, flip = _as_stored(table, row, layout, shape, swapped)
            key = (row.id, layer)
            if "{e}" not in name:
                put(Slot(name, stored, (key,), (shape,), 0, why, (stored,), (flip,)))
                continue
            for e in range(shape[0]):
                one = name.replace("{e}", str(e))
                put(Slot(one, stored[1:], (key,), (shape,), 0, why, (stored[1:],), (flip,), e))
        for f in joins:
            found = [p for p in f.parts if p in shapes]
            if not found:
                continue
            if len(found) != len(f.parts):
                raise TableError(f"{table.source}: [[fused]] {f.name!r}: of {list(f.parts)} only {found} exist.")
            parts = tuple(shapes[p] for p in f.parts)
            stories = [_as_stored(table, table.rows[p], layout, shapes[p], swapped) for p in f.parts]
            kept, flips = tuple(s for s, _ in stories), tuple(x for _, x in stories)
            total = list(kept[0])
            total[f.axis] = sum(p[f.axis] for p in kept)
            keys = tuple((p, layer) for p in f.parts)
            why = " + ".join(f"{p} {list(s)}" for p, s in zip(f.parts, kept, strict=True))
            put(Slot(_place(prefix + f.name, layer), tuple(total), keys, parts, f.axis, why, kept, flips))

    top = [r for r in table.rows.values() if not r.in_block]
    block = [r for r in table.rows.values() if r.in_block]
    last = [r for r in top if r.id.startswith("top.output")]
    emit([r for r in top if r not in last], None, "")
    for layer in range(dims.n_layers):
        emit(block, layer, table.prefix.get(layout, ""))
    emit(last, None, "")
    return slots


def _as_stored(
    table: MappingTable, row: TensorRow, layout: str, shape: tuple[int, ...], swapped: bool
) -> tuple[tuple[int, ...], bool]:
    """The shape a layout stores for a logical one, and whether a matrix's axes are swapped."""
    for operation in row.to.get(layout, ()):
        if operation["op"] == "squeeze":
            shape = (shape[0], *shape[2:])
    if swapped and row.linear:
        return (*shape[:-2], shape[-1], shape[-2]), True
    return shape, False


def _place(pattern: str, layer: int | None) -> str:
    return pattern if layer is None else pattern.replace("{l}", str(layer))


def row_shape(table: MappingTable, dims: Dims, key: Key) -> tuple[int, ...]:
    """The shape of a logical tensor."""
    row_id, layer = key
    return tuple(int(dims.value(s, layer)) for s in table.rows[row_id].shape)
