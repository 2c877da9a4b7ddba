"""The page of a verification.

Reads of ``as_json()`` (schema ``convert.verify/1``): ``verdict``, ``message``, ``hints``, ``device``, ``dtype``,
``n_tokens``, ``max_abs``, ``nmse``, ``kl_mean``, ``kl_max``, ``top1``, ``first_diff_position``, ``tolerance``,
``noise``, ``prompts`` (per prompt ``label``, ``within``, ``n_tokens`` and the same figures), ``control`` (None, or
``name``, ``seen`` and the same five figures), ``engine``; unknown keys appear in the raw result only.

Reads of ``detail()``, every key optional::

    {
      "sides":     {"a": {"path": str, "layout": str, "family": str, "dtypes": {"BF16": 290}}, "b": {…}},
      "positions": {"kl": [float], "control_kl": [float],         # nats, one per position
                    "nmse": [float], "control_nmse": [float], "noise_nmse": [float],
                    "tolerance": float,                           # NMSE of one position
                    "tokens": [str]},                             # the text of each position, where there is one
      "logits":    {"a": [float], "b": [float], "control": [float]},   # the same sampled (position, token) pairs
      "layers":    [{"name": "embed" | "layer 0" | … | "logits",
                     "error": float,                              # NMSE of B's hidden states from A's after this step
                     "noise": float | None,                       # … of legitimate rounding
                     "control": float | None}],                   # … of the broken copy
      "departs":   {"step": "layer 3", "words": str} | None,      # where the hidden states first part
      "tensors":   [{"name": str,                                 # the reference name, whole
                     "row": "layer 3" | "top", "column": "att.W_query",
                     "relation": "equal" | "turned" | "close" | "reordered" | "different" | "only_a" | "only_b",
                     "error": float | None,                       # ||a - b|| / ||a||, in the common layout
                     "cosine": float | None, "max_abs": float | None, "changed": float | None}],  # changed: share 0..1
      "absent":    {"layers": "why there are none", …},
    }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from convert.html.elements import bullets, section, table
from convert.html.page import Page, listed, reason, side_texts
from convert.html.parts import layers_part, logits_part, positions_part, tensors_part
from convert.html.text import number, share

#: Label and key of each figure of a comparison.
FIGURES = (
    ("max |Δ| of the logits", "max_abs"),
    ("NMSE", "nmse"),
    ("KL mean, nats", "kl_mean"),
    ("KL max, nats", "kl_max"),
    ("same likeliest token", "top1"),
)
VERDICTS = {
    "pass": ("good", "Pass: the same model"),
    "fail": ("bad", "Fail: different models"),
    "weak": ("unsure", "Weak: this check could not have seen a fault"),
}
#: Part of detail() → heading, and why it is usually missing.
PARTS = {
    "positions": ("Position by position", "this run kept no figures of single positions"),
    "logits": ("Logits against logits", "this run kept no logits"),
    "layers": ("Layer by layer", "the models ran whole; --layerwise measures every layer"),
    "tensors": ("Tensor by tensor", "the tensors were not compared; convert diff does it"),
}


def verify_page(value: Mapping[str, Any], detail: Mapping[str, Any]) -> Page:
    """The page of a ``verify`` result, from its ``as_json()`` and ``detail()``."""
    verdict = str(value.get("verdict"))
    tone, headline = VERDICTS.get(verdict, ("unsure", verdict))
    page = Page("verify", tone, headline, str(value.get("message") or ""), raw=value)
    page.sides = side_texts(detail.get("sides"), {"a": "A", "b": "B"})
    where = f"on {value.get('device')}, in {value.get('dtype')}, over {value.get('n_tokens')} tokens"
    engine = f", A in {value['engine']}" if value.get("engine") else ""
    if value.get("device"):
        page.sides.append(("run", where + engine))
    page.sections.append(_figures(value))
    if value.get("prompts"):
        page.sections.append(_prompts(listed(value["prompts"])))
    add_parts(page, detail)
    return page


def add_parts(page: Page, detail: Mapping[str, Any], *, prefix: str = "") -> None:
    """The parts of a comparison that there is something to show of; the others are named, with the reason."""
    made = {
        "positions": positions_part(detail.get("positions"), key=prefix + "positions"),
        "logits": logits_part(detail.get("logits"), key=prefix + "logits"),
        "layers": layers_part(detail.get("layers"), detail.get("departs"), key=prefix + "layers"),
        "tensors": tensors_part(detail.get("tensors"), key=prefix + "tensors"),
    }
    for key, part in made.items():
        if part is not None:
            page.sections.append(part)
        else:
            page.absent.append((PARTS[key][0], reason(detail, key, PARTS[key][1])))


def _figures(value: Mapping[str, Any]) -> tuple[str, str, str]:
    """The figures, the control's beside the result's, and what they are judged by."""
    control = value.get("control") or {}
    rows = [
        [label, *((share if key == "top1" else number)(side.get(key)) for side in (value, control))]
        for label, key in FIGURES
    ]
    first = value.get("first_diff_position")
    rows.append(
        [
            "first differing position",
            "none" if first is None else str(first),
            number(control.get("first_diff_position")),
        ]
    )
    judged = [
        ["rounding of this model (NMSE)", number(value.get("noise"))],
        ["tolerance that follows (NMSE)", number(value.get("tolerance"))],
        ["broken copy (NMSE)", number(control.get("nmse"))],
    ]
    if value.get("tolerance_abs") is not None:
        judged.append(["tolerance (max |Δ|)", number(value["tolerance_abs"])])
    head = ["", "A against B", "broken copy"]
    html = (
        f'<div class="side">{table(head, rows, caption="The result, and the control beside it")}'
        f"{table(['', 'value'], judged, caption='What it is judged by')}</div>"
    )
    words = _about_control(value.get("control"), failed=value.get("verdict") == "fail")
    heading = "The figures"
    return "figures", heading, section("figures", heading, words=words, more=html + bullets(listed(value.get("hints"))))


def _prompts(prompts: Sequence[Any]) -> tuple[str, str, str]:
    rows = [
        [
            p.get("label") or "",
            "yes" if p.get("within") else "no",
            *(number(p.get(key)) for key in ("n_tokens", "nmse", "tolerance", "kl_mean", "kl_max")),
            share(p.get("top1")),
            "none" if p.get("first_diff_position") is None else str(p["first_diff_position"]),
        ]
        for p in prompts
        if isinstance(p, Mapping)
    ]
    head = ["prompt", "within", "tokens", "NMSE", "tolerance", "KL mean", "KL max", "same token", "first difference"]
    html = table(head, rows, caption="By prompt", words=2)
    words = "Every prompt is judged by what rounding does on it."
    return "prompts", "Prompt by prompt", section("prompts", "Prompt by prompt", words=words, more=html)


def _about_control(control: Mapping[str, Any] | None, *, failed: bool) -> str:
    if not control:
        return "This model has no control: no fault could be planted that shows what the check can see."
    seen = "It stands out, so the check can see such a fault."
    if not control.get("seen"):
        seen = "It lies no farther from A than B does." if failed else "It does not stand out."
    return f"The broken copy is A run with a known fault ({control.get('name')}). {seen}"
