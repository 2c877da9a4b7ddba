"""Mapping tables in words: what ``convert tables`` and ``convert families`` show. Reads no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from convert import config as configs
from convert.layout import Dims, Slot, expand
from convert.report import fold_names
from convert.table import CONVENTIONS, MappingTable, TensorRow

#: What a convention's values say.
MEANINGS = {
    "half": "rotary pairs (i, i + d/2)",
    "interleaved": "rotary pairs (2i, 2i + 1)",
    "plain": "the norm multiplies by w",
    "zero_centered": "the norm multiplies by 1 + w",
    "out_in": "matrices are [out, in]",
    "in_out": "matrices are [in, out]",
}


def story(table: MappingTable, layouts: tuple[str, ...] | None = None) -> Iterator[str]:
    """The table's rows, one tensor's story after the other.

    Args:
        table: A family's table, or one with a names file applied.
        layouts: Which columns; all when None.
    """
    shown = [x for x in table.layouts if layouts is None or x in layouts]
    yield f"{table.family}: {table.title}"
    yield ""
    yield "  conventions"
    for layout in shown:
        said = [MEANINGS[table.convention_of(layout, kind)] for kind in _stated(table)]
        yield f"    {layout:8} {'; '.join(said)}"
    yield ""
    yield "  dims     " + ", ".join(f"{k} = {' | '.join(e.text for e in v)}" for k, v in table.dims.items())
    for row in table.rows.values():
        yield ""
        yield f"  {row.id}  [{', '.join(e.text for e in row.shape)}]{_remarks(table, row)}"
        for layout in shown:
            name = row.names.get(layout)
            prefix = table.prefix.get(layout, "") if row.in_block else ""
            shown_names = [prefix + name] if name else []
            for fused in (f for f in table.fused if f.layout == layout and row.id in f.parts):
                part = f"part {fused.parts.index(row.id) + 1} of {len(fused.parts)} along axis {fused.axis}"
                told = prefix + fused.name + (f", {part}" if len(fused.parts) > 1 else "")
                shown_names = [*shown_names, told] if fused.alternative else [told]
            yield f"    {layout:8} {', or '.join(shown_names) or '–'}"
    for layout in shown:
        for rule in (r for r in table.ignore if r.layout == layout):
            yield ""
            yield f"  dropped from {layout}: {rule.name} ({rule.reason})"


def _stated(table: MappingTable) -> list[str]:
    """Kinds of convention that matter for this table: those a layout states."""
    return [kind for kind in CONVENTIONS if any(kind in c for c in table.convention.values())]


def _remarks(table: MappingTable, row: TensorRow) -> str:
    parts = []
    if row.when:
        parts.append("only if " + " and ".join(e.text for e in row.when))
    if row.rope is not None:
        orders = {table.convention_of(x, "rope") for x in row.names}
        what = "reordered between layouts" if len(orders) > 1 else "in the same order everywhere"
        part = f", the first {row.rotary.text} of each" if row.rotary is not None else ""
        parts.append(f"rows are rotary pairs of {row.rope.text} heads{part}, {what}")
    if row.tied_to:
        parts.append(f"equal to {row.tied_to} in a tied model")
    return "".join(f"; {p}" for p in parts)


def expansion(table: MappingTable, layout: str, size: str) -> dict[str, Slot]:
    """Every tensor of a published size in a layout.

    Raises:
        UsageError: The family has no such size.
    """
    return expand(table, Dims(table, configs.published(table, size)), layout)


def slot_lines(slots: dict[str, Slot]) -> Iterator[str]:
    """Name and shape per line."""
    wide = max((len(n) for n in slots), default=0)
    for slot in slots.values():
        yield f"{slot.name.ljust(wide)}  {list(slot.shape)}"


def family(table: MappingTable) -> dict[str, Any]:
    """What there is to know about a family, for people and for ``--json``."""
    tied = [s for s, v in table.sizes.items() if v.get("tie_word_embeddings")]
    head = next((r for r in table.rows.values() if r.tied_to), None)
    refuse = [r for r in table.refuse if r.layout in table.layouts]  # what is inherited may speak of other layouts
    return {
        "family": table.family,
        "title": table.title,
        "layouts": list(table.layouts),
        "model_types": list(table.model_types),
        "gguf_arch": table.gguf_arch if "gguf" in table.layouts else None,
        "reference": table.reference,
        "sizes": list(table.sizes),
        "tied_sizes": tied,
        "can_be_tied": head is not None,
        "classes": list(table.classes),
        "conventions": {x: {k: table.convention_of(x, k) for k in _stated(table)} for x in table.layouts},
        "optional": fold_names(r.id for r in table.rows.values() if r.when),
        "refused": [
            f"{r.layout}{f' ({r.book_class})' if r.book_class else ''}: {r.reason}" for r in refuse if not r.note
        ],
        "remarks": [f"{r.layout}: {r.reason}" for r in refuse if r.note],
    }


def family_lines(said: dict[str, Any]) -> list[tuple[str, str]]:
    """:func:`family` as pairs of a word and what there is to say."""
    orders = {layout: MEANINGS[c["rope"]] for layout, c in said["conventions"].items() if "rope" in c}
    tying = (
        "no"
        if not said["can_be_tied"]
        else f"decided from the tensors; published tied: {', '.join(said['tied_sizes']) or 'none'}"
    )
    return [
        ("layouts", ", ".join(said["layouts"])),
        ("model_type", ", ".join(said["model_types"])),
        ("GGUF arch", str(said["gguf_arch"] or "–")),
        ("reference", str(said["reference"] or "none: verify cannot run this family")),
        ("book classes", ", ".join(said["classes"]) or "–"),
        ("sizes", ", ".join(said["sizes"]) or "–"),
        ("tied head", tying),
        ("Q, K rows", "; ".join(f"{k}: {v}" for k, v in orders.items()) or "–"),
        ("optional", ", ".join(said["optional"]) or "–"),
        *(("refused", text) for text in said["refused"]),
        *(("remark", text) for text in said["remarks"]),
    ]
