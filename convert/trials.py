"""Runs of one checkpoint and of views of it on a text: the loss of every token, as cheaply as it can be had.

The model is read once. A view shares all parameters that it does not change, and starts at the first layer that it
changes, from the hidden states that the checkpoint had there. What losses mean is :mod:`convert.hypotheses`' matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from convert.reference.loading import check_fit, empty_reference, homes_of, read_tensor

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.views import View

#: Logits that are in memory at a time.
_LOGITS = 1 << 23
#: Loss of a token where a model computes no finite number, in nats; far beyond any vocabulary's logarithm.
BROKEN_LOSS = 50.0

Losses = NDArray[np.float64]


@dataclass
class Passage:
    """Token ids to run on: windows of one length, side by side.

    Attributes:
        ids: ``[B, T]``.
        keep: Whether the checkpoint's own hidden states are kept for the views.
        states: What every layer of the checkpoint itself starts from, ``[B, T, D]``; the last is what the head gets.
    """

    ids: Tensor
    keep: bool = False
    states: list[Tensor] = field(default_factory=list, repr=False)

    @property
    def tokens(self) -> int:
        """How many tokens are predicted."""
        return int(self.ids.shape[0] * (self.ids.shape[1] - 1))


def passage(ids: Sequence[int], *, window: int, keep: bool = False) -> Passage:
    """Token ids cut into windows of one length, at most ``window``; what is left over at the end is dropped."""
    length = min(window, len(ids))
    count = len(ids) // length
    return Passage(torch.tensor(list(ids[: count * length]), dtype=torch.long).view(count, length), keep)


class Bench:
    """A checkpoint, read once, that runs as it is and with things changed.

    Args:
        ckpt: The checkpoint.
        device: Where it runs.

    Raises:
        ConvertError: The tensors do not fill the reference model.
    """

    def __init__(self, ckpt: Any, *, device: torch.device | str = "cpu") -> None:
        self.ckpt: Checkpoint = ckpt
        self.device = torch.device(device)
        model, pairs = empty_reference(ckpt)
        check_fit(homes_of(model), pairs)
        with torch.no_grad():
            self._params = {name: self._read(source) for name, source in pairs}
        self._base = self._filled(model, {})
        self.vocab_size: int = self._base.vocab_size
        self.n_layers: int = self._base.n_layers

    def _read(self, source: Any) -> nn.Parameter:
        return nn.Parameter(read_tensor(source, device=self.device, dtype=torch.float32), requires_grad=False)

    def _filled(self, model: Any, own: dict[str, nn.Parameter]) -> Any:
        """A model on ``meta`` with its own parameters where it has some, and the checkpoint's for the rest."""
        for name, (_, places) in homes_of(model).items():
            for owner, leaf in places:
                owner._parameters[leaf] = own.get(name, self._params[name])
        for owner in model.modules():
            for leaf, buffer in owner._buffers.items():
                owner._buffers[leaf] = None if buffer is None else buffer.to(self.device)
        return model.eval()

    def _model(self, view: View | None) -> Any:
        if view is None:
            return self._base
        opened: Any = view.opened
        model, _ = empty_reference(opened)
        return self._filled(model, {name: self._read(source) for name, source in view.changed_tensors()})

    @torch.inference_mode()
    def losses(self, text: Passage, view: View | None = None) -> Losses:
        """Nats that each token but the first of each window costs, in order: ``[tokens]``.

        Args:
            text: What to run on.
            view: What to run; None for the checkpoint itself.
        """
        model = self._model(view)
        ids = text.ids.to(self.device)
        first = view.first_layer() if view is not None and text.states else 0
        x = model.embed(ids)
        if text.states and first:
            x = text.states[first]
        own = view is None and text.keep and not text.states
        states = []
        if first < self.n_layers:
            context = model.context(ids.shape[1])
            for layer in range(first, self.n_layers):
                if own:
                    states.append(x)
                x = model.block(layer)(x, context)
        if own:
            text.states = [*states, x]
        return self._cost(model, x, ids)

    def _cost(self, model: Any, x: Tensor, ids: Tensor) -> Losses:
        """Cross-entropy of the next tokens, a few positions at a time."""
        rows = max(1, _LOGITS // self.vocab_size)
        out = []
        for hidden, wanted in zip(x[:, :-1], ids[:, 1:], strict=True):
            for i in range(0, len(wanted), rows):
                logits = model.head(hidden[None, i : i + rows])[0].float()
                picked = logits.gather(-1, wanted[i : i + rows, None])[:, 0]
                out.append((logits.logsumexp(-1) - picked).double().cpu())
        found = torch.cat(out).nan_to_num(nan=BROKEN_LOSS, posinf=BROKEN_LOSS, neginf=BROKEN_LOSS)
        return found.clamp(max=BROKEN_LOSS).numpy()
