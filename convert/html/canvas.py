"""Matplotlib without its surroundings: a figure in marker colours, twice (wide screen, telephone), as inline SVG.

No pyplot, no window, no style of the user's: the same data give the same bytes. What is painted is the business of
:mod:`convert.html.figures`.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from convert.errors import Problem, UsageError
from convert.html.svg import COLOURS, inline

#: Widths in pixels: of a drawing beside its text, and of one on a telephone.
WIDE, NARROW = 860, 343
_HINT = "pip install 'ckpt-convert[report]' (or: pip install matplotlib)"

Paint = Callable[[Any, bool], None]


def require_matplotlib() -> None:
    """Refuse before any work what could not be drawn after it.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UsageError(Problem("report", "--report draws with matplotlib, which is not installed.", hint=_HINT))


def draw(
    paint: Paint,
    *,
    name: str,
    title: str,
    description: str,
    height: int,
    narrow_height: int | None = None,
    tips: Mapping[str, str] | None = None,
) -> str:
    """Two ``<svg>`` elements, of which the style sheet shows one.

    Args:
        paint: Called with a matplotlib figure and whether it is the narrow one.
        name: Prefix of the ids, unique in the page.
        title: Short name, for those who do not see it.
        description: What it shows.
        height: Pixels of the wide drawing.
        narrow_height: Pixels of the narrow one; the same by default.
        tips: Texts of groups, by ``gid``.
    """
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    out = []
    for narrow in (False, True):
        width, tall = (NARROW, narrow_height or height) if narrow else (WIDE, height)
        raw = io.StringIO()
        with matplotlib.style.context(["default", _style(narrow)]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # glyphs that its own font lacks: the browser has them
            layout = ConstrainedLayoutEngine(w_pad=7 / 72, h_pad=5 / 72)  # browsers' letters are as wide as they like
            figure = Figure(figsize=(width / 72, tall / 72), dpi=72, layout=layout)
            figure.patch.set_visible(False)
            paint(figure, narrow)
            figure.savefig(raw, format="svg", metadata={"Date": None, "Creator": None})
        kind = "narrow" if narrow else "wide"
        out.append(
            inline(
                raw.getvalue(),
                prefix=f"{name}-{kind[0]}-",
                title=title,
                description=description,
                classes=f"plot {kind}",
                tips=tips or {},
            )
        )
    return "".join(out)


def _style(narrow: bool) -> dict[str, Any]:
    ink, muted = COLOURS["ink"], COLOURS["muted"]
    size = 12.0 if narrow else 13.0
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "convert",
        "text.parse_math": False,
        "text.usetex": False,
        "axes.unicode_minus": True,
        "axes.formatter.use_mathtext": False,
        "font.size": size,
        "axes.labelsize": size,
        "axes.titlesize": size,
        "xtick.labelsize": size - 1,
        "ytick.labelsize": size - 1,
        "legend.fontsize": size - 1,
        "text.color": ink,
        "axes.edgecolor": muted,
        "axes.labelcolor": ink,
        "axes.titlecolor": ink,
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": COLOURS["grid"],
        "grid.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.labelcolor": ink,
        "patch.edgecolor": COLOURS["none"],
        "path.simplify": False,
    }
