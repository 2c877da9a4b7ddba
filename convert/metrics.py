"""How far two sets of logits lie apart. Works in blocks of positions, so memory depends on the vocabulary only.

Figures are computed in float64 on the CPU. What distance is acceptable is no business of this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from convert.errors import ConvertError, Problem


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance of logits ``b`` from logits ``a``.

    Attributes:
        max_abs: Largest absolute difference of two logits.
        nmse: Sum of squared differences over the sum of squares of ``a``.
        kl_max: Largest Kullback-Leibler divergence KL(a || b) of any position, in nats.
        kl_mean: Its mean over positions.
        top1: Share of positions with the same likeliest token, 0 to 1.
        by_position: The NMSE of each position.
        finite: Whether all logits of both sides are finite; if not, figures may be NaN or infinite.
    """

    max_abs: float
    nmse: float
    kl_max: float
    kl_mean: float
    top1: float
    by_position: tuple[float, ...] = field(repr=False)
    finite: bool

    @property
    def worst(self) -> float:
        """The largest NMSE of any position (NaN if any is)."""
        return math.nan if any(math.isnan(x) for x in self.by_position) else max(self.by_position)

    def first_diff_position(self, tolerance: float = 0.0) -> int | None:
        """The first position whose NMSE is not within ``tolerance``, or None."""
        return next((i for i, x in enumerate(self.by_position) if not x <= tolerance), None)

    def as_json(self) -> dict[str, Any]:
        """The five figures; None for what is not a finite number."""
        figures = {key: getattr(self, key) for key in ("max_abs", "nmse", "kl_max", "kl_mean", "top1")}
        return {key: value if math.isfinite(value) else None for key, value in figures.items()}


class Meter:
    """Accumulates a :class:`Distance` over blocks of positions."""

    def __init__(self) -> None:
        self._max_abs = 0.0
        self._error = 0.0
        self._energy = 0.0
        self._kl: list[float] = []
        self._same = 0
        self._by_position: list[float] = []
        self._finite = True

    def update(self, a: Tensor, b: Tensor) -> None:
        """Add the next positions.

        Args:
            a: Logits ``[T, V]``, the reference side; any float type, any device.
            b: Logits ``[T, V]``.

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
        if not len(a):
            return
        self._same += int((a.argmax(-1).cpu() == b.argmax(-1).cpu()).sum())
        a, b = a.cpu().double(), b.cpu().double()
        self._finite = self._finite and bool(a.isfinite().all()) and bool(b.isfinite().all())
        diff = a - b
        # torch's max passes NaN on; Python's depends on the order of its arguments.
        self._max_abs = float(torch.stack((torch.tensor(self._max_abs).double(), diff.abs().max())).max())
        error, energy = diff.square().sum(-1), a.square().sum(-1)
        self._error += float(error.sum())
        self._energy += float(energy.sum())
        self._by_position += [_ratio(e, s) for e, s in zip(error.tolist(), energy.tolist(), strict=True)]
        log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
        # A token that a thinks impossible (-inf) adds nothing; without this it would add 0 x -inf = NaN.
        terms = torch.where(log_p == -math.inf, 0.0, log_p.exp() * (log_p - log_q))
        # Rounding can leave a sum of -1e-17 where the divergence is 0.
        self._kl += terms.sum(-1).clamp(min=0.0).tolist()

    def result(self) -> Distance:
        """The distance over everything added so far.

        Raises:
            ConvertError: Nothing was added.
        """
        if not self._kl:
            raise ConvertError(Problem("logits", "There are no positions to compare."))
        return Distance(
            max_abs=self._max_abs,
            nmse=_ratio(self._error, self._energy),
            kl_max=math.nan if any(math.isnan(x) for x in self._kl) else max(self._kl),
            kl_mean=math.fsum(self._kl) / len(self._kl),
            top1=self._same / len(self._kl),
            by_position=tuple(self._by_position),
            finite=self._finite,
        )


def _ratio(error: float, energy: float) -> float:
    return error / energy if energy else (0.0 if error == 0 else math.inf)


def compare(a: Tensor, b: Tensor, *, rows: int = 16) -> Distance:
    """The distance of logits ``b`` from ``a``, both ``[T, V]``, in blocks of ``rows`` positions."""
    if a.shape != b.shape:
        Meter().update(a, b)
    return compare_blocks((a[i : i + rows], b[i : i + rows]) for i in range(0, len(a), rows))


def compare_blocks(blocks: Iterable[tuple[Tensor, Tensor]]) -> Distance:
    """The distance over blocks of positions ``(a, b)``, for logits that are never held whole."""
    meter = Meter()
    for a, b in blocks:
        meter.update(a, b)
    return meter.result()
