"""One logical tensor brought from the way a source stores it to the way another layout does.

The transform follows from the two layouts' conventions: rotary order, zero-centred norms, and the named operations of
the row. Types are cast last; what is block-quantised is widened first, unless blocks may stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from convert.dtypes import DTYPES
from convert.errors import ConvertError, Problem
from convert.expr import Expr
from convert.layout import Dims, Key
from convert.match import values
from convert.source import Cast, RopePermuted, Source
from convert.table import MappingTable, TensorRow
from convert.transforms import OPERATIONS, Expert, Stacked, Zeros, shift
from convert.widening import widened_type

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint


def logical_source(
    opened: Checkpoint,
    key: Key,
    shape: tuple[int, ...],
    *,
    table: MappingTable,
    layout: str,
    dtype: str | None,
    expert: int | None = None,
) -> Source:
    """A logical tensor of ``opened`` as ``layout`` (conventions of ``table``) stores it, in canonical orientation.

    Args:
        opened: A checkpoint that has matched its table.
        key: Row and layer.
        shape: The logical shape.
        table: The target's table.
        layout: The target's layout.
        dtype: Canonical type, or None to keep the source's.
        expert: Only this one of the experts that the tensor holds.
    """
    matched, home = opened.match, key
    source = matched.logical.get(key)
    if source is None and (copied := table.rows[key[0]].copy) is not None:
        home = copied, opened.dims.value(Expr("kv_donor"), key[1])
        source = matched.logical[home]
    if source is None and layout in table.rows[key[0]].zeros:
        return Zeros(shape, dtype or (opened.dtype if DTYPES[opened.dtype].is_float else "F32"))
    if source is None:
        pair = matched.tied_pair()
        assert pair and key == pair[0], key
        home = pair[1]
        source = matched.logical[home]
    row = table.rows[key[0]]
    steps = _value_steps(opened, row, table, layout)
    if DTYPES[source.dtype].is_quantized and (layout != "gguf" or steps):
        wanted = dtype or "F16"
        source = values(source, "F32" if steps or wanted == "F64" else wanted)
    if expert is not None:
        source = source.parts[expert] if isinstance(source, Stacked) else Expert(source, expert)
    if row.rope is not None and opened.pairing != table.convention_of(layout, "rope"):
        heads = int(opened.dims.value(row.rope, key[1]))
        to = table.convention_of(layout, "rope")
        turning = int(opened.dims.value(row.rotary, key[1])) if row.rotary is not None else None
        source = RopePermuted(source, head_dim=shape[0] // heads, rotary_dim=turning, to=to)
    for step in steps:
        source = step(source, opened.dims, key[1])
    kept = dtype or (None if layout == "gguf" else widened_type(opened, home))
    return Cast(source, kept) if kept and source.dtype != kept else source


def _value_steps(opened: Checkpoint, row: TensorRow, table: MappingTable, layout: str) -> list[Any]:
    """What happens to the values: back to the hub by the source's operations, on by the target's, norms shifted."""
    if opened.layout == layout:
        return []
    steps: list[Any] = [_operation(o, inverse=True) for o in reversed(row.to.get(opened.layout, ()))]
    steps += [_operation(o, inverse=False) for o in row.to.get(layout, ())]
    have, want = opened.table.convention_of(opened.layout, "norm"), table.convention_of(layout, "norm")
    if row.norm and have != want:
        delta = 1.0 if want == "plain" else -1.0
        steps.append(lambda source, dims, layer: shift(source, delta))
    return steps


def is_computed(opened: Checkpoint, row: TensorRow, table: MappingTable, layout: str) -> bool:
    """Whether values are computed on the way to ``layout``, in float32, to come back within its rounding only."""
    if opened.layout == layout:
        return False
    named = any(not OPERATIONS[o["op"]].exact for o in (*row.to.get(opened.layout, ()), *row.to.get(layout, ())))
    return named or (
        row.norm and opened.table.convention_of(opened.layout, "norm") != table.convention_of(layout, "norm")
    )


def undo_operations(opened: Checkpoint, row: TensorRow, layer: int | None, source: Source) -> Source:
    """A stored tensor with what its layout's named operations did undone."""
    for spec in reversed(row.to.get(opened.layout, ())):
        source = _operation(spec, inverse=True)(source, opened.dims, layer)
    return source


def _operation(spec: Any, *, inverse: bool) -> Any:
    operation = OPERATIONS[spec["op"]]
    function = operation.inverse if inverse else operation.forward

    def apply(source: Source, dims: Dims, layer: int | None) -> Source:
        arguments = {k: int(dims.value(Expr(v, spec["op"]), layer)) for k, v in spec.items() if k != "op"}
        try:
            return function(source, **arguments)
        except ValueError as error:
            raise ConvertError(
                Problem("shape", f"the config does not go with the tensors ({spec['op']}): {error}.", found=arguments)
            ) from None

    return apply
