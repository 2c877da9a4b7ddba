"""The Qwen3 architecture, readable from top to bottom, with the module names of the from-scratch book.

A Llama whose queries and keys pass through a norm per head before they are turned, with a head size of its own. The
book calls the parameters of its norms ``scale``. It knows neither files nor layouts:
:mod:`convert.reference.loading` fills it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from convert.reference import Control
from convert.reference.decoder import FULL, ROTARY_CONTROL, SLIDING, Context, Decoder, check_config
from convert.reference.layers import FeedForward, GroupedQueryAttention, LayerCache, RMSNorm, RotaryEmbedding

_NEEDED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "rope_parameters",
)


@dataclass(frozen=True)
class Qwen3Config:
    """The numbers of a Qwen3.

    Attributes:
        vocab_size: V, rows of the embedding.
        emb_dim: D.
        hidden_dim: F, rows of the gate and up projections.
        n_layers: L.
        n_heads: Query heads.
        n_kv_groups: Key and value heads.
        head_dim: Size of a head; ``n_heads * head_dim`` is not D in general.
        layer_types: Per layer ``full_attention`` or, in no published model, ``sliding_attention``.
        sliding_window: How many tokens a query of a sliding layer sees, itself included; None for all.
        norm_eps: Epsilon of every norm.
        rope: RoPE settings.
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
    norm_eps: float
    rope: Mapping[str, Any]
    biases: bool = False
    tied: bool = False
    pairing: str = "half"

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, pairing: str = "half", tied: bool | None = None, biases: bool = False
    ) -> Self:
        """Read a normalised Hugging Face config.

        Args:
            config: With ``rope_parameters`` as transformers 5 writes it, and a window only where it is used.
            pairing: How the weights that will be loaded are stored; no config says it.
            tied: Whether the head is the embedding; unless given, as ``tie_word_embeddings`` says.
            biases: Whether there are biases although the config does not say so.

        Raises:
            ConvertError: Keys are missing, or the model is not of this architecture; all findings at once.
        """
        kv_heads, head_dim = check_config(config, _NEEDED)
        window = config.get("sliding_window")
        everywhere = [SLIDING if window else FULL] * config["num_hidden_layers"]
        return cls(
            vocab_size=config["vocab_size"],
            emb_dim=config["hidden_size"],
            hidden_dim=config["intermediate_size"],
            n_layers=config["num_hidden_layers"],
            n_heads=config["num_attention_heads"],
            n_kv_groups=kv_heads,
            head_dim=head_dim,
            layer_types=tuple(config.get("layer_types") or everywhere),
            sliding_window=window,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=config["rope_parameters"],
            biases=biases or bool(config.get("attention_bias")),
            tied=bool(config.get("tie_word_embeddings")) if tied is None else tied,
            pairing=pairing,
            **cls.more(config),
        )

    @classmethod
    def more(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """What a model on top of this one reads besides."""
        return {}


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each on a normed input and added to its input."""

    def __init__(self, config: Qwen3Config, layer: int, feed_forward: nn.Module, *, device: Any = None) -> None:
        super().__init__()

        def norm(dim: int) -> RMSNorm:
            return RMSNorm(dim, config.norm_eps, name="scale", device=device)

        self.kind = config.layer_types[layer]
        self.att = GroupedQueryAttention(
            config.emb_dim,
            n_heads=config.n_heads,
            n_kv_groups=config.n_kv_groups,
            head_dim=config.head_dim,
            biases=frozenset("qkvo") if config.biases else frozenset(),
            q_norm=norm(config.head_dim),
            k_norm=norm(config.head_dim),
            device=device,
        )
        self.ff = feed_forward
        self.norm1 = norm(config.emb_dim)
        self.norm2 = norm(config.emb_dim)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        here = context[self.kind]
        x = x + self.att(self.norm1(x), rotation=here.rotation, mask=here.mask, cache=cache)
        return x + self.ff(self.norm2(x))


class Qwen3(Decoder):
    """A Qwen3 that runs weights as stored.

    Args:
        config: The numbers.
        device: Where the parameters are made (``meta`` for a model that is filled later).
    """

    controls: ClassVar[tuple[Control, ...]] = (ROTARY_CONTROL,)

    def __init__(self, config: Qwen3Config, *, device: Any = None) -> None:
        super().__init__()
        self.config = config
        self.n_layers = config.n_layers
        self.vocab_size = config.vocab_size
        self.tok_emb = nn.Embedding(config.vocab_size, config.emb_dim, device=device)
        self.trf_blocks = nn.ModuleList(
            TransformerBlock(config, layer, self.feed_forward(config, layer, device), device=device)
            for layer in range(config.n_layers)
        )
        self.final_norm = RMSNorm(config.emb_dim, config.norm_eps, name="scale", device=device)
        self.out_head = nn.Linear(config.emb_dim, config.vocab_size, bias=False, device=device)
        if config.tied:
            self.out_head.weight = self.tok_emb.weight
        self.rope = RotaryEmbedding(
            config.head_dim, float(config.rope["rope_theta"]), scaling=config.rope, pairing=config.pairing
        )

    @staticmethod
    def feed_forward(config: Any, layer: int, device: Any) -> nn.Module:
        """The feed-forward part of a layer."""
        return FeedForward(config.emb_dim, config.hidden_dim, device=device)

    def stack(self) -> nn.ModuleList:
        """See :class:`Decoder`."""
        return self.trf_blocks

    def rotations(self) -> dict[str, RotaryEmbedding | None]:
        """See :class:`Decoder`."""
        return dict.fromkeys(self.config.layer_types, self.rope)

    def windows(self) -> dict[str, int | None]:
        """See :class:`Decoder`."""
        return {SLIDING: self.config.sliding_window, FULL: None}


Config = Qwen3Config
Model = Qwen3
#: What the names of tensors contain whose rows are rotary pairs.
ROTARY = (".att.W_query.", ".att.W_key.", ".att.q_norm.", ".att.k_norm.")


def build(
    config: Mapping[str, Any],
    *,
    pairing: str = "half",
    norm: str = "plain",
    tied: bool | None = None,
    names: Collection[str] | None = None,
    device: torch.device | str | None = None,
) -> Qwen3:
    """A Qwen3 for a normalised Hugging Face config.

    Args:
        config: See :meth:`Qwen3Config.from_hf`.
        pairing: How the stored rows of Q and K pair up.
        norm: How norm weights are stored; a Qwen3's are plain in every layout.
        tied: Whether the head is the embedding; unless given, as the config says.
        names: Names (from-scratch) of the tensors that will fill the model; biases among them exist whatever the
            config says.
        device: Where the parameters are made; ``meta`` to fill them later.

    Raises:
        ConvertError: The config lacks something or is of another architecture.
    """
    biases = any(name.endswith(".att.W_query.bias") for name in names or ())
    return Qwen3(Qwen3Config.from_hf(config, pairing=pairing, tied=tied, biases=biases), device=device)
