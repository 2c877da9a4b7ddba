"""``convert verify A B``: run two checkpoints, compare logits, break a copy on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convert.commands.options import output_options

if TYPE_CHECKING:
    from convert.verify import VerifyResult


@click.command("verify")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
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
@click.option("--text", help="Text (or @FILE) to run on instead; needs a tokenizer beside A or B.")
@click.option("--names", metavar="FILE", help="Names file of the side that is from scratch.")
@click.option("--names-b", metavar="FILE", help="Names file of B, where both sides are from scratch.")
@click.option("--config", metavar="FILE", help="Config of A, where it has none.")
@click.option("--config-b", metavar="FILE", help="Config of B, where it has none.")
@output_options
def command(a: str, b: str, as_json: bool, quiet: bool, debug: bool, **options: Any) -> int:
    """Run A and B on the reference model, each as stored, and compare their logits.

    A copy of A is broken on purpose, and the comparison must see it. Exit code 0: pass, 1: fail, 3: weak (the check
    could not have seen a fault in this model).
    """
    from convert.checkpoint import open_checkpoint
    from convert.verify import verify

    text = options["text"]
    if text and text.startswith("@"):
        text = Path(text[1:]).read_text(encoding="utf-8")
    steps = None if quiet or as_json else lambda s: click.echo(f"… {s}", err=True)
    with open_checkpoint(a, **_side(a, options, "")) as first, open_checkpoint(b, **_side(b, options, "_b")) as second:
        result = verify(
            first,
            second,
            device=options["device"],
            dtype=options["dtype"],
            n_tokens=options["n_tokens"],
            text=text,
            on_step=steps,
        )
    if as_json:
        click.echo(json.dumps(result.as_json(), indent=2))
    elif not quiet:
        show(result)
    return {"pass": 0, "fail": 1, "weak": 3}[result.verdict]


def _side(path: str, options: dict[str, Any], suffix: str) -> dict[str, Any]:
    """Options of one side; `--names` alone means whichever side is not of a known layout."""
    chosen = {k: options[k + suffix] for k in ("names", "config") if options[k + suffix]}
    if "names" in chosen or not options["names"] or options["names_b"]:
        names = chosen.get("names")
        if names and not options["names_b"] and _recognised(path):
            del chosen["names"]
        return chosen
    return chosen if _recognised(path) else chosen | {"names": options["names"]}


def _recognised(path: str) -> bool:
    from convert.checkpoint import open_checkpoint
    from convert.errors import ConvertError

    try:
        with open_checkpoint(path):
            return True
    except ConvertError:
        return False


def show(result: VerifyResult) -> None:
    """The result in one screen."""
    value = result.as_json()
    control = value["control"] or {}
    click.echo(f"verify: {result.verdict} (on {result.device}, {result.dtype}, {result.n_tokens} tokens)")
    click.echo(f"  {result.message}")
    rows = [
        ("max |Δ|", "max_abs"),
        ("NMSE", "nmse"),
        ("KL mean", "kl_mean"),
        ("KL max", "kl_max"),
        ("top-1 agreement", "top1"),
    ]
    click.echo(f"  {'':22}{'A against B':>14}{'broken copy':>14}")
    for label, key in rows:
        click.echo(f"  {label:22}{_number(value[key]):>14}{_number(control.get(key)):>14}")
    first = value["first_diff_position"]
    click.echo(f"  first difference      {'none' if first is None else f'position {first}':>14}")
    if value.get("tolerance") is not None:
        click.echo(f"  tolerance (NMSE)      {value['tolerance']:>14.2e}")
    for hint in result.hints:
        click.echo(f"  {hint}")


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.2e}" if isinstance(value, float) and value not in (0.0, 1.0) else f"{value:g}"
