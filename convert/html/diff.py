"""The page of a difference.

Reads of ``as_json()`` (schema ``convert.diff/1``): ``verdict`` (``equal``, ``close``, ``different``), ``message``,
``hints``, ``missing`` and ``extra`` (lists of names: in A only, in B only), ``shapes`` and ``dtypes`` (lists of
``name``, ``a``, ``b``), ``config`` and ``tokenizer`` (lists of ``key``, ``a``, ``b``, ``weighs``, ``note``),
``counts`` (relation → number of tensors), ``tolerance``.

Reads of ``detail()``, every key optional::

    {
      "sides":   {"a": {"path": str, "layout": str, "family": str, "dtypes": {…}}, "b": {…}},
      "tensors": [{"name": str, "row": "layer 3" | "top", "column": "att.W_query",
                   "relation": "equal" | "turned" | "close" | "reordered" | "different" | "shape" | "only_a" | "only_b",
                   "error": float | None, "cosine": float | None, "max_abs": float | None, "changed": float | None}],
      "control": {"name": str, "error": float},    # what a planted fault would look like in the same measure
      "absent":  {"tensors": "why", …},
    }
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from convert.html.elements import bullets, section, table
from convert.html.page import Page, listed, reason, side_texts
from convert.html.parts import Part, tensors_part
from convert.html.text import number, plain
from convert.report import fold_names

#: Said of what makes no other model.
_IDLE = "not of weight"
VERDICTS = {
    "equal": ("good", "Equal"),
    "close": ("good", "Equal within tolerance"),
    "different": ("bad", "Different"),
}


def diff_page(value: Mapping[str, Any], detail: Mapping[str, Any]) -> Page:
    """The page of a ``diff`` result, from its ``as_json()`` and ``detail()``."""
    verdict = str(value.get("verdict"))
    tone, headline = VERDICTS.get(verdict, ("unsure", verdict))
    page = Page("diff", tone, headline, str(value.get("message") or ""), raw=value)
    page.sides = side_texts(detail.get("sides"), {"a": "A", "b": "B"})
    page.sections.append(_summary(value, detail))
    tensors = tensors_part(detail.get("tensors"))
    if tensors is not None:
        page.sections.append(tensors)
    else:
        page.absent.append(("Tensor by tensor", reason(detail, "tensors", "no values were compared")))
    for key, heading, words in (
        ("missing", "In A only", "Tensors that B lacks."),
        ("extra", "In B only", "Tensors that A lacks."),
    ):
        names = [str(n.get("name", n)) if isinstance(n, Mapping) else str(n) for n in listed(value.get(key))]
        if names:
            page.sections.append((key, heading, section(key, heading, words=words, more=bullets(fold_names(names)))))
    for key, heading, words in (
        ("shapes", "Other shapes", "The same tensor, in another shape."),
        ("dtypes", "Other types", "The same tensor, stored in another type."),
        ("config", "Config", "Quantities that the two configs state differently."),
        ("tokenizer", "Tokenizer", "What differs between the two tokenizers."),
        ("record", "Record", "What the records of the two conversions say differently; it never weighs."),
    ):
        part = _two_sides(key, heading, words, listed(value.get(key)))
        if part:
            page.sections.append(part)
    return page


def _summary(value: Mapping[str, Any], detail: Mapping[str, Any]) -> Part:
    counts = value.get("counts") or {}
    rows = [[str(k).replace("_", " "), number(v)] for k, v in counts.items() if v]
    control = detail.get("control")
    words = "How many tensors stand in which relation."
    if control:
        words += f" For comparison: {control.get('name')} would show as {number(control.get('error'))}."
    if value.get("tolerance") is not None:
        limit = value["tolerance"]
        said = [f"{k} {number(v)}" for k, v in limit.items()] if isinstance(limit, Mapping) else [number(limit)]
        words += f" Tolerance: {', '.join(said)}."
    html = table(["relation", "tensors"], rows, caption="Tensors") if rows else ""
    html += bullets(listed(value.get("hints")))
    return "summary", "In short", section("summary", "In short", words=words, more=html)


def _two_sides(key: str, heading: str, words: str, items: Sequence[Any]) -> Part | None:
    rows = []
    for item in items:
        if isinstance(item, Mapping):
            name = item.get("name", item.get("key", item.get("tensor", "")))
            idle = _IDLE if item.get("weighs") is False else ""
            rows.append([name, _said(item.get("a")), _said(item.get("b")), item.get("note") or idle])
        else:
            rows.append([item, "", "", ""])
    if not rows:
        return None
    if all(row[3] == _IDLE for row in rows):
        rows = [[*row[:3], ""] for row in rows]
    noted = any(row[3] for row in rows)
    head = ["", "A", "B", "note"] if noted else ["", "A", "B"]
    html = table(head, [row[: len(head)] for row in rows], caption=heading, words=4, cards=True)
    if key == "record":  # long, and of little weight
        return key, heading, section(key, heading, words=words, numbers=html)
    return key, heading, section(key, heading, words=words, more=html)


def _said(value: Any) -> str:
    if isinstance(value, (Mapping, list, tuple)):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return "absent" if value is None else plain(value, longest=200)
