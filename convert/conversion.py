"""One conversion from end to end: open, plan, check, write, and say what was done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from convert.checkpoint import Checkpoint, open_checkpoint
from convert.errors import ConvertError, UsageError
from convert.gguf_request import OPTIONS as GGUF_OPTIONS
from convert.gguf_request import GgufRequest
from convert.hub.place import Place, named, place
from convert.plan import ConversionPlan, Request, decides_head, make_plan, request_dtype
from convert.platform import allow_many_files, keep_freed_memory
from convert.run import Summary, check_target, run

_SOURCE_OPTIONS = ("layout", "family", "config", "size", "key", "qk_layout", "tie", "context", "follow_links")
_REQUEST_OPTIONS = (
    "format",
    "max_shard_size",
    "model_parallel",
    "book_class",
    "allow_reference",
    "buffers",
    "tie",
    "tokenizer",
    "tokenizer_path",
    "clamp",
)


def plan_conversion(
    src: str | Path | Checkpoint, to: str, *, source_layout: str | None = None, way: str = "download", **options: Any
) -> ConversionPlan:
    """Open ``src`` and plan its conversion to the layout ``to``; writes nothing.

    Args:
        src: A checkpoint folder or file, the name of a repository on the Hub, or an opened checkpoint.
        to: ``hf``, ``meta``, ``scratch`` or ``gguf``.
        source_layout: What the source must be, where the command names it.
        way: How a repository's files are had (:data:`convert.hub.place.WAYS`): ``download``; ``look`` reads headers
            only, for a plan that is not carried out; ``stream`` reads tensors from the Hub while converting.
        **options: Fields of :class:`convert.checkpoint.Options`, :class:`convert.plan.Request` and, for a GGUF target,
            :class:`convert.gguf_request.GgufRequest`; ``names`` belongs to
            whichever side is from scratch.

    Raises:
        UsageError: The source is of another layout, or an option is unknown.
        ConvertError: The source is damaged or the target cannot hold it.
    """
    keep_freed_memory()
    allow_many_files()
    asked = dict(options)
    names = options.pop("names", None)
    dtype = request_dtype(options.pop("dtype", None))
    gguf = _gguf_request(to, dtype, options)
    unknown = sorted(set(options) - {*_SOURCE_OPTIONS, *_REQUEST_OPTIONS})
    if unknown:
        raise UsageError(
            f"unknown option {unknown[0]!r}.",
            hint=f"Known: {', '.join(sorted({*_SOURCE_OPTIONS, *_REQUEST_OPTIONS}))}.",
        )
    if options.get("book_class") and to != "scratch":
        raise UsageError(
            f"--class {options['book_class']} only applies to a from-scratch target, not to {to}.",
            hint="A source's class is told by its names and its config.",
        )
    opened, at = src, None
    if not isinstance(opened, Checkpoint):
        chosen = {k: v for k, v in options.items() if k in _SOURCE_OPTIONS and v is not None}
        if names and to != "scratch":
            chosen["names"] = names
        wanted = options.get("layout") or source_layout
        at = place(opened, layout=wanted, way=way, foresee=lambda: _foresee(str(src), to, source_layout, asked))
        opened = open_checkpoint(at, **chosen)
        opened.only_samples = way == "look"
    if source_layout is not None and opened.layout != source_layout:
        raise UsageError(
            f"{opened.title} is in the {opened.layout} layout, not {source_layout}.",
            hint=f"Use `convert {opened.layout}-to-{to}`."
            if opened.layout != to or to == "gguf"
            else "It is in the target layout already.",
        )
    request = Request(
        target=to,
        dtype=dtype,
        gguf=gguf,
        **{k: v for k, v in options.items() if k in _REQUEST_OPTIONS and v is not None},
    )
    table = None
    if names and to == "scratch":
        from convert.names import load_names

        table = load_names(names)
        if table.family != opened.family:
            raise UsageError(f"--names extends {table.family!r}, but the source is of the family {opened.family!r}.")
    with named(at or Place(opened.path)):
        plan = make_plan(opened, request, table=table)
    if opened.only_samples and plan.tied and decides_head(request) and opened.match.tie_needs_reading():
        plan.notes.append("head and embedding are equal in samples of both; the conversion compares every byte")
    return plan


def _foresee(src: str, to: str, source_layout: str | None, asked: dict[str, Any]) -> None:
    """Plan a conversion from a repository's headers before its weights are downloaded: refusals come now."""
    try:
        plan_conversion(src, to, source_layout=source_layout, way="look", **asked).source.close()
    except ConvertError as error:
        if not all(problem.kind.startswith("hub_") for problem in error.problems):  # those, the download will tell
            raise


def _gguf_request(to: str, dtype: str | None, options: dict[str, Any]) -> GgufRequest:
    """Take the options of a GGUF target out of ``options``."""
    chosen = {k: options.pop(k) for k in GGUF_OPTIONS if k in options}
    chosen = {k: v for k, v in chosen.items() if v is not None}
    if to != "gguf" and chosen:
        raise UsageError(f"{', '.join(chosen)} only apply to a GGUF target, not to {to}.")
    if to == "gguf" and dtype is not None:
        raise UsageError(
            "--dtype does not apply to a GGUF file, whose tensors have types of ggml.",
            hint="Use --type: f32, f16, bf16, q8_0, q4_k_m …",
        )
    request = GgufRequest(**chosen)
    if to == "gguf" and request.type != "auto":
        from convert.mixtures import mixture

        mixture(request.type)  # a misspelt type is told before anything is opened
    return request


def convert_checkpoint(
    src: str | Path | Checkpoint,
    out: str | Path,
    *,
    to: str,
    overwrite: bool = False,
    hashes: bool = False,
    resume: bool = False,
    check: str = "sampled",
    threads: int = 2,
    download: bool = True,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
    **options: Any,
) -> Summary:
    """Convert a checkpoint to another layout.

    Args:
        src: A checkpoint folder or file (any layout), the name of a repository on the Hub, or an opened checkpoint.
        out: The folder to make (a file for GGUF).
        to: ``hf``, ``meta``, ``scratch`` or ``gguf``.
        overwrite: Replace an existing output.
        hashes: Put the SHA-256 of every source and output file into the record (see :func:`convert.check`).
        resume: Go on from what an earlier run of the same conversion left in its partial folder, and leave what is
            finished there should this one be stopped.
        check: ``sampled`` compares some blocks of the finished files with the source, ``full`` every byte.
        threads: Workers; memory grows by some MiB with each.
        download: Fetch a repository into the library's cache first; False converts straight from the Hub.
        progress: Called with the number of bytes written since the last call, from any thread.
        cancel: Set it to stop; the partial output is removed (kept with ``resume``).
        **options: As :func:`plan_conversion`: ``dtype``, ``names``, ``family``, ``tie`` …

    Returns:
        What was written, with every assumption that was made.

    Raises:
        UsageError: The request does not fit.
        ConvertError: The source is damaged, the target cannot hold it, or a value does not fit its type. Nothing is
            left behind.
    """
    plan = plan_conversion(src, to, way="download" if download else "stream", **options)
    try:
        return run(
            plan,
            Path(out),
            threads=threads,
            overwrite=overwrite,
            hashes=hashes,
            resume=resume,
            check=check,
            progress=progress,
            cancel=cancel,
        )
    finally:
        if plan.source is not src:
            plan.source.close()


__all__ = ["check_target", "convert_checkpoint", "plan_conversion"]
