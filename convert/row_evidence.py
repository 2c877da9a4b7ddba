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
class Fits:
    """Some heads of Q, or some of K; arrays with one number for each head.

    Attributes:
        name: ``q`` or ``k``.
        layers: Their layers.
        fits: How well each order explains the norms of a head's rows: their correlation between rows that turn at near
            frequencies in that order, of their logarithms; 0 or a little less by chance, 1 at best.
        half: Mean |log(norm_a / norm_b)| of the two rows of a pair if pairs are (i, i + d/2).
        interleaved: The same if they are (2i, 2i + 1).
        random: The same over all pairs of rows.
    """

    name: str
    layers: tuple[int | None, ...]
    fits: Mapping[Order, Floats]
    half: Floats
    interleaved: Floats
    random: Floats


def fit(name: str, layers: Sequence[int | None], logs: Floats, blocks: tuple[int, ...] = ()) -> Fits | None:
    """How well each order explains the norms of the rows of some heads.

    Args:
        name: ``q`` or ``k``.
        layers: The layer of each head.
        logs: Logarithms of the norms of the rows that turn, ``[heads, rows]``.
        blocks: Rows per head if the tensor had one of the other head counts.

    Returns:
        Without the heads whose rows tell nothing (too few, not finite, zeros, all the same); None if no other is there.
    """
    width = logs.shape[1]
    if width < _NARROWEST or width % 2:
        return None
    told = np.flatnonzero(np.isfinite(logs).all(1))
    logs = logs[told]
    weights = 2 * np.arange(width) - (width - 1)
    random = 2 * (np.sort(logs, axis=1) @ weights) / (width * (width - 1))  # mean over all pairs, from the ranks
    differ = random > _ROUNDING
    told, logs, random = told[differ], logs[differ], random[differ]
    if not told.size:
        return None
    centred = logs - logs.mean(1, keepdims=True)
    variance = (centred**2).mean(1)
    return Fits(
        name,
        tuple(layers[n] for n in told),
        {o: ((centred @ near) * centred).sum(1) / variance for o, near in nearness(width, blocks).items()},
        np.abs(logs[:, : width // 2] - logs[:, width // 2 :]).mean(1),
        np.abs(logs[:, ::2] - logs[:, 1::2]).mean(1),
        random,
    )


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


def evidence(heads: Sequence[Fits]) -> Evidence | None:
    """The mean over heads; None without any."""
    if not heads:
        return None
    h, i, r = (np.concatenate([getattr(f, part) for f in heads]) for part in ("half", "interleaved", "random"))
    means = {o: float(_column(heads, o).mean()) for o in _shared(heads)}
    return Evidence(means, float(h.mean()), float(i.mean()), float(r.mean()), len(r))


def _shared(heads: Sequence[Fits]) -> list[Order]:
    return [order for order in heads[0].fits if all(order in f.fits for f in heads)] if heads else []


def _column(heads: Sequence[Fits], order: Order) -> Floats:
    return np.concatenate([f.fits[order] for f in heads]) if heads else np.empty(0)


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


def weigh(heads: Sequence[Fits], expected: str) -> list[Scenario]:
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
    columns_q, columns_k = ({p[n]: _column(side, p[n]) for p in pairs} for n, side in enumerate((q, k)))
    tables = {pair: np.concatenate([columns_q[pair[0]], columns_k[pair[1]]]) for pair in pairs}
    means = {pair: float(column.mean()) for pair, column in tables.items()}
    best = max(pairs, key=lambda pair: means[pair])
    layers = [layer for f in (*q, *k) for layer in f.layers]
    numbers = {layer: n for n, layer in enumerate(dict.fromkeys(layers))}
    numbered = np.array([numbers[layer] for layer in layers])
    is_q = np.arange(len(layers)) < sum(len(f.layers) for f in q)
    found = [Scenario(*best, means[best])]
    for pair in pairs:
        if pair == best:
            continue
        differing = np.where(is_q, pair[0] != best[0], pair[1] != best[1])
        leads = (tables[best] - tables[pair])[differing]
        chance = min(1.0, student(_units(leads, numbered[differing])) * len(pairs))
        found.append(Scenario(*pair, means[pair], chance))
    return sorted(found, key=lambda s: (-s.chance, -s.fit))


def _units(values: Floats, layers: NDArray[np.int64]) -> Floats:
    """Observations: heads, or means over the heads of a layer where there are enough layers."""
    present = sorted(set(layers.tolist()))  # np.unique would import numpy.ma, 20 ms
    if len(present) >= _LAYERS:
        return np.array([values[layers == layer].mean() for layer in present])
    return values


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
