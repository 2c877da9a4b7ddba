"""A feed-forward layer of many small ones, of which a router picks a few for every token.

Shared by the reference models that have experts; the other building blocks are in :mod:`convert.reference.layers`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convert.reference.layers import widen


class MixtureOfExperts(nn.Module):
    """``sum of p_e * fc3[e](silu(fc1[e](x)) * fc2[e](x))`` over the ``top_k`` likeliest experts of each token.

    Probabilities are a softmax over all experts, in float32 at least.

    Args:
        emb_dim: D.
        hidden_dim: Rows of an expert's gate and up projections.
        n_experts: E.
        top_k: How many experts a token goes through.
        normalise: Whether the probabilities of the chosen ones are made to sum to 1 (``norm_topk_prob``).
        device: Where the parameters lie.
    """

    def __init__(
        self, emb_dim: int, hidden_dim: int, *, n_experts: int, top_k: int, normalise: bool, device: Any = None
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.normalise = normalise

        def each(rows: int, columns: int) -> nn.ModuleList:
            return nn.ModuleList(nn.Linear(columns, rows, bias=False, device=device) for _ in range(n_experts))

        self.gate = nn.Linear(emb_dim, n_experts, bias=False, device=device)
        self.fc1, self.fc2, self.fc3 = each(hidden_dim, emb_dim), each(hidden_dim, emb_dim), each(emb_dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        tokens = x.flatten(0, -2)
        chances, chosen = widen(self.gate(tokens)).softmax(-1).topk(self.top_k, dim=-1)
        if self.normalise:
            chances = chances / chances.sum(-1, keepdim=True)
        chances = chances.to(x.dtype)
        out = torch.zeros_like(tokens)
        for e in chosen.unique().tolist():
            which, place = (chosen == e).nonzero(as_tuple=True)
            some = tokens[which]
            expert = self.fc3[e](F.silu(self.fc1[e](some)) * self.fc2[e](some))
            out.index_add_(0, which, chances[which, place, None] * expert)
        return out.view_as(x)
