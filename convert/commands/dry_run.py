"""``--dry-run``: the plan as text or JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from convert.plan import ConversionPlan


def show_plan(plan: ConversionPlan, out: Path, *, threads: int, as_json: bool, overwrite: bool) -> None:
    """Print what would be read and written."""
    from convert.report import human_bytes

    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    read = sum(f.stat().st_size for f in plan.source.files)
    value = {
        "schema": "convert.plan/1",
        "source": str(plan.source.path),
        "source_layout": plan.source.layout,
        "family": plan.source.family,
        "target_layout": plan.request.target,
        "out": str(out),
        "files": [{"name": f.name, "bytes": f.size, "tensors": len(f.entries)} for f in plan.files],
        "sidecars": sorted(plan.sidecars),
        "types": _types(plan),
        "bytes_read": read,
        "bytes_written": plan.nbytes,
        "bytes_free": free,
        "peak_memory": plan.peak_memory(threads),
        "tied": plan.tied,
        "notes": plan.notes,
    }
    if as_json:
        click.echo(json.dumps(value, indent=2))
        return
    click.echo(f"plan: {plan.source.path} ({plan.source.family}, {plan.source.layout}) → {out} ({plan.request.target})")
    for file in plan.files:
        click.echo(f"  {file.name}  {human_bytes(file.size)}, {len(file.entries)} tensors")
    click.echo(f"  beside: {', '.join(sorted(plan.sidecars))}")
    types = (f"{count} {dtype} ({human_bytes(size)})" for dtype, (count, size) in _types(plan).items())
    click.echo(f"  tensors: {', '.join(types)}")
    click.echo(f"reads {human_bytes(read)}, writes {human_bytes(plan.nbytes)}; {human_bytes(free)} free")
    click.echo(f"peak memory: about {human_bytes(plan.peak_memory(threads))} with {threads} threads")
    if free < plan.nbytes:
        click.echo("warning: not enough free space")
    if plan.main_path(out).exists() and not overwrite:
        click.echo(f"warning: {plan.main_path(out)} exists; --overwrite would replace it")
    for note in plan.notes:
        click.echo(f"note: {note}")
    click.echo("Nothing was written (dry run).")


def _types(plan: ConversionPlan) -> dict[str, tuple[int, int]]:
    """Tensors and bytes by element type, the largest share first."""
    out: dict[str, tuple[int, int]] = {}
    for file in plan.files:
        for entry in file.entries:
            count, size = out.get(entry.dtype, (0, 0))
            out[entry.dtype] = (count + 1, size + entry.nbytes)
    return dict(sorted(out.items(), key=lambda item: -item[1][1]))
