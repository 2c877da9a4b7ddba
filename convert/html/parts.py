"""The parts that several reports share: positions, logits, layers, tensors.

Each takes its piece of ``detail()`` (:mod:`convert.html.verify` says what is in it) and returns id, heading and HTML,
or None where there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from convert.html.elements import Markup, chip, heat_key, section, table
from convert.html.figures import Curve, curves, heat, heat_class, pairs, thinned
from convert.html.text import escape, finite, number, share
from convert.report import fold_names

Part = tuple[str, str, str]
#: Larger maps are shown by their worst rows and columns.
MAP_ROWS, MAP_COLUMNS = 160, 24
#: Tensors of the list of the worst.
WORST = 40
_OUTSIDE = "top"


def positions_part(found: Mapping[str, Any] | None, *, key: str = "positions") -> Part | None:
    """Divergence, position by position, the broken copy's beside it."""
    found = found or {}
    kl = bool(found.get("kl"))
    values, control = (found.get("kl" if kl else "nmse"), found.get("control_kl" if kl else "control_nmse"))
    if not values:
        return None
    measure = "KL divergence in nats" if kl else "NMSE of the logits"
    noise = None if kl else found.get("noise_nmse")
    limit = None if kl else finite(found.get("tolerance"))
    lines = [
        Curve(label, numbers, colour)
        for label, numbers, colour in (
            ("rounding", noise, "noise"),
            ("broken copy (control)", control, "control"),
            ("B", values, "result"),
        )
        if numbers
    ]
    drawing = curves(
        lines,
        name=key,
        title=f"{measure}, position by position",
        description=_told(lines),
        x="position",
        y=measure,
        limit=("tolerance", limit) if limit else None,
    )
    tokens = found.get("tokens") or []
    shown = [k for k in ("kl", "control_kl", "nmse", "control_nmse", "noise_nmse") if found.get(k)]
    names = {
        "kl": "KL of B",
        "control_kl": "KL of the broken copy",
        "nmse": "NMSE of B",
        "control_nmse": "NMSE of the broken copy",
        "noise_nmse": "NMSE of rounding",
    }
    rows = (
        [
            f"{i}: {tokens[i]}" if i < len(tokens) else str(i),
            *(number(found[k][i]) if i < len(found[k]) else "–" for k in shown),
        ]
        for i in range(len(values))
    )
    heading = "Position by position"
    words = (
        "How far the predictions of B lie from those of A at every position. The broken copy shows what a real fault "
        "looks like in this model: B must lie far below it. Zeros are drawn on the lower edge."
    )
    if len(values) > len(thinned(values)):
        words += " Neighbouring positions are joined in the drawing; the largest of each group is shown."
    numbers = table(["position", *(names[k] for k in shown)], rows, caption="By position")
    return key, heading, section(key, heading, words=words, drawing=drawing, numbers=numbers)


def logits_part(found: Mapping[str, Any] | None, *, key: str = "logits") -> Part | None:
    """Logits of B against those of A, and the broken copy's against A's."""
    found = found or {}
    a, b, control = (found.get(k) or [] for k in ("a", "b", "control"))
    if not a or not b:
        return None
    panels = [("logit of B", "result", a, b)]
    if control:
        panels.append(("logit of the broken copy", "control", a, control))
    far = [abs(x - y) for x, y in zip(map(finite, a), map(finite, b), strict=False) if x is not None and y is not None]
    drawing = pairs(
        panels,
        name=key,
        title="Logits of B against logits of A",
        description=f"{len(a)} sampled logits; the farthest lies {number(max(far, default=None))} from the line.",
        x="logit of A",
    )
    head = ["A", "B", *(["broken copy"] if control else [])]
    sampled = range(0, len(a), max(1, len(a) // 200))
    rows = (
        [number(a[i]), number(b[i]) if i < len(b) else "–"] + ([number(control[i])] if i < len(control) else [])
        for i in sampled
    )
    heading = "Logits against logits"
    words = (
        "Every point is one logit, of the same token at the same position. Equal models put all points on the dashed "
        "line; the second panel is the copy that was broken on purpose."
    )
    caption = f"{len(sampled)} of {len(a)} sampled logits"
    return (
        key,
        heading,
        section(key, heading, words=words, drawing=drawing, numbers=table(head, rows, caption=caption, words=0)),
    )


def layers_part(
    found: Sequence[Mapping[str, Any]] | None, departs: Mapping[str, Any] | None, *, key: str = "layers"
) -> Part | None:
    """Where the hidden states of the two part."""
    if not found:
        return None
    columns = [
        ("rounding", "noise", "noise"),
        ("broken copy (control)", "control", "control"),
        ("B", "error", "result"),
    ]
    lines = [
        Curve(label, [step.get(field) for step in found], colour)
        for label, field, colour in columns
        if any(step.get(field) is not None for step in found)
    ]
    if not lines:
        return None
    names = [str(step.get("name", i)) for i, step in enumerate(found)]
    drawing = curves(
        lines,
        name=key,
        title="Departure of the hidden states, layer by layer",
        description=_told(lines, names),
        x="after layer",
        y="NMSE of the hidden states",
        steps=names,
    )
    rows = (
        [n, *(number(step.get(f)) for f in ("error", "noise", "control"))] for n, step in zip(names, found, strict=True)
    )
    heading = "Layer by layer"
    words = "How far the hidden states of B lie from those of A after every layer. "
    if departs:
        words += str(departs.get("words") or f"They part at {departs.get('step')}.")
    else:
        words += "A fault shows as a step up from the line of rounding; without one both lines rise together."
    numbers = table(["after", "B", "rounding", "broken copy"], rows, caption="NMSE by layer")
    return key, heading, section(key, heading, words=words, drawing=drawing, numbers=numbers)


def tensors_part(found: Sequence[Mapping[str, Any]] | None, *, key: str = "tensors") -> Part | None:
    """Which tensors differ, and by how much."""
    if not found:
        return None
    inside = [t for t in found if t.get("row") not in (None, _OUTSIDE) and t.get("column") is not None]
    rows, columns = _kept(inside)
    cells: dict[tuple[str, str], tuple[float | None, str]] = {}
    for tensor in inside:
        place = str(tensor["row"]), str(tensor["column"])
        if (
            place[0] in rows
            and place[1] in columns
            and not (place in cells and _error(tensor) <= (cells[place][0] or 0))
        ):
            cells[place] = (tensor_error(tensor), _tip(tensor))
    drawing = ""
    if cells:
        away = sum(1 for error, _ in cells.values() if error != 0)
        drawing = heat(
            rows,
            columns,
            cells,
            name=key,
            title="Relative error of every tensor",
            description=f"{len(cells)} tensors in {len(rows)} layers; {away} are not equal.",
        )
    worst = sorted((t for t in found if _error(t) > 0), key=_error, reverse=True)
    folded = fold_names(str(t.get("name")) for t in worst)
    same = f"Not equal: {len(worst)} of {len(found)} tensors." if worst else f"All {len(found)} tensors are equal."
    words = (
        f"{same} The colour is the relative error of each tensor, rows of Q and K put into a common order. A fault has "
        "a shape: one kind in all layers, or one layer in all kinds."
    )
    if len({t.get("row") for t in inside}) > len(rows) or len({t.get("column") for t in inside}) > len(columns):
        words += " The map shows the rows and columns with the largest errors only."
    more = heat_key() if cells else ""
    if folded:
        more += "<p>Farthest apart: " + ", ".join(f"<code>{escape(n)}</code>" for n in folded[:8])
        more += f" and {len(folded) - 8} more.</p>" if len(folded) > 8 else ".</p>"
    listing = (worst + [t for t in found if _error(t) == 0])[:WORST]
    numbers = table(
        ["tensor", "what", "relative error", "cosine", "max |Δ|", "changed"],
        (_line(t) for t in listing),
        caption=f"The {len(listing)} farthest of {len(found)} tensors",
        words=2,
    )
    if cells and len(rows) * len(columns) > len(listing):
        grid = (
            [
                row,
                *(
                    Markup(chip(heat_class(cells[row, c][0])) + escape(number(cells[row, c][0])))
                    if (row, c) in cells
                    else ""
                    for c in columns
                ),
            ]
            for row in rows
        )
        numbers += table(["layer", *columns], grid, caption="Relative error, the whole map")
    heading = "Tensor by tensor"
    return key, heading, section(key, heading, words=words, drawing=drawing, numbers=numbers, more=more)


def tensor_error(tensor: Mapping[str, Any]) -> float | None:
    """The relative error that a cell shows: 0 for what is equal, infinite for what has no counterpart."""
    value = tensor.get("error")
    if value is None and tensor.get("relation") in ("equal", "turned"):
        return 0.0
    return value if value is None else float(value)


def _error(tensor: Mapping[str, Any]) -> float:
    """For sorting: what cannot be measured is the worst."""
    value = finite(tensor_error(tensor))
    return float("inf") if value is None else value


def _tip(tensor: Mapping[str, Any]) -> str:
    return f"{tensor.get('row')} {tensor.get('column')}: {number(tensor_error(tensor))}"[:120]


def _line(tensor: Mapping[str, Any]) -> list[Any]:
    error = tensor_error(tensor)
    return [
        tensor.get("name", ""),
        tensor.get("relation", ""),
        Markup(chip(heat_class(error)) + escape(number(error))),
        number(tensor.get("cosine")),
        number(tensor.get("max_abs")),
        share(tensor.get("changed")),
    ]


def _kept(tensors: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Rows and columns in order of appearance; where there are too many, those with the largest errors."""
    out = []
    for field, most in (("row", MAP_ROWS), ("column", MAP_COLUMNS)):
        worst: dict[str, float] = {}
        for tensor in tensors:
            worst[str(tensor[field])] = max(worst.get(str(tensor[field]), 0.0), _error(tensor))
        kept = set(sorted(worst, key=lambda k: -worst[k])[:most])
        out.append([k for k in worst if k in kept])
    return out[0], out[1]


def _told(lines: Sequence[Curve], names: Sequence[str] | None = None) -> str:
    """The extremes of each line, in words."""
    said = []
    for line in reversed(lines):
        values = {i: v for i, w in enumerate(line.values) if (v := finite(w)) is not None}
        if values:
            top = max(values, key=lambda i: values[i])
            where = names[top] if names else f"position {top}"
            said.append(f"{line.label}: at most {number(values[top])}, at {where}")
    return "; ".join(said) + "."
