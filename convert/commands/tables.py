"""``convert tables``: show, check and start mapping tables and names files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convert.commands.options import output_options

if TYPE_CHECKING:
    from convert.table import MappingTable

_LAYOUT = click.Choice(["hf", "meta", "scratch", "gguf", "openai"])


@click.group("tables")
def command() -> None:
    """Show, check and start mapping tables and names files."""


@command.command("list", short_help="List families and ready-made names files.")
@output_options
def list_(as_json: bool, quiet: bool, debug: bool) -> int:
    """List the families that have a table, and the ready-made names files."""
    from convert.names import load_names, ready_made
    from convert.table import families, load_table

    tables = {f: load_table(f).title for f in families()}
    names = {n: load_names(n) for n in ready_made()}
    if as_json:
        said = {"families": tables, "names": {n: {"title": t.title, "family": t.family} for n, t in names.items()}}
        click.echo(json.dumps({"schema": "convert.tables/1", **said}, indent=2, ensure_ascii=False))
        return 0
    click.echo("families (convert tables show FAMILY)")
    for name, title in tables.items():
        click.echo(f"  {name:12} {title}")
    click.echo("names files (--names NAME)")
    for name, table in names.items():
        click.echo(f"  {name:12} {table.title}, of the family {table.family}")
    return 0


@command.command("show", short_help="Show a table: every tensor, its shape, its names.")
@click.argument("family")
@click.option("--resolved", is_flag=True, help="The TOML with everything it extends, or with --size every key.")
@click.option("--layout", type=_LAYOUT, help="One layout only.")
@click.option("--size", metavar="NAME", help="A published size; lists its tensors with their shapes.")
@output_options
def show(
    family: str, resolved: bool, layout: str | None, size: str | None, as_json: bool, quiet: bool, debug: bool
) -> int:
    """Show the table FAMILY (or a names file): every tensor, its shape, and its name in each layout."""
    from convert import listing, toml_text
    from convert.report import printable

    table = _load(family)
    if size is not None:
        slots = listing.expansion(table, layout or _default_layout(table), size)
        if as_json:
            tensors = {name: list(slot.shape) for name, slot in slots.items()}
            said = {"schema": "convert.table-tensors/1", "family": table.family, "size": size, "tensors": tensors}
            click.echo(json.dumps(said, indent=2))
        else:
            click.echo(printable("\n".join(listing.slot_lines(slots))))
    elif as_json:
        click.echo(json.dumps({"schema": "convert.table/1", **table.raw}, indent=2, ensure_ascii=False))
    elif resolved:
        click.echo(toml_text.dumps(table.raw), nl=False)
    else:
        click.echo(printable("\n".join(listing.story(table, (layout,) if layout else None))))
    return 0


@command.command("check", short_help="Load a table or names file strictly; compare it.")
@click.argument("file")
@click.option("--against", metavar="CKPT", help="A checkpoint that it must describe.")
@click.option("--layout", type=_LAYOUT, help="The checkpoint's layout, where the names do not tell.")
@click.option("--config", metavar="CONFIG", help="The checkpoint's config, where none lies beside it.")
@click.option("--key", help="Which dict of a training checkpoint.")
@click.option("--follow-links", is_flag=True, help="Follow links that lead out of the checkpoint's folder.")
@output_options
def check(file: str, against: str | None, as_json: bool, quiet: bool, debug: bool, **options: Any) -> int:
    """Load FILE (a table or a names file) strictly, and compare it with a checkpoint. Exit code 0 or 1."""
    from convert.comparison import SCHEMA, compare, load
    from convert.report import printable

    if against is None:
        table = load(Path(file))
        if as_json:
            said = {"schema": SCHEMA, "ok": True, "family": table.family, "layout": None, "problems": []}
            click.echo(json.dumps(said | {"keys": len(table.rows)}, indent=2, ensure_ascii=False))
        elif not quiet:
            click.echo(f"ok: {file}: {len(table.rows)} tensors of the family {table.family}; --against CKPT compares")
        return 0
    found = compare(Path(file), against, **{k: v for k, v in options.items() if v is not None})
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2, ensure_ascii=False, default=str))
    elif not (quiet and found.ok):
        click.echo(printable("\n".join(found.lines())))
    return 0 if found.ok else 1


@command.command("init", short_help="Start a names file, or the table of a new family.")
@click.option("--family", required=True, metavar="NAME", help="The family that your model belongs to.")
@click.option("--as", "kind", metavar="NAME", help="Begin a table for a new family of this name, like --family.")
@click.option("--out", metavar="FILE", help="Write here instead of to the terminal; an existing file is kept.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def init(family: str, kind: str | None, out: str | None, debug: bool) -> int:
    """Print a names file for your own module names, or with --as the table of a new family, to fill in."""
    from convert.errors import UsageError
    from convert.skeleton import beginning, skeleton
    from convert.table import load_table

    text = beginning(load_table(family), kind) if kind else skeleton(load_table(family))
    if out is None:
        click.echo(text, nl=False)
        return 0
    path = Path(out)
    if path.exists():
        raise UsageError(f"{path} exists already.", hint="Name another file; nothing is overwritten here.")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
    what = "what is different" if kind else "your names"
    click.echo(f"{path}: fill in {what}, then `convert tables check {path} --against CKPT`")
    return 0


def _load(name: str) -> MappingTable:
    """A family by name, or a names file by name or path."""
    from convert.comparison import load
    from convert.names import load_names, ready_made
    from convert.table import load_table

    if name in ready_made():
        return load_names(name)
    return load(Path(name)) if Path(name).is_file() else load_table(name)


def _default_layout(table: MappingTable) -> str:
    return "scratch" if table.names_file else table.layouts[0]
