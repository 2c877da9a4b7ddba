"""The four kinds of drawing of a report: curves, pairs, a map of tensors, losses with their intervals.

Each function takes plain numbers and returns inline SVG (:mod:`convert.html.canvas`). Nothing tells things apart by
colour alone: lines have their own dashes, points their own panels, cells their texts. No page knows matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from convert.html.canvas import draw
from convert.html.svg import COLOURS
from convert.html.text import finite, number, plain

#: More points of a curve than this are joined, each group by its largest.
CURVE_POINTS = 1000
#: More pairs than this are thinned out.
PAIR_POINTS = 2000
#: Relative errors at which the colour of a cell changes; 0 has the first colour to itself.
HEAT_STEPS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_DASHES: dict[str, Any] = {"result": "-", "control": (0, (5, 2)), "noise": (0, (1, 1.5)), "limit": (0, (8, 3, 1, 3))}


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a drawing.

    Attributes:
        label: Its name.
        values: One per step; None or a number that is not finite leaves a gap.
        colour: ``result``, ``control``, ``noise``.
    """

    label: str
    values: Sequence[float | None]
    colour: str


def curves(
    lines: Sequence[Curve],
    *,
    name: str,
    title: str,
    description: str,
    x: str,
    y: str,
    steps: Sequence[str] | None = None,
    limit: tuple[str, float] | None = None,
    unit: bool = False,
) -> str:
    """Lines over positions or layers, on a logarithmic scale; zeros lie on its lower edge.

    Args:
        lines: What is drawn, the result last so that it lies on top.
        name: Prefix of ids.
        title: For those who do not see it.
        description: The same.
        x: Label of the steps.
        y: Label of the values.
        steps: Names of the steps; their numbers by default.
        limit: A horizontal line and its name.
        unit: Linear scale around 1, for ratios, in place of the logarithmic one.
    """
    every = max(1, math.ceil(max(len(c.values) for c in lines) / CURVE_POINTS))
    lines = [Curve(c.label, thinned(c.values), c.colour) for c in lines]
    length = 1 if steps is not None else every  # of a step, on the axis
    if steps is not None:
        steps = steps[::every]

    def paint(figure: Any, narrow: bool) -> None:
        axes = figure.add_subplot()
        found = [v for c in lines for v in map(finite, c.values) if v is not None and v > 0]
        if limit and limit[1] > 0:
            found.append(limit[1])
        floor = 0.0 if unit or not found else 10.0 ** (math.floor(math.log10(min(found))) - 1)
        for c in lines:
            values = [math.nan if (v := finite(w)) is None else max(v, floor) for w in c.values]
            axes.plot(
                [i * length for i in range(len(values))],
                values,
                label=plain(c.label, longest=40),
                color=COLOURS[c.colour],
                linestyle=_DASHES[c.colour],
                # The control lies below: where the result is the same, it must still be seen.
                linewidth=(3.2 if c.colour == "control" else 1.8) if len(values) < 300 else 1.2,
                marker="o" if len(values) <= (20 if narrow else 40) else None,
                markersize=3.5,
            )
        if limit:
            axes.axhline(limit[1], label=limit[0], color=COLOURS["limit"], linestyle=_DASHES["limit"], linewidth=1.2)
        if found and not unit:
            axes.set_yscale("log")
            top = 10.0 ** math.ceil(math.log10(max(found)) + 0.05)
            axes.set_ylim(floor, top)
            _decades(axes.yaxis, floor, top)
        elif not found:
            axes.set_ylim(0, 1)
        _steps(axes, steps, max(len(c.values) for c in lines) * length, narrow)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        figure.legend(loc="outside upper left", ncols=1 if narrow else 4)

    return draw(
        paint, name=name, title=title, description=description, height=330, narrow_height=300 + 18 * (len(lines) - 1)
    )


def thinned(values: Sequence[float | None], most: int = CURVE_POINTS) -> list[float | None]:
    """At most ``most`` values; of those joined the largest is kept, for that is what a reader must not miss."""
    if len(values) <= most:
        return list(values)
    every = math.ceil(len(values) / most)
    groups = (values[i : i + every] for i in range(0, len(values), every))
    return [max((v for v in map(finite, g) if v is not None), default=None) for g in groups]


def _decades(axis: Any, floor: float, top: float) -> None:
    """Ticks at powers of ten, as plain text (matplotlib would write formulas); the lower edge is 0."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    low, high = round(math.log10(floor)), round(math.log10(top))
    powers = range(low, high + 1, max(1, math.ceil((high - low) / 7)))
    axis.set_major_locator(FixedLocator([10.0**p for p in powers]))
    axis.set_major_formatter(FixedFormatter(["0" if p == low else _power(p) for p in powers]))
    axis.set_minor_locator(NullLocator())


def _power(exponent: int) -> str:
    return f"{10.0**exponent:g}" if -3 <= exponent <= 3 else f"1e{exponent}".replace("-", "−")


def _steps(axes: Any, steps: Sequence[str] | None, count: int, narrow: bool) -> None:
    """Ticks of the horizontal axis: whole steps, as many as there is room for."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(-0.5 - count / 100, count - 0.5 + count / 100)
    if steps is None:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6 if narrow else 12, integer=True, steps=[1, 2, 5, 10]))
        return
    room = 6 if narrow else 14
    chosen = _round_steps(steps, room)
    axes.set_xticks(chosen, [plain(steps[i].removeprefix("layer "), longest=12) for i in chosen])


def _round_steps(steps: Sequence[str], room: int) -> list[int]:
    """Which steps are named: all, or the layers whose numbers are multiples of a round one."""
    if len(steps) <= room:
        return list(range(len(steps)))
    numbers = {i: int(n) for i, s in enumerate(steps) if (n := s.removeprefix("layer ")).isdecimal()}
    for stride in (2, 5, 10, 20, 50, 100):
        chosen = [i for i, n in numbers.items() if n % stride == 0]
        if 0 < len(chosen) <= room:
            return chosen
    return list(range(0, len(steps), math.ceil(len(steps) / room)))


def pairs(
    panels: Sequence[tuple[str, str, Sequence[float], Sequence[float]]],
    *,
    name: str,
    title: str,
    description: str,
    x: str,
) -> str:
    """Clouds of points, one panel each, on common axes, with the line on which equal values lie.

    Args:
        panels: Label of the vertical axis, colour, horizontal values, vertical values.
        name: Prefix of ids.
        title: For those who do not see it.
        description: The same.
        x: Label of the horizontal axes.
    """
    drawn = [(label, colour, _points(a, b)) for label, colour, a, b in panels]
    values = [v for _, _, points in drawn for point in points for v in point] or [0.0, 1.0]
    low, high = min(values), max(values)
    pad = (high - low) * 0.04 or 1.0

    def paint(figure: Any, narrow: bool) -> None:
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path
        from matplotlib.ticker import MaxNLocator

        shape = (len(drawn), 1) if narrow else (1, len(drawn))
        for axes, (label, colour, points) in zip(figure.subplots(*shape, squeeze=False).flat, drawn, strict=True):
            axes.axline(
                (low, low), (high + pad, high + pad), color=COLOURS["limit"], linewidth=1, linestyle=(0, (4, 3))
            )
            if points:
                # A dot is a line of no length with round ends: a third of the bytes of a marker.
                path = Path([p for p in points for _ in (0, 1)], [Path.MOVETO, Path.LINETO] * len(points))
                path.should_simplify = False
                axes.add_patch(
                    PathPatch(
                        path, facecolor="none", edgecolor=COLOURS[colour], linewidth=3, capstyle="round", alpha=0.6
                    )
                )
            axes.set(xlim=(low - pad, high + pad), ylim=(low - pad, high + pad), xlabel=x, ylabel=label)
            axes.set_box_aspect(1)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(nbins=5))

    return draw(
        paint, name=name, title=title, description=description, height=400, narrow_height=330 * max(len(drawn), 1)
    )


def _points(a: Sequence[float], b: Sequence[float]) -> list[tuple[float, float]]:
    found = [(x, y) for x, y in zip(map(finite, a), map(finite, b), strict=False) if x is not None and y is not None]
    return found[:: max(1, math.ceil(len(found) / PAIR_POINTS))]


def heat_class(error: Any) -> int:
    """Which of the nine colours a relative error has; what is no number has the last."""
    value = finite(error)
    if value is None:
        return len(HEAT_STEPS) + 1
    return 0 if value == 0 else 1 + sum(value >= step for step in HEAT_STEPS)


def heat(
    rows: Sequence[str],
    columns: Sequence[str],
    cells: dict[tuple[str, str], tuple[float | None, str]],
    *,
    name: str,
    title: str,
    description: str,
) -> str:
    """A map of relative errors: layers along the longer side of the screen, kinds of tensor along the other.

    Args:
        rows: Layers, in order.
        columns: Kinds of tensor, in order.
        cells: (row, column) → relative error and the text that is shown at the pointer; missing cells stay empty.
        name: Prefix of ids.
        title: For those who do not see it.
        description: The same.
    """
    edge = 0.6 if len(rows) <= 60 else 0.25
    numbered = {key: i for i, key in enumerate(cells)}
    downs, acrosses = ({key: i for i, key in enumerate(keys)} for keys in (rows, columns))
    tips = {f"cell{i}": cells[key][1] for key, i in numbered.items()}

    def paint(figure: Any, narrow: bool) -> None:
        from matplotlib.patches import Rectangle

        axes = figure.add_subplot()
        for (row, column), i in numbered.items():
            y, x = downs[row], acrosses[column]
            corner = (x, y) if narrow else (y, x)
            colour = COLOURS[f"heat{heat_class(cells[row, column][0])}"]
            cell = Rectangle(corner, 1, 1, facecolor=colour, edgecolor=COLOURS["paper"], linewidth=edge)
            cell.set_gid(f"cell{i}")
            cell.set_in_layout(False)
            axes.add_artist(cell)  # not add_patch, which measures every cell
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        across, down = (columns, rows) if narrow else (rows, columns)
        axes.set(xlim=(0, len(across)), ylim=(len(down), 0))
        kinds = [plain(c, longest=30) for c in columns]
        some = _round_steps(rows, 40 if narrow else 24)
        layers = [i + 0.5 for i in some], [plain(rows[i].removeprefix("layer "), longest=12) for i in some]
        if narrow:
            axes.xaxis.tick_top()
            axes.set_xticks([i + 0.5 for i in range(len(kinds))], kinds, rotation=90)
            axes.set_yticks(*layers)
            axes.set_ylabel("layer")
        else:
            axes.set_yticks([i + 0.5 for i in range(len(kinds))], kinds)
            axes.set_xticks(*layers)
            axes.set_xlabel("layer")

    tall = min(18, max(5, 900 // max(len(rows), 1)))
    return draw(
        paint,
        name=name,
        title=title,
        description=description,
        height=70 + 24 * len(columns),
        narrow_height=190 + tall * len(rows),
        tips=tips,
    )


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss of a drawing.

    Attributes:
        label: What was run.
        value: Nats per token.
        low: Lower end of its interval, or None.
        high: Upper end.
        colour: ``result`` for what explains the model, ``control`` for the control, ``noise`` for the others.
    """

    label: str
    value: float
    low: float | None
    high: float | None
    colour: str


def losses(entries: Sequence[Loss], *, baseline: float | None, name: str, title: str, description: str) -> str:
    """Losses as points with their intervals, each under its name, and a line at the model's own."""
    marks = {"result": "D", "control": "s", "noise": "o"}

    def paint(figure: Any, narrow: bool) -> None:
        axes = figure.add_subplot()
        ends = [v for e in entries for v in (e.value, finite(e.low), finite(e.high)) if v is not None]
        ends += [] if baseline is None else [baseline]
        pad = (max(ends) - min(ends)) * 0.05 or 0.1
        left, right = min(ends) - pad, max(ends) + pad
        for i, e in enumerate(entries):
            low, high = finite(e.low), finite(e.high)
            colour = COLOURS[e.colour]
            axes.plot([left, e.value], [i, i], color=colour, linewidth=6, alpha=0.25, solid_capstyle="butt")
            if low is not None and high is not None:
                axes.plot([low, high], [i, i], color=colour, linewidth=1.6)
            axes.plot([e.value], [i], color=colour, marker=marks[e.colour], markersize=7)
            axes.annotate(
                f"{plain(e.label, longest=38 if narrow else 90)}: {number(e.value)}",
                (left, i),
                xytext=(0, 9),
                textcoords="offset points",
                annotation_clip=False,
                bbox={"facecolor": COLOURS["paper"], "edgecolor": "none", "pad": 1},
            )
        if baseline is not None:
            axes.axvline(baseline, color=COLOURS["limit"], linestyle=_DASHES["limit"], linewidth=1.2)
        axes.set(xlim=(left, right), ylim=(len(entries) - 0.5, -0.85), xlabel="loss in nats per token")
        axes.set_yticks([])
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)

    return draw(paint, name=name, title=title, description=description, height=70 + 42 * len(entries))
