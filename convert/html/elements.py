"""The pieces of a page: sections with a drawing and its numbers, tables, lists, the notes on what is missing.

Every text that comes from outside is escaped here (:func:`convert.html.text.escape`); what these functions return is
HTML and is not escaped again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from convert.html.figures import HEAT_STEPS
from convert.html.text import escape

#: Rows of a table of numbers; a page that nobody can scroll through helps nobody.
TABLE_ROWS = 400


def section(key: str, heading: str, *, words: str, drawing: str = "", numbers: str = "", more: str = "") -> str:
    """One part of a page: what it is, how to read it, the drawing, and its numbers behind a click.

    Args:
        key: Its id.
        heading: Plain text.
        words: Plain text: what is shown and what to look for.
        drawing: HTML.
        numbers: HTML of the table of the same numbers.
        more: HTML that stays in sight.
    """
    figure = f'<figure class="drawing">{drawing}</figure>' if drawing else ""
    behind = f"<details><summary>{escape(heading)}: the numbers</summary>{numbers}</details>" if numbers else ""
    kind = "" if drawing else ' class="plain"'
    return (
        f'<section id="{key}"{kind} aria-labelledby="{key}-h">'
        f'<div class="words"><h2 id="{key}-h">{escape(heading)}</h2><p>{escape(words, longest=2000)}</p>{more}</div>'
        f"{figure}{behind}</section>"
    )


def left_out(items: Iterable[tuple[str, str]]) -> str:
    """The parts that the page lacks, and why."""
    rows = [f"<li><strong>{escape(what)}</strong>: {escape(why, longest=1000)}</li>" for what, why in items]
    if not rows:
        return ""
    return (
        '<section id="absent" class="plain" aria-labelledby="absent-h"><div class="words">'
        f'<h2 id="absent-h">Not in this report</h2><ul>{"".join(rows)}</ul></div></section>'
    )


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    caption: str,
    words: int = 1,
    most: int = TABLE_ROWS,
    cards: bool = False,
) -> str:
    """A table that scrolls by itself where it is wider than the screen.

    Args:
        head: Titles of the columns.
        rows: Texts, or :class:`Markup`; everything else is turned into text and escaped.
        caption: What it holds.
        words: How many columns, from the left, are text; the others are numbers and stand at the right.
        most: Rows that are shown.
        cards: On a telephone, one row below the other instead of columns; for tables of sentences.
    """
    listed = list(rows)
    cut = f"<p>{len(listed) - most:,} more rows are left out.</p>" if len(listed) > most else ""
    top = "".join(f'<th scope="col"{"" if i < words else " class=n"}>{escape(t)}</th>' for i, t in enumerate(head))
    labels = head if cards else ()
    body = "".join(f"<tr>{_row(row, words, labels)}</tr>" for row in listed[:most])
    kind = ' class="cards"' if cards else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table{kind}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>{cut}"
    )


class Markup(str):
    """A text that is HTML already."""

    __slots__ = ()


def _row(row: Sequence[Any], words: int, labels: Sequence[str]) -> str:
    cells = []
    for i, value in enumerate(row):
        shown = value if isinstance(value, Markup) else escape(value)
        if i == 0:
            cells.append(f'<th scope="row">{shown}</th>')
        else:
            label = f' data-label="{escape(labels[i])}"' if labels and labels[i] else ""
            cells.append(f"<td{label}>{shown}</td>" if i < words else f"<td{label} class=n>{shown}</td>")
    return "".join(cells)


def bullets(texts: Iterable[Any]) -> str:
    """A list of sentences."""
    items = "".join(f"<li>{escape(t, longest=2000)}</li>" for t in texts)
    return f"<ul>{items}</ul>" if items else ""


def chip(step: int) -> Markup:
    """The colour of a cell of the map of tensors, before its number."""
    return Markup(f'<i class="chip heat{step}"></i>')


def heat_key() -> str:
    """What the colours of the map of tensors mean."""
    edges = [f"{s:g}".replace("e-0", "e-").replace("-", "−") for s in HEAT_STEPS]
    labels = ["equal", f"below {edges[0]}", *(f"from {edge}" for edge in edges)]
    items = "".join(f"<li>{chip(i)}{escape(label)}</li>" for i, label in enumerate(labels))
    return f'<ul class="key" aria-label="Relative error of a tensor">{items}</ul>'
