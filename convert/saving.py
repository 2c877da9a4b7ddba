"""A live module written straight to any layout, streaming from its parameters. The counterpart of ``load_into``.

The module is presented as an opened checkpoint whose tensors lie in memory; plan, checks and writing are those of
every conversion. Imports torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convert import config as configs
from convert import shapes
from convert.checkpoint import Checkpoint, Options
from convert.conversion import convert_checkpoint
from convert.errors import ConvertError, Problem, UsageError
from convert.formats.spec import TensorSpec
from convert.layout import Dims, expand
from convert.locate import CONFIG_NAMES
from convert.module_tensors import FLOATS, TYPES, Home, TensorSource, config_of, homes, hub_config, with_layout
from convert.module_tensors import torch_dtype as known_dtype
from convert.other_heads import refuse_other_heads, refuse_other_models
from convert.record import SCHEMA
from convert.report import fold_names, fold_problems
from convert.run import Summary
from convert.source import FilePool, Source
from convert.table import MappingTable

#: Stands for a path where a conversion has files.
IN_MEMORY = Path("<module>")

#: Options of :func:`convert.convert_checkpoint` that a module has no use for.
_NOT_HERE = frozenset({"size", "key", "qk_layout", "context", "source_layout", "tokenizer_path"})


class MemoryPool(FilePool):
    """Where the tensors of a module are found, by name, in place of open files."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = dict(tensors)

    def source(self, spec: TensorSpec) -> Source:
        """See :meth:`convert.source.FilePool.source`."""
        return TensorSource(self.tensors[spec.name])


def save_model(
    model: nn.Module,
    out: str | Path,
    *,
    layout: str,
    config: Mapping[str, Any] | str | Path | None = None,
    names: str | Path | None = None,
    module_layout: str | None = None,
    family: str | None = None,
    dtype: torch.dtype | str | None = None,
    tokenizer: str | Path | None = None,
    follow_links: bool = False,
    overwrite: bool = False,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
    **options: Any,
) -> Summary:
    """Write a module to a checkpoint of any layout.

    Reads the parameters where they are (CPU or GPU, any strides), a block at a time; the module is not changed and not
    copied. Tied parameters are seen as one. Buffers that the layout has no place for (masks, rotary tables) are not
    written; the summary's notes name the persistent ones.

    Args:
        model: The module. Its names tell its layout: the book's, Hugging Face's, Meta's, or the ones of ``names``.
        out: The folder to make (a file for GGUF).
        layout: The layout to write: ``hf``, ``meta``, ``scratch`` or ``gguf``.
        config: Its config in any spelling (``config.json``, ``params.json``, the book's dict, where a real
            ``torch.dtype`` is fine), as a dict, a file, or a folder that holds one. None: the module's own
            (``model.cfg``, ``model.config``).
        names: A names file for a module with names of its own; ``layout="scratch"`` then writes these names.
        module_layout: Layout of the module's names, where it shall not be detected.
        family: Its family, where names and config do not tell.
        dtype: Type to write; without it each tensor keeps its own.
        tokenizer: A folder whose tokenizer files and generation settings go with the weights, or a tokenizer file.
        follow_links: Follow links that lead out of the tokenizer's folder (:mod:`convert.links`).
        overwrite: Replace an existing output.
        threads: How many pieces are written at once.
        progress: Called with the number of bytes written since the last call, from any thread.
        cancel: Set it to stop; the partial output is removed.
        **options: Of the target, as for :func:`convert.convert_checkpoint`: ``format``, ``max_shard_size``,
            ``model_parallel``, ``book_class``, ``allow_reference``, ``tie``, ``clamp``; for GGUF ``type`` ….

    Returns:
        What was written.

    Raises:
        UsageError: There is no config, or an option does not fit.
        ConvertError: Module and config do not agree, or the layout cannot hold the model. Nothing is left behind.
    """
    unknown = sorted(set(options) & _NOT_HERE)
    if unknown:
        raise UsageError(f"save_model has no option {unknown[0]!r}, which is about files that are read.")
    wanted = known_dtype(dtype)
    beside = None if tokenizer is None else Path(tokenizer)
    opened = as_checkpoint(
        model,
        config=config,
        names=names,
        layout=module_layout,
        family=family,
        folder=beside if beside is not None and beside.is_dir() else None,
        title=Path(out).stem,
        tie=options.get("tie"),
        follow_links=follow_links,
    )
    return convert_checkpoint(
        opened,
        out,
        to=layout,
        dtype=None if wanted is None else TYPES[wanted],
        names=names if layout == "scratch" else None,
        tokenizer=beside is not None,
        tokenizer_path=beside,
        overwrite=overwrite,
        threads=threads,
        progress=progress,
        cancel=cancel,
        **options,
    )


def as_checkpoint(
    model: nn.Module,
    *,
    config: Mapping[str, Any] | str | Path | None = None,
    names: str | Path | None = None,
    layout: str | None = None,
    family: str | None = None,
    folder: Path | None = None,
    title: str = "model",
    tie: str | None = None,
    follow_links: bool = False,
) -> Checkpoint:
    """A module as an opened checkpoint: its parameters are the tensors, read from memory when they are asked for.

    Args:
        model: The module.
        config: See :func:`save_model`.
        names: A names file.
        layout: Layout of its names.
        family: Its family.
        folder: Where files beside it (a tokenizer) lie.
        title: What it is called, where a file would be called after its folder.
        tie: As in :class:`convert.checkpoint.Options`.
        follow_links: Likewise.

    Raises:
        UsageError: There is no config.
        ConvertError: Parameters are on ``meta`` or hold no plain weights, the names are unknown, or it is no language
            model.
    """
    raw = _raw_config(model, config)
    table, found, named = with_layout(
        homes(model),
        layout=layout,
        names=names,
        family=family or raw.get("family"),
        model_type=None if family or names else raw.get("model_type"),
    )
    hub, spelling = hub_config(table, raw)
    parameters = {n: home for n, home in named.items() if home.parameter}
    hub, notes = shapes.fill(table, hub, found, {n: tuple(home.tensor.shape) for n, home in parameters.items()})
    chosen, left = _chosen(table, found, hub, named)
    if left:
        notes.append(f"not written, because the class computes them: {', '.join(fold_names(left))}")
    _check(chosen)
    offsets = {id(home): number for number, home in enumerate(chosen.values())}
    # Equal offsets say "one storage": that is how a tie is seen.
    tensors = {
        n: [TensorSpec(n, home.dtype, tuple(home.tensor.shape), IN_MEMORY, offsets[id(home)])]
        for n, home in chosen.items()
    }
    refuse_other_heads([table], tensors)
    refuse_other_models(table, found, tensors, None, folder=IN_MEMORY)
    return Checkpoint(
        path=Path(title) / IN_MEMORY,
        format="module",
        layout=found,
        table=table,
        config=hub,
        raw_config=raw if spelling == found else {},
        tensors=tensors,
        files=[],
        folder=folder or IN_MEMORY,
        record={"schema": SCHEMA, "config": raw} if spelling == "hf" and found != "hf" else {},
        pairing=table.convention_of(found, "rope"),
        options=Options(
            tie=tie,
            context=hub.get("max_position_embeddings") if _says_context(table, spelling, raw) else None,
            follow_links=follow_links,
        ),
        notes=notes,
        pool=MemoryPool({n: home.tensor for n, home in chosen.items()}),
    )


def _raw_config(model: nn.Module, config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return configs.plain(config)
    if config is None:
        own = config_of(model)
        if own is None:
            raise UsageError(
                "the module carries no config (model.cfg or model.config) of a kind known here.",
                hint="Give one: save_model(model, out, layout=…, config=…), the dict it was built with for example.",
            )
        return own
    path = Path(config)
    if path.is_dir():
        path = next((path / n for n in CONFIG_NAMES if (path / n).is_file()), path)
    if not path.is_file():
        raise UsageError(f"config={str(config)!r}: no such file, or a folder without one of {', '.join(CONFIG_NAMES)}.")
    raw = configs.read_json(path)
    if not isinstance(raw, dict):
        raise ConvertError(Problem("config", f"{path.name} is not a JSON object.", file=str(path)))
    return raw


def _chosen(
    table: MappingTable, layout: str, hub: Mapping[str, Any], named: Mapping[str, Home]
) -> tuple[dict[str, Home], list[str]]:
    """Parameters, and the buffers that the table has a place for; and the persistent buffers that are left."""
    slots = expand(table, Dims(table, hub), layout, named)
    chosen = {n: home for n, home in named.items() if home.parameter or n in slots}
    return chosen, [n for n, home in named.items() if n not in chosen and home.persistent]


def _check(chosen: Mapping[str, Home]) -> None:
    problems = []
    for name, home in chosen.items():
        if home.tensor.is_meta:
            problems.append(
                Problem(
                    "meta",
                    f"{name!r} is on meta: it has no values to write.",
                    tensor=name,
                    found="meta",
                    hint="Fill the module first (convert.load_into).",
                )
            )
        elif home.dtype not in FLOATS:
            problems.append(
                Problem(
                    "dtype",
                    f"{name!r} is {home.dtype}, which is no plain floating-point type.",
                    tensor=name,
                    found=home.dtype,
                    wanted=list(FLOATS),
                    hint="Save the module before it is quantised.",
                )
            )
    if problems:
        raise ConvertError(fold_problems(problems))


def _says_context(table: MappingTable, spelling: str, raw: Mapping[str, Any]) -> bool:
    row = table.config.get("max_position_embeddings")
    return row is not None and (row.key if spelling == "hf" else row.names.get(spelling)) in raw
