"""Whether two checkpoints are the same model: both are run, as stored, and the check is checked.

Each side runs on the reference model with the rotary order its own rows are stored in; nothing is permuted
in order to be compared. What difference is acceptable is measured, on this very model: how far its
logits move when its weights take the rounding of the other side's storage types and of the arithmetic. And
side A is run once more with a known fault (the control): a check that would not see it proves nothing, and its
verdict is *weak*. This module converts nothing and prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.devices import pick_device
from convert.errors import Problem, UsageError
from convert.prompt import choose_tokens

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from convert.metrics import Distance
    from convert.reference import Control

SCHEMA = "convert.verify/1"
EXIT_CODES = {"pass": 0, "fail": 1, "weak": 3}
DTYPES = ("float32", "float64", "bfloat16", "float16")

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
#: Positions whose logits are computed at a time.
HEAD_ROWS = 32


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
        first_diff_position: The first position that differs beyond tolerance, or None.
        message: The verdict in a sentence.
        hints: What it points at, and what to do.
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

    @property
    def exit_code(self) -> int:
        """0 for pass, 1 for fail, 3 for weak."""
        return EXIT_CODES[self.verdict]

    def as_json(self) -> dict[str, Any]:
        """The result as ``verify --json`` documents it (schema ``convert.verify/1``)."""
        control = None
        if self.control is not None:
            control = {"name": self.control_name, **self.control.as_json(), "seen": self.control_seen}
            control["first_diff_position"] = self.control.first_diff_position(self.tolerance)
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "device": self.device,
            **self.distance.as_json(),
            "first_diff_position": self.first_diff_position,
            "control": control,
            "tolerance": self.tolerance if math.isfinite(self.tolerance) else None,
            "noise": self.noise if math.isfinite(self.noise) else None,
            "dtype": self.dtype,
            "n_tokens": self.n_tokens,
            "message": self.message,
            "hints": list(self.hints),
        }


def verify(
    a: Any,
    b: Any,
    *,
    device: str = "auto",
    dtype: str = "float32",
    tokens: Sequence[int] | None = None,
    text: str | None = None,
    n_tokens: int = 128,
    on_step: Callable[[str], None] | None = None,
) -> VerifyResult:
    """Run two checkpoints and compare their logits.

    Only one model is in memory at a time.

    Args:
        a: The original: a path, or an opened checkpoint.
        b: What was made from it.
        device: ``auto``, ``cuda``, ``mps``, ``cpu``.
        dtype: Arithmetic: ``float32``, ``float64``, ``bfloat16``, ``float16``.
        tokens: Token ids to run on.
        text: Text to run on, by the tokenizer that lies beside A or B.
        n_tokens: Without tokens or text: how many fixed ids, spread over the vocabulary.
        on_step: Told what is being done, in a few words.

    Raises:
        UsageError: The request itself makes no sense (device, dtype, tokens).
        ConvertError: A side cannot be run, or the two have different vocabularies.
    """
    if dtype not in DTYPES:
        raise UsageError(Problem("dtype", f"verify cannot compute in {dtype!r}.", found=dtype, wanted=list(DTYPES)))
    target = pick_device(device)
    with _opened(a) as first, _opened(b) as second:
        ids = choose_tokens(first, second, tokens=tokens, text=text, n_tokens=n_tokens)
        return _Run(first, second, ids, target, dtype, on_step or (lambda _: None)).result()


class _Run:
    """One verification: measures side A, then side B, then judges."""

    def __init__(
        self, a: Any, b: Any, ids: list[int], device: torch.device, dtype: str, on_step: Callable[[str], None]
    ) -> None:
        import torch

        from convert.rounding import lossy, stored_dtypes

        self.a, self.b = a, b
        self.ids = torch.tensor([ids], device=device)
        self.device, self.dtype = device, dtype
        self.on_step = on_step
        mine, other = stored_dtypes(a.reference_tensors()), stored_dtypes(b.reference_tensors())
        self.a_through, self.b_through = lossy(mine, other), lossy(other, mine)
        self.noises: list[Distance] = []
        self.broken: list[tuple[Control, Tensor]] = []
        self.cures: list[str] = []

    def result(self) -> VerifyResult:
        """Run both sides and judge."""
        with _exact_arithmetic():
            base, controls, floor = self._measure_a()
            distance = self._measure_b(base)
        return self._judge(distance, controls, floor)

    def _load(self, ckpt: Any, side: str) -> Any:
        import torch

        from convert.reference.loading import load_reference

        self.on_step(f"loading {side}")
        return load_reference(ckpt, device=self.device, dtype=getattr(torch, self.dtype))

    def _measure_a(self) -> tuple[Tensor, list[tuple[Control, Distance]], Distance]:
        """Logits of A; how far each control lies from them; how far bfloat16's rounding does."""
        from convert.metrics import compare
        from convert.rounding import grain, perturb

        model = self._load(self.a, "A")
        self.on_step("running A")
        base = logits(model, self.ids)
        controls = []
        for control in model.controls:
            self.on_step(f"running the control ({control.name})")
            with control.apply(model):
                broken = logits(model, self.ids)
            self.broken.append((control, broken))
            controls.append((control, compare(base, broken)))
        self.on_step("measuring the rounding of A")
        self.noises.append(self._rounding(model, base, self.a_through))
        # Whatever the two sides are stored in: a check that could not tell the fault from bfloat16's rounding of
        # these weights is no check of this model.
        perturb(model, shake=grain("BF16"), seed=2)
        return base, controls, compare(base, logits(model, self.ids))

    def _measure_b(self, base: Tensor) -> Distance:
        """The distance of B; when it is too large, which control undoes it."""
        from convert.metrics import compare

        model = self._load(self.b, "B")
        self.on_step("running B")
        other = logits(model, self.ids)
        distance = compare(base, other)
        if not self._within(distance):
            for control, broken in self.broken:
                if compare(other, broken).nmse < distance.nmse / 100:
                    self.cures.append(f"A is run with {control.fault}")
                with control.apply(model):
                    if compare(base, logits(model, self.ids)).nmse < distance.nmse / 100:
                        self.cures.append(f"B is run with {control.fault}")
        if self.b_through:
            self.on_step("measuring the rounding of B")
            self.noises.append(self._rounding(model, other, self.b_through))
        return distance

    def _rounding(self, model: Any, base: Tensor, through: dict[str, str]) -> Distance:
        """How far honest rounding moves the logits; spoils the model.

        Weights pass through the other side's storage types. The arithmetic's own rounding is measured by a run in
        float32 where it is 16-bit, else by shaking every weight by two units in the last place (summing in
        another order moves logits a third to once as far as one unit does).
        """
        from convert.metrics import compare
        from convert.rounding import perturb

        shake = {"float32": 2.0**-22, "float64": 2.0**-51}.get(self.dtype, 0.0)
        if not shake:
            model.float()
        perturb(model, through=through, shake=shake, seed=1)
        return compare(base, logits(model, self.ids))

    def _limits(self) -> tuple[float, float, float]:
        """Largest acceptable NMSE, NMSE of one position, and single difference."""
        return (
            MARGIN * max(n.nmse for n in self.noises),
            MARGIN * max(n.worst for n in self.noises),
            MARGIN_ABS * max(n.max_abs for n in self.noises),
        )

    def _within(self, distance: Distance) -> bool:
        nmse, worst, max_abs = self._limits()
        return distance.finite and distance.nmse <= nmse and distance.worst <= worst and distance.max_abs <= max_abs

    def _first_difference(self, distance: Distance, tolerance: float) -> int | None:
        """The first position beyond the tolerance, and beyond what rounding does at that very position."""
        for position, found in enumerate(distance.by_position):
            noise = max(n.by_position[position] for n in self.noises)
            if not found <= max(tolerance, MARGIN * noise):
                return position
        return None

    def _judge(self, distance: Distance, controls: list[tuple[Control, Distance]], floor: Distance) -> VerifyResult:
        tolerance = self._limits()[0]
        least = min(controls, key=lambda c: c[1].nmse, default=None)
        bar = FAR * max(tolerance, MARGIN * floor.nmse, distance.nmse)
        seen = least is not None and least[1].nmse >= bar and least[1].kl_mean >= ALIVE
        n_tokens = self.ids.shape[1]
        first = None
        if not self._within(distance):
            verdict = "fail"
            first = self._first_difference(distance, tolerance)
            message, hints = self._explain_fail(distance, first, tolerance)
        elif seen and n_tokens >= FEW_TOKENS:
            verdict = "pass"
            message = (
                f"A and B are the same model: their logits differ by NMSE {distance.nmse:.1e}, within "
                f"{tolerance:.1e}; a copy with {least[0].fault} differs by {least[1].nmse:.1e}."  # type: ignore[index]
            )
            hints = []
        else:
            verdict = "weak"
            message, hints = self._explain_weak(distance, least, seen)
        return VerifyResult(
            verdict=verdict,
            device=str(self.device),
            dtype=self.dtype,
            n_tokens=n_tokens,
            distance=distance,
            control=least[1] if least else None,
            control_name=least[0].name if least else None,
            control_seen=seen,
            tolerance=tolerance,
            noise=max(n.nmse for n in self.noises),
            first_diff_position=first,
            message=message,
            hints=tuple(hints),
        )

    def _explain_fail(self, distance: Distance, first: int | None, tolerance: float) -> tuple[str, list[str]]:
        if not distance.finite:
            return "A or B computes values that are no finite numbers.", [
                "Scan both for NaN and Inf (validate --scan); in float16 arithmetic, try float32."
            ]
        tensors = self._compare_tensors()
        message = (
            f"A and B are different models: their logits differ by NMSE {distance.nmse:.1e} (at most {tolerance:.1e} "
            f"would be rounding), from position {first} on; they agree on {distance.top1:.0%} of the next tokens."
        )
        hints = [f"They agree once {cure}: one of the two is not stored as it was taken to be." for cure in self.cures]
        if first is not None and first > 0 and not hints and not self._turns():
            hints.append(
                "Position 0 is equal and later ones differ: think of Q and K, which one token alone does not feel."
            )
        elif first is not None and first > 0 and not hints:
            hints.append(
                "Position 0 is equal and later ones differ: a rotary fault (the order of the rows of Q and K, theta, "
                "scaling, or head_dim), for at position 0 nothing turns."
            )
        elif first == 0:
            hints.append(
                "Position 0 differs already, so it is not only a rotary fault: think of norms, gate and up, the head, "
                "the epsilon."
            )
        return message, [*hints, *tensors]

    def _turns(self) -> bool:
        """Whether positions enter by rotation in this family."""
        from convert.reference import reference_for

        return bool(reference_for(self.a.table.reference).ROTARY)

    def _compare_tensors(self) -> list[str]:
        """What an exact comparison of the tensors says; it needs no trained weights."""
        from convert.tensor_diff import diff_tensors

        self.on_step("comparing the tensors")
        return diff_tensors(self.a, self.b).lines()

    def _explain_weak(
        self, distance: Distance, least: tuple[Control, Distance] | None, seen: bool
    ) -> tuple[str, list[str]]:
        hints = self._compare_tensors()
        if least is None:
            return "A and B agree, but this model has no control that shows what the check can see.", hints
        if seen:
            return (
                f"A and B agree on {self.ids.shape[1]} tokens, too few to show errors that grow with the position.",
                [f"Use at least {FEW_TOKENS} tokens, better 128.", *hints],
            )
        equal = "bit-equal" if distance.max_abs == 0 else f"NMSE {distance.nmse:.1e}"
        message = (
            f"A and B agree ({equal}), but the check is weak: a copy with {least[0].fault} would look nearly the same "
            f"(NMSE {least[1].nmse:.1e}, mean KL {least[1].kl_mean:.1e})."
        )
        return message, ["The weights look near-untrained, the prompt is short, or the rounding is coarse.", *hints]


def logits(model: Any, ids: Tensor) -> Tensor:
    """Logits of ``ids`` ``[1, T]``, float32 (float64 for a float64 model) ``[T, V]`` on the CPU.

    The head runs on a few positions at a time, so that the device never holds them all.
    """
    import torch

    with torch.inference_mode():
        x = model.embed(ids)
        context = model.context(ids.shape[1])
        for layer in range(model.n_layers):
            x = model.block(layer)(x, context)
        rows = []
        for i in range(0, x.shape[1], HEAD_ROWS):
            part = model.head(x[:, i : i + HEAD_ROWS])[0].cpu()
            rows.append(part if part.dtype == torch.float64 else part.float())
        return torch.cat(rows)


@contextmanager
def _opened(side: Any) -> Iterator[Any]:
    """An opened checkpoint as it is; a path opened, and closed afterwards."""
    if not isinstance(side, (str, Path)):
        yield side
        return
    from convert.checkpoint import open_checkpoint

    with open_checkpoint(side) as ckpt:
        yield ckpt


@contextmanager
def _exact_arithmetic() -> Iterator[None]:
    """float32 that is float32: no TF32 in matrix products while it lasts."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
