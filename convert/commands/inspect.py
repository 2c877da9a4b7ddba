"""``convert inspect``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from convert.commands.options import output_options, source_options

if TYPE_CHECKING:
    from convert.inspection import Inspection


@click.command("inspect")
@click.argument("src")
@click.option("--tensors", is_flag=True, help="List every tensor: name, type, shape, bytes, file.")
@source_options
@output_options
def command(src: str, tensors: bool, as_json: bool, quiet: bool, debug: bool, **options: Any) -> int:
    """Say what the checkpoint SRC (a folder, a file, or org/name on the Hub) is, from its headers and samples."""
    from convert.devices import few_threads

    few_threads()
    from convert.inspect import inspect

    found = inspect(src, **{k: v for k, v in options.items() if v is not None})
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
    elif not quiet:
        _show(found)
        if tensors:
            _list(found)
    return 0


def _show(found: Inspection) -> None:
    from convert.report import printable

    click.echo(found.title or str(found.path))
    pairs = found.lines()
    wide = max(len(key) for key, _ in pairs)
    for key, value in pairs:
        click.echo(printable(f"  {key.ljust(wide)}  {value}"))


def _list(found: Inspection) -> None:
    from convert.inspection import dtype_name
    from convert.report import printable

    rows = [
        (t.name, dtype_name(t.dtype), str(list(t.shape)), f"{t.nbytes:,}", ", ".join(t.files)) for t in found.tensors
    ]
    wide = [max(len(row[i]) for row in rows) for i in range(4)]
    for name, kind, shape, size, files in rows:
        click.echo(
            printable(
                f"{name.ljust(wide[0])}  {kind.ljust(wide[1])}  {shape.ljust(wide[2])}  {size.rjust(wide[3])}  {files}"
            )
        )
