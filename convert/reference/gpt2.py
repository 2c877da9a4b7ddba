"""The GPT-2 architecture, readable from top to bottom, with the module names of the from-scratch book.

Positions are learned, one vector each; attention has as many key heads as query heads; norms take the mean out and have
a bias; the feed-forward layer is not gated. The book's classes are this model with numbers hard-wired (the width of the
feed-forward layer, the norms' epsilon). It knows neither files nor layouts: :mod:`convert.reference.loading` fills it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convert.errors import ConvertError, Problem
from convert.reference import Control
from convert.reference.layers import GroupedQueryAttention, KVCache, LayerCache, causal_mask, widen

_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_TANH = partial(F.gelu, approximate="tanh")
#: transformers' names of activations. GPT-2's own is GELU by tanh, which has three names there.
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": _TANH,
    "gelu_pytorch_tanh": _TANH,
    "gelu_fast": _TANH,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class GPT2Config:
    """The numbers of a GPT-2.

    Attributes:
        vocab_size: V, rows of the embedding.
        context_length: C, rows of the position embedding; no text can be longer.
        emb_dim: D.
        hidden_dim: F, rows of the first feed-forward matrix.
        n_layers: L.
        n_heads: Heads of queries, keys and values.
        norm_eps: Epsilon of every norm.
        activation: Of the feed-forward layer, by transformers' name.
        qkv_bias: Whether queries, keys and values have biases.
        tied: The head is the embedding.
        scaled: Scores are divided by the root of the head's size.
        scaled_by_layer: Scores of layer ``l`` are divided by ``l + 1`` too.
    """

    vocab_size: int
    context_length: int
    emb_dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    norm_eps: float = 1e-5
    activation: str = "gelu_new"
    qkv_bias: bool = True
    tied: bool = True
    scaled: bool = True
    scaled_by_layer: bool = False

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, qkv_bias: bool | None = None, tied: bool | None = None
    ) -> GPT2Config:
        """Read a normalised Hugging Face config.

        Raises:
            ConvertError: Keys are missing, or the model is not of this architecture; all findings at once.
        """
        problems = [
            Problem("config", f"The config has no {key!r}, which the reference model needs.", wanted=key)
            for key in _NEEDED
            if config.get(key) is None
        ]
        act = config.get("activation_function") or "gelu_new"
        if act not in _ACTIVATIONS:
            message = f"The reference model does not know the activation {act!r}."
            problems.append(Problem("config", message, found=act, wanted=list(_ACTIVATIONS)))
        if config.get("add_cross_attention"):
            problems.append(Problem("config", "The reference model has no cross attention."))
        if problems:
            raise ConvertError(problems)
        heads, dim = config["num_attention_heads"], config["hidden_size"]
        if heads < 1 or dim % heads:
            raise ConvertError(Problem("config", f"A width of {dim} cannot be shared by {heads} heads equally."))
        return cls(
            vocab_size=config["vocab_size"],
            context_length=config["max_position_embeddings"],
            emb_dim=dim,
            hidden_dim=config.get("intermediate_size") or 4 * dim,
            n_layers=config["num_hidden_layers"],
            n_heads=heads,
            norm_eps=config.get("layer_norm_epsilon", 1e-5),
            activation=act,
            qkv_bias=bool(config.get("qkv_bias", True)) if qkv_bias is None else qkv_bias,
            tied=bool(config.get("tie_word_embeddings", True)) if tied is None else tied,
            scaled=bool(config.get("scale_attn_weights", True)),
            scaled_by_layer=bool(config.get("scale_attn_by_inverse_layer_idx", False)),
        )


class LayerNorm(nn.Module):
    """Layer norm over the last axis with a scale and a shift, computed in float32 at least."""

    def __init__(self, dim: int, eps: float, *, device: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim, device=device))
        self.shift = nn.Parameter(torch.zeros(dim, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., dim]``."""
        wide = widen(x)
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * widen(self.scale) + widen(self.shift)).to(x.dtype)


class Activation(nn.Module):
    """The activation, as a layer without parameters: it is number 1 of the feed-forward layers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = _ACTIVATIONS[name]

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same shape."""
        return self.function(x)


class FeedForward(nn.Module):
    """Up, activation, down; both matrices have biases."""

    def __init__(self, config: GPT2Config, *, device: Any = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(config.emb_dim, config.hidden_dim, device=device),
            Activation(config.activation),
            nn.Linear(config.hidden_dim, config.emb_dim, device=device),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., D]``."""
        return self.layers(x)


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each on a normed input and added to its input."""

    def __init__(self, config: GPT2Config, layer: int, *, device: Any = None) -> None:
        super().__init__()
        head_dim = config.emb_dim // config.n_heads
        scale = head_dim**-0.5 if config.scaled else 1.0
        self.att = GroupedQueryAttention(
            config.emb_dim,
            n_heads=config.n_heads,
            n_kv_groups=config.n_heads,
            head_dim=head_dim,
            biases=frozenset("qkvo" if config.qkv_bias else "o"),
            scale=scale / (layer + 1) if config.scaled_by_layer else scale,
            device=device,
        )
        self.ff = FeedForward(config, device=device)
        self.norm1 = LayerNorm(config.emb_dim, config.norm_eps, device=device)
        self.norm2 = LayerNorm(config.emb_dim, config.norm_eps, device=device)

    def forward(self, x: Tensor, mask: Tensor | None, cache: LayerCache | None = None) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        x = x + self.att(self.norm1(x), rotation=None, mask=mask, cache=cache)
        return x + self.ff(self.norm2(x))


@contextmanager
def _turn_square(model: GPT2) -> Iterator[None]:
    """Run with the one square matrix turned, which fits both ways (Conv1D's ``[in, out]`` against ``[out, in]``)."""
    layers = [model.block(layer).att.out_proj for layer in range(model.n_layers)]
    kept = [layer.weight for layer in layers]
    for layer, weight in zip(layers, kept, strict=True):
        layer.weight = nn.Parameter(weight.detach().T, requires_grad=False)
    try:
        yield
    finally:
        for layer, weight in zip(layers, kept, strict=True):
            layer.weight = weight


@contextmanager
def _exchange_query_key(model: GPT2) -> Iterator[None]:
    """Run with queries and keys exchanged, as when the fused matrix is cut up in another order."""
    attentions = [model.block(layer).att for layer in range(model.n_layers)]

    def exchange() -> None:
        for att in attentions:
            att.W_query, att.W_key = att.W_key, att.W_query

    exchange()
    try:
        yield
    finally:
        exchange()


class GPT2(nn.Module):
    """A GPT-2.

    Args:
        config: The numbers.
        device: Where the parameters are made (``meta`` for a model that is filled later).
    """

    controls: ClassVar[tuple[Control, ...]] = (
        Control("square", "the attention's output matrix turned", _turn_square),
        Control("order", "the rows of Q and K exchanged", _exchange_query_key),
    )
    #: ggml takes GELU from a table in float16: log-probabilities differ by up to this.
    engine_floor: ClassVar[float] = 5e-3

    def __init__(self, config: GPT2Config, *, device: Any = None) -> None:
        super().__init__()
        self.config = config
        self.n_layers = config.n_layers
        self.vocab_size = config.vocab_size
        self.tok_emb = nn.Embedding(config.vocab_size, config.emb_dim, device=device)
        self.pos_emb = nn.Embedding(config.context_length, config.emb_dim, device=device)
        blocks = (TransformerBlock(config, layer, device=device) for layer in range(config.n_layers))
        self.trf_blocks = nn.ModuleList(blocks)
        self.final_norm = LayerNorm(config.emb_dim, config.norm_eps, device=device)
        self.out_head = nn.Linear(config.emb_dim, config.vocab_size, bias=False, device=device)
        if config.tied:
            self.out_head.weight = self.tok_emb.weight

    def embed(self, ids: Tensor, start: int = 0) -> Tensor:
        """Token ids ``[B, T]`` at positions from ``start`` on to hidden states ``[B, T, D]``.

        Raises:
            ConvertError: The model has no such positions.
        """
        stop = start + ids.shape[1]
        if stop > self.config.context_length:
            message = f"The model has {self.config.context_length:,} positions, too few for {stop:,} tokens."
            raise ConvertError(Problem("context", message, found=stop, wanted=self.config.context_length))
        return self.tok_emb(ids) + self.pos_emb(torch.arange(start, stop, device=ids.device))

    def context(self, length: int, start: int = 0) -> Tensor | None:
        """The mask of positions ``start`` to ``start + length``, shared by all layers."""
        return causal_mask(start, length, device=self.tok_emb.weight.device)

    def block(self, layer: int) -> nn.Module:
        """Layer ``layer``."""
        return self.trf_blocks[layer]

    def head(self, x: Tensor) -> Tensor:
        """Hidden states ``[B, T, D]`` to logits ``[B, T, V]``."""
        return self.out_head(self.final_norm(x))

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """Token ids ``[B, T]`` to logits ``[B, T, V]``; with a cache, the ids continue what it has seen."""
        start = cache.length if cache is not None else 0
        x = self.embed(ids, start)
        mask = self.context(ids.shape[1], start)
        for layer in range(self.n_layers):
            x = self.block(layer)(x, mask, cache.layers[layer] if cache is not None else None)
        return self.head(x)


Config = GPT2Config
Model = GPT2
#: Nothing turns here.
ROTARY: tuple[str, ...] = ()


def build(
    config: Mapping[str, Any],
    *,
    pairing: str = "half",
    norm: str = "plain",
    tied: bool | None = None,
    names: Collection[str] | None = None,
    device: torch.device | str | None = None,
) -> GPT2:
    """A GPT-2 for a normalised Hugging Face config.

    Args:
        config: See :meth:`GPT2Config.from_hf`.
        pairing: Of no matter: no rows are rotary pairs.
        norm: Of no matter: norm weights are plain in every layout.
        tied: Whether the head is the embedding; unless given, as the config says.
        names: Names (from-scratch) of the tensors that will fill the model. Biases of queries, keys and values among
            them exist whatever the config says.
        device: Where the parameters are made; ``meta`` to fill them later.

    Raises:
        ConvertError: The config lacks something or is of another architecture.
    """
    biased = True if any(n.endswith(".att.W_query.bias") for n in names or ()) else None
    return GPT2(GPT2Config.from_hf(config, qkv_bias=biased, tied=tied), device=device)
