"""What can be wrong with a table before any config is known: names, conventions, references between rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convert.buffers import KINDS
from convert.errors import TableError
from convert.expr import Expr
from convert.normalisers import NORMALISERS
from convert.transforms import OPERATIONS

if TYPE_CHECKING:
    from convert.table import MappingTable, TensorRow


def check_table(table: MappingTable) -> None:
    """Check everything that needs no config.

    Raises:
        TableError: The first mistake, with file and row.
    """
    from convert.table import COMMON_NAMES, CONVENTIONS, LAYOUTS

    source = table.source
    known = COMMON_NAMES | set(table.dims) | set(table.config) | set(table.presence)
    known |= {k for values in (*table.defaults.values(), *table.template.values()) for k in values}
    expressions = [e for alternatives in table.dims.values() for e in alternatives]
    expressions += [
        e for row in table.rows.values() for e in (*row.shape, *row.when, row.rope, row.rotary) if e is not None
    ]
    for item in table.metadata:
        expressions += item.value if isinstance(item.value, tuple) else [item.value]
        expressions += [item.when] if item.when is not None else []
    for row in table.rows.values():
        for operation in (o for operations in row.to.values() for o in operations):
            expressions += [Expr(v, f"{source}: {row.id}: to") for k, v in operation.items() if k != "op"]
    for expr in [*expressions, *(r.when for r in table.refuse)]:
        unknown = sorted(expr.names - known)
        if unknown:
            raise TableError(
                f"{expr.where}: {expr.text!r} uses {unknown[0]!r}, which is neither in [dims] nor in [config].",
            )
    if strange := sorted(set(table.layouts) - set(LAYOUTS)):
        raise TableError(f"{source}: layouts: {strange[0]!r} is none of {', '.join(LAYOUTS)}.")
    for layout, conventions in table.convention.items():
        for kind, value in conventions.items():
            if layout not in LAYOUTS or value not in CONVENTIONS.get(kind, ()):
                raise TableError(
                    f"{source}: convention.{layout}: {kind} = {value!r} is not one of {CONVENTIONS.get(kind)}."
                )
    for row in table.rows.values():
        if row.copy and row.copy not in table.rows:
            raise TableError(f"{source}: {row.id}: copy names {row.copy!r}, which is no row.")
        if row.twin and (row.twin not in table.rows or len(table.rows[row.twin].shape) != len(row.shape)):
            raise TableError(f"{source}: {row.id}: twin names {row.twin!r}, which is no row of as many dimensions.")
        if row.tied_to and row.tied_to not in table.rows:
            raise TableError(f"{source}: {row.id}: tied_to names {row.tied_to!r}, which is no row.")
        if strange := sorted(set(row.always) - set(LAYOUTS)):
            raise TableError(f"{source}: {row.id}: always: {strange[0]!r} is none of {', '.join(LAYOUTS)}.")
        if row.in_block and not set(row.names) <= set(table.prefix):
            raise TableError(f"{source}: {row.id}: no prefix for {sorted(set(row.names) - set(table.prefix))}.")
        if strange := sorted(set(row.zeros) - set(table.layouts)):
            raise TableError(f"{source}: {row.id}: zeros: {strange[0]!r} is no layout of this family.")
        for layout, operations in row.to.items():
            for operation in operations:
                if layout not in LAYOUTS or operation.get("op") not in OPERATIONS:
                    raise TableError(
                        f"{source}: {row.id}: to.{layout}: {operation.get('op')!r} is no operation.",
                        hint=f"Operations: {', '.join(OPERATIONS)}.",
                    )
                its, given = OPERATIONS[operation["op"]], set(operation) - {"op"}
                if wrong := sorted((its.needs - given) | (given - its.needs - its.takes)):
                    raise TableError(
                        f"{source}: {row.id}: to.{layout}: {operation['op']} and {wrong[0]!r}: it needs "
                        f"{sorted(its.needs) or 'nothing'} and may have {sorted(its.takes) or 'nothing'} besides.",
                    )
    for name in table.normalise:
        if name not in NORMALISERS:
            raise TableError(
                f"{source}: normalise: {name!r} is no normaliser.", hint=f"Normalisers: {', '.join(NORMALISERS)}."
            )
    for book_class, said in table.classes.items():
        strange = sorted(set(said.get("buffers", ())) - set(table.buffers))
        if strange or set(said) - {"drop", "names", "buffers"}:
            raise TableError(f"{source}: classes.{book_class}: {(strange or sorted(said))[0]!r} is not known here.")
    if unknown := sorted(set(table.buffers) - set(KINDS)):
        raise TableError(f"{source}: buffers.{unknown[0]} is no kind of buffer.", hint=f"Kinds: {', '.join(KINDS)}.")
    for key, row_id in table.presence.items():
        if row_id not in table.rows:
            raise TableError(f"{source}: presence.{key}: {row_id!r} is no row.")
    for fused in table.fused:
        for part in fused.parts:
            if part not in table.rows:
                raise TableError(f"{source}: [[fused]] {fused.name!r}: the part {part!r} is no row.")
    _check_names(table)


def _check_names(table: MappingTable) -> None:
    for layout in table.layouts:
        seen: dict[str, TensorRow] = {}
        for row in table.rows.values():
            name = row.names.get(layout)
            if name is None:
                continue
            full = table.prefix.get(layout, "") + name if row.in_block else name
            other = seen.setdefault(full, row)
            # Two rows may share a name when their conditions exclude each other; that is seen when they are expanded.
            if other is not row and not (row.when and other.when):
                raise TableError(f"{table.source}: {layout}: {full!r} is given by {other.id} and by {row.id}.")
