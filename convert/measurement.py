"""Runs two checkpoints, and each of them in several ways at once, and measures how far the runs lie apart.

Side A runs as it is, with each of its controls (a known fault), with its weights rounded as the other side's storage
types and the arithmetic round, and with bfloat16's rounding on top; side B as it is, and rounded likewise. All runs of
a side go through a layer together, so that its weights are read once; hidden states are compared after every step,
and logits in slabs of the vocabulary. What the figures mean is :mod:`convert.verdict`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from convert.layerwise import Buffers, LayeredModel
from convert.metrics import Apart, Meter, Positions, Sample, apart
from convert.rounding import Change, grain, lossy, stored_dtypes

if TYPE_CHECKING:
    from convert.reference import Control

#: A run with a control whose distance is this much smaller says what is wrong.
CURE = 1e-2


@dataclass(slots=True)
class Run:
    """One way to run a side: after so many changes of its weights, perhaps with a control.

    Attributes:
        name: ``base``, ``rounded``, ``shaken``, or the control's name.
        version: How many changes the weights have gone through.
        control: The fault it runs with.
        states: Hidden states of each prompt, ``[1, T, D]``.
        contexts: What its layers need to know of each prompt.
    """

    name: str
    version: int = 0
    control: Control | None = None
    states: list[Tensor] = field(default_factory=list)
    contexts: list[Any] = field(default_factory=list)

    def applied(self, model: Any) -> AbstractContextManager[None]:
        """While it lasts, the model runs as this run wants."""
        return nullcontext() if self.control is None else self.control.apply(model)

    @property
    def joined(self) -> Tensor:
        """Hidden states of all prompts, one after the other, ``[1, sum of T, D]``."""
        return self.states[0] if len(self.states) == 1 else torch.cat(self.states, dim=1)


class Side:
    """One checkpoint and its runs.

    Args:
        ckpt: The opened checkpoint.
        prompts: Token ids.
        device: Where it runs.
        dtype: Arithmetic.
        changes: What happens to the weights between the runs.
        buffers: Memory that both sides use in turn.
    """

    def __init__(
        self,
        ckpt: Any,
        prompts: Sequence[Sequence[int]],
        *,
        device: torch.device,
        dtype: str,
        changes: list[Change],
        buffers: Buffers,
    ) -> None:
        self.model = LayeredModel(ckpt, device=device, dtype=getattr(torch, dtype), buffers=buffers)
        self.controls: tuple[Control, ...] = self.model.controls
        self.changes = changes
        self.runs = [Run("base")]
        self._ids = [torch.tensor([ids], device=device) for ids in prompts]

    def with_controls(self, *, base: bool = True) -> None:
        """Run with each control too, or with those only."""
        controls = [Run(control.name, control=control) for control in self.controls]
        self.runs = [*self.runs, *controls] if base else controls

    def with_changes(self, *names: str) -> None:
        """Run after each change too."""
        self.runs += [Run(name, version) for version, name in enumerate(names, 1)]

    def __getitem__(self, name: str) -> Run:
        return next(run for run in self.runs if run.name == name)

    def _each(self, change: Callable[[Change], None]) -> Iterator[Run]:
        """All runs, the weights at hand changed as each wants them."""
        for version in range(len(self.changes) + 1):
            if version:
                change(self.changes[version - 1])
            yield from (run for run in self.runs if run.version == version)

    def steps(self) -> Iterator[str]:
        """Run through the embedding and all layers; yields the name of each step when it is done."""
        model = self.model.model
        with self.model.front():
            for run in self._each(self.model.change):
                with torch.inference_mode(), run.applied(model):
                    for ids in self._ids:
                        run.states.append(self.model.embed(ids))
                        run.contexts.append(self.model.context(ids.shape[1]))
        yield "embed"
        for layer in range(self.model.n_layers):
            with self.model.layer(layer) as block:
                for run in self._each(self.model.change):
                    with torch.inference_mode(), run.applied(model):
                        run.states = [block(x, c) for x, c in zip(run.states, run.contexts, strict=True)]
            yield f"layer {layer}"

    def logits(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The logits of every run, ``[sum of T, S]`` on the CPU, with the token id of the first; slab after slab."""
        states = {run.name: run.joined for run in self.runs}
        for head in self.model.slabs(sum(ids.shape[1] for ids in self._ids)):
            out = {}
            for run in self._each(head.change):
                with torch.inference_mode(), run.applied(self.model.model):
                    out[run.name] = head(states[run.name])[0].cpu()
            yield head.start, out


@dataclass(slots=True)
class Step:
    """How far hidden states lie apart after a step.

    Attributes:
        name: ``embed``, ``layer 0``, ….
        error: Of B's from A's.
        noises: Of what rounding makes of A's, and of B's.
        controls: Of what each control makes of A's.
    """

    name: str
    error: Apart
    noises: list[Apart]
    controls: list[Apart]


@dataclass(slots=True)
class Measured:
    """What the runs gave.

    Attributes:
        distance: Of B's logits from A's.
        controls: Of A's with each fault.
        noises: Of A's with rounded weights, and of B's, from their own.
        floor: Of A's with bfloat16's rounding of its weights.
        steps: The hidden states; none where the two sides have other numbers of layers or widths.
        cures: What was the matter, where a control undoes the difference.
        sample: The same few logits of ``a``, ``b`` and every control.
    """

    distance: Positions
    controls: list[tuple[Control, Positions]]
    noises: list[Positions]
    floor: Positions
    steps: list[Step]
    cures: list[str]
    sample: Sample


class Measurement:
    """A and B, run on the same prompts.

    Args:
        a: The original, opened.
        b: What was made from it.
        prompts: Token ids.
        device: Where both run.
        dtype: Arithmetic.
        on_step: Told what is being done.
    """

    def __init__(
        self,
        a: Any,
        b: Any,
        prompts: Sequence[Sequence[int]],
        *,
        device: torch.device,
        dtype: str,
        on_step: Callable[[str], None],
    ) -> None:
        self.on_step = on_step
        self._open = partial(Side, prompts=prompts, device=device, dtype=dtype, buffers=Buffers())
        self._b = b
        mine, other = stored_dtypes(a.reference_tensors()), stored_dtypes(b.reference_tensors())
        # The arithmetic's own rounding is measured by a run in float32 where it is 16-bit (a change widens), else by
        # shaking every weight by two units in the last place (summing in another order moves logits a third to once as
        # far as one unit does).
        shake = {"float32": 2.0**-22, "float64": 2.0**-51}.get(dtype, 0.0)
        # Whatever the two sides are stored in: a check that could not tell the fault from bfloat16's rounding of
        # these weights is no check of this model.
        floor = Change(shake=grain("BF16"), seed=2)
        self.a = self._open(a, changes=[Change(lossy(mine, other), shake, seed=1), floor])
        self.a.with_controls()
        self.a.with_changes("rounded", "shaken")
        through = lossy(other, mine)
        self.b = self._open(b, changes=[Change(through, shake, seed=1)] if through else [])
        if through:
            self.b.with_changes("rounded")

    def needs(self) -> int:
        """Bytes that the layers of the larger side take when they are all in memory."""
        return max(self.a.model.total(), self.b.model.total())

    def run(self, *, layerwise: bool) -> Measured:
        """Run both sides: layer by layer, or first all of A and then all of B."""
        steps = self._steps_together() if layerwise else self._steps_in_turn()
        return self._logits(steps)

    def _steps_together(self) -> list[Step]:
        out = []
        for name, other in zip_longest(self.a.steps(), self.b.steps()):
            self.on_step(f"{name} of {self.a.model.n_layers} done" if name != "embed" else "layer by layer, A and B")
            if name and other:
                out.append(self._step(name, self._within_a(), self.a["base"].joined[0]))
        return self._comparable(out)

    def _steps_in_turn(self) -> list[Step]:
        self.on_step("loading A")
        self.a.model.fill()
        self.on_step("running A, its controls and its rounding")
        kept = [(name, self._within_a(), self.a["base"].joined[0].cpu()) for name in self.a.steps()]
        self.on_step("loading B")
        self.b.model.fill()
        self.on_step("running B")
        found = zip_longest(kept, self.b.steps())
        return self._comparable([self._step(*before) for before, other in found if before and other])

    def _comparable(self, steps: list[Step | None]) -> list[Step]:
        """All steps, or none where the two sides have other numbers of layers or widths."""
        same = self.a.model.n_layers == self.b.model.n_layers
        return [step for step in steps if step is not None] if same else []

    def _within_a(self) -> tuple[Apart, list[Apart]]:
        """How far A's rounded run and its controls lie from A."""
        base = self.a["base"].joined[0]
        controls = [apart(base, self.a[control.name].joined[0]) for control in self.a.controls]
        return apart(base, self.a["rounded"].joined[0]), controls

    def _step(self, name: str, within_a: tuple[Apart, list[Apart]], base: Tensor) -> Step | None:
        noise, controls = within_a
        other = self.b["base"].joined[0]
        if other.shape != base.shape:
            return None
        noises = [noise, apart(other, self.b["rounded"].joined[0])] if self.b.changes else [noise]
        return Step(name, apart(base, other), noises, controls)

    def _logits(self, steps: list[Step]) -> Measured:
        self.on_step("comparing logits")
        length, vocabulary = self.a["base"].joined.shape[1], self.a.model.vocab_size
        names = [control.name for control in self.a.controls]
        meters = {name: Meter(length) for name in (*names, "rounded", "shaken", "b", "b rounded")}
        sample = Sample(length, vocabulary)
        undone = dict.fromkeys(names, 0.0)  # squared differences of B and A with a fault
        for (start, mine), (_, other) in zip(self.a.logits(), self.b.logits(), strict=True):
            base, b = mine["base"], other["base"]
            for name in (*names, "rounded", "shaken"):
                meters[name].update(base, mine[name])
            meters["b"].update(base, b)
            if self.b.changes:
                meters["b rounded"].update(b, other["rounded"])
            sample.take("a", start, base)
            sample.take("b", start, b)
            for name in names:
                sample.take(name, start, mine[name])
                undone[name] += float((mine[name].double() - b.double()).square().sum())
        found = {name: meter.positions() for name, meter in meters.items()}
        total = float(found["b"].error.sum())
        return Measured(
            distance=found["b"],
            controls=[(control, found[control.name]) for control in self.a.controls],
            noises=[found["rounded"], *([found["b rounded"]] if self.b.changes else [])],
            floor=found["shaken"],
            steps=steps,
            cures=[f"A is run with {c.fault}" for c in self.a.controls if undone[c.name] < total * CURE],
            sample=sample,
        )

    def cures_of_b(self, total: float) -> list[str]:
        """Which faults make B what A is: B runs again, with each control.

        Args:
            total: Squared differences of B's logits from A's.
        """
        side = self._open(self._b, changes=[])
        if not side.controls:
            return []
        side.with_controls(base=False)
        for _ in side.steps():
            pass
        self.on_step("running B with the controls")
        left = dict.fromkeys((c.name for c in side.controls), 0.0)
        self.a.runs, self.a.changes = [self.a["base"]], []
        for (_, mine), (_, other) in zip(self.a.logits(), side.logits(), strict=True):
            for name in left:
                left[name] += float((mine["base"].double() - other[name].double()).square().sum())
        return [f"B is run with {c.fault}" for c in side.controls if left[c.name] < total * CURE]
