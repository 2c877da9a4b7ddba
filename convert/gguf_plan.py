"""A GGUF file as a target: the type of every tensor, where its values come from, and which file holds it.

Types are chosen by :mod:`convert.mixtures`, key-values by :mod:`convert.gguf_metadata`; the engine writes. Nothing is
read here but headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from convert import ggml, rope
from convert.decisions import decisions
from convert.dtypes import DTYPES
from convert.errors import Problem, UsageError
from convert.finite import Finite
from convert.formats.gguf import split_name
from convert.formats.gguf_writer import layout, split_layouts
from convert.formats.spec import Entry
from convert.layout import Dims, Slot
from convert.mixtures import ModelFacts, TypeChoice, automatic, choose_types, mixture
from convert.plan import ConversionPlan, Output, Target
from convert.quants import Dequantized, Quantized, writable_types
from convert.report import fold_names
from convert.source import Array, Cast, Source
from convert.widening import stated_type

#: llama3 scaling: what each base frequency is divided by (facts: gguf.md section 3). The loader wants this name.
ROPE_FREQS = "rope_freqs.weight"

#: What the files are called until the plan knows its output (:func:`bind`).
_UNNAMED = "model.gguf"

Chosen = Sequence[tuple[Slot, Source]]


class Computed(Source):
    """A small tensor that exists in no file."""

    def __init__(self, values: Array, dtype: str) -> None:
        self.values = values
        self.shape = values.shape
        self.dtype = dtype

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        return self.values[start:stop]


def arrange(plan: ConversionPlan, chosen: Chosen, *, omitted: Sequence[str] = ()) -> None:
    """Fill ``plan.files`` and ``plan.outputs`` for a GGUF target, and note what was substituted.

    Args:
        plan: The plan so far.
        chosen: The tensors in order, with sources that are not dequantised.
        omitted: Tensors that are not stored, because another one stands for them.

    Raises:
        UsageError: A type or pattern is unknown or refused; without fallback, a tensor whose rows its type cannot hold.
        ConvertError: Names, shapes or key-values that GGUF cannot hold.
    """
    from convert.gguf_metadata import metadata

    tensors = [(slot.name, slot.shape, source) for slot, source in chosen]
    divisors = _rope_divisors(plan)
    if divisors is not None:
        tensors.insert(0, (ROPE_FREQS, divisors.shape, divisors))
    entries = [Entry(name, source.dtype, shape) for name, shape, source in tensors]
    choices, file_type = _types(plan, entries)
    _note_choices(plan, entries, choices)
    made = {c.name: c.dtype for c in choices}
    fallen = [c for c in choices if c.fallback_from]
    types = [(slot, source, made[slot.name]) for slot, source in chosen]
    plan.decisions = decisions(plan, types, omitted=omitted, substituted=fallen)
    _note_window(plan)
    entries = [Entry(c.name, c.dtype, e.shape) for c, e in zip(choices, entries, strict=True)]
    values = metadata(plan, entries, file_type=file_type)
    limit = plan.request.gguf.split_max_size
    if limit is None:
        plan.files.append(layout(_UNNAMED, entries, values))
    else:
        plan.files += split_layouts(_UNNAMED, entries, values, max_size=limit)
    where = {entry.name: number for number, file in enumerate(plan.files) for entry in file.entries}
    for (name, _, source), choice in zip(tensors, choices, strict=True):
        plan.outputs.append(Output(_as_type(source, choice.dtype, name), (Target(where[name], name),)))
    if plan.request.gguf.ollama and len(plan.files) > 1:
        raise UsageError(
            "--ollama needs the model in one file; Ollama does not read split ones.",
            hint="Leave out --split-max-size or --ollama.",
        )
    bind(plan, Path(_UNNAMED))


def _rope_divisors(plan: ConversionPlan) -> Computed | None:
    if plan.config.get("rope_type") not in ("llama3", "proportional"):
        return None
    settings = rope.primary(plan.config["rope_parameters"])
    head_dim = int(Dims(plan.table, plan.config)[next((kind.head_dim for kind in plan.table.rope.values()), "hd")])
    return Computed(np.array(rope.divisors(settings, head_dim), np.float32), "F32")


def _note_window(plan: ConversionPlan) -> None:
    """A window over all layers is a key that llama.cpp does not heed (run and compared: it attends to everything)."""
    window = plan.config.get("sliding_window")
    if window and not plan.config.get("layer_types") and window < plan.config["max_position_embeddings"]:
        plan.notes.append(
            f"sliding_window = {window:,}: llama.cpp attends to all positions of this architecture, so its answers "
            "differ on longer texts"
        )


# ---- types -----------------------------------------------------------------------------------------------------


def _types(plan: ConversionPlan, entries: list[Entry]) -> tuple[list[TypeChoice], int]:
    """The type of every tensor, and ``general.file_type``."""
    request = plan.request.gguf
    dims = Dims(plan.table, plan.config)
    heads = int(dims.get("H", 1))
    facts = ModelFacts(dims.n_layers, heads // max(1, int(dims.get("K", heads))), int(dims.get("E", 0)))
    stored = _stored_bytes(plan)
    wide = automatic(stored)
    keep = request.type == "auto" and plan.source.layout == "gguf"
    chosen = mixture(wide if request.type == "auto" else request.type)
    choices = choose_types(
        entries, chosen, facts, overrides=request.tensor_types, wide=wide.upper(), writable=writable_types()
    )
    file_type = chosen.file_type
    if keep:
        own = zip(choices, entries, strict=True)
        choices = [c if c.reason == "--tensor-type" or c.fallback_from else TypeChoice(e.name, e.dtype) for c, e in own]
        file_type = int(plan.source.metadata.get("general.file_type", file_type))
    elif request.type == "auto":
        plan.notes.append(f"--type auto: {chosen.name} (the source holds {', '.join(sorted(stored))})")
    return choices, file_type


def _stored_bytes(plan: ConversionPlan) -> dict[str, int]:
    out: dict[str, int] = {}
    for specs in plan.source.tensors.values():
        for spec in specs:
            kind = spec.dtype if spec.scale is None else stated_type(plan.source)
            out[kind] = out.get(kind, 0) + spec.nbytes
    return out


def _note_choices(plan: ConversionPlan, entries: list[Entry], choices: list[TypeChoice]) -> None:
    """Every substitution with its cost in bytes; without fallback they stop instead."""
    fallen = [c for c in choices if c.fallback_from]
    if fallen and not plan.request.gguf.fallback:
        raise UsageError([_no_fallback(group) for group in _grouped(fallen)])
    for group in _grouped(fallen):
        plan.notes.append(
            f"{group[0].dtype} in place of {group[0].fallback_from}, {sum(c.extra_bytes for c in group):+,} bytes: "
            f"{', '.join(fold_names(c.name for c in group))} ({group[0].reason})"
        )
    if len(_grouped(fallen)) > 1:
        plan.notes.append(f"substitutions: {len(fallen)} tensors, {sum(c.extra_bytes for c in fallen):+,} bytes in all")
    blocks = {c.name for c in choices if DTYPES[c.dtype].is_quantized}
    again = [e.name for e, c in zip(entries, choices, strict=True) if _quantized(e.dtype) and e.dtype != c.dtype]
    if again:
        twice = any(name in blocks for name in again)
        plan.notes.append(
            f"{len(again)} block-quantised tensors are dequantised"
            + (" and quantised again; the errors of both add up" if twice else " to a plain type")
        )
    made = any(c.name in blocks and e.dtype != c.dtype for e, c in zip(entries, choices, strict=True))
    if made and not ggml.available():
        plan.notes.append(
            "ggml is not installed: the gguf package quantises, to the same bytes but several times slower "
            "(the extra `quantize` has it)"
        )


def _no_fallback(group: list[TypeChoice]) -> Problem:
    first, cost = group[0], sum(c.extra_bytes for c in group)
    return Problem(
        "type",
        f"{', '.join(fold_names(c.name for c in group))} cannot be {first.fallback_from}: {first.reason}.",
        found=first.reason,
        wanted=first.fallback_from,
        hint=f"Without --no-fallback the type is {first.dtype} ({cost:+,} bytes); --tensor-type chooses another.",
    )


def _quantized(dtype: str) -> bool:
    return DTYPES[dtype].is_quantized


def _grouped(choices: list[TypeChoice]) -> list[list[TypeChoice]]:
    groups: dict[tuple[str | None, str, str], list[TypeChoice]] = {}
    for choice in choices:
        groups.setdefault((choice.fallback_from, choice.dtype, choice.reason), []).append(choice)
    return list(groups.values())


def _as_type(source: Source, dtype: str, name: str) -> Source:
    """The source's values in the type chosen; every value that passes through is checked.

    Blocks of an unchanged type move inside the kernel. Plain types do not, even unchanged: reading them to find NaN
    costs 0.1 s of CPU per GB more than the copy in the kernel (measured), and a file that llama.cpp answers nonsense
    from costs more.
    """
    if _quantized(source.dtype):
        if source.dtype == dtype:
            return source
        source = Dequantized(source, "F32")
    if _quantized(dtype) and source.dtype == "F64":
        source = Cast(Finite(source, "F32", tensor=name), "F32")
    if _quantized(dtype):
        return Quantized(source, dtype, tensor=name)
    checked = Finite(source, dtype, tensor=name)
    return checked if source.dtype == dtype else Cast(checked, dtype)


# ---- names -----------------------------------------------------------------------------------------------------


def bind(plan: ConversionPlan, out: Path) -> None:
    """Give the planned files their names, once the output is known; the files beside them follow.

    Raises:
        UsageError: ``out`` is no name for a GGUF file.
    """
    from convert.modelfile import modelfile
    from convert.record import dump, record

    if out.suffix != ".gguf" or not out.stem:
        raise UsageError(
            f"{out} is no name for a GGUF file.", hint=f"Give a file that ends in .gguf: {out / 'model.gguf'}."
        )
    count = len(plan.files)
    names = [out.name] if count == 1 else [split_name(out.stem, i, count) for i in range(count)]
    plan.files = [replace(file, name=name) for file, name in zip(plan.files, names, strict=True)]
    plan.sidecars = {"Modelfile": modelfile(plan, names[0])} if plan.request.gguf.ollama else {}
    plan.sidecars[f"{names[0]}.conversion.json"] = dump(record(plan))
