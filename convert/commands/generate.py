"""``convert generate SRC --prompt TEXT``: hear the weights speak."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from convert.commands.options import output_options, source_options
from convert.prompt import read_text


@click.command("generate")
@click.argument("src", metavar="SRC")
@click.option("--prompt", "-p", required=True, metavar="TEXT", help="Text to continue, or @FILE.")
@click.option("--chat", is_flag=True, help="Ask it as a chat: the prompt goes through the model's chat template.")
@click.option(
    "--max-new-tokens",
    "-n",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="The most tokens to make.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="0 takes the likeliest token each time; above 0 it samples.",
)
@click.option("--top-k", type=click.IntRange(min=1), metavar="K", help="Sample among the K likeliest tokens.")
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    metavar="P",
    help="Sample among the likeliest tokens that together have probability P.",
)
@click.option("--seed", type=int, metavar="N", help="Of the sampling; the same seed gives the same text.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, mps.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Of weights and arithmetic; auto is float32 on the CPU, else the stored 16-bit type.",
)
@click.option("--tokenizer", metavar="PATH", help="A folder, a tokenizer file or a GGUF file to take it from.")
@source_options
@output_options
def command(src: str, prompt: str, as_json: bool, quiet: bool, debug: bool, **options: Any) -> int:
    """Continue a text with the reference model, from any layout; tokens are printed as they come.

    Only the new text goes to standard output. It ends at every end token that config, generation config and
    tokenizer name.
    """
    from convert.generate import generate

    if prompt.startswith("@"):
        path = Path(prompt[1:])
        if not path.is_file():
            raise click.UsageError(f"--prompt {prompt}: no such file.")
        prompt = read_text(path)
    speak = not (quiet or as_json)
    chosen = {key: value for key, value in options.items() if value is not None}
    made = generate(src, prompt, on_step=_say if speak else None, **chosen)
    if as_json:
        for _ in made:
            pass
        click.echo(json.dumps(made.as_json(), indent=2, ensure_ascii=False))
        return 0
    from convert.report import speakable

    on_terminal = sys.stdout.isatty()
    for piece in made:
        click.echo(speakable(piece) if on_terminal else piece, nl=False)  # which flushes
    click.echo()
    if speak:
        rate = len(made.ids) / made.seconds if made.seconds else 0.0
        why = {"end": "an end token", "length": "--max-new-tokens", "context": "the model's last position"}[
            made.stopped or "end"
        ]
        click.echo(f"… {len(made.ids)} tokens, {rate:.1f} a second on {made.device}; stopped by {why}", err=True)
    return 0


def _say(step: str) -> None:
    click.echo(f"… {step}", err=True)
