"""What storing weights in a type costs a model: the rounding that a verification has to expect.

:class:`Change` puts weights, in place, through another storage type, or shakes them by the grain of a type. The
block-quantised types are imitated (so many levels between a block's extremes), which is all that the size of an error
needs; the real quantisers are what is being verified and are not used here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from convert.block_error import BLOCKS, STEPS, SUPER
from convert.dtypes import DTYPES
from convert.source import Source
from convert.tensor_pairs import stored_dtype

#: Values changed at a time.
_AT_A_TIME = 1 << 20
#: Explicit bits of the significand.
_BITS = {"F64": 52, "F32": 23, "F16": 10, "BF16": 7}
_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def stored_dtypes(pairs: Iterable[tuple[str, Source]]) -> dict[str, str]:
    """The type in the file of every named tensor."""
    return {name: stored_dtype(source) for name, source in pairs}


def prevailing(dtypes: Mapping[str, str]) -> str:
    """The commonest type."""
    return Counter(dtypes.values()).most_common(1)[0][0]


def holds(target: str, source: str) -> bool:
    """Whether ``target`` represents every value that comes out of ``source`` (block types decode to F32)."""
    if target == source or target == "F64":
        return True
    return target == "F32" and source != "F64"


def lossy(mine: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Which of my tensors would lose values if they were stored as the other side's, and in which type."""
    usual = prevailing(other)
    wanted = {name: other.get(name, usual) for name in mine}
    return {name: dtype for name, dtype in wanted.items() if not holds(dtype, mine[name])}


def round_through(weights: Tensor, dtype: str) -> Tensor:
    """The values that remain after ``weights`` were stored as ``dtype``, in the type of ``weights``.

    A tensor that a block type cannot hold (one-dimensional, or rows that are no whole blocks) stays as it is.
    """
    if dtype in _FLOATS:
        return weights.to(_FLOATS[dtype]).to(weights.dtype)
    kind = DTYPES[dtype]
    bits, block, minimum = BLOCKS.get(dtype, (max(1, kind.block_bytes * 8 // kind.block), 32, False))
    if weights.ndim < 2 or weights.shape[-1] % block:
        return weights
    values = weights.float().unflatten(-1, (-1, block))
    if minimum:
        low = values.amin(-1, keepdim=True).clamp(max=0.0)
        step = (values.amax(-1, keepdim=True) - low) / (2**bits - 1)
    else:
        low = torch.zeros_like(values[..., :1])
        step = values.abs().amax(-1, keepdim=True) / 2 ** (bits - 1)
    if dtype in STEPS and weights.shape[-1] % SUPER == 0:
        step, low = (_coarse(part, SUPER // block, STEPS[dtype]) for part in (step, low))
    step = torch.where(step == 0, torch.ones_like(step), step)
    return (((values - low) / step).round() * step + low).flatten(-2).to(weights.dtype)


def _coarse(parts: Tensor, count: int, steps: int) -> Tensor:
    """Numbers of small blocks (``[..., blocks, 1]``) as whole steps of the largest among each ``count`` of them."""
    shared = parts.unflatten(-2, (-1, count))
    unit = shared.abs().amax(-2, keepdim=True) / steps
    unit = torch.where(unit == 0, torch.ones_like(unit), unit)
    return ((shared / unit).round() * unit).flatten(-3, -2)


def grain(dtype: str) -> float:
    """Typical (root-mean-square) relative error of rounding a value to a plain floating-point type.

    Half a unit in the last place at most, evenly distributed, over significands evenly distributed in 1 to 2:
    ``2 ** -(bits + 1) * sqrt(1 / 3) * sqrt(1 / 2)``.
    """
    return 2.0 ** -(_BITS[dtype] + 1) * (1 / 6) ** 0.5


@dataclass(frozen=True, slots=True)
class Change:
    """What rounding would do to a model's weights.

    Attributes:
        through: Storage types, by parameter name, that the weights pass through.
        shake: Relative size of a pseudo-random change of every weight, up or down: row signs times column
            signs, which costs no memory and is as incoherent with the weights as independent signs.
        seed: Of the signs, which follow from it and from the parameter's name.
    """

    through: Mapping[str, str] = field(default_factory=dict)
    shake: float = 0.0
    seed: int = 0

    def apply(self, name: str, values: Tensor, *, length: int | None = None, rows: Any = None) -> None:
        """Change the values of a parameter in place, some rows at a time.

        Args:
            name: The parameter.
            values: Its values, or some of its rows.
            length: How many rows the whole parameter has, where these are some of them.
            rows: Which: the number of the first one, or a tensor with the number of each.
        """
        signs = torch.Generator().manual_seed(crc32(f"{self.seed} {name}".encode()))
        across = _signs(values.shape[-1], signs, values)
        down = _signs(values.shape[0] if length is None else length, signs, values)
        if rows is not None:
            down = down[rows : rows + values.shape[0]] if isinstance(rows, int) else down[rows]
        step = max(1, _AT_A_TIME // max(math.prod(values.shape[1:]), 1))
        for start in range(0, values.shape[0], step):
            block = values[start : start + step]
            if name in self.through:
                block.copy_(round_through(block, self.through[name]))
            signed = self.shake * down[start : start + step]
            if self.shake and values.ndim > 1:  # a convolution's weight has an axis of size 1 in between
                block.mul_(1 + signed.reshape(-1, *(1,) * (values.ndim - 1)) * across)
            elif self.shake:
                block.mul_(1 + signed)


def perturb(model: nn.Module, *, through: Mapping[str, str] | None = None, shake: float = 0.0, seed: int = 0) -> None:
    """Change a model's weights in place, as rounding would; arguments as of :class:`Change`."""
    change = Change(through or {}, shake, seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            change.apply(name, param)


def _signs(count: int, generator: torch.Generator, like: Any) -> Tensor:
    """Random +1 and -1 in the device and type of ``like`` (at least float32)."""
    kind = like.dtype if like.dtype == torch.float64 else torch.float32
    return (torch.randint(0, 2, (count,), generator=generator) * 2 - 1).to(like.device, kind)
