"""The tensors of two checkpoints side by side, in the common layout: which belongs to which, and what is read.

The common layout is Hugging Face's. Two checkpoints that store alike are also paired as stored, so that equal bytes are
recognised without bringing them anywhere. Nothing is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from convert.dtypes import DTYPES
from convert.expr import Expr
from convert.layout import Key, row_shape
from convert.logical import is_computed, logical_source
from convert.match import alike, values
from convert.source import Source, open_source
from convert.table import MappingTable, load_table
from convert.transforms import Expert, Zeros

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.formats.spec import TensorSpec

HUB = "hf"
_WHERE = {"embedding": "the embedding", "donor": "the layer it shares", "zeros": "zeros"}


@dataclass(frozen=True, slots=True)
class Side:
    """One checkpoint's tensor.

    Attributes:
        source: Its values in the common layout, plain; None where its shape does not fit its own config, or its type
            is none of weights.
        stored: As the file has it.
        shape: In the common layout.
        dtype: In the file.
        form: What two sources must have in common to be compared as stored.
        instead: What stands in for a tensor that is not stored, in words; None for one that is.
        computed: Values pass through float32 arithmetic on the way to the common layout.
        pairing: The order of its rotary rows; None for a tensor without.
    """

    source: Source | None
    stored: Source | None
    shape: tuple[int, ...]
    dtype: str
    form: tuple[str, ...] = ()
    instead: str | None = None
    computed: bool = False
    pairing: str | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of both sides, or of one."""

    name: str
    row: str
    column: str
    a: Side | None
    b: Side | None
    experts: bool = False

    @property
    def alike(self) -> bool:
        """Whether both sides store it in the same way, so that their bytes can be compared."""
        return self.a is not None and self.b is not None and self.a.form == self.b.form and bool(self.a.form)

    @property
    def turned(self) -> bool:
        """Whether the two sides keep its rotary rows in different orders."""
        return self.a is not None and self.b is not None and self.a.pairing != self.b.pairing


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is known of a tensor before both sides have been looked at."""

    name: str
    row: str
    column: str
    experts: bool
    side: Callable[[], Side]


def pair_tensors(a: Any, b: Any, *, only: str | None = None) -> Iterator[Pair]:
    """Pairs in the order of A, then what only B has.

    Args:
        a: An opened checkpoint, a view of one, or whatever has its ``reference_tensors`` (then both are taken by the
            reference model's names).
        b: The other.
        only: A pattern (``*``, ``?``) that the name must match, as a whole or in part.
    """
    a, b = getattr(a, "opened", a), getattr(b, "opened", b)  # views
    if hasattr(a, "match") and hasattr(b, "match"):
        first, second = _entries(a), _entries(b)
        stand_ins: tuple[Any, Any] = (partial(_stand_in, a), partial(_stand_in, b))
    else:
        first, second = _reference_entries(a, b)
        stand_ins = (lambda _: None, lambda _: None)
    for key in [*first, *(k for k in second if k not in first)]:
        one, other = first.get(key), second.get(key)
        shown = one or other
        assert shown is not None
        if only and not (fnmatchcase(shown.name, only) or fnmatchcase(shown.name, f"*{only}*")):
            continue
        left = one.side() if one else stand_ins[0](key)
        right = other.side() if other else stand_ins[1](key)
        yield Pair(shown.name, shown.row, shown.column, left, right, shown.experts)


def hub_table(checkpoint: Checkpoint) -> MappingTable:
    """The family's own table, without a names file's or a book class's names."""
    table = checkpoint.table
    return load_table(table.family) if table.names_file or table.book_class else table


def hub_name(table: MappingTable, key: Key) -> str:
    """A logical tensor's name in the common layout; of a part of a fused one, with the part's."""
    row = table.rows[key[0]]
    prefix = table.prefix.get(HUB, "") if row.in_block else ""
    fused = next((f for f in table.fused if f.layout == HUB and key[0] in f.parts and not f.alternative), None)
    if HUB in row.names:
        name = prefix + row.names[HUB]
    elif fused is not None:
        part = key[0].rsplit(".", 1)[-1]
        name = prefix + fused.name + (f" ({part})" if len(fused.parts) > 1 else "")
    else:
        name = key[0].replace("block.", prefix or "block.{l}.", 1)
    return name.replace("{e}", "*").replace("{l}", "" if key[1] is None else str(key[1]))


def _entries(checkpoint: Checkpoint) -> dict[Any, _Entry]:
    """Every tensor of a checkpoint by row and layer; those without a place by name."""
    table, matched = hub_table(checkpoint), checkpoint.match
    out: dict[Any, _Entry] = {}
    for slot in matched.slots.values():
        for key in slot.keys:
            name = hub_name(table, key)
            if key in matched.logical:
                out.setdefault(key, _entry(table, key, name, partial(_side, checkpoint, table, key)))
            elif len(slot.keys) == 1 and slot.name in checkpoint.tensors and key not in matched.experts:
                side = _unread(checkpoint, checkpoint.tensors[slot.name])
                out[key] = _entry(table, key, name, lambda side=side: side)  # type: ignore[misc]
    for key in matched.logical:  # an embedding that only the head's tensor holds
        out.setdefault(key, _entry(table, key, hub_name(table, key), partial(_side, checkpoint, table, key)))
    for problem in matched.problems:
        if problem.kind == "unexpected_tensor" and problem.tensor in checkpoint.tensors:
            spec = checkpoint.tensors[problem.tensor][0]
            if spec.type.is_float or spec.type.is_quantized or spec.scale is not None:
                source = open_source(spec, checkpoint.pool)
                side = Side(values(source), source, source.shape, spec.dtype, (spec.dtype,))
                out[problem.tensor] = _Entry(problem.tensor, "top", problem.tensor, False, lambda side=side: side)  # type: ignore[misc]
    return out


def _entry(table: MappingTable, key: Key, name: str, side: Callable[[], Side]) -> _Entry:
    row, where = table.rows[key[0]], "top" if key[1] is None else f"layer {key[1]}"
    return _Entry(
        name, where, column_of(hub_name(table, (key[0], 0 if key[1] is not None else None)), key[1]), row.experts, side
    )


def column_of(name: str, layer: int | None) -> str:
    """What is left of a name without its layer and ``.weight``."""
    stem = name.removesuffix(".weight")
    return stem.split(".0.", 1)[-1] if layer is not None else stem


def _side(checkpoint: Checkpoint, table: MappingTable, key: Key) -> Side:
    matched = checkpoint.match
    stored = matched.logical[key]
    types = sorted({s.dtype for s in matched.specs.get(key, ())}) or [stored.dtype]
    row = table.rows[key[0]]
    shape = row_shape(table, checkpoint.dims, key)
    source = _hub_source(checkpoint, table, key, shape)
    pairing = checkpoint.pairing if row.rope is not None else None
    turned = pairing is not None and pairing != table.convention_of(HUB, "rope")
    steps = checkpoint.layout if row.to.get(checkpoint.layout) or row.norm else ""
    form = (stored.dtype, f"turned {pairing}" if turned else "", steps)
    dtype = stored.dtype if len(types) > 1 else types[0]
    return Side(source, stored, shape, dtype, form, None, is_computed(checkpoint, row, table, HUB), pairing)


def _unread(checkpoint: Checkpoint, specs: list[TensorSpec]) -> Side:
    """A tensor of a shape or type that the table does not want: of the latter at least the bytes can be compared."""
    plain = specs[0].type.is_float or specs[0].type.is_quantized
    if plain or len(specs) > 1:
        return Side(None, None, specs[0].shape, specs[0].dtype)
    return Side(None, open_source(specs[0], checkpoint.pool), specs[0].shape, specs[0].dtype, (specs[0].dtype, "bytes"))


def _hub_source(checkpoint: Checkpoint, table: MappingTable, key: Key, shape: tuple[int, ...]) -> Source:
    stored = checkpoint.match.logical.get(key)
    widen = stored is not None and DTYPES[stored.dtype].is_quantized
    widen = widen or any(s.scale is not None for s in checkpoint.match.specs.get(key, ()))
    return logical_source(checkpoint, key, shape, table=table, layout=HUB, dtype="F32" if widen else None)


def _stand_in(checkpoint: Checkpoint, key: Any) -> Side | None:
    """What a loader would take for a tensor that this checkpoint does not store, or None: it is missing."""
    table, matched = hub_table(checkpoint), checkpoint.match
    if not isinstance(key, tuple) or key[0] not in table.rows:
        return None
    row = table.rows[key[0]]
    if any(
        p.kind in ("missing_head", "missing_tensor") and p.tensor == _stored_name(checkpoint, key)
        for p in matched.problems
    ):
        return None
    pair = matched.tied_pair()
    if pair is not None and key == pair[0] and pair[1] in matched.logical:
        return _instead(_side(checkpoint, table, pair[1]), _WHERE["embedding"])
    donor = (row.copy, checkpoint.dims.value(Expr("kv_donor"), key[1])) if row.copy else None
    if donor is not None and donor in matched.logical:
        return _instead(_side(checkpoint, table, donor), _WHERE["donor"])
    if row.zeros:
        shape = row_shape(table, checkpoint.dims, key)
        return Side(Zeros(shape, "F32"), None, shape, "F32", instead=_WHERE["zeros"])
    return None


def _instead(side: Side, words: str) -> Side:
    return Side(side.source, side.stored, side.shape, side.dtype, side.form, words, side.computed, side.pairing)


def _stored_name(checkpoint: Checkpoint, key: Key) -> str | None:
    return next((s.name for s in checkpoint.match.slots.values() if key in s.keys), None)


def _reference_entries(a: Any, b: Any) -> tuple[dict[Any, _Entry], dict[Any, _Entry]]:
    """By the reference model's names; rotary rows of both sides in half order, as each side says it stores them."""
    from convert.reference import reference_for
    from convert.source import RopePermuted

    rotary = reference_for(a.table.reference).ROTARY

    def entries(side: Any, config: Mapping[str, Any]) -> dict[Any, _Entry]:
        head = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        out: dict[Any, _Entry] = {}
        for name, source in side.reference_tensors():
            turns = any(part in name for part in rotary)
            fits = source.shape[0] % head == 0
            wrap = turns and a.pairing != b.pairing and side.pairing != "half"
            common = RopePermuted(source, head_dim=head, to="half") if wrap and fits else source
            found = Side(
                common if fits or not wrap else None,
                source,
                source.shape,
                stored_dtype(source),
                (source.dtype, side.pairing if wrap else ""),
                pairing=side.pairing if turns else None,
            )
            parts = name.split(".")
            layer = next((int(p) for p in parts if p.isdecimal()), None)
            where = "top" if layer is None else f"layer {layer}"
            column = name if layer is None else ".".join(parts[parts.index(str(layer)) + 1 :])
            out[name] = _Entry(name, where, column.removesuffix(".weight"), False, lambda found=found: found)  # type: ignore[misc]
        return out

    return entries(a, a.config), entries(b, b.config)


def stored_dtype(source: Source) -> str:
    """The type in the file, below any cast or dequantisation that wraps it."""
    inner = getattr(source, "source", None)
    if inner is None and getattr(source, "parts", None):
        inner = source.parts[0]  # type: ignore[attr-defined]
    return stored_dtype(inner) if isinstance(inner, Source) else source.dtype


def experts_of(source: Source) -> list[Source]:
    """The experts of a stacked tensor, each as a matrix."""
    from convert.transforms import Stacked

    if isinstance(source, Stacked):
        return alike(source.parts)
    return [Expert(source, index) for index in range(source.shape[0])]
