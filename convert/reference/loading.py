"""Fills a reference model from an opened checkpoint, streaming, with values exactly as stored.

Nothing is permuted, joined or renamed here: the checkpoint names its tensors as the reference does, and the
model runs whichever rotary order the rows are in. Every parameter is filled exactly once, or nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from convert.errors import ConvertError, Problem
from convert.no_init import no_init
from convert.reference import reference_for
from convert.source import Source, read_rows

#: Bytes of raw values that are held at a time.
BLOCK_BYTES = 32 << 20

_TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class Opened(Protocol):
    """What is needed of an opened checkpoint.

    Attributes:
        config: The normalised Hugging Face config.
        table: Its ``reference`` names the module of the reference model.
        pairing: How the stored rows of Q and K pair up: ``half`` or ``interleaved``.
        norm: How norm weights are stored: ``plain`` or ``zero_centered``.
        tied: Whether the head is the embedding.
    """

    config: Mapping[str, Any]
    table: Any
    pairing: str
    norm: str
    tied: bool

    def reference_tensors(self) -> Iterable[tuple[str, Source]]:
        """Every tensor under the reference's (from-scratch) name, with its values as stored."""


def load_reference(ckpt: Opened, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """Build the checkpoint's reference model and fill it.

    Args:
        ckpt: The opened checkpoint.
        device: Where the model runs. One block of rows at a time passes through the CPU.
        dtype: Of the parameters; the rotary tables stay float32.

    Returns:
        The model (:class:`convert.reference.ReferenceModel`), in evaluation mode, without gradients.

    Raises:
        ConvertError: Tensors are missing, superfluous, doubled or of the wrong shape or type (all named).
        TableError: The table names no reference model.
    """
    model, pairs = empty_reference(ckpt)
    fill(model, pairs, device=device, dtype=dtype)
    return model.eval()


def empty_reference(ckpt: Opened) -> tuple[Any, list[tuple[str, Source]]]:
    """The checkpoint's reference model with its parameters on ``meta``, and what will fill them.

    Raises:
        TableError: The table names no reference model.
    """
    pairs = list(ckpt.reference_tensors())
    names = {name for name, _ in pairs}
    module = reference_for(ckpt.table.reference)
    # A head that is stored runs as stored, even where the checkpoint calls it tied.
    tied = "out_head.weight" not in names and ckpt.tied
    with no_init():  # on meta, torch loads its compiler in order to draw numbers for an embedding: 1.3 s and 110 MB
        model: Any = module.build(
            ckpt.config,
            pairing=ckpt.pairing,
            norm=ckpt.norm,
            tied=tied,
            names=names,
            device="meta",
        )
    return model, pairs


def fill(
    model: nn.Module,
    pairs: Iterable[tuple[str, Source]],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> None:
    """Replace every parameter of ``model`` (made on ``meta``) by the tensor of its name; move its buffers.

    Raises:
        ConvertError: Not every parameter is filled exactly once.
    """
    pairs = list(pairs)
    homes = homes_of(model)
    check_fit(homes, pairs)
    with torch.no_grad():
        for name, source in pairs:
            param = nn.Parameter(read_tensor(source, device=device, dtype=dtype), requires_grad=False)
            for owner, leaf in homes[name][1]:
                owner._parameters[leaf] = param
        for owner in model.modules():
            for leaf, buffer in owner._buffers.items():
                owner._buffers[leaf] = None if buffer is None else buffer.to(device)


def read_tensor(
    source: Source,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    out: Tensor | None = None,
    block_bytes: int | None = None,
) -> Tensor:
    """A source's values as a tensor of ``dtype`` on ``device``, read in blocks of rows.

    Args:
        source: Where they come from.
        device: Where they go.
        dtype: Of the result.
        out: Where to put them, in place of a new tensor; of the source's shape.
        block_bytes: Bytes of raw values that are held at a time, unless :data:`BLOCK_BYTES`.
    """
    if out is None:
        out = torch.empty(source.shape, dtype=dtype, device=device)
    rows = source.shape[0]
    step = rows if source.whole else max(1, (block_bytes or BLOCK_BYTES) // max(source.row_bytes, 1))
    step = max(source.align, step // source.align * source.align)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        out[start:stop].copy_(block_tensor(source, start, stop))
    return out


def block_tensor(source: Source, start: int, stop: int) -> Tensor:
    """Rows of a source (any rows) as a tensor of the type they are stored in, on the CPU."""
    raw = np.ascontiguousarray(read_rows(source, start, stop))
    if not raw.flags.writeable:  # torch warns about memory it could write to
        raw = raw.copy()
    return (
        torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16) if source.dtype == "BF16" else torch.from_numpy(raw)
    )


def homes_of(model: nn.Module) -> dict[str, tuple[Tensor, list[tuple[nn.Module, str]]]]:
    """Each parameter by every name it has, with all places that hold it (a tied one has two)."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in model.modules():
        for leaf, param in owner._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((owner, leaf))
    return {name: (param, places[id(param)]) for name, param in model.named_parameters()}


def check_fit(homes: dict[str, tuple[Tensor, list[tuple[nn.Module, str]]]], pairs: list[tuple[str, Source]]) -> None:
    """Stop, before anything is read, unless the tensors fill the model exactly.

    Raises:
        ConvertError: Tensors are missing, superfluous, doubled or of the wrong shape or type (all named).
    """
    problems = []
    seen: set[str] = set()
    for name, source in pairs:
        if name in seen:
            problems.append(Problem("duplicate_tensor", f"{name!r} comes twice from the checkpoint.", tensor=name))
        elif name not in homes:
            problems.append(
                Problem("unexpected_tensor", f"The reference model has no parameter {name!r}.", tensor=name)
            )
        elif tuple(homes[name][0].shape) != tuple(source.shape):
            wanted, found = list(homes[name][0].shape), list(source.shape)
            problems.append(
                Problem(
                    "shape",
                    f"{name!r} has shape {found}; by the config it should have {wanted}.",
                    tensor=name,
                    found=found,
                    wanted=wanted,
                )
            )
        elif source.dtype not in _TORCH:
            problems.append(
                Problem(
                    "dtype",
                    f"{name!r} is stored as {source.dtype}, which the reference model cannot run.",
                    tensor=name,
                    found=source.dtype,
                    wanted=list(_TORCH),
                )
            )
        seen.add(name)
    problems += [
        Problem("missing_tensor", f"The checkpoint holds nothing for {name!r}.", tensor=name)
        for name in homes
        if name not in seen
    ]
    if problems:
        raise ConvertError(problems)
