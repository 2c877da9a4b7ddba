"""The Qwen3-MoE architecture: Qwen3 (:mod:`convert.reference.qwen3`) with experts in place of most feed-forward layers.

The book's class, and every published model, has experts in all layers and normalises the chosen experts'
probabilities; transformers also knows models with some dense layers and without that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from convert.errors import ConvertError, Problem
from convert.reference.experts import MixtureOfExperts
from convert.reference.layers import FeedForward
from convert.reference.qwen3 import ROTARY, Qwen3, Qwen3Config

__all__ = ["ROTARY", "Config", "Model", "build"]

_NEEDED = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


@dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    """The numbers of a Qwen3-MoE, beside those of a Qwen3.

    Attributes:
        n_experts: E.
        top_k: Experts that a token goes through.
        expert_dim: M, rows of an expert's gate and up projections.
        normalise: Whether the chosen experts' probabilities are made to sum to 1.
        dense: Layers without experts.
    """

    n_experts: int = 0
    top_k: int = 0
    expert_dim: int = 0
    normalise: bool = True
    dense: frozenset[int] = frozenset()

    @classmethod
    def more(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """What the experts need.

        Raises:
            ConvertError: Keys are missing.
        """
        missing = [key for key in _NEEDED if config.get(key) is None]
        if missing:
            raise ConvertError(
                Problem("config", f"The config has no {', '.join(missing)}, which the reference model needs.")
            )
        layers, experts = range(config["num_hidden_layers"]), config["num_experts"]
        listed, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
        return {
            "n_experts": experts,
            "top_k": config["num_experts_per_tok"],
            "expert_dim": config["moe_intermediate_size"],
            "normalise": bool(config.get("norm_topk_prob")),
            "dense": frozenset(i for i in layers if not experts or i in listed or (i + 1) % step),
        }


class Qwen3Moe(Qwen3):
    """A Qwen3-MoE that runs weights as stored."""

    @staticmethod
    def feed_forward(config: Qwen3MoeConfig, layer: int, device: Any) -> nn.Module:
        """Experts, or a plain feed-forward part in the dense layers."""
        if layer in config.dense:
            return FeedForward(config.emb_dim, config.hidden_dim, device=device)
        return MixtureOfExperts(
            config.emb_dim,
            config.expert_dim,
            n_experts=config.n_experts,
            top_k=config.top_k,
            normalise=config.normalise,
            device=device,
        )


Config = Qwen3MoeConfig
Model = Qwen3Moe


def build(
    config: Mapping[str, Any],
    *,
    pairing: str = "half",
    norm: str = "plain",
    tied: bool | None = None,
    names: Collection[str] | None = None,
    device: torch.device | str | None = None,
) -> Qwen3Moe:
    """A Qwen3-MoE for a normalised Hugging Face config; see :func:`convert.reference.qwen3.build`."""
    biases = any(name.endswith(".att.W_query.bias") for name in names or ())
    return Qwen3Moe(Qwen3MoeConfig.from_hf(config, pairing=pairing, tied=tied, biases=biases), device=device)
