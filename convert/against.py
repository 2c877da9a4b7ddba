"""A checkpoint against a good copy of the same model: where they part, and which known fault makes them agree.

Three looks: both are run and compared (:mod:`convert.verify`: the first position, the first layer, the size of the
difference beside that of rounding), all tensors are compared in the common layout (:mod:`convert.tensor_comparison`:
cosine and relative error, whatever the types and layouts), and the known faults are undone to see what then still
differs (:mod:`convert.agreement`). This module prints nothing; what it finds is weighed in :mod:`convert.causes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.agreement import Agreement, Explanation, explain
from convert.differences import Difference, config_differences
from convert.errors import ConvertError
from convert.tensor_comparison import compare_tensors
from convert.tensor_delta import TensorDelta

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.verdict import VerifyResult

#: Tokens that both are run on: enough for a wrong base of the rotation to show.
TOKENS = 256
#: Differing tensors that ``as_json()`` lists.
_LISTED = 40
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Against:
    """What a comparison with a good copy says.

    Attributes:
        tensors: Every tensor in the common layout; A is the good copy.
        config: Where the configs differ and it weighs.
        found: What explains the differences.
        run: What running both says, or None with the reason in ``not_run``.
        not_run: Why they were not run.
    """

    tensors: tuple[TensorDelta, ...]
    config: tuple[Difference, ...]
    found: Explanation = field(default_factory=Explanation)
    run: VerifyResult | None = field(default=None, repr=False)
    not_run: str | None = None

    @property
    def differing(self) -> list[TensorDelta]:
        """Tensors that are not the same weights, as far as their types can tell; the most different first."""
        return sorted((d for d in self.tensors if not d.same), key=lambda d: -(d.error or 0.0))

    @property
    def differs(self) -> bool:
        """Whether the two are different models: by tensors and config, or by what they compute."""
        return bool(self.differing or self.config) or (self.run is not None and self.run.verdict == "fail")

    @property
    def explained(self) -> bool:
        """Whether known faults account for every difference."""
        return bool(self.found.undone or self.found.lost) and not self.found.left

    @property
    def undone(self) -> tuple[Agreement, ...]:
        """The faults that explain the differences, in the order in which to undo them."""
        return self.found.undone

    @property
    def first_diff_position(self) -> int | None:
        """The first position whose logits differ beyond rounding."""
        return self.run.first_diff_position if self.run is not None else None

    @property
    def rotary(self) -> bool:
        """Whether position 0, where nothing turns, is equal and a later one is not."""
        return bool(self.first_diff_position)

    @property
    def departs(self) -> tuple[str, str] | None:
        """The first step whose hidden states depart, and a sentence."""
        return self.run.departs if self.run is not None else None

    def message(self) -> str:
        """The comparison in a sentence."""
        if not self.differs:
            return f"All {len(self.tensors)} tensors are those of the good copy, as far as their types can tell."
        what = f"{len(self.differing)} of {len(self.tensors)} tensors"
        if self.config:
            what += f" and {len(self.config)} entries of the config ({', '.join(d.key for d in self.config[:3])})"
        out = f"{what} differ from the good copy"
        fixes, left = " and ".join(self.found.fixes), len(self.found.left) + len(self.found.lost)
        if fixes:
            return f"{out}, {left or 'none'} with {fixes}."
        return f"{out}."

    def where(self) -> list[str]:
        """Sentences on where the two part."""
        out = []
        first = self.first_diff_position
        if first:
            out.append(f"Position 0 is equal and position {first} differs: a rotary fault, for there nothing turns.")
        elif first == 0:
            out.append("Position 0 differs already: not, or not only, a rotary fault.")
        if self.departs:
            out.append(self.departs[1])
        out += [words for _, words in self.found.lost]
        return out

    def as_json(self) -> dict[str, Any]:
        """The comparison as ``diagnose --json`` documents it, under ``against``."""
        counts: dict[str, int] = {}
        for delta in self.tensors:
            counts[delta.relation] = counts.get(delta.relation, 0) + 1
        run = self.run
        return {
            "differs": self.differs,
            "explained": self.explained,
            "message": self.message(),
            "first_diff_position": self.first_diff_position,
            "rotary": self.rotary,
            "departs": self.departs and {"step": self.departs[0], "words": self.departs[1]},
            "nmse": run.distance.nmse if run else None,
            "tolerance": run.tolerance if run else None,
            "noise": run.noise if run else None,
            "n_tokens": run.n_tokens if run else 0,
            "counts": counts,
            "differing": [delta.as_json() for delta in self.differing[:_LISTED]],
            "config": [d.as_json() for d in self.config],
            **self.found.as_json(_LISTED),
            "absent": self.not_run,
        }

    def detail(self) -> dict[str, Any]:
        """Plain data for the page: positions, logits and layers as of a verification, and every tensor."""
        found: dict[str, Any] = {"absent": {"positions": self.not_run or ""}}
        if self.run is not None:
            found = self.run.detail()
        found["tensors"] = [_for_page(delta) for delta in self.tensors]
        return found


def _for_page(delta: TensorDelta) -> dict[str, Any]:
    value = delta.as_json()
    return value | {"row": delta.row, "column": delta.column, "shape": str(value["shape"])}


def compare_against(
    src: str | Path | Checkpoint,
    good: str | Path | Checkpoint,
    *,
    ids: Sequence[int] | None = None,
    device: str = "auto",
    threads: int = 2,
    run: bool = True,
    follow_links: bool = False,
    on_step: Tell | None = None,
) -> Against:
    """Compare a checkpoint with a good copy of it, of any layout and type.

    Args:
        src: The checkpoint in doubt.
        good: The good copy.
        ids: Token ids to run on (the first 256 are used); None: ids spread over the vocabulary.
        device: Where the models run.
        threads: Blocks read at once.
        run: Whether to run them at all. Tensors, config and hypotheses need no run.
        follow_links: As for :func:`convert.open_checkpoint`, for sides that are paths.
        on_step: Told what is being done, how many steps are done, and of how many.

    Raises:
        ConvertError: One of the two cannot be opened.
    """
    from convert.running import opened

    tell = on_step or (lambda *_: None)
    with opened(src, follow_links=follow_links) as mine, opened(good, follow_links=follow_links) as theirs:
        for side in (mine, theirs):
            side.require_sound()
        tell("comparing the tensors", 0, 0)
        deltas = tuple(compare_tensors(theirs, mine, threads=threads))
        config = tuple(d for d in config_differences(theirs, mine) if d.weighs)
        out = Against(deltas, config)
        if any(not d.same for d in deltas) or config:
            first = {delta.name: delta for delta in out.differing}
            out = replace(out, found=explain(mine, theirs, first, config, threads=threads, on_step=tell))
        if run:
            tell("running both", 0, 0)
            found, why = _run(theirs, mine, ids, device)
            out = replace(out, run=found, not_run=why)
        return replace(out, not_run=out.not_run or (None if run else "the models were not run"))


def _run(
    good: Checkpoint, src: Checkpoint, ids: Sequence[int] | None, device: str
) -> tuple[VerifyResult | None, str | None]:
    """Both on a text; without a result, why."""
    from convert.verify import verify

    if good.table.reference is None or src.table.reference is None:
        return None, "the family's table names no reference model"
    try:
        return verify(good, src, device=device, tokens=None if ids is None else list(ids[:TOKENS])), None
    except ConvertError as error:
        return None, error.problems[0].message


__all__ = ["Against", "Agreement", "compare_against"]
