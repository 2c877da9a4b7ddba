"""``convert check``."""

from __future__ import annotations

from typing import Any

import click

from convert.commands.options import output_options, source_options
from convert.commands.validate import progress_bar, tell


@click.command("check")
@click.argument("out", metavar="OUT")
@click.option("--source", metavar="SRC", help="What it was made from: derive every tensor again, compare every byte.")
@click.option("--threads", type=click.IntRange(1, 256), default=2, show_default=True, help="Workers.")
@source_options
@output_options
def command(out: str, source: str | None, threads: int, as_json: bool, quiet: bool, debug: bool, **options: Any) -> int:
    """Compare OUT, which a conversion made, with its record: what was changed since. Exit code 0 (nothing) or 1.

    The options about names and config speak of SRC; what the record says of it is known already.
    """
    from convert.check import check

    with progress_bar(shown=not (as_json or quiet)) as progress:
        chosen = {k: v for k, v in options.items() if v is not None}
        found = check(out, source=source, threads=threads, progress=progress, **chosen)
    return tell(found, as_json=as_json, quiet=quiet)
