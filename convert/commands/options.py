"""Options that several commands share, and how sizes are typed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Size(click.ParamType):
    """A number of bytes: ``5GB``, ``500M``, ``1.5G``; decimal units."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse one value."""
        if isinstance(value, int):
            return value
        text = str(value).strip().upper().removesuffix("B")
        number, unit = (text[:-1], text[-1]) if text and text[-1] in _UNITS else (text, "")
        try:
            size = int(float(number) * _UNITS[unit])
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no size; write 5GB, 500MB or a number of bytes.", param, ctx)
        if size <= 0:
            self.fail("a size must be positive.", param, ctx)
        return size


def stack(*decorators: Decorator) -> Decorator:
    """Apply decorators in the order in which they are listed in ``--help``."""

    def apply(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


source_options = stack(
    click.option("--family", metavar="NAME", help="Family of the model, where it is not recognised."),
    click.option(
        "--layout", type=click.Choice(["hf", "meta", "scratch", "gguf", "openai"]), help="Layout of the source's names."
    ),
    click.option(
        "--qk-layout",
        type=click.Choice(["meta", "hf"]),
        help="Order the rows of Q and K really are in, whatever the names say.",
    ),
    click.option("--key", help="Which dict of a training checkpoint."),
    click.option("--names", metavar="FILE", help="Names file of your own module, or llama2c, nanogpt, litgpt."),
    click.option("--config", metavar="FILE", help="Config: config.json, params.json or the book's dict."),
    click.option("--size", metavar="NAME", help="Published size that fills a missing config (llama3.2-1b …)."),
    click.option(
        "--context", type=click.IntRange(min=1), metavar="N", help="Positions, where the source does not say."
    ),
    click.option(
        "--tie", type=click.Choice(["share", "copy"]), help="Head: one with the embedding, or a tensor of its own."
    ),
    click.option("--follow-links", is_flag=True, help="Follow links that lead out of the checkpoint's folder."),
)

output_options = stack(
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    click.option("--quiet", "-q", is_flag=True, help="Print errors only."),
    click.option("--debug", is_flag=True, help="Show the traceback of an error."),
)

report_option = click.option(
    "--report",
    metavar="FILE",
    type=click.Path(),
    help="Write a page to look at (HTML, one file); drawn with matplotlib: pip install 'ckpt-convert[report]'.",
)

conversion_options = stack(
    click.option(
        "--dtype",
        type=click.Choice(["keep", "float32", "float16", "bfloat16"]),
        default="keep",
        show_default=True,
        help="Type of the weights.",
    ),
    click.option("--overwrite", is_flag=True, help="Replace an existing output."),
    click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    click.option(
        "--no-download",
        is_flag=True,
        help="SRC on the Hub: read it there while converting; only OUT is stored.",
    ),
    click.option("--push-to", metavar="ORG/NAME", help="Upload the output to this repository on the Hub."),
    click.option("--private", is_flag=True, help="A repository that --push-to makes is private."),
    click.option(
        "--verify",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        show_default=True,
        help="Run source and output on the reference model: auto does it when there is a GPU.",
    ),
    click.option("--class", "book_class", metavar="NAME", help="Variant of the book's class."),
    click.option("--buffers", is_flag=True, help="Write the masks and rotary tables that the class keeps, too."),
    click.option(
        "--allow-reference", is_flag=True, help="Write what the book's class cannot hold, for our reference class."
    ),
    click.option("--tokenizer", metavar="PATH", help="The tokenizer: a folder or file, if not beside the source."),
    click.option("--no-tokenizer", is_flag=True, help="Convert the weights alone."),
    click.option("--threads", type=click.IntRange(1, 256), default=2, show_default=True, help="Workers."),
    click.option("--hash", "hashes", is_flag=True, help="Record the SHA-256 of all files, for `convert check`."),
    click.option(
        "--check",
        "check",
        type=click.Choice(["sampled", "full"]),
        default="sampled",
        show_default=True,
        help="Compare some blocks of the finished files with the source, or every byte.",
    ),
    click.option(
        "--resume", is_flag=True, help="Go on from what a stopped run has left; if this one is stopped, leave it."
    ),
    click.option(
        "--clamp", is_flag=True, help="Values too large for the type become its largest, instead of stopping."
    ),
    click.option("--force", is_flag=True, help="Go on although disk space or memory look too small."),
)


def report_writer(out: str | None, *, quiet: bool = False) -> Callable[..., None]:
    """What writes a result's page, with more detail where there is some.

    Called before the work, so that what cannot be written is refused before it.

    Args:
        out: The page, or None: nothing is written.
        quiet: Whether the page's path is told.

    Raises:
        UsageError: matplotlib is missing, or the place is no place for a report.
    """
    if out is None:
        return lambda _result, _extra=None: None
    from convert.html import check_report, write_report

    check_report(out)

    def write(result: Any, extra: dict[str, Any] | None = None) -> None:
        path = write_report(result, out, extra=extra)
        if not quiet:
            click.echo(f"report: {path}", err=True)

    return write
