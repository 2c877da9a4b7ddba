"""The measured numbers as a Markdown table, and its place in the README."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BEGIN = "<!-- benchmark: begin (written by python -m tests.benchmark --readme) -->"
END = "<!-- benchmark: end -->"


def _mib(value: float) -> str:
    return f"{value:.0f} MiB"


def _peer(result: dict[str, Any] | None, name: str) -> str:
    if result is None:
        return ""
    if "error" in result:
        return f"{name}: did not run"
    ratio = f"{result['ratio']:.1f} × cp, " if result.get("ratio") else f"{result['median']:.1f} s, "
    return f"{name}: {ratio}{_mib(result['peak'])}"


def _row(result: dict[str, Any]) -> list[str]:
    if "error" in result:
        return [f"`{result['name']}`", "did not run", "", "", "", ""]
    limit = f"≤ {result['ratio_limit']:g} × cp + 0.5 s" if result["ratio_limit"] else ""
    time = f"{result['ratio']:.2f} × cp"
    if result.get("raw"):
        time, limit = f"{result['median'] / result['raw']:.2f} × ggml alone", f"≤ {result['raw_limit']:g} × ggml"
    return [
        f"`{result['name']}`",
        time,
        limit,
        _mib(result["peak"]),
        f"≤ {_mib(result['peak_limit'])}",
        _peer(result.get("peer"), "by hand"),
    ]


def markdown(results: dict[str, Any]) -> str:
    """The table; ratios of medians, peaks as the largest of all runs."""
    lines = [
        "| work | time | must reach | peak memory | must reach | others, same run |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows = [_row(r) for r in results["rows"]]
    load = results.get("load")
    if load is not None:
        if "error" in load:
            rows.append(["`no_init`, `load_into`", "did not run", "", "", "", ""])
        else:
            speed = (
                f"{load['speedup']:.1f} × faster than the book's loader"
                if load["speedup"]
                else f"{load['median']:.1f} s"
            )
            rows.append(
                [
                    "`no_init()`, build `Llama3Model`, `load_into`",
                    speed,
                    f"≥ {load['speedup_limit']:g} ×",
                    _mib(load["peak"]),
                    f"≤ {_mib(load['peak_limit'])}",
                    _peer(load["peer"], "the book"),
                ]
            )
    layers = results.get("layerwise")
    if layers is not None and "error" not in layers:
        rows.append(
            [
                "`verify hf meta --layerwise`, float32",
                f"{layers['ratio']:.2f} × whole models",
                f"≤ {layers['ratio_limit']:g} ×",
                _mib(layers["peak"]),
                f"≤ {_mib(layers['peak_limit'])}",
                f"whole: {layers['whole']['median']:.0f} s, {_mib(layers['whole']['peak'])}",
            ]
        )
    compared = results.get("diff")
    if compared is not None and "error" not in compared:
        rows.append(
            [
                "`diff hf meta`",
                f"{compared['ratio']:.2f} × reading both",
                f"≤ {compared['ratio_limit']:g} × + 0.5 s",
                _mib(compared["peak"]),
                f"≤ {_mib(compared['peak_limit'])}",
                f"{compared['bytes'] / compared['median'] / 1e9:.1f} GB/s",
            ]
        )
    probe = results.get("probe")
    if probe is not None and "error" in probe:
        rows.append([f"`{probe['name']}`", "did not run", "", "", "", ""])
    elif probe is not None:
        limit = f"≤ {probe['ratio_limit']:g} × reading + 0.5 s"
        time = f"{probe['ratio']:.2f} × reading the file"
        peaks = [_mib(probe["peak"]), f"≤ {_mib(probe['peak_limit'])}"]
        rows.append([f"`{probe['name']}`", time, limit, *peaks, f"`cat`: {probe['read_median']:.1f} s"])
    for quick in results["quick"]:
        if "error" in quick:
            rows.append([f"`convert {quick['name']}`", "did not run", "", "", "", ""])
            continue
        torch = "imports torch" if quick["imports_torch"] else "no torch import"
        limit = f"≤ {quick['limit']:g} s"
        rows.append(
            [f"`convert {quick['name']}`", f"{quick['median']:.2f} s, {torch}", limit, _mib(quick["peak"]), "", ""]
        )
    deeper = results.get("deeper")
    if deeper is not None and "error" not in deeper:
        peaks = f"{_mib(deeper['peak'])} → {_mib(deeper['peak_deep'])}"
        rows.append(["`hf-to-scratch`, 16 → 32 layers", "", "", peaks, "the same", ""])
    lines += ["| " + " | ".join(cells) + " |" for cells in rows]
    said = ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    cps = [r["cp_median"] for r in results["rows"] if "cp_median" in r]
    copied = f" One `cp` with `sync` took {min(cps):.1f} to {max(cps):.1f} s." if cps else ""
    note = f"Medians of {results['runs']} runs, each next to `cp` and `sync` of a file as large as the larger side."
    return "\n".join([*lines, "", f"{note}{copied} Measured with {said}."])


def all_good(results: dict[str, Any]) -> bool:
    """Whether every row ran and reached its mark."""
    every = [
        *results["rows"],
        *results["quick"],
        *(results[k] for k in ("load", "layerwise", "diff", "probe", "deeper") if k in results),
    ]
    return all(r.get("ok", False) for r in every)


def into_readme(readme: Path, text: str, *, marks: tuple[str, str] = (BEGIN, END)) -> None:
    """Replace what stands between the marks."""
    begin, end = marks
    before, rest = readme.read_text().split(begin, 1)
    _, after = rest.split(end, 1)
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}")
