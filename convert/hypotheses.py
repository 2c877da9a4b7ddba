"""Which known fault, undone, makes a model predict a text: each is tried, and the evidence is weighed.

Gross faults on a short text first; those of single layers only where none of the others explains the model; the
numbers of the rotation on a long text, since a short one does not tell them apart. A hypothesis is accepted where the
loss falls by more than chance can do (:mod:`convert.gains`), to a level that a model has which understands something.
This module reads no files and prints nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.faults import Case, cases
from convert.gains import Gain, Losses, gain, interval
from convert.trials import Passage, passage

if TYPE_CHECKING:
    from convert.trials import Bench

#: Tokens that everything is tried on, and those that decide between what is left.
SCREEN, SHORT = 128, 384
#: Tokens that the numbers of the rotation are tried on, one after the other; fewer and fewer are left.
LENGTHS = (384, 1024, 3072)
#: Nats that a gain must exceed, whatever chance says: two roundings of one model differ by up to 0.003.
MARGIN = 0.01
#: The chance at which a hypothesis is accepted; some hundred are tried.
ACCEPTED = 1e-4
#: The chance at which one of two is called the better one.
BETTER = 1e-3
#: A gain that needs no look at single layers and at the rotation's numbers.
GROSS = 0.7
#: Hypotheses that are tried again on more tokens, at most.
CONTENDERS = 6
#: Numbers that lose so many nats on fewer tokens are not tried on more.
HOPELESS = 0.1
#: Positions that the right numbers cannot make worse: beyond what it was trained for a model gains from slower turns.
NEAR = 256
#: Faults that may be there together, at most.
TOGETHER = 3
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
        kept = [t for t in self.trials if any(_local(c) for c in t.cases)][:single]
        return [t for t in self.trials if t.explains or t in kept or not any(_local(c) for c in t.cases)]

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


def test_all(
    bench: Bench,
    ids: Sequence[int],
    *,
    first: Iterable[str] = (),
    on_step: Callable[[str, int, int], None] = lambda *_: None,
) -> Findings:
    """Try every known fault on a checkpoint.

    Args:
        bench: The checkpoint, read.
        ids: The text, 3,000 tokens or as many as there are.
        first: Fixes that something else points at, to be tried first.
        on_step: Told what is tried, how many have been tried, and of how many.
    """
    return _Search(bench, list(ids), list(first), on_step).run()


test_all.__test__ = False  # type: ignore[attr-defined]  # no test, whatever pytest thinks of its name


class _Search:
    def __init__(self, bench: Bench, ids: list[int], first: list[str], on_step: Callable[[str, int, int], None]):
        self.bench, self.ids, self.on_step = bench, ids, on_step
        found = cases(bench.ckpt)
        found.sort(key=lambda case: case.fix not in first)
        self.whole = [c for c in found if c.kind != "numbers" and not _local(c)]
        self.single = [c for c in found if _local(c)]
        self.numbers = [c for c in found if c.kind == "numbers"]
        self.level = frequency_level(ids)
        self.context = int(bench.ckpt.config.get("max_position_embeddings") or len(ids))
        self.passages: dict[int, Passage] = {}
        self.bases: dict[int, Losses] = {}
        self.cache: dict[tuple[tuple[Case, ...], int], Trial | None] = {}
        self.skipped: dict[str, str] = {}
        self.done, self.of = 0, len(found)

    def run(self) -> Findings:
        """Everything, in the order that decides soonest."""
        self.base(SCREEN)
        contenders = self._screen(self.whole)
        best = self._decide(contenders)
        if best is None or best.gain.mean < GROSS:
            single = self._decide(self._screen(self.single))
            best = _lower(best, single)
        else:
            reason = "one fault explains the model already"
            self.skipped |= {kind: reason for kind in ("layers", "numbers") if self.single or self.numbers}
        findings: tuple[Trial | None, list[Trial]] = (None, [])
        if best is None or best.gain.mean < GROSS:
            findings = self._numbers()
            best = _lower(best, findings[0])
        if best is not None:
            best = self._together(best)
            best.explains = True
        return self._findings(best, findings[1])

    def passage(self, count: int) -> Passage:
        """So many tokens of the text, in windows as long as the model takes."""
        if count not in self.passages:
            window = max(2, min(count, self.context))
            self.passages[count] = passage(self.ids[:count], window=window, keep=count <= SHORT)
        return self.passages[count]

    def base(self, count: int) -> Losses:
        """What the model as it is makes of them."""
        if count not in self.bases:
            self.on_step("as it is", self.done, self.of)
            self.bases[count] = self.bench.losses(self.passage(count))
        return self.bases[count]

    def attempt(self, chosen: tuple[Case, ...], count: int) -> Trial | None:
        """Undo faults, one on top of the other, and run on so many tokens; None where one does not apply."""
        if (chosen, count) not in self.cache:
            ckpt, found = self.bench.ckpt, None
            base = self.base(count)
            for case in chosen:
                found = case.undo(ckpt)
                if found is None:
                    break
                ckpt = found.opened
            trial = None
            if found is not None:
                self.on_step(" ".join(c.fix or c.name for c in chosen), self.done, self.of)
                trial = self._trial(chosen, base, self.bench.losses(self.passage(count), found))
            self.cache[chosen, count] = trial
        return self.cache[chosen, count]

    def _trial(self, chosen: tuple[Case, ...], base: Losses, losses: Losses) -> Trial:
        low, high = interval(losses)
        return Trial(chosen, len(base), float(base.mean()), float(losses.mean()), low, high, gain(base, losses), losses)

    def _screen(self, tried: Sequence[Case]) -> list[Trial]:
        """All of them on a few tokens; those that may be worth more."""
        found = []
        for case in tried:
            trial = self.attempt((case,), SCREEN)
            self.done += 1
            if trial is not None:
                found.append(trial)
        found.sort(key=lambda t: t.loss)
        hopeful = [t for t in found if t.gain.high > 0 and t.gain.mean > -HOPELESS]
        return hopeful[:CONTENDERS]

    def _decide(self, contenders: Sequence[Trial]) -> Trial | None:
        """The one that explains the model, on more tokens."""
        again = [t for c in contenders if (t := self.attempt(c.cases, SHORT)) is not None]
        return self._accepted(again)

    def _accepted(self, found: Sequence[Trial]) -> Trial | None:
        for trial in sorted(found, key=lambda t: t.loss):
            if not trial.gain.beyond(MARGIN, ACCEPTED):
                continue
            if trial.loss < self.level:
                return trial
            trial.note = "better than as it is, and still no better than the frequencies of tokens"
        return None

    def _numbers(self) -> tuple[Trial | None, list[Trial]]:
        """The rotation's numbers: which explain the model, and which cannot be told from those of the config."""
        left: list[tuple[Case, ...]] = [(case,) for case in self.numbers]
        found: list[Trial] = []
        lengths = [n for n in LENGTHS if n <= len(self.ids)] or [len(self.ids)]
        for count in lengths:
            found = [t for c in left if (t := self.attempt(c, count)) is not None]
            lost = HOPELESS if count < lengths[-1] else math.inf
            kept = [t for t in found if t.gain.mean > -lost or not _worse(t)]
            if count == lengths[0]:
                self.done += len(left)
            left = [t.cases for t in sorted(kept, key=lambda t: t.loss)[:CONTENDERS]]
            if not left:
                return None, []
        best = self._accepted([t for t in found if self._near(t)])
        if best is not None and best.cases[0].fault.name == "theta":
            best = self._refined(best, lengths[-1])
        return best, [t for t in found if not _worse(t) and (best is None or t.cases != best.cases)]

    def _near(self, trial: Trial) -> bool:
        """Whether the first positions do not suffer."""
        count = max(self.bases)
        windows = self.passage(count).ids.shape
        base = self.bases[count].reshape(windows[0], -1)[:, :NEAR].ravel()
        near = trial.losses.reshape(windows[0], -1)[:, :NEAR].ravel()
        if windows[1] <= NEAR or not gain(near, base).beyond(MARGIN, BETTER):
            return True
        trial.note = f"better only beyond position {NEAR}, as where a model runs further than it was trained to"
        return False

    def _refined(self, best: Trial, count: int) -> Trial:
        """The base between those that were tried."""
        case = best.cases[0]
        kind, colon, text = (case.value or "").rpartition(":")
        for factor in (0.5, 2.0):
            other = Case(case.fault, f"{kind}{colon}{float(text) * factor:.10g}")
            trial = self.attempt((other,), count)
            if trial is not None and gain(best.losses, trial.losses).beyond(0.0, BETTER) and self._near(trial):
                best = trial
        return best

    def _together(self, best: Trial) -> Trial:
        """With what else undone the model gets better still."""
        while len(best.cases) < TOGETHER:
            kinds = {case.kind for case in best.cases if case.kind != "values"}
            better = []
            for case in (c for c in self.whole if c.kind not in kinds and c not in best.cases):
                both = (*best.cases, case)
                if self._gains(best.cases, both, SCREEN, chance=1.0) and self._gains(best.cases, both, SHORT):
                    better.append(self.attempt(both, SHORT))
            found = [t for t in better if t is not None]
            if not found:
                return best
            best = min(found, key=lambda t: t.loss)
        return best

    def _gains(self, less: tuple[Case, ...], more: tuple[Case, ...], count: int, chance: float = ACCEPTED) -> bool:
        """Whether undoing more helps, on so many tokens."""
        one, other = self.attempt(less, count), self.attempt(more, count)
        if one is None or other is None:
            return False
        found = gain(one.losses, other.losses)
        return found.mean > MARGIN and found.chance <= chance

    def _findings(self, best: Trial | None, open_: list[Trial]) -> Findings:
        longest: dict[tuple[Case, ...], Trial] = {}
        for trial in self.cache.values():
            if trial is not None and (trial.cases not in longest or longest[trial.cases].tokens < trial.tokens):
                longest[trial.cases] = trial
        if best is not None:
            longest[best.cases] = best
        trials = sorted(longest.values(), key=lambda t: -t.gain.mean)
        rivals: list[Trial] = []
        for trial in trials:
            if best is None or trial is best or trial.tokens != best.tokens:
                continue
            if float(np.abs(trial.losses - best.losses).max()) < EQUAL:
                best.equal.append(trial.fixes[0] if len(trial.fixes) == 1 else " ".join(trial.fixes))
            elif not gain(trial.losses, best.losses).beyond(0.0, BETTER) and trial.name != best.name:
                rivals.append(trial)
        count = max(self.bases)
        base = self.bases[count]
        low, high = interval(base)
        return Findings(float(base.mean()), low, high, len(base), self.level, trials, best, rivals, open_, self.skipped)


def _local(case: Case) -> bool:
    """Whether a case is about one layer, of which there are as many as layers."""
    return case.kind == "layers" or "@" in (case.value or "")


def _worse(trial: Trial) -> bool:
    """Whether the model is better as it is, hardly by chance."""
    return trial.gain.high < 0


def _lower(a: Trial | None, b: Trial | None) -> Trial | None:
    """The one that gains more."""
    if a is None or b is None:
        return a or b
    return a if a.gain.mean >= b.gain.mean else b
