"""``convert diagnose SRC``: find what is wrong with a checkpoint that loads and misbehaves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from convert.commands.options import output_options, report_option, report_writer, source_options
from convert.errors import Problem, UsageError
from convert.prompt import read_text

Step = Callable[[str, int, int], None]


@click.command("diagnose")
@click.argument("src")
@click.option("--against", metavar="GOOD", help="A good copy of the same model, of any layout.")
@click.option("--probe-only", is_flag=True, help="Look at the numbers only; run nothing.")
@click.option("--text", metavar="TEXT|FILE", help="What to run on, in place of the shipped text; 3,000 tokens decide.")
@click.option("--tokens", metavar="FILE", help="Token ids to run on (a JSON list), where there is no tokenizer.")
@click.option("--tokenizer", metavar="PATH", help="The tokenizer: a folder or file, if not beside SRC.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, mps.")
@click.option("--threads", type=click.IntRange(1, 256), default=2, show_default=True, help="Workers that read.")
@source_options
@report_option
@output_options
def command(
    src: str,
    against: str | None,
    probe_only: bool,
    text: str | None,
    tokens: str | None,
    tokenizer: str | None,
    device: str,
    threads: int,
    report: str | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **options: Any,
) -> int:
    """Find what is wrong with SRC, a checkpoint that loads and misbehaves.

    The numbers are looked at first; then the model runs on a text with every known fault undone in turn, and what makes
    it predict the text better than chance allows is the cause. Exit code 0: good, 1: broken, 3: undecided.
    """
    from convert.devices import few_threads, share_cores

    if probe_only:
        few_threads()
    else:
        share_cores()
    from convert.diagnose import diagnose

    write_report = report_writer(report, quiet=quiet)
    with _progress(shown=not (quiet or as_json)) as on_step:
        result = diagnose(
            src,
            against=against,
            probe_only=probe_only,
            text=_text(text),
            tokens=_tokens(tokens),
            tokenizer=tokenizer,
            device=device,
            threads=threads,
            on_step=on_step,
            **{key: value for key, value in options.items() if value is not None},
        )
    if as_json:
        click.echo(json.dumps(result.as_json(), indent=2, ensure_ascii=False))
    elif not quiet:
        from convert.terminal import show

        show(result)
    write_report(result)
    return result.exit_code


def _text(said: str | None) -> str | None:
    if said is None:
        return None
    path = Path(said.removeprefix("@"))
    try:
        known = path.is_file()
    except OSError:  # a text too long to be a name
        known = False
    return read_text(path) if known else said


def _tokens(path: str | None) -> list[int] | None:
    if path is None:
        return None
    try:
        found = json.loads(read_text(Path(path)))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        raise UsageError(Problem("tokens", f"{path} is no JSON list of token ids.", file=path))
    return found


@contextmanager
def _progress(*, shown: bool) -> Iterator[Step | None]:
    """A bar on a terminal, elsewhere a line whenever something else begins."""
    if not shown:
        yield None
        return
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("opening", total=None)
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of or None)


def _lines() -> Step:
    """A line for every tenth of the way, and, where its length is unknown, whenever another kind of step begins."""
    tenths, kinds = -1, ""

    def tell(what: str, done: int, of: int) -> None:
        nonlocal tenths, kinds
        tenth, kind = (10 * done // of if of else -1), what.partition("=")[0]
        if tenth > tenths or (not of and kind != kinds):
            tenths, kinds = max(tenth, tenths), kind
            click.echo(f"… {what}" + (f" ({done} of {of})" if of else ""), err=True)

    return tell
