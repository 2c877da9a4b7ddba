"""Gemma 3 (text), readable from top to bottom, with the module names of the from-scratch book.

What sets it apart: every part is normed before and after, by zero-centred norms (the weight is the scale minus one);
queries and keys are normed per head; five sliding layers follow each other before a full one, with a rotary base of
their own; embeddings are multiplied by the square root of the width (rounded to the weights' type, as transformers
does; the book's notebook multiplies by the unrounded number, which differs in bfloat16 only); scores are divided by
the square root of ``query_pre_attn_scalar``, not of the head size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convert.errors import ConvertError, Problem
from convert.reference import Control
from convert.reference.decoder import FULL, ROTARY_CONTROL, SLIDING, Context, Decoder
from convert.reference.layers import FeedForward, GroupedQueryAttention, LayerCache, RMSNorm, RotaryEmbedding


@dataclass(frozen=True)
class Gemma3Config:
    """The numbers of a Gemma 3.

    Attributes:
        vocab_size: V, rows of the embedding.
        emb_dim: D.
        hidden_dim: F, rows of the gate and up projections.
        n_heads: Query heads.
        n_kv_groups: Key and value heads.
        head_dim: Size of a head.
        layer_types: ``full_attention`` or ``sliding_attention``, one per layer.
        sliding_window: How many tokens a query of a sliding layer sees, itself included.
        ropes: RoPE settings per kind of layer.
        query_pre_attn_scalar: Scores are divided by its square root.
        norm_eps: Epsilon of every RMSNorm.
        final_softcap: Logits are squeezed into ± this by tanh; None for not at all.
        biases: Which of ``q``, ``k``, ``v``, ``o`` have biases.
        tied: The head is the embedding.
        pairing: How the stored rows of Q and K pair up.
        zero_centered: Whether norm weights are stored as the scale minus one.
    """

    vocab_size: int
    emb_dim: int
    hidden_dim: int
    n_heads: int
    n_kv_groups: int
    head_dim: int
    layer_types: tuple[str, ...]
    sliding_window: int
    ropes: Mapping[str, Mapping[str, Any]]
    query_pre_attn_scalar: float
    norm_eps: float = 1e-6
    final_softcap: float | None = None
    biases: frozenset[str] = frozenset()
    tied: bool = True
    pairing: str = "half"
    zero_centered: bool = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], **stored: Any) -> Gemma3Config:
        """Read a normalised Hugging Face config.

        Args:
            config: With nested ``rope_parameters`` and with ``layer_types``.
            **stored: How the weights are stored, which no config says: ``pairing``, ``zero_centered``, ``tied``.

        Raises:
            ConvertError: Keys are missing, or the model is not of this architecture; all findings at once.
        """
        needed: tuple[str, ...] = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        needed += ("num_key_value_heads", "head_dim", "layer_types", "query_pre_attn_scalar", "rope_parameters")
        problems = [
            Problem("config", f"The config has no {key!r}, which the reference model needs.", wanted=key)
            for key in needed
            if config.get(key) is None
        ]
        act = config.get("hidden_activation") or "gelu_pytorch_tanh"
        if act != "gelu_pytorch_tanh":
            problems.append(
                Problem("config", f"This architecture uses GELU (tanh), not {act!r}.", found=act, wanted=act)
            )
        for key in ("attn_logit_softcapping", "use_bidirectional_attention"):
            if config.get(key):
                problems.append(Problem("config", f"The reference model has no {key}.", found=config[key]))
        if problems:
            raise ConvertError(problems)
        return cls(
            vocab_size=config["vocab_size"],
            emb_dim=config["hidden_size"],
            hidden_dim=config["intermediate_size"],
            n_heads=config["num_attention_heads"],
            n_kv_groups=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            layer_types=tuple(config["layer_types"]),
            sliding_window=config.get("sliding_window") or 4096,
            ropes=config["rope_parameters"],
            query_pre_attn_scalar=config["query_pre_attn_scalar"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            final_softcap=config.get("final_logit_softcapping"),
            biases=frozenset("qkvo" if config.get("attention_bias") else ""),
            **stored,
        )


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each normed on its way in and on its way out, and added to its input."""

    def __init__(self, config: Gemma3Config, kind: str, *, device: Any = None) -> None:
        super().__init__()
        self.kind = kind
        norm = partial(RMSNorm, eps=config.norm_eps, zero_centered=config.zero_centered, name="scale", device=device)
        self.att = GroupedQueryAttention(
            config.emb_dim,
            n_heads=config.n_heads,
            n_kv_groups=config.n_kv_groups,
            head_dim=config.head_dim,
            biases=config.biases,
            q_norm=norm(config.head_dim),
            k_norm=norm(config.head_dim),
            scale=config.query_pre_attn_scalar**-0.5,
            device=device,
        )
        gelu = partial(F.gelu, approximate="tanh")
        self.ff = FeedForward(config.emb_dim, config.hidden_dim, activation=gelu, device=device)
        self.input_layernorm = norm(config.emb_dim)
        self.post_attention_layernorm = norm(config.emb_dim)
        self.pre_feedforward_layernorm = norm(config.emb_dim)
        self.post_feedforward_layernorm = norm(config.emb_dim)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        here = context[self.kind]
        y = self.att(self.input_layernorm(x), rotation=here.rotation, mask=here.mask, cache=cache)
        x = x + self.post_attention_layernorm(y)
        y = self.ff(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(y)


@contextmanager
def _flip_norms(model: Gemma3) -> Iterator[None]:
    """Run with norm weights taken for the scale where they are the scale minus one, or the other way round."""
    norms = [m for m in model.modules() if isinstance(m, RMSNorm)]
    for norm in norms:
        norm.zero_centered = not norm.zero_centered
    try:
        yield
    finally:
        for norm in norms:
            norm.zero_centered = not norm.zero_centered


class Gemma3(Decoder):
    """A Gemma 3 that runs weights as stored.

    Args:
        config: The numbers.
        device: Where the parameters are made (``meta`` for a model that is filled later).
    """

    controls: ClassVar[tuple[Control, ...]] = (
        ROTARY_CONTROL,
        Control("norms", "norm weights stored by the other convention (off by one)", _flip_norms),
    )

    def __init__(self, config: Gemma3Config, *, device: Any = None) -> None:
        super().__init__()
        self.config = config
        self.n_layers = len(config.layer_types)
        self.vocab_size = config.vocab_size
        self.tok_emb = nn.Embedding(config.vocab_size, config.emb_dim, device=device)
        self.blocks = nn.ModuleList(TransformerBlock(config, kind, device=device) for kind in config.layer_types)
        self.final_norm = RMSNorm(
            config.emb_dim, config.norm_eps, zero_centered=config.zero_centered, name="scale", device=device
        )
        self.out_head = nn.Linear(config.emb_dim, config.vocab_size, bias=False, device=device)
        if config.tied:
            self.out_head.weight = self.tok_emb.weight
        self.ropes = nn.ModuleDict(
            {
                kind: RotaryEmbedding(config.head_dim, rope["rope_theta"], scaling=rope, pairing=config.pairing)
                for kind, rope in config.ropes.items()
            }
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids ``[B, T]`` to hidden states ``[B, T, D]``."""
        x = self.tok_emb(ids)
        return x * torch.tensor(self.config.emb_dim**0.5, dtype=x.dtype, device=x.device)

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


Config = Gemma3Config
Model = Gemma3
#: What the names of tensors contain whose rows are rotary pairs.
ROTARY = (".att.W_query.", ".att.W_key.", ".att.q_norm.", ".att.k_norm.")


def build(
    config: Mapping[str, Any],
    *,
    pairing: str = "half",
    norm: str = "zero_centered",
    tied: bool | None = None,
    names: Collection[str] | None = None,
    device: torch.device | str | None = None,
) -> Gemma3:
    """A Gemma 3 for a normalised Hugging Face config.

    Args:
        config: See :meth:`Gemma3Config.from_hf`.
        pairing: How the stored rows of Q and K pair up.
        norm: How norm weights are stored: ``zero_centered`` or ``plain``.
        tied: Whether the head is the embedding; unless given, as the config says (where silent: it is).
        names: Names of the tensors that will fill the model; nothing depends on them here.
        device: Where the parameters are made; ``meta`` to fill them later.

    Raises:
        ConvertError: The config lacks something or is of another architecture.
    """
    if tied is None:
        tied = bool(config.get("tie_word_embeddings", True))
    stored = {"pairing": pairing, "zero_centered": norm == "zero_centered", "tied": tied}
    return Gemma3(Gemma3Config.from_hf(config, **stored), device=device)
