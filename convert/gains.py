"""How much better one run of a text is than another, and how far that can be chance.

Two runs of the same tokens are compared token by token, in segments, since neighbouring tokens are not independent. The
interval is a bootstrap's over segments; the chance is Student's, which goes further down than any number of resamples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from convert.qk_probe import student

Losses = NDArray[np.float64]

#: Tokens of a segment, and how few of these there may be.
SEGMENT, FEWEST = 32, 12
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Gain:
    """What is gained, in nats per token.

    Attributes:
        mean: The mean loss of the first run less that of the second.
        low: Lower end of the bootstrap's 95 % interval.
        high: Upper end.
        chance: How probable such a gain is where there is none (the larger of Student's and the bootstrap's, as far
            as that can tell).
        worse: The same of a loss: near 0 where the second run is worse beyond doubt.
    """

    mean: float
    low: float
    high: float
    chance: float
    worse: float

    def beyond(self, margin: float, chance: float) -> bool:
        """Whether it is larger than ``margin`` and hardly by chance."""
        return self.mean > margin and self.low > 0 and self.chance <= chance


def segments(values: Losses) -> Losses:
    """Means of consecutive segments of :data:`SEGMENT` tokens; shorter ones where there would be too few."""
    size = max(1, min(SEGMENT, len(values) // FEWEST))
    count = len(values) // size
    return values[: count * size].reshape(count, size).mean(1)


def interval(values: Losses, *, seed: int = 0) -> tuple[float, float]:
    """The bootstrap's 95 % interval of a mean, over segments."""
    means = _resampled(segments(values), seed)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def _resampled(parts: Losses, seed: int) -> Losses:
    picks = np.random.default_rng(seed).integers(len(parts), size=(RESAMPLES, len(parts)))
    found: Losses = parts[picks].mean(1)
    return found


def gain(before: Losses, after: Losses, *, seed: int = 0) -> Gain:
    """The gain from ``before`` to ``after``, the losses of the same tokens."""
    differences = before - after
    parts = segments(differences)
    means = _resampled(parts, seed)
    low, high = np.quantile(means, (0.025, 0.975))
    bootstrap = float((means <= 0).mean())
    return Gain(
        mean=float(differences.mean()),
        low=float(low),
        high=float(high),
        chance=max(student(parts), bootstrap),
        worse=max(student(-parts), float((means >= 0).mean())),
    )
