"""Options of the commands that write GGUF files, and what they mean to the library."""

from __future__ import annotations

from typing import Any

import click

from convert.commands.options import Size, stack
from convert.errors import UsageError

_NO_MATRIX = (
    "importance matrices are not taken: they come from running a model over a corpus, and the result depends on it. "
    "The types here are those that need none"
)


def _refuse_matrix(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise UsageError(
            f"--imatrix is refused: {_NO_MATRIX}.",
            hint="Take a K type (q4_k_m, q5_k_m …), or quantise an f16 file from here with llama.cpp's own tool.",
        )


def pairs(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> list[tuple[str, str]]:
    """``KEY=VALUE`` texts as pairs."""
    out: list[tuple[str, str]] = []
    for text in value:
        key, equals, rest = text.partition("=")
        if not equals or not key:
            lacking = "nothing before the" if equals else "no"
            raise click.BadParameter(f"{text!r} has {lacking} '='; write {param.metavar}.", ctx=ctx, param=param)
        if any(key == other for other, _ in out):
            raise click.BadParameter(f"{key!r} is given twice.", ctx=ctx, param=param)
        out.append((key, rest))
    return out


gguf_options = stack(
    click.option(
        "--type",
        default="auto",
        show_default=True,
        metavar="TYPE",
        help="f32, f16, bf16, q8_0, q4_0 … q5_1, q2_k … q6_k, q4_k_m …; auto keeps 16-bit types, and a GGUF's own.",
    ),
    click.option(
        "--tensor-type",
        "tensor_types",
        multiple=True,
        metavar="PATTERN=TYPE",
        callback=pairs,
        help="Another type for tensors whose GGUF name fits, as 'blk.*.ffn_down.weight=q6_k'; may be repeated.",
    ),
    click.option(
        "--no-fallback", is_flag=True, help="Stop where a row does not fit a type, instead of taking the next type."
    ),
    click.option("--split-max-size", type=Size(), metavar="SIZE", help="Largest file (2GB …); more become pieces."),
    click.option(
        "--metadata",
        multiple=True,
        metavar="KEY=VALUE",
        callback=pairs,
        help="A key-value for the file, as general.author=me or u32:5 for a type; may be repeated.",
    ),
    click.option("--pre", metavar="NAME", help="Rules by which the tokenizer splits text, where not recognised."),
    click.option("--ollama", is_flag=True, help="Write a Modelfile for `ollama create` beside the file."),
    click.option("--imatrix", metavar="FILE", hidden=True, expose_value=False, callback=_refuse_matrix),
)


def library_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of :func:`gguf_options` as :func:`convert.convert_checkpoint` takes them."""
    out = dict(options)
    if "no_fallback" in out:
        out["fallback"] = not out.pop("no_fallback")
        out["metadata"] = dict(out["metadata"])
    return out
