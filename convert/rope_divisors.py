"""RoPE settings from the tensor of divisors in a GGUF file (``rope_freqs.weight``), which has no keys for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from convert.rope import META_SCALING, STANDING, Rope, clean, divisors, stop, turning_pairs


def from_divisors(values: Sequence[float], theta: float, head_dim: int, recorded: Rope | None = None) -> Rope:
    """Recover llama3 scaling from GGUF's ``rope_freqs.weight``, which keeps the factor but not the other numbers.

    Tries what the file recorded, then the numbers of the published models, then solves for them with a low factor of
    1; whatever it returns reproduces the divisors to float32.

    Raises:
        ConvertError: No llama3 scaling gives these divisors.
    """
    factor = float(max(values))
    base = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **META_SCALING}
    candidates = [clean(recorded, theta)] if recorded and recorded.get("rope_type") == "llama3" else []
    candidates.append(clean(base, theta))
    solved = _solve(values, theta, head_dim, factor)
    if solved:
        candidates.append(clean({**base, **solved}, theta))
    for rope in candidates:
        want = divisors(rope, head_dim)
        if len(want) == len(values) and all(abs(a - b) <= 2e-6 * a for a, b in zip(want, values, strict=True)):
            return rope
    raise stop(
        f"rope_freqs.weight holds divisors that no llama3 scaling gives (largest {factor:g}, {len(values)} values).",
        found=factor,
        hint="State the scaling with --config FILE.",
    )


def _solve(values: Sequence[float], theta: float, head_dim: int, factor: float) -> dict[str, Any] | None:
    """Low factor 1 assumed, ``smooth`` is linear in the frequency: two points inside the ramp give the line."""
    points = []
    for index, value in enumerate(values):
        if 1.0 < value < factor:
            frequency = 1 / (2 * math.pi * theta ** (2 * index / head_dim))
            points.append((frequency, (1 / value - 1 / factor) / (1 - 1 / factor)))
    if len(points) < 2 or points[0][0] == points[-1][0]:
        return None
    slope = (points[0][1] - points[-1][1]) / (points[0][0] - points[-1][0])
    intercept = points[0][1] - slope * points[0][0]
    if intercept >= 0:
        return None
    high = 1 - 1 / intercept
    return {"high_freq_factor": round(high, 4), "original_max_position_embeddings": round(slope * (high - 1))}


def proportion(values: Sequence[float], rope: Rope) -> Rope:
    """A proportional RoPE with the proportion that a GGUF file's divisors say.

    Raises:
        ConvertError: They are no divisors of a proportional RoPE.
    """
    turning = sum(v == 1.0 for v in values)
    if list(values[:turning]) != [1.0] * turning or any(v < STANDING / 10 for v in values[turning:]):
        raise stop(
            "rope_freqs.weight holds divisors that no proportional RoPE has.",
            found=sorted(set(values))[:4],
            wanted=[1.0, STANDING],
        )
    if turning == turning_pairs(rope, 2 * len(values)):
        return rope
    return {**rope, "partial_rotary_factor": turning / len(values)}
