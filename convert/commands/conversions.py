"""The conversion commands: ``hf-to-scratch`` and its siblings, and ``to``."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convert.commands.gguf_options import gguf_options, library_options
from convert.commands.options import Size, conversion_options, output_options, source_options, stack
from convert.errors import ConvertError, Problem, UsageError

if TYPE_CHECKING:
    from convert.plan import ConversionPlan
    from convert.run import Summary

_LAYOUTS = {
    "hf": "a Hugging Face folder",
    "meta": "a Meta folder",
    "scratch": "a from-scratch folder",
    "gguf": "a GGUF file",
    "openai": "OpenAI's TensorFlow checkpoint",
}

_target_options = {
    "hf": stack(
        click.option(
            "--max-shard-size", type=Size(), default="5GB", show_default=True, help="Largest file; more become shards."
        ),
    ),
    "meta": stack(
        click.option(
            "--model-parallel",
            type=click.IntRange(1, 64),
            default=1,
            show_default=True,
            help="Number of consolidated files.",
        ),
    ),
    "scratch": stack(
        click.option(
            "--format",
            type=click.Choice(["safetensors", "pth", "dcp"]),
            default="safetensors",
            show_default=True,
            help="File format; dcp is a folder of torch.distributed.checkpoint.",
        ),
    ),
    "gguf": gguf_options,
}


def _command(source: str | None, target: str) -> click.Command:
    """The command ``source-to-target``."""

    @click.argument("src", metavar="SRC")
    @click.argument("out", metavar="OUT")
    def callback(src: str, out: str, **options: Any) -> int:
        return convert(src, out, target=target, source=source, **options)

    decorated = stack(_target_options.get(target, lambda f: f), conversion_options, source_options, output_options)(
        callback
    )
    what = _LAYOUTS[source] if source else "any checkpoint"
    return click.command(
        f"{source}-to-{target}",
        help=f"Convert {what} to {_LAYOUTS[target]}.\n\nSRC is a folder, a file, or org/name on the Hub; OUT is made.",
    )(decorated)


hf_to_scratch = _command("hf", "scratch")
scratch_to_hf = _command("scratch", "hf")
meta_to_hf = _command("meta", "hf")
hf_to_meta = _command("hf", "meta")
meta_to_scratch = _command("meta", "scratch")
scratch_to_meta = _command("scratch", "meta")
gguf_to_hf = _command("gguf", "hf")
gguf_to_scratch = _command("gguf", "scratch")
gguf_to_meta = _command("gguf", "meta")
hf_to_gguf = _command("hf", "gguf")
meta_to_gguf = _command("meta", "gguf")
scratch_to_gguf = _command("scratch", "gguf")
gguf_to_gguf = _command("gguf", "gguf")
openai_to_hf = _command("openai", "hf")
openai_to_scratch = _command("openai", "scratch")
openai_to_gguf = _command("openai", "gguf")


class _Layouts(click.Group):
    """Says of a word that is no layout what the layouts are."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """The conversion to the layout that comes first."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            if args[0].startswith("-"):
                raise
            names = ", ".join(self.list_commands(ctx))
            raise click.UsageError(
                f"No such layout {args[0]!r}. It comes first, and is one of: {names}.", ctx
            ) from None


@click.group(
    "to",
    cls=_Layouts,
    help="Convert any source to LAYOUT; the source is recognised.",
    subcommand_metavar="LAYOUT SRC OUT",
)
def to() -> None:
    """Commands per target layout."""


for _target in ("hf", "meta", "scratch", "gguf"):
    to.add_command(_command(None, _target), _target)


def convert(
    src: str,
    out: str,
    *,
    target: str,
    source: str | None,
    overwrite: bool,
    dry_run: bool,
    verify: str,
    threads: int,
    force: bool,
    hashes: bool,
    resume: bool,
    check: str,
    no_download: bool,
    push_to: str | None,
    private: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
    no_tokenizer: bool,
    tokenizer: str | None,
    **options: Any,
) -> int:
    """Plan, convert, check, and verify where asked; returns the exit code."""
    from convert.conversion import plan_conversion
    from convert.ranks import carry_out

    names = options.get("names")
    if tokenizer is not None and no_tokenizer:
        raise UsageError("--tokenizer and --no-tokenizer exclude each other.")
    if push_to is not None:
        from convert.hub.push import target_name

        target_name(push_to)  # a name that is none is told before anything is done
    plan = plan_conversion(
        src,
        target,
        source_layout=source,
        way="look" if dry_run else "stream" if no_download else "download",
        tokenizer=not no_tokenizer,
        tokenizer_path=tokenizer,
        **library_options(options),
    )
    path = Path(out)
    plan.bind(path)
    if dry_run:
        from convert.commands.dry_run import show_plan

        with plan.source:
            code = show_plan(
                plan, path, threads=threads, as_json=as_json, overwrite=overwrite, force=force, resume=resume
            )
        if push_to is not None and not as_json:
            where = f"{push_to} (private)" if private else push_to
            click.echo(f"It would be uploaded to {where}, with a model card.")
        return code
    with progress_bar(plan, quiet=quiet or as_json) as progress:
        summary = carry_out(
            plan,
            path,
            threads=threads,
            overwrite=overwrite,
            force=force,
            hashes=hashes,
            resume=resume,
            check=check,
            progress=progress,
        )
    if summary is None:  # another rank speaks for all
        return 0
    outcome = _verify(plan, path, verify, names, quiet=quiet or as_json)
    pushed = None
    if push_to is not None and outcome.code == 0:
        from convert.hub.push import push

        pushed = push(plan.main_path(path), push_to, private=private, verified=outcome.report, quiet=quiet or as_json)
    try:
        if as_json:
            more = {"pushed": pushed.as_json()} if pushed is not None else {}
            click.echo(json.dumps(summary.as_json() | {"verify": outcome.report} | more, indent=2))
        elif not quiet:
            _tell(plan, summary)
            if outcome.text:
                click.echo(outcome.text)
            if pushed is not None:
                click.echo(pushed.line())
    except OSError as error:  # nobody reads, or the disk behind it is full
        said = f"standard output could not be written ({error.strerror}); the conversion itself is complete: {path}."
        raise ConvertError(Problem("stdout", said)) from error
    return outcome.code


@contextmanager
def progress_bar(plan: ConversionPlan, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar with bytes, rate and time left on a terminal; silence otherwise."""
    import sys

    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    total = sum(e.nbytes for f in plan.files for e in f.entries)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("converting", total=total)
        yield lambda n: bar.advance(task, n)


class _Outcome:
    """What verification said, and the exit code that follows."""

    def __init__(self, code: int = 0, text: str = "", report: dict[str, Any] | None = None) -> None:
        self.code = code
        self.text = text
        self.report = report


def _verify(plan: ConversionPlan, out: Path, mode: str, names: str | None, *, quiet: bool) -> _Outcome:
    import shlex

    source, made_at = shlex.quote(plan.source.title), plan.main_path(out)
    said = "".join(f" {shlex.quote(word)}" for word in _said(plan))
    hint = f"verify it on the CPU: convert verify {source} {shlex.quote(str(made_at))}{said}"
    if plan.single_file:
        hint += f"; in llama.cpp: convert verify {shlex.quote(str(made_at))} {source} --engine llama.cpp"
    if mode == "never":
        return _Outcome()
    device = "auto"
    if mode == "auto":
        from convert.devices import gpu_present

        if not gpu_present():
            return _Outcome(text=f"Not run on a model (no GPU here). To {hint}")
    from convert.checkpoint import open_checkpoint
    from convert.devices import pick_device
    from convert.verify import verify

    if mode == "auto" and str(pick_device("auto")) == "cpu":
        return _Outcome(text=f"Not run on a model (torch sees no GPU). To {hint}")
    target_names = names if plan.request.target == "scratch" else None
    chosen = {"names": target_names} if target_names else {}
    with open_checkpoint(made_at, follow_links=plan.source.options.follow_links, **chosen) as made:
        result = verify(plan.source, made, device=device, on_step=None if quiet else lambda s: click.echo(s, err=True))
    code = {"pass": 0, "fail": 1, "weak": 3}[result.verdict]
    text = f"verify: {result.verdict}. {result.message}"
    if result.verdict == "fail":
        failed = _rename_failed(plan, out)
        text += f" The output was renamed to {failed}."
    return _Outcome(code, text, result.as_json())


def _said(plan: ConversionPlan) -> list[str]:
    """What was said of the source, as options of ``verify``: without them it would be taken for something else."""
    from convert.commands.sides import SOURCE

    said = {name: getattr(plan.source.options, name) for name in ("names", "config", *SOURCE)}
    words = [word for name, value in said.items() if value for word in (f"--{name.replace('_', '-')}", str(value))]
    return [*words, "--follow-links"] if plan.source.options.follow_links else words


def _rename_failed(plan: ConversionPlan, out: Path) -> Path:
    """Nothing that failed keeps a name under which it would be taken for good; returns the (first) new name."""
    paths = [out.with_name(f.name) for f in plan.files] if plan.single_file else [out]
    endings = (f".failed{number or ''}" for number in itertools.count())
    # What has such a name already is somebody's: an earlier try, which may be the source of this one, or more.
    ending = next(e for e in endings if not any(os.path.lexists(p.with_name(p.name + e)) for p in paths))
    for path in paths:
        path.replace(path.with_name(path.name + ending))
    return paths[0].with_name(paths[0].name + ending)


def _tell(plan: ConversionPlan, summary: Summary) -> None:
    from convert.report import human_bytes, printable

    rate = summary.bytes_written / max(summary.seconds, 1e-9)
    click.echo(
        f"{plan.source.title} ({plan.source.family}, {plan.source.layout}) → {summary.out} ({plan.request.target}): "
        f"{summary.tensors} tensors, {human_bytes(summary.bytes_written)} in {summary.seconds:.1f} s "
        f"({human_bytes(rate)}/s)"
    )
    if len(plan.files) > 1 and plan.single_file:
        click.echo(f"  {len(plan.files)} files: {plan.files[0].name} … {plan.files[-1].name}")
    for note in summary.notes:
        click.echo(printable(f"  note: {note}"))  # names of files may be in it
    checked = "sampled blocks" if summary.checked == "sampled" else "tensors, every byte"
    click.echo(f"Checked after writing: sizes, headers, {summary.checked_blocks} {checked}.")
