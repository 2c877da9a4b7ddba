"""Tensors that look wrong by their numbers alone: no model is run, and nothing is changed.

A *fault* is what no good checkpoint has (a tensor of zeros, one layer's matrix over another's, a transposed matrix); a
*remark* is what good ones may have too and a reader should know (a tensor much larger than in the other layers, rows
of the vocabulary that were never trained). Every finding gives its numbers and what they mean. What is *not* seen:
two layers exchanged, gate and up or two norms taken for each other (in all layers alike), and a transposed matrix in a
layer whose rows differ from those of the other layers anyway. Those show in the loss (:mod:`convert.diagnose`). The
order of the rows of Q and K is :mod:`convert.qk_probe`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.errors import Problem
from convert.layout import Key
from convert.samples import Floats, Sample, samples
from convert.scan import scan_checkpoint
from convert.tying import same_values
from convert.vocabulary_rows import Marks, dead_rows

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint

#: Spreads of rows and columns, as a multiple of what independent values have, that are called independent. In trained
#: models one of the two is above 1.9 (measured: SmolLM2 2.2, Gemma 3 270M 1.9 and more); drawn at random both are
#: within 0.8 and 1.2 where a hundred rows are looked at.
_INDEPENDENT = (0.7, 1.3)
#: Rows or columns that a matrix must have to be judged alone, and how many standard errors off chance they may be: the
#: spread of n norms is known to 1 / sqrt(2 n).
_ENOUGH, _ERRORS_OF_SPREAD = 500, 4.0
#: How much larger or smaller than in the other layers is a remark: a factor, and a multiple of their own spread. (The
#: first layer's norms are an eighth of the others' in SmolLM2.)
_FACTOR, _FACTOR_OF_VECTORS, _DEVIATIONS = 8.0, 30.0, 6.0
#: Correlation of a square matrix's profile with that of the others' other side, and its lead over the right side. In
#: good models it is within 0.12 (576 values; the standard error is 0.04).
_TURNED, _LEAD, _ERRORS = 0.3, 0.2, 6.0
#: Share of negative norm weights beyond which one is missing from all, and of those below one below which one too many
#: is there. Measured: SmolLM2 1 % negative, 97 % below one.
_NEGATIVE, _BELOW_ONE = 0.2, 0.01


@dataclass(frozen=True, slots=True)
class Oddity(Problem):
    """A finding, and whether it is a fault.

    Attributes:
        fault: Whether no good checkpoint has this; else it is a remark.
        tensors: All tensors that it is about.
    """

    fault: bool = True
    tensors: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The keys of a problem, ``fault`` and ``tensors``."""
        return {**Problem.as_json(self), "fault": self.fault, "tensors": list(self.tensors)}


def odd_tensors(
    ckpt: Checkpoint,
    *,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
    scanned: bool = False,
    looked: Sequence[Sample] | None = None,
) -> list[Oddity]:
    """Find what is odd about the tensors of a checkpoint.

    Args:
        ckpt: An opened checkpoint.
        threads: Blocks read at once.
        progress: Called with the bytes that the scan has read since the last call, from any thread.
        scanned: Leave out the scan of every value (NaN, infinities, zeros): it was done.
        looked: Samples of all tensors, where they have been taken.

    Returns:
        Faults first. Kinds: ``nan``, ``inf``, ``zeros``, ``constant``, ``duplicate``, ``transposed``,
        ``norm_convention``, ``fresh``, ``outlier``, ``head_equal``, ``head_differs``, ``dead_rows``.
    """
    found: list[Oddity] = []
    marks = Marks(ckpt)
    if not scanned:
        problems, _ = scan_checkpoint(ckpt, threads=threads, progress=progress, seen=marks.add)
        found += [_fault(p) for p in problems]
    bad = {p.tensor for p in found}
    taken = samples(ckpt, threads=threads) if looked is None else looked
    looked = [s for s in taken if s.name not in bad and np.isfinite(s.rms)]
    rows = ckpt.table.rows
    found += _constants(looked)
    found += _duplicates(ckpt, looked)
    found += _transposed(looked)
    found += _norms([s for s in looked if rows[s.key[0]].role == "norm"], zero_centered=ckpt.norm == "zero_centered")
    found += _fresh([s for s in looked if len(s.shape) == 2], looked)
    found += _outliers(looked)
    found += _head(ckpt)
    found += [Oddity(**p, fault=False) for p in dead_rows(ckpt, threads=threads, marks=marks)]
    return sorted(found, key=lambda oddity: not oddity.fault)


def _fault(problem: Problem) -> Oddity:
    fields = {name: getattr(problem, name) for name in Problem.__dataclass_fields__}
    return Oddity(**fields, tensors=(problem.tensor,) if problem.tensor else ())


def _constants(looked: Iterable[Sample]) -> Iterator[Oddity]:
    for s in looked:
        if len(s.shape) < 2 or s.std > 1e-6 * abs(s.mean) or s.mean == 0 or s.count < 2:
            continue
        yield Oddity(
            "constant",
            f"{s.name!r}: all {s.count:,} values that were looked at are {s.mean:.6g}.",
            tensor=s.name,
            found=s.mean,
            hint="A matrix that was filled with one number and never with weights; fetch or save it again.",
            tensors=(s.name,),
        )


def _duplicates(ckpt: Checkpoint, looked: Sequence[Sample]) -> Iterator[Oddity]:
    """Equal tensors of different places; whole layers that are alike are a remark, as some models are made so."""
    groups: dict[tuple[tuple[int, ...], bytes], list[Sample]] = {}
    for s in looked:
        if s.std > 1e-6 * abs(s.mean) and s.key[1] is not None and ckpt.table.rows[s.key[0]].copy is None:
            groups.setdefault((s.shape, s.digest), []).append(s)
    equal = [g for g in groups.values() if len(g) > 1 and all(_same(g[0], s) for s in g[1:])]
    tensors = {
        layer: sum(s.key[1] == layer and len(s.shape) > 1 for s in looked) for layer in {s.key[1] for s in looked}
    }
    alike: dict[tuple[int, ...], list[list[Sample]]] = {}
    for group in equal:
        alike.setdefault(tuple(sorted({s.key[1] for s in group if s.key[1] is not None})), []).append(group)
    for layers, found in alike.items():
        matrices = [g for g in found if len(g[0].shape) > 1]
        if len(layers) > 1 and matrices and len(matrices) == tensors.get(layers[0]):
            names = tuple(s.name for g in found for s in g)
            said = ", ".join(str(x) for x in layers)
            message = (
                f"layers {said} are the same in all their {len(matrices)} matrices, as where a model was made deeper."
            )
            yield Oddity("duplicate", message, found=list(layers), fault=False, tensors=names)
            continue
        for group in found:
            names = tuple(s.name for s in group)
            yield Oddity(
                "duplicate",
                f"{' and '.join(repr(n) for n in names)} hold the same values.",
                tensor=names[0],
                found=list(names),
                hint="One was copied over the other; which one is right the numbers do not tell. Fetch or save again.",
                tensors=names,
            )


def _same(a: Sample, b: Sample) -> bool:
    return a.source.dtype == b.source.dtype and same_values(a.source, b.source)


def _by_row(looked: Iterable[Sample]) -> Iterator[list[Sample]]:
    """The same tensor of all layers, at least four; experts are not compared."""
    rows: dict[tuple[str, tuple[int, ...]], list[Sample]] = {}
    for s in looked:
        if s.key[1] is not None and s.expert is None:
            rows.setdefault((s.key[0], s.shape), []).append(s)
    return (layers for layers in rows.values() if len(layers) >= 4)


def _transposed(looked: Iterable[Sample]) -> Iterator[Oddity]:
    """A square matrix whose rows look like the other layers' columns, and its columns not like theirs."""
    for layers in _by_row(s for s in looked if s.profiles is not None):
        by_row, by_column = (np.array([s.profiles[side] for s in layers if s.profiles]) for side in (0, 1))
        if not (np.isfinite(by_row).all() and np.isfinite(by_column).all()):
            continue
        by_row, by_column = (p - p.mean(1, keepdims=True) for p in (by_row, by_column))
        others = zip(_medians_of_others(by_row), _medians_of_others(by_column), strict=True)
        needed = max(_TURNED, _ERRORS / len(by_row[0]) ** 0.5)
        for number, (s, (rows, columns)) in enumerate(zip(layers, others, strict=True)):
            straight = max(_correlation(by_row[number], rows), _correlation(by_column[number], columns))
            turned = max(_correlation(by_column[number], rows), _correlation(by_row[number], columns))
            if turned < needed or turned < straight + _LEAD:
                continue
            yield Oddity(
                "transposed",
                f"{s.name!r} {list(s.shape)} looks transposed: its profile of norms goes with the other layers' with "
                f"rows and columns exchanged (correlation {turned:.2f}), and less as it is ({straight:.2f}).",
                tensor=s.name,
                found=turned,
                wanted=straight,
                hint=f"`convert repair SRC OUT --fix transpose={s.key[0]}@{s.key[1]}` turns it.",
                tensors=(s.name,),
            )


def _median(values: Floats | Sequence[float]) -> float:
    """As numpy's, which would import all of ``numpy.ma`` for it: 20 ms, more than everything that is judged here."""
    ordered = np.sort(values)
    return float(0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]))


def _medians_of_others(values: Floats) -> Floats:
    """For each row the median of all the other rows, column by column; sorted once for all of them."""
    ordered, ranks = np.sort(values, axis=0), values.argsort(0).argsort(0)
    count = len(values) - 1
    low, high = (np.where(ranks <= k, ordered[k + 1], ordered[k]) for k in ((count - 1) // 2, count // 2))
    return 0.5 * (low + high)


def _correlation(a: Floats, b: Floats) -> float:
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / size if size else 0.0


def _norms(norms: Sequence[Sample], *, zero_centered: bool) -> Iterator[Oddity]:
    """Norm weights as they act are positive, and some below one; else another convention was at work."""
    shift = 1.0 if zero_centered else 0.0
    acting = [
        v + shift for s in norms if (v := s.vector) is not None and s.std > 1e-3 and not s.key[0].endswith("bias")
    ]
    if not acting:
        return
    values = np.concatenate(acting)
    negative, below = float((values < 0).mean()), float((values < 1).mean())
    names = tuple(s.name for s in norms)
    how = "stored as weights minus one" if zero_centered else "stored as they act"
    numbers = {"negative": negative, "below_one": below, "median": _median(values)}
    said = f"{len(acting)} norms with {values.size:,} weights, {how}: median {numbers['median']:.3g}, "
    if negative > _NEGATIVE:
        yield Oddity(
            "norm_convention",
            f"{said}{negative:.0%} negative, as if one had been taken off every weight; trained ones are positive.",
            found=numbers,
            hint="`convert repair SRC OUT --fix norms-plus-one` adds it.",
            tensors=names,
        )
    elif below < _BELOW_ONE and 1 < numbers["median"] < 3:
        yield Oddity(
            "norm_convention",
            f"{said}{below:.1%} below one, as if one had been added to every weight.",
            found=numbers,
            hint="`convert repair SRC OUT --fix norms-minus-one` takes it off; the loss tells (`convert diagnose`).",
            fault=False,
            tensors=names,
        )


def _fresh(matrices: Sequence[Sample], looked: Sequence[Sample]) -> Iterator[Oddity]:
    """Matrices of independent numbers: nothing has been learned in them."""

    def drawn(s: Sample) -> bool:
        return all(_INDEPENDENT[0] < x < _INDEPENDENT[1] for x in (s.row_spread, s.column_spread)) and s.kurtosis < 3.5

    random = [s for s in matrices if drawn(s)]
    if not random:
        return
    names = tuple(s.name for s in random)
    if len(random) > 0.9 * len(matrices):
        ones = sum(s.vector is not None and s.std == 0 for s in looked)
        yield Oddity(
            "fresh",
            f"the model looks untrained: {len(random)} of {len(matrices)} matrices hold independent numbers "
            f"({_law(random)}); {ones} vectors are constant.",
            found=len(random),
            fault=False,
            tensors=names,
        )
        return
    for s in random:
        known = ((s.row_spread, s.rows), (s.column_spread, s.shape[1]))
        if max(n for _, n in known) < _ENOUGH or any(abs(x - 1) > _ERRORS_OF_SPREAD / (2 * n) ** 0.5 for x, n in known):
            continue
        yield Oddity(
            "fresh",
            f"{s.name!r} looks freshly initialised, unlike the model's other matrices: independent numbers "
            f"({_law([s])}); the norms of its rows and columns differ {s.row_spread:.2f} and {s.column_spread:.2f} "
            "times as much as by chance.",
            tensor=s.name,
            found=s.std,
            hint="It was missing when the model was loaded and saved (loaders fill such tensors at random); fetch it.",
            tensors=(s.name,),
        )


def _law(random: Sequence[Sample]) -> str:
    kurtosis, std = (_median([getattr(s, part) for s in random]) for part in ("kurtosis", "std"))
    shape = "uniform" if kurtosis < 2.1 else "normal" if kurtosis > 2.8 else "truncated normal"
    return f"{shape} distribution, standard deviation {std:.3g}"


def _outliers(looked: Iterable[Sample]) -> Iterator[Oddity]:
    for layers in _by_row(looked):
        sizes = np.log([max(s.rms, 1e-30) for s in layers])
        middles = _medians_of_others(sizes[:, None])[:, 0]
        for number, s in enumerate(layers):
            middle = float(middles[number])
            away = abs(float(sizes[number]) - middle)
            if away < np.log(_FACTOR if len(s.shape) > 1 else _FACTOR_OF_VECTORS):
                continue
            spread = 1.4826 * _median(np.abs(np.delete(sizes, number) - middle))
            near = np.abs(sizes - sizes[number])
            if away < _DEVIATIONS * spread or np.sort(near)[1] < 0.5 * away:
                continue
            factor = float(np.exp(sizes[number] - middle))
            yield Oddity(
                "outlier",
                f"{s.name!r} is {factor:.3g} times as large as in the other layers (root mean square {s.rms:.3g}).",
                tensor=s.name,
                found=s.rms,
                wanted=float(np.exp(middle)),
                hint="Some models have such a layer; a wrong scale makes one too. `convert diagnose` runs the model.",
                fault=False,
                tensors=(s.name,),
            )


def _head(ckpt: Checkpoint) -> Iterator[Oddity]:
    """A head that is the embedding although the config says they differ, or the other way round."""
    matched = ckpt.match
    pair = matched.tied_pair()
    if pair is None or any(key not in matched.logical for key in pair):
        return
    head, base = (matched.logical[key] for key in pair)
    stated = ckpt.raw_config.get("tie_word_embeddings")
    names = tuple(_name(ckpt, key) for key in pair)
    if head is base or not isinstance(stated, bool) or ckpt.layout != "hf":
        return
    same = matched.tied(sampled=False)
    if same and not stated:
        yield Oddity(
            "head_equal",
            f"{names[0]!r} and {names[1]!r} hold the same values, but the config says tie_word_embeddings = false.",
            tensor=names[0],
            found="equal",
            wanted="different",
            hint="A tied model whose flag is wrong, which does no harm; or the model's own head was lost.",
            fault=False,
            tensors=names,
        )
    if not same and stated:
        yield Oddity(
            "head_differs",
            f"{names[0]!r} and {names[1]!r} differ, but the config says tie_word_embeddings = true.",
            tensor=names[0],
            found="different",
            wanted="equal",
            hint="Loaders that go by the flag replace the head by the embedding; set it to false if the head is right.",
            fault=False,
            tensors=names,
        )


def _name(ckpt: Checkpoint, key: Key) -> str:
    return next((s.name for s in ckpt.match.slots.values() if key in s.keys), key[0])
