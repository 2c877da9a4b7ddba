"""Linear attention by the gated delta rule (Yang et al., 2024, "Gated Delta Networks"), in plain PyTorch.

A layer keeps one matrix per head instead of all keys and values. Each token lets it decay, asks what it holds for the
token's key, and writes the part of the token's value that was not there yet. Computed in chunks, within which a
triangular system takes the place of the loop over tokens. Weights are used exactly as a checkpoint stores them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convert.reference.layers import LayerCache, RMSNorm
from convert.reference.rotary import widen

#: Tokens that are computed at once.
CHUNK = 64


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Vectors of length one along the last axis; ``eps`` is added to the squared length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, rate: Tensor, state: Tensor | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """What each token reads from the memory, and the memory after the last.

    With ``S`` the memory of a head, token ``t`` does ``S = exp(log_decay) S``, then ``S += k (rate (v - S'k))'``, and
    reads ``S'q``. Within a chunk the written values ``U`` solve ``(I + A) U = rate (V - decayed K S)``, where ``A`` is
    strictly lower triangular: what a token reads of those before it.

    Args:
        q: ``[B, heads, T, dk]``.
        k: The same.
        v: ``[B, heads, T, dv]``.
        log_decay: ``[B, heads, T]``, at most 0.
        rate: ``[B, heads, T]``, 0 to 1.
        state: The memory before the first token, ``[B, heads, dk, dv]``; empty unless given.
        chunk: Tokens per chunk; no result depends on it.
    """
    state = v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state
    out = []
    for start in range(0, q.shape[2], chunk):
        here = slice(start, start + chunk)
        qs, ks, vs = q[:, :, here], k[:, :, here], v[:, :, here]
        beta = rate[:, :, here, None]
        total = log_decay[:, :, here].cumsum(-1)[..., None]  # since the chunk's beginning
        between = (total - total.mT).tril().exp().tril()  # from token s to token t, 0 for the future
        reads = (beta * (ks @ ks.mT) * between).tril(-1)
        wanted = beta * (vs - total.exp() * (ks @ state))
        written = torch.linalg.solve_triangular(reads, wanted, upper=False, unitriangular=True)
        out.append(total.exp() * (qs @ state) + ((qs @ ks.mT) * between) @ written)
        last = total[:, :, -1:]
        state = last.exp() * state + ((last - total).exp() * ks).mT @ written
    return torch.cat(out, 2), state


class GatedDeltaNet(nn.Module):
    """A layer of linear attention: convolution over a few tokens, delta rule, gated norm.

    Args:
        emb_dim: D.
        n_key_heads: Heads of queries and keys.
        n_value_heads: Heads of values; those ``n_value_heads / n_key_heads`` that stand together share a key head.
        key_dim, value_dim: Sizes of the heads.
        taps: Tokens that the convolution sees, the present one included.
        eps: Of the norm.
        device: Where the parameters lie.
    """

    def __init__(
        self,
        emb_dim: int,
        *,
        n_key_heads: int,
        n_value_heads: int,
        key_dim: int,
        value_dim: int,
        taps: int,
        eps: float,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.key_dim, self.value_dim = key_dim, value_dim
        self.repeats = n_value_heads // n_key_heads
        keys, values = n_key_heads * key_dim, n_value_heads * value_dim
        self.parts = (keys, keys, values)

        def linear(inner: int, outer: int) -> nn.Linear:
            return nn.Linear(inner, outer, bias=False, device=device)

        self.in_proj_qkv = linear(emb_dim, 2 * keys + values)
        self.in_proj_z = linear(emb_dim, values)
        self.in_proj_b = linear(emb_dim, n_value_heads)
        self.in_proj_a = linear(emb_dim, n_value_heads)
        channels = 2 * keys + values
        self.conv1d = nn.Conv1d(channels, channels, taps, groups=channels, bias=False, device=device)
        self.A_log = nn.Parameter(torch.zeros(n_value_heads, device=device))
        self.dt_bias = nn.Parameter(torch.ones(n_value_heads, device=device))
        self.norm = RMSNorm(value_dim, eps, device=device)  # its weight is the scale in every layout
        self.out_proj = linear(values, emb_dim)

    def forward(self, x: Tensor, *, cache: LayerCache | None = None) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        mixed = F.silu(self._convolve(self.in_proj_qkv(x), cache))
        q, k, v = mixed.split(self.parts, dim=-1)
        q, k = unit(self._heads(q, self.key_dim)), unit(self._heads(k, self.key_dim))
        q, k = (t.repeat_interleave(self.repeats, dim=1) for t in (q * self.key_dim**-0.5, k))
        step = F.softplus(widen(self.in_proj_a(x)) + widen(self.dt_bias))
        read, memory = gated_delta_rule(
            q,
            k,
            self._heads(v, self.value_dim),
            log_decay=(-widen(self.A_log).exp() * step).transpose(1, 2),
            rate=widen(self.in_proj_b(x)).sigmoid().transpose(1, 2),
            state=None if cache is None else cache.kept.get("memory"),
        )
        if cache is not None:
            cache.kept["memory"] = memory
            cache.length += x.shape[1]
        y = self.norm(read) * F.silu(self._heads(self.in_proj_z(x), self.value_dim))
        return self.out_proj(y.transpose(1, 2).flatten(2).to(x.dtype))

    def _convolve(self, x: Tensor, cache: LayerCache | None) -> Tensor:
        """Each channel mixed with its own last values; before the first token there were zeros."""
        behind = self.conv1d.kernel_size[0] - 1
        seen = None if cache is None else cache.kept.get("inputs")
        x = F.pad(x, (0, 0, behind, 0)) if seen is None else torch.cat((seen, x), 1)
        if cache is not None:
            cache.kept["inputs"] = x[:, x.shape[1] - behind :]
        return self.conv1d(x.transpose(1, 2)).transpose(1, 2)

    @staticmethod
    def _heads(x: Tensor, size: int) -> Tensor:
        """``[B, T, heads * size]`` to ``[B, heads, T, size]``, wide: the delta rule runs in float32 at least."""
        return widen(x.unflatten(-1, (-1, size)).transpose(1, 2))
