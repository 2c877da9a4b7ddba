"""Which element type each tensor of a GGUF file gets.

The rules are data (``mappings/quantization.toml``, with their source), read by :mod:`convert.mixture_table`; this
module applies them. It knows roles, conditions and fallbacks and no model; quantising is :mod:`convert.quants`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from convert.dtypes import DTYPES
from convert.errors import Problem, UsageError
from convert.formats.spec import Entry
from convert.mixture_table import Mixture, Tables, tables


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the rules ask about a model.

    Attributes:
        layers: Number of layers.
        gqa: Heads per key/value head.
        experts: Experts per layer; 0 or 1 for a dense model.
    """

    layers: int
    gqa: int = 1
    experts: int = 0


@dataclass(frozen=True, slots=True)
class TypeChoice:
    """The type of one tensor.

    Attributes:
        name: The tensor.
        dtype: The type it gets.
        fallback_from: The type the rules wanted, when its rows do not fit it or it cannot be written here.
        extra_bytes: What that costs: bytes beyond the wanted type's.
        reason: Why, in a few words, when the type is not the base type.
    """

    name: str
    dtype: str
    fallback_from: str | None = None
    extra_bytes: int = 0
    reason: str = ""


def mixture(name: str) -> Mixture:
    """The mixture called ``name`` (any case; ``q4_k`` means ``q4_k_m``).

    Raises:
        UsageError: There is none, or it is refused, with the reason.
    """
    known = tables()
    key = known.aliases.get(name.lower(), name.lower())
    if key in known.mixtures:
        return known.mixtures[key]
    for start, why in known.refused.items():
        if key.startswith(start):
            raise UsageError(Problem("type", f"the type {name} is refused: {why}.", found=name, hint=_list(known)))
    raise UsageError(Problem("type", f"there is no type {name!r}.", found=name, hint=_list(known)))


def _list(known: Tables) -> str:
    return f"Types: {', '.join(known.mixtures)}."


def automatic(dtypes: Mapping[str, int]) -> str:
    """The mixture that ``auto`` means: the 16-bit type that most of the source has, ``f16`` when it has none.

    Args:
        dtypes: Bytes of the source by element type.
    """
    return "bf16" if dtypes.get("BF16", 0) > dtypes.get("F16", 0) else "f16"


def choose_types(
    entries: Sequence[Entry],
    chosen: Mixture,
    facts: ModelFacts,
    *,
    overrides: Sequence[tuple[str, str]] = (),
    wide: str = "F16",
    writable: Collection[str] | None = None,
) -> list[TypeChoice]:
    """The type of every tensor of a GGUF file.

    Args:
        entries: The tensors by their GGUF names, shapes in torch order. Whether the head is tied shows in them.
        chosen: The mixture.
        facts: What the rules ask about the model.
        overrides: ``(pattern, type)`` in order; patterns with ``*``, ``?`` and ``[…]``; the last that fits decides.
        wide: The 16-bit type of what is not quantised but need not be float32.
        writable: Block types that can be written here (:func:`convert.quants.writable_types`); None for all.

    Returns:
        One choice per entry, in order.

    Raises:
        UsageError: An override fits no tensor, names no type, or would quantise a tensor that has to stay float32;
            or the mixture itself cannot be written here. All problems at once.
    """
    known = tables()
    problems: list[Problem] = []
    if writable is not None and DTYPES[chosen.base].is_quantized and chosen.base not in writable:
        message = f"the type {chosen.name} cannot be written: it needs ggml's own library."
        raise UsageError(Problem("type", message, found=chosen.name, hint="Install the extra: quantize."))
    forced = _forced(entries, overrides, known, problems)
    if problems:
        raise UsageError(problems)
    numbers = _numbered(entries, known, facts)
    choices = []
    for entry in entries:
        role, i, n = numbers[entry.name]
        if entry.name in forced:
            wanted, reason = forced[entry.name], "--tensor-type"
        elif _must_be_f32(entry, known):
            wanted, reason = "F32", "always float32"
        elif not DTYPES[chosen.base].is_quantized:
            wanted, reason = chosen.base, ""
        elif _has(entry.name, known.keep_wide):
            wanted, reason = wide, "not quantised"
        else:
            wanted = _by_rules(chosen, role, {"i": i, "n": n, **_values(facts)})
            reason = f"the rule for {role}" if wanted != chosen.base else ""
        choices.append(_fitted(entry, wanted, reason, known, writable))
    return choices


def _values(facts: ModelFacts) -> dict[str, int]:
    return {"layers": facts.layers, "experts": facts.experts, "gqa": facts.gqa}


def _has(name: str, parts: Sequence[str]) -> bool:
    return any(part in name for part in parts)


def _must_be_f32(entry: Entry, known: Tables) -> bool:
    # ggml counts dimensions without the trailing ones of its order: a single row is a vector.
    dims = len(entry.shape)
    while dims and entry.shape[len(entry.shape) - dims] == 1:
        dims -= 1
    return dims < 2 or not entry.name.endswith(".weight") or _has(entry.name, known.keep_f32)


def _numbered(entries: Sequence[Entry], known: Tables, facts: ModelFacts) -> dict[str, tuple[str | None, int, int]]:
    """Every tensor's role, its number within the role, and the number of such tensors.

    Counted layer by layer, not as the file has them: llama.cpp sorts the tensors so before it counts.
    """
    tied = not any(entry.name == "output.weight" for entry in entries)
    roles: dict[str, str | None] = {}
    for entry in entries:
        role = next((r.name for r in known.roles if r.fits(entry.name)), None)
        roles[entry.name] = "output" if role == "embedding" and tied else role
    totals: dict[str | None, int] = {}
    found: dict[str, tuple[str | None, int, int]] = {}
    for name in sorted(roles, key=lambda name: (_layer(name), name)):
        role = roles[name]
        number = totals.get(role, 0)
        totals[role] = number + 1
        in_experts = role == "ffn_down" and facts.experts > 1
        found[name] = (role, _layer(name) if in_experts else number, 0)
    counts = totals | {"ffn_down": facts.layers}
    return {name: (role, i, counts[role]) for name, (role, i, _) in found.items()}


def _layer(name: str) -> int:
    parts = name.split(".", 2)
    return int(parts[1]) if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() else -1


def _by_rules(chosen: Mixture, role: str | None, values: Mapping[str, int]) -> str:
    wanted = chosen.base
    for rule in chosen.rules:
        fits = rule.role == role and (not rule.only or wanted in rule.only)
        if fits and (rule.when is None or rule.when.evaluate(values.__getitem__)):
            wanted = rule.type
    return wanted


def _fitted(entry: Entry, wanted: str, reason: str, known: Tables, writable: Collection[str] | None) -> TypeChoice:
    """The wanted type, or the first of its fallbacks that fits the rows and can be written."""
    found = wanted
    row = entry.shape[-1] if entry.shape else 1
    while DTYPES[found].is_quantized and (
        row % DTYPES[found].block or (writable is not None and found not in writable)
    ):
        found = known.fallback.get(found, "F16")
    if found == wanted:
        return TypeChoice(entry.name, wanted, reason=reason)
    kind = DTYPES[wanted]
    if row % kind.block:
        why = f"rows of {row} are not a multiple of {kind.block}"
    else:
        why = f"{wanted} needs the extra `quantize`"
    elements = Entry(entry.name, "I8", entry.shape).nbytes
    extra = Entry(entry.name, found, entry.shape).nbytes - elements * kind.block_bytes // kind.block
    return TypeChoice(entry.name, found, wanted, extra, why)


def _forced(
    entries: Sequence[Entry], overrides: Sequence[tuple[str, str]], known: Tables, problems: list[Problem]
) -> dict[str, str]:
    forced: dict[str, str] = {}
    for pattern, text in overrides:
        name = text.upper()
        what = f"--tensor-type {pattern}={text}"
        if not (name in DTYPES and (DTYPES[name].is_quantized or name in ("F32", "F16", "BF16"))):
            problems.append(Problem("type", f"{what}: {text!r} is not a tensor type.", found=text))
            continue
        refusal = next((why for start, why in known.refused.items() if text.lower().startswith(start)), None)
        if refusal is not None:
            problems.append(Problem("type", f"{what} is refused: {refusal}.", found=text))
            continue
        matched = [entry for entry in entries if fnmatchcase(entry.name, pattern)]
        if not matched:
            hint = "Patterns are matched against whole GGUF names: 'blk.*.ffn_down.weight'."
            problems.append(Problem("pattern", f"{what} fits no tensor.", found=pattern, hint=hint))
        for entry in matched:
            if DTYPES[name].is_quantized and _must_be_f32(entry, known):
                message = (
                    f"{what}: {entry.name!r} has to stay a plain type; llama.cpp does not compute with it in blocks."
                )
                problems.append(Problem("type", message, tensor=entry.name, found=text, wanted="F32"))
            else:
                forced[entry.name] = name
    return forced
