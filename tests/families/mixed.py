"""Tiny models of families that mix sliding and full layers, made by transformers and filled so that faults show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
#: Three sliding layers, one full, and one more: mixed, and longer than one period.
KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
#: Tokens of a test prompt; the window of the models here is 24.
LENGTH = 160


@dataclass(frozen=True)
class Tiny:
    """A model that transformers made and saved.

    Attributes:
        path: The folder.
        model: The module, in float32.
        state: Its parameters by Hugging Face's names; the head also where it is tied.
    """

    path: Path
    model: Any
    state: Tensors

    @property
    def logits(self) -> torch.Tensor:
        """transformers' logits of :func:`prompt`."""
        with torch.no_grad():
            return self.model(prompt(self.model.config.vocab_size)).logits


def fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Norms uniform in 0.5–1.5, everything else of std 0.2."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            plain = "norm" in name and parameter.ndim == 1
            values = rng.uniform(0.5, 1.5, parameter.shape) if plain else rng.normal(0.0, 0.2, parameter.shape)
            parameter.copy_(torch.from_numpy(np.asarray(values, np.float32)))


def tiny(path: Path, model: Any, *, seed: int = 0) -> Tiny:
    """Fill a transformers model and save it."""
    fill(model, seed)
    model.eval()
    model.save_pretrained(path)
    return Tiny(path, model, {k: v.detach().clone() for k, v in model.state_dict().items()})


def prompt(vocab: int, count: int = LENGTH, *, seed: int = 1) -> torch.Tensor:
    """Fixed random token ids, ``[1, count]``."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, vocab, (1, count)))


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference."""
    return float((a.double() - b.double()).abs().max())
