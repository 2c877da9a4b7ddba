"""Gemma 4 (text), readable from top to bottom, with the module names of the from-scratch book.

What sets it apart, beside the norms around every part that Gemma 3 has too (plain ones here): full layers have larger
heads, of which a quarter turns; scores are not scaled, and values are normed without a weight; the last layers have
no keys and values of their own and attend to those of the last layer of their kind that has; each layer adds, through
a gate, a small vector made of the token and of the embedded text; each layer's output is multiplied by one number;
logits are squeezed by tanh.

Sharing of keys and values follows transformers. The book's notebook shares them only when asked to
(``reuse_shared_kv=True``), and its version with a cache shares what its sliding window has cut short.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convert.errors import ConvertError, Problem
from convert.reference import Control
from convert.reference.decoder import FULL, ROTARY_CONTROL, SLIDING, Decoder, Positions
from convert.reference.layers import LayerCache, RMSNorm, RotaryEmbedding, apply_rotary, widen

_NEEDED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("global_head_dim", "layer_types", "sliding_window", "rope_parameters"),
)


@dataclass(frozen=True)
class Gemma4Config:
    """The numbers of a Gemma 4.

    Attributes:
        vocab_size: V, rows of the embedding.
        emb_dim: D.
        hidden_dim: F, rows of the gate and up projections.
        n_heads: Query heads.
        kv_heads: Key and value heads per kind of layer.
        head_dims: Size of a head per kind of layer.
        layer_types: ``full_attention`` or ``sliding_attention``, one per layer.
        sliding_window: How many tokens a query of a sliding layer sees, itself included.
        ropes: RoPE settings per kind of layer.
        n_shared: How many of the last layers have no keys and values of their own.
        double_wide: Those layers have feed-forward layers of twice the width.
        value_is_key: Values of full layers are their keys, before norm and rotation.
        per_layer_dim: P, width of the embeddings per layer; 0 for none.
        per_layer_vocab: Their rows.
        norm_eps: Epsilon of every RMSNorm.
        final_softcap: Logits are squeezed into ± this by tanh; None for not at all.
        unused_kv: Layers that have projections for keys and values which nothing uses.
        tied: The head is the embedding.
        pairing: How the stored rows of Q and K pair up.
        zero_centered: Whether norm weights are stored as the scale minus one.
    """

    vocab_size: int
    emb_dim: int
    hidden_dim: int
    n_heads: int
    kv_heads: Mapping[str, int]
    head_dims: Mapping[str, int]
    layer_types: tuple[str, ...]
    sliding_window: int
    ropes: Mapping[str, Mapping[str, Any]]
    n_shared: int = 0
    double_wide: bool = False
    value_is_key: bool = False
    per_layer_dim: int = 0
    per_layer_vocab: int = 0
    norm_eps: float = 1e-6
    final_softcap: float | None = None
    unused_kv: frozenset[int] = frozenset()
    tied: bool = True
    pairing: str = "half"
    zero_centered: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], **stored: Any) -> Gemma4Config:
        """Read a normalised Hugging Face config.

        Args:
            config: With nested ``rope_parameters``, ``layer_types`` and ``global_head_dim``.
            **stored: How the weights are stored, which no config says: ``pairing``, ``zero_centered``, ``tied``,
                ``unused_kv``.

        Raises:
            ConvertError: Keys are missing, or the model is not of this architecture; all findings at once.
        """
        problems = [
            Problem("config", f"The config has no {key!r}, which the reference model needs.", wanted=key)
            for key in _NEEDED
            if config.get(key) is None
        ]
        act = config.get("hidden_activation") or "gelu_pytorch_tanh"
        if act != "gelu_pytorch_tanh":
            problems.append(Problem("config", f"This architecture uses GELU (tanh), not {act!r}.", found=act))
        for key in ("enable_moe_block", "attention_bias"):
            if config.get(key):
                problems.append(Problem("config", f"The reference model has no {key}.", found=config[key]))
        if config.get("use_bidirectional_attention") == "all":
            problems.append(Problem("config", "The reference model attends backwards only."))
        if problems:
            raise ConvertError(problems)
        value_is_key = bool(config.get("attention_k_eq_v"))
        heads = config["num_key_value_heads"]
        return cls(
            vocab_size=config["vocab_size"],
            emb_dim=config["hidden_size"],
            hidden_dim=config["intermediate_size"],
            n_heads=config["num_attention_heads"],
            kv_heads={
                SLIDING: heads,
                FULL: (config.get("num_global_key_value_heads") or heads) if value_is_key else heads,
            },
            head_dims={SLIDING: config["head_dim"], FULL: config["global_head_dim"]},
            layer_types=tuple(config["layer_types"]),
            sliding_window=config["sliding_window"],
            ropes=config["rope_parameters"],
            n_shared=config.get("num_kv_shared_layers") or 0,
            double_wide=bool(config.get("use_double_wide_mlp")),
            value_is_key=value_is_key,
            per_layer_dim=config.get("hidden_size_per_layer_input") or 0,
            per_layer_vocab=config.get("vocab_size_per_layer_input") or config["vocab_size"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            final_softcap=config.get("final_logit_softcapping"),
            **stored,
        )

    def shares(self, layer: int) -> bool:
        """Whether a layer attends to another one's keys and values."""
        return layer >= len(self.layer_types) - self.n_shared

    def norm(self, dim: int, device: Any) -> RMSNorm:
        """A norm as this model has them."""
        return RMSNorm(dim, self.norm_eps, zero_centered=self.zero_centered, device=device)


@dataclass(frozen=True, slots=True)
class Context:
    """What the layers need to know of the positions at hand.

    Attributes:
        positions: Rotation and mask per kind of layer.
        per_layer: What each layer adds of the tokens themselves, ``[B, T, L, P]``, or None.
        shared: Keys and values per kind of layer, left by the latest layer that has its own.
    """

    positions: Mapping[str, Positions]
    per_layer: Tensor | None
    shared: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Attention(nn.Module):
    """Grouped-query attention with normed queries, keys and values, and scores that are not scaled."""

    def __init__(self, config: Gemma4Config, layer: int, *, device: Any = None) -> None:
        super().__init__()
        self.kind = kind = config.layer_types[layer]
        self.head_dim = dim = config.head_dims[kind]
        self.group_size = config.n_heads // config.kv_heads[kind]
        self.shares = config.shares(layer)
        self.norm_eps = config.norm_eps
        linear = partial(nn.Linear, bias=False, device=device)
        self.q_proj = linear(config.emb_dim, config.n_heads * dim)
        self.q_norm = config.norm(dim, device)
        self.v_proj: nn.Module | None = None
        if not self.shares or layer in config.unused_kv:
            self.k_proj = linear(config.emb_dim, config.kv_heads[kind] * dim)
            self.k_norm = config.norm(dim, device)
            if not (config.value_is_key and kind == FULL):
                self.v_proj = linear(config.emb_dim, config.kv_heads[kind] * dim)
        self.o_proj = linear(config.n_heads * dim, config.emb_dim)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        at = context.positions[self.kind]
        assert at.rotation is not None
        q = apply_rotary(self.q_norm(self._heads(self.q_proj(x))), at.rotation)
        if not self.shares:
            k = self._heads(self.k_proj(x))
            v = k if self.v_proj is None else self._heads(self.v_proj(x))
            k, v = apply_rotary(self.k_norm(k), at.rotation), self._normed(v)
            context.shared[self.kind] = (k, v) if cache is None else cache.append(k, v)
        k, v = (t.repeat_interleave(self.group_size, dim=1) for t in context.shared[self.kind])
        causal = at.mask is None and q.shape[2] > 1
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=at.mask, is_causal=causal, scale=1.0)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _normed(self, x: Tensor) -> Tensor:
        """A norm that has no weight."""
        wide = widen(x)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.norm_eps)).to(x.dtype)


class FeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self, emb_dim: int, hidden_dim: int, *, device: Any = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(emb_dim, hidden_dim, bias=False, device=device)
        self.up_proj = nn.Linear(emb_dim, hidden_dim, bias=False, device=device)
        self.down_proj = nn.Linear(hidden_dim, emb_dim, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., D]``."""
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class TransformerBlock(nn.Module):
    """Attention, feed-forward, then what the layer adds of the tokens; each normed and added; all of it scaled."""

    def __init__(self, config: Gemma4Config, layer: int, *, device: Any = None) -> None:
        super().__init__()
        self.layer = layer
        norm = partial(config.norm, config.emb_dim, device)
        width = config.hidden_dim * (2 if config.double_wide and config.shares(layer) else 1)
        self.att = Attention(config, layer, device=device)
        self.mlp = FeedForward(config.emb_dim, width, device=device)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()
        if config.per_layer_dim:
            self.per_layer_input_gate = nn.Linear(config.emb_dim, config.per_layer_dim, bias=False, device=device)
            self.per_layer_projection = nn.Linear(config.per_layer_dim, config.emb_dim, bias=False, device=device)
            self.post_per_layer_input_norm = norm()
        self.layer_scalar = nn.Parameter(torch.ones(1, device=device))  # a buffer elsewhere, stored all the same

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        x = x + self.post_attention_layernorm(self.att(self.input_layernorm(x), context, cache))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        if context.per_layer is not None:
            gate = F.gelu(self.per_layer_input_gate(x), approximate="tanh")
            y = self.per_layer_projection(gate * context.per_layer[:, :, self.layer])
            x = x + self.post_per_layer_input_norm(y)
        return x * self.layer_scalar


class Gemma4(Decoder):
    """A Gemma 4 that runs weights as stored.

    Args:
        config: The numbers.
        device: Where the parameters are made (``meta`` for a model that is filled later).
    """

    controls: ClassVar[tuple[Control, ...]] = (ROTARY_CONTROL,)

    def __init__(self, config: Gemma4Config, *, device: Any = None) -> None:
        super().__init__()
        self.config = config
        self.n_layers = len(config.layer_types)
        self.vocab_size = config.vocab_size
        self.tok_emb = nn.Embedding(config.vocab_size, config.emb_dim, device=device)
        self.blocks = nn.ModuleList(TransformerBlock(config, i, device=device) for i in range(self.n_layers))
        self.final_norm = config.norm(config.emb_dim, device)
        self.out_head = nn.Linear(config.emb_dim, config.vocab_size, bias=False, device=device)
        if config.tied:
            self.out_head.weight = self.tok_emb.weight
        if config.per_layer_dim:
            width = self.n_layers * config.per_layer_dim
            self.embed_tokens_per_layer = nn.Embedding(config.per_layer_vocab, width, device=device)
            self.per_layer_model_projection = nn.Linear(config.emb_dim, width, bias=False, device=device)
            self.per_layer_projection_norm = config.norm(config.per_layer_dim, device)
        self.ropes = nn.ModuleDict(
            {
                kind: RotaryEmbedding(config.head_dims[kind], rope["rope_theta"], scaling=rope, pairing=config.pairing)
                for kind, rope in config.ropes.items()
            }
        )
        self._per_layer: Tensor | None = None

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids ``[B, T]`` to hidden states ``[B, T, D]``.

        Also keeps what the layers will add of these tokens, for the :meth:`context` that is asked for next.
        """
        x = _scaled(self.tok_emb(ids), self.config.emb_dim**0.5)
        dim = self.config.per_layer_dim
        if dim:
            token = _scaled(self.embed_tokens_per_layer(ids), dim**0.5).unflatten(-1, (-1, dim))
            text = self.per_layer_model_projection(x) * self.config.emb_dim**-0.5
            text = self.per_layer_projection_norm(text.unflatten(-1, (-1, dim)))
            self._per_layer = (text + token) * 2**-0.5
        return x

    def context(self, length: int, start: int = 0) -> Any:
        """What the layers need to know of positions ``start`` to ``start + length``, embedded just before."""
        return Context(super().context(length, start), self._per_layer)

    def rotations(self) -> Mapping[str, Any]:
        """See :class:`Decoder`."""
        return dict(self.ropes.items())

    def windows(self) -> Mapping[str, int | None]:
        """See :class:`Decoder`."""
        return {FULL: None, SLIDING: self.config.sliding_window}

    def stack(self) -> nn.ModuleList:
        """See :class:`Decoder`."""
        return self.blocks

    def head(self, x: Tensor) -> Tensor:
        """Hidden states ``[B, T, D]`` to logits ``[B, T, V]``."""
        logits, cap = super().head(x), self.config.final_softcap
        return logits if not cap else torch.tanh(logits / cap) * cap


def _scaled(x: Tensor, factor: float) -> Tensor:
    """Multiplied by a factor that is rounded to the values' own type, as transformers does."""
    return x * torch.tensor(factor, dtype=x.dtype, device=x.device)


Config = Gemma4Config
Model = Gemma4
#: What the names of tensors contain whose rows are rotary pairs.
ROTARY = (".att.q_proj.", ".att.k_proj.", ".att.q_norm.", ".att.k_norm.")


def build(
    config: Mapping[str, Any],
    *,
    pairing: str = "half",
    norm: str = "plain",
    tied: bool | None = None,
    names: Collection[str] | None = None,
    device: torch.device | str | None = None,
) -> Gemma4:
    """A Gemma 4 for a normalised Hugging Face config.

    Args:
        config: See :meth:`Gemma4Config.from_hf`.
        pairing: How the stored rows of Q and K pair up.
        norm: How norm weights are stored: ``plain`` or ``zero_centered``.
        tied: Whether the head is the embedding; unless given, as the config says (where silent: it is).
        names: Names of the tensors that will fill the model: keys and values that nothing uses are among them or not.
        device: Where the parameters are made; ``meta`` to fill them later.

    Raises:
        ConvertError: The config lacks something or is of another architecture.
    """
    if tied is None:
        tied = bool(config.get("tie_word_embeddings", True))
    held = names or ()
    layers = range(len(config.get("layer_types") or ()))
    numbers = Gemma4Config.from_hf(
        config,
        pairing=pairing,
        zero_centered=norm == "zero_centered",
        tied=tied,
        unused_kv=frozenset(i for i in layers if f"blocks.{i}.att.k_proj.weight" in held),
    )
    return Gemma4(numbers, device=device)
