"""Reference models and stand-in checkpoints made from the fixtures' random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from convert.reference import reference_for
from convert.source import Source
from tests.fixtures.hf import hf_config
from tests.fixtures.scratch import _BLOCK
from tests.fixtures.shapes import Shape, get_shape
from tests.fixtures.weights import Tensors, hf_state, llama3_scaling, to_interleaved

_TOP = {
    "model.embed_tokens": "tok_emb",
    "model.norm": "final_norm",
    "lm_head": "out_head",
    "model.layers": "trf_blocks",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For the modules that import it: on tiny models, threads wait for each other (7 x on a busy machine)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference_names(state: Tensors) -> Tensors:
    """A Hugging Face state dict under the book's names."""
    renamed = {}
    for name, tensor in state.items():
        for book, theirs in (*_BLOCK.items(), *((b, a) for a, b in _TOP.items())):
            name = name.replace(theirs, book)
        renamed[name] = tensor
    return renamed


def interleaved(state: Tensors, shape: Shape) -> Tensors:
    """The same model with the rows (and biases) of Q and K in interleaved order."""
    heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads}
    return {
        name: to_interleaved(t, heads[part]) if (part := name.split(".")[-2]) in heads else t
        for name, t in state.items()
    }


def model_of(state: Tensors, config: dict[str, Any], *, pairing: str = "half") -> Any:
    """The reference model filled by ``load_state_dict(strict=True)``, which a converted checkpoint must pass."""
    state = reference_names(state)
    model = reference_for("llama").build(config, pairing=pairing, names=set(state))
    if config["tie_word_embeddings"]:
        state.setdefault("out_head.weight", state["tok_emb.weight"])
    model.load_state_dict(state, strict=True)
    return model.eval()


_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class TensorSource(Source):
    """A tensor in memory as the engine's lazy source: raw storage values, in blocks of rows."""

    def __init__(self, tensor: torch.Tensor, *, align: int = 1) -> None:
        self.tensor = tensor.contiguous()
        self.shape = tuple(tensor.shape)
        self.dtype = _NAMES[tensor.dtype]
        self.align = align
        self.reads: list[tuple[int, int]] = []

    def read(self, start: int, stop: int) -> np.ndarray:
        self.reads.append((start, stop))
        rows = self.tensor[start:stop]
        return rows.view(torch.int16).numpy().view(np.uint16) if self.dtype == "BF16" else rows.numpy()


@dataclass
class StandIn:
    """What verify needs of an opened checkpoint."""

    config: dict[str, Any]
    state: Tensors
    pairing: str = "half"
    norm: str = "plain"
    tied: bool = False
    layout: str = "hf"
    family: str = "llama"
    table: Any = field(default_factory=lambda: SimpleNamespace(reference="llama"))
    path: Path | None = None

    def reference_tensors(self) -> Iterator[tuple[str, Source]]:
        for name, tensor in reference_names(self.state).items():
            yield name, tensor if isinstance(tensor, Source) else TensorSource(tensor)


def stand_in(
    shape: str | Shape = "gqa8",
    *,
    pairing: str = "half",
    dtype: str = "float32",
    std: float = 0.2,
    scaling: int | dict[str, Any] | None = None,
    change: Callable[[Tensors], None] | None = None,
    config: dict[str, Any] | None = None,
    seed: int = 0,
    **biases: bool,
) -> StandIn:
    """A checkpoint of the random model, in either rotary order, in a storage type, with weights of another spread."""
    shape = get_shape(shape)
    state = hf_state(shape, seed=seed, **biases)
    if std != 0.2:
        state = {k: t * (std / 0.2) if t.ndim == 2 else t for k, t in state.items()}
    if pairing == "interleaved":
        state = interleaved(state, shape)
    if change is not None:
        change(state)
    state = {k: t.to(getattr(torch, dtype)) for k, t in state.items()}
    numbers = hf_config(shape, dtype=dtype, scaling=llama3_scaling(scaling), **biases) | (config or {})
    return StandIn(numbers, state, pairing=pairing, tied=shape.tied)
