"""What reference models with several kinds of layers share: the loop over layers, and what each kind is told.

A model file on top of this says which blocks there are and how each kind of layer turns and masks; it reads like a
description of the architecture. Building blocks are in :mod:`convert.reference.layers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from convert.errors import ConvertError, Problem
from convert.reference import Control
from convert.reference.layers import PAIRINGS, KVCache, RotaryEmbedding, Rotation, causal_mask

#: Kinds of layers, as transformers spells them in ``layer_types``.
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class Positions:
    """What one kind of layer needs to know of the positions at hand: how they turn, and which of them are seen."""

    rotation: Rotation | None
    mask: Tensor | None


#: By kind of layer.
Context = Mapping[str, Positions]


class Decoder(nn.Module):
    """Embedding, layers, final norm and head; a subclass makes them and says what :meth:`positions` are.

    Attributes:
        n_layers: L.
        vocab_size: V.
        logit_scale: What the head's output is multiplied by.
    """

    n_layers: int
    vocab_size: int
    tok_emb: nn.Embedding
    final_norm: nn.Module
    out_head: nn.Linear
    logit_scale: float = 1.0

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids ``[B, T]`` to hidden states ``[B, T, D]``."""
        return self.tok_emb(ids)

    def rotations(self) -> Mapping[str, RotaryEmbedding | None]:
        """The rotary embedding of each kind of layer; None where positions do not turn."""
        raise NotImplementedError

    def windows(self) -> Mapping[str, int | None]:
        """How many tokens a query of each kind of layer sees, itself included; None for all."""
        raise NotImplementedError

    def context(self, length: int, start: int = 0) -> Context:
        """What each kind of layer needs to know of positions ``start`` to ``start + length``."""
        weight, windows = self.tok_emb.weight, self.windows()
        return {
            kind: Positions(
                rope(start, length, dtype=weight.dtype) if rope is not None else None,
                causal_mask(start, length, window=windows[kind], device=_device(rope, weight)),
            )
            for kind, rope in self.rotations().items()
        }

    def stack(self) -> nn.ModuleList:
        """The layers, under whatever name the book has for them."""
        raise NotImplementedError

    def block(self, layer: int) -> nn.Module:
        """Layer ``layer``."""
        return self.stack()[layer]

    def head(self, x: Tensor) -> Tensor:
        """Hidden states ``[B, T, D]`` to logits ``[B, T, V]``."""
        logits = self.out_head(self.final_norm(x))
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """Token ids ``[B, T]`` to logits ``[B, T, V]``; with a cache, the ids continue what it has seen."""
        x = self.embed(ids)
        context = self.context(ids.shape[1], start=cache.length if cache is not None else 0)
        for layer in range(self.n_layers):
            x = self.block(layer)(x, context, cache.layers[layer] if cache is not None else None)
        return self.head(x)


def _device(rope: RotaryEmbedding | None, weight: Tensor) -> Any:
    return weight.device if rope is None else rope.cos.device


@contextmanager
def _flip_rotary(model: Decoder) -> Iterator[None]:
    """Run with the other order of rotary pairs: what Q and K look like when they were not put in order."""
    ropes = {id(r): r for r in model.rotations().values() if r is not None}
    kept = {key: rope.pairing for key, rope in ropes.items()}
    for rope in ropes.values():
        rope.pairing = PAIRINGS[1 - PAIRINGS.index(rope.pairing)]
    try:
        yield
    finally:
        for key, rope in ropes.items():
            rope.pairing = kept[key]


ROTARY_CONTROL = Control("rotary", "the rows of Q and K in the other rotary order", _flip_rotary)


def check_config(
    config: Mapping[str, Any], needed: Sequence[str], *, kinds: Sequence[str] = (SLIDING, FULL)
) -> tuple[int, int]:
    """Stop unless a config has what a model of this kind needs.

    Args:
        config: A normalised Hugging Face config.
        needed: Keys it must have.
        kinds: What ``layer_types`` may hold.

    Returns:
        Key and value heads, and the size of a head.

    Raises:
        ConvertError: Keys are missing, or the model is of another architecture; all findings at once.
    """
    problems = [
        Problem("config", f"The config has no {key!r}, which the reference model needs.", wanted=key)
        for key in needed
        if config.get(key) is None
    ]
    act = config.get("hidden_act") or "silu"
    if act not in ("silu", "swish"):
        problems.append(Problem("config", f"This architecture uses SiLU, not {act!r}.", found=act, wanted="silu"))
    types = config.get("layer_types")
    if types is not None and (strange := sorted(set(map(str, types)) - set(kinds))):
        problems.append(
            Problem("config", f"There are no layers of kind {strange[0]!r} here.", found=strange, wanted=list(kinds))
        )
    if types is not None and len(types) != config.get("num_hidden_layers"):
        problems.append(Problem("config", "layer_types has not one entry per layer.", found=len(types)))
    if problems:
        raise ConvertError(problems)
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ConvertError(
            Problem("config", f"{heads} query heads cannot share {kv_heads} key and value heads equally.")
        )
    return kv_heads, config.get("head_dim") or config["hidden_size"] // heads
