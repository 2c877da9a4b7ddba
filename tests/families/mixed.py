"""Tiny models of families that mix sliding and full layers, made by transformers and filled so that faults show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from convert.checkpoint import open_checkpoint
from convert.plan import Request, make_plan
from convert.reference.loading import load_reference
from convert.run import run

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


def reference(path: Path) -> Any:
    """The reference model of a checkpoint."""
    with open_checkpoint(path) as opened:
        return load_reference(opened)


def run_reference(path: Path, vocab: int) -> torch.Tensor:
    """Its logits of :func:`prompt`."""
    with torch.no_grad():
        return reference(path)(prompt(vocab))


def converted(source: Path, folder: Path, layout: str, table: Any = None, **options: Any) -> Path:
    """A conversion, also with a table that is wrong on purpose; GGUF in float32."""
    out = folder / ("out.gguf" if layout == "gguf" else f"out_{layout}")
    with open_checkpoint(source) as opened:
        request = Request(layout, tokenizer=False, **options)
        request.gguf.type = "f32"
        run(make_plan(opened, request, table=table), out)
    return out


#: After how many tokens llama.cpp is asked.
PLACES = (1, 7, 40, 128, LENGTH)


def llama_cpp(path: Path, vocab: int) -> torch.Tensor:
    """Log-probabilities of real llama.cpp at :data:`PLACES`."""
    from convert.engines.llama_cpp import logprobs

    row = prompt(vocab)[0].tolist()
    return torch.from_numpy(logprobs(path, [row[:n] for n in PLACES], threads=1))


def at_places(logits: torch.Tensor) -> torch.Tensor:
    """The same of logits ``[1, T, V]``."""
    return logits[0].double().log_softmax(-1)[[n - 1 for n in PLACES]]
