"""The building blocks that the reference models share: norms, feed-forward, attention, cache.

The rotary embedding is :mod:`convert.reference.rotary`.

Written to be read next to a paper, in plain PyTorch. Weights are used exactly as a checkpoint stores them:
the two orders of rotary pairs are two ways to *run*, never a permutation of weights. Nothing here is shared
with the code that converts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convert.reference.rotary import PAIRINGS as PAIRINGS
from convert.reference.rotary import RotaryEmbedding as RotaryEmbedding
from convert.reference.rotary import Rotation, apply_rotary, widen
from convert.reference.rotary import inverse_frequencies as inverse_frequencies


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32 at least.

    Args:
        dim: Size of the last axis.
        eps: Added to the mean square.
        zero_centered: The stored weight is the scale minus one.
        name: What the parameter is called; ``scale`` in some of the book's classes.
        device: Where the parameter lies.
    """

    def __init__(
        self, dim: int, eps: float, *, zero_centered: bool = False, name: str = "weight", device: Any = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = zero_centered
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.full((dim,), 0.0 if zero_centered else 1.0, device=device)))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., dim]``."""
        wide = widen(x)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        scale = widen(getattr(self, self.name))
        return (wide * (1.0 + scale if self.zero_centered else scale)).to(x.dtype)


class LayerNorm(nn.Module):
    """Layer norm over the last axis without a bias: the mean is taken out, computed in float32 at least."""

    def __init__(self, dim: int, eps: float, *, device: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., dim]``."""
        wide = widen(x)
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * widen(self.weight)).to(x.dtype)


class FeedForward(nn.Module):
    """Gated feed-forward: ``fc3(act(fc1(x)) * fc2(x))``; fc1 is the gate, fc2 goes up, fc3 comes down."""

    def __init__(
        self,
        emb_dim: int,
        hidden_dim: int,
        *,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] = F.silu,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(emb_dim, hidden_dim, bias=bias, device=device)
        self.fc2 = nn.Linear(emb_dim, hidden_dim, bias=bias, device=device)
        self.fc3 = nn.Linear(hidden_dim, emb_dim, bias=bias, device=device)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., D]``."""
        return self.fc3(self.activation(self.fc1(x)) * self.fc2(x))


class LayerCache:
    """Keys and values of the tokens one layer has seen, ``[B, kv heads, T, head_dim]`` each.

    Attributes:
        length: Tokens seen so far.
        kept: What a layer without keys and values keeps instead, by names of its own.
    """

    def __init__(self) -> None:
        self.length = 0
        self.kept: dict[str, Tensor] = {}
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; returns those of all tokens."""
        stop = self.length + keys.shape[2]
        self._keys = self._room(self._keys, keys, stop)
        self._values = self._room(self._values, values, stop)
        self._keys[:, :, self.length : stop] = keys
        self._values[:, :, self.length : stop] = values
        self.length = stop
        return self._keys[:, :, :stop], self._values[:, :, :stop]

    def _room(self, held: Tensor | None, new: Tensor, stop: int) -> Tensor:
        if held is not None and held.shape[2] >= stop:
            return held
        batch, heads, _, dim = new.shape
        grown = new.new_empty(batch, heads, max(2 * self.length, stop, 64), dim)
        if held is not None:
            grown[:, :, : self.length] = held[:, :, : self.length]
        return grown


class KVCache:
    """One :class:`LayerCache` per layer; :attr:`length` tokens have been seen."""

    def __init__(self, n_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(n_layers)]

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        return self.layers[0].length if self.layers else 0


def causal_mask(start: int, length: int, *, window: int | None = None, device: Any = None) -> Tensor | None:
    """Which of the keys 0 to ``start + length`` each new query may see: bool ``[length, start + length]``.

    None where attention needs no table: a single query that sees everything, or plain causal attention
    from the start (:class:`GroupedQueryAttention` then asks for that itself).

    Args:
        start: Tokens already in the cache.
        length: New tokens.
        window: A query sees itself and the ``window - 1`` tokens before it; None for all.
        device: Where the mask lies.
    """
    stop = start + length
    if (window is None or window >= stop) and (start == 0 or length == 1):
        return None
    queries = torch.arange(start, stop, device=device)[:, None]
    keys = torch.arange(stop, device=device)[None, :]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


class GroupedQueryAttention(nn.Module):
    """Causal attention in which ``n_heads / n_kv_groups`` query heads share one key and value head.

    Args:
        emb_dim: D.
        n_heads: Query heads.
        n_kv_groups: Key and value heads; divides ``n_heads``.
        head_dim: Size of a head; ``n_heads * head_dim`` need not be D.
        biases: Which projections have a bias, of ``q``, ``k``, ``v``, ``o``.
        q_norm, k_norm: Applied before the rotation, where a family has them.
        joint_norm: They normalise all heads at once, not each.
        scale: Of the scores; ``head_dim ** -0.5`` unless given.
        device: Where the parameters lie.
    """

    def __init__(
        self,
        emb_dim: int,
        *,
        n_heads: int,
        n_kv_groups: int,
        head_dim: int,
        biases: frozenset[str] = frozenset(),
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        joint_norm: bool = False,
        scale: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.group_size = n_heads // n_kv_groups
        self.scale = scale
        self.W_query = nn.Linear(emb_dim, n_heads * head_dim, bias="q" in biases, device=device)
        self.W_key = nn.Linear(emb_dim, n_kv_groups * head_dim, bias="k" in biases, device=device)
        self.W_value = nn.Linear(emb_dim, n_kv_groups * head_dim, bias="v" in biases, device=device)
        self.out_proj = nn.Linear(n_heads * head_dim, emb_dim, bias="o" in biases, device=device)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.joint_norm = joint_norm

    def forward(
        self, x: Tensor, *, rotation: Rotation | None, mask: Tensor | None, cache: LayerCache | None = None
    ) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``; ``mask`` as :func:`causal_mask` makes it."""
        q, k, v = (
            self._heads(self.W_query(x), self.q_norm),
            self._heads(self.W_key(x), self.k_norm),
            self._heads(self.W_value(x)),
        )
        if rotation is not None:
            q, k = apply_rotary(q, rotation), apply_rotary(k, rotation)
        if cache is not None:
            k, v = cache.append(k, v)
        k = k.repeat_interleave(self.group_size, dim=1)
        v = v.repeat_interleave(self.group_size, dim=1)
        causal = mask is None and q.shape[2] > 1
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """``[B, T, heads * head_dim]`` to ``[B, heads, T, head_dim]``, normalised if there is a norm."""
        if norm is not None and self.joint_norm:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return x if norm is None or self.joint_norm else norm(x)
