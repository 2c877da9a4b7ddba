"""The frame of a report: head, verdict, contents, sections, the raw result; one file that asks nothing of anybody.

The page holds no script and no address, and its own policy forbids both: everything but the one style sheet, which is
named by its hash, is blocked.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from convert import __version__
from convert.html.elements import left_out
from convert.html.style import style_sheet
from convert.html.text import escape

#: How a report begins; what begins otherwise is not ours and is not replaced.
MARK = "<!doctype html>\n<!-- report of convert -->\n"
#: Characters of the raw result that are shown.
RAW = 200_000


@dataclass(slots=True)
class Page:
    """What a page says.

    Attributes:
        command: ``verify``, ``diagnose``, ``diff``.
        tone: ``good``, ``bad``, ``unsure``: the colour of the verdict.
        verdict: The verdict in a few words.
        lead: And in a sentence.
        sides: Name of each side and what is known of it.
        sections: Id, heading and HTML of each part, in order.
        absent: What is left out, and why.
        raw: The documented result.
    """

    command: str
    tone: str
    verdict: str
    lead: str
    sides: list[tuple[str, str]] = field(default_factory=list)
    sections: list[tuple[str, str, str]] = field(default_factory=list)
    absent: list[tuple[str, str]] = field(default_factory=list)
    raw: Mapping[str, Any] = field(default_factory=dict)

    def render(self) -> str:
        """The whole file."""
        style = style_sheet()
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
        title = f"convert {self.command}: {self.verdict}"
        return (
            f'{MARK}<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
            f'<meta name="generator" content="convert {escape(__version__)}"><title>{escape(title)}</title>'
            f'<style>{style}</style></head>\n<body class="{self.tone}">\n{self._head()}\n<main>\n'
            + "\n".join(html for _, _, html in self.sections)
            + f"\n{left_out(self.absent)}\n{self._raw()}\n</main>\n"
            f"<footer>Written by convert {escape(__version__)}. The file stands alone: it loads nothing and runs "
            "nothing.</footer>\n</body></html>\n"
        )

    def _head(self) -> str:
        sides = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text, longest=1000)}</dd>" for name, text in self.sides)
        links = "".join(f'<li><a href="#{key}">{escape(heading)}</a></li>' for key, heading, _ in self.sections)
        contents = f'<nav aria-label="Contents"><ul>{links}</ul></nav>' if len(self.sections) > 2 else ""
        lead = self.lead[:1].upper() + self.lead[1:]
        return (
            f'<header><div class="band"><p class="eyebrow">convert {escape(self.command)}</p>'
            f'<h1>{escape(self.verdict)}</h1><p class="lead">{escape(lead, longest=3000)}</p>'
            f"{f'<dl>{sides}</dl>' if sides else ''}</div>{contents}</header>"
        )

    def _raw(self) -> str:
        text = json.dumps(self.raw, indent=2, ensure_ascii=False, default=str)
        lines = "\n".join(escape(line, longest=2000) for line in text[:RAW].split("\n"))
        cut = f"\n… {len(text) - RAW:,} more characters" if len(text) > RAW else ""
        return (
            '<section id="raw" class="plain"><details><summary>The result as JSON</summary>'
            f'<div class="scroll" tabindex="0" role="region" aria-label="JSON"><pre>{lines}{cut}</pre></div>'
            "</details></section>"
        )


def side_texts(sides: Mapping[str, Any] | None, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """What is known of each side, in a line."""
    out = []
    for key, name in names.items():
        side = (sides or {}).get(key)
        if not side:
            continue
        types = ", ".join(f"{count} {dtype}" for dtype, count in (side.get("dtypes") or {}).items())
        known = [str(side[k]) for k in ("path", "family", "layout") if side.get(k)]
        out.append((name, "  ·  ".join([*known, *([f"tensors: {types}"] if types else [])])))
    return out


def reason(detail: Mapping[str, Any], key: str, otherwise: str) -> str:
    """Why a part is missing: what the result says, or the general sentence."""
    return str((detail.get("absent") or {}).get(key) or otherwise)


def listed(value: Any) -> Sequence[Any]:
    """A list as it is; nothing for None; one thing as a list of it."""
    if value is None:
        return ()
    return list(value) if isinstance(value, (list, tuple)) else [value]
