"""The dict that the book's classes take, from a from-scratch folder or any other checkpoint. Imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from convert import config as configs
from convert.checkpoint import open_checkpoint
from convert.dtypes import DTYPES
from convert.errors import ConvertError, FormatError, Problem
from convert.locate import CONFIG_NAMES
from convert.module_tensors import torch_dtype
from convert.plan import Request, refusals
from convert.report import fold_problems
from convert.table import families, load_table
from convert.widening import plain_type

#: What ``scratch_config.json`` says of itself; nothing that a class takes.
BOOKKEEPING = ("family", "layout", "class", "names")


def load_scratch_config(
    src: str | Path, *, dtype: torch.dtype | str | None = None, follow_links: bool = False
) -> dict[str, Any]:
    """The dict for ``Llama3Model(cfg)`` and its like, with a real ``torch.dtype``.

    A from-scratch folder, or a ``scratch_config.json``, gives what the file says, without the keys that only describe
    the file (``family``, ``layout``, ``class``, ``names``). What the book's classes hard-wire and the file states all
    the same (``rms_norm_eps``, ``head_dim`` …, written by ``--allow-reference``) is kept: the book's classes ignore it.

    From any other checkpoint (a Hugging Face or Meta folder, a GGUF file) the dict is derived, as a conversion to the
    from-scratch layout would write it.

    Args:
        src: A folder or a file.
        dtype: Replaces the checkpoint's own type. For a block-quantised checkpoint the default is float16.
        follow_links: As for :func:`convert.open_checkpoint`, where the dict is derived.

    Raises:
        FormatError: The file is no such dict.
        ConvertError: The checkpoint is damaged, or the book's class cannot hold its model.
    """
    path = Path(src)
    file = _file(path)
    if file is None:
        return _derived(path, dtype, follow_links)
    raw = configs.read_json(file)
    tables = [load_table(f) for f in families()]
    if not isinstance(raw, dict) or configs.layout_of(raw, tables) != "scratch":
        raise FormatError(
            Problem(
                "config",
                f"{file.name} is not the dict of one of the book's classes.",
                file=str(file),
                found=list(raw)[:6] if isinstance(raw, dict) else type(raw).__name__,
                wanted="emb_dim, n_layers, …",
                hint="Give the folder that a conversion to the from-scratch layout wrote.",
            )
        )
    out = {k: v for k, v in raw.items() if k not in BOOKKEEPING}
    out["dtype"] = torch_dtype(dtype or raw.get("dtype") or "float32")
    return out


def _file(path: Path) -> Path | None:
    """The dict's file: ``path`` itself if it is JSON, or the one in a from-scratch folder."""
    if path.is_dir():
        inside = path / "scratch_config.json"
        return inside if inside.is_file() else None
    beside = path.with_name("scratch_config.json")
    if path.suffix == ".json" and path.is_file():
        # a config.json or params.json stands for its folder
        return path if path.name not in CONFIG_NAMES or path.name == "scratch_config.json" else None
    # a GGUF file has a config of its own
    return beside if path.is_file() and beside.is_file() and path.suffix != ".gguf" else None


def _derived(path: Path, dtype: torch.dtype | str | None, follow_links: bool) -> dict[str, Any]:
    if path.name in CONFIG_NAMES:
        path = path.parent
    with open_checkpoint(path, follow_links=follow_links) as opened:
        table = opened.table
        problems = refusals(table, opened.dims, Request(target="scratch"))
        if problems:
            error = ConvertError(fold_problems(problems))
            error.source = opened.title
            raise error
        kind = "F16" if DTYPES[opened.dtype].is_quantized else plain_type(opened)
        out = configs.to_scratch(table, opened.config, kind)
    out = {k: v for k, v in out.items() if k not in BOOKKEEPING}
    out["dtype"] = torch_dtype(dtype or out["dtype"])
    return out
