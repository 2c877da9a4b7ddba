"""How large an error a block-quantised type makes: imitated, by so many levels between a block's extremes.

That is all the size of an error needs. The real quantisers (:mod:`convert.quants`) are what is being judged and are not
used here. The same imitation on torch tensors is in :mod:`convert.rounding`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from convert.dtypes import DTYPES

#: Bits per value, values per scale, and whether a block has a minimum beside its scale (ggml's block formats).
BLOCKS = {
    "Q4_0": (4, 32, False),
    "Q4_1": (4, 32, True),
    "Q5_0": (5, 32, False),
    "Q5_1": (5, 32, True),
    "Q8_0": (8, 32, False),
    "Q2_K": (2, 16, True),
    "Q3_K": (3, 16, False),
    "Q4_K": (4, 32, True),
    "Q5_K": (5, 32, True),
    "Q6_K": (6, 16, False),
    "Q8_K": (8, 32, False),
}
#: K types: 256 values share two float16 numbers; the scales (and minima) of the small blocks are so many steps of them.
SUPER, STEPS = 256, {"Q2_K": 15, "Q3_K": 31, "Q4_K": 63, "Q5_K": 63, "Q6_K": 127}


def block_error(values: NDArray[Any], dtype: str) -> float:
    """Sum of squared errors to expect when values go through a block-quantised type; 0 for a plain one.

    Args:
        values: Whole rows, one after the other, flat; float32 or float64. What the type cannot hold (no whole blocks)
            would not have been stored in it and costs nothing.
        dtype: Canonical name.
    """
    kind = DTYPES.get(dtype)
    if kind is None or not kind.is_quantized:
        return 0.0
    bits, block, minimum = BLOCKS.get(dtype, (max(1, kind.block_bytes * 8 // kind.block), 32, False))
    if values.size % kind.block:
        return 0.0
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, block)
    if minimum:
        low = np.minimum(rows.min(1, keepdims=True), 0)
        step = (rows.max(1, keepdims=True) - low) / np.float32(2**bits - 1)
    else:
        low = np.zeros((len(rows), 1), np.float32)
        step = np.abs(rows).max(1, keepdims=True) / np.float32(2 ** (bits - 1))
    if dtype in STEPS:
        step, low = (_coarse(part, SUPER // block, STEPS[dtype]) for part in (step, low))
    step = np.where(step == 0, np.float32(1), step)
    lost = rows - (np.rint((rows - low) / step) * step + low)
    return float(np.einsum("ij,ij->i", lost, lost).sum(dtype=np.float64))


def _coarse(parts: NDArray[Any], count: int, steps: int) -> NDArray[Any]:
    """Numbers of small blocks (``[blocks, 1]``) as whole steps of the largest among each ``count`` of them."""
    shared = parts.reshape(-1, count)
    unit = np.abs(shared).max(1, keepdims=True) / np.float32(steps)
    unit = np.where(unit == 0, np.float32(1), unit)
    return (np.rint(shared / unit) * unit).reshape(-1, 1)
