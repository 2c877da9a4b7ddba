"""What every verification does around a run: sides are opened, float32 stays float32, logits leave the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: Positions whose logits are computed at a time.
HEAD_ROWS = 32


def logits(model: Any, ids: Tensor) -> Tensor:
    """Logits of ``ids`` ``[1, T]``, float32 (float64 for a float64 model) ``[T, V]`` on the CPU.

    The head runs on a few positions at a time, so that the device never holds them all.
    """
    import torch

    with torch.inference_mode():
        x = model.embed(ids)
        context = model.context(ids.shape[1])
        for layer in range(model.n_layers):
            x = model.block(layer)(x, context)
        rows = []
        for i in range(0, x.shape[1], HEAD_ROWS):
            part = model.head(x[:, i : i + HEAD_ROWS])[0].cpu()
            rows.append(part if part.dtype == torch.float64 else part.float())
        return torch.cat(rows)


@contextmanager
def opened(side: Any, *, follow_links: bool = False) -> Iterator[Any]:
    """An opened checkpoint as it is; a path opened, and closed afterwards."""
    if not isinstance(side, (str, Path)):
        yield side
        return
    from convert.checkpoint import open_checkpoint

    with open_checkpoint(side, follow_links=follow_links) as ckpt:
        yield ckpt


def require_sound(*sides: Any) -> None:
    """Go on only with checkpoints whose tensors fit their families' tables; imports no torch.

    Raises:
        ConvertError: One has a tensor too few, too many, or of another shape.
    """
    from convert.checkpoint import Checkpoint

    for side in sides:
        if isinstance(side, Checkpoint):  # what else can be run says for itself whether it fits
            side.require_sound()


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """float32 that is float32: no TF32 in matrix products while it lasts."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
