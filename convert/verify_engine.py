"""Whether a GGUF file, run by real llama.cpp, is the model that a checkpoint is.

Side A runs in another program (:mod:`convert.engines`), side B on our reference model, as stored; the
log-probabilities of the next token after a few prefixes are compared. A program shows nothing of its insides, so
what difference is acceptable is measured on B: its weights pass through A's storage types, what enters a matrix
product through the type that ggml turns it into there, and GELU through ggml's table. The control is B with a known
fault. Converts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from convert.devices import pick_device
from convert.dtypes import DTYPES
from convert.errors import Problem, UsageError
from convert.prompt import choose_tokens
from convert.running import exact_arithmetic, logits, opened, require_sound
from convert.verdict import FEW_TOKENS, MARGIN, MARGIN_ABS, Limits, VerifyResult, least_visible, stands_out

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from convert.metrics import Distance
    from convert.reference import Control

ENGINES = ("llama.cpp",)
ARITHMETIC = ("float32", "float64")

#: Largest difference of a log-probability between two sound float32 programs. Measured: 1e-5 on tiny models, 1e-4 on
#: SmolLM2. A reference model whose activation ggml takes from a table (GELU) has an ``engine_floor`` of its own.
FLOOR = 2e-4
#: Log-probabilities below this count as this: llama.cpp takes logarithms of float32 probabilities, which end at e^-87.
LEAST = -80.0
#: Prefixes compared: each costs llama.cpp the whole vocabulary as text.
PREFIXES = 8


@dataclass(frozen=True)
class EngineResult(VerifyResult):
    """What a verification by another program found; ``distance`` is between log-probabilities, A's first.

    Attributes:
        engine: The program that ran A.
        positions: Positions (from 0) whose next token was compared.
        tolerance_abs: The largest acceptable difference of one log-probability.
    """

    engine: str = ENGINES[0]
    positions: tuple[int, ...] = ()
    tolerance_abs: float = FLOOR

    def as_json(self) -> dict[str, Any]:
        """As :meth:`VerifyResult.as_json`, with ``engine``, ``positions`` and ``tolerance_abs`` added."""
        value = super().as_json()
        if value["control"] is not None and value["control"]["first_diff_position"] is not None:
            value["control"]["first_diff_position"] = self.positions[value["control"]["first_diff_position"]]
        more = {"engine": self.engine, "positions": list(self.positions), "tolerance_abs": self.tolerance_abs}
        return value | more


def verify_engine(
    a: Any,
    b: Any = None,
    *,
    engine: str = ENGINES[0],
    device: str = "auto",
    dtype: str = "float32",
    tokens: Sequence[int] | None = None,
    text: str | None = None,
    n_tokens: int = 128,
    follow_links: bool = False,
    on_step: Callable[[str], None] | None = None,
) -> EngineResult:
    """Run A in another program and B on the reference model, and compare what they predict.

    Args:
        a: A GGUF file: a path, or an opened checkpoint.
        b: What it should be: a path or an opened checkpoint of any layout. Unless given, A itself: then the program is
            compared with our reading of the same (dequantised) tensors, which shows a file that llama.cpp
            understands differently, but not one that was already wrong before.
        engine: ``llama.cpp``.
        device: Where the reference runs; llama.cpp runs on the CPU.
        dtype: Its arithmetic, ``float32`` or ``float64``.
        tokens: Token ids to run on.
        text: Text to run on.
        n_tokens: Without tokens or text: how many fixed ids (fewer where the model has a shorter context).
        follow_links: As for :func:`convert.open_checkpoint`, for sides that are paths.
        on_step: Told what is being done, in a few words.

    Raises:
        UsageError: The request makes no sense; A is no GGUF file.
        ConvertError: llama.cpp is missing, fails on A, or B cannot be run.
    """
    if engine not in ENGINES:
        raise UsageError(Problem("engine", f"There is no engine {engine!r}.", found=engine, wanted=list(ENGINES)))
    if dtype not in ARITHMETIC:
        raise UsageError(
            Problem(
                "dtype", f"An engine is compared in float32 or float64, not {dtype}.", found=dtype, wanted=ARITHMETIC
            )
        )
    with ExitStack() as stack:
        first = stack.enter_context(opened(a, follow_links=follow_links))
        second = first if b is None else stack.enter_context(opened(b, follow_links=follow_links))
        if first.format != "gguf":
            raise UsageError(
                Problem(
                    "engine",
                    f"{engine} runs GGUF files; {first.path.name} is {first.format} in the {first.layout} layout.",
                    found=first.format,
                    wanted="gguf",
                    hint=f"Export it first: convert {first.layout}-to-gguf {first.path} OUT.gguf --type f32.",
                )
            )
        require_sound(first, second)
        room = _room(first, second)
        ids = choose_tokens(first, second, tokens=tokens, text=text, n_tokens=min(n_tokens, room))
        if len(ids) > room:
            raise UsageError(Problem("tokens", f"{len(ids)} tokens; this model has room for {room}.", found=len(ids)))
        target = pick_device(device)  # imports torch: what cannot be run is refused before
        return _Run(first, second, ids, target, dtype, on_step or (lambda _: None)).result()


def prefixes(length: int, count: int = PREFIXES) -> list[int]:
    """Up to ``count`` prefix lengths from 1 to ``length``, denser at the start."""
    return sorted({round(length ** (i / (count - 1))) for i in range(count)})


class _Run:
    """One verification: A in the engine, then B and what may honestly lie between them."""

    def __init__(
        self, a: Any, b: Any, ids: list[int], device: torch.device, dtype: str, on_step: Callable[[str], None]
    ) -> None:
        self.a, self.b, self.ids = a, b, ids
        self.device, self.dtype, self.on_step = device, dtype, on_step
        self.lengths = prefixes(len(ids))
        self.cures: list[str] = []
        self.rounded = False

    def result(self) -> EngineResult:
        """Run both sides and judge."""
        import torch

        from convert.engines.llama_cpp import logprobs

        self.on_step("running A in llama.cpp")
        rows = logprobs(self.a.files[0], [self.ids[:n] for n in self.lengths])
        return self._measure(torch.from_numpy(rows).clamp(min=LEAST))

    def _measure(self, seen: Tensor) -> EngineResult:
        import torch

        from convert.metrics import compare
        from convert.reference.loading import load_reference

        self.on_step("loading B")
        model = load_reference(self.b, device=self.device, dtype=getattr(torch, self.dtype))
        self.on_step("running B")
        base = self._logprobs(model)
        distance = compare(seen.to(base.dtype), base)
        controls = []
        for control in model.controls:
            self.on_step(f"running the control ({control.name})")
            with control.apply(model):
                broken = self._logprobs(model)
            controls.append((control, compare(base, broken)))
            if compare(seen.to(base.dtype), broken).nmse < distance.nmse / 100:
                self.cures.append(control.fault)
        self.on_step("measuring the rounding")
        floor = getattr(model, "engine_floor", FLOOR)
        return self._judge(distance, controls, self._noise(model, base), floor, base)

    def _logprobs(self, model: Any) -> Tensor:
        """Log-probabilities ``[prefixes, V]`` of the tokens after the prefixes."""
        import torch

        with exact_arithmetic():
            rows = logits(model, torch.tensor([self.ids], device=self.device))
        return rows[[n - 1 for n in self.lengths]].log_softmax(-1).clamp(min=LEAST)

    def _noise(self, model: Any, base: Tensor) -> list[Distance]:
        """How far B moves when it rounds what A and ggml round, and A when it rounds what B does; spoils the model."""
        import torch

        from convert.metrics import compare
        from convert.reference.loading import load_reference
        from convert.rounding import lossy, perturb, stored_dtypes

        mine, theirs = stored_dtypes(self.b.reference_tensors()), stored_dtypes(self.a.reference_tensors())
        through = lossy(mine, theirs)
        self.rounded = bool(through)
        perturb(model, through=through, shake=2.0**-22, seed=1)  # sums in float32 depend on their order
        with _rounded_inputs(model, theirs), _rounded_gelu():
            noises = [compare(base, self._logprobs(model))]
        through = lossy(theirs, mine)
        if through:  # B may have lost what A still has; whether it did, A's values tell
            del model
            whole = load_reference(self.a, device=self.device, dtype=getattr(torch, self.dtype))
            before = self._logprobs(whole)
            perturb(whole, through=through)
            noises.append(compare(before, self._logprobs(whole)))
        return noises

    def _judge(
        self,
        distance: Distance,
        controls: list[tuple[Control, Distance]],
        noises: list[Distance],
        floor: float,
        base: Tensor,
    ) -> EngineResult:
        least_nmse = floor**2 / float(base.double().square().mean())
        noise = max(n.nmse for n in noises)
        tolerance = max(MARGIN * noise, least_nmse)
        tolerance_abs = max(MARGIN_ABS * max(n.max_abs for n in noises), floor)
        worst = MARGIN * max(least_nmse, *(n.worst for n in noises))
        within = Limits(tolerance, worst, tolerance_abs).hold(distance)
        least = least_visible(controls)
        seen = least is not None and stands_out(least[1], tolerance, distance.nmse)
        first = None
        if not within:
            index = next((i for i, x in enumerate(distance.by_position) if not x <= max(worst, tolerance)), None)
            index = distance.first_diff_position(tolerance) if index is None else index
            first = None if index is None else self.lengths[index] - 1
        verdict = "fail" if not within else "pass" if seen and len(self.ids) >= FEW_TOKENS else "weak"
        message, hints = self._explain(verdict, distance, least, tolerance_abs, first)
        return EngineResult(
            verdict=verdict,
            device=str(self.device),
            dtype=self.dtype,
            n_tokens=len(self.ids),
            distance=distance,
            control=least[1] if least else None,
            control_name=least[0].name if least else None,
            control_seen=seen,
            tolerance=tolerance,
            noise=noise,
            first_diff_position=first,
            message=message,
            hints=tuple(hints),
            positions=tuple(n - 1 for n in self.lengths),
            tolerance_abs=tolerance_abs,
        )

    def _explain(
        self,
        verdict: str,
        distance: Distance,
        least: tuple[Control, Distance] | None,
        tolerance_abs: float,
        first: int | None,
    ) -> tuple[str, list[str]]:
        apart = f"log-probabilities differ by {distance.max_abs:.1e} at most"
        hints = []
        if self.rounded:
            hints.append(
                "A is stored more coarsely than B; without B, A's own dequantised tensors are a sharper check."
            )
        if verdict == "pass" and least is not None:
            return (
                f"llama.cpp and the reference predict the same: {apart} (within {tolerance_abs:.1e}); with "
                f"{least[0].fault} they would differ by {least[1].max_abs:.1e}."
            ), hints
        if verdict == "weak":
            why = f"a copy with {least[0].fault} would look nearly the same" if least else "this model has no control"
            if len(self.ids) < FEW_TOKENS:
                why = f"{len(self.ids)} tokens are too few to show errors that grow with the position"
            return f"llama.cpp and the reference agree ({apart}), but the check is weak: {why}.", hints
        if not distance.finite:
            return "llama.cpp or the reference computes values that are no finite numbers.", [
                "Scan both for NaN and Inf (validate --scan)."
            ]
        hints = [
            f"They agree once the reference runs with {fault}: A is not stored as GGUF wants it."
            for fault in self.cures
        ]
        if not hints and first:
            hints.append("The first position is equal and later ones differ: a rotary fault (order, theta, scaling).")
        where = "" if first is None else f", from position {first} on"
        return (
            f"llama.cpp runs another model than the reference: {apart} ({tolerance_abs:.1e} would be rounding){where}; "
            f"they agree on {distance.top1:.0%} of the next tokens."
        ), hints


@contextmanager
def _rounded_inputs(model: Any, stored: Mapping[str, str]) -> Iterator[None]:
    """While it lasts, what enters a linear layer is rounded as ggml does it for that layer's storage type.

    ggml-cpu turns the other factor of a matrix product into the type that belongs to the weights' type: float16
    and bfloat16 into themselves, 32-value blocks into 8-bit blocks of 32, 256-value blocks into 8-bit blocks of 256.
    """
    from torch import nn

    embedding = next((kind for name, kind in stored.items() if "emb" in name), "F32")
    hooks = []
    try:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                kind = stored.get(f"{name}.weight", embedding)  # a head that is the embedding has no name of its own
                hooks.append(module.register_forward_pre_hook(lambda _, args, kind=kind: (round_input(args[0], kind),)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _rounded_gelu() -> Iterator[None]:
    """While it lasts, GELU is what ggml-cpu looks up: of a float16, as a float16; beyond ±10 its limits."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Table(TorchFunctionMode):
        """Sees every call, also those through a reference to the function that a module keeps."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.nn.functional.gelu:
                return func(*args, **(kwargs or {}))
            x, *more = args
            looked_up = func(x.half().float(), *more, **(kwargs or {})).half().to(x.dtype)
            return torch.where(x <= -10, torch.zeros_like(x), torch.where(x >= 10, x, looked_up))

    with Table():
        yield


def round_input(x: Tensor, kind: str) -> Tensor:
    """``x`` as ggml multiplies it with weights stored as ``kind``; same shape and dtype."""
    import torch

    if kind in ("F32", "F64"):
        return x
    if kind in ("F16", "BF16"):
        return x.to(torch.float16 if kind == "F16" else torch.bfloat16).to(x.dtype)
    block = max(DTYPES[kind].block, 32)
    if x.shape[-1] % block:
        return x
    values = x.unflatten(-1, (-1, block))
    step = values.abs().amax(-1, keepdim=True) / 127
    step = torch.where(step == 0, torch.ones_like(step), step)
    return ((values / step).round() * step).flatten(-2)


def _room(a: Any, b: Any) -> int:
    """Tokens that both models have positions for, less the one that llama.cpp wants to add."""
    stated = [side.config.get("max_position_embeddings") for side in (a, b)]
    return max(1, min([int(n) for n in stated if n], default=1 << 31) - 2)
