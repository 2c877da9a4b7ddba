"""The style sheet of a report: light and dark, telephone and wide screen, print. Colours exist nowhere else."""

from __future__ import annotations

#: Colour name → light and dark. Text and lines were chosen for a contrast of 4.5 and 3 to 1 with the paper, which the
#: tests measure in a browser.
PALETTE: dict[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#14171c"),
    "panel": ("#f5f6f8", "#1d2128"),
    "ink": ("#1a1d21", "#e8eaee"),
    "muted": ("#5a6069", "#a3abb6"),
    "grid": ("#dfe2e7", "#333a44"),
    "result": ("#0b62c4", "#6cb2ff"),
    "control": ("#b14a00", "#ff9d57"),
    "noise": ("#66707d", "#98a2b0"),
    "limit": ("#7a3fb0", "#c79bff"),
    "good": ("#0e6b35", "#62d394"),
    "bad": ("#b3161d", "#ff8a85"),
    "unsure": ("#8a5a00", "#f0bd55"),
    "heat0": ("#e3efe6", "#1f3a2a"),
    "heat1": ("#e6eef8", "#1c2a3d"),
    "heat2": ("#cfe0f4", "#22405f"),
    "heat3": ("#a9c9ee", "#2a5a8a"),
    "heat4": ("#7fb0e4", "#3a78b5"),
    "heat5": ("#f2c879", "#b98a2e"),
    "heat6": ("#ee9c4d", "#e0883a"),
    "heat7": ("#d9542f", "#ff6a45"),
    "heat8": ("#8f0f1f", "#ff4d7a"),
}

_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,"Segoe UI",Roboto,"Noto Sans",sans-serif}
header,main,footer{max-width:1360px;margin:0 auto;padding:0 1.25rem}
header{padding-top:1.75rem}
h1{font-size:2rem;line-height:1.2;margin:.15rem 0 .5rem}
h2{font-size:1.2rem;line-height:1.3;margin:0 0 .35rem}
p{margin:.35rem 0}
a{color:var(--result)}
:focus-visible{outline:2px solid var(--result);outline-offset:2px}
.eyebrow,footer,figcaption,caption,.quiet{color:var(--muted)}
.eyebrow{margin:0;font-size:.95rem}
.lead{font-size:1.12rem;max-width:72ch;overflow-wrap:anywhere}
.good h1{color:var(--good)}.bad h1{color:var(--bad)}.unsure h1{color:var(--unsure)}
header{border-left:0}
.band{border-left:6px solid var(--muted);padding-left:1rem}
.good .band{border-color:var(--good)}.bad .band{border-color:var(--bad)}.unsure .band{border-color:var(--unsure)}
nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:.25rem 1.1rem;padding:0;margin:1rem 0 0}
section{border-top:1px solid var(--grid);padding:1.5rem 0;display:grid;gap:1rem;grid-template-columns:minmax(0,1fr)}
.words{overflow-wrap:anywhere}
.words ul{padding-left:1.2rem;margin:.5rem 0}
figure{margin:0;min-width:0}
svg.plot{display:block;width:100%;height:auto}
svg.wide{display:none}
svg.narrow{max-width:560px;margin:0 auto}
svg text{font-family:system-ui,"Segoe UI",Roboto,"Noto Sans",sans-serif}
details{min-width:0}
summary{cursor:pointer;color:var(--result);padding:.25rem 0}
.scroll{overflow-x:auto;max-width:100%}
details .scroll{max-height:26rem;overflow-y:auto}
table{border-collapse:collapse;font-size:.92rem;min-width:100%}
caption{text-align:left;padding:.3rem 0;font-size:.9rem}
th,td{text-align:left;vertical-align:top;padding:.32rem .7rem .32rem 0}
th,td{border-bottom:1px solid var(--grid);font-weight:400}
thead th{font-weight:600;background:var(--paper);position:sticky;top:0}
tbody th{overflow-wrap:anywhere;min-width:11rem}
td{overflow-wrap:anywhere}
td:not(.n){min-width:7rem}
.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
code,pre{font:.9em ui-monospace,"SFMono-Regular",Menlo,Consolas,monospace;overflow-wrap:anywhere}
pre{white-space:pre-wrap;background:var(--panel);padding:.75rem;border-radius:6px;margin:.5rem 0}
.cause{background:var(--panel);border-radius:8px;padding:.75rem 1rem;margin:.6rem 0}
.cause h3{margin:0 0 .25rem;font-size:1.05rem}
dl{display:grid;grid-template-columns:auto minmax(0,1fr);gap:.1rem .8rem;margin:.7rem 0 0}
dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere}
.key{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem .9rem;padding:0;font-size:.88rem}
.chip{display:inline-block;width:.85em;height:.85em;border-radius:2px;margin-right:.4em;border:1px solid var(--muted)}
footer{padding-bottom:2rem;font-size:.9rem}
.plain .scroll{max-width:64rem}
section:not(.plain) .words :is(th,td){min-width:0;font-size:.86rem;padding-right:.5rem}
.side{display:grid;gap:0 3rem;grid-template-columns:minmax(0,1fr)}
@media (min-width:700px){svg.wide{display:block;max-width:980px}svg.narrow{display:none}}
@media (min-width:1180px){section:not(.plain){grid-template-columns:minmax(0,1fr) minmax(0,21rem);column-gap:2.5rem}
section:not(.plain) .words{grid-column:2;grid-row:1}section:not(.plain) .drawing{grid-column:1;grid-row:1}
section:not(.plain) details{grid-column:1/-1}}
@media (min-width:900px){.side{grid-template-columns:repeat(2,minmax(0,1fr))}}
@media (max-width:480px){.cards thead{display:none}.cards caption{display:block}
.cards,.cards tbody,.cards tr,.cards th,.cards td{display:block}
.cards th,.cards td{border:0;padding:.1rem 0}.cards tr{border-bottom:1px solid var(--grid);padding:.5rem 0}
.cards tbody th{font-weight:600}.cards td[data-label]::before{content:attr(data-label)": ";color:var(--muted)}
h1{font-size:1.6rem}header,main,footer{padding-left:1rem;padding-right:1rem}}
@media print{nav{display:none}section{break-inside:avoid}}
"""


def style_sheet() -> str:
    """All rules, for one ``<style>`` element."""
    light = "".join(f"--{name}:{pair[0]};" for name, pair in PALETTE.items())
    dark = "".join(f"--{name}:{pair[1]};" for name, pair in PALETTE.items())
    painted = "".join(f".fill-{n}{{fill:var(--{n})}}.stroke-{n}{{stroke:var(--{n})}}" for n in PALETTE)
    chips = "".join(f".chip.{n}{{background:var(--{n})}}" for n in PALETTE if n.startswith("heat"))
    return (
        f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"{_RULES.strip()}{painted}.fill-none{{fill:none}}.stroke-none{{stroke:none}}{chips}"
    ).replace("\n", "")
