"""A checkpoint's tensors matched with its family's table: every expected tensor exactly once, or a problem.

Yields logical tensors *as stored* (:attr:`Match.logical`); what they must become for another layout is decided by
:mod:`convert.plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from convert import shapes, tying
from convert.dtypes import DTYPES
from convert.errors import Problem
from convert.formats.spec import TensorSpec
from convert.fused_tensors import name_fused
from convert.layout import Dims, Key, Slot, expand, row_shape
from convert.replicas import collapse
from convert.rotary_buffers import check_frequencies
from convert.source import Cast, Joined, Rows, Source, open_source
from convert.table import MappingTable, TensorRow, load_table
from convert.transforms import Expert, Slice, Stacked, transposed

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint

#: Replicated tensors are compared between model-parallel files up to this size (norms; nothing else is replicated).
_REPLICA_LIMIT = 1 << 20


@dataclass
class Match:
    """The outcome of matching.

    Attributes:
        checkpoint: What was matched.
        slots: What the layout must store, by name.
        logical: Source of each logical tensor, in the numeric convention it is stored in.
        specs: Parts of each logical tensor's stored tensor.
        problems: Everything that does not fit.
        ignored: Tensors dropped, with the reason.
        notes: Assumptions.
        experts: While matching: experts that are stored one by one, by number.
    """

    checkpoint: Checkpoint
    slots: dict[str, Slot]
    logical: dict[Key, Source] = field(default_factory=dict)
    specs: dict[Key, list[TensorSpec]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    experts: dict[Key, dict[int, Source]] = field(default_factory=dict)
    _tied: dict[bool, bool] = field(default_factory=dict)

    def tied_pair(self) -> tuple[Key, Key] | None:
        """The row that can be tied and the row it is tied to."""
        for row in self.checkpoint.table.rows.values():
            if row.tied_to:
                return (row.id, None), (row.tied_to, None)
        return None

    def tied(self, *, sampled: bool) -> bool:
        """Whether head and embedding are one.

        Args:
            sampled: Read at most 8 MB of each, instead of all, where headers do not tell.
        """
        pair = self.tied_pair()
        sampled = sampled or self.checkpoint.only_samples
        if pair is None:
            return False
        head, base = (self.logical.get(k) for k in pair)
        if head is None or base is None or head is base:
            return True
        if sampled not in self._tied:
            a, b = self.specs.get(pair[0], []), self.specs.get(pair[1], [])
            known = tying.quick(a[0], b[0]) if len(a) == len(b) == 1 else None
            self._tied[sampled] = tying.same_values(head, base, sampled=sampled) if known is None else known
            if not sampled:
                self._tied[True] = self._tied[False]
        return self._tied[sampled]

    def tie_needs_reading(self) -> bool:
        """Whether headers leave open if head and embedding are one."""
        pair = self.tied_pair()
        if pair is None or any(k not in self.logical for k in pair) or self.logical[pair[0]] is self.logical[pair[1]]:
            return False
        a, b = self.specs[pair[0]], self.specs[pair[1]]
        return (tying.quick(a[0], b[0]) if len(a) == len(b) == 1 else None) is None

    def reference_tensors(self, keys: Iterable[Key] | None = None) -> Iterator[tuple[str, Source]]:
        """``(name in the reference model, source as stored)`` of all tensors or these; blocks widened to float32."""
        table = self.checkpoint.table
        if table.names_file or table.book_class:
            table = load_table(self.checkpoint.family)
        for row_id, layer in self.logical if keys is None else keys:
            source, name = self.logical[row_id, layer], table.rows[row_id].names["scratch"]
            if layer is not None:
                name = (table.prefix["scratch"] + name).replace("{l}", str(layer))
            plain = as_reference(self.checkpoint, table.rows[row_id], layer, source)
            if "{e}" not in name:
                yield name, plain
                continue
            for expert in range(plain.shape[0]):
                yield name.replace("{e}", str(expert)), Expert(plain, expert)


def as_reference(checkpoint: Checkpoint, row: TensorRow, layer: int | None, source: Source) -> Source:
    """A stored tensor in plain values, the row's named operations undone; rotary order and norms stay as stored."""
    from convert.logical import undo_operations

    return undo_operations(checkpoint, row, layer, values(source))


def values(source: Source, dtype: str = "F32") -> Source:
    """The source itself, or its values in a plain type where it is block-quantised."""
    if not DTYPES[source.dtype].is_quantized:
        return source
    from convert.quants import Dequantized

    return Dequantized(source, dtype)


def alike(parts: Sequence[Source]) -> list[Source]:
    """Sources in one type that holds the values of all: what is stored as one tensor must agree."""
    if len({p.dtype for p in parts}) == 1:
        return list(parts)
    plain = [values(p) for p in parts]
    widest = max((p.dtype for p in plain), key=lambda k: (DTYPES[k].block_bytes, k == "F32"))
    widest = "F32" if widest in ("F16", "BF16") else widest  # neither of these two holds the other
    return [p if p.dtype == widest else Cast(p, widest) for p in plain]


def model_width(table: MappingTable, layout: str, tensors: Mapping[str, list[TensorSpec]]) -> int | None:
    """The model's width, from a tensor that is as long as the model is wide and that every file holds whole."""
    for row in table.rows.values():
        if layout in row.names and len(row.shape) == 1 and row.shape[0].text == "D":
            name = (table.prefix.get(layout, "") if row.in_block else "") + row.names[layout]
            specs = tensors.get(name.replace("{l}", "0"))
            if specs and len(specs[0].shape) == 1:
                return specs[0].shape[0]
    return None


def joined_shape(specs: list[TensorSpec], width: int | None) -> tuple[int, ...]:
    """The shape of a tensor whose model-parallel parts are joined, as far as the model's width tells the axis."""
    first = specs[0].shape
    if len(specs) == 1 or len(first) < 2:
        return first
    axis = 0 if first[1] == width else 1
    total = sum(s.shape[axis] for s in specs)
    return (total, *first[1:]) if axis == 0 else (first[0], total, *first[2:])


def match(checkpoint: Checkpoint) -> Match:
    """Match every tensor; never raises for a bad checkpoint, the problems are in the result."""
    table, layout = checkpoint.table, checkpoint.layout
    dims = Dims(table, checkpoint.config)
    out = Match(checkpoint, expand(table, dims, layout, checkpoint.tensors))
    out.problems += checkpoint.problems
    used: set[str] = set()
    for slot in out.slots.values():
        specs = checkpoint.tensors.get(slot.name)
        if specs is None:
            _absent(out, table, slot)
            continue
        used.add(slot.name)
        source = _source(out, slot, specs, dims)
        if source is not None:
            _place(out, slot, source, specs)
    _leftovers(out, used)
    if out.problems:
        absent = {s.name: s.keys[0] for s in out.slots.values() if len(s.keys) == 1}
        out.problems = name_fused(out.problems, absent)
    _stack_experts(out)
    _embedding_from_head(out)
    if not out.problems:
        collapse(out)
    return out


def _absent(out: Match, table: MappingTable, slot: Slot) -> None:
    checkpoint = out.checkpoint
    row = table.rows[slot.keys[0][0]]
    pair = out.tied_pair()
    tie = checkpoint.config.get("tie_word_embeddings")
    accept = checkpoint.options.tie == "share"
    if row.tied_to:
        # Hugging Face would initialise a missing head at random where the flag says untied; Meta always stores one.
        # A from-scratch or GGUF file without a head is tied by its own loader's rule.
        if checkpoint.layout in ("scratch", "gguf") or (checkpoint.layout == "hf" and tie) or accept:
            return
        stated = (
            "tie_word_embeddings is false" if "tie_word_embeddings" in checkpoint.raw_config else "no tie flag is set"
        )
        what = "Meta's layout always has one" if checkpoint.layout == "meta" else stated
        out.problems.append(
            Problem(
                "missing_head",
                f"{slot.name!r} is missing although {what}; this is a base model without a head, or a head was lost.",
                tensor=slot.name,
                found=None,
                wanted=list(slot.shape),
                hint="--tie share accepts the embedding as the head; otherwise fetch the file that holds it.",
            )
        )
        return
    if pair and slot.keys[0] == pair[1] and tie and _head_name(out) in checkpoint.tensors:
        return
    out.problems.append(
        Problem(
            "missing_tensor",
            f"{slot.name!r} is missing; the table wants {list(slot.shape)} {slot.why}.",
            tensor=slot.name,
            found=None,
            wanted=list(slot.shape),
            hint="An incomplete checkpoint, or a config of another model.",
        )
    )


def _head_name(out: Match) -> str:
    pair = out.tied_pair()
    return next((s.name for s in out.slots.values() if pair and s.keys[0] == pair[0]), "")


def _embedding_from_head(out: Match) -> None:
    """Flag true, head stored, embedding not: transformers ties the embedding to the head (facts B3)."""
    pair = out.tied_pair()
    if (
        pair
        and pair[0] in out.logical
        and pair[1] not in out.logical
        and out.checkpoint.config.get("tie_word_embeddings")
    ):
        out.logical[pair[1]], out.specs[pair[1]] = out.logical[pair[0]], out.specs[pair[0]]
        out.notes.append("the embedding is not stored; the head is, and the config ties them")


#: How many of the files that hold a tensor a message names.
_MOST_FILES = 8


def _source(out: Match, slot: Slot, specs: list[TensorSpec], dims: Dims) -> Source | None:
    pool = out.checkpoint.pool
    problem = _dtype_problem(slot, specs)
    if problem:
        out.problems.append(problem)
        return None
    if len(specs) == 1:
        if specs[0].shape == slot.shape:
            return open_source(specs[0], pool)
        out.problems.append(_shape_problem(out, slot, specs, specs[0].shape, dims))
        return None
    if out.checkpoint.layout != "meta":
        more = f" … ({len(specs)} in all)" if len(specs) > _MOST_FILES else ""
        files = ", ".join(s.file.name for s in specs[:_MOST_FILES]) + more
        what, hint = f"{slot.name!r} is stored in several files: {files}.", "Fetch or save the checkpoint again."
        out.problems.append(Problem("duplicate", what, tensor=slot.name, found=files, wanted="one of them", hint=hint))
        return None
    if len(specs) != len(out.checkpoint.files):
        out.problems.append(
            Problem(
                "missing_tensor",
                f"{slot.name!r} is in {len(specs)} of {len(out.checkpoint.files)} model-parallel files.",
                tensor=slot.name,
                found=len(specs),
                wanted=len(out.checkpoint.files),
                hint="Files of different models, or a damaged set.",
            )
        )
        return None
    if all(s.shape == slot.shape for s in specs):
        return _replicated(out, slot, specs)
    for axis in range(len(slot.shape)):
        total = sum(s.shape[axis] for s in specs if len(s.shape) > axis)
        rest = {s.shape[:axis] + s.shape[axis + 1 :] for s in specs}
        if total == slot.shape[axis] and rest == {slot.shape[:axis] + slot.shape[axis + 1 :]}:
            return Joined([open_source(s, pool) for s in specs], axis)
    width = model_width(out.checkpoint.table, out.checkpoint.layout, out.checkpoint.tensors)
    out.problems.append(_shape_problem(out, slot, specs, joined_shape(specs, width), dims))
    return None


def _dtype_problem(slot: Slot, specs: list[TensorSpec]) -> Problem | None:
    kinds = {s.dtype for s in specs}
    first = specs[0].type
    if len(kinds) > 1:
        return Problem(
            "dtype",
            f"{slot.name!r} has different types in the model-parallel files: {', '.join(sorted(kinds))}.",
            tensor=slot.name,
            found=sorted(kinds),
        )
    if first.is_float or first.is_quantized or specs[0].scale is not None:
        return None
    return Problem(
        "dtype",
        f"{slot.name!r} is {first.name}, which is no plain floating-point type.",
        tensor=slot.name,
        found=first.name,
        hint="Packed weights, or a cast that lost them: take the checkpoint from before it.",
    )


def _replicated(out: Match, slot: Slot, specs: list[TensorSpec]) -> Source:
    """The first of several equal copies; small ones are compared."""
    sources = [open_source(s, out.checkpoint.pool) for s in specs]
    if specs[0].nbytes <= _REPLICA_LIMIT:
        first = sources[0].read(0, sources[0].shape[0]).tobytes()
        differing = [
            s.file.name for s, x in zip(specs, sources, strict=True) if x.read(0, x.shape[0]).tobytes() != first
        ]
        if differing:
            out.problems.append(
                Problem(
                    "replica",
                    f"{slot.name!r} should be the same in every model-parallel file and differs in "
                    f"{', '.join(differing)}.",
                    tensor=slot.name,
                    file=differing[0],
                    hint="Files of different models?",
                )
            )
    return sources[0]


def _shape_problem(out: Match, slot: Slot, specs: list[TensorSpec], found: tuple[int, ...], dims: Dims) -> Problem:
    hint = "The config belongs to another model, or the tensor does."
    if len(slot.keys) == 1 and len(found) == len(slot.shape):
        row = out.checkpoint.table.rows[slot.keys[0][0]]
        for expr, have, want in zip(
            row.shape[::-1] if slot.transposed[0] else row.shape, found, slot.shape, strict=True
        ):
            solved = shapes.solve(out.checkpoint.table, dims, expr, have, known=True) if have != want else None
            if solved:
                stated = out.checkpoint.config.get(solved[0])
                hint = f"The config says {solved[0]} = {stated}; this tensor would fit {solved[0]} = {solved[1]}."
    return Problem(
        "shape",
        f"{slot.name!r} is {list(found)}, but the config wants {list(slot.shape)} {slot.why}.",
        tensor=slot.name,
        file=str(specs[0].file),
        found=list(found),
        wanted=list(slot.shape),
        hint=hint,
    )


def _place(out: Match, slot: Slot, source: Source, specs: list[TensorSpec]) -> None:
    at = 0
    for key, shape, flip in zip(slot.keys, slot.stored, slot.transposed, strict=True):
        part = source
        if len(slot.keys) > 1:
            end = at + shape[slot.axis]
            part = Rows(source, at, end) if slot.axis == 0 else Slice(source, slot.axis, at, end)
            at = end
        part = transposed(part) if flip else part
        if slot.expert is None:
            out.logical[key], out.specs[key] = part, specs
        else:
            out.experts.setdefault(key, {})[slot.expert] = part
            out.specs[key] = [*out.specs.get(key, []), *specs]


def _stack_experts(out: Match) -> None:
    """Experts stored one by one become one logical tensor; a missing one is a problem already."""
    for key, found in out.experts.items():
        count = row_shape(out.checkpoint.table, Dims(out.checkpoint.table, out.checkpoint.config), key)[0]
        if len(found) == count:
            out.logical[key] = Stacked(alike([found[e] for e in range(count)]))


def _leftovers(out: Match, used: set[str]) -> None:
    checkpoint = out.checkpoint
    rules = [r for r in checkpoint.table.ignore if r.layout == checkpoint.layout]
    if any("{L}" in r.name for r in rules):
        rules = [replace(r, name=r.name.replace("{L}", str(checkpoint.dims.n_layers))) for r in rules]
    for name, specs in checkpoint.tensors.items():
        if name in used:
            continue
        rule = next((r for r in rules if r.matches(name)), None)
        if rule is not None:
            out.ignored.append((name, rule.reason))
            if rule.check:
                check_frequencies(out, name, specs[0], rule.check)
            continue
        out.problems.append(
            Problem(
                "unexpected_tensor",
                f"{name!r} {list(specs[0].shape)} has no place in the {checkpoint.family} table.",
                tensor=name,
                file=str(specs[0].file),
                found=list(specs[0].shape),
                hint="Another architecture, a head for another task, or a layer more than the config says.",
            )
        )
