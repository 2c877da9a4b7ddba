"""In which order the rotary rows of Q and K really are, from the numbers alone: no model is run.

In a trained model with rotary positions the rows of a head that turn at like frequencies have like norms, and the two
rows of one pair most of all. Every order in which rows can have been left (:mod:`convert.row_orders`) says which rows
those are; the order that explains the distances between the rows' norms best is the one the file has. Untrained
weights show no order, and "cannot tell" is the answer. Nothing is changed; what a wrong order does to the loss is
:mod:`convert.diagnose`'s to find.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from convert.cast import to_float32
from convert.errors import ConvertError, Problem
from convert.match import as_reference
from convert.row_orders import Order, classes, fault
from convert.source import Source

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint

#: What ``inspect`` and ``validate`` read at most.
SAMPLE_BYTES = 32 << 20
#: The chance of being wrong at which an order is named, and at which a file that disagrees is called broken.
NAMED, BROKEN = 1e-3, 1e-6
#: From so many layers on a layer is one observation; in flatter models each head is.
_LAYERS = 8
#: Heads of four rows have three pairings, too few to tell an order from chance.
_NARROWEST = 6
_BLOCK_BYTES = 2 << 20

Floats = NDArray[np.float64]
#: Of one head: fits by order, then h, i and r.
_HeadFit = tuple[dict[Order, float], float, float, float]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the rows of Q, of K, or of both say.

    Attributes:
        order: The order that explains them best; None where the next best explains them nearly as well.
        chance: An upper bound of the chance that another order is the true one: Student's t of the lead over the
            second best, over layers (over heads in a model of few layers), times the number of pairs of orders.
        fits: Share of the distances' variance that each order explains, mean over heads (the variogram's R²).
        half: Mean |log(norm_a / norm_b)| of the two rows of a pair if pairs are (i, i + d/2).
        interleaved: The same if they are (2i, 2i + 1).
        random: The same over all pairs of rows of a head.
        heads: Heads that were looked at.
    """

    order: Order | None
    chance: float
    fits: Mapping[Order, float]
    half: float
    interleaved: float
    random: float
    heads: int

    def as_json(self) -> dict[str, Any]:
        """The keys under ``q``, ``k`` and ``both``."""
        return {
            "order": str(self.order) if self.order else None,
            "confidence": 1 - self.chance,
            "h": self.half,
            "i": self.interleaved,
            "r": self.random,
            "heads": self.heads,
            "fits": {str(order): fit for order, fit in sorted(self.fits.items(), key=lambda item: -item[1])},
        }

    def ratios(self) -> str:
        """The ratios in words."""
        r = self.random or math.nan
        return f"h/r {self.half / r:.2f}, i/r {self.interleaved / r:.2f}"


@dataclass(frozen=True, slots=True)
class Probe:
    """The outcome of :func:`probe`.

    Attributes:
        expected: The order that the layout (or ``--qk-layout``) says: ``half`` or ``interleaved``.
        q: Evidence of the rows of Q, or None where there are none.
        k: Of K.
        both: Of the two together.
        nbytes: Bytes read.
        sampled: Whether some heads were left out.
    """

    expected: str
    q: Evidence | None = None
    k: Evidence | None = None
    both: Evidence | None = None
    nbytes: int = 0
    sampled: bool = False

    @property
    def order(self) -> str | None:
        """``half`` or ``interleaved`` if Q and K are in that order; None: cannot tell, or another order (see q, k)."""
        if self.both is None or self.both.order is None or self.both.order.moved or self.odd:
            return None
        base = self.both.order.base
        alone = (e.order for e in (self.q, self.k) if e and e.order)
        return base if all(order == Order(base) for order in alone) else None

    @property
    def odd(self) -> dict[str, Order]:
        """Which of ``q`` and ``k`` is in another order than the expected one, and in which: broken beyond doubt."""
        out = {}
        for name, found in (("q", self.q), ("k", self.k)):
            if found and found.order and found.chance <= BROKEN and found.order != Order(self.expected):
                out[name] = found.order
        both = self.both
        if not out and both and both.order and both.chance <= BROKEN and both.order != Order(self.expected):
            return {"q": both.order, "k": both.order}
        return out

    @property
    def agrees(self) -> bool | None:
        """Whether the numbers say what the layout says; None: cannot tell."""
        if self.odd:
            return False
        return True if self.order == self.expected else None

    @property
    def confidence(self) -> float:
        """Of ``order``, or of there being another one; 0 where nothing can be told."""
        odd = [e.chance for name, e in (("q", self.q), ("k", self.k)) if e and name in self.odd and e.order]
        if odd:
            return 1 - max(odd)
        return 1 - self.both.chance if self.both and self.both.order else 0.0

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
        }

    def words(self) -> str:
        """One line: what the numbers say, on which evidence."""
        if self.both is None:
            return "no rows to judge by"
        seen = f"{'sampled' if self.sampled else 'all'} {self.both.heads} heads"
        if self.odd:
            which = " and ".join(n.upper() for n in self.odd)
            order = " / ".join(dict.fromkeys(o.words for o in self.odd.values()))
            evidence = "; ".join(f"{n.upper()}: {e.ratios()}" for n, e in (("q", self.q), ("k", self.k)) if e)
            return f"the numbers say that the rows of {which} are in {order} ({seen}; {evidence})"
        if self.order is None:
            return f"the numbers do not tell ({seen}: {self.both.ratios()}), as in untrained weights"
        return f"the numbers say {self.order} order ({seen}: {self.both.ratios()})"

    def problem(self, ckpt: Checkpoint) -> Problem | None:
        """The finding that ``validate`` reports where numbers and layout disagree."""
        if not self.odd:
            return None
        why = "as --qk-layout says" if ckpt.options.qk_layout else f"as the {ckpt.layout} layout has it"
        return Problem(
            "qk_order",
            f"{self.words()}; it should be {self.expected} order, {why}. "
            f"The chance of a false alarm is below {max(1 - self.confidence, 1e-12):.0e}.",
            found={name: str(order) for name, order in self.odd.items()},
            wanted=self.expected,
            hint=self._cure(ckpt),
        )

    def suspect(self, ckpt: Checkpoint) -> str | None:
        """What ``convert repair --fix`` takes to undo it; None where nothing is odd, or no known mistake does it."""
        named = fault(self.odd, self.expected)
        if named is None:
            return None
        from convert.faults import FAULTS

        name, block = named
        fix = FAULTS[name].fix
        return f"{fix}={ckpt.dims['K'] * ckpt.dims['hd'] // block}" if block else fix

    def _cure(self, ckpt: Checkpoint) -> str:
        fix = self.suspect(ckpt)
        if fix is None:
            return "`convert diagnose` tries what would undo it, and says what the loss is then."
        repair = f"`convert repair SRC OUT --fix {fix}` writes the rows in the order that the layout has"
        found = set(self.odd.values())
        options = {Order("interleaved"): "meta", Order(ckpt.table.convention_of("hf", "rope")): "hf"}
        option = options.get(found.pop()) if len(self.odd) == 2 and len(found) == 1 else None
        return f"--qk-layout {option} reads the rows as they are; {repair}." if option else f"{repair}."


@dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor whose rows are heads of rotary pairs."""

    name: str
    layer: int | None
    source: Source
    heads: int
    rotary: int
    blocks: tuple[int, ...]  # rows per head if the tensor had one of the other head counts

    @property
    def size(self) -> int:
        return self.source.shape[0] // self.heads


def probe(ckpt: Checkpoint, *, max_bytes: int | None = None, threads: int = 2) -> Probe:
    """Find the order of the rotary rows of Q and K.

    Args:
        ckpt: An opened checkpoint.
        max_bytes: Read at most so many bytes, of heads spread over all layers; None: all of Q and K.
        threads: Blocks read at once.
    """
    tensors = list(_rotary(ckpt))
    chosen, sampled = _choose(tensors, max_bytes)
    found: dict[str, list[tuple[int | None, _HeadFit]]] = {"q": [], "k": []}
    nbytes = 0
    with ThreadPoolExecutor(max(1, threads)) as workers:
        for rows, read in zip([r for r, _, _ in chosen], workers.map(_norms, chosen), strict=True):
            if read is None:
                continue
            norms, count = read
            nbytes += count
            found[rows.name] += [(rows.layer, fit) for fit in _fit(norms, rows)]
    q, k = (_judge(found[name]) for name in ("q", "k"))
    return Probe(ckpt.pairing, q, k, _judge(found["q"] + found["k"]), nbytes, sampled)


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
        yield _Rows(names[row_id], layer, plain, heads, rotary, blocks)


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


def _norms(run: tuple[_Rows, int, int]) -> tuple[Floats, int] | None:
    """Logarithms of the rows' norms, ``[heads, rows that turn]``; None where the file cannot be read."""
    rows, first, last = run
    try:
        block = rows.source.read(first * rows.size, last * rows.size)
    except ConvertError:  # said by who checks the files
        return None
    wide = to_float32(block, rows.source.dtype).reshape(last - first, rows.size, -1)[:, : rows.rotary]
    with np.errstate(all="ignore"):
        squares = np.einsum("hrc,hrc->hr", wide, wide).astype(np.float64)
        return 0.5 * np.log(squares), block.nbytes


def _fit(norms: Floats, rows: _Rows) -> Iterator[_HeadFit]:
    """How well each order explains each head; heads that hold no numbers, zeros or all the same are passed over."""
    width = norms.shape[1]
    if width < _NARROWEST or width % 2:
        return
    upper = np.triu_indices(width, 1)
    for head in norms:
        if not np.isfinite(head).all():
            continue
        apart = np.abs(head[:, None] - head[None, :])[upper]
        mean = float(apart.mean())
        spread = float(((apart - mean) ** 2).sum())
        if mean < 1e-5 or spread == 0:  # equal norms: what differs is rounding
            continue
        fits = {}
        for order, (kind, count) in classes(width, rows.blocks).items():
            inside = np.bincount(kind, apart) / count - mean
            fits[order] = float((count * inside**2).sum()) / spread
        half = float(np.abs(head[: width // 2] - head[width // 2 :]).mean())
        yield fits, half, float(np.abs(head[::2] - head[1::2]).mean()), mean


def _judge(found: Sequence[tuple[int | None, _HeadFit]]) -> Evidence | None:
    """The best order, and how sure it is."""
    if not found:
        return None
    shared = [o for o in found[0][1][0] if all(o in fits for _, (fits, _, _, _) in found)]
    table = np.array([[fits[o] for o in shared] for _, (fits, _, _, _) in found])
    layers = np.array([-1 if layer is None else layer for layer, _ in found])
    h, i, r = (float(np.mean([f[n] for _, f in found])) for n in (1, 2, 3))
    units = table
    if len(np.unique(layers)) >= _LAYERS:
        units = np.array([table[layers == layer].mean(0) for layer in np.unique(layers)])
    mean = units.mean(0)
    ranked = np.argsort(-mean)
    best = int(ranked[0])
    pairs = len(shared) * (len(shared) - 1) / 2
    # Relative to their sum: layers differ in how much order they show, and the strong ones would drown the others.
    leads = ((units[:, best] - units[:, int(x)]) / (units[:, best] + units[:, int(x)]) for x in ranked[1:])
    chance = max((student(lead) for lead in leads), default=1.0)
    chance = min(1.0, chance * pairs)
    fits = {order: float(fit) for order, fit in zip(shared, table.mean(0), strict=True)}
    return Evidence(shared[best] if chance <= NAMED else None, chance, fits, h, i, r, len(found))


def student(values: Floats) -> float:
    """The chance of a mean as large as that of ``values`` if the true one were zero (one-sided Student's t).

    By Wallace's normal approximation of t, good to a percent or so of the exponent from two observations on.
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
