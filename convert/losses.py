"""What narrowing did to values, in words: how many, in which tensors, and what to do about it.

Counting is :mod:`convert.cast`'s business, stopping :mod:`convert.writer`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from convert.cast import CastLoss
from convert.clamp import within
from convert.dtypes import DTYPES, TORCH_NAMES
from convert.float8 import Float8
from convert.source import Source

#: Tensors told by name.
_TOLD = 3
#: The share of a tensor from which its underflow is no matter of a few tiny values any more.
MUCH = 0.01
_WIDER = {"F16": "bfloat16 or float32", "BF16": "float32", "F32": "float64"}


@dataclass(slots=True)
class Lost:
    """What became of a tensor's values.

    Attributes:
        name: The tensor's.
        size: Its values.
        loss: Too large ones, vanished ones, and those that were no numbers before.
        dtypes: Of the types that they were narrowed to, and lost in.
        scaled: Whether some of them were lost as products of FP8 codes and scales.
    """

    name: str
    size: int
    loss: CastLoss
    dtypes: tuple[str, ...]
    scaled: bool


def lost(tensors: Iterable[tuple[str, Source]]) -> list[Lost]:
    """The tensors that lost values so far; sources that several share are counted once."""
    found: list[Lost] = []
    seen: set[int] = set()
    for name, source in tensors:
        one = Lost(name, math.prod(source.shape), CastLoss(), (), False)
        for part in within(source):
            loss = getattr(part, "loss", None)
            if not isinstance(loss, CastLoss) or id(part) in seen or loss == CastLoss():
                continue
            seen.add(id(part))
            one.loss.add(loss)
            one.dtypes = tuple(dict.fromkeys((*one.dtypes, part.dtype)))
            one.scaled |= isinstance(part, Float8)
        if one.dtypes:
            found.append(one)
    return found


def loss_notes(tensors: list[Lost], *, option: str = "--dtype") -> list[str]:
    """What to tell of them: one sentence for each kind of loss that there was.

    Args:
        tensors: What :func:`lost` found.
        option: How another type is asked for: ``--dtype``, ``--type`` for GGUF, or ``dtype=`` in a program.
    """
    out = []
    tensors = sorted(tensors, key=lambda t: -t.loss.underflowed)
    blocks = [t for t in tensors if t.loss.underflowed and any(DTYPES[d].is_quantized for d in t.dtypes)]
    if blocks:
        kinds = " and ".join(dict.fromkeys(d for t in blocks for d in t.dtypes if DTYPES[d].is_quantized))
        counts = [t.loss.underflowed for t in blocks]
        out.append(
            f"{_values(counts, 'is', 'are')} too small for the scales of their blocks ({kinds}) and as good as zero: "
            f"{_where(blocks, counts)}; where they matter, keep such a tensor wider: --tensor-type NAME=bf16"
        )
    small = [t for t in tensors if t.loss.underflowed and t not in blocks]
    if small:
        counts = [t.loss.underflowed for t in small]
        out.append(
            f"{_values(counts, 'became', 'became', kind='non-zero value')} zero in the narrower type: "
            f"{_where(small, counts)}; {_advice(small, option)}"
        )
    odd = sorted((t for t in tensors if t.loss.not_finite), key=lambda t: -t.loss.not_finite)
    if odd:
        counts = [t.loss.not_finite for t in odd]
        out.append(
            f"{_values(counts, 'is', 'are')} NaN or infinite in the source and stay so: {_where(odd, counts)}; no "
            "conversion can mend them, and validate --scan tells more"
        )
    large = sorted((t for t in tensors if t.loss.overflowed), key=lambda t: -t.loss.overflowed)
    if large:
        cure = "" if any(t.scaled for t in large) else f", {_wider(large, option)} holds them"
        counts = [t.loss.overflowed for t in large]
        out.append(
            f"{_values(counts, 'was', 'were')} too large for the narrower type and became its largest (--clamp): "
            f"{_where(large, counts)}; verify tells what that costs{cure}"
        )
    return out


def _values(counts: list[int], one: str, many: str, *, kind: str = "value") -> str:
    count = sum(counts)
    return f"{count:,} {kind} {one}" if count == 1 else f"{count:,} {kind}s {many}"


def _where(tensors: list[Lost], counts: list[int]) -> str:
    told = [f"{n:,} of {t.size:,} in {t.name!r}" for t, n in zip(tensors[:_TOLD], counts, strict=False)]
    more = len(tensors) - _TOLD
    return ", ".join(told) + (f", the rest in {more:,} more tensor{'s' if more > 1 else ''}" if more > 0 else "")


def _wider(tensors: list[Lost], option: str) -> str:
    kinds = [d for t in tensors for d in t.dtypes]
    kind = "F16" if "F16" in kinds and "BF16" not in kinds else "BF16" if "BF16" in kinds else "F32"
    return f"{option} {'bf16' if kind == 'F16' else 'f32'}" if option == "--type" else f"{option} {_WIDER[kind]}"


def _advice(small: list[Lost], option: str) -> str:
    much = [t for t in small if t.size and t.loss.underflowed > MUCH * t.size]
    if any(t.scaled for t in small):
        return "those of FP8 have a scale that is zero or nearly so, as a damaged file has: look at these tensors"
    kinds = " and ".join(TORCH_NAMES.get(k, k) for k in dict.fromkeys(k for t in small for k in t.dtypes))
    if much:
        count = f"{len(much):,} tensor{'s lose' if len(much) > 1 else ' loses'} more than {MUCH:.0%} of the values"
        return f"{count}, so check with verify, or keep them with {_wider(small, option)}"
    return f"a few are usual in {kinds} and harmless; {_wider(small, option)} keeps them"
