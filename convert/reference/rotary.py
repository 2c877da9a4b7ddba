"""Rotary embedding: how fast each pair of dimensions turns, tables of cos and sin, and the turning itself.

Both orders of pairs are ways to *run*, never a permutation of weights. Nothing here is shared with the code that
converts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from convert.errors import ConvertError, Problem

PAIRINGS = ("half", "interleaved")


def widen(x: Tensor) -> Tensor:
    """16-bit values as float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def inverse_frequencies(rotary_dim: int, base: float, scaling: Mapping[str, Any] | None = None) -> Tensor:
    """Radians per position for each rotary pair, float64 ``[rotary_dim / 2]``.

    Pair ``i`` turns by ``base ** (-2 i / rotary_dim)``. Scaling of type ``linear`` divides every frequency by
    ``factor``. Type ``llama3`` (Llama 3.1's long-context recipe, as Meta published it) divides only those whose
    wavelength exceeds ``original_max_position_embeddings / low_freq_factor``, keeps those shorter than
    ``original_max_position_embeddings / high_freq_factor``, and blends in between. Type ``yarn`` (Peng et al., 2023)
    keeps pairs that turn more than ``beta_fast`` times within the original context, divides those that turn less than
    ``beta_slow`` times, and blends over the pairs in between, whose numbers are rounded outwards. Type
    ``proportional`` leaves all but the first ``partial_rotary_factor`` of the pairs standing still.

    Raises:
        ConvertError: An unknown scaling type, or one of its numbers is missing.
    """
    freq = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim)
    kind = "default" if scaling is None else scaling.get("rope_type", "default")
    if scaling is None or kind == "default":
        return freq
    needed = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor", "original_max_position_embeddings"),
        "proportional": ("partial_rotary_factor",),
    }
    if kind not in needed:
        raise ConvertError(
            Problem(
                "rope_type",
                f"The reference model does not know RoPE scaling of type {kind!r}.",
                found=kind,
                wanted=["default", *needed],
            )
        )
    missing = [key for key in needed[kind] if scaling.get(key) is None]
    if missing:
        raise ConvertError(
            Problem(
                "rope_scaling",
                f"RoPE scaling of type {kind!r} lacks {', '.join(missing)}.",
                found=dict(scaling),
                wanted=list(needed[kind]),
            )
        )
    if kind == "linear":
        return freq / scaling["factor"]
    if kind == "proportional":
        freq[int(scaling["partial_rotary_factor"] * rotary_dim // 2) :] = 0.0
        return freq
    if kind == "yarn":
        pairs = torch.arange(rotary_dim // 2, dtype=torch.float64, device="cpu")
        start, end = _yarn_range(rotary_dim, base, scaling)
        stretched = ((pairs - start) / (end - start)).clamp(0.0, 1.0)
        return freq * (1.0 - stretched) + freq / scaling["factor"] * stretched
    turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)  # in the original context
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0) if high != low else (turns >= low).double()
    return freq * keep + freq / scaling["factor"] * (1.0 - keep)


def _yarn_range(rotary_dim: int, base: float, scaling: Mapping[str, Any]) -> tuple[float, float]:
    """The first pair that YaRN slows down, and the first that it slows down by the whole factor."""

    def pair(turns: float) -> float:
        """The (fractional) pair that turns so many times within the original context."""
        wavelength = scaling["original_max_position_embeddings"] / turns
        return rotary_dim / 2 * math.log(wavelength / (2 * math.pi)) / math.log(base)

    start = max(math.floor(pair(scaling.get("beta_fast") or 32.0)), 0)
    end = min(math.ceil(pair(scaling.get("beta_slow") or 1.0)), rotary_dim - 1)
    return start, end if end != start else end + 1e-3


def attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """What cos and sin are multiplied by: 1, but for YaRN ``attention_factor``, or what its authors recommend."""
    if scaling is None or scaling.get("rope_type") != "yarn":
        return 1.0
    stated = scaling.get("attention_factor")
    return float(stated) if stated is not None else 0.1 * math.log(max(scaling["factor"], 1.0)) + 1.0


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of consecutive positions: ``cos`` and ``sin`` ``[T, rotary_dim / 2]``, and which rows pair up."""

    cos: Tensor
    sin: Tensor
    pairing: str


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin, grown on demand; never part of a state dict, always real (also beside meta weights).

    Args:
        rotary_dim: How many leading dimensions of a head turn; even.
        base: RoPE theta.
        scaling: See :func:`inverse_frequencies`.
        pairing: ``half``: dimensions ``(i, i + rotary_dim / 2)`` turn together; ``interleaved``: ``(2i, 2i + 1)``.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, rotary_dim: int, base: float, *, scaling: Mapping[str, Any] | None = None, pairing: str = "half"
    ) -> None:
        super().__init__()
        if rotary_dim % 2:
            raise ConvertError(Problem("head_dim", f"Rotary dimensions come in pairs, not {rotary_dim}."))
        if pairing not in PAIRINGS:
            raise ConvertError(
                Problem("rope_pairing", f"No such rotary pairing: {pairing!r}.", found=pairing, wanted=list(PAIRINGS))
            )
        self.pairing = pairing
        self.frequencies = inverse_frequencies(rotary_dim, base, scaling)
        self.amplitude = attention_factor(scaling)
        self.register_buffer("cos", torch.empty(0, rotary_dim // 2, device="cpu"), persistent=False)
        self.register_buffer("sin", torch.empty(0, rotary_dim // 2, device="cpu"), persistent=False)
        self._fill(256, torch.float32)

    def _fill(self, length: int, dtype: torch.dtype) -> None:
        """Angles in float64: at position 100,000 a float32 angle is off by up to 0.004."""
        device = self.cos.device
        with torch.inference_mode(False):  # the tables outlive the run that needs them first
            angles = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * self.frequencies
            self.cos = (angles.cos() * self.amplitude).to(dtype).to(device)
            self.sin = (angles.sin() * self.amplitude).to(dtype).to(device)

    def forward(self, start: int, length: int, *, dtype: torch.dtype = torch.float32) -> Rotation:
        """The rotation of positions ``start`` to ``start + length``, in float32 (float64 for a float64 model)."""
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        stop = start + length
        if stop > self.cos.shape[0] or self.cos.dtype != dtype:
            self._fill(max(stop, 2 * self.cos.shape[0] if stop > self.cos.shape[0] else stop), dtype)
        return Rotation(self.cos[start:stop], self.sin[start:stop], self.pairing)


def apply_rotary(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn every rotary pair of ``x`` ``[B, heads, T, head_dim]`` by its position's angle.

    Dimensions beyond the rotary ones pass through. The result keeps the order of dimensions of ``x``, and so
    queries and keys of one model always match.
    """
    cos, sin = rotation.cos, rotation.sin
    rotary_dim = 2 * cos.shape[-1]
    turning, rest = widen(x[..., :rotary_dim]), x[..., rotary_dim:]
    if rotation.pairing == "half":
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    else:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
