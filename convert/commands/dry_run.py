"""``--dry-run``: the plan as text or JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from convert.errors import ConvertError
    from convert.plan import ConversionPlan


def show_plan(
    plan: ConversionPlan, out: Path, *, threads: int, as_json: bool, overwrite: bool, force: bool = False
) -> int:
    """Print what would be read and written, and what would forbid it; returns the exit code that this would have."""
    from convert.report import human_bytes

    forbidden = _forbidden(plan, out, threads=threads, overwrite=overwrite, force=force)
    problems = forbidden.problems if forbidden else ()
    code = forbidden.exit_code if forbidden else 0

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
        "problems": [problem.as_json() for problem in problems],
    }
    if as_json:
        click.echo(json.dumps(value, indent=2))
        return code
    click.echo(f"plan: {plan.source.path} ({plan.source.family}, {plan.source.layout}) → {out} ({plan.request.target})")
    for file in plan.files:
        click.echo(f"  {file.name}  {human_bytes(file.size)}, {len(file.entries)} tensors")
    click.echo(f"  beside: {', '.join(sorted(plan.sidecars))}")
    types = (f"{count} {dtype} ({human_bytes(size)})" for dtype, (count, size) in _types(plan).items())
    click.echo(f"  tensors: {', '.join(types)}")
    click.echo(f"reads {human_bytes(read)}, writes {human_bytes(plan.nbytes)}; {human_bytes(free)} free")
    click.echo(f"peak memory: about {human_bytes(plan.peak_memory(threads))} with {threads} threads")
    for note in plan.notes:
        click.echo(f"note: {note}")
    for problem in problems:
        hint = f" {problem.hint}" if problem.hint else ""
        click.echo(f"error: the conversion would stop here: {problem.message}{hint}")
    click.echo("Nothing was written (dry run).")
    return code


def _forbidden(plan: ConversionPlan, out: Path, *, threads: int, overwrite: bool, force: bool) -> ConvertError | None:
    """What would stop the conversion before its first byte; None if nothing would."""
    from convert.errors import ConvertError
    from convert.run import check_target, refuse_memory

    try:
        check_target(plan, out, overwrite=overwrite, force=force)
        if not force:
            refuse_memory(plan.peak_memory(threads))
    except ConvertError as error:
        return error
    return None


def _types(plan: ConversionPlan) -> dict[str, tuple[int, int]]:
    """Tensors and bytes by element type, the largest share first."""
    out: dict[str, tuple[int, int]] = {}
    for file in plan.files:
        for entry in file.entries:
            count, size = out.get(entry.dtype, (0, 0))
            out[entry.dtype] = (count + 1, size + entry.nbytes)
    return dict(sorted(out.items(), key=lambda item: -item[1][1]))
