"""What a plan decided about the model, in words and numbers: order of Q and K, tie, types, what is dropped or filled.

Shown by ``--dry-run``, kept in the record and, in short, inside the files (:mod:`convert.record`). Nothing is decided
here; :mod:`convert.plan` does that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from convert.dtypes import DTYPES
from convert.report import fold_names
from convert.source import Source

if TYPE_CHECKING:
    from convert.layout import Slot
    from convert.mixtures import TypeChoice
    from convert.plan import ConversionPlan


def decisions(
    plan: ConversionPlan,
    chosen: Iterable[tuple[Slot, Source, str]],
    *,
    omitted: Sequence[str] = (),
    substituted: Iterable[TypeChoice] = (),
) -> dict[str, Any]:
    """The decisions as plain data; equal plans give equal ones.

    Args:
        plan: The plan so far.
        chosen: Every tensor that is written: its slot, its source and the canonical type that it gets.
        omitted: Tensors that the target does not store, because another one stands for them.
        substituted: Tensors whose type had to be another one than the one asked for.

    Returns:
        ``qk_layout`` (``from``, ``to``, ``tensors`` moved), ``tied``, ``head``, ``dtypes`` (changes: ``from``, ``to``,
        ``tensors``, ``bytes`` written), ``substituted``, ``dropped`` and ``padded``; what did not occur is absent.
    """
    tensors = [*chosen]
    out: dict[str, Any] = {}
    if plan.table.has_rope:
        out["qk_layout"] = _order(plan, tensors)
    out["tied"] = plan.tied
    head = _head(plan, tensors, omitted)
    if head:
        out["head"] = head
    out["dtypes"] = _changes(tensors)
    out["substituted"] = _substituted(substituted)
    out["dropped"] = _dropped(plan, omitted)
    out["padded"] = _padded(plan)
    return {key: value for key, value in out.items() if value != []}


def lines(found: Mapping[str, Any]) -> list[str]:
    """The decisions as short sentences; takes what a record holds, whatever that is."""
    out = []
    order = _mapping(found.get("qk_layout"))
    if order:
        moved = f", {order['tensors']} tensors moved" if order.get("tensors") else ""
        same = order.get("from") == order.get("to")
        out.append(
            f"rows of Q and K: {order.get('to')} order"
            + (", as in the source" if same else f" from {order.get('from')} order{moved}")
        )
    if "tied" in found:
        head = f"; the head is {found['head']}" if found.get("head") else ""
        out.append(f"head and embedding: {'one' if found['tied'] else 'two'}{head}")
    for item in _mappings(found.get("dtypes")):
        number = item.get("tensors")
        out.append(f"type: {item.get('from')} → {item.get('to')}, {number} tensor{'' if number == 1 else 's'}")
    for item in _mappings(found.get("substituted")):
        out.append(f"type: {item.get('to')} in place of {item.get('from')}: {_some(item)} ({item.get('reason')})")
    for item in _mappings(found.get("dropped")):
        out.append(f"not carried over: {_some(item)} ({item.get('reason')})")
    for item in _mappings(found.get("padded")):
        out.append(f"filled: {item.get('count')} {item.get('what')}")
    return out


def _some(item: Mapping[str, Any]) -> str:
    names = item.get("tensors")
    names = [str(n) for n in names] if isinstance(names, list) else [str(names)]
    return ", ".join(names[:6]) + (" …" if len(names) > 6 else "")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _order(plan: ConversionPlan, tensors: Sequence[tuple[Slot, Source, str]]) -> dict[str, Any]:
    to = plan.table.convention_of(plan.request.target, "rope")
    turned = [key for slot, _, _ in tensors for key in slot.keys if plan.table.rows[key[0]].rope is not None]
    return {"from": plan.source.pairing, "to": to, "tensors": len(turned) if to != plan.source.pairing else 0}


def _head(plan: ConversionPlan, tensors: Sequence[tuple[Slot, Source, str]], omitted: Sequence[str]) -> str | None:
    heads = [slot for slot, _, _ in tensors if any(plan.table.rows[key[0]].tied_to for key in slot.keys)]
    if heads:
        return "stored, equal to the embedding" if plan.tied else "stored"
    return "not stored: the embedding stands for it" if omitted else None


def _changes(tensors: Sequence[tuple[Slot, Source, str]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], list[int]] = {}
    for slot, source, to in tensors:
        stored = "+".join(sorted(set(stored_types(source))))
        if stored and stored != to:
            counts = found.setdefault((stored, to), [0, 0])
            counts[0] += 1
            counts[1] += DTYPES[to].nbytes(slot.shape)
    return [{"from": a, "to": b, "tensors": n, "bytes": size} for (a, b), (n, size) in found.items()]


def stored_types(source: Source) -> Iterator[str]:
    """Canonical types of the stored tensors that a composed source reads."""
    inner = getattr(source, "source", None)
    parts = [inner] if isinstance(inner, Source) else list(getattr(source, "parts", ()))
    if parts:
        for part in parts:
            yield from stored_types(part)
    elif hasattr(source, "spec"):
        yield source.spec.dtype
    elif hasattr(source, "codes"):  # FP8
        yield source.codes.dtype
    elif not hasattr(source, "values"):  # computed values are stored nowhere
        yield source.dtype


def _substituted(choices: Iterable[TypeChoice]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, str], list[TypeChoice]] = {}
    for choice in choices:
        groups.setdefault((str(choice.fallback_from), choice.dtype, choice.reason), []).append(choice)
    return [
        {
            "from": wanted,
            "to": given,
            "reason": reason,
            "tensors": fold_names(c.name for c in group),
            "bytes": sum(c.extra_bytes for c in group),
        }
        for (wanted, given, reason), group in groups.items()
    ]


def _dropped(plan: ConversionPlan, omitted: Sequence[str]) -> list[dict[str, Any]]:
    """Tensors of the source that the output has no copy of, with the reason, and how many."""
    reasons: dict[str, list[str]] = {}
    for name, reason in plan.source.match.ignored:
        reasons.setdefault(reason, []).append(name)
    stored = [name for name in omitted if _stores_head(plan)]
    if stored:
        reasons["equal to the embedding, which the target's loader takes for the head"] = stored
    return [{"tensors": fold_names(names), "count": len(names), "reason": r} for r, names in reasons.items()]


def _stores_head(plan: ConversionPlan) -> bool:
    pair = plan.source.match.tied_pair()
    specs = plan.source.match.specs
    return pair is not None and pair[0] in specs and specs[pair[0]] != specs.get(pair[1])


def _padded(plan: ConversionPlan) -> list[dict[str, Any]]:
    """Tokens that fill a GGUF file's list up to the rows of the embedding."""
    value = (plan.tokenizer_keys or {}).get("tokenizer.ggml.tokens")
    tokens = [] if value is None else value.value
    from convert.tokenizer.tokenizer import padding_token

    count = 0
    while count < len(tokens) and tokens[len(tokens) - 1 - count].rstrip("_") == padding_token(len(tokens) - 1 - count):
        count += 1
    return [{"what": "unused tokens, up to the rows of the embedding", "count": count}] if count else []
