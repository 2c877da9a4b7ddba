"""``convert validate``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from convert.commands.options import output_options, source_options

if TYPE_CHECKING:
    from convert.check import Check
    from convert.validate import Validation


@click.command("validate")
@click.argument("src")
@click.option("--scan", is_flag=True, help="Read every value: NaN, infinities, zeros, tensors that look odd.")
@click.option(
    "--hash",
    "hashes",
    is_flag=True,
    help="Hash the files; compare with the Hugging Face cache, checklist.chk or the record.",
)
@click.option("--checksums", metavar="FILE", help="Hash the files; compare with this list of sha256sum or md5sum.")
@click.option("--threads", type=click.IntRange(1, 256), default=2, show_default=True, help="Workers that read.")
@source_options
@output_options
def command(
    src: str,
    scan: bool,
    hashes: bool,
    checksums: str | None,
    threads: int,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **options: Any,
) -> int:
    """Check the checkpoint SRC: every tensor once, right shapes, whole files. Exit code 0 (sound) or 1."""
    from convert.devices import few_threads

    few_threads()
    from convert.validate import validate

    with progress_bar(shown=(scan or hashes or checksums is not None) and not (as_json or quiet)) as progress:
        chosen = {k: v for k, v in options.items() if v is not None}
        found = validate(
            src, scan=scan, hashes=hashes, checksums=checksums, threads=threads, progress=progress, **chosen
        )
    return tell(found, as_json=as_json, quiet=quiet)


def tell(found: Validation | Check, *, as_json: bool, quiet: bool) -> int:
    """Print findings, good ones too unless asked not to; returns the exit code."""
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
    elif not (quiet and found.ok):
        from convert.report import printable

        for line in found.lines():
            click.echo(printable(line))  # names of tensors and files are in it
    return found.exit_code


@contextmanager
def progress_bar(*, shown: bool) -> Iterator[Callable[[int], None] | None]:
    """Bytes read and the rate, on a terminal only; what is called with bytes, or None."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("reading"), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda count: bar.advance(task, count)
