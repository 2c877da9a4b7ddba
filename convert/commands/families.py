"""``convert families``."""

from __future__ import annotations

import json

import click

from convert.commands.options import output_options


@click.command("families")
@output_options
def command(as_json: bool, quiet: bool, debug: bool) -> int:
    """Say for each family what it covers, its sizes, layouts and reference model, and what is special about it."""
    from convert.listing import family, family_lines
    from convert.table import families, load_table

    said = [family(load_table(name)) for name in families()]
    if as_json:
        click.echo(json.dumps({"schema": "convert.families/1", "families": said}, indent=2, ensure_ascii=False))
        return 0
    for number, item in enumerate(said):
        click.echo(("\n" if number else "") + f"{item['family']}: {item['title']}")
        for word, text in family_lines(item):
            click.echo(f"  {word:12}  {text}")
    return 0
