"""Two checkpoints compared without running them: tensors, config, tokenizer, across layouts and formats.

Streams both files in bounded memory and imports no torch. Whether a difference matters to what the model says is
:mod:`convert.verify`'s business; why there is one, :mod:`convert.diagnose`'s.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.differences import Difference, config_differences, record_differences
from convert.errors import Problem, UsageError
from convert.tensor_comparison import compare_tensors
from convert.tensor_delta import RELATIONS, TensorDelta

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint

SCHEMA = "convert.diff/1"
EXIT_CODES = {"equal": 0, "close": 0, "different": 1}


@dataclass(frozen=True, slots=True)
class Diff:
    """What differs between two checkpoints.

    Attributes:
        sides: What A and B are: ``path``, ``layout``, ``format``, ``family``, ``dtypes`` (type → tensors).
        deltas: One per tensor.
        config: Where the configs differ; None where they were not compared.
        tokenizer: Where the tokenizers differ; None where they were not compared.
        record: Where the records of two conversions differ; it never weighs.
        tolerance: ``(atol, rtol)``, or None: bits decide.
        only: The pattern that tensors were chosen by.
        problems: What does not fit inside A or B alone, in words.
        bytes_read: Of both sides together.
        seconds: Wall time of comparing the tensors.
    """

    sides: tuple[dict[str, Any], dict[str, Any]]
    deltas: tuple[TensorDelta, ...]
    config: tuple[Difference, ...] | None = None
    tokenizer: tuple[Difference, ...] | None = None
    record: tuple[Difference, ...] = ()
    tolerance: tuple[float, float] | None = None
    only: str | None = None
    problems: tuple[str, ...] = field(default=())
    bytes_read: int = 0
    seconds: float = 0.0

    @property
    def counts(self) -> dict[str, int]:
        """Number of tensors by relation, best first."""
        found = Counter(d.relation for d in self.deltas)
        return {relation: found[relation] for relation in RELATIONS if found[relation]}

    @property
    def verdict(self) -> str:
        """``equal``: bit for bit. ``close``: up to rounding or the tolerance. ``different``."""
        said = [d for d in (*(self.config or ()), *(self.tokenizer or ())) if d.weighs]
        if said or any(not d.same for d in self.deltas):
            return "different"
        return "close" if any(d.relation in ("rounded", "close") for d in self.deltas) else "equal"

    @property
    def exit_code(self) -> int:
        """0 for the same model, 1 for a different one."""
        return EXIT_CODES[self.verdict]

    @property
    def worst(self) -> list[TensorDelta]:
        """Tensors that are not bit-equal, the worst first."""
        return sorted((d for d in self.deltas if d.relation not in ("equal", "turned")), key=_badness)

    @property
    def message(self) -> str:
        """The verdict in a sentence."""
        counts = self.counts
        total = sum(counts.values())
        bad = sum(n for r, n in counts.items() if r in RELATIONS[4:])
        said = []
        if not total:
            said.append(f"no tensor matches {self.only!r}")
        elif bad:
            said.append(f"{bad} of {total} tensors differ")
        elif any(r in counts for r in ("rounded", "close")):
            how = Counter((d.note or "").rpartition("; ")[2] for d in self.deltas if d.relation in ("rounded", "close"))
            words = ", ".join(f"{count} {word}" for word, count in how.most_common(3))
            said.append(f"all {total} tensors hold the same values: {words}{' …' if len(how) > 3 else ''}")
        else:
            said.append(f"all {total} tensors hold equal values")
        for name, found in (("config", self.config), ("tokenizer", self.tokenizer)):
            if weighing := [d.key for d in found or () if d.weighs]:
                said.append(f"the {name}s differ in {', '.join(weighing[:4])}{' …' if len(weighing) > 4 else ''}")
        return "; ".join(said) + "."

    @property
    def hints(self) -> list[str]:
        """What it points at, and what to do."""
        counts, out = self.counts, []
        if "turned" in counts:
            out.append(f"{counts['turned']} tensors are kept in the other rotary order, as the two layouts say: equal.")
        if "reordered" in counts:
            out.append(
                "The same rows in another order than the layouts say: Q and K were permuted once too often or not at "
                "all; `convert diagnose` finds out which side."
            )
        for delta in self.deltas:
            if delta.note and "stores none" in delta.note:
                words = _RELATION_WORDS.get(delta.relation, delta.relation)
                out.append(f"{delta.name}: {delta.note.partition(';')[0]}: {words}.")
        if bad := [d for d in self.deltas if d.not_finite]:
            out.append(
                f"{len(bad)} tensors hold NaN or infinite values on one side; `convert validate --scan` tells where."
            )
        return [*out, *self.problems]

    def as_json(self) -> dict[str, Any]:
        """The result as ``diff --json`` documents it (schema ``convert.diff/1``)."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "message": self.message,
            "hints": self.hints,
            "a": self.sides[0],
            "b": self.sides[1],
            "counts": self.counts,
            "tolerance": None if self.tolerance is None else dict(zip(("atol", "rtol"), self.tolerance, strict=True)),
            "only": self.only,
            "missing": [d.name for d in self.deltas if d.relation == "only_a"],
            "extra": [d.name for d in self.deltas if d.relation == "only_b"],
            "shapes": [
                {"name": d.name, "a": list(d.shapes[0] or ()), "b": list(d.shapes[1] or ())}
                for d in self.deltas
                if d.relation == "shape"
            ],
            "dtypes": [
                {"name": d.name, "a": d.dtypes[0], "b": d.dtypes[1]}
                for d in self.deltas
                if None not in d.dtypes and d.dtypes[0] != d.dtypes[1]
            ],
            "tensors": [_plain(d.as_json()) for d in self.worst],
            "config": None if self.config is None else [d.as_json() for d in self.config],
            "tokenizer": None if self.tokenizer is None else [d.as_json() for d in self.tokenizer],
            "record": [d.as_json() for d in self.record],
            "bytes": self.bytes_read,
            "seconds": round(self.seconds, 3),
        }

    def detail(self) -> dict[str, Any]:
        """Plain data for the HTML page: one cell of the heat map per tensor (row: its layer, column: its kind)."""
        absent = {} if self.deltas else {"tensors": self.message}
        return {
            "sides": dict(zip("ab", self.sides, strict=True)),
            "tensors": [
                {
                    "name": d.name,
                    "row": d.row,
                    "column": d.column,
                    "relation": "close" if d.relation == "rounded" else d.relation,
                    "error": d.error,
                    "cosine": d.cosine,
                    "max_abs": d.max_abs,
                    "changed": d.changed,
                }
                for d in self.deltas
            ],
            "absent": absent,
        }


_RELATION_WORDS = {"turned": "equal", "rounded": "equal after rounding"}


def _badness(delta: TensorDelta) -> tuple[int, float]:
    """Order of the worst first: what is missing or of another shape, then by error."""
    structural = {"only_a": 0, "only_b": 0, "shape": 1}.get(delta.relation)
    if structural is not None:
        return structural, 0.0
    error = math.inf if delta.not_finite else delta.error or 0.0
    return (2 if not delta.same else 3), -error


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """Without infinities, which JSON lacks."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in value.items()}


def diff(
    a: str | Path | Checkpoint,
    b: str | Path | Checkpoint,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    only: str | None = None,
    tensors_only: bool = False,
    threads: int = 2,
    follow_links: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Diff:
    """Compare two checkpoints of any layouts and formats.

    Tensors are brought into Hugging Face's layout block by block. Without a tolerance bits decide, after widening to
    float32; values of a narrower type count as equal when they are the other side's, rounded.

    Args:
        a: The original: a path, or an opened checkpoint.
        b: What is compared with it.
        atol: B may lie within ``atol + rtol * |a|``.
        rtol: See ``atol``.
        only: Compare only tensors whose Hugging Face name matches this pattern (``*``, ``?``), or contains it.
        tensors_only: Leave config, tokenizer and record out.
        threads: Workers.
        follow_links: As for :func:`convert.open_checkpoint`, for sides that are paths.
        progress: Called with the bytes read since the last call, from any thread.

    Raises:
        UsageError: A tolerance is negative or no number.
        ConvertError: A side cannot be opened or read.
    """
    for name, value in (("atol", atol), ("rtol", rtol)):
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(Problem(name, f"--{name} must be a number from 0 up.", found=value))
    tolerance = None if atol is None and rtol is None else (float(atol or 0), float(rtol or 0))
    count = _Counter(progress)
    with _opened(a, follow_links) as first, _opened(b, follow_links) as second:
        started = time.perf_counter()
        deltas = tuple(
            compare_tensors(first, second, only=only, tolerance=tolerance, threads=threads, progress=count.add)
        )
        seconds = time.perf_counter() - started
        config = tokenizer = None
        record: tuple[Difference, ...] = ()
        if not tensors_only:
            from convert.tokenizer.differences import tokenizer_differences

            config, tokenizer = tuple(config_differences(first, second)), tuple(tokenizer_differences(first, second))
            record = tuple(record_differences(first, second))
        return Diff(
            sides=(_about(first), _about(second)),
            deltas=deltas,
            config=config,
            tokenizer=tokenizer,
            record=record,
            tolerance=tolerance,
            only=only,
            problems=tuple(_problems(first, "A") + _problems(second, "B")),
            bytes_read=count.bytes,
            seconds=seconds,
        )


class _Counter:
    """Bytes read, by several threads."""

    def __init__(self, progress: Callable[[int], None] | None) -> None:
        import threading

        self.bytes = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.bytes += count
        if self._progress is not None:
            self._progress(count)


def _about(side: Checkpoint) -> dict[str, Any]:
    types = Counter(spec.dtype for specs in side.tensors.values() for spec in specs)
    return {
        "path": str(side.path),
        "layout": side.layout,
        "format": side.format,
        "family": side.family,
        "dtypes": dict(types.most_common()),
    }


def _problems(side: Checkpoint, name: str) -> list[str]:
    """What does not fit inside one checkpoint; missing and unexpected tensors are among the deltas."""
    from convert.report import fold_problems

    told = ("missing_tensor", "missing_head", "unexpected_tensor")
    left = fold_problems([p for p in side.match.problems if p.kind not in told])
    return [f"{name}: {p.message}" for p in left[:8]]


@contextmanager
def _opened(side: Any, follow_links: bool) -> Iterator[Any]:
    """An opened checkpoint as it is; a path opened, and closed afterwards."""
    if not isinstance(side, (str, Path)):
        yield side
        return
    from convert.checkpoint import open_checkpoint

    with open_checkpoint(side, follow_links=follow_links) as found:
        yield found
