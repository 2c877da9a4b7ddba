"""Which known fault, undone, makes a model predict a text: each is tried, and the evidence is weighed.

Gross faults on a short text first; those of single layers only where none of the others explains the model; the
numbers of the rotation on a long text, since a short one does not tell them apart. A hypothesis is accepted where the
loss falls by more than chance can do (:mod:`convert.gains`), to a level that a model has which understands something.
This module reads no files and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from convert.faults import Case, cases
from convert.findings import EQUAL, MARGIN, Findings, Trial, frequency_level, is_local
from convert.gains import Losses, gain, interval
from convert.trials import Passage, passage

if TYPE_CHECKING:
    from convert.trials import Bench

#: Tokens that everything is tried on, and those that decide between what is left.
SCREEN, SHORT = 128, 384
#: Tokens that contenders are tried on until something is decided; the rotation's numbers need the last.
LENGTHS = (384, 1024, 3072)
#: The chance at which a hypothesis is accepted; some hundred are tried.
ACCEPTED = 1e-4
#: The chance at which one of two is called the better one, and one at which something else seems to help, too.
BETTER, SEEMING = 1e-3, 0.02
#: A gain that needs no look at single layers and at the rotation's numbers.
GROSS = 0.7
#: Hypotheses that are tried again on more tokens, at most.
CONTENDERS = 6
#: Numbers that lose so many nats on fewer tokens are not tried on more.
HOPELESS = 0.1
#: Tokens of short windows: few enough that any model was trained on so many.
NEAR = 256
#: What a gain of long windows may cost in short ones; how much more short ones must gain than long ones lose.
PRICE, PRICE_FAR = 0.1, 2.0
#: Faults that may be there together, at most.
TOGETHER = 3


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
        self.whole = [c for c in found if c.kind != "numbers" and not is_local(c)]
        self.single = [c for c in found if is_local(c)]
        self.numbers = [c for c in found if c.kind == "numbers"]
        self.level = frequency_level(ids)
        self.context = int(bench.ckpt.config.get("max_position_embeddings") or len(ids))
        self.passages: dict[tuple[int, int], Passage] = {}
        self.bases: dict[tuple[int, int], Losses] = {}
        self.cache: dict[tuple[tuple[Case, ...], int, int], Trial | None] = {}
        self.skipped: dict[str, str] = {}
        self.lengths = [n for n in LENGTHS if n <= len(ids)] or [len(ids)]
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

    def passage(self, count: int, window: int | None = None) -> Passage:
        """So many tokens of the text, in windows of ``window``, or as long as the model takes."""
        key = (count, min(window or count, self.context))
        if key not in self.passages:
            self.passages[key] = passage(self.ids[:count], window=max(2, key[1]), keep=count <= SHORT)
        return self.passages[key]

    def base(self, count: int, window: int | None = None) -> Losses:
        """What the model as it is makes of them."""
        key = (count, min(window or count, self.context))
        if key not in self.bases:
            self.on_step("as it is", self.done, self.of)
            self.bases[key] = self.bench.losses(self.passage(count, window))
        return self.bases[key]

    def attempt(self, chosen: tuple[Case, ...], count: int, window: int | None = None) -> Trial | None:
        """Undo faults, one on top of the other, and run on so many tokens; None where one does not apply."""
        key = (chosen, count, min(window or count, self.context))
        if key not in self.cache:
            ckpt, found = self.bench.ckpt, None
            base = self.base(count, window)
            for case in chosen:
                found = case.undo(ckpt)
                if found is None:
                    break
                ckpt = found.opened
            trial = None
            if found is not None:
                self.on_step(" ".join(c.fix or c.name for c in chosen), self.done, self.of)
                trial = self._trial(chosen, base, self.bench.losses(self.passage(count, window), found))
            self.cache[key] = trial
        return self.cache[key]

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
        """The one that explains the model, on as many tokens as it takes."""
        for count in self.lengths:
            again = [t for c in contenders if (t := self.attempt(c.cases, count)) is not None]
            best = self._accepted(again)
            contenders = [t for t in again if t.gain.mean > MARGIN and t.gain.high > 0]
            if best is not None or not contenders:
                return best
        return None

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
        if len(self.ids) < LENGTHS[1]:
            self.skipped["numbers"] = f"{len(self.ids)} tokens do not tell the rotation's numbers apart"
            return None, []
        short = [t for c in self.numbers if (t := self.attempt((c,), SHORT)) is not None]
        self.done += len(self.numbers)
        left = self._hopeful(short)
        left = self._hopeful([self._known(c, NEAR) for c in left])
        pairs = [(self._known(c, NEAR), self._known(c, None)) for c in left]
        accepted = [pair for pair in pairs if self._both(*pair)]
        best = max(accepted, key=_sum, default=None)
        if best is not None and best[0].cases[0].name == "theta":
            best = self._refined(best)
        undecided = [far for near, far in pairs if not (_worse(near) or _worse(far))]
        if best is None:
            return None, undecided
        near, far = best
        rivals = [pair for pair in accepted if pair[0].cases != near.cases and not self._beaten(pair, best)]
        chosen = far if far.gain.mean >= near.gain.mean else near
        chosen.rivals = [(a if chosen is near else b) for a, b in rivals if a.name != near.name]
        return chosen, [t for t in undecided if t.cases != near.cases]

    def _hopeful(self, found: Sequence[Trial]) -> list[tuple[Case, ...]]:
        kept = [t for t in found if t.gain.mean > -HOPELESS or not _worse(t)]
        return [t.cases for t in sorted(kept, key=lambda t: t.loss)[:CONTENDERS]]

    def _known(self, chosen: tuple[Case, ...], window: int | None) -> Trial:
        """A trial on the whole text, of a case that is known to apply."""
        found = self.attempt(chosen, self.lengths[-1], window)
        assert found is not None
        return found

    def _both(self, near: Trial, far: Trial) -> bool:
        """Whether numbers are right by short windows and by long ones.

        Beyond what it was trained for any model gains from slower turns, at the price of short windows; numbers that
        are right pay no such price. Short windows alone decide where the long ones say nothing against it.
        """
        if far.gain.beyond(MARGIN, ACCEPTED):
            if near.gain.mean >= -PRICE * far.gain.mean or not _worse(near):
                return far.loss < self.level
            far.note = f"better beyond {NEAR} tokens only, as where a model runs further than it was trained to"
            return False
        if _worse(far, BETTER) or near.gain.mean < -PRICE_FAR * far.gain.mean:
            return False
        return near.gain.beyond(MARGIN, ACCEPTED) and near.loss < self.level

    def _beaten(self, pair: tuple[Trial, Trial], best: tuple[Trial, Trial]) -> bool:
        return any(gain(a.losses, b.losses).beyond(0.0, BETTER) for a, b in zip(pair, best, strict=True))

    def _refined(self, best: tuple[Trial, Trial]) -> tuple[Trial, Trial]:
        """The base between those that were tried."""
        case = best[0].cases[0]
        kind, colon, text = (case.value or "").rpartition(":")
        for factor in (0.5, 2.0):
            other = (Case(case.fault, f"{kind}{colon}{float(text) * factor:.10g}"),)
            if self.attempt(other, self.lengths[-1], NEAR) is None:
                continue
            pair = (self._known(other, NEAR), self._known(other, None))
            if self._both(*pair) and self._beaten(best, pair) and not self._beaten(pair, best):
                best = pair
        return best

    def _together(self, best: Trial) -> Trial:
        """With what else undone the model gets better still."""
        while len(best.cases) < TOGETHER:
            kinds = {case.kind for case in best.cases if case.kind != "values"}
            better, seeming = [], []
            for case in (c for c in self.whole if c.kind not in kinds and c not in best.cases):
                both = (*best.cases, case)
                if self._gains(best.cases, both, SCREEN, chance=1.0):
                    seeming.append(both)
                    if self._gains(best.cases, both, SHORT):
                        better.append(self.attempt(both, SHORT))
            found = [t for t in better if t is not None]
            if not found:
                best.doubtful = any(self._gains(best.cases, both, SHORT, SEEMING) for both in seeming)
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
            same = next((t for t in (best, *rivals) if float(np.abs(trial.losses - t.losses).max()) < EQUAL), None)
            if same is not None:
                same.equal.append(" ".join(trial.fixes))
            # What makes the model worse explains nothing, however few tokens say by how much.
            elif trial.gain.mean > 0 and trial.name != best.name and not _better(trial, best):
                rivals.append(trial)
        base = max(self.bases.values(), key=len)
        low, high = interval(base)
        return Findings(float(base.mean()), low, high, len(base), self.level, trials, best, rivals, open_, self.skipped)


def _better(less: Trial, more: Trial) -> bool:
    """Whether the second gains more, hardly by chance."""
    return gain(less.losses, more.losses).beyond(0.0, BETTER)


def _worse(trial: Trial, chance: float = 0.025) -> bool:
    """Whether the model is better as it is, hardly by chance."""
    return trial.gain.high < 0 and trial.gain.worse <= chance


def _sum(pair: tuple[Trial, Trial]) -> float:
    return pair[0].gain.mean + pair[1].gain.mean


def _lower(a: Trial | None, b: Trial | None) -> Trial | None:
    """The one that gains more."""
    if a is None or b is None:
        return a or b
    return a if a.gain.mean >= b.gain.mean else b
