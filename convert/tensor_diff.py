"""Which tensors of two checkpoints hold the same values: what a verdict other than *pass* points at.

Compares tensor by tensor under the reference model's names, in blocks of rows. Rows of Q and K may be in
another order, as two layouts keep them; that order is applied here by index, with no code of the conversion.
It says what is equal and never what is acceptable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from convert.dtypes import DTYPES
from convert.report import fold_names
from convert.rounding import holds, round_through, stored_dtype

if TYPE_CHECKING:
    from convert.source import Source

#: Bytes of float32 values of each side that are held at a time.
BLOCK_BYTES = 32 << 20
#: Squared error over that of the imitated quantiser (:mod:`convert.rounding`).
BLOCK_MARGIN = 4.0


@dataclass(slots=True)
class TensorDiff:
    """Tensors by what their values have in common; names are the reference model's.

    Attributes:
        equal: The same values at the same places (after rounding to the coarser type, where types differ).
        turned: The same values once rows are put from one rotary order into the other, as the two sides say.
        close: Values that differ as much as a block-quantised type of one side makes them.
        reordered: The same rows in another order than the two sides say.
        different: Other values.
        only_one: On one side only (a tied head, for instance).
    """

    equal: list[str] = field(default_factory=list)
    turned: list[str] = field(default_factory=list)
    close: list[str] = field(default_factory=list)
    reordered: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    only_one: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether nothing is wrong: all equal, up to the declared rotary order and the rounding of block types."""
        return not (self.reordered or self.different or self.only_one)

    def lines(self) -> list[str]:
        """The findings for people, layers folded."""
        out = []
        total = len(self.equal) + len(self.turned)
        if self.same and not self.close:
            turned = (
                f", {len(self.turned)} of them in the other rotary order, as their layouts say" if self.turned else ""
            )
            out.append(f"All {total} tensors hold equal values{turned}.")
        if self.different:
            out.append(f"Different values: {_some(self.different)}.")
        if self.reordered:
            out.append(f"The same rows in another order: {_some(self.reordered)}.")
        if self.only_one:
            out.append(f"On one side only: {_some(self.only_one)}.")
        if self.close:
            out.append(f"Equal within the rounding of a block-quantised type: {_some(self.close)}.")
        if total and (self.close or not self.same):
            out.append(f"The other {total} tensors hold equal values.")
        return out


def _some(names: list[str], limit: int = 8) -> str:
    folded = fold_names(names)
    more = f" and {len(folded) - limit} more" if len(folded) > limit else ""
    return ", ".join(folded[:limit]) + more


def diff_tensors(a: Any, b: Any) -> TensorDiff:
    """Compare all tensors of two opened checkpoints (see :class:`convert.reference.loading.Opened`)."""
    from convert.reference import reference_for

    return diff(
        a.reference_tensors(),
        b.reference_tensors(),
        head_dim=_head_dim(a.config),
        pairings=(a.pairing, b.pairing),
        rotary=reference_for(a.table.reference).ROTARY,
    )


def diff(
    a: Iterable[tuple[str, Source]],
    b: Iterable[tuple[str, Source]],
    *,
    head_dim: int,
    pairings: tuple[str, str],
    rotary: tuple[str, ...],
) -> TensorDiff:
    """Compare named tensors.

    Args:
        a: Names and sources of one side.
        b: Of the other.
        head_dim: Rows of a head, for the rotary order.
        pairings: The rotary order of the rows of Q and K on each side.
        rotary: What the names of such tensors contain.
    """
    out = TensorDiff()
    first, second = dict(a), dict(b)
    for name, source in first.items():
        if name not in second:
            out.only_one.append(name)
            continue
        turns = pairings[0] != pairings[1] and any(part in name for part in rotary)
        getattr(out, _relation(source, second[name], head_dim, pairings if turns else None)).append(name)
    out.only_one += [name for name in second if name not in first]
    return out


def _relation(a: Source, b: Source, head_dim: int, pairings: tuple[str, str] | None) -> str:
    """``equal`` (``turned`` if two rotary orders are given), ``close``, ``reordered`` or ``different``."""
    if a.shape != b.shape or (pairings and a.shape[0] % head_dim):
        return "different"
    equal = True
    a_type, b_type = stored_dtype(a), stored_dtype(b)
    error = expected = 0.0
    energies = torch.zeros(2, math.prod(a.shape[1:]), dtype=torch.float64)
    for start, stop in _blocks(a, b, head_dim):
        x, y = _values(a, start, stop), _values(b, start, stop)
        expected += _block_error(x, b_type) + _block_error(y, a_type)
        x, y = _plainly_rounded(x, a_type, b_type), _plainly_rounded(y, b_type, a_type)
        if pairings:
            x, y = _to_half(x, head_dim, pairings[0]), _to_half(y, head_dim, pairings[1])
        equal = equal and torch.equal(x, y)
        error += float((x - y).double().square().sum())
        for side, values in enumerate((x, y)):
            squares = values.double().square().sum(0)
            energies[side] += squares.flatten() if values.ndim > 1 else squares
    if equal:
        return "turned" if pairings else "equal"
    if error <= BLOCK_MARGIN * expected:
        return "close"
    # The sum of squares of every column does not depend on the order of rows.
    return "reordered" if torch.allclose(energies[0], energies[1], rtol=1e-9, atol=0) else "different"


def _plainly_rounded(values: Tensor, own: str, other: str) -> Tensor:
    """Values through the other side's type, where that is a plain one that cannot hold them."""
    return values if DTYPES[other].is_quantized or holds(other, own) else round_through(values, other)


def _block_error(values: Tensor, dtype: str) -> float:
    """Sum of squared errors to expect when ``values`` go through a block-quantised type; 0 for a plain one."""
    if not DTYPES[dtype].is_quantized:
        return 0.0
    return float((round_through(values, dtype) - values).double().square().sum())


def _blocks(a: Source, b: Source, head_dim: int) -> Iterable[tuple[int, int]]:
    """Ranges of rows that both sources can read and that hold whole heads."""
    rows = a.shape[0]
    unit = math.lcm(a.align, b.align, head_dim)
    step = max(unit, BLOCK_BYTES // max(4 * math.prod(a.shape[1:]), 1) // unit * unit)
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _values(source: Source, start: int, stop: int) -> Tensor:
    """Rows of a source as float32 (exact for every type that weights are kept in, but float64)."""
    from convert.reference.loading import block_tensor

    return block_tensor(source, start, stop).float()


def _to_half(rows: Tensor, head_dim: int, pairing: str) -> Tensor:
    """Rows of whole heads in half order: the even ones of each head, then the odd ones."""
    if pairing == "half":
        return rows
    order = [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    return rows.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


def _head_dim(config: Any) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
