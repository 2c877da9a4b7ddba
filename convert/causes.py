"""The causes that the evidence names: numbers, runs and comparison weighed against each other.

What cannot be undone (a tensor copied over another) comes first where it is certain, for a model that lacks weights
may get better by other changes, too. A suspicion that the run does not confirm is a hint and no cause.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from convert import undo
from convert.faults import FAULTS, parse_fix

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.findings import Findings, Trial
    from convert.oddities import Oddity
    from convert.qk_probe import Probe

#: Kinds of odd tensors that are faults which nothing undoes: what they are called as a cause.
_LOST = {
    "nan": "damaged",
    "inf": "damaged",
    "zeros": "damaged",
    "constant": "damaged",
    "duplicate": "duplicate",
}
#: How sure the numbers alone make of a fault that no run has confirmed.
_BY_NUMBERS = 0.9
#: Of a cause in a model that has lost weights besides.
_BESIDES = 0.4


@dataclass(slots=True)
class Cause:
    """Something that is wrong.

    Attributes:
        fault: Its name in :data:`convert.faults.FAULTS`.
        words: For people.
        confidence: 0 to 1.
        evidence: What speaks for it.
        loss: With it undone, nats per token.
        fix: The command that repairs it.
    """

    fault: str
    words: str
    confidence: float
    evidence: list[str]
    loss: float | None = None
    fix: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The keys of an entry of ``causes``."""
        return {
            "fault": self.fault,
            "words": self.words,
            "confidence": self.confidence,
            "evidence": self.evidence,
            "loss": self.loss,
            "fix": self.fix,
        }


@dataclass(slots=True)
class Weighed:
    """Causes, likeliest first; hints; whether a good copy differs."""

    causes: list[Cause] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    differs: bool = False


def suspects(ckpt: Checkpoint, probed: Probe | None, odd: Sequence[Oddity]) -> list[str]:
    """Fixes that the numbers point at, to be tried first."""
    found: list[str] = probed.suspects(ckpt) if probed is not None else []
    for oddity in odd:
        if oddity.kind == "norm_convention":
            found += ["norms-plus-one", "norms-minus-one"]
        if oddity.kind == "transposed" and oddity.hint and "transpose=" in oddity.hint:
            found.append("transpose=" + oddity.hint.partition("transpose=")[2].partition("`")[0])
    return found


def weigh(
    ckpt: Checkpoint,
    probed: Probe | None,
    odd: Sequence[Oddity],
    found: Findings | None,
    compared: Any = None,
) -> Weighed:
    """Bring the evidence together."""
    out = Weighed()
    lost = _lost(odd)
    if found is not None:
        out.causes += _by_runs(ckpt, found)
        out.hints += _open(found)
        if not out.causes and not found.sensible and undo.head_is_embedding(ckpt):
            fault = FAULTS["head-replaced"]
            said = "the head equals the embedding, the config says the model has a head of its own"
            loss = f"the loss is {found.baseline:.2f}, and the frequencies of tokens alone give {found.level:.2f}"
            out.causes.append(Cause(fault.name, fault.words, _BY_NUMBERS, [said, loss]))
    _add_probe(ckpt, probed, found, out)
    _add_numbers(ckpt, odd, found, out)
    if lost:
        for cause in out.causes:
            cause.confidence = min(cause.confidence, _BESIDES)
        out.causes = lost + out.causes
    if compared is not None:
        _add_comparison(ckpt, compared, out)
    return out


def command(ckpt: Checkpoint, fixes: Sequence[str]) -> str:
    """The command that repairs."""
    said = " ".join(f"--fix {shlex.quote(fix)}" for fix in fixes)
    return f"convert repair {shlex.quote(str(ckpt.path))} OUT {said}"


def _by_runs(ckpt: Checkpoint, found: Findings) -> list[Cause]:
    best = found.cause
    if best is None:
        return []
    rivals = list({r.name: r for r in (*best.rivals, *found.rivals)}.values())
    sure = (1.0 - min(best.gain.chance, 1.0)) / (1 + len(rivals))
    if best.doubtful:
        sure = min(sure, _BESIDES)
    out = []
    for case in best.cases:
        out.append(Cause(case.name, case.words, sure, _evidence(best), best.loss, command(ckpt, best.fixes)))
    for rival in rivals:
        out.append(Cause(rival.name, rival.words, sure, _evidence(rival), rival.loss, command(ckpt, rival.fixes)))
    return out


def _evidence(trial: Trial) -> list[str]:
    said = [
        f"undone, the loss falls from {trial.baseline:.3f} to {trial.loss:.3f} on {trial.tokens:,} tokens: by "
        f"{trial.gain.mean:.3f}, between {trial.gain.low:.3f} and {trial.gain.high:.3f} at 95 %"
    ]
    if trial.equal:
        said.append(f"the same model in other words: {', '.join(trial.equal)}")
    if len(trial.cases) > 1:
        said.append("undone together")
    if trial.doubtful:
        said.append("other faults undone on top of it help, too: the fault may be one that is not known here")
    return said


def _open(found: Findings) -> list[str]:
    """Numbers of the rotation that this text does not tell from those of the config."""
    if not found.open or found.cause is not None:
        return []
    names = ", ".join(t.fixes[0] for t in found.open)
    return [f"The text does not tell the rotation of the config from {names}: a longer one may (--text FILE)."]


def _lost(odd: Sequence[Oddity]) -> list[Cause]:
    """Tensors whose right values are gone; one cause for each kind."""
    by_fault: dict[str, list[Oddity]] = {}
    for oddity in odd:
        if oddity.fault and oddity.kind in _LOST:
            by_fault.setdefault(_LOST[oddity.kind], []).append(oddity)
    return [
        Cause(name, FAULTS[name].words, 0.99, [o.message for o in oddities[:8]]) for name, oddities in by_fault.items()
    ]


def _add_probe(ckpt: Checkpoint, probed: Probe | None, found: Findings | None, out: Weighed) -> None:
    if probed is None or not probed.odd:
        return
    words = probed.words()
    named = [c for c in out.causes if FAULTS[c.fault].kind == "order"] if out.causes else []
    if named:
        for cause in named:
            cause.evidence.append(words)
        return
    if found is not None and (found.sensible or out.causes):
        out.hints.append(f"{words[0].upper() + words[1:]}; running the model does not bear that out.")
        return
    fixes = probed.suspects(ckpt)[:3]
    for fix in fixes:  # several where the numbers leave open which of them it is
        case = parse_fix(fix)
        sure = min(probed.confidence, 0.999) / len(fixes)
        out.causes.append(Cause(case.name, case.words, sure, [words], None, command(ckpt, [fix])))
    if not fixes:
        out.hints.append(f"{words[0].upper() + words[1:]}, which no known mistake gives.")


def _add_numbers(ckpt: Checkpoint, odd: Sequence[Oddity], found: Findings | None, out: Weighed) -> None:
    """Odd tensors that something would undo."""
    for oddity in odd:
        if not oddity.fault or oddity.kind in _LOST:
            continue
        name = {"transposed": "transposed", "norm_convention": "norm-minus-one", "fresh": "damaged"}.get(oddity.kind)
        if name is None or (name == "damaged" and found is not None and found.sensible):
            out.hints.append(oddity.message)
            continue
        same = next((c for c in out.causes if c.fault == name), None)
        if same is not None:
            same.evidence.append(oddity.message)
        elif found is None:
            fixes = [fix for fix in suspects(ckpt, None, [oddity]) if parse_fix(fix).name == name]
            words = parse_fix(fixes[0]).words if fixes else FAULTS[name].words
            fix = command(ckpt, fixes[:1]) if fixes else None
            out.causes.append(Cause(name, words, _BY_NUMBERS, [oddity.message], None, fix))
        else:
            out.hints.append(f"{oddity.message} Running the model does not bear that out.")


def _add_comparison(ckpt: Checkpoint, compared: Any, out: Weighed) -> None:
    """What a good copy says, which outweighs what the loss says."""
    out.differs = bool(compared.differs)
    if not out.differs:
        out.hints += [f"Not borne out by the good copy, which is the same model: {c.words}." for c in out.causes]
        out.causes = []
        return
    found, ran = compared.found, {cause.fault: cause.loss for cause in out.causes}
    named = [agreement.case for agreement in found.undone]
    causes = [Cause(name, FAULTS[name].words, 0.99, [words], ran.get(name)) for name, words in found.lost]
    for case, equal in zip(named, found.equal, strict=True):
        said = [compared.message()]
        if equal:
            said.append(f"the same model in other words: {', '.join(equal)}")
        sure = 0.999 if compared.explained else 0.9
        causes.append(Cause(case.name, case.words, sure, said, ran.get(case.name), command(ckpt, found.fixes)))
    if causes:
        others = [c for c in out.causes if c.fault not in {cause.fault for cause in causes}]
        out.hints += [f"Not borne out by the good copy: {c.words}." for c in others]
        out.causes = causes
    else:
        out.hints.append(compared.message())
    out.hints += compared.where()
    if found.left and causes:
        out.hints.append(f"Not explained: {', '.join(found.left[:6])}{' …' if len(found.left) > 6 else ''}.")
