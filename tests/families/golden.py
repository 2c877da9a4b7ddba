"""Golden files of a family: every name and shape of a small config, and of the published sizes with layers folded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convert import config as configs
from convert.layout import Dims, expand
from convert.report import fold_names
from convert.table import load_table

FOLDER = Path(__file__).parents[1] / "golden"


def shapes(family: str, layout: str, config: dict[str, Any], present: Any = ()) -> dict[str, list[int]]:
    """Names and shapes of a layout for a hub config."""
    table = load_table(family)
    return {n: list(s.shape) for n, s in expand(table, Dims(table, config), layout, present).items()}


def render(family: str, layout: str, small: dict[str, Any]) -> str:
    """What the golden file holds."""
    lines = [f"# {family}, {layout} layout: a small config"]
    lines += [f"{name} {shape}" for name, shape in shapes(family, layout, small).items()]
    table = load_table(family)
    for size in table.sizes:
        found = shapes(family, layout, configs.published(table, size))
        lines += ["", f"# {size}: {len(found)} tensors"]
        groups: dict[tuple[str, str], list[str]] = {}
        for name, shape in found.items():
            tail = ".".join("*" if p.isdecimal() else p for p in name.split("."))
            groups.setdefault((tail, str(shape)), []).append(name)
        lines += [f"{'; '.join(fold_names(names))} {shape}" for (_, shape), names in groups.items()]
    return "\n".join(lines) + "\n"


def same(family: str, layout: str, small: dict[str, Any]) -> bool:
    """Whether the table still gives what the golden file holds."""
    return (FOLDER / f"{family}.{layout}.txt").read_text(encoding="utf-8") == render(family, layout, small)


def write(family: str, small: dict[str, Any]) -> None:
    """Write a family's golden files anew."""
    for layout in load_table(family).layouts:
        (FOLDER / f"{family}.{layout}.txt").write_text(render(family, layout, small), encoding="utf-8")
