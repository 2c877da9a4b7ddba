"""The known faults of conversions: what each is called, and what undoes it.

``convert diagnose`` runs a model with each of them undone, ``convert repair`` writes it so: both go by this list, and
cannot disagree. A fault that has a value (which theta, which layer) stands for several cases. Where a fault
applies follows from the family's table and the config, in :mod:`convert.undo`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from convert import undo
from convert.errors import Problem, UsageError
from convert.rope import META_SCALING, Rope

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.views import View

#: Kinds of faults. ``order``: rows of Q and K; ``swap``: two rows of the table taken for each other; ``values``:
#: numbers off by a constant; ``square``: transposed; ``layers``: layers in each other's place; ``head``: whose head it
#: is; ``numbers``: the config's RoPE, which only a long text decides; ``evidence``: cannot be undone.
KINDS = ("order", "swap", "values", "square", "layers", "head", "numbers", "evidence")

#: Bases that releases have, and defaults that converters fall back on.
THETAS = (10_000.0, 50_000.0, 100_000.0, 500_000.0, 1_000_000.0)
#: Factors of Llama 3.1 and 3.2.
FACTORS = (8.0, 32.0)


def _no_values(ckpt: Checkpoint) -> list[str]:
    return []


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong in conversions.

    Attributes:
        name: What is wrong (``qk-permuted``).
        fix: What ``convert repair --fix`` takes for it (``unpermute-qk``), without the value; None where nothing
            brings back what is lost.
        words: What is wrong, for people; ``{}`` stands for the value.
        kind: One of :data:`KINDS`.
        change: The checkpoint and the value (None without one) to a view with the fault undone.
        values: Values worth trying for a checkpoint; a fault without any value is tried once.
        valued: Whether it has a value at all.
    """

    name: str
    fix: str | None
    words: str
    kind: str
    change: Callable[[Checkpoint, str | None], View | None]
    values: Callable[[Checkpoint], list[str]] = _no_values
    valued: bool = False

    def undo(self, ckpt: Checkpoint, value: str | None = None) -> View | None:
        """The checkpoint with this fault undone, or None where it does not apply.

        Raises:
            UsageError: The value makes no sense.
        """
        if self.valued != (value is not None):
            raise UsageError(f"--fix {self.fix} takes {'a value' if self.valued else 'no value'}.")
        try:
            return self.change(ckpt, value)
        except (ValueError, KeyError) as error:
            problem = Problem("fix", f"--fix {self.fix}={value}: {error}.", found=value, hint=HINTS.get(self.name))
            raise UsageError(problem) from None

    def cases(self, ckpt: Checkpoint) -> list[Case]:
        """Every way in which it may be there, to be tried."""
        if self.fix is None:
            return []
        return [Case(self, value) for value in self.values(ckpt)] if self.valued else [Case(self)]


@dataclass(frozen=True, slots=True)
class Case:
    """A fault with its value."""

    fault: Fault
    value: str | None = None

    @property
    def name(self) -> str:
        """The fault's name."""
        return self.fault.name

    @property
    def kind(self) -> str:
        """The fault's kind."""
        return self.fault.kind

    @property
    def fix(self) -> str | None:
        """What ``convert repair --fix`` takes."""
        return self.fault.fix if self.value is None else f"{self.fault.fix}={self.value}"

    @property
    def words(self) -> str:
        """What is wrong, for people."""
        return self.fault.words.replace("{}", _spoken(self.value))

    def undo(self, ckpt: Checkpoint) -> View | None:
        """The checkpoint with it undone, or None where it does not apply."""
        return self.fault.undo(ckpt, self.value)


def _spoken(value: str | None) -> str:
    if value is None:
        return ""
    head, _, tail = value.rpartition("@")
    return f"{head} (layer {tail})" if head else value


def _plain(function: Callable[..., View | None], **arguments: Any) -> Callable[[Checkpoint, str | None], View | None]:
    return lambda ckpt, _: function(ckpt, **arguments)


def _order(**arguments: Any) -> Callable[[Checkpoint, str | None], View | None]:
    return _plain(undo.permuted, **arguments)


def _norms_apart(ckpt: Checkpoint, _: str | None) -> View | None:
    """Only where norms over a head's rows exist is it another thing than to take all rows along."""
    if not any(
        ckpt.table.rows[row].rope is not None and ckpt.table.rows[row].role == "norm" for row, _ in ckpt.match.logical
    ):
        return None
    return undo.permuted(ckpt, steps=("right",), norms=False)


def _head_counts(ckpt: Checkpoint) -> list[str]:
    return [str(count) for count in undo.wrong_head_counts(ckpt)]


def _kinds_apart(value: str) -> tuple[str | None, str]:
    """``full_attention:1e6`` is for one kind of layer only."""
    kind, colon, rest = value.partition(":")
    return (kind, rest) if colon and not _is_number(kind) and kind not in ("linear", "llama3") else (None, value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _prefix(kind: str | None) -> str:
    return "" if kind is None else f"{kind}:"


def _theta(ckpt: Checkpoint, value: str | None) -> View | None:
    kind, number = _kinds_apart(value or "")
    if float(number) <= 1:
        raise ValueError("a base is more than 1")
    return undo.with_theta(ckpt, float(number), kind)


def _thetas(ckpt: Checkpoint) -> list[str]:
    found = []
    for kind, old in undo.settings(ckpt).items():
        known = {float(size["rope_theta"]) for size in ckpt.table.sizes.values() if "rope_theta" in size}
        tried = {*THETAS, *known, *(old["rope_theta"] * factor for factor in (0.2, 0.5, 2, 5))} - {old["rope_theta"]}
        found += [f"{_prefix(kind)}{theta:.10g}" for theta in sorted(tried) if theta >= 1000]
    return found


def parse_scaling(text: str) -> Rope:
    """``llama3:8:8192`` (factor, original context) or ``linear:4`` as settings.

    Raises:
        ValueError: It is neither.
    """
    kind, *numbers = text.split(":")
    if kind == "linear" and len(numbers) == 1:
        return {"rope_type": kind, "factor": float(numbers[0])}
    if kind == "llama3" and len(numbers) == 2:
        context = {"original_max_position_embeddings": int(numbers[1])}
        return {**META_SCALING, "rope_type": kind, "factor": float(numbers[0]), **context}
    raise ValueError(f"{text!r} is neither linear:FACTOR nor llama3:FACTOR:CONTEXT")


def _scaling(ckpt: Checkpoint, value: str | None) -> View | None:
    kind, text = _kinds_apart(value or "")
    return undo.with_scaling(ckpt, parse_scaling(text), kind)


def _scalings(ckpt: Checkpoint, *, scaled: bool) -> list[str]:
    """Other factors of a llama3 scaling that is there; scalings that may be missing where there is none."""
    found = []
    context = int(ckpt.config.get("max_position_embeddings") or 0)
    for kind, old in undo.settings(ckpt).items():
        if scaled and old["rope_type"] == "llama3":
            original = old["original_max_position_embeddings"]
            found += [f"{_prefix(kind)}llama3:{f:g}:{original}" for f in FACTORS if f != old["factor"]]
        if scaled and old["rope_type"] == "linear":
            found += [f"{_prefix(kind)}linear:{f:g}" for f in (2.0, 4.0, 8.0) if f != old["factor"]]
        if not scaled and old["rope_type"] == "default":
            usual = int(META_SCALING["original_max_position_embeddings"])
            known = {usual, context // 16} - {0}
            found += [f"{_prefix(kind)}llama3:{f:g}:{original}" for f in FACTORS for original in sorted(known)]
            found += [f"{_prefix(kind)}linear:{f:g}" for f in (2.0, 4.0, 8.0)]
    return found


def _unscaled(ckpt: Checkpoint, value: str | None) -> View | None:
    return undo.with_scaling(ckpt, None, None if value in (None, "all") else value)


def _scaled_kinds(ckpt: Checkpoint) -> list[str]:
    return [kind or "all" for kind, old in undo.settings(ckpt).items() if old["rope_type"] in ("linear", "llama3")]


def _transposed(ckpt: Checkpoint, value: str | None) -> View | None:
    row, _, layer = (value or "").partition("@")
    return undo.transposed_rows(ckpt, row_id=None if row == "all" else row, layer=int(layer) if layer else None)


def _squares(ckpt: Checkpoint) -> list[str]:
    """Every square matrix singly, those of each row, and all of them."""
    found = undo.square(ckpt)
    rows = list(dict.fromkeys(row for row, _ in found))
    whole = (["all"] if len(rows) > 1 else []) + rows
    return whole + [f"{row}@{layer}" for row, layer in found]


def _exchanged(ckpt: Checkpoint, value: str | None) -> View | None:
    return undo.exchanged(ckpt, int(value or ""))


def _neighbours(ckpt: Checkpoint) -> list[str]:
    return [str(layer) for layer in range(ckpt.dims.n_layers - 1)]


def _nothing(ckpt: Checkpoint, _: str | None) -> View | None:
    return None


_ALL = (
    Fault("qk-permuted", "unpermute-qk", "the rows of Q and K are in the other rotary order", "order",
          _order(steps=("right",))),
    Fault("qk-permuted-twice", "permute-qk", "the rows of Q and K were right and were permuted once more", "order",
          _order(steps=("other",))),
    Fault("qk-inverse", "unpermute-qk-twice", "the rows of Q and K were permuted with the inverse", "order",
          _order(steps=("right", "right"))),
    Fault("qk-permuted-alone", "unpermute-qk-alone", "the rows of Q and K, not of their norms, are in the other order",
          "order", _norms_apart),
    Fault("k-permuted", "unpermute-k", "the rows of K alone are in the other rotary order", "order",
          _order(steps=("right",), side="k")),
    Fault("k-permuted-twice", "permute-k", "the rows of K were right and were permuted once more", "order",
          _order(steps=("other",), side="k")),
    Fault("q-permuted", "unpermute-q", "the rows of Q alone are in the other rotary order", "order",
          _order(steps=("right",), side="q")),
    Fault("q-permuted-twice", "permute-q", "the rows of Q were right and were permuted once more", "order",
          _order(steps=("other",), side="q")),
    Fault("k-wrong-heads", "k-heads", "the rows of K were permuted as if they were {} heads", "order",
          lambda ckpt, value: undo.key_heads(ckpt, int(value or "")), _head_counts, valued=True),
    Fault("k-wrong-heads-back", "k-heads-back", "the rows of K were permuted back as if they were {} heads", "order",
          lambda ckpt, value: undo.key_heads(ckpt, int(value or ""), back=True), _head_counts, valued=True),
    Fault("gate-up-swapped", "swap-gate-up", "gate and up are in each other's place", "swap",
          _plain(undo.swapped, norms=False)),
    Fault("norms-swapped", "swap-norms", "the norms of attention and feed-forward are in each other's place", "swap",
          _plain(undo.swapped, norms=True)),
    Fault("norm-plus-one", "norms-minus-one", "one was added to the norm weights", "values",
          _plain(undo.shifted, delta=-1.0)),
    Fault("norm-minus-one", "norms-plus-one", "one is missing from the norm weights", "values",
          _plain(undo.shifted, delta=1.0)),
    Fault("embedding-scaled", "unscale-embedding", "the embedding is multiplied by the root of the width", "values",
          _plain(undo.embedding_scaled, up=False)),
    Fault("embedding-unscaled", "scale-embedding", "the embedding is divided by the root of the width", "values",
          _plain(undo.embedding_scaled, up=True)),
    Fault("head-not-tied", "tie-head", "a head is stored that is not the model's, which is the embedding", "head",
          _plain(undo.head_tied)),
    Fault("transposed", "transpose", "square matrices are transposed: {}", "square",
          _transposed, _squares, valued=True),
    Fault("layers-exchanged", "exchange-layers", "layer {} and the next one are in each other's place", "layers",
          _exchanged, _neighbours, valued=True),
    Fault("theta", "set-theta", "the base of the rotation is wrong: it should be {}", "numbers",
          _theta, _thetas, valued=True),
    Fault("scaling-added", "drop-scaling", "the rotation is scaled and should not be ({} layers)", "numbers",
          _unscaled, _scaled_kinds, valued=True),
    Fault("scaling-dropped", "set-scaling", "the rotation should be scaled: {}", "numbers",
          _scaling, partial(_scalings, scaled=False), valued=True),
    Fault("scaling-factor", "set-scaling", "the rotation should be scaled otherwise: {}", "numbers",
          _scaling, partial(_scalings, scaled=True), valued=True),
    Fault("head-replaced", None, "the head is a copy of the embedding; the model's own is lost", "evidence", _nothing),
    Fault("duplicate", None, "tensors of one layer are copies of another's; the right ones are lost", "evidence",
          _nothing),
    Fault("damaged", None, "tensors hold no sensible numbers (zeros, constants, NaN, Inf)", "evidence", _nothing),
)  # fmt: skip

#: By name.
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _ALL}

#: What a value must look like.
HINTS: Mapping[str, str] = {
    "k-wrong-heads": "A number of heads, as in k-heads=32.",
    "k-wrong-heads-back": "A number of heads, as in k-heads-back=32.",
    "transposed": "all, a row of the table (block.attn.o), or one of its layers (block.attn.o@3).",
    "layers-exchanged": "The first of the two layers, as in exchange-layers=7.",
    "theta": "A number, as in set-theta=500000 (or full_attention:500000, for layers of one kind).",
    "scaling-added": "all, or a kind of layer.",
    "scaling-dropped": "llama3:FACTOR:CONTEXT or linear:FACTOR, as in set-scaling=llama3:8:8192.",
}


def cases(ckpt: Checkpoint) -> list[Case]:
    """Everything worth trying on a checkpoint; which of them apply, their ``undo`` says."""
    return [case for fault in FAULTS.values() for case in fault.cases(ckpt)]


def parse_fix(text: str) -> Case:
    """What ``--fix`` says.

    Raises:
        UsageError: There is no such fix, or it lacks its value.
    """
    name, equals, value = text.partition("=")
    fault = next((f for f in FAULTS.values() if f.fix == name), None)
    known = list(dict.fromkeys(f.fix + ("=…" if f.valued else "") for f in FAULTS.values() if f.fix))
    if fault is None:
        raise UsageError(
            Problem("fix", f"there is no fix {name!r}.", found=name, wanted=known, hint=f"Fixes: {', '.join(known)}.")
        )
    if fault.valued != bool(equals and value):
        hint = HINTS.get(fault.name)
        raise UsageError(Problem("fix", f"--fix {name} takes {'a value' if fault.valued else 'no value'}.", hint=hint))
    return Case(fault, value if fault.valued else None)
