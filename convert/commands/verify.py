"""``convert verify A B``: run two checkpoints, compare logits, break a copy on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convert.commands.options import output_options, report_option, report_writer
from convert.commands.sides import side, side_options, tolerance_options
from convert.prompt import read_prompts, read_text

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.verify import VerifyResult


@click.command("verify")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B", required=False)
@click.option(
    "--engine",
    type=click.Choice(["reference", "llama.cpp"]),
    default="reference",
    show_default=True,
    help="What runs A: our reference model, or real llama.cpp (A is a GGUF file; without B, B is A itself).",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, mps.")
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(["float32", "float64", "bfloat16", "float16"]),
    help="Arithmetic of the reference model.",
)
@click.option(
    "--tokens",
    "n_tokens",
    type=click.IntRange(min=2),
    default=128,
    show_default=True,
    help="Number of fixed token ids.",
)
@click.option("--text", metavar="TEXT|FILE", help="Text (or a file) to run on; needs a tokenizer beside A or B.")
@click.option("--prompts", metavar="FILE", help="Several prompts: one a line, or a JSON list of texts or of token ids.")
@click.option(
    "--layerwise/--whole",
    default=None,
    help="One layer of one side in memory at a time, or all of one side; unless given, what fits.",
)
@click.option(
    "--tensors",
    is_flag=True,
    help="Compare the tensors alone, bit for bit or within --atol and --rtol, and run nothing.",
)
@tolerance_options
@side_options
@report_option
@output_options
def command(a: str, b: str | None, as_json: bool, quiet: bool, debug: bool, **options: Any) -> int:
    """Run A and B on the reference model, each as stored, and compare their logits.

    A copy of A is broken on purpose, and the comparison must see it; what rounding does to this model is measured, and
    is the tolerance. Where the two differ, the report says in which layer they part. Exit code 0: pass, 1: fail, 3:
    weak (the check could not have seen a fault in this model).

    With --engine llama.cpp, real llama.cpp runs A, a GGUF file, and its predictions are compared with those of the
    reference model on B.

    With --tensors, nothing is run: all tensors are brought into one layout and compared. Exit code 0: pass, 1: fail.
    """
    from convert.devices import share_cores

    share_cores()
    write_report = report_writer(options["report"], quiet=quiet)
    if options["tensors"]:
        from convert.commands.diff import verify_tensors

        return verify_tensors(a, b, options, write_report, as_json=as_json, quiet=quiet)
    if any(options[key] is not None for key in ("atol", "rtol", "only")):
        raise click.UsageError("--atol, --rtol and --only go with --tensors.")
    steps = None if quiet or as_json else lambda s: click.echo(f"… {s}", err=True)
    result, extra = _run(a, b, options, text=_text(options["text"]), on_step=steps)
    if as_json:
        click.echo(json.dumps(result.as_json(), indent=2))
    elif not quiet:
        from convert.terminal import show

        show(result)
    write_report(result, extra)
    return result.exit_code


def _run(a: str, b: str | None, options: dict[str, Any], **more: Any) -> tuple[VerifyResult, dict[str, Any]]:
    """The result, and what a report shows beside it: how far every tensor lies from the other side's."""
    from convert.checkpoint import open_checkpoint
    from convert.verify import verify
    from convert.verify_engine import verify_engine

    engine = options["engine"]
    if engine != "reference" and (options["prompts"] or options["layerwise"] is not None):
        raise click.UsageError(f"--prompts, --layerwise and --whole go with the reference model, not with {engine}.")
    if options["prompts"] and options["text"]:
        raise click.UsageError("Give --text or --prompts, not both.")
    if b is None and engine == "reference":
        raise click.UsageError("Missing argument 'B'. (Only --engine llama.cpp can do without it.)")
    more |= {key: options[key] for key in ("device", "dtype", "n_tokens")}
    with ExitStack() as stack:
        first = stack.enter_context(open_checkpoint(a, **side(a, options, "")))
        second = None if b is None else stack.enter_context(open_checkpoint(b, **side(b, options, "_b")))
        if engine == "reference":
            prompts = None if options["prompts"] is None else read_prompts(Path(options["prompts"]))
            result = verify(first, second, prompts=prompts, layerwise=options["layerwise"], **more)
        else:
            result = verify_engine(first, second, engine=engine, **more)
        extra = _tensors(first, second, more["on_step"]) if options["report"] and second is not None else {}
        return result, extra


def _tensors(first: Checkpoint, second: Checkpoint, on_step: Callable[[str], None] | None) -> dict[str, Any]:
    from convert.diff import diff

    if on_step is not None:
        on_step("comparing the tensors for the report")
    return {"tensors": diff(first, second, tensors_only=True).detail()["tensors"]}


def _text(said: str | None) -> str | None:
    """A text as it is, or what a file holds (``@FILE``, or the path of one that exists)."""
    if said is None:
        return None
    path = Path(said.removeprefix("@"))
    try:
        named = said.startswith("@") or path.is_file()
    except OSError:  # too long for a path
        named = False
    return read_text(path) if named else said
