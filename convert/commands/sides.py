"""What can be said of the two checkpoints of a comparison, on the command line."""

from __future__ import annotations

from typing import Any

import click

from convert.commands.options import stack

#: What can be said of A alone, as when it was converted.
SOURCE = ("size", "key", "qk_layout", "layout", "family", "tie")

side_options = stack(
    click.option("--names", metavar="FILE", help="Names file of the side that is from scratch."),
    click.option("--names-b", metavar="FILE", help="Names file of B, where both sides are from scratch."),
    click.option("--config", metavar="FILE", help="Config of A, where it has none."),
    click.option("--config-b", metavar="FILE", help="Config of B, where it has none."),
    click.option("--size", metavar="NAME", help="Published size that A is of, where it has no config."),
    click.option("--key", help="Which dict of a training checkpoint A is."),
    click.option(
        "--qk-layout", type=click.Choice(["meta", "hf"]), help="Order the rows of Q and K of A really are in."
    ),
    click.option("--layout", type=click.Choice(["hf", "meta", "scratch", "gguf"]), help="Layout of A's names."),
    click.option("--family", metavar="NAME", help="Family of A, where it is not recognised."),
    click.option("--tie", type=click.Choice(["share", "copy"]), help="share: A's missing head is its embedding."),
    click.option("--follow-links", is_flag=True, help="Follow links that lead out of the folder of A or of B."),
)


tolerance_options = stack(
    click.option("--atol", type=float, metavar="X", help="B may lie within atol + rtol * |a|; else bits decide."),
    click.option("--rtol", type=float, metavar="X", help="See --atol."),
    click.option(
        "--only", metavar="PATTERN", help="Only tensors whose Hugging Face name matches (*, ?) or contains it."
    ),
)


def side(path: str, options: dict[str, Any], suffix: str) -> dict[str, Any]:
    """Options of one side (``suffix``: ``""`` for A, ``"_b"`` for B), for :func:`convert.open_checkpoint`.

    ``--names`` alone means whichever side is not of a known layout.
    """
    chosen = {k: options[k + suffix] for k in ("names", "config") if options[k + suffix]}
    if options.get("follow_links"):
        chosen["follow_links"] = True
    if not suffix:
        chosen |= {k: options[k] for k in SOURCE if options[k]}
    if "names" in chosen or not options["names"] or options["names_b"]:
        names = chosen.get("names")
        if names and not options["names_b"] and _recognised(path, chosen):
            del chosen["names"]
        return chosen
    return chosen if _recognised(path, chosen) else chosen | {"names": options["names"]}


def _recognised(path: str, chosen: dict[str, Any]) -> bool:
    """Whether a side's names are a known layout's; those that only its own record explains are what --names is for."""
    from convert.checkpoint import open_checkpoint
    from convert.errors import ConvertError

    try:
        with open_checkpoint(path, follow_links=chosen.get("follow_links", False)) as found:
            return not found.table.names_file
    except ConvertError:
        return False
