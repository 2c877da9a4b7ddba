"""``--dry-run``: the plan as text or JSON: what is read and written, memory, space, every decision and assumption."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from convert.errors import ConvertError
    from convert.plan import ConversionPlan

#: Files that are listed by name; ``--json`` has them all.
_SHOWN = 16


def show_plan(
    plan: ConversionPlan, out: Path, *, threads: int, as_json: bool, overwrite: bool, force: bool, resume: bool = False
) -> int:
    """Print what would be read and written, and what would forbid it; returns the exit code that this would have."""
    from convert.decisions import lines
    from convert.report import human_bytes, printable
    from convert.zero_tails import zero_tail_notes

    notes = [*zero_tail_notes(plan.source), *plan.notes]
    forbidden = _forbidden(plan, out, threads=threads, overwrite=overwrite, force=force, resume=resume)
    problems = forbidden.problems if forbidden else ()
    code = forbidden.exit_code if forbidden else 0

    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    read = sum(f.stat().st_size for f in plan.source.files)
    beside = _beside(plan)
    value = {
        "schema": "convert.plan/1",
        "source": plan.source.title,
        "source_layout": plan.source.layout,
        "family": plan.source.family,
        "target_layout": plan.request.target,
        "out": str(out),
        "reads": [{"name": f.name, "bytes": f.stat().st_size} for f in plan.source.files],
        "files": [{"name": f.name, "bytes": f.size, "tensors": len(f.entries)} for f in plan.files],
        "sidecars": sorted(plan.sidecars),
        "beside": beside,
        "types": _types(plan),
        "bytes_read": read,
        "bytes_written": plan.nbytes,
        "bytes_free": free,
        "peak_memory": plan.peak_memory(threads),
        "threads": threads,
        "tied": plan.tied,
        "decisions": plan.decisions,
        "notes": notes,
        "problems": [problem.as_json() for problem in problems],
    }
    if as_json:
        click.echo(json.dumps(value, indent=2))
        return code
    source = plan.source
    click.echo(f"plan: {source.title} ({source.family}, {source.layout}) → {out} ({plan.request.target})")
    click.echo(f"reads {human_bytes(read)}:")
    _list([f"{path.name}  {human_bytes(path.stat().st_size)}" for path in plan.source.files])
    enough = "" if free >= plan.nbytes else ", NOT ENOUGH"
    click.echo(f"writes {human_bytes(plan.nbytes)} ({human_bytes(free)} free{enough}):")
    _list([f"{file.name}  {human_bytes(file.size)}, {len(file.entries)} tensors" for file in plan.files])
    for item in beside:
        made = "copied" if item["copied"] else "made"
        click.echo(f"  {item['name']}  {human_bytes(item['bytes'])}, {made}")
    types = (f"{count} {dtype} ({human_bytes(size)})" for dtype, (count, size) in _types(plan).items())
    click.echo(f"tensors: {', '.join(types)}")
    click.echo(f"peak memory: about {human_bytes(plan.peak_memory(threads))} with {threads} threads")
    for line in lines({k: v for k, v in plan.decisions.items() if k != "substituted"}):  # notes tell what that costs
        click.echo(f"decided: {line}")
    for note in notes:
        if not note.startswith(("ignored ", "rows of Q and K are put ")):  # told above
            click.echo(printable(f"note: {note}"))
    for problem in problems:
        hint = f" {problem.hint}" if problem.hint else ""
        click.echo(printable(f"error: the conversion would stop here: {problem.message}{hint}"))
    click.echo("Nothing was written (dry run).")
    return code


def _list(lines: list[str]) -> None:
    """Names of files; of hundreds of shards the first and the last tell enough."""
    from convert.report import printable

    shown = lines if len(lines) <= _SHOWN else [*lines[: _SHOWN - 2], f"… {len(lines) - _SHOWN + 1} more", lines[-1]]
    for line in shown:
        click.echo(printable(f"  {line}"))


def _forbidden(
    plan: ConversionPlan, out: Path, *, threads: int, overwrite: bool, force: bool, resume: bool = False
) -> ConvertError | None:
    """What would stop the conversion before its first byte; None if nothing would."""
    from convert.errors import ConvertError
    from convert.run import check_target, refuse_memory

    try:
        check_target(plan, out, overwrite=overwrite, force=force, resume=resume)
        if not force:
            refuse_memory(plan.peak_memory(threads))
    except ConvertError as error:
        return error
    return None


def _beside(plan: ConversionPlan) -> list[dict[str, Any]]:
    """The small files: name, bytes, and whether they are copied as they are."""
    return [
        {
            "name": name,
            "bytes": len(value) if isinstance(value, bytes) else value.stat().st_size,
            "copied": not isinstance(value, bytes),
        }
        for name, value in sorted(plan.sidecars.items())
    ]


def _types(plan: ConversionPlan) -> dict[str, tuple[int, int]]:
    """Tensors and bytes by element type, the largest share first."""
    out: dict[str, tuple[int, int]] = {}
    for file in plan.files:
        for entry in file.entries:
            count, size = out.get(entry.dtype, (0, 0))
            out[entry.dtype] = (count + 1, size + entry.nbytes)
    return dict(sorted(out.items(), key=lambda item: -item[1][1]))
