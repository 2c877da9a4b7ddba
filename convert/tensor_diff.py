"""Which tensors of two checkpoints hold the same values: what a verdict other than *pass* points at.

A summary of :mod:`convert.tensor_comparison`, in words. It says what is equal and never what is acceptable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from convert.report import fold_names
from convert.tensor_comparison import compare_tensors


@dataclass(slots=True)
class TensorDiff:
    """Tensors by what their values have in common; names are Hugging Face's.

    Attributes:
        equal: The same values at the same places (after rounding to the coarser type, where types differ).
        turned: The same values once rows are put from one rotary order into the other, as the two sides say.
        close: Values that differ as much as a block-quantised type of one side makes them.
        reordered: The same rows in another order than the two sides say.
        different: Other values, or another shape.
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


#: Where a relation is told; ``rounded`` is ``turned`` where the two sides keep the rows in different orders.
_LISTS = {"rounded": "equal", "shape": "different", "only_a": "only_one", "only_b": "only_one"}


def _some(names: list[str], limit: int = 8) -> str:
    folded = fold_names(names)
    more = f" and {len(folded) - limit} more" if len(folded) > limit else ""
    return ", ".join(folded[:limit]) + more


def diff_tensors(a: Any, b: Any) -> TensorDiff:
    """Compare all tensors of two opened checkpoints.

    Objects that merely have ``reference_tensors`` (:class:`convert.reference.loading.Opened`) are compared under the
    reference model's names.
    """
    out = TensorDiff()
    for delta in compare_tensors(a, b):
        where = _LISTS.get(delta.relation, delta.relation)
        getattr(out, "turned" if where == "equal" and delta.turned else where).append(delta.name)
    return out
