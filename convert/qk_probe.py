"""In which order the rotary rows of Q and K really are, from the numbers alone: no model is run.

In a trained model with rotary positions the rows of a head that turn at like frequencies have like norms, and the two
rows of one pair most of all. Every order in which rows can have been left (:mod:`convert.row_orders`) says which rows
those are; the order in which the norms of near rows go together best is the one the file has
(:mod:`convert.row_evidence`). Untrained weights show no order, and "cannot tell" is the answer. Nothing is changed;
what a wrong order does to the loss is :mod:`convert.diagnose`'s to find.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.cast import to_float32
from convert.errors import ConvertError, Problem
from convert.layout import Key
from convert.match import as_reference
from convert.row_evidence import BROKEN as BROKEN
from convert.row_evidence import NAMED as NAMED
from convert.row_evidence import Evidence, Fits, Floats, Scenario, evidence, fit, is_plain, weigh
from convert.row_evidence import student as student
from convert.row_orders import Order, fault
from convert.source import Source

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint

#: What ``inspect`` and ``validate`` read at most.
SAMPLE_BYTES = 32 << 20
_BLOCK_BYTES = 2 << 20
#: Chances are not said to be smaller: norms are not that normal.
_SMALLEST = 1e-12


@dataclass(frozen=True, slots=True)
class Probe:
    """The outcome of :func:`probe`.

    Attributes:
        expected: The order that the layout (or ``--qk-layout``) says: ``half`` or ``interleaved``.
        q: Evidence of the rows of Q, or None where there are none.
        k: Of K.
        both: Of the two together.
        scenarios: What can be the case, the best first.
        nbytes: Bytes of the values that were looked at.
        sampled: Whether some heads were left out.
    """

    expected: str
    q: Evidence | None = None
    k: Evidence | None = None
    both: Evidence | None = None
    scenarios: tuple[Scenario, ...] = ()
    nbytes: int = 0
    sampled: bool = False

    @property
    def wrong(self) -> float:
        """The chance that Q and K are in the expected order after all; 1 if that fits best, or nothing is known."""
        right = Order(self.expected)
        return next((max(s.chance, _SMALLEST) for s in self.scenarios if (s.q, s.k) == (right, right)), 1.0)

    @property
    def odd(self) -> dict[str, Order]:
        """Which of ``q`` and ``k`` is in another order than the expected one, and in which: broken beyond doubt."""
        if self.wrong > BROKEN:
            return {}
        present = [name for name in ("q", "k") if getattr(self, name)]
        return {name: o for name, o in self.scenarios[0].odd(self.expected).items() if name in present}

    @property
    def order(self) -> str | None:
        """``half`` or ``interleaved`` if Q and K are in that order; None: cannot tell, or another order."""
        if not self.scenarios or self._doubt > NAMED:
            return None
        best = self.scenarios[0]
        return best.q.base if best.q == best.k and best.q.moved is None else None

    @property
    def _doubt(self) -> float:
        """The chance of the likeliest of the other plain scenarios."""
        return max((s.chance for s in self.scenarios[1:] if is_plain(s)), default=1.0)

    @property
    def agrees(self) -> bool | None:
        """Whether the numbers say what the layout says; None: cannot tell."""
        if self.odd:
            return False
        return True if self.order == self.expected else None

    @property
    def confidence(self) -> float:
        """Of ``order``, or of there being another one than expected; 0 where nothing can be told."""
        if self.odd:
            return 1 - self.wrong
        return 1 - max(self._doubt, _SMALLEST) if self.order else 0.0

    def as_json(self) -> dict[str, Any]:
        """The object ``probe`` in ``diagnose --json``; its keys are documented and stable."""
        return {
            "order": self.order,
            "expected": self.expected,
            "agrees": self.agrees,
            "confidence": self.confidence,
            "odd": {name: str(order) for name, order in self.odd.items()},
            "bytes": self.nbytes,
            "sampled": self.sampled,
            **{n: e.as_json() if e else None for n, e in (("q", self.q), ("k", self.k), ("both", self.both))},
            "scenarios": [{"q": str(s.q), "k": str(s.k), "fit": s.fit, "chance": s.chance} for s in self.scenarios[:8]],
        }

    def words(self) -> str:
        """One line: what the numbers say, on which evidence."""
        if self.both is None:
            return "no rows to judge by"
        seen = f"{'sampled' if self.sampled else 'all'} {self.both.heads} heads"
        if self.odd:
            which = " and ".join(n.upper() for n in self.odd)
            order = " / ".join(dict.fromkeys(o.words for o in self.odd.values()))
            doubt = "" if len(self._possible) == 1 else ", or in another that is as wrong"
            ratios = "; ".join(f"{n.upper()}: {e.ratios()}" for n, e in (("q", self.q), ("k", self.k)) if e)
            return f"the numbers say that the rows of {which} are in {order}{doubt} ({seen}; {ratios})"
        if self.order is None:
            return f"the numbers cannot tell ({seen}: {self.both.ratios()})"
        return f"the numbers say {self.order} order ({seen}: {self.both.ratios()})"

    @property
    def _possible(self) -> list[Scenario]:
        """Scenarios that are not ruled out, other than that all is well."""
        right = Order(self.expected)
        return [s for s in self.scenarios if s.chance > NAMED and (s.q, s.k) != (right, right)]

    def suspects(self, ckpt: Checkpoint) -> list[str]:
        """What ``convert repair --fix`` takes to undo what can be wrong, likeliest first; empty if nothing is odd."""
        if not self.odd:
            return []
        from convert.faults import FAULTS

        found = []
        for scenario in self._possible:
            named = fault({n: o for n, o in scenario.odd(self.expected).items() if getattr(self, n)}, self.expected)
            if named is not None:
                fix = FAULTS[named[0]].fix
                found.append(f"{fix}={ckpt.dims['K'] * ckpt.dims['hd'] // named[1]}" if named[1] else str(fix))
        return found

    def suspect(self, ckpt: Checkpoint) -> str | None:
        """The fix, where there is only one; None where nothing is odd, or it is not clear what is wrong."""
        found = self.suspects(ckpt)
        return found[0] if len(found) == len(self._possible) == 1 else None

    def problem(self, ckpt: Checkpoint) -> Problem | None:
        """The finding that ``validate`` reports where numbers and layout disagree."""
        if not self.odd:
            return None
        why = "as --qk-layout says" if ckpt.options.qk_layout else f"as the {ckpt.layout} layout has it"
        return Problem(
            "qk_order",
            f"{self.words()}; it should be {self.expected} order, {why}. "
            f"The chance of a false alarm is below {self.wrong:.0e}.",
            found={name: str(order) for name, order in self.odd.items()},
            wanted=self.expected,
            hint=self._cure(ckpt),
        )

    def _cure(self, ckpt: Checkpoint) -> str:
        fix = self.suspect(ckpt)
        if fix is None:
            return "`convert diagnose` tries what would undo it, and says what the loss is then."
        repair = f"`convert repair SRC OUT --fix {fix}` writes the rows in the order that the layout has"
        best = self.scenarios[0]
        options = {Order("interleaved"): "meta", Order(ckpt.table.convention_of("hf", "rope")): "hf"}
        option = options.get(best.q) if best.q == best.k else None
        return f"--qk-layout {option} reads the rows as they are; {repair}." if option else f"{repair}."


@dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor whose rows are heads of rotary pairs."""

    name: str
    key: Key
    source: Source
    heads: int
    rotary: int
    blocks: tuple[int, ...]  # rows per head if the tensor had one of the other head counts

    @property
    def size(self) -> int:
        return self.source.shape[0] // self.heads


def probe(
    ckpt: Checkpoint,
    *,
    max_bytes: int | None = None,
    threads: int = 2,
    known: Mapping[Key, Floats] | None = None,
) -> Probe:
    """Find the order of the rotary rows of Q and K.

    Args:
        ckpt: An opened checkpoint.
        max_bytes: Read at most so many bytes, of heads spread over all layers; None: all of Q and K.
        threads: Blocks read at once.
        known: Logarithms of the norms of all rows of tensors that need not be read for it.
    """
    tensors = list(_rotary(ckpt))
    chosen, sampled = _choose(tensors, max_bytes)
    norms = partial(_norms, known or {})
    with ThreadPoolExecutor(max(1, threads)) as workers:
        done = zip(chosen, workers.map(norms, chosen), strict=True)
        read = [(run[0], *found) for run, found in done if found is not None]
    heads: list[Fits] = []
    for (name, blocks, _), same in groupby(read, lambda r: (r[0].name, r[0].blocks, r[1].shape[1])):
        runs = list(same)
        layers = [rows.key[1] for rows, logs, _ in runs for _ in logs]
        fits = fit(name, layers, np.concatenate([logs for _, logs, _ in runs]), blocks)
        heads += [fits] if fits else []
    nbytes = sum(count for _, _, count in read)
    q, k = ([f for f in heads if f.name == name] for name in ("q", "k"))
    told = weigh([*q, *k], ckpt.pairing)
    return Probe(ckpt.pairing, evidence(q), evidence(k), evidence(heads), tuple(told), nbytes, sampled)


def _rotary(ckpt: Checkpoint) -> Iterator[_Rows]:
    """The matrices whose rows turn."""
    table = ckpt.table
    rows = [r for r in table.rows.values() if r.rope is not None and r.in_block and len(r.shape) == 2]
    names = {row.id: "q" if row.id.endswith(".q") else "k" for row in rows}
    for (row_id, layer), source in ckpt.match.logical.items():
        if row_id not in names:
            continue
        row = table.rows[row_id]
        try:
            counts = {r.id: int(ckpt.dims.value(r.rope, layer)) for r in rows if r.rope is not None}
            plain = as_reference(ckpt, row, layer, source)
            heads = counts[row_id]
            size = plain.shape[0] // heads
            rotary = int(ckpt.dims.value(row.rotary, layer)) if row.rotary is not None else size
        except ConvertError:  # the config does not go with the tensors, which is said elsewhere
            continue
        wrong = {n for i, n in counts.items() if i != row_id} if names[row_id] == "k" and rotary == size else set()
        wrong |= {n // heads for n in wrong}
        blocks = tuple(sorted(heads * size // n for n in wrong - {heads, 0} if heads * size % n == 0))
        yield _Rows(names[row_id], (row_id, layer), plain, heads, rotary, blocks)


def _choose(tensors: Sequence[_Rows], max_bytes: int | None) -> tuple[list[tuple[_Rows, int, int]], bool]:
    """Runs of heads ``(tensor, first head, one past the last)``, each at most a block."""
    total = sum(t.source.row_bytes * t.source.shape[0] for t in tensors)
    if max_bytes is None or total <= max_bytes:
        runs = []
        for t in tensors:
            step = t.heads if t.source.whole else max(1, _BLOCK_BYTES // max(1, t.source.row_bytes * t.size))
            runs += [(t, at, min(at + step, t.heads)) for at in range(0, t.heads, step)]
        return runs, False
    picked: list[tuple[_Rows, int, int]] = []
    for name in ("q", "k"):
        heads = [(t, h) for t in tensors if t.name == name and not t.source.whole for h in range(t.heads)]
        if not heads:
            continue
        largest = max(t.source.row_bytes * t.size for t, _ in heads)
        count = min(len(heads), max_bytes // 2 // largest)
        at = sorted({int(x) for x in np.linspace(0, len(heads) - 1, count)})
        picked += [(heads[i][0], heads[i][1], heads[i][1] + 1) for i in at]
    return picked, True


def _norms(known: Mapping[Key, Floats], run: tuple[_Rows, int, int]) -> tuple[Floats, int] | None:
    """Logarithms of the rows' norms, ``[heads, rows that turn]``, and bytes; None where the file cannot be read."""
    rows, first, last = run
    if rows.key in known:
        logs = known[rows.key].reshape(rows.heads, rows.size)
        return logs[first:last, : rows.rotary], rows.source.row_bytes * rows.size * (last - first)
    try:
        block = rows.source.read(first * rows.size, last * rows.size)
    except ConvertError:  # said by who checks the files
        return None
    wide = to_float32(block, rows.source.dtype).reshape(last - first, rows.size, -1)[:, : rows.rotary]
    with np.errstate(all="ignore"):
        squares = np.einsum("hrc,hrc->hr", wide, wide).astype(np.float64)
        return 0.5 * np.log(squares), block.nbytes
