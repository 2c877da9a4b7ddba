"""By how much two tensors differ: the figures of one pair, gathered from blocks of values.

Sums are of float32 products over short runs, added up in float64, so they do not depend on the size of a tensor. What
is read, and in which order, is :mod:`convert.tensor_comparison`'s business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convert.block_error import block_error
from convert.cast import Array, cast, to_float32
from convert.dtypes import DTYPES

#: What two tensors have in common, best first.
RELATIONS = ("equal", "turned", "rounded", "close", "reordered", "different", "shape", "only_a", "only_b")
#: Relations of tensors that hold the same weights, as far as their types can tell.
SAME = frozenset(("equal", "turned", "rounded", "close"))

#: Squared error over that of the imitated quantiser (:mod:`convert.block_error`). Two independent roundings give 2.
BLOCK_MARGIN = 4.0
#: Rounding of values that are computed in float32 on the way (norms with or without the one in them): units in the last
#: place of a value of at least 1, four of them.
_COMPUTED = 4 * 2.0**-23
#: Values handled at a time, and products that are added up in float32.
PIECE, _RUN = 1 << 18, 1 << 10


@dataclass(frozen=True, slots=True)
class TensorDelta:
    """How one tensor differs between A and B, in the common (Hugging Face) layout.

    Attributes:
        name: Its name there; of a tensor that only a part of a fused one holds, with the part's name.
        row: ``layer 3``, or ``top`` outside the layers.
        column: The name without the layer.
        relation: ``equal``: bit for bit, after widening. ``turned``: the same, and the two layouts keep rotary rows in
            different orders, as they say. ``rounded``: the values of one side rounded to the other's type. ``close``:
            within the tolerance asked for, or as far apart as a block-quantised type makes them. ``reordered``: the
            same rows in another order. ``different``, ``shape``, ``only_a``, ``only_b``.
        shapes: Of A and B; None where there is none.
        dtypes: As stored in A and B (``F32`` …, ``Q8_0`` …).
        max_abs: The largest |a - b| of finite values; None where there is nothing to compare.
        error: ``||a - b|| / ||a||``.
        cosine: Of the angle between a and b, all values taken as one vector.
        changed: Share of elements, 0 to 1, that are not bit-equal after widening.
        count: How many that are.
        beyond: How many lie outside the tolerance, where one was asked for.
        not_finite: How many are NaN or infinite on one side, and not the same on the other.
        where: Index, in the tensor, of the largest |a - b|.
        note: What there is to add: where a tied head was taken from, to which type values were rounded.
        turned: Whether the two layouts keep its rotary rows in different orders.
    """

    name: str
    row: str
    column: str
    relation: str
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    dtypes: tuple[str | None, str | None]
    max_abs: float | None = None
    error: float | None = None
    cosine: float | None = None
    changed: float | None = None
    count: int | None = None
    beyond: int | None = None
    not_finite: int = 0
    where: tuple[int, ...] | None = None
    note: str | None = None
    turned: bool = False

    @property
    def same(self) -> bool:
        """Whether both sides hold the same weights, as far as their types can tell."""
        return self.relation in SAME

    def as_json(self) -> dict[str, Any]:
        """As ``diff --json`` shows it."""
        shapes = [None if s is None else list(s) for s in self.shapes]
        return {
            "name": self.name,
            "relation": self.relation,
            "max_abs": self.max_abs,
            "error": self.error,
            "cosine": self.cosine,
            "changed": self.changed,
            "count": self.count,
            "beyond": self.beyond,
            "not_finite": self.not_finite,
            "where": None if self.where is None else list(self.where),
            "shape": shapes[0] if shapes[0] == shapes[1] else shapes,
            "dtype": self.dtypes[0] if self.dtypes[0] == self.dtypes[1] else list(self.dtypes),
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Rules:
    """How a pair is judged.

    Attributes:
        types: Plain types of the blocks that come in.
        stored: Types in the files; block-quantised ones are widened before they come in.
        tolerance: ``(atol, rtol)``: a is good within atol + rtol * |a|; None: bits decide.
        computed: Values pass through float32 arithmetic on the way to the common layout.
    """

    types: tuple[str, str]
    stored: tuple[str, str]
    tolerance: tuple[float, float] | None = None
    computed: bool = False

    @property
    def quantized(self) -> bool:
        """Whether the block-quantised type of one side explains a difference: not where both have the same one."""
        return self.stored[0] != self.stored[1] and any(DTYPES[s].is_quantized for s in self.stored if s in DTYPES)


@dataclass(slots=True)
class Tally:
    """Sums over the blocks of one pair, or of one block; :meth:`add` joins them.

    Attributes:
        size: Elements.
        changed: Elements whose bits differ after widening.
        beyond: Elements outside the tolerance.
        not_finite: See :class:`TensorDelta`.
        largest: The largest |a - b|, and ``at``, where it is (flat index).
        dd, aa, bb, ab: Sums of squared differences and of products.
        expected: Sum of squared errors that the block-quantised type of a side would make.
        rounds: Whether a rounded to b's type is b, and b rounded to a's type is a.
        near: Whether no difference exceeds the rounding of values computed in float32.
    """

    size: int = 0
    changed: int = 0
    beyond: int = 0
    not_finite: int = 0
    largest: float = 0.0
    at: int = 0
    dd: float = 0.0
    aa: float = 0.0
    bb: float = 0.0
    ab: float = 0.0
    expected: float = 0.0
    rounds: tuple[bool, bool] = (True, True)
    near: bool = True

    def add(self, other: Tally) -> None:
        """Join the sums of another block."""
        if other.largest > self.largest:
            self.largest, self.at = other.largest, other.at
        for name in ("size", "changed", "beyond", "not_finite", "dd", "aa", "bb", "ab", "expected"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.rounds = (self.rounds[0] and other.rounds[0], self.rounds[1] and other.rounds[1])
        self.near = self.near and other.near


def same_bits(a: Array, b: Array) -> bool:
    """Whether two blocks of one type and size are equal, byte by byte."""
    if not (a.flags.c_contiguous and b.flags.c_contiguous):
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    x, y = (v.reshape(-1).view(np.uint8) for v in (a, b))
    long = len(x) // 8 * 8
    return bool(
        np.array_equal(x[:long].view(np.uint64), y[:long].view(np.uint64)) and np.array_equal(x[long:], y[long:])
    )


def measure(a: Array, b: Array, rules: Rules, offset: int, hope: list[bool] | None = None) -> Tally:
    """Compare two blocks of plain values.

    Args:
        a: Raw storage values of the type ``rules.types[0]``.
        b: As many of the type ``rules.types[1]``.
        rules: How to judge.
        offset: Flat index of the first value.
        hope: Whether :attr:`Tally.rounds` can still be true of the whole tensor, either way; false is set here, and
            spares other blocks the work.
    """
    total, hope = Tally(), [True, True] if hope is None else hope
    a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    for start in range(0, a.size, PIECE):
        stop = min(start + PIECE, a.size)
        total.add(_piece(a[start:stop], b[start:stop], rules, offset + start, hope))
    return total


def energy(values: Array, dtype: str) -> Tally:
    """The sums of a block that is equal on both sides."""
    total, flat = Tally(), np.ascontiguousarray(values).reshape(-1)
    for start in range(0, flat.size, PIECE):
        wide = _widen(flat[start : start + PIECE], dtype, dtype == "F64")
        square = _product(wide, wide)
        if not math.isfinite(square):
            wide = np.where(np.isfinite(wide), wide, 0).astype(np.float64)
            square = _product(wide, wide)
        total.add(Tally(size=wide.size, dd=0.0, aa=square, bb=square, ab=square))
    return total


def _piece(a: Array, b: Array, rules: Rules, offset: int, hope: list[bool]) -> Tally:
    if not DTYPES[rules.types[0]].is_float:
        return Tally(size=a.size, changed=int(np.count_nonzero(a != b)))
    double = "F64" in rules.types
    x, y = _widen(a, rules.types[0], double), _widen(b, rules.types[1], double)
    bits = np.uint64 if double else np.uint32
    out = Tally(size=x.size, changed=int(np.count_nonzero(x.view(bits) != y.view(bits))))
    if not out.changed:
        out.aa = out.bb = out.ab = energy(x, "F64" if double else "F32").aa
        return out
    if rules.types[0] != rules.types[1]:
        hope[0] = hope[0] and _rounds(a, b, *rules.types)
        hope[1] = hope[1] and _rounds(b, a, *rules.types[::-1])
        out.rounds = (hope[0], hope[1])
    else:
        out.rounds = (False, False)
    with np.errstate(invalid="ignore", over="ignore"):
        d = np.subtract(x, y)
        out.dd, out.aa, out.bb, out.ab = _product(d, d), _product(x, x), _product(y, y), _product(x, y)
    if not math.isfinite(out.dd + out.aa + out.bb):
        x, y, d = _finite_only(x, y, out)
    np.abs(d, out=d)
    at = int(d.argmax())
    out.largest, out.at = float(d[at]), offset + at
    if rules.tolerance is not None:
        atol, rtol = rules.tolerance
        out.beyond = int(np.count_nonzero(d > atol + rtol * np.abs(x))) + out.not_finite
    if rules.computed:
        out.near = bool((d <= _COMPUTED * np.maximum(np.abs(x), 1)).all())
    if rules.quantized:
        out.expected = block_error(x, rules.stored[1]) + block_error(y, rules.stored[0])
    return out


def _finite_only(x: Array, y: Array, out: Tally) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Values in float64, where their squares fit; what is not finite is counted, and then left out."""
    wrong = ~(np.isfinite(x) & np.isfinite(y))
    alike = (x == y) | (np.isnan(x) & np.isnan(y))
    out.not_finite = int(np.count_nonzero(wrong & ~alike))
    x, y = (np.where(wrong, 0, v).astype(np.float64) for v in (x, y))
    d = x - y
    with np.errstate(over="ignore"):
        out.dd, out.aa, out.bb, out.ab = _product(d, d), _product(x, x), _product(y, y), _product(x, y)
    return x, y, d


def _widen(values: Array, dtype: str, double: bool) -> NDArray[Any]:
    if dtype == "F64":
        return values  # type: ignore[return-value]
    wide = to_float32(values, dtype)
    return wide.astype(np.float64) if double else wide


def _rounds(values: Array, there: Array, dtype: str, target: str) -> bool:
    """Whether values rounded to the other side's type are what it holds."""
    with np.errstate(over="ignore"):
        return same_bits(cast(values, dtype, target), there)


def _product(x: NDArray[Any], y: NDArray[Any]) -> float:
    """The sum of products: in the values' own type over short runs, in float64 beyond."""
    long = x.size // _RUN * _RUN
    runs = np.einsum("ij,ij->i", x[:long].reshape(-1, _RUN), y[:long].reshape(-1, _RUN))
    return float(runs.sum(dtype=np.float64)) + float(np.einsum("i,i->", x[long:], y[long:]))
