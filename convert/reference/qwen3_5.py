"""The Qwen3.5 architecture (dense, text), readable from top to bottom, with the module names of the from-scratch book.

Three of four layers are linear attention by the gated delta rule (:mod:`convert.reference.delta`), the fourth is full
attention whose output passes through a gate; the query's projection yields both, head by head. A norm's weight is the
scale minus one, but inside the linear layers it is the scale. Only a part of each head turns. It knows neither files
nor layouts: :mod:`convert.reference.loading` fills it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convert.errors import ConvertError, Problem
from convert.reference import Control
from convert.reference.decoder import FULL, ROTARY_CONTROL, Context, Decoder, check_config
from convert.reference.delta import GatedDeltaNet
from convert.reference.layers import FeedForward, LayerCache, RMSNorm, RotaryEmbedding, Rotation
from convert.reference.rotary import apply_rotary

#: The other kind of layers, as transformers spells it.
LINEAR = "linear_attention"

_NEEDED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "layer_types"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "partial_rotary_factor", "rope_parameters"),
)


@dataclass(frozen=True)
class Qwen35Config:
    """The numbers of a Qwen3.5.

    Attributes:
        vocab_size: V, rows of the embedding.
        emb_dim: D.
        hidden_dim: F, rows of the gate and up projections.
        n_heads: Query heads of a full layer.
        n_kv_groups: Its key and value heads.
        head_dim: Size of its heads.
        rotary_dim: How many leading dimensions of a head turn.
        n_key_heads: Query and key heads of a linear layer.
        n_value_heads: Its value heads.
        key_dim: Size of its query and key heads.
        value_dim: Size of its value heads.
        taps: Tokens that its convolution sees.
        layer_types: Per layer ``linear_attention`` or ``full_attention``.
        norm_eps: Epsilon of every norm.
        rope: RoPE settings.
        biases: Whether the full layers' projections have biases.
        tied: The head is the embedding.
        pairing: How the stored rows of Q and K pair up.
        zero_centered: Norm weights are stored as the scale minus one.
    """

    vocab_size: int
    emb_dim: int
    hidden_dim: int
    n_heads: int
    n_kv_groups: int
    head_dim: int
    rotary_dim: int
    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    layer_types: tuple[str, ...]
    norm_eps: float
    rope: Mapping[str, Any]
    biases: bool = False
    tied: bool = False
    pairing: str = "half"
    zero_centered: bool = True

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        *,
        pairing: str = "half",
        norm: str = "zero_centered",
        tied: bool | None = None,
        biases: bool = False,
    ) -> Self:
        """Read a normalised Hugging Face config.

        Args:
            config: With ``layer_types`` and ``rope_parameters`` as transformers 5 writes them, and
                ``partial_rotary_factor`` beside them.
            pairing: How the weights that will be loaded are stored; no config says it.
            norm: How norm weights are stored; no config says it.
            tied: Whether the head is the embedding; unless given, as ``tie_word_embeddings`` says.
            biases: Whether there are biases although the config does not say so.

        Raises:
            ConvertError: Keys are missing, or the model is not of this architecture; all findings at once.
        """
        kv_heads, head_dim = check_config(config, _NEEDED, kinds=(LINEAR, FULL))
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        if keys < 1 or values % keys:
            raise ConvertError(
                Problem("config", f"{values} value heads cannot share {keys} key heads of a linear layer equally.")
            )
        return cls(
            vocab_size=config["vocab_size"],
            emb_dim=config["hidden_size"],
            hidden_dim=config["intermediate_size"],
            n_heads=config["num_attention_heads"],
            n_kv_groups=kv_heads,
            head_dim=head_dim,
            rotary_dim=int(head_dim * config["partial_rotary_factor"]),
            n_key_heads=keys,
            n_value_heads=values,
            key_dim=config["linear_key_head_dim"],
            value_dim=config["linear_value_head_dim"],
            taps=config["linear_conv_kernel_dim"],
            layer_types=tuple(config["layer_types"]),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=config["rope_parameters"],
            biases=biases or bool(config.get("attention_bias")),
            tied=bool(config.get("tie_word_embeddings")) if tied is None else tied,
            pairing=pairing,
            zero_centered=norm == "zero_centered",
        )

    def norm(self, dim: int, device: Any) -> RMSNorm:
        """A norm over ``dim`` values, its weight as stored."""
        return RMSNorm(dim, self.norm_eps, zero_centered=self.zero_centered, device=device)


class GatedAttention(nn.Module):
    """Causal grouped-query attention, normed per head, whose output a gate from the query's projection scales."""

    def __init__(self, config: Qwen35Config, *, device: Any = None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.group_size = config.n_heads // config.n_kv_groups
        queries, keys = config.n_heads * config.head_dim, config.n_kv_groups * config.head_dim

        def linear(inner: int, outer: int) -> nn.Linear:
            return nn.Linear(inner, outer, bias=config.biases, device=device)

        self.W_query = linear(config.emb_dim, 2 * queries)
        self.W_key = linear(config.emb_dim, keys)
        self.W_value = linear(config.emb_dim, keys)
        self.out_proj = linear(queries, config.emb_dim)
        self.q_norm = config.norm(config.head_dim, device)
        self.k_norm = config.norm(config.head_dim, device)

    def forward(self, x: Tensor, *, rotation: Rotation, mask: Tensor | None, cache: LayerCache | None = None) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``; ``mask`` as :func:`~convert.reference.layers.causal_mask` makes it."""
        q, gate = self.W_query(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.W_key, self.W_value))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        q, k = apply_rotary(q, rotation), apply_rotary(k, rotation)
        if cache is not None:
            k, v = cache.append(k, v)
        k, v = (t.repeat_interleave(self.group_size, dim=1) for t in (k, v))
        causal = mask is None and q.shape[2] > 1
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.out_proj((y.transpose(1, 2) * gate.sigmoid()).flatten(2))


class TransformerBlock(nn.Module):
    """Attention of either kind, then feed-forward, each on a normed input and added to its input."""

    def __init__(self, config: Qwen35Config, kind: str, *, device: Any = None) -> None:
        super().__init__()
        self.kind = kind
        if kind == FULL:
            self.token_mixer: nn.Module = GatedAttention(config, device=device)
        else:
            self.token_mixer = GatedDeltaNet(
                config.emb_dim,
                n_key_heads=config.n_key_heads,
                n_value_heads=config.n_value_heads,
                key_dim=config.key_dim,
                value_dim=config.value_dim,
                taps=config.taps,
                eps=config.norm_eps,
                device=device,
            )
        self.ff = FeedForward(config.emb_dim, config.hidden_dim, device=device)
        self.norm1 = config.norm(config.emb_dim, device)
        self.norm2 = config.norm(config.emb_dim, device)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        normed, here = self.norm1(x), context[self.kind]
        if self.kind == FULL:
            x = x + self.token_mixer(normed, rotation=here.rotation, mask=here.mask, cache=cache)
        else:
            x = x + self.token_mixer(normed, cache=cache)
        return x + self.ff(self.norm2(x))


class Qwen35(Decoder):
    """A Qwen3.5 that runs weights as stored.

    Args:
        config: The numbers.
        device: Where the parameters are made (``meta`` for a model that is filled later).
    """

    controls: ClassVar[tuple[Control, ...]] = (ROTARY_CONTROL,)

    def __init__(self, config: Qwen35Config, *, device: Any = None) -> None:
        super().__init__()
        self.config = config
        self.n_layers = len(config.layer_types)
        self.vocab_size = config.vocab_size
        self.tok_emb = nn.Embedding(config.vocab_size, config.emb_dim, device=device)
        self.trf_blocks = nn.ModuleList(TransformerBlock(config, kind, device=device) for kind in config.layer_types)
        self.final_norm = config.norm(config.emb_dim, device)
        self.out_head = nn.Linear(config.emb_dim, config.vocab_size, bias=False, device=device)
        if config.tied:
            self.out_head.weight = self.tok_emb.weight
        self.rope = RotaryEmbedding(
            config.rotary_dim, float(config.rope["rope_theta"]), scaling=config.rope, pairing=config.pairing
        )

    def stack(self) -> nn.ModuleList:
        """See :class:`Decoder`."""
        return self.trf_blocks

    def rotations(self) -> dict[str, RotaryEmbedding | None]:
        """See :class:`Decoder`."""
        return {FULL: self.rope, LINEAR: None}

    def windows(self) -> dict[str, int | None]:
        """See :class:`Decoder`."""
        return {FULL: None, LINEAR: None}


Config = Qwen35Config
Model = Qwen35
#: What the names of tensors contain whose rows are rotary pairs.
ROTARY = tuple(f".token_mixer.{part}." for part in ("W_query", "W_key", "q_norm", "k_norm"))


def build(
    config: Mapping[str, Any],
    *,
    pairing: str = "half",
    norm: str = "zero_centered",
    tied: bool | None = None,
    names: Collection[str] | None = None,
    device: torch.device | str | None = None,
) -> Qwen35:
    """A Qwen3.5 for a normalised Hugging Face config.

    Args:
        config: See :meth:`Qwen35Config.from_hf`.
        pairing: How the stored rows of Q and K pair up.
        norm: How norm weights are stored: ``zero_centered``, or ``plain`` as in GGUF.
        tied: Whether the head is the embedding; unless given, as the config says.
        names: Names (from-scratch) of the tensors that will fill the model; biases among them exist whatever the
            config says.
        device: Where the parameters are made; ``meta`` to fill them later.

    Raises:
        ConvertError: The config lacks something or is of another architecture.
    """
    biases = any(name.endswith(".token_mixer.W_query.bias") for name in names or ())
    numbers = Qwen35Config.from_hf(config, pairing=pairing, norm=norm, tied=tied, biases=biases)
    return Qwen35(numbers, device=device)
