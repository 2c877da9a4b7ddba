"""How far two sets of logits, or of hidden states, lie apart.

Works on slabs of the vocabulary or on blocks of positions, so memory depends on neither. Figures are computed in
float64 on the CPU. What distance is acceptable is no business of this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from convert.errors import ConvertError, Problem

#: Logits sampled for a scatter plot.
SAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance of logits ``b`` from logits ``a``.

    Attributes:
        max_abs: Largest absolute difference of two logits.
        nmse: Sum of squared differences over the sum of squares of ``a``.
        kl_max: Largest Kullback-Leibler divergence KL(a || b) of any position, in nats.
        kl_mean: Its mean over positions.
        top1: Share of positions with the same likeliest token, 0 to 1; one where a side has none (NaN, infinity) is not
            such a position. NaN if there is no other.
        by_position: The NMSE of each position.
        finite: Whether all logits of both sides are finite; if not, figures may be NaN or infinite.
        kl_by_position: The divergence of each position, in nats.
        without: At how many positions ``a``, and ``b``, have no likeliest token.
    """

    max_abs: float
    nmse: float
    kl_max: float
    kl_mean: float
    top1: float
    by_position: tuple[float, ...] = field(repr=False)
    finite: bool
    kl_by_position: tuple[float, ...] = field(default=(), repr=False)
    without: tuple[int, int] = (0, 0)

    @property
    def worst(self) -> float:
        """The largest NMSE of any position (NaN if any is)."""
        return _largest(self.by_position)

    def first_diff_position(self, tolerance: float = 0.0) -> int | None:
        """The first position whose NMSE is not within ``tolerance``, or None."""
        return next((i for i, x in enumerate(self.by_position) if not x <= tolerance), None)

    def as_json(self) -> dict[str, Any]:
        """The five figures; None for what is not a finite number."""
        figures = {key: getattr(self, key) for key in ("max_abs", "nmse", "kl_max", "kl_mean", "top1")}
        return {key: value if math.isfinite(value) else None for key, value in figures.items()}


@dataclass(frozen=True, slots=True)
class Positions:
    """What a :class:`Distance` is made of, position by position; float64 ``[T]`` each.

    Attributes:
        error: Sum of squared differences.
        energy: Sum of squares of ``a``.
        max_abs: Largest absolute difference.
        kl: Divergence, nats.
        same: 1 where both sides have the same likeliest token, else 0.
        without: Who has no likeliest token, for NaN or infinity: 1 ``a``, 2 ``b``, 3 both, else 0.
    """

    error: Tensor
    energy: Tensor
    max_abs: Tensor
    kl: Tensor
    same: Tensor
    without: Tensor

    def distance(self, start: int = 0, stop: int | None = None) -> Distance:
        """The distance over some of the positions.

        Raises:
            ConvertError: There are none.
        """
        error, energy, max_abs, kl, same, without = (getattr(self, f.name)[start:stop].tolist() for f in fields(self))
        if not error:
            raise ConvertError(Problem("logits", "There are no positions to compare."))
        return Distance(
            max_abs=_largest(max_abs),
            nmse=ratio(math.fsum(error), math.fsum(energy)) if all(map(math.isfinite, error)) else sum(error),
            kl_max=_largest(kl),
            kl_mean=math.fsum(kl) / len(kl) if all(map(math.isfinite, kl)) else sum(kl),
            top1=math.nan if all(without) else sum(same) / len(same),
            by_position=tuple(ratio(e, s) for e, s in zip(error, energy, strict=True)),
            finite=all(map(math.isfinite, [*max_abs, *energy])),
            kl_by_position=tuple(kl),
            without=(sum(int(w) & 1 for w in without), sum(int(w) >> 1 for w in without)),
        )


class Meter:
    """Accumulates :class:`Positions` over slabs of the vocabulary, at a fixed set of positions."""

    def __init__(self, length: int) -> None:
        def each(value: float) -> Tensor:
            return torch.full((length,), value, dtype=torch.float64)

        self._error, self._energy, self._max_abs = each(0.0), each(0.0), each(0.0)
        self._best = [(each(-math.inf), torch.full((length,), -1)) for _ in range(2)]
        # The largest logit of each side so far, and the sum of exp(logit - largest); online softmax.
        self._top = [each(-math.inf), each(-math.inf)]
        self._sum = [each(0.0), each(0.0)]
        self._cross = each(0.0)  # sum of exp(a - largest) * (a - b)
        self._seen = 0

    def update(self, a: Tensor, b: Tensor) -> None:
        """Add the next tokens of the vocabulary.

        Args:
            a: Logits ``[T, S]``, the reference side; any float type, any device.
            b: Logits ``[T, S]``.

        Raises:
            ConvertError: The shapes differ.
        """
        if a.shape != b.shape or a.ndim != 2:
            raise ConvertError(
                Problem(
                    "logits",
                    f"Logits of shapes {list(a.shape)} and {list(b.shape)} cannot be compared position by position.",
                    found=list(b.shape),
                    wanted=list(a.shape),
                )
            )
        if not a.numel():
            return
        a, b = a.cpu().double(), b.cpu().double()
        diff = a - b
        # torch's max passes NaN on; Python's depends on the order of its arguments.
        self._max_abs = torch.maximum(self._max_abs, diff.abs().amax(-1))
        self._error += diff.square().sum(-1)
        self._energy += a.square().sum(-1)
        weights = self._softmax(0, a)
        # A token that a thinks impossible (-inf) adds nothing; without this it would add 0 x -inf = NaN.
        self._cross += torch.where(weights == 0, 0.0, weights * diff).sum(-1)
        self._softmax(1, b)
        self._seen += a.shape[1]

    def _softmax(self, side: int, values: Tensor) -> Tensor:
        """Add tokens to a side's softmax and its likeliest; returns ``exp(values - largest so far)``."""
        found, where = values.max(-1)
        best, token = self._best[side]
        self._best[side] = (
            torch.maximum(best, found),
            torch.where(found > best, where + self._seen, token),
        )
        before = self._top[side]
        top = torch.maximum(before, found)
        shift = torch.where(top.isneginf(), 0.0, top)
        kept = torch.where(before.isneginf(), 0.0, (before - shift).exp())
        weights = (values - shift[:, None]).exp_()
        self._sum[side] = self._sum[side] * kept + weights.sum(-1)
        if side == 0:
            self._cross *= kept
        self._top[side] = top
        return weights

    def positions(self) -> Positions:
        """What was added, position by position."""
        logs = [top + total.log() for top, total in zip(self._top, self._sum, strict=True)]
        # Rounding can leave a difference of -1e-17 where the divergence is 0.
        kl = (self._cross / self._sum[0] - logs[0] + logs[1]).clamp(min=0.0)
        a, b = (~best.isfinite() for best, _ in self._best)
        same = ((self._best[0][1] == self._best[1][1]) & ~a & ~b).double()
        return Positions(self._error, self._energy, self._max_abs, kl, same, a.double() + 2 * b.double())

    def result(self) -> Distance:
        """The distance over everything added.

        Raises:
            ConvertError: There are no positions.
        """
        return self.positions().distance()


class Sample:
    """The same few logits of every side, for a scatter plot: pairs of position and token, spread over both evenly.

    Args:
        length: T.
        vocab_size: V.
        count: How many at most.
    """

    def __init__(self, length: int, vocab_size: int, count: int = SAMPLES) -> None:
        numbers = torch.arange(min(count, length * vocab_size))
        self._position = numbers * length // max(len(numbers), 1)
        self._token = (numbers * 2654435761 % 2**32) * vocab_size >> 32  # Knuth's multiplicative hash
        self.values: dict[str, Tensor] = {}

    def take(self, side: str, start: int, logits: Tensor) -> None:
        """Keep those of a side's logits ``[T, S]`` that are wanted; ``start`` is the token id of the first column."""
        kept = self.values.setdefault(side, torch.full((len(self._token),), math.nan, dtype=torch.float64))
        here = (self._token >= start) & (self._token < start + logits.shape[1])
        kept[here] = logits.cpu()[self._position[here], self._token[here] - start].double()

    def lists(self) -> dict[str, list[float]]:
        """The values, by side, in one order."""
        return {side: values.tolist() for side, values in self.values.items()}


@dataclass(frozen=True, slots=True)
class Apart:
    """How far hidden states lie apart: NMSE over all positions, and of the worst one."""

    nmse: float
    worst: float


def apart(a: Tensor, b: Tensor) -> Apart:
    """The distance of hidden states ``b`` ``[T, D]`` from ``a``."""
    a, b = a.cpu().double(), b.cpu().double()
    error, energy = (a - b).square().sum(-1), a.square().sum(-1)
    each = [ratio(e, s) for e, s in zip(error.tolist(), energy.tolist(), strict=True)]
    return Apart(ratio(float(error.sum()), float(energy.sum())), _largest(each))


def _largest(values: Sequence[float]) -> float:
    """The largest number; NaN if there is one."""
    return math.nan if any(math.isnan(x) for x in values) else max(values)


def ratio(error: float, energy: float) -> float:
    """A sum of squares over another; 0 of nothing is nothing."""
    return error / energy if energy else (0.0 if error == 0 else math.inf)


def compare(a: Tensor, b: Tensor, *, rows: int = 16) -> Distance:
    """The distance of logits ``b`` from ``a``, both ``[T, V]``, in blocks of ``rows`` positions."""
    if a.shape != b.shape:
        Meter(len(a)).update(a, b)
    return compare_blocks((a[i : i + rows], b[i : i + rows]) for i in range(0, len(a), rows))


def compare_blocks(blocks: Iterable[tuple[Tensor, Tensor]]) -> Distance:
    """The distance over blocks of positions ``(a, b)``, for logits that are never held whole."""
    found = []
    for a, b in blocks:
        meter = Meter(len(a))
        meter.update(a, b)
        found.append(meter.positions())
    if not found:
        raise ConvertError(Problem("logits", "There are no positions to compare."))
    return Positions(*(torch.cat([getattr(p, f.name) for p in found]) for f in fields(Positions))).distance()
