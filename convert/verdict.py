"""What a verification says: its result, and the rules by which measured distances become a verdict.

A tolerance is never a constant: it is a multiple of what rounding was measured to do to this very model, and a verdict
of *pass* needs a control, a copy that is broken on purpose, to lie far outside it. This module runs no model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.metrics import Apart, Distance
    from convert.reference import Control

SCHEMA = "convert.verify/1"
EXIT_CODES = {"pass": 0, "fail": 1, "weak": 3}

#: Tolerance over measured noise, in squared differences. Two independent roundings give 2.
MARGIN = 4.0
#: The same for the largest single difference, which is not squared and fluctuates more.
MARGIN_ABS = 4.0
#: How far beyond the tolerance, in squared differences, the control must lie.
FAR = 5.0
#: And how much it must change what the model predicts (mean KL, nats). Near-untrained weights hardly react to
#: a rotary fault: 2e-7 with weights of std 0.02, 1 and more where attention is alive.
ALIVE = 0.01
#: Fewer positions than this cannot show errors that grow with the position (theta, scaling).
FEW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest acceptable NMSE, NMSE of one position, and single difference."""

    nmse: float
    worst: float
    max_abs: float

    @classmethod
    def of(cls, noises: Sequence[Distance]) -> Limits:
        """As measured rounding says."""
        return cls(
            MARGIN * max(n.nmse for n in noises),
            MARGIN * max(n.worst for n in noises),
            MARGIN_ABS * max(n.max_abs for n in noises),
        )

    def hold(self, distance: Distance) -> bool:
        """Whether a distance is within them."""
        return (
            distance.finite
            and distance.nmse <= self.nmse
            and distance.worst <= self.worst
            and distance.max_abs <= self.max_abs
        )


def least_visible(controls: Sequence[tuple[Control, Distance]]) -> tuple[Control, Distance] | None:
    """The control that changes least; None without controls."""
    return min(controls, key=lambda c: c[1].nmse, default=None)


def stands_out(control: Distance, *tolerances: float) -> bool:
    """Whether a control lies far beyond all tolerances, and changes what the model predicts."""
    return control.nmse >= FAR * max(tolerances) and control.kl_mean >= ALIVE


@dataclass(frozen=True, slots=True)
class Layer:
    """How far hidden states lie apart after one step.

    Attributes:
        name: ``embed``, ``layer 0``, ….
        error: NMSE of B's from A's.
        noise: NMSE of what rounding makes of them.
        control: NMSE of what the control makes of them; None without one.
        parts: Whether the error is beyond rounding.
    """

    name: str
    error: float
    noise: float
    control: float | None
    parts: bool

    @classmethod
    def of(cls, name: str, error: Apart, noises: Sequence[Apart], control: Apart | None, *, floor: float) -> Layer:
        """Judge one step, over all positions and at the worst one; ``floor`` is what the states' own type rounds."""
        noise, worst = max(floor, *(n.nmse for n in noises)), max(floor, *(n.worst for n in noises))
        within = error.nmse <= MARGIN * noise and error.worst <= MARGIN * worst
        return cls(name, error.nmse, noise, None if control is None else control.nmse, not within)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"name": self.name, "error": self.error, "noise": self.noise, "control": self.control}


def departure(layers: Sequence[Layer]) -> tuple[str, str] | None:
    """Where hidden states first part: the step's name (``head`` if they never do), and a sentence; None if unknown."""
    if not layers:
        return None
    count = len(layers) - 1
    first = next((i for i, layer in enumerate(layers) if layer.parts), None)
    if first is None:
        return "head", f"The hidden states agree through all {count} layers: the final norm or the head differs."
    layer = layers[first]
    apart = f"relative error {math.sqrt(max(layer.error, 0)):.1e}, where rounding makes {math.sqrt(layer.noise):.1e}"
    if first == 0:
        return layer.name, f"The hidden states part at the embedding already ({apart})."
    before = "embedding agrees" if first == 1 else f"embedding and the {first - 1} layers before it agree"
    return layer.name, f"The hidden states first part in {layer.name} of {count} ({apart}); the {before}."


@dataclass(frozen=True, slots=True)
class PromptResult:
    """What was found on one of several prompts.

    Attributes:
        label: The prompt, shortened.
        n_tokens: Its positions.
        distance: Of B's logits from A's on it.
        tolerance: The largest acceptable NMSE on it.
        within: Whether it is acceptable.
        first_diff_position: Its first position that differs beyond tolerance, or None.
    """

    label: str
    n_tokens: int
    distance: Distance
    tolerance: float
    within: bool
    first_diff_position: int | None

    @property
    def badness(self) -> float:
        """NMSE as a multiple of the tolerance; infinite for what is no number."""
        found = self.distance.nmse / self.tolerance if self.tolerance else math.inf * self.distance.nmse
        return found if not math.isnan(found) else 0.0 if self.distance.nmse == 0 else math.inf

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "label": self.label,
            "n_tokens": self.n_tokens,
            "within": self.within,
            "tolerance": _finite(self.tolerance),
            **self.distance.as_json(),
            "first_diff_position": self.first_diff_position,
        }


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a page shows of a verification, beside its figures.

    Attributes:
        sides: Path, layout, family and storage types of ``a`` and ``b``.
        layers: Hidden states, step by step.
        noise_by_position: NMSE of rounding at each position.
        tolerance: The largest acceptable NMSE of one position.
        sample: A few logits of ``a``, ``b`` and ``control``, the same ones of each.
        tokens: The text of each position, where there is one.
        absent: Why there are no layers, if there are none.
    """

    sides: dict[str, Any] = field(default_factory=dict)
    layers: tuple[Layer, ...] = ()
    noise_by_position: tuple[float, ...] = ()
    tolerance: float | None = None
    sample: dict[str, list[float]] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    absent: str = "The program that ran A shows no hidden states."


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What a verification found.

    Attributes:
        verdict: ``pass``: the difference is within tolerance, and the control far outside it. ``fail``: the
            difference is beyond tolerance. ``weak``: within tolerance, but the control would not have been seen.
        device: Where the models ran.
        dtype: In which arithmetic.
        n_tokens: Positions compared.
        distance: Of B's logits from A's.
        control: Of the broken A's logits from A's, with the least visible fault.
        control_name: That fault's name, or None where the model has none.
        control_seen: Whether it stood out.
        tolerance: The largest acceptable NMSE.
        noise: The NMSE of legitimate rounding, as measured.
        first_diff_position: The first position that differs beyond tolerance, or None; on the worst of several prompts.
        message: The verdict in a sentence.
        hints: What it points at, and what to do.
        layerwise: Whether the models ran layer by layer, with one layer's weights in memory.
        departs: Where hidden states first part, for a verdict of ``fail``: the step's name and a sentence.
        prompts: What was found on each prompt, where there are several.
        evidence: What a page shows.
    """

    verdict: str
    device: str
    dtype: str
    n_tokens: int
    distance: Distance
    control: Distance | None
    control_name: str | None
    control_seen: bool
    tolerance: float
    noise: float
    first_diff_position: int | None
    message: str
    hints: tuple[str, ...] = field(default=())
    layerwise: bool = False
    departs: tuple[str, str] | None = None
    prompts: tuple[PromptResult, ...] = ()
    evidence: Evidence = field(default_factory=Evidence, repr=False)

    @property
    def exit_code(self) -> int:
        """0 for pass, 1 for fail, 3 for weak."""
        return EXIT_CODES[self.verdict]

    @property
    def worst_prompt(self) -> PromptResult | None:
        """Of several prompts the one that differs most, measured by its own tolerance."""
        return max(self.prompts, key=lambda p: (not p.within, p.badness), default=None)

    def as_json(self) -> dict[str, Any]:
        """The result as ``verify --json`` documents it (schema ``convert.verify/1``)."""
        control = None
        if self.control is not None:
            control = {"name": self.control_name, **self.control.as_json(), "seen": self.control_seen}
            control["first_diff_position"] = self.control.first_diff_position(self.tolerance)
        value = {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "device": self.device,
            **self.distance.as_json(),
            "first_diff_position": self.first_diff_position,
            "control": control,
            "tolerance": _finite(self.tolerance),
            "noise": _finite(self.noise),
            "dtype": self.dtype,
            "n_tokens": self.n_tokens,
            "layerwise": self.layerwise,
            "departs": self.departs and {"step": self.departs[0], "words": self.departs[1]},
            "message": self.message,
            "hints": list(self.hints),
        }
        if self.prompts:
            worst = self.worst_prompt
            value["prompts"] = [prompt.as_json() for prompt in self.prompts]
            value["worst_prompt"] = worst and worst.label
        return value

    def detail(self) -> dict[str, Any]:
        """What a page draws, as plain data: figures by position and by layer, and sampled logits."""
        seen, control = self.evidence, self.control
        found: dict[str, Any] = {
            "sides": seen.sides,
            "positions": {
                "kl": list(self.distance.kl_by_position),
                "control_kl": list(control.kl_by_position) if control else [],
                "nmse": list(self.distance.by_position),
                "control_nmse": list(control.by_position) if control else [],
                "noise_nmse": list(seen.noise_by_position),
                "tolerance": seen.tolerance,
                "tokens": list(seen.tokens),
            },
            "logits": seen.sample,
            "layers": [layer.as_json() for layer in seen.layers],
            "departs": self.departs and {"step": self.departs[0], "words": self.departs[1]},
        }
        if seen.layers:
            last = {"name": "logits", "error": self.distance.nmse, "noise": self.noise}
            found["layers"].append(last | {"control": control.nmse if control else None})
        else:
            found["absent"] = {"layers": seen.absent}
        return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
