"""Finds the model's state dict in what a training script saved, and cleans its names.

A ``.pth`` may be the state dict itself, or a training checkpoint that wraps it beside an optimizer, a config
and counters. :func:`unwrap` picks the state dict, never touching optimizer state; two candidates (a model and
its moving average) are a question to the user, never a guess. :func:`strip_prefixes` removes what
``torch.compile``, DDP and FSDP put into names, for any format. Reads no files; knows no model family.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from convert.adapters import refuse_adapters
from convert.errors import FormatError, Problem, UsageError
from convert.formats.placeholders import TENSOR_MAKERS, Placeholder, as_mapping
from convert.formats.spec import TensorSpec
from convert.prefixes import bare_question, beside_bare, side_by_side
from convert.trainers import no_model, refuse_megatron, refuse_pieces
from convert.wrapped_config import config_around

#: Path parts that wrappers of modules insert: torch.compile, DDP and DataParallel, FSDP, checkpointing.
WRAPPER_PARTS = frozenset(
    {
        *("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"),
        *("_fpw_module", "_forward_module"),  # FSDP of fairscale and of torch 1.11; Lightning's Fabric
    }
)
#: What ``peft`` puts in front of every name; harmless once the adapter is merged.
_PEFT_PREFIX = "base_model.model."
#: Beginnings of the keys under which trainers keep what is no model.
_NOT_MODELS = (
    "optim",
    "lr_sched",
    "scheduler",
    "sched",
    "scaler",
    "grad_scaler",
    "rng",
    "cuda_rng",
    "callbacks",
    "loops",
)
_MAX_DEPTH = 6
_MAX_KEY = 200
_MAX_LISTED = 12


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """A model's tensors, and what lay around them.

    Attributes:
        tensors: By cleaned name, in the order of the file; each spec carries that name.
        config: A plain dict of numbers, texts, lists and dicts, or None.
        stripped: What was removed from names (``"_orig_mod. (291 names)"``).
        others: What else the file holds and is not converted.
        key: The dotted key under which the tensors were found; empty at the top.
        notes: ``stripped`` and ``others`` as sentences, for ``inspect``.
    """

    tensors: dict[str, TensorSpec]
    config: dict[str, Any] | None
    stripped: list[str]
    others: list[str]
    key: str = ""
    notes: list[str] = field(default_factory=list)


def unwrap(tree: Any, key: str | None = None, *, file: Path | None = None, drop_prefix: str | None = None) -> Unwrapped:
    """Pick the model's state dict out of a torch file's tree.

    Args:
        tree: ``Container.metadata["tree"]`` of :func:`convert.formats.torch_zip.read`.
        key: Which dict to take (``model``, ``a.b``, ``.`` for the top); None finds it.
        file: For error messages.
        drop_prefix: A first part such as ``"model."`` or ``"net."`` to remove; only if every name has it.
            Never removed unasked: Hugging Face's own names begin with ``model.``.

    Raises:
        UsageError: No such key, or several candidates (they are listed).
        FormatError: A pickled module instead of a state dict, no tensors at all, adapters that are not merged,
            tensors of unreadable kinds, or names that collide after stripping.
    """
    where = str(file) if file is not None else None
    refuse_megatron(tree, where)
    chosen = key.removesuffix(".") if key is not None else _find(tree, where)
    chain = _follow(tree, chosen, where)
    state = as_mapping(chain[-1])
    refuse_pieces(tree, state or {}, where)
    if state is None or not any(isinstance(value, TensorSpec) for value in state.values()):
        raise no_model(tree, chosen, chain[-1], where)
    found = {name: value for name, value in state.items() if isinstance(value, TensorSpec) and isinstance(name, str)}
    _refuse_unreadable(state, where)
    refuse_adapters(found, file=file)
    counters = [name for name, clean in strip_prefixes(found, file=file)[0].items() if _is_counter(clean, found[name])]
    names, stripped = strip_prefixes([name for name in found if name not in counters], file=file)
    names, average = _without_average(names, chosen, asked=key is not None, where=where)
    _refuse_side_by_side(list(names.values()), chosen, where)
    if drop_prefix and all(name.startswith(drop_prefix) and len(name) > len(drop_prefix) for name in names.values()):
        names = {old: name[len(drop_prefix) :] for old, name in names.items()}
        stripped.append(f"{drop_prefix} ({len(names)} names)")
    others = average + [f"{name} (a counter)" for name in counters] + _others(chain[:-1], chosen, state)
    notes = [f"the model was found under the key {chosen!r}"] if chosen else []
    notes += [f"stripped from names: {item}" for item in stripped]
    notes += [f"not converted: {item}" for item in others]
    tensors = {new: _named(found[old], new) for old, new in names.items()}
    return Unwrapped(tensors, config_around(chain[:-1]), stripped, others, chosen, notes)


def _is_counter(name: str, spec: TensorSpec) -> bool:
    """A number beside the modules' tensors: how often an average was taken, or which step this is."""
    return "." not in name and not spec.type.is_float and not spec.type.is_quantized and math.prod(spec.shape) == 1


def _without_average(
    names: dict[str, str], key: str, *, asked: bool, where: str | None
) -> tuple[dict[str, str], list[str]]:
    """The names without an average's that lie among them, and what was left out; a question if no key was said."""
    if not (average := beside_bare(names.values())):
        return names, []
    if not asked:
        raise UsageError(replace(bare_question(average, key), file=where))
    out = {old: new for old, new in names.items() if not new.startswith(f"{average}.")}
    return out, [f"{average} ({len(names) - len(out)} tensors)"]


def _refuse_side_by_side(names: list[str], key: str, where: str | None) -> None:
    """Two models in one state dict, each under its own first part, are a question like two dicts are."""
    if not (alike := side_by_side(names)):
        return
    keys = [f"{key}.{first}" if key else first for first in alike]
    raise UsageError(
        Problem(
            "ambiguous",
            f"The state dict holds {len(alike)} models with the same names: {' and '.join(keys)}.",
            file=where,
            found=keys,
            wanted="one",
            hint=f"Say which one with --key, for example --key {keys[0]}.",
        )
    )


def _named(spec: TensorSpec, name: str) -> TensorSpec:
    """The spec under a name (``dataclasses.replace`` takes three times as long, and there may be 37,000)."""
    return TensorSpec(
        name,
        spec.dtype,
        spec.shape,
        spec.file,
        spec.offset,
        spec.strides,
        spec.storage,
        spec.crc,
        spec.parts,
        spec.axis,
    )


def strip_prefixes(names: Iterable[str], *, file: Path | None = None) -> tuple[dict[str, str], list[str]]:
    """Remove what wrappers of modules put into names, wherever it is a part of the path.

    Args:
        names: Tensor names.
        file: For error messages.

    Returns:
        ``(mapping, stripped)``: every name to its cleaned form, in order; and one line per removed part with
        the number of names that had it.

    Raises:
        FormatError: Two names become one.
    """
    old = list(names)
    counts: dict[str, int] = {}
    mapping = {name: name for name in old}
    everything = "\n".join(old)
    for name in old if any(part in everything for part in WRAPPER_PARTS) else ():
        parts = name.split(".")
        if WRAPPER_PARTS.isdisjoint(parts[:-1]):
            continue
        kept = [part for part in parts[:-1] if part not in WRAPPER_PARTS]
        for part in WRAPPER_PARTS.intersection(parts[:-1]):
            counts[part] = counts.get(part, 0) + 1
        mapping[name] = ".".join([*kept, parts[-1]])
    if old and all(name.startswith(_PEFT_PREFIX) for name in mapping.values()):
        mapping = {name: clean[len(_PEFT_PREFIX) :] for name, clean in mapping.items()}
        counts[_PEFT_PREFIX.rstrip(".")] = len(old)
    _refuse_collisions(mapping, file)
    return mapping, [f"{part}. ({count} names)" for part, count in sorted(counts.items())]


def candidates(tree: Any) -> dict[str, dict[Any, Any]]:
    """Every dict that looks like a model's state dict, by dotted key, optimizers left out."""
    found: dict[str, dict[Any, Any]] = {}
    _collect(tree, "", 0, found, set())
    return found


def _collect(value: Any, path: str, depth: int, found: dict[str, dict[Any, Any]], seen: set[int]) -> bool:
    """Collect candidates at and below ``value``; whether there was one. Cycles and depth are bounded."""
    if depth > _MAX_DEPTH or id(value) in seen:
        return False
    items = _items(value)
    if items is None or "param_groups" in items:
        return False
    seen.add(id(value))
    direct = [name for name, leaf in items.items() if isinstance(leaf, TensorSpec) and isinstance(name, str)]
    dotted = any("." in name for name in direct)
    if dotted:
        found[path] = items
    below = False
    for name, child in items.items():
        if (
            isinstance(child, dict | list | tuple | Placeholder)
            and _may_wrap(name)
            and not (dotted and "." in str(name))
        ):
            below |= _collect(child, f"{path}.{name}" if path else str(name), depth + 1, found, seen)
    if not below and direct and not dotted and not all(_is_counter(name, items[name]) for name in direct):
        found[path] = items
    return below or bool(direct)


def _items(value: Any) -> dict[Any, Any] | None:
    """What lies in a dict, an object, or a short list or tuple (by its number); None for anything else."""
    items = as_mapping(value)
    return dict(enumerate(value)) if items is None and isinstance(value, list | tuple) and len(value) <= 64 else items


def _may_wrap(name: Any) -> bool:
    """Whether a model may lie under this key; a key of a megabyte is nobody's."""
    if isinstance(name, str):
        return len(name) <= _MAX_KEY and not name.lower().startswith(_NOT_MODELS)
    return isinstance(name, int)


def _find(tree: Any, where: str | None) -> str:
    found = candidates(tree)
    if len(found) == 1:
        return next(iter(found))
    if not found:
        raise no_model(tree, "", tree, where)
    raise UsageError(
        Problem(
            "ambiguous",
            f"The checkpoint holds {len(found)} state dicts: {_listed(found)}.",
            file=where,
            found=list(found),
            wanted="one",
            hint=f"Say which one with --key, for example --key {next(iter(found))}.",
        )
    )


def _listed(found: dict[str, dict[Any, Any]]) -> str:
    lines = []
    for path, items in list(found.items())[:_MAX_LISTED]:
        specs = [leaf for leaf in items.values() if isinstance(leaf, TensorSpec)]
        lines.append(f"{path or '(top)'} ({len(specs)} tensors, {sum(spec.nbytes for spec in specs):,} bytes)")
    return ", ".join(lines) + (f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else "")


def _follow(tree: Any, key: str, where: str | None) -> list[Any]:
    """The objects from the top to the one at a dotted key; a part may itself contain dots."""
    chain, rest = [tree], key
    while rest:
        value = chain[-1]
        items = _items(value)
        if isinstance(value, list | tuple) and items is not None:
            items = {str(index): child for index, child in items.items()}
        parts = rest.split(".")
        for count in range(len(parts), 0, -1):
            head = ".".join(parts[:count])
            if items is not None and head in items:
                chain.append(items[head])
                rest = ".".join(parts[count:])
                break
        else:
            if items is not None and (below := _below(items, rest)):
                chain.append(below)
                break
            here = [str(name) for name in items][:_MAX_LISTED] if items else []
            found = candidates(tree)
            raise UsageError(
                Problem(
                    "key",
                    f"The checkpoint has nothing under the key {key!r}.",
                    file=where,
                    found=here,
                    wanted=key,
                    hint=f"It holds: {_listed(found)}." if found else "It holds no state dict.",
                )
            )
    return chain


def _below(items: dict[Any, Any], prefix: str) -> dict[Any, Any]:
    """The tensors of a state dict whose names begin with some parts, which wrappers' parts may precede."""
    specs = {name: leaf for name, leaf in items.items() if isinstance(leaf, TensorSpec) and isinstance(name, str)}
    if not specs:
        return {}
    clean, _ = strip_prefixes(specs)
    start = prefix + "."
    return {clean[n][len(start) :]: spec for n, spec in specs.items() if clean[n].startswith(start)}


def _refuse_unreadable(state: dict[Any, Any], where: str | None) -> None:
    problems = [
        Problem(
            "unreadable_tensor",
            f"{str(name)[:200]!r} is a tensor of a kind that cannot be read: {leaf.name}.",
            tensor=str(name)[:200],
            file=where,
            found=leaf.name,
            wanted="a dense tensor of a plain type",
            hint="Turn it into a dense tensor in torch (dequantize(), to_dense(), full_tensor(), resolve_conj()) "
            "and save again.",
        )
        for name, leaf in state.items()
        if isinstance(leaf, Placeholder) and leaf.called and leaf.name.startswith(TENSOR_MAKERS)
    ]
    if problems:
        raise FormatError(problems)


def _refuse_collisions(mapping: dict[str, str], file: Path | None) -> None:
    first: dict[str, str] = {}
    problems = []
    for old, new in mapping.items():
        if first.setdefault(new, old) != old:
            problems.append(
                Problem(
                    "collision",
                    f"{first[new]!r} and {old!r} are both {new!r} once the wrappers' prefixes are removed.",
                    tensor=old,
                    file=str(file) if file is not None else None,
                    found=[first[new], old],
                    wanted="one tensor",
                    hint="Save the state dict of one model alone.",
                )
            )
    if problems:
        raise FormatError(problems)


def _others(around: list[Any], key: str, state: dict[Any, Any]) -> list[str]:
    """What lies beside the state dict on the way to it, and in it without being a tensor."""
    inner = [
        f"{str(name)[:80]} ({_describe(leaf)}) in the state dict"
        for name, leaf in state.items()
        if not isinstance(leaf, TensorSpec) or not isinstance(name, str)
    ]
    taken = {id(x) for x in (*around, state, *state.values())}  # a part of names may be the key: its tensors are taken
    outer = [
        f"{str(name)[:80]} ({_describe(leaf)})"
        for value in around
        for name, leaf in (_items(value) or {}).items()
        if key != str(name) and not key.startswith(f"{name}.") and id(leaf) not in taken
    ]
    listed = inner + outer
    return listed if len(listed) <= 50 else [*listed[:50], f"{len(listed) - 50} more"]


def _describe(leaf: Any) -> str:
    if isinstance(leaf, TensorSpec):
        return f"tensor {list(leaf.shape)}"
    if isinstance(leaf, bool | int | float) or leaf is None:
        return f"{leaf!r}"[:40] if not isinstance(leaf, int) or abs(leaf) < 1 << 64 else "a large number"
    if isinstance(leaf, str):
        return repr(leaf[:40])
    if isinstance(leaf, Placeholder):
        return f"object {leaf.name}"
    if isinstance(leaf, dict | list | tuple):
        return f"{type(leaf).__name__} of {len(leaf)}"
    return type(leaf).__name__
