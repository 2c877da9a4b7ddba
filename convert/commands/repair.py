"""``convert repair SRC OUT --fix NAME``: write a corrected copy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convert.commands.options import output_options, source_options
from convert.errors import UsageError

if TYPE_CHECKING:
    from convert.repair import Repaired


@click.command("repair")
@click.argument("src", metavar="SRC", required=False)
@click.argument("out", metavar="OUT", required=False)
@click.option(
    "--fix",
    "fixes",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="What to undo, as `convert diagnose` names it; may be given several times, in order.",
)
@click.option("--list", "list_", is_flag=True, help="Say which fixes there are; with SRC, which of them fit it.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option("--resume", is_flag=True, help="Go on from what a stopped run left; leave what is finished if stopped.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--threads", type=click.IntRange(1, 256), default=2, show_default=True, help="Workers.")
@click.option("--force", is_flag=True, help="Go on although disk space or memory look too small.")
@source_options
@output_options
def command(src: str | None, out: str | None, as_json: bool, quiet: bool, debug: bool, **options: Any) -> int:
    """Write a corrected copy of a checkpoint that loads and misbehaves.

    OUT gets the layout, container and types of SRC. What a fix does not touch is copied, and compared with SRC
    afterwards, bit for bit. `convert diagnose SRC` says which fix is needed.
    """
    fixes, list_ = options.pop("fixes"), options.pop("list_")
    how = {key: options.pop(key) for key in ("overwrite", "resume", "dry_run", "threads", "force")}
    said = {key: value for key, value in options.items() if value is not None}
    if list_:
        return _list(src, said, as_json=as_json)
    if src is None or out is None:
        raise click.UsageError(f"Missing argument '{'SRC' if src is None else 'OUT'}'.")
    return _repair(src, Path(out), fixes, said, as_json=as_json, quiet=quiet, **how)


def _repair(
    src: str,
    out: Path,
    fixes: tuple[str, ...],
    said: dict[str, Any],
    *,
    as_json: bool,
    quiet: bool,
    dry_run: bool,
    **how: Any,
) -> int:
    from convert.commands.conversions import progress_bar
    from convert.repair import carry_out, plan_repair

    plan = plan_repair(src, fixes, **said)
    with plan.source:
        plan.conversion.bind(out)
        if dry_run:
            from convert.commands.dry_run import show_plan

            return show_plan(plan.conversion, out, as_json=as_json, **how)
        with progress_bar(plan.conversion, quiet=quiet or as_json) as progress:
            done = carry_out(plan, out, progress=progress, **how)
    if as_json:
        click.echo(json.dumps(done.as_json(), indent=2))
    elif not quiet:
        _tell(done)
    return 0


def _tell(done: Repaired) -> None:
    from convert.report import human_bytes, printable

    source, summary = done.plan.source, done.summary
    click.echo(
        f"{source.path} ({source.family}, {source.layout}) → {summary.out}: {summary.tensors} tensors, "
        f"{human_bytes(summary.bytes_written)} in {summary.seconds:.1f} s"
    )
    for note in summary.notes:
        click.echo(printable(f"  note: {note}"))
    click.echo(
        f"Checked: {done.untouched} tensors that the repair does not touch are those of the source, bit for bit; "
        f"{len(done.plan.changed)} were changed."
    )


def _list(src: str | None, said: dict[str, Any], *, as_json: bool) -> int:
    from convert.faults import HINTS
    from convert.repair import applicable_fixes, known_fixes

    if src is None:
        rows = [(f"{f.fix}=…" if f.valued else f"{f.fix}", f.words, HINTS.get(f.name)) for f in known_fixes()]
    else:
        rows = [(f"{case.fix}", case.words, None) for case in applicable_fixes(src, **said)]
    if as_json:
        value = {"schema": "convert.fixes/1", "fixes": [{"fix": f, "undoes": w, "value": h} for f, w, h in rows]}
        click.echo(json.dumps(value, indent=2))
        return 0
    if src is None:
        width = max(len(fix) for fix, _, _ in rows)
        for fix, words, hint in rows:
            click.echo(f"{fix:{width}}  undoes: {words.replace('{}', '…')}" + (f" ({hint})" if hint else ""))
        return 0
    return _list_fitting(rows)


def _list_fitting(rows: list[tuple[str, str, str | None]]) -> int:
    """Fixes with many values (every layer, every base) on one line each."""
    grouped: dict[str, list[tuple[str, str]]] = {}
    for fix, words, _ in rows:
        name, _, value = fix.partition("=")
        grouped.setdefault(name, []).append((value, words))
    if not grouped:
        raise UsageError("no fix fits this model.")
    width = max(map(len, grouped))
    for name, found in grouped.items():
        values = [value for value, _ in found if value]
        shown = ", ".join(values[:6]) + (f" … ({len(values)} in all)" if len(values) > 6 else "")
        words = found[0][1].replace(values[0], "…") if values else found[0][1]
        click.echo(f"{name:{width}}  undoes: {words}" + (f"; worth trying: {shown}" if values else ""))
    return 0
