"""The page of a diagnosis.

Reads of ``as_json()`` (schema ``convert.diagnose/1``): ``verdict`` (``good``, ``broken``, ``undecided``), ``message``,
``hints``, ``causes`` (a list of ``fault``, ``words``, ``confidence``, ``evidence`` (str or list of str), ``loss``,
``fix`` (the whole command or None)), ``probe`` (:meth:`convert.qk_probe.Probe.as_json`), ``findings`` (odd tensors, as
:meth:`convert.errors.Problem.as_json` gives them; also read from ``tensors``).

Reads of ``detail()``, every key optional::

    {
      "baseline":   {"loss": float, "low": float, "high": float,  # nats per token; low and high: bootstrap, 95 %
                     "tokens": int},
      "hypotheses": [{"name": "qk-permuted", "words": str,        # what is supposed to be wrong
                      "loss": float | None, "low": float, "high": float,
                      "gain": float,                              # baseline loss minus loss, the paired mean
                      "gain_low": float, "gain_high": float,      # its bootstrap interval
                      "tokens": int,                              # length of the text (losses compare within one)
                      "baseline": float,                          # the baseline's loss on that same text
                      "fix": "unpermute-qk" | None,
                      "explains": bool,                           # whether the verdict names it
                      "skipped": str | None}],                    # why it was not run
      "margin":     float,                                        # what a gain must exceed
      "control":    {"name": str, "loss": float},                 # broken on purpose: what a fault costs
      "probe":      [{"row": "layer 0", "half": float, "interleaved": float}],   # h/r and i/r, Q and K joined
      "against":    {"positions": …, "logits": …, "layers": …, "departs": …, "tensors": …},  # as in convert.html.verify
      "tensors":    […],                                          # as in convert.html.verify (odd ones are enough)
      "sides":      {"a": {…}, "b": {…}},                         # a: the model; b: the good copy, with --against
      "absent":     {"hypotheses": "only the probe was asked for", …},
    }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from convert.html.elements import bullets, section, table
from convert.html.figures import Curve, Loss, curves, losses
from convert.html.page import Page, listed, reason, side_texts
from convert.html.parts import Part, tensors_part
from convert.html.text import escape, finite, number
from convert.html.verify import add_parts

VERDICTS = {
    "good": ("good", "Good: nothing is wrong that this can see"),
    "broken": ("bad", "Broken"),
    "undecided": ("unsure", "Undecided"),
}
#: Hypotheses of one drawing; the table has all of them.
DRAWN = 16
_ROWS = {"q": "Q", "k": "K", "both": "both"}


def diagnose_page(value: Mapping[str, Any], detail: Mapping[str, Any]) -> Page:
    """The page of a ``diagnose`` result, from its ``as_json()`` and ``detail()``."""
    verdict = str(value.get("verdict"))
    tone, headline = VERDICTS.get(verdict, ("unsure", verdict))
    causes = [c for c in listed(value.get("causes")) if isinstance(c, Mapping)]
    if causes and verdict == "broken":
        headline = "Broken: " + " or ".join(str(c.get("fault")) for c in causes[:3])
    lead = str(value.get("message") or (causes[0].get("words") if causes else "") or "")
    page = Page("diagnose", tone, headline, lead, raw=value)
    page.sides = side_texts(detail.get("sides"), {"a": "model", "b": "good copy"})
    if causes or listed(value.get("hints")):
        page.sections.append(_causes(causes, listed(value.get("hints"))))
    groups = _by_length(listed(detail.get("hypotheses")))
    for i, (tokens, group) in enumerate(groups.items()):
        part = _hypotheses(group, tokens, detail, key="hypotheses" if i == 0 else f"hypotheses{i + 1}")
        if part:
            page.sections.append(part)
    if not groups:
        page.absent.append(("Hypotheses", reason(detail, "hypotheses", "the model was not run")))
    probe = _probe(value.get("probe"), listed(detail.get("probe")))
    if probe:
        page.sections.append(probe)
    else:
        page.absent.append(("Order of Q and K", reason(detail, "probe", "the layout probe did not run")))
    findings = _findings([*listed(value.get("findings")), *listed(value.get("tensors"))])
    if findings:
        page.sections.append(findings)
    if detail.get("against"):
        add_parts(page, detail["against"], prefix="against-")
    elif detail.get("tensors"):
        tensors = tensors_part(detail["tensors"])
        if tensors:
            page.sections.append(tensors)
    else:
        page.absent.append(("Against a good copy", reason(detail, "against", "no good copy was given (--against)")))
    return page


def _causes(causes: Sequence[Mapping[str, Any]], hints: Sequence[Any]) -> Part:
    cards = []
    for cause in causes:
        confidence = cause.get("confidence")
        sure = f" (confidence {_sure(confidence)})" if confidence is not None else ""
        loss = f"<p>Loss with it undone: {escape(number(cause['loss']))}.</p>" if cause.get("loss") is not None else ""
        evidence = (
            [f"{k}: {number(v)}" for k, v in cause["evidence"].items()]
            if isinstance(cause.get("evidence"), Mapping)
            else listed(cause.get("evidence"))
        )
        fix = f"<pre>{escape(cause['fix'])}</pre>" if cause.get("fix") else "<p>It cannot be undone from this file.</p>"
        words = f"<p>{escape(cause['words'], longest=1000)}</p>" if cause.get("words") else ""
        cards.append(
            f'<div class="cause"><h3>{escape(cause.get("fault"))}{escape(sure)}</h3>'
            f"{words}{loss}{bullets(evidence)}{fix}</div>"
        )
    heading = "The cause" if len(causes) == 1 else "The causes" if causes else "What to do"
    words = ""
    if len(causes) > 1:
        words = "The evidence does not tell these apart, or more than one holds."
    return "causes", heading, section("causes", heading, words=words, more="".join(cards) + bullets(hints))


def _sure(confidence: Any) -> str:
    """A confidence; what rounds to 1 is still none."""
    value = finite(confidence)
    return "above 0.999" if value is not None and value > 0.999 else number(confidence)


def _by_length(hypotheses: Sequence[Any]) -> dict[Any, list[Mapping[str, Any]]]:
    """Losses compare within one text only."""
    out: dict[Any, list[Mapping[str, Any]]] = {}
    for entry in hypotheses:
        if isinstance(entry, Mapping):
            out.setdefault(entry.get("tokens"), []).append(entry)
    return out


def _hypotheses(group: list[Mapping[str, Any]], tokens: Any, detail: Mapping[str, Any], *, key: str) -> Part | None:
    run = [h for h in group if finite(h.get("loss")) is not None]
    run.sort(key=lambda h: float(h["loss"]))
    whole = detail.get("baseline") or {}
    own = next((finite(h["baseline"]) for h in run if h.get("baseline") is not None), None)
    if own is None and (tokens is None or tokens == whole.get("tokens") or len(run) == len(group)):
        own = finite(whole.get("loss"))
    entries = [
        Loss(
            str(h.get("words") or h.get("name")),
            float(h["loss"]),
            h.get("low"),
            h.get("high"),
            "result" if h.get("explains") else "noise",
        )
        for h in run[:DRAWN]
    ]
    if own is not None:
        ends = (whole.get("low"), whole.get("high")) if own == finite(whole.get("loss")) else (None, None)
        entries.append(Loss("as it is", own, *ends, "control"))
    control = detail.get("control") or {}
    if finite(control.get("loss")) is not None and control.get("tokens", tokens) == tokens:
        entries.append(Loss(f"broken on purpose: {control.get('name')}", float(control["loss"]), None, None, "control"))
    heading = "Loss of each hypothesis" + (f", {tokens:,} tokens" if isinstance(tokens, int) else "")
    drawing = ""
    if run:
        entries.sort(key=lambda e: e.value)
        best = run[0]
        drawing = losses(
            entries,
            baseline=own,
            name=key,
            title=heading,
            description=f"Lowest: {best.get('words') or best.get('name')}, {number(best.get('loss'))}; "
            f"the model as it is: {number(own)}.",
        )
    margin = detail.get("margin")
    words = (
        "Each line is the same model with one thing undone; if the loss falls by more than chance could do, that thing "
        "was wrong. The thin line is the interval of a bootstrap over segments of the text; the upright line is the "
        "model as it is."
    )
    if margin is not None:
        words += f" A gain below {number(margin)} decides nothing."
    rows = [
        [
            h.get("words") or h.get("name"),
            h.get("fix") or "",
            number(h.get("loss")) if h.get("loss") is not None else h.get("skipped") or "not run",
            _interval(h.get("low"), h.get("high")),
            number(h.get("gain")),
            _interval(h.get("gain_low"), h.get("gain_high")),
        ]
        for h in [*run, *(h for h in group if h not in run)]
    ]
    head = ["undone", "fix", "loss", "95 %", "gain", "95 %"]
    numbers = table(head, rows, caption=heading, words=2)
    return key, heading, section(key, heading, words=words, drawing=drawing, numbers=numbers)


def _interval(low: Any, high: Any) -> str:
    return "" if low is None or high is None else f"{number(low)} … {number(high)}"


def _probe(result: Any, layers: Sequence[Any]) -> Part | None:
    if not isinstance(result, Mapping) and not layers:
        return None
    result = result if isinstance(result, Mapping) else {}
    order = result.get("order")
    words = (
        "In a trained model the two rows of one rotary pair have similar norms. Drawn is how unlike the rows of a pair "
        "are, over that of rows paired at random: clearly below 1 is the order the rows are in, and 1 says nothing. "
    )
    odd = result.get("odd")
    if isinstance(odd, Mapping) and odd:
        words += "The rows are in: " + ", ".join(f"{_ROWS.get(str(k), k)} {v}" for k, v in odd.items())
    else:
        words += f"The rows are in {order} order" if order else "The rows do not tell their order"
    if result.get("expected"):
        words += f"; the layout says {result['expected']}"
    words += "."
    if result.get("confidence"):
        words += f" Confidence: {_sure(result['confidence'])}."
    head = ["rows of", "order", "halves", "interleaved"]
    known = [_evidence(name, result[key]) for key, name in _ROWS.items() if isinstance(result.get(key), Mapping)]
    more = table(head, known, caption="Unlikeness over that of random pairs", words=2) if known else ""
    drawing = numbers = ""
    if layers:
        lines = [
            Curve("paired as interleaved", [x.get("interleaved") for x in layers], "control"),
            Curve("paired as halves", [x.get("half") for x in layers], "result"),
        ]
        names = [str(x.get("row", i)) for i, x in enumerate(layers)]
        drawing = curves(
            lines,
            name="probe",
            title="Unlikeness of paired rows, layer by layer",
            description=f"Order found: {order or 'none'}.",
            x="layer",
            y="over random pairs",
            steps=names,
            limit=("random pairs", 1.0),
            unit=True,
        )
        rows = ([n, number(x.get("half")), number(x.get("interleaved"))] for n, x in zip(names, layers, strict=True))
        numbers = table(["layer", "halves", "interleaved"], rows, caption="Ratio to random pairs")
    heading = "Order of the rows of Q and K"
    return "probe", heading, section("probe", heading, words=words, drawing=drawing, numbers=numbers, more=more)


def _evidence(name: str, found: Mapping[str, Any]) -> list[str]:
    """A row of the evidence: what the rows of Q, of K, or of both say."""
    random = finite(found.get("r"))
    ratios = [
        number(value / random) if value is not None and random else "–"
        for value in map(finite, (found.get("h"), found.get("i")))
    ]
    return [name, str(found.get("order") or "cannot tell"), *ratios]


def _findings(problems: Sequence[Any]) -> Part | None:
    rows = [
        [p.get("tensor") or p.get("name") or "", p.get("kind") or "", p.get("message") or ""]
        for p in problems
        if isinstance(p, Mapping) and (p.get("message") or p.get("kind"))
    ]
    if not rows:
        return None
    html = table(["tensor", "what", "finding"], rows, caption="Findings", words=3, cards=True)
    heading = "Odd tensors"
    words = "What stands out among the tensors without running the model."
    return "findings", heading, section("findings", heading, words=words, more=html)
