"""Whether two checkpoints are the same model: both are run, as stored, and the check is checked.

Each side runs on the reference model with the rotary order its own rows are stored in; nothing is permuted
in order to be compared. What difference is acceptable is measured, on this very model: how far its
logits move when its weights take the rounding of the other side's storage types and of the arithmetic. And
side A is run once more with a known fault (the control): a check that would not see it proves nothing, and its
verdict is *weak*. The runs are :mod:`convert.measurement`, the rules :mod:`convert.verdict`. This module converts
nothing and prints nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from convert.devices import pick_device
from convert.errors import Problem, UsageError
from convert.platform import available_memory
from convert.prompt import choose_tokens, pieces, shortened
from convert.running import exact_arithmetic, opened, require_sound
from convert.verdict import (
    FEW_TOKENS,
    MARGIN,
    SCHEMA,
    Evidence,
    Layer,
    Limits,
    PromptResult,
    VerifyResult,
    departure,
    least_visible,
    stands_out,
)

if TYPE_CHECKING:
    import torch

    from convert.measurement import Measured, Measurement
    from convert.metrics import Distance
    from convert.reference import Control

__all__ = ["DTYPES", "SCHEMA", "VerifyResult", "verify"]

#: Arithmetic, and what such values are called in a file.
_STORED = {"float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16"}
DTYPES = tuple(_STORED)
#: What runs beside the weights: hidden states, buffers of the arithmetic, a slab of logits.
BESIDE = 256 << 20


def verify(
    a: Any,
    b: Any,
    *,
    device: str = "auto",
    dtype: str = "float32",
    tokens: Sequence[int] | None = None,
    text: str | None = None,
    prompts: Sequence[str | Sequence[int]] | None = None,
    n_tokens: int = 128,
    layerwise: bool | None = None,
    follow_links: bool = False,
    on_step: Callable[[str], None] | None = None,
) -> VerifyResult:
    """Run two checkpoints and compare their logits, and their hidden states after every layer.

    Only one model is in memory at a time; layer by layer, one layer of one model.

    Args:
        a: The original: a path, or an opened checkpoint.
        b: What was made from it.
        device: ``auto``, ``cuda``, ``mps``, ``cpu``.
        dtype: Arithmetic: ``float32``, ``float64``, ``bfloat16``, ``float16``.
        tokens: Token ids to run on.
        text: Text to run on, by the tokenizer that lies beside A or B.
        prompts: Several texts, or lists of token ids, reported together.
        n_tokens: Without tokens, text or prompts: how many fixed ids, spread over the vocabulary.
        layerwise: Run layer by layer. Unless given, this is done when a model does not fit into free memory.
        follow_links: As for :func:`convert.open_checkpoint`, for sides that are paths.
        on_step: Told what is being done, in a few words.

    Raises:
        UsageError: The request itself makes no sense (device, dtype, tokens).
        ConvertError: A side cannot be run, or the two have different vocabularies.
    """
    if dtype not in DTYPES:
        raise UsageError(Problem("dtype", f"verify cannot compute in {dtype!r}.", found=dtype, wanted=list(DTYPES)))
    if prompts is not None and (tokens is not None or text is not None or not prompts):
        why = "There are no prompts." if not prompts else "Give prompts, or token ids, or a text."
        raise UsageError(Problem("prompts", why))
    said = on_step or (lambda _: None)
    with opened(a, follow_links=follow_links) as first, opened(b, follow_links=follow_links) as second:
        require_sound(first, second)
        asked: list[dict[str, Any]] = [{"tokens": tokens, "text": text}]
        if prompts is not None:
            asked = [{"text": p} if isinstance(p, str) else {"tokens": p} for p in prompts]
        ids = [choose_tokens(first, second, n_tokens=n_tokens, **one) for one in asked]
        target = pick_device(device)  # imports torch: what cannot be run is refused before
        from convert.measurement import Measurement

        measurement = Measurement(first, second, ids, device=target, dtype=dtype, on_step=said)
        if layerwise is None:
            layerwise = _too_large(measurement, target, dtype, said)
        worded = any(one.get("text") for one in asked)
        run = _Verification(first, second, ids, target, dtype, said)
        run.labels = [shortened(one.get("text") or one.get("tokens") or "") for one in asked]
        run.tokens = tuple(piece for one in ids for piece in pieces(one, first, second)) if worded else ()
        with exact_arithmetic():
            return run.result(measurement, layerwise=layerwise)


def _too_large(measurement: Measurement, device: torch.device, dtype: str, said: Callable[[str], None]) -> bool:
    """Whether the layers do not fit into what is free on the device; says so."""
    if device.type == "cuda":
        import torch

        free: int | None = torch.cuda.mem_get_info(device)[0]
    else:
        free = available_memory()
    needed = measurement.needs() + BESIDE
    if free is None or needed <= free:
        return False
    said(f"{needed / 1e9:.1f} GB in {dtype} do not fit into the {free / 1e9:.1f} GB that are free: layer by layer")
    return True


class _Verification:
    """Two opened sides, and what measured distances say of them."""

    def __init__(
        self, a: Any, b: Any, ids: list[list[int]], device: torch.device, dtype: str, on_step: Callable[[str], None]
    ) -> None:
        self.a, self.b, self.ids = a, b, ids
        self.device, self.dtype, self.on_step = device, dtype, on_step
        self.labels: list[str] = []
        self.tokens: tuple[str, ...] = ()

    def result(self, measurement: Measurement, *, layerwise: bool) -> VerifyResult:
        """Measure and judge."""
        found = measurement.run(layerwise=layerwise)
        prompts = self._prompts(found)
        distance, noises = found.distance.distance(), [n.distance() for n in found.noises]
        limits = Limits.of(noises)
        within = limits.hold(distance) and all(p.within for p in prompts)
        if not within and distance.finite:
            found.cures += measurement.cures_of_b(float(found.distance.error.sum()))
        controls = [(control, positions.distance()) for control, positions in found.controls]
        least, floor = least_visible(controls), found.floor.distance()
        seen = least is not None and stands_out(least[1], limits.nmse, MARGIN * floor.nmse, distance.nmse)
        worst = max(prompts, key=lambda p: (not p.within, p.badness))
        layers = _layers(found, least and least[0], self.dtype)
        parts = departure(layers) if not within and distance.finite else None
        if not within:
            verdict = "fail"
            message, hints = self._explain_fail(distance, worst, limits.nmse, found.cures, parts)
        elif least is not None and seen and max(map(len, self.ids)) >= FEW_TOKENS:
            verdict, hints = "pass", []
            message = (
                f"A and B are the same model: their logits differ by NMSE {distance.nmse:.1e}, within "
                f"{limits.nmse:.1e}; a copy with {least[0].fault} differs by {least[1].nmse:.1e}."
            )
        else:
            verdict = "weak"
            message, hints = self._explain_weak(distance, least, seen)
        return VerifyResult(
            verdict=verdict,
            device=str(self.device),
            dtype=self.dtype,
            n_tokens=sum(map(len, self.ids)),
            distance=distance,
            control=least[1] if least else None,
            control_name=least[0].name if least else None,
            control_seen=seen,
            tolerance=limits.nmse,
            noise=max(n.nmse for n in noises),
            first_diff_position=worst.first_diff_position,
            message=message,
            hints=tuple(hints),
            layerwise=layerwise,
            departs=parts,
            prompts=tuple(prompts) if len(prompts) > 1 else (),
            evidence=self._evidence(found, least and least[0], layers, noises, limits.worst),
        )

    def _prompts(self, found: Measured) -> list[PromptResult]:
        """Each prompt by its own rounding."""
        out, start = [], 0
        for label, ids in zip(self.labels, self.ids, strict=True):
            stop = start + len(ids)
            distance = found.distance.distance(start, stop)
            noises = [n.distance(start, stop) for n in found.noises]
            limits = Limits.of(noises)
            within = limits.hold(distance)
            first = None if within else _first_difference(distance, noises, limits.nmse)
            out.append(PromptResult(label, len(ids), distance, limits.nmse, within, first))
            start = stop
        return out

    def _evidence(
        self,
        found: Measured,
        least: Control | None,
        layers: tuple[Layer, ...],
        noises: list[Distance],
        tolerance: float,
    ) -> Evidence:
        sample = found.sample.lists()
        shown = {"a": sample["a"], "b": sample["b"], "control": sample[least.name] if least else []}
        by_position = zip(*(n.by_position for n in noises), strict=True)
        return Evidence(
            sides={"a": _side(self.a), "b": _side(self.b)},
            layers=layers,
            noise_by_position=tuple(max(values) for values in by_position),
            tolerance=tolerance,
            sample=shown,
            tokens=self.tokens,
            absent="A and B have different numbers of layers, or hidden states of different widths.",
        )

    def _explain_fail(
        self,
        distance: Distance,
        worst: PromptResult,
        tolerance: float,
        cures: list[str],
        parts: tuple[str, str] | None,
    ) -> tuple[str, list[str]]:
        if not distance.finite:
            return _not_finite(distance, sum(map(len, self.ids))), [
                "Scan both for NaN and Inf (validate --scan); in float16 arithmetic, try float32."
            ]
        first = worst.first_diff_position
        where = f"from position {first} on" + (f" of {worst.label!r}" if len(self.ids) > 1 else "")
        message = (
            f"A and B are different models: their logits differ by NMSE {distance.nmse:.1e} (at most {tolerance:.1e} "
            f"would be rounding), {where}; they agree on {distance.top1:.0%} of the next tokens."
        )
        hints = [f"They agree once {cure}: one of the two is not stored as it was taken to be." for cure in cures]
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
        return message, [*hints, *([parts[1]] if parts else []), *self._compare_tensors()]

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
                f"A and B agree on {max(map(len, self.ids))} tokens, too few to show errors that grow with the "
                "position."
            ), [f"Use at least {FEW_TOKENS} tokens, better 128.", *hints]
        equal = "bit-equal" if distance.max_abs == 0 else f"NMSE {distance.nmse:.1e}"
        message = (
            f"A and B agree ({equal}), but the check is weak: a copy with {least[0].fault} would look nearly the same "
            f"(NMSE {least[1].nmse:.1e}, mean KL {least[1].kl_mean:.1e})."
        )
        return message, ["The weights look near-untrained, the prompt is short, or the rounding is coarse.", *hints]


def _not_finite(distance: Distance, total: int) -> str:
    """Who computes no numbers, and where there is no likeliest token."""
    found = [(side, count) for side, count in zip("AB", distance.without, strict=True) if count]
    who = " and ".join(side for side, _ in found) or "A or B"
    where = ", ".join(f"{side} at {count} of {total} positions" for side, count in found)
    return (
        f"{who} compute{'s' if len(found) < 2 else ''} values that are no finite numbers"
        f"{f' ({where})' if where else ''}."
    )


def _first_difference(distance: Distance, noises: list[Distance], tolerance: float) -> int | None:
    """The first position beyond the tolerance, and beyond what rounding does at that very position."""
    for position, found in enumerate(distance.by_position):
        noise = max(n.by_position[position] for n in noises)
        if not found <= max(tolerance, MARGIN * noise):
            return position
    return None


def _layers(found: Measured, least: Control | None, dtype: str) -> tuple[Layer, ...]:
    """Every step, with the control that is shown."""
    from convert.rounding import grain

    floor = grain(_STORED[dtype]) ** 2
    names = [control.name for control, _ in found.controls]
    chosen = names.index(least.name) if least else None
    return tuple(
        Layer.of(step.name, step.error, step.noises, None if chosen is None else step.controls[chosen], floor=floor)
        for step in found.steps
    )


def _side(ckpt: Any) -> dict[str, Any]:
    """What a page says of a side."""
    from convert.rounding import stored_dtypes

    return {
        "path": str(ckpt.path),
        "layout": ckpt.layout,
        "family": ckpt.family,
        "dtypes": dict(Counter(stored_dtypes(ckpt.reference_tensors()).values())),
    }
