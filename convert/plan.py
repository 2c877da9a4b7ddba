"""What a conversion will do, decided before any tensor data is read: files, offsets, sources, assumptions.

Takes a matched checkpoint and a target layout; refuses whatever the target cannot hold. Layout-specific files beside
the weights come from :mod:`convert.sidecars`; :mod:`convert.run` carries the plan out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.checkpoint import Checkpoint
from convert.choices import require_choice, require_positive, require_target
from convert.coverage import uncovered
from convert.dtypes import dtype
from convert.errors import ConvertError, Problem, UsageError
from convert.formats import safetensors
from convert.formats.gguf_values import KeyValues, Value
from convert.formats.spec import Entry, FileLayout
from convert.gguf_request import GgufRequest
from convert.layout import Dims, Slot, expand
from convert.logical import is_computed, logical_source
from convert.match import alike
from convert.report import fold_problems
from convert.source import Joined, Source
from convert.table import READ_ONLY, MappingTable, load_table
from convert.transforms import transposed
from convert.widening import widening

#: Numpy work is cut into pieces of about this many bytes of output; with less, two threads fight over the GIL.
PIECE_BYTES = 2 << 20
#: What the interpreter and our modules take before any data (measured: 45 MiB with numpy).
BASE_MEMORY = 48 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """Where an output's values go: file number, tensor name there, and which columns (all when None)."""

    file: int
    name: str
    columns: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One source and the tensors that are written from it."""

    source: Source
    targets: tuple[Target, ...]


@dataclass(slots=True)
class Request:
    """What the user asked for (the options of the conversion commands).

    Attributes:
        target: Layout to write.
        dtype: Canonical type, or None to keep each tensor's own.
        format: ``safetensors``, ``pth`` or ``dcp`` (torch.distributed.checkpoint) for the from-scratch layout.
        max_shard_size: Bytes per file of a Hugging Face folder.
        model_parallel: Number of Meta files.
        book_class: Which of the book's classes.
        buffers: Write what the class keeps in its state dict beside weights (masks, rotary tables).
        allow_reference: Write what the book's class cannot hold for our reference class.
        tie: ``copy`` stores a tied head as a tensor of its own; ``share`` once, where the target can.
        tokenizer: Whether tokenizer files are carried.
        tokenizer_path: Where the tokenizer lies, if not beside the source.
        clamp: Store a type's largest value for those that are too large for it, instead of stopping.
        gguf: Options of a GGUF target.
    """

    target: str
    dtype: str | None = None
    format: str = "safetensors"
    max_shard_size: int = 5_000_000_000
    model_parallel: int = 1
    book_class: str | None = None
    allow_reference: bool = False
    buffers: bool = False
    tie: str | None = None
    tokenizer: bool = True
    tokenizer_path: str | Path | None = None
    clamp: bool = False
    gguf: GgufRequest = field(default_factory=GgufRequest)

    def __post_init__(self) -> None:
        """Refuse values that an option does not have."""
        require_choice("format", self.format, ("safetensors", "pth", "dcp"))
        require_choice("tie", self.tie, ("share", "copy"))
        require_positive("max_shard_size", self.max_shard_size)
        require_positive("model_parallel", self.model_parallel)
        require_target("buffers", self.buffers, self.target, only="scratch")


@dataclass(slots=True)
class ConversionPlan:
    """Everything that will be read and written.

    Attributes:
        source: The opened source.
        request: What was asked for.
        table: The table whose names the target gets.
        config: Hub config of the target.
        outputs: Sources and where they go.
        files: The weight files, with all offsets.
        sidecars: Other files: name → bytes, or a file to copy.
        notes: Every assumption, substitution, dropped and ignored item.
        tied: Whether the model is tied, from its tensors.
        decisions: What was decided about the model, as :mod:`convert.decisions` words it.
        repair: What a repair changes on the way, for the record; empty for a conversion.
        tokenizer_keys: The tokenizer of a GGUF target, found first of all; None where its source's is taken over.
        metadata: The key-values of a GGUF target.
    """

    source: Checkpoint
    request: Request
    table: MappingTable
    config: dict[str, Any]
    outputs: list[Output]
    files: list[FileLayout]
    sidecars: dict[str, bytes | Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tied: bool = False
    decisions: dict[str, Any] = field(default_factory=dict)
    repair: dict[str, Any] = field(default_factory=dict)
    tokenizer_keys: dict[str, Value] | None = None
    metadata: KeyValues = field(default_factory=KeyValues)

    @property
    def single_file(self) -> bool:
        """Whether the output is a file (or numbered files), not a folder."""
        return self.request.target == "gguf"

    def bind(self, out: Path) -> None:
        """Take note of the output's name: the files of a single-file format are called after it.

        Raises:
            UsageError: ``out`` is no name for such a file.
        """
        if self.single_file:
            from convert.gguf_plan import bind

            bind(self, out)

    def main_path(self, out: Path) -> Path:
        """What to open once the plan has been carried out: ``out``, or the first piece of a split file."""
        return out.with_name(self.files[0].name) if self.single_file else out

    @property
    def nbytes(self) -> int:
        """Bytes of the whole output."""
        beside = sum(len(v) if isinstance(v, bytes) else v.stat().st_size for v in self.sidecars.values())
        return beside + sum(f.size for f in self.files)

    def peak_memory(self, threads: int) -> int:
        """Estimated peak of resident memory while running, bytes."""
        largest = max((piece_rows(o.source) * _wide_row(o.source) for o in self.outputs), default=0)
        return BASE_MEMORY + 3 * threads * max(largest, PIECE_BYTES)


def _wide_row(source: Source) -> int:
    return math.prod(source.shape[1:]) * 4


def piece_rows(source: Source) -> int:
    """Rows per piece of numpy work: whole tensors where rows are scattered, else about :data:`PIECE_BYTES`."""
    if source.whole:
        return source.shape[0]
    rows = max(1, PIECE_BYTES // max(1, source.row_bytes))
    return min(source.shape[0], max(source.align, rows // source.align * source.align))


def make_plan(source: Checkpoint, request: Request, *, table: MappingTable | None = None) -> ConversionPlan:
    """Plan a conversion.

    Args:
        source: The opened source.
        request: What is wanted.
        table: Table with the target's names, where a names file gives them.

    Raises:
        ConvertError: The source does not match its table, or the target cannot hold it; all problems at once.
    """
    table = table or _target_table(source, request)
    matched = source.match
    problems = list(matched.problems)
    if request.target not in table.layouts or request.target in READ_ONLY:
        problems.append(
            Problem("layout", f"the {request.target} layout is read and never written.", found=request.target)
            if request.target in READ_ONLY
            else Problem(
                "layout",
                f"the {table.family} family has no {request.target} layout, only {', '.join(table.layouts)}.",
                wanted=list(table.layouts),
            )
        )
    if problems:
        raise ConvertError(fold_problems(problems))
    if problems := refusals(table, Dims(table, source.config), request):
        raise ConvertError(problems)
    found: list[str] = []
    keys = None
    if request.target == "gguf":  # before any weight is read
        from convert.gguf_metadata import tokenizer_keys

        keys = tokenizer_keys(source, request, found)
    tied = matched.tied(sampled=not decides_head(request))
    config = dict(source.config) | {"tie_word_embeddings": tied and request.tie != "copy"}
    if problems := refusals(table, Dims(table, config), request):  # the tensors may say otherwise than the config
        raise ConvertError(problems)
    notes = [*source.notes, *matched.notes, *_ignored(matched.ignored), *found]
    stated = source.config.get("tie_word_embeddings")
    if stated is not None and bool(stated) != tied and source.layout == "hf":
        notes.append(f"the config says tie_word_embeddings = {bool(stated)}, the tensors say {tied}; the tensors win")
    if request.tie == "share" and not tied:
        notes.append("--tie share changes nothing: head and embedding are different tensors, and both are kept")
    dims = Dims(table, config)
    rules = (r for r in table.refuse if r.note and r.layout == request.target)
    notes += [rule.reason for rule in rules if dims.value(rule.when)]
    plan = ConversionPlan(source, request, table, config, [], [], {}, notes, tied, tokenizer_keys=keys)
    slots = expand(table, dims, request.target)
    if problems := uncovered(source, table, request.target, slots.values()):
        raise ConvertError(problems)
    chosen = [(slot, _slot_source(plan, slot)) for slot in slots.values() if not _omitted(plan, slot)]
    _note_types(plan, chosen)
    omitted = [slot.name for slot in slots.values() if _omitted(plan, slot)]
    _arrange(plan, chosen, dims, omitted)
    if request.clamp:
        from convert.clamp import set_clamp

        set_clamp(output.source for output in plan.outputs)
    from convert.sidecars import add_sidecars

    add_sidecars(plan)
    return plan


def _target_table(source: Checkpoint, request: Request) -> MappingTable:
    """The source's table with the family's own names, or with those of one of the book's classes."""
    from convert.names import for_class

    table = source.table
    if table.names_file or table.book_class:
        table = load_table(table.family)
    return for_class(table, request.book_class) if request.target == "scratch" else table


def decides_head(request: Request) -> bool:
    """Whether a tied head is dropped, so that every byte must be compared; elsewhere the answer is a remark."""
    return request.target in ("hf", "gguf") and request.tie != "copy"


def _ignored(ignored: list[tuple[str, str]]) -> list[str]:
    from convert.report import fold_names

    reasons: dict[str, list[str]] = {}
    for name, reason in ignored:
        reasons.setdefault(reason, []).append(name)
    return [f"ignored {', '.join(fold_names(names))}: {reason}" for reason, names in reasons.items()]


def refusals(table: MappingTable, dims: Dims, request: Request) -> list[Problem]:
    """What the target layout, or the book's class, cannot hold of this config."""
    out = []
    name = request.book_class or next(iter(table.classes), None)
    if request.book_class and request.book_class not in table.classes:
        raise UsageError(
            f"there is no class {request.book_class!r} in the {table.family} table.",
            hint=f"Classes: {', '.join(table.classes)}.",
        )
    for rule in table.refuse:
        if rule.layout != request.target or (rule.book_class and rule.book_class != name) or rule.note:
            continue
        if rule.reference and request.allow_reference:
            continue
        if dims.value(rule.when):
            hint = "--allow-reference writes it for our own reference class." if rule.reference else None
            values_ = rule.when.explain(lambda n: dims.get(n))
            out.append(
                Problem(
                    "refused",
                    f"the {request.target} layout cannot hold this model: {rule.reason} ({values_}).",
                    hint=hint,
                )
            )
    return out


def _omitted(plan: ConversionPlan, slot: Slot) -> bool:
    """A tied head is not stored twice where the target's loader ties by itself."""
    row = plan.table.rows[slot.keys[0][0]]
    target = plan.request.target
    ties = target in ("hf", "gguf") and target not in row.always
    return bool(row.tied_to) and plan.tied and plan.request.tie != "copy" and ties


def _slot_source(plan: ConversionPlan, slot: Slot) -> Source:
    return slot_source(plan.source, slot, table=plan.table, layout=plan.request.target, dtype=plan.request.dtype)


def slot_source(source: Checkpoint, slot: Slot, *, table: MappingTable, layout: str, dtype: str | None) -> Source:
    """A stored tensor of ``layout`` (names of ``table``) made from ``source``, which must have matched its own table.

    ``dtype`` is the canonical type, or None to keep the source's; block-quantised values then become F16, except
    for a GGUF target, which can keep the blocks.
    """
    parts = [
        logical_source(source, key, shape, table=table, layout=layout, dtype=dtype, expert=slot.expert)
        for key, shape in zip(slot.keys, slot.shapes, strict=True)
    ]
    parts = [transposed(part) if flip else part for part, flip in zip(parts, slot.transposed, strict=True)]
    return parts[0] if len(parts) == 1 else Joined(alike(parts), slot.axis)


def _note_types(plan: ConversionPlan, chosen: list[tuple[Slot, Source]]) -> None:
    plan.notes += widening(plan.source, plan.request.target, plan.request.dtype)
    if plan.source.pairing != plan.table.convention_of(plan.request.target, "rope"):
        count = sum(plan.table.rows[k[0]].rope is not None for slot, _ in chosen for k in slot.keys)
        to = plan.table.convention_of(plan.request.target, "rope")
        plan.notes.append(f"rows of Q and K are put from {plan.source.pairing} into {to} order ({count} tensors)")
    rows = (plan.table.rows[k[0]] for slot, _ in chosen for k in slot.keys)
    if count := sum(is_computed(plan.source, row, plan.table, plan.request.target) for row in rows):
        plan.notes.append(
            f"{count} tensors are computed in float32 (norm weights with or without the one in them, -exp of decay "
            "rates): a way back restores them within its rounding, all others bit by bit"
        )


def _arrange(plan: ConversionPlan, chosen: list[tuple[Slot, Source]], dims: Dims, omitted: list[str]) -> None:
    """Decide files and offsets; what was decided about the model is known by then, since the files say it."""
    from convert.decisions import decisions
    from convert.shards import distribute, shard, split_model_parallel

    request = plan.request
    if request.target != "gguf":  # whose types are decided with its files
        plan.decisions = decisions(plan, ((slot, s, s.dtype) for slot, s in chosen), omitted=omitted)
    if request.target == "hf":
        shard(plan, [(slot.name, source) for slot, source in chosen])
    elif request.target == "meta":
        split_model_parallel(plan, chosen, dims)
    elif request.target == "scratch":
        tensors = [(slot.name, source) for slot, source in chosen]
        if request.buffers:
            from convert.buffers import buffers

            tensors += buffers(plan.table, dims, request.book_class)
        if request.format == "dcp":
            distribute(plan, tensors)
            return
        name = "model.pth" if request.format == "pth" else "model.safetensors"
        plan.files.append(weight_file(name, [Entry(n, s.dtype, s.shape) for n, s in tensors], plan))
        plan.outputs += [Output(source, (Target(0, n),)) for n, source in tensors]
    else:
        from convert.gguf_plan import arrange

        arrange(plan, chosen, omitted=omitted)


def weight_file(name: str, entries: list[Entry], plan: ConversionPlan) -> FileLayout:
    """Lay out one file of weights; the suffix says in which format."""
    if name.endswith(".pth"):
        from convert.formats import torch_zip_writer

        return torch_zip_writer.layout(name, entries)
    return safetensors.layout(name, entries, safetensors_metadata(plan))


def safetensors_metadata(plan: ConversionPlan) -> dict[str, str]:
    """What the file itself says of how it was made; nothing else tells the order of Q and K."""
    from convert import __version__
    from convert.record import compact, table_hash

    return {
        "convert.version": __version__,
        "convert.layout": plan.request.target,
        "convert.qk_layout": plan.table.convention_of(plan.request.target, "rope"),
        "convert.tied": str(plan.tied).lower(),
        "convert.table": table_hash(plan.table.raw),
        "convert.decisions": compact(plan.decisions),
    }


def request_dtype(name: str | None) -> str | None:
    """The canonical type for ``--dtype``; None for ``keep``.

    Raises:
        UsageError: Weights cannot be converted to such a type.
    """
    if name in (None, "keep"):
        return None
    try:
        found = dtype(str(name)).name
    except KeyError:
        found = str(name)
    require_choice("dtype", found if found in ("F32", "F16", "BF16") else str(name), ("F32", "F16", "BF16"))
    return found
