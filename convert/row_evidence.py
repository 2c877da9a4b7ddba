"""Which order of the rows of Q and K the norms of the rows speak for, and with what chance of being wrong.

Statistics on numbers that :mod:`convert.qk_probe` reads. What can be the case (a :class:`Scenario`: an order of Q and
one of K) is weighed as a whole: two scenarios are compared on the heads on which they differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convert.row_orders import BASES, Order, nearness

#: The chance of being wrong at which an order is named, and at which a file that disagrees is called broken.
NAMED, BROKEN = 1e-3, 1e-5
#: From so many layers on a layer is one observation; in flatter models each head is.
_LAYERS = 8
#: Heads of four rows have three pairings, too few to tell an order from chance.
_NARROWEST = 6
#: Rows whose norms differ less, on the average, were made equal; what differs is rounding.
_ROUNDING = 1e-5

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fit:
    """One head.

    Attributes:
        name: ``q`` or ``k``.
        layer: Its layer.
        fits: How well each order explains the norms of its rows: their correlation between rows that turn at near
            frequencies in that order, of their logarithms; 0 or a little less by chance, 1 at best.
        half: Mean |log(norm_a / norm_b)| of the two rows of a pair if pairs are (i, i + d/2).
        interleaved: The same if they are (2i, 2i + 1).
        random: The same over all pairs of rows.
    """

    name: str
    layer: int | None
    fits: Mapping[Order, float]
    half: float
    interleaved: float
    random: float


def fit(name: str, layer: int | None, logs: Floats, blocks: tuple[int, ...] = ()) -> list[Fit]:
    """How well each order explains the norms of the rows of some heads.

    Args:
        name: ``q`` or ``k``.
        layer: The layer.
        logs: Logarithms of the norms of the rows that turn, ``[heads, rows]``.
        blocks: Rows per head if the tensor had one of the other head counts.

    Returns:
        One for each head; heads whose rows tell nothing are left out (too few, not finite, zeros, all the same).
    """
    width = logs.shape[1]
    if width < _NARROWEST or width % 2:
        return []
    logs = logs[np.isfinite(logs).all(1)]
    weights = 2 * np.arange(width) - (width - 1)
    random = 2 * (np.sort(logs, axis=1) @ weights) / (width * (width - 1))  # mean over all pairs, from the ranks
    logs, random = logs[random > _ROUNDING], random[random > _ROUNDING]
    centred = logs - logs.mean(1, keepdims=True)
    variance = (centred**2).mean(1)
    fits = {o: ((centred @ near) * centred).sum(1) / variance for o, near in nearness(width, blocks).items()}
    half = np.abs(logs[:, : width // 2] - logs[:, width // 2 :]).mean(1)
    interleaved = np.abs(logs[:, ::2] - logs[:, 1::2]).mean(1)
    return [
        Fit(name, layer, {o: float(f[n]) for o, f in fits.items()}, float(half[n]), float(interleaved[n]), float(r))
        for n, r in enumerate(random)
    ]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the rows of Q, of K, or of both say.

    Attributes:
        fits: As of a head, mean over heads; orders that all heads can have.
        half: As of a head, mean over heads.
        interleaved: Likewise.
        random: Likewise.
        heads: Heads that were looked at.
    """

    fits: Mapping[Order, float]
    half: float
    interleaved: float
    random: float
    heads: int

    def as_json(self) -> dict[str, Any]:
        """The keys under ``q``, ``k`` and ``both``."""
        ranked = sorted(self.fits.items(), key=lambda item: -item[1])
        return {
            "h": self.half,
            "i": self.interleaved,
            "r": self.random,
            "heads": self.heads,
            "fits": {str(order): value for order, value in ranked},
        }

    def ratios(self) -> str:
        """The ratios in words."""
        return f"h/r {self.half / self.random:.2f}, i/r {self.interleaved / self.random:.2f}"


def evidence(heads: Sequence[Fit]) -> Evidence | None:
    """The mean over heads; None without any."""
    if not heads:
        return None
    shared = _shared(heads)
    h, i, r = (float(np.mean([getattr(f, part) for f in heads])) for part in ("half", "interleaved", "random"))
    return Evidence({o: float(np.mean([f.fits[o] for f in heads])) for o in shared}, h, i, r, len(heads))


def _shared(heads: Sequence[Fit]) -> list[Order]:
    return [order for order in heads[0].fits if all(order in f.fits for f in heads)] if heads else []


@dataclass(frozen=True, slots=True)
class Scenario:
    """What can be the case.

    Attributes:
        q: The order of Q's rows.
        k: Of K's.
        fit: Mean fit over all heads.
        chance: An upper bound of the chance that this is the case, though the best scenario fits better: Student's t of
            the lead, over layers (over heads in a model of few layers), times the number of scenarios; 1 for the best.
    """

    q: Order
    k: Order
    fit: float
    chance: float = 1.0

    def odd(self, expected: str) -> dict[str, Order]:
        """Which of the two is not in the expected order."""
        return {name: order for name, order in (("q", self.q), ("k", self.k)) if order != Order(expected)}


def weigh(heads: Sequence[Fit], expected: str) -> list[Scenario]:
    """All scenarios, the best first: both in one order, or one of them in another than the expected one."""
    q, k = ([f for f in heads if f.name == name] for name in ("q", "k"))
    if not heads:
        return []
    right = Order(expected)
    of_q, of_k = _shared(q) or [right], _shared(k) or [right]
    pairs = [(o, o) for o in of_q if o in of_k or not k]
    if q and k:
        pairs += [(right, o) for o in of_k if o != right] + [(o, right) for o in of_q if o != right]
    elif k:
        pairs = [(o, o) for o in of_k]
    tables = {pair: _column(q, pair[0]) | _column(k, pair[1], len(q)) for pair in pairs}
    means = {pair: float(np.mean(list(column.values()))) for pair, column in tables.items()}
    best = max(pairs, key=lambda pair: means[pair])
    layers = {n: f.layer for n, f in enumerate([*q, *k])}
    found = [Scenario(*best, means[best])]
    for pair in pairs:
        if pair == best:
            continue
        differing = [n for n in layers if pair[n >= len(q)] != best[n >= len(q)]]
        leads = {n: tables[best][n] - tables[pair][n] for n in differing}
        chance = min(1.0, student(_units(leads, layers)) * len(pairs))
        found.append(Scenario(*pair, means[pair], chance))
    return sorted(found, key=lambda s: (-s.chance, -s.fit))


def _column(heads: Sequence[Fit], order: Order, first: int = 0) -> dict[int, float]:
    return {first + n: f.fits[order] for n, f in enumerate(heads)}


def _units(values: Mapping[int, float], layers: Mapping[int, int | None]) -> Floats:
    """Observations: heads, or means over the heads of a layer where there are enough layers."""
    by_layer: dict[int | None, list[float]] = {}
    for n, value in values.items():
        by_layer.setdefault(layers[n], []).append(value)
    if len(by_layer) >= _LAYERS:
        return np.array([np.mean(v) for v in by_layer.values()])
    return np.array(list(values.values()))


def is_plain(scenario: Scenario) -> bool:
    """Whether it is one of those that happen most: each of the two in one of the layouts' own orders."""
    return scenario.q in map(Order, BASES) and scenario.k in map(Order, BASES)


def student(values: Floats) -> float:
    """The chance of a mean as large as that of ``values`` if the true one were zero (one-sided Student's t).

    By Wallace's normal approximation of t: within a fifth of the true chance from three values on.
    """
    count = len(values)
    if count < 3:
        return 1.0
    mean, spread = float(values.mean()), float(values.std(ddof=1))
    if mean <= 0 or spread == 0:
        return 1.0
    free = count - 1
    t = mean / (spread / math.sqrt(count))
    normal = math.sqrt(free * math.log1p(t * t / free)) * (8 * free + 1) / (8 * free + 3)
    return 0.5 * math.erfc(normal / math.sqrt(2))
