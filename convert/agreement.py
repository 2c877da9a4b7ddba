"""Which known faults make a checkpoint agree with a good copy of the same model: by tensors and config, without a run.

Every fault that touches a difference is undone, and what then still differs is counted; the one that leaves least is
kept, and the search goes on from there: faults that lie one over the other are found one by one. Tensors are compared
as :mod:`convert.tensor_comparison` does, so that neither types nor layouts are taken for faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from convert import undo
from convert.differences import Difference, config_differences
from convert.faults import FAULTS, Case, cases
from convert.rope import META_SCALING
from convert.tensor_comparison import compare_tensors
from convert.tensor_delta import TensorDelta
from convert.tensor_pairs import hub_name, hub_table

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.layout import Key
    from convert.views import View

#: Faults undone one on top of the other, at most.
DEEPEST = 4
#: Tensors that a fault touches which are looked at first.
_SAMPLES = 3
#: Differing tensors for which another layer's is looked for.
_COPIES = 16
#: Half a unit in the last place, relative; what a computed value (norm ± 1, times √D) may be off by, four of them.
_HALF_ULP = {"F64": 2.0**-53, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}
_ROUNDINGS = 4.0

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What is left of the differences with one fault undone, on top of those before it.

    Attributes:
        case: The fault, with its value.
        before: Tensors and config entries that differed.
        left: That still differ.
        error: Relative error of the tensors that it touches, ``||a - b|| / ||a||``, over all of them; 0: bit-equal.
        after: Fixes that were applied before this one.
    """

    case: Case
    before: int
    left: int
    error: float
    after: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether nothing differs any more."""
        return self.left == 0

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.case.name,
            "words": self.case.words,
            "fix": self.case.fix,
            "before": self.before,
            "left": self.left,
            "error": self.error,
            "agrees": self.agrees,
            "after": list(self.after),
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """What accounts for the differences of two checkpoints.

    Attributes:
        ranked: Faults that touch a difference, those that leave least first.
        undone: Faults that together explain the differences (as far as any does), in the order in which to undo them.
        equal: For each of them, fixes that would do the same.
        lost: Faults that nothing undoes, with what was seen.
        left: Names of tensors and config entries that nothing explains.
    """

    ranked: tuple[Agreement, ...] = ()
    undone: tuple[Agreement, ...] = ()
    equal: tuple[tuple[str, ...], ...] = ()
    lost: tuple[tuple[str, str], ...] = ()
    left: tuple[str, ...] = ()

    @property
    def fixes(self) -> list[str]:
        """What ``convert repair --fix`` takes, in order."""
        return [str(agreement.case.fix) for agreement in self.undone]

    def as_json(self, limit: int) -> dict[str, Any]:
        """Plain data, long lists cut."""
        return {
            "hypotheses": [a.as_json() for a in self.ranked[:limit]],
            "undone": [a.as_json() for a in self.undone],
            "equal": [list(fixes) for fixes in self.equal],
            "lost": [{"fault": name, "words": words} for name, words in self.lost],
            "left": list(self.left[:limit]),
        }


#: A fault tried: what it leaves of the tensors and of the config, and the checkpoint without it.
_Tried = tuple[Agreement, set[str], set[str], "View"]


def explain(
    src: Checkpoint,
    good: Checkpoint,
    tensors: Mapping[str, TensorDelta],
    config: Sequence[Difference],
    *,
    threads: int = 2,
    on_step: Tell | None = None,
) -> Explanation:
    """Find the faults that account for differences.

    Args:
        src: The checkpoint in doubt, matched without problems.
        good: The good copy.
        tensors: Differing tensors by their name in the common layout (A is the good copy).
        config: Differences of the configs that weigh.
        threads: Blocks read at once.
        on_step: Told what is being done.
    """
    search = _Search(src, good, tensors, threads, on_step or (lambda *_: None))
    return search.explained({d.key for d in config})


class _Search:
    """Which faults, undone one on top of the other, leave least of the differences."""

    def __init__(
        self, src: Checkpoint, good: Checkpoint, first: Mapping[str, TensorDelta], threads: int, tell: Tell
    ) -> None:
        self.src, self.good = src, good
        self.first = first
        self.threads, self.tell = threads, tell

    def explained(self, config: set[str]) -> Explanation:
        """Undo what helps most, look again at what is left, and so on."""
        state: Any = self.src
        tensors = set(self.first)
        undone: list[Agreement] = []
        equal: list[tuple[str, ...]] = []
        first: list[Agreement] = []
        for _ in range(DEEPEST):
            tried = self._tried(state, tensors, config, tuple(str(a.case.fix) for a in undone))
            first = first or [agreement for agreement, _, _, _ in tried]
            best = tried[0] if tried else None
            if best is None or best[0].left >= best[0].before:
                break
            undone.append(best[0])
            same = [t for t in tried[1:] if (t[1], t[2]) == (best[1], best[2])]
            equal.append(tuple(str(agreement.case.fix) for agreement, *_ in same))
            state, tensors, config = best[3].opened, best[1], best[2]
            if best[0].agrees:
                break
        lost, tensors = self._lost(state, tensors)
        return Explanation(
            ranked=tuple(first),
            undone=tuple(undone),
            equal=tuple(equal),
            lost=tuple(lost),
            left=(*sorted(tensors), *sorted(config)),
        )

    def _tried(self, state: Any, tensors: set[str], config: set[str], after: tuple[str, ...]) -> list[_Tried]:
        """Every fault that touches a difference: what is left with it undone, the best first."""
        out: list[_Tried] = []
        for case in self._cases(state):
            view = case.undo(state)
            if view is None or (not after and case.fix in {a.case.fix for a, *_ in out}):
                continue
            touched = _touched(state, view)
            changed = {d.key for d in config_differences(self.good, view.opened) if d.weighs}
            if not touched & tensors and changed >= config:
                continue
            self.tell(f"undoing: {case.fix}", 0, 0)
            deltas = self._sampled(view.opened, touched & tensors, case) or self._compare(view.opened, touched)
            still = {d.name for d in deltas if not self._agrees(d, case)}
            seen = {d.name for d in deltas}
            left, before = (tensors - seen) | still, len(tensors) + len(config)
            agreement = Agreement(case, before, len(left) + len(changed), _joint_error(deltas), after)
            out.append((agreement, left, changed, view))
        return sorted(out, key=lambda t: (t[0].left, t[0].error, t[0].case.kind == "numbers"))

    def _cases(self, state: Any) -> Iterable[Case]:
        """The known faults, and the numbers that the good copy has."""
        yield from cases(state)
        for kind, mine in undo.settings(self.good).items():
            prefix = "" if kind is None else f"{kind}:"
            yield Case(FAULTS["theta"], f"{prefix}{mine['rope_theta']:.10g}")
            kept = {key: mine.get(key) for key in META_SCALING if key != "original_max_position_embeddings"}
            if mine["rope_type"] == "linear":
                yield Case(FAULTS["scaling-dropped"], f"{prefix}linear:{mine['factor']:g}")
            elif mine["rope_type"] == "llama3" and all(kept[key] == META_SCALING[key] for key in kept):
                context = mine["original_max_position_embeddings"]
                yield Case(FAULTS["scaling-dropped"], f"{prefix}llama3:{mine['factor']:g}:{context}")

    def _compare(self, state: Any, names: set[str]) -> list[TensorDelta]:
        """The tensors of these names only, compared with the good copy's."""
        if not names:
            return []
        keep = [key for key in state.match.logical if hub_name(hub_table(state), key) in names]
        return [
            d
            for d in compare_tensors(_only(self.good, keep), _only(state, keep), threads=self.threads)
            if d.name in names
        ]

    def _sampled(self, state: Any, names: set[str], case: Case) -> list[TensorDelta]:
        """A few tensors, where none of them becomes the good copy's: then the others need not be read."""
        order = sorted(names)
        if len(order) <= 2 * _SAMPLES:
            return []
        chosen = {order[i * (len(order) - 1) // (_SAMPLES - 1)] for i in range(_SAMPLES)}
        deltas = self._compare(state, chosen)
        return [] if any(self._agrees(d, case) for d in deltas) else deltas

    def _agrees(self, delta: TensorDelta, case: Case) -> bool:
        """Whether a tensor is the good copy's; one that was computed, within the rounding of its type before."""
        if delta.same:
            return True
        before = self.first.get(delta.name)
        if case.kind != "values" or before is None or delta.error is None or delta.not_finite:
            return False
        grain = max(_HALF_ULP.get(kind or "", 0.0) for kind in delta.dtypes)
        return delta.error <= _ROUNDINGS * grain * (1.0 + (before.error or 0.0))

    def _lost(self, state: Any, left: set[str]) -> tuple[list[tuple[str, str]], set[str]]:
        """Copies of the good copy's other tensors in the place of those that differ; nothing brings these back."""
        found: list[tuple[str, str]] = []
        rest = set(left)
        pair = self.src.match.tied_pair()
        if pair is not None and undo.head_is_embedding(self.src) and not self.good.tied:
            name = hub_name(hub_table(self.src), pair[0])
            if name in rest:
                found.append(("head-replaced", f"{name!r} is a copy of the embedding; the good copy has another."))
                rest.discard(name)
        table = hub_table(state)
        keys = [key for key in state.match.logical if hub_name(table, key) in left and key[1] is not None]
        for key in keys if len(keys) <= _COPIES else []:
            donor = self._donor(state, key)
            if donor is not None:
                name, other = (hub_name(hub_table(state), k) for k in (key, donor))
                found.append(("duplicate", f"{name!r} holds the values of {other!r}; its own are lost."))
                rest.discard(name)
        return found, rest

    def _donor(self, state: Any, key: Key) -> Key | None:
        """The other layer of the good copy whose tensor this is, up to the rounding of its type."""
        from convert.views import view

        mine = state.match.logical[key]
        for other, source in self.good.match.logical.items():
            if other[0] == key[0] and other[1] != key[1] and source.shape == mine.shape:
                there = view(self.good, tensors={key: source}).opened
                deltas = list(compare_tensors(_only(there, [key]), _only(state, [key]), threads=self.threads))
                name = hub_name(hub_table(state), key)
                if any(d.name == name and d.same for d in deltas):
                    return other
        return None


def _only(ckpt: Any, keys: Iterable[Key]) -> Any:
    """A checkpoint with some of its tensors only; what compares it reads no others."""
    kept = set(keys)
    pair = ckpt.match.tied_pair()
    if pair is not None and pair[0] in kept:  # a head that is not stored is the embedding
        kept.add(pair[1])
    matched = ckpt.match
    slots = {name: slot for name, slot in matched.slots.items() if kept.intersection(slot.keys)}
    small = replace(ckpt)
    logical = {key: source for key, source in matched.logical.items() if key in kept}
    small.__dict__["match"] = replace(matched, checkpoint=small, slots=slots, logical=logical)
    return small


def _touched(state: Any, view: View) -> set[str]:
    """Names, in the common layout, of what a view changes or leaves out."""
    old, new = state.match.logical, view.opened.match.logical
    keys = [key for key in {**old, **new} if old.get(key) is not new.get(key)]
    return {hub_name(hub_table(state), key) for key in keys}


def _joint_error(deltas: Sequence[TensorDelta]) -> float:
    """Relative error of several tensors, each weighing the same."""
    errors = [d.error for d in deltas if d.error is not None]
    return (sum(e * e for e in errors) / len(errors)) ** 0.5 if errors else 0.0
