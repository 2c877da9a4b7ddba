"""``convert push``."""

from __future__ import annotations

import json

import click

from convert.commands.options import output_options


@click.command("push")
@click.argument("out", metavar="OUT")
@click.argument("repo", metavar="ORG/NAME")
@click.option("--private", is_flag=True, help="If the repository has to be made, make it private.")
@click.option("--dry-run", is_flag=True, help="Show the files and the model card; send nothing.")
@click.option("--follow-links", is_flag=True, help="Upload what links lead to, also out of OUT's folder.")
@output_options
def command(
    out: str, repo: str, private: bool, dry_run: bool, follow_links: bool, as_json: bool, quiet: bool, debug: bool
) -> int:
    """Upload OUT, which a conversion made, to the repository ORG/NAME on the Hub, with a model card."""
    from convert.hub.push import push

    done = push(out, repo, private=private, dry_run=dry_run, follow_links=follow_links, quiet=quiet or as_json)
    if as_json:
        click.echo(json.dumps(done.as_json(), indent=2, ensure_ascii=False))
    elif not quiet:
        if dry_run:
            for name, size in done.files:
                click.echo(f"  {name}  {size:,} bytes")
            click.echo(done.card)
        click.echo(done.line())
    return 0
