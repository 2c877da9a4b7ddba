"""``convert metadata``: shows the key-values of a GGUF file, and changes them without rewriting data when they fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convert.commands.gguf_options import pairs
from convert.commands.options import output_options
from convert.errors import Problem, UsageError

if TYPE_CHECKING:
    from convert.formats.gguf_values import KeyValues, Value

#: How much of a value is shown.
_WIDTH = 100
_ITEMS = 4


@click.command("metadata", help="Show the key-values of a GGUF FILE, or change them.")
@click.argument("file", metavar="FILE")
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", callback=pairs, help="Set a key; u32:5 states the type."
)
@click.option("--remove", multiple=True, metavar="KEY", help="Remove a key.")
@click.option("--force", is_flag=True, help="Change the file that a link points to.")
@output_options
def command(
    file: str,
    sets: list[tuple[str, str]],
    remove: tuple[str, ...],
    force: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> int:
    """Show or change."""
    from convert.formats.gguf_header import read_header

    path = Path(file)
    if not sets and not remove:
        from convert.hub.place import place

        at = place(file, way="glance")  # what it made lives as long
        path = at.path
    if not path.is_file():
        raise UsageError(f"{path} is no file.", hint="Name one GGUF file; of a split model the first piece.")
    values = read_header(path).metadata
    if not sets and not remove:
        _show(values, as_json=as_json)
        return 0
    if path.is_symlink() and not force:
        raise UsageError(
            f"{path} is a link to {path.resolve()}; changing it would change the file that others see there too.",
            hint="Copy the file first; or --force changes what it points to.",
        )
    from convert.formats.gguf_edit import set_metadata

    changes = _changes(values, sets, remove)
    in_place = set_metadata(path, changes)
    how = "in place, no data was moved" if in_place else "the header grew: the file was copied once, with room for more"
    if as_json:
        keys = {"set": [key for key, value in changes.items() if value is not None], "removed": list(remove)}
        click.echo(
            json.dumps({"schema": "convert.metadata/1", "file": str(path), "in_place": in_place, **keys}, indent=2)
        )
    elif not quiet:
        click.echo(f"{path}: {len(changes)} key{'' if len(changes) == 1 else 's'} changed ({how}).")
    return 0


def _changes(values: KeyValues, sets: list[tuple[str, str]], remove: tuple[str, ...]) -> dict[str, Value | None]:
    from convert.formats.gguf_values import encode
    from convert.gguf_metadata import typed

    changes: dict[str, Value | None] = {}
    problems = []
    for key in remove:
        if key not in values:
            problems.append(Problem("metadata", f"--remove {key}: the file has no such key.", found=key))
        changes[key] = None
    for key, text in sets:
        try:
            if key.startswith("convert."):
                raise ValueError("such keys record the conversion, and convert reads them back; --remove takes one out")
            if key in remove:
                raise ValueError("the same key is removed")
            value = typed(key, text, like=values.types.get(key))
            encode(key, value)
            changes[key] = value
        except ValueError as error:
            problems.append(Problem("metadata", f"--set {key}={text}: {error}.", found=text))
    if problems:
        raise UsageError(problems)
    return changes


def _show(values: KeyValues, *, as_json: bool) -> None:
    if as_json:
        entries = {key: {"type": value.type, "value": _plain(value)} for key, value in values.typed()}
        click.echo(json.dumps({"schema": "convert.metadata/1", "metadata": entries}, indent=2, ensure_ascii=False))
        return
    from convert.formats.gguf_edit import PADDING_KEY
    from convert.report import printable

    shown = [(key, value) for key, value in values.typed() if key != PADDING_KEY]  # spaces, room for later edits
    width = max((len(key) for key, _ in shown), default=0)
    for key, value in shown:
        click.echo(printable(f"{key:<{width}}  {value.type:<8}  {_short(value)}"))


def _plain(value: Value) -> Any:
    return list(value.value) if value.type.startswith("arr:") else value.value


def _short(value: Value) -> str:
    if not value.type.startswith("arr:"):
        text = json.dumps(value.value, ensure_ascii=False)
        return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}… ({len(value.value):,} characters)"
    items = list(value.value[:_ITEMS])
    more = ", …" if len(value.value) > _ITEMS else ""
    return f"[{', '.join(json.dumps(i, ensure_ascii=False) for i in items)}{more}] ({len(value.value):,})"
