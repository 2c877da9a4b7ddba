"""What the trials of the hypotheses say: each with its gain, and what explains the model.

Plain results; how they come about is :mod:`convert.hypotheses`' matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert.faults import Case
from convert.gains import Gain, Losses

#: Nats that a gain must exceed, whatever chance says: two roundings of one model differ by up to 0.003.
MARGIN = 0.01
#: Losses that differ by less at every token are those of one and the same model.
EQUAL = 2e-3


@dataclass
class Trial:
    """A hypothesis and what came of it.

    Attributes:
        cases: What is undone, one fault or several together.
        tokens: On how many tokens.
        baseline: Mean loss of the model as it is on these tokens.
        loss: With the faults undone.
        low: Lower end of the bootstrap's 95 % interval of the loss.
        high: Upper end.
        gain: Of the one over the other.
        losses: Of every token.
        explains: Whether the verdict names it.
        equal: Other hypotheses that give the same loss at every token.
        note: Why it was not accepted, where its gain alone would have done.
        rivals: Others that explain the model as well.
        doubtful: Whether the model gets better still by undoing other things, as where the fault is none of these.
    """

    cases: tuple[Case, ...]
    tokens: int
    baseline: float
    loss: float
    low: float
    high: float
    gain: Gain
    losses: Losses = field(repr=False)
    explains: bool = False
    equal: list[str] = field(default_factory=list)
    note: str | None = None
    rivals: list[Trial] = field(default_factory=list, repr=False)
    doubtful: bool = False

    @property
    def name(self) -> str:
        """The faults' names."""
        return " + ".join(case.name for case in self.cases)

    @property
    def fixes(self) -> list[str]:
        """What ``convert repair --fix`` takes."""
        return [case.fix for case in self.cases if case.fix]

    @property
    def words(self) -> str:
        """What is supposed to be wrong."""
        return ", and ".join(case.words for case in self.cases)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "words": self.words,
            "fix": " ".join(self.fixes) or None,
            "loss": self.loss,
            "low": self.low,
            "high": self.high,
            "baseline": self.baseline,
            "gain": self.gain.mean,
            "gain_low": self.gain.low,
            "gain_high": self.gain.high,
            "chance": self.gain.chance,
            "tokens": self.tokens,
            "explains": self.explains,
            "equal": self.equal,
            "skipped": None,
            **({"note": self.note} if self.note else {}),
        }


@dataclass
class Findings:
    """What the trials say.

    Attributes:
        baseline: Mean loss of the model as it is, on the longest text that it ran on.
        low: Lower end of its bootstrap interval.
        high: Upper end.
        tokens: Length of that text.
        level: What a guess by the frequency of tokens alone costs on the whole text.
        trials: Every hypothesis on the longest text that it was tried on, best first.
        cause: The trial that explains the model, or None.
        rivals: Others that explain it as well, within what chance can do.
        open: Numbers of the rotation that the text does not tell from those of the config.
        skipped: Kinds that were not tried, and why.
    """

    baseline: float
    low: float
    high: float
    tokens: int
    level: float
    trials: list[Trial]
    cause: Trial | None = None
    rivals: list[Trial] = field(default_factory=list)
    open: list[Trial] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def margin(self) -> float:
        """What a gain must exceed."""
        return MARGIN

    def listed(self, single: int) -> list[Trial]:
        """The trials, with so many of those about one layer."""
        kept = [t for t in self.trials if any(is_local(c) for c in t.cases)][:single]
        return [t for t in self.trials if t.explains or t in kept or not any(is_local(c) for c in t.cases)]

    def control(self) -> Trial | None:
        """The hypothesis that costs least of those that cost something: what a fault would do to this model."""
        worse = [t for t in self.trials if t.cases[0].kind == "order" and t.gain.mean < -MARGIN]
        return max(worse, key=lambda t: t.gain.mean, default=None)

    @property
    def sensible(self) -> bool:
        """Whether the model as it is predicts better than frequencies do."""
        return self.baseline < self.level

    @property
    def power(self) -> float:
        """How many nats the worst of the hypotheses costs: a model that none can hurt shows nothing."""
        return max((-t.gain.mean for t in self.trials), default=0.0)


def frequency_level(ids: Sequence[int]) -> float:
    """The entropy of the tokens of a text in nats, with Miller and Madow's correction for its length."""
    counts = np.array(list(Counter(ids).values()), dtype=np.float64)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum() + (len(counts) - 1) / (2 * counts.sum()))


def is_local(case: Case) -> bool:
    """Whether a case is about one layer, of which there are as many as layers."""
    return case.kind == "layers" or "@" in (case.value or "")
