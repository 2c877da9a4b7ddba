"""The Olmo 3 architecture, readable from top to bottom, with the module names of the from-scratch book.

Norms stand behind attention and feed-forward, before what they give is added; Q and K are normalised over all heads
at once. Three sliding layers, then a full one. YaRN stretches the full layers only, as transformers does it: the
book's notebooks turn all layers by it, so that their logits differ from the released model's as soon as there are
sliding layers. It knows neither files nor layouts: :mod:`convert.reference.loading` fills it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from convert.reference import Control
from convert.reference.decoder import FULL, ROTARY_CONTROL, SLIDING, Context, Decoder, check_config
from convert.reference.layers import FeedForward, GroupedQueryAttention, LayerCache, RMSNorm, RotaryEmbedding

_NEEDED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("layer_types", "rope_parameters"),
)


@dataclass(frozen=True)
class Olmo3Config:
    """The numbers of an Olmo 3.

    Attributes:
        vocab_size: V, rows of the embedding.
        emb_dim: D.
        hidden_dim: F, rows of the gate and up projections.
        n_layers: L.
        n_heads: Query heads.
        n_kv_groups: Key and value heads.
        head_dim: Size of a head.
        layer_types: Per layer ``sliding_attention`` or ``full_attention``.
        sliding_window: How many tokens a query of a sliding layer sees, itself included; None for all.
        norm_eps: Epsilon of every norm.
        rope: RoPE settings by kind of layer.
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
    rope: Mapping[str, Mapping[str, Any]]
    biases: bool = False
    tied: bool = False
    pairing: str = "half"

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, pairing: str = "half", tied: bool | None = None, biases: bool = False
    ) -> Olmo3Config:
        """Read a normalised Hugging Face config, with ``rope_parameters`` nested by kind of layer.

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
            norm_eps=config.get("rms_norm_eps", 1e-5),
            rope=config["rope_parameters"],
            biases=biases or bool(config.get("attention_bias")),
            tied=bool(config.get("tie_word_embeddings")) if tied is None else tied,
            pairing=pairing,
        )


class PostNormBlock(nn.Module):
    """Attention, then feed-forward; what each gives is normalised and added to its input."""

    def __init__(self, config: Olmo3Config, kind: str, *, device: Any = None) -> None:
        super().__init__()
        self.kind = kind
        self.att = GroupedQueryAttention(
            config.emb_dim,
            n_heads=config.n_heads,
            n_kv_groups=config.n_kv_groups,
            head_dim=config.head_dim,
            biases=frozenset("qkvo") if config.biases else frozenset(),
            q_norm=RMSNorm(config.n_heads * config.head_dim, config.norm_eps, device=device),
            k_norm=RMSNorm(config.n_kv_groups * config.head_dim, config.norm_eps, device=device),
            joint_norm=True,
            device=device,
        )
        self.ff = FeedForward(config.emb_dim, config.hidden_dim, device=device)
        self.post_attention_layernorm = RMSNorm(config.emb_dim, config.norm_eps, device=device)
        self.post_feedforward_layernorm = RMSNorm(config.emb_dim, config.norm_eps, device=device)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        here = context[self.kind]
        attended = self.att(x, rotation=here.rotation, mask=here.mask, cache=cache)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.ff(x))


class Olmo3(Decoder):
    """An Olmo 3 that runs weights as stored.

    Args:
        config: The numbers.
        device: Where the parameters are made (``meta`` for a model that is filled later).
    """

    controls: ClassVar[tuple[Control, ...]] = (ROTARY_CONTROL,)

    def __init__(self, config: Olmo3Config, *, device: Any = None) -> None:
        super().__init__()
        self.config = config
        self.n_layers = config.n_layers
        self.vocab_size = config.vocab_size
        self.tok_emb = nn.Embedding(config.vocab_size, config.emb_dim, device=device)
        self.blocks = nn.ModuleList(PostNormBlock(config, kind, device=device) for kind in config.layer_types)
        self.final_norm = RMSNorm(config.emb_dim, config.norm_eps, device=device)
        self.out_head = nn.Linear(config.emb_dim, config.vocab_size, bias=False, device=device)
        if config.tied:
            self.out_head.weight = self.tok_emb.weight
        self.ropes = nn.ModuleDict({kind: self._rope(config.rope[kind]) for kind in (SLIDING, FULL)})

    def _rope(self, settings: Mapping[str, Any]) -> RotaryEmbedding:
        config = self.config
        return RotaryEmbedding(config.head_dim, settings["rope_theta"], scaling=settings, pairing=config.pairing)

    def stack(self) -> nn.ModuleList:
        """See :class:`Decoder`."""
        return self.blocks

    def rotations(self) -> dict[str, RotaryEmbedding | None]:
        """Each kind of layer has settings of its own."""
        return dict(self.ropes.items())  # type: ignore[arg-type]

    def windows(self) -> dict[str, int | None]:
        """Only sliding layers have a window."""
        return {SLIDING: self.config.sliding_window, FULL: None}


Config = Olmo3Config
Model = Olmo3
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
) -> Olmo3:
    """An Olmo 3 for a normalised Hugging Face config.

    Args:
        config: See :meth:`Olmo3Config.from_hf`.
        pairing: How the stored rows of Q and K (and of their norms) pair up.
        norm: How norm weights are stored; plain in every layout.
        tied: Whether the head is the embedding; unless given, as the config says.
        names: Names (from-scratch) of the tensors that will fill the model; biases among them exist.
        device: Where the parameters are made; ``meta`` to fill them later.

    Raises:
        ConvertError: The config lacks something or is of another architecture.
    """
    biases = any(name.endswith(".att.W_query.bias") for name in names or ())
    return Olmo3(Olmo3Config.from_hf(config, pairing=pairing, tied=tied, biases=biases), device=device)
