"""The result of verify or diagnose in one screen of a terminal: the story of the report, without its figures.

Verdict first, then the figures with the control beside them, bars for the losses of hypotheses, the worst tensors with
their layers folded. Text without colour goes to whatever is no terminal, and wherever NO_COLOR is set. Built from
``as_json()`` and ``detail()``, as the pages of :mod:`convert.html` are; no conversion
imports this. The lines of diff are :mod:`convert.commands.diff`'s own; here they are fitted to the screen.
"""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from convert.html.text import finite, number, plain, share
from convert.report import fold_names

if TYPE_CHECKING:
    from rich.console import Console

#: Colours of verdicts.
_TONES = {
    **dict.fromkeys(("pass", "good", "equal", "close"), "bold green"),
    **dict.fromkeys(("fail", "broken", "different"), "bold red"),
    **dict.fromkeys(("weak", "undecided"), "bold yellow"),
}
_FIGURES = (
    ("max |Δ|", "max_abs"),
    ("NMSE", "nmse"),
    ("KL mean", "kl_mean"),
    ("KL max", "kl_max"),
    ("top-1 agreement", "top1"),
)
_BLOCKS = " ▁▂▃▄▅▆▇█"
#: Lines of hypotheses (of the first text and of others), of names, of hints: a screen has 24.
_HYPOTHESES, _LATER, _NAMES, _HINTS = 5, 3, 3, 5
_WIDTH = 80


def show(result: Any) -> None:
    """Print a result of verify or diagnose."""
    _print(render(result, width=screen_width(), colour=_wants_colour()))


def show_lines(lines: Iterable[str]) -> None:
    """Print a result that is text already: ``command: verdict``, then indented lines."""
    _print(render_lines(lines, width=screen_width(), colour=_wants_colour()))


def screen_width() -> int | None:
    """Columns of the terminal, or None where there is none."""
    import shutil

    return max(40, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def _wants_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _print(text: str) -> None:
    import click

    click.echo(text, nl=False, color=_wants_colour() or None)


def render_lines(lines: Iterable[str], *, width: int | None = None, colour: bool = False) -> str:
    """What :func:`show_lines` prints; lines that are too long go on below, indented."""
    from rich.padding import Padding
    from rich.text import Text

    text = io.StringIO()
    console = _console(text, width, colour)
    for place, line in enumerate(lines):
        shown = Text(plain(line, longest=2000))
        indent = len(line) - len(line.lstrip(" "))
        if place == 0:
            command, _, verdict = line.partition(": ")
            _head(console, command, {"verdict": verdict})
        elif width is None or shown.cell_len <= width:
            console.print(shown, soft_wrap=True)
        else:
            console.print(Padding(Text(shown.plain[indent:]), (0, 0, 0, indent)))
    return _trimmed(text)


def _console(text: io.StringIO, width: int | None, colour: bool) -> Console:
    from rich.console import Console

    return Console(
        file=text,
        width=width or _WIDTH,
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=width is None,
    )


def _trimmed(text: io.StringIO) -> str:
    return "\n".join(line.rstrip() for line in text.getvalue().replace("−", "-").split("\n"))


def render(result: Any, *, width: int | None = None, colour: bool = False) -> str:
    """What :func:`show` prints.

    Args:
        result: Of ``verify`` or ``diagnose``.
        width: Columns of the terminal; None where there is none: tables take 80, sentences are not broken.
        colour: Whether escape codes are wanted.

    Raises:
        ValueError: The result is of another kind.
    """
    text = io.StringIO()
    console = _console(text, width, colour)
    value = result.as_json()
    make = getattr(result, "detail", None)
    kind = str(value.get("schema", "")).removeprefix("convert.").partition("/")[0]
    shown = {"verify": _verify, "diagnose": _diagnose}
    if kind not in shown:
        raise ValueError(f"results of kind {kind!r} have no terminal version")
    shown[kind](console, value, make() if make else {})
    return _trimmed(text)


def _head(console: Console, command: str, value: Mapping[str, Any], more: str = "") -> None:
    from rich.text import Text

    verdict = str(value.get("verdict"))
    line = Text(f"{command}: ")
    line.append(plain(verdict), style=_TONES.get(verdict, "bold"))
    line.append(more, style="dim")
    console.print(line)


def _say(console: Console, text: Any, *, style: str = "", indent: int = 2) -> None:
    """A sentence, indented; broken between words where a terminal is that narrow."""
    from rich.padding import Padding
    from rich.text import Text

    said = Text(plain(text, longest=2000), style=style)
    if console.soft_wrap:
        console.print(Text(" " * indent) + said)
    else:
        console.print(Padding(said, (0, 0, 0, indent)))


def _hints(console: Console, hints: Any) -> None:
    listed = [] if hints is None else [hints] if isinstance(hints, str) else list(hints)
    for hint in listed[:_HINTS]:
        _say(console, hint)
    if len(listed) > _HINTS:
        _say(console, f"… and {len(listed) - _HINTS} more (--json, --report).", style="dim")


def _rows(console: Console, rows: Sequence[Sequence[Any]], *, head: Sequence[str] = (), left: int = 1) -> None:
    """Columns without rules, the first ``left`` of them text."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=bool(head), header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for i in range(max(len(row) for row in rows)):
        title = head[i] if i < len(head) else ""
        table.add_column(title, justify="left" if i < left else "right", overflow="fold" if i < left else "ellipsis")
    for row in rows:
        first, *others = (cell if isinstance(cell, Text) else Text(plain(cell)) for cell in row)
        table.add_row(Text("  ") + first, *others)
    console.print(table, soft_wrap=False)


def _verify(console: Console, value: Mapping[str, Any], detail: Mapping[str, Any]) -> None:
    engine = f", A in {value['engine']}" if "engine" in value else ""
    how = ", layer by layer" if value.get("layerwise") else ""
    where = f" (on {value.get('device')}, {value.get('dtype')}, {value.get('n_tokens')} tokens{engine}{how})"
    _head(console, "verify", value, where)
    _say(console, value.get("message"))
    control = value.get("control") or {}
    rows: list[list[Any]] = [
        [label, *((share if key == "top1" else number)(side.get(key)) for side in (value, control))]
        for label, key in _FIGURES
    ]
    rows.append(
        ["first difference", _position(value.get("first_diff_position")), _position(control.get("first_diff_position"))]
    )
    _rows(console, rows, head=("", "A against B", "broken copy"))
    judged = [f"rounding {number(value.get('noise'))}", f"tolerance {number(value.get('tolerance'))}"]
    if control:
        unseen = "no farther than B" if value.get("verdict") == "fail" else "not seen"
        judged.append(f"broken copy {number(control.get('nmse'))} ({'seen' if control.get('seen') else unseen})")
    if value.get("tolerance_abs") is not None:
        judged.append(f"tolerance of max |Δ| {number(value['tolerance_abs'])}")
    _say(console, "NMSE: " + ", ".join(judged))
    prompts = [p for p in value.get("prompts") or () if isinstance(p, Mapping)]
    if prompts:
        beyond = sum(not p.get("within") for p in prompts)
        worst = plain(value.get("worst_prompt"), longest=60)
        _say(console, f"{len(prompts)} prompts, {beyond} of them beyond tolerance; farthest apart: {worst}")
    _curves(console, detail)
    _worst(console, detail.get("tensors"))
    said = (detail.get("departs") or {}).get("words")
    _hints(console, [hint for hint in value.get("hints") or () if hint != said])


def _position(value: Any) -> str:
    return "none" if value is None else f"position {value}"


def _curves(console: Console, detail: Mapping[str, Any]) -> None:
    """Layers and positions as a line of blocks each, the control's below the result's, on one logarithmic scale."""
    positions, layers = detail.get("positions") or {}, detail.get("layers") or []
    width = min(console.width, _WIDTH) - 24
    labelled = [
        ("KL by position", positions.get("kl") or [], positions.get("control_kl") or []),
        ("error by layer", [s.get("error") for s in layers], [s.get("control") for s in layers]),
    ]
    rows = []
    for label, found, control in labelled:
        positive = [v for w in (*found, *control) if (v := finite(w)) is not None and v > 0]
        if not positive:
            continue
        low, high = math.log10(min(positive)), math.log10(max(positive))
        for name, values in ((f"{label}, B", found), ("  broken copy", control)):
            if values:
                nothing = all(v == 0 for v in values)
                rows.append([name, "0 everywhere" if nothing else _spark(values, low, high, width)])
    if rows and _can_draw():
        _rows(console, rows, left=2)
    departs = detail.get("departs")
    if departs:
        _say(console, departs.get("words") or f"The hidden states part at {departs.get('step')}.")


def _spark(values: Sequence[Any], low: float, high: float, width: int) -> str:
    """One character per value, or per group of values with the largest of them."""
    every = max(1, math.ceil(len(values) / max(width, 8)))
    out = []
    for start in range(0, len(values), every):
        group = [v for w in values[start : start + every] if (v := finite(w)) is not None]
        top = max(group, default=None)
        if top is None:
            out.append("·")
        elif top <= 0:
            out.append(_BLOCKS[0])
        else:
            out.append(_BLOCKS[1 + round(7 * (math.log10(top) - low) / ((high - low) or 1))])
    return "".join(out)


def _can_draw() -> bool:
    """Whether the output has the letters for bars."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        _BLOCKS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _worst(console: Console, tensors: Any) -> None:
    """The tensors that lie farthest apart, layers folded."""
    apart = [t for t in tensors or () if t.get("relation") not in ("equal", "turned") and t.get("error") != 0]
    if not apart:
        return
    kinds: dict[str, list[Any]] = {}
    for tensor in apart:
        kinds.setdefault(str(tensor.get("column")), []).append(tensor)
    groups = sorted(((max(map(_badness, group)), group) for group in kinds.values()), key=lambda g: -g[0])
    rows = []
    for error, group in groups[:_NAMES]:
        names = fold_names(str(t.get("name")) for t in group)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        words = (
            number(error) if math.isfinite(error) else str(group[0].get("relation") or "no number").replace("_", " ")
        )
        rows.append([f"  {plain(names[0], longest=100)}{more}", words])
    left = len(groups) - _NAMES
    more = f"; {left} more kind{'s' if left > 1 else ''} of tensor" if left > 0 else ""
    _say(console, f"Not equal: {len(apart)} of {len(tensors)} tensors{more}")
    _rows(console, rows, head=("", "relative error"))


def _badness(tensor: Mapping[str, Any]) -> float:
    """A tensor's relative error; what has none is the worst."""
    value = finite(tensor.get("error"))
    return math.inf if value is None else value


def _diagnose(console: Console, value: Mapping[str, Any], detail: Mapping[str, Any]) -> None:
    causes = [c for c in value.get("causes") or () if isinstance(c, Mapping)]
    named = " or ".join(plain(c.get("fault"), longest=60) for c in causes[:3])
    _head(console, "diagnose", value, f" ({named})" if named else "")
    if value.get("message"):
        _say(console, value["message"])
    for cause in causes[:3]:
        if cause.get("words") and str(cause["words"]).lower() not in str(value.get("message")).lower():
            _say(console, cause["words"])
        if cause.get("fix"):
            _say(console, cause["fix"], style="bold", indent=4)
    _probe(console, value.get("probe"))
    _losses(console, detail)
    _odd(console, value)
    against = detail.get("against")
    if against:
        _worst(console, against.get("tensors"))
    _hints(console, value.get("hints"))


def _odd(console: Console, value: Mapping[str, Any]) -> None:
    """Odd tensors, faults before what is only worth knowing; not again what a hint says."""
    hints = " ".join(str(hint) for hint in value.get("hints") or ())
    odd = [o for key in ("findings", "tensors") for o in value.get(key) or () if isinstance(o, Mapping)]
    said = [str(o.get("message") or o.get("kind")) for o in sorted(odd, key=lambda o: not o.get("fault"))]
    left = [message for message in said if message not in hints]
    for message in left[:_NAMES]:
        _say(console, message[:1].upper() + message[1:])
    if len(left) > _NAMES:
        _say(console, f"… and {len(left) - _NAMES} more findings (--json, --report).", style="dim")


def _probe(console: Console, probe: Any) -> None:
    if not isinstance(probe, Mapping):
        return
    both = probe.get("both")
    ratios = ""
    if isinstance(both, Mapping) and finite(both.get("r")):
        ratios = ", ".join(f"{n}/r {both[n] / both['r']:.2f}" for n in ("h", "i") if finite(both.get(n)) is not None)
        ratios = f" ({ratios})"
    order = f"in {probe['order']} order" if probe.get("order") else "in an order that the numbers do not tell"
    odd = probe.get("odd")
    if isinstance(odd, Mapping) and odd:
        order = ", ".join(f"{str(k).upper()} {v}" for k, v in odd.items())
    expected = f"; the layout says {probe['expected']}" if probe.get("expected") else ""
    _say(console, f"Rows of Q and K: {order}{ratios}{expected}.")


def _losses(console: Console, detail: Mapping[str, Any]) -> None:
    """The best hypotheses of each length of text, the model as it is among them, as bars from 0."""
    from rich.text import Text

    whole = detail.get("baseline") or {}
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for entry in detail.get("hypotheses") or ():
        if finite(entry.get("loss")) is not None:
            groups.setdefault(entry.get("tokens"), []).append(entry)
    control = detail.get("control") or {}
    for place, (tokens, entries) in enumerate(groups.items()):
        shown = _HYPOTHESES if place == 0 else _LATER
        entries.sort(key=lambda e: e["loss"])
        own = next((v for e in entries if (v := finite(e.get("baseline"))) is not None), finite(whole.get("loss")))
        lines = [(str(e.get("words") or e.get("name")), e["loss"], bool(e.get("explains"))) for e in entries]
        left = len(lines) - shown
        lines = lines[:shown]
        if own is not None:
            lines.append(("as it is", own, False))
        if finite(control.get("loss")) is not None and control.get("tokens", tokens) == tokens:
            lines.append((f"broken on purpose: {control.get('name')}", control["loss"], False))
        lines.sort(key=lambda line: line[1])
        top = max(line[1] for line in lines) or 1.0
        room = 24
        mark = "█" if _can_draw() else "#"
        rows = [
            [
                Text(
                    plain(words, longest=44), style="bold green" if explains else "bold" if words == "as it is" else ""
                ),
                f"{loss:.3f}",
                Text(mark * max(1, round(room * loss / top)), style="green" if explains else "dim"),
            ]
            for words, loss, explains in lines
        ]
        length = f" ({tokens:,} tokens)" if isinstance(tokens, int) else ""
        _bars(console, rows, head=(f"undone{length}", "loss"))
        if left > 0:
            _say(console, f"… and {left} with a higher loss", style="dim", indent=4)


def _bars(console: Console, rows: Sequence[Sequence[Any]], *, head: Sequence[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("  " + head[0], overflow="fold")
    table.add_column(head[1], justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="crop")
    for first, *others in rows:
        table.add_row(Text("  ") + first, *others)
    console.print(table, soft_wrap=False)
