"""The Llama architecture, readable from top to bottom, with the module names of the from-scratch book.

Covers Llama 2, 3, 3.1, 3.2, 3.3 and models of that architecture (grouped-query attention, SwiGLU, RMSNorm,
rotary embedding with linear or llama3 scaling, optional biases, tied or separate head, an explicit head
size, a sliding window). It knows neither files nor layouts: :mod:`convert.reference.loading` fills it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from convert.errors import ConvertError, Problem
from convert.reference import Control
from convert.reference.layers import (
    PAIRINGS,
    FeedForward,
    GroupedQueryAttention,
    KVCache,
    LayerCache,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    causal_mask,
)

#: Where each optional bias lives in a block, by the letter used in :attr:`LlamaConfig.biases`.
_BIAS_NAMES = {
    "q": "att.W_query.bias",
    "k": "att.W_key.bias",
    "v": "att.W_value.bias",
    "o": "att.out_proj.bias",
    "mlp": "ff.fc1.bias",
}


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers of a Llama.

    Attributes:
        vocab_size: V, rows of the embedding.
        emb_dim: D.
        hidden_dim: F, rows of the gate and up projections.
        n_layers: L.
        n_heads: Query heads.
        n_kv_groups: Key and value heads.
        head_dim: Size of a head.
        norm_eps: Epsilon of every RMSNorm.
        rope_base: RoPE theta.
        rope_scaling: None, or ``rope_type`` (``linear``, ``llama3``) and its numbers.
        context_length: Positions the model was trained for (nothing here depends on it).
        biases: Which of ``q``, ``k``, ``v``, ``o``, ``mlp`` have biases.
        tied: The head is the embedding.
        rope_pairing: How the stored rows of Q and K pair up: ``half`` or ``interleaved``.
        sliding_window: How many tokens a query sees, itself included; None for all.
    """

    vocab_size: int
    emb_dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_groups: int
    head_dim: int
    norm_eps: float = 1e-5
    rope_base: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    context_length: int = 2048
    biases: frozenset[str] = frozenset()
    tied: bool = False
    rope_pairing: str = "half"
    sliding_window: int | None = None

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        *,
        rope_pairing: str = "half",
        biases: Collection[str] | None = None,
        tied: bool | None = None,
    ) -> LlamaConfig:
        """Read a normalised Hugging Face config.

        Args:
            config: With ``rope_parameters`` as transformers 5 writes it.
            rope_pairing: How the weights that will be loaded are stored; no config says it.
            biases: Which biases there are; unless given, as ``attention_bias`` and ``mlp_bias`` say.
            tied: Whether the head is the embedding; unless given, as ``tie_word_embeddings`` says.

        Raises:
            ConvertError: Keys are missing, or the model is not of this architecture; all findings at once.
        """
        problems = [
            Problem("config", f"The config has no {key!r}, which the reference model needs.", wanted=key)
            for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
            if config.get(key) is None
        ]
        rope = dict(config.get("rope_parameters") or {})
        if rope.get("rope_theta") is None:
            problems.append(Problem("config", "The config has no rope_parameters.rope_theta.", found=rope))
        act = config.get("hidden_act") or "silu"
        if act not in ("silu", "swish"):
            problems.append(Problem("config", f"This architecture uses SiLU, not {act!r}.", found=act, wanted="silu"))
        if problems:
            raise ConvertError(problems)
        heads, dim = config["num_attention_heads"], config["hidden_size"]
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ConvertError(
                Problem("config", f"{heads} query heads cannot share {kv_heads} key and value heads equally.")
            )
        if biases is None:
            biases = [*("qkvo" if config.get("attention_bias") else ""), *(["mlp"] if config.get("mlp_bias") else [])]
        if tied is None:
            tied = bool(config.get("tie_word_embeddings"))
        return cls(
            vocab_size=config["vocab_size"],
            emb_dim=dim,
            hidden_dim=config["intermediate_size"],
            n_layers=config["num_hidden_layers"],
            n_heads=heads,
            n_kv_groups=kv_heads,
            head_dim=config.get("head_dim") or dim // heads,
            norm_eps=config.get("rms_norm_eps", 1e-6),  # the default of transformers' LlamaConfig
            rope_base=float(rope["rope_theta"]),
            rope_scaling=rope if rope.get("rope_type", "default") != "default" else None,
            context_length=config.get("max_position_embeddings") or 2048,
            biases=frozenset(biases),
            tied=tied,
            rope_pairing=rope_pairing,
            sliding_window=config.get("sliding_window"),
        )


@dataclass(frozen=True, slots=True)
class Context:
    """What every layer needs to know about the positions being processed."""

    rotation: Rotation
    mask: Tensor | None


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each on a normed input and added to its input."""

    def __init__(self, config: LlamaConfig, *, device: Any = None) -> None:
        super().__init__()
        self.att = GroupedQueryAttention(
            config.emb_dim,
            n_heads=config.n_heads,
            n_kv_groups=config.n_kv_groups,
            head_dim=config.head_dim,
            biases=config.biases,
            device=device,
        )
        self.ff = FeedForward(config.emb_dim, config.hidden_dim, bias="mlp" in config.biases, device=device)
        self.norm1 = RMSNorm(config.emb_dim, config.norm_eps, device=device)
        self.norm2 = RMSNorm(config.emb_dim, config.norm_eps, device=device)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        x = x + self.att(self.norm1(x), rotation=context.rotation, mask=context.mask, cache=cache)
        return x + self.ff(self.norm2(x))


@contextmanager
def _flip_rotary(model: Llama) -> Iterator[None]:
    """Run with the other order of rotary pairs: what Q and K look like when they were not permuted."""
    kept = model.rope.pairing
    model.rope.pairing = PAIRINGS[1 - PAIRINGS.index(kept)]
    try:
        yield
    finally:
        model.rope.pairing = kept


class Llama(nn.Module):
    """A Llama that runs weights as stored, in either order of rotary pairs.

    Args:
        config: The numbers.
        device: Where the parameters are made (``meta`` for a model that is filled later). The rotary tables
            are always real.
    """

    controls: ClassVar[tuple[Control, ...]] = (
        Control("rotary", "the rows of Q and K in the other rotary order", _flip_rotary),
    )

    def __init__(self, config: LlamaConfig, *, device: Any = None) -> None:
        super().__init__()
        self.config = config
        self.n_layers = config.n_layers
        self.vocab_size = config.vocab_size
        self.tok_emb = nn.Embedding(config.vocab_size, config.emb_dim, device=device)
        self.trf_blocks = nn.ModuleList(TransformerBlock(config, device=device) for _ in range(config.n_layers))
        self.final_norm = RMSNorm(config.emb_dim, config.norm_eps, device=device)
        self.out_head = nn.Linear(config.emb_dim, config.vocab_size, bias=False, device=device)
        if config.tied:
            self.out_head.weight = self.tok_emb.weight
        self.rope = RotaryEmbedding(
            config.head_dim, config.rope_base, scaling=config.rope_scaling, pairing=config.rope_pairing
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids ``[B, T]`` to hidden states ``[B, T, D]``."""
        return self.tok_emb(ids)

    def context(self, length: int, start: int = 0) -> Context:
        """Rotation and mask of positions ``start`` to ``start + length``, shared by all layers."""
        rotation = self.rope(start, length, dtype=self.tok_emb.weight.dtype)
        mask = causal_mask(start, length, window=self.config.sliding_window, device=self.rope.cos.device)
        return Context(rotation, mask)

    def block(self, layer: int) -> nn.Module:
        """Layer ``layer``."""
        return self.trf_blocks[layer]

    def head(self, x: Tensor) -> Tensor:
        """Hidden states ``[B, T, D]`` to logits ``[B, T, V]``."""
        return self.out_head(self.final_norm(x))

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """Token ids ``[B, T]`` to logits ``[B, T, V]``; with a cache, the ids continue what it has seen."""
        x = self.embed(ids)
        context = self.context(ids.shape[1], start=cache.length if cache is not None else 0)
        for layer in range(self.n_layers):
            x = self.block(layer)(x, context, cache.layers[layer] if cache is not None else None)
        return self.head(x)


Config = LlamaConfig
Model = Llama
#: What the names of tensors contain whose rows are rotary pairs.
ROTARY = (".att.W_query.", ".att.W_key.")


def build(
    config: Mapping[str, Any],
    *,
    pairing: str = "half",
    norm: str = "plain",
    tied: bool | None = None,
    names: Collection[str] | None = None,
    device: torch.device | str | None = None,
    model: type[Llama] = Llama,
) -> Llama:
    """A Llama for a normalised Hugging Face config.

    Args:
        config: See :meth:`LlamaConfig.from_hf`.
        pairing: How the stored rows of Q and K pair up.
        norm: How norm weights are stored; a Llama's are plain in every layout.
        tied: Whether the head is the embedding; unless given, as the config says.
        names: Names (from-scratch) of the tensors that will fill the model. Biases among them exist whatever the
            config says (most layouts have no key for them); those the config promises exist in any case, so
            that their absence is noticed.
        device: Where the parameters are made; ``meta`` to fill them later.
        model: A class derived from it, for a model that is a Llama with something more.

    Raises:
        ConvertError: The config lacks something or is of another architecture.
    """
    plain = LlamaConfig.from_hf(config)
    held = {letter for letter, ending in _BIAS_NAMES.items() for name in names or () if name.endswith("." + ending)}
    return model(
        LlamaConfig.from_hf(config, rope_pairing=pairing, biases=plain.biases | held, tied=tied), device=device
    )
