"""The Cohere2 architecture (Tiny Aya), readable from top to bottom, with the module names of the from-scratch book.

A block has one norm. Attention and feed-forward both read what it gives, and both are added to the block's input.
Sliding layers turn neighbouring pairs of dimensions; full layers have no positions at all. The norm is a LayerNorm
without bias, and logits are multiplied by ``logit_scale``. It knows neither files nor layouts:
:mod:`convert.reference.loading` fills it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from convert.reference import Control
from convert.reference.decoder import FULL, ROTARY_CONTROL, SLIDING, Context, Decoder, check_config
from convert.reference.layers import FeedForward, GroupedQueryAttention, LayerCache, LayerNorm, RotaryEmbedding

_NEEDED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("layer_types", "logit_scale", "rope_parameters"),
)


@dataclass(frozen=True)
class TinyAyaConfig:
    """The numbers of a Cohere2 model.

    Attributes:
        vocab_size: V, rows of the embedding.
        emb_dim: D.
        hidden_dim: F, rows of the gate and up projections.
        n_layers: L.
        n_heads: Query heads.
        n_kv_groups: Key and value heads.
        head_dim: Size of a head.
        layer_types: Per layer ``sliding_attention`` or ``full_attention``.
        sliding_window: How many tokens a query of a sliding layer sees, itself included. None: sliding layers see
            all, and have no positions either (transformers asks for a window before it turns anything).
        logit_scale: What the head's output is multiplied by.
        norm_eps: Epsilon of every norm.
        rope: RoPE settings of the sliding layers.
        biases: Whether the attention's projections have biases.
        tied: The head is the embedding.
        pairing: How the stored rows of Q and K pair up.
    """

    vocab_size: int
    emb_dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_groups: int
    head_dim: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    logit_scale: float
    norm_eps: float
    rope: Mapping[str, Any]
    biases: bool = False
    tied: bool = True
    pairing: str = "interleaved"

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, pairing: str = "interleaved", tied: bool | None = None, biases: bool = False
    ) -> TinyAyaConfig:
        """Read a normalised Hugging Face config.

        Raises:
            ConvertError: Keys are missing, or the model is not of this architecture; all findings at once.
        """
        kv_heads, head_dim = check_config(config, _NEEDED)
        return cls(
            vocab_size=config["vocab_size"],
            emb_dim=config["hidden_size"],
            hidden_dim=config["intermediate_size"],
            n_layers=config["num_hidden_layers"],
            n_heads=config["num_attention_heads"],
            n_kv_groups=kv_heads,
            head_dim=head_dim,
            layer_types=tuple(config["layer_types"]),
            sliding_window=config.get("sliding_window"),
            logit_scale=float(config["logit_scale"]),
            norm_eps=config.get("layer_norm_eps", 1e-5),
            rope=config["rope_parameters"],
            biases=biases or bool(config.get("attention_bias")),
            tied=bool(config.get("tie_word_embeddings", True)) if tied is None else tied,
            pairing=pairing,
        )


class ParallelBlock(nn.Module):
    """Attention and feed-forward side by side: ``x + att(norm(x)) + ff(norm(x))``, with one norm for both."""

    def __init__(self, config: TinyAyaConfig, kind: str, *, device: Any = None) -> None:
        super().__init__()
        self.kind = kind
        self.input_layernorm = LayerNorm(config.emb_dim, config.norm_eps, device=device)
        self.att = GroupedQueryAttention(
            config.emb_dim,
            n_heads=config.n_heads,
            n_kv_groups=config.n_kv_groups,
            head_dim=config.head_dim,
            biases=frozenset("qkvo") if config.biases else frozenset(),
            device=device,
        )
        self.ff = FeedForward(config.emb_dim, config.hidden_dim, device=device)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        here = context[self.kind]
        normed = self.input_layernorm(x)
        return x + self.att(normed, rotation=here.rotation, mask=here.mask, cache=cache) + self.ff(normed)


class TinyAya(Decoder):
    """A Cohere2 model that runs weights as stored.

    Args:
        config: The numbers.
        device: Where the parameters are made (``meta`` for a model that is filled later).
    """

    controls: ClassVar[tuple[Control, ...]] = (ROTARY_CONTROL,)

    def __init__(self, config: TinyAyaConfig, *, device: Any = None) -> None:
        super().__init__()
        self.config = config
        self.n_layers = config.n_layers
        self.vocab_size = config.vocab_size
        self.logit_scale = config.logit_scale
        self.tok_emb = nn.Embedding(config.vocab_size, config.emb_dim, device=device)
        self.trf_blocks = nn.ModuleList(ParallelBlock(config, kind, device=device) for kind in config.layer_types)
        self.final_norm = LayerNorm(config.emb_dim, config.norm_eps, device=device)
        self.out_head = nn.Linear(config.emb_dim, config.vocab_size, bias=False, device=device)
        if config.tied:
            self.out_head.weight = self.tok_emb.weight
        self.rope = RotaryEmbedding(
            config.head_dim, config.rope["rope_theta"], scaling=config.rope, pairing=config.pairing
        )

    def stack(self) -> nn.ModuleList:
        """See :class:`Decoder`."""
        return self.trf_blocks

    def rotations(self) -> dict[str, RotaryEmbedding | None]:
        """Only sliding layers have positions."""
        return {SLIDING: self.rope if self.config.sliding_window is not None else None, FULL: None}

    def windows(self) -> dict[str, int | None]:
        """Only sliding layers have a window."""
        return {SLIDING: self.config.sliding_window, FULL: None}


Config = TinyAyaConfig
Model = TinyAya
#: What the names of tensors contain whose rows are rotary pairs.
ROTARY = (".att.W_query.", ".att.W_key.")


def build(
    config: Mapping[str, Any],
    *,
    pairing: str = "interleaved",
    norm: str = "plain",
    tied: bool | None = None,
    names: Collection[str] | None = None,
    device: torch.device | str | None = None,
) -> TinyAya:
    """A Cohere2 model for a normalised Hugging Face config.

    Args:
        config: See :meth:`TinyAyaConfig.from_hf`.
        pairing: How the stored rows of Q and K pair up; ``interleaved`` in every layout of this family.
        norm: How norm weights are stored; plain in every layout.
        tied: Whether the head is the embedding; unless given, as the config says.
        names: Names (from-scratch) of the tensors that will fill the model; biases among them exist.
        device: Where the parameters are made; ``meta`` to fill them later.

    Raises:
        ConvertError: The config lacks something or is of another architecture.
    """
    biases = any(name.endswith(".att.W_query.bias") for name in names or ())
    return TinyAya(TinyAyaConfig.from_hf(config, pairing=pairing, tied=tied, biases=biases), device=device)
