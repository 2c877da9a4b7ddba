"""How large an error a block-quantised type makes, from the range of every block.

A value rounded to the nearest of evenly spaced levels is off by a twelfth of the squared step on average. The real
quantisers (:mod:`convert.quants`) are what is being judged and are not used here. :mod:`convert.rounding` imitates the
same formats on the weights of a model.
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
#: K types: 256 values share two float16 numbers; the scales of the small blocks are so many steps of them.
SUPER, STEPS = 256, {"Q2_K": 15, "Q3_K": 31, "Q4_K": 63, "Q5_K": 63, "Q6_K": 127}

#: Values that are enough for an estimate.
_SAMPLE = 1 << 16


def block_error(values: NDArray[Any], dtype: str) -> float:
    """Sum of squared errors to expect when values go through a block-quantised type; 0 for a plain one.

    Of many values a sample of evenly spaced blocks is taken: the answer is as good, and four times as fast.

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
    take = max(1, values.size // _SAMPLE)
    sample = values.reshape(-1, kind.block)[::take]
    rows = sample.reshape(-1, block)
    if minimum:
        span = _across(rows, np.maximum) - np.minimum(_across(rows, np.minimum), 0)
        step = span / (2**bits - 1)
    else:
        span = _across(np.abs(rows), np.maximum)
        step = span / 2 ** (bits - 1)
    squares = step.astype(np.float64) ** 2 / 12
    if dtype in STEPS:
        shared = step.reshape(-1, SUPER // block)
        unit = shared.max(1, keepdims=True) / STEPS[dtype]
        coarse = (np.rint(shared / np.where(unit == 0, 1, unit)) * unit).reshape(-1)
        # A scale that rounds to none leaves nothing of its block's values.
        squares = np.where(coarse > 0, coarse.astype(np.float64) ** 2 / 12, span.astype(np.float64) ** 2 / 3)
    return block * float(squares.sum()) * values.size / sample.size


def _across(rows: NDArray[Any], pick: np.ufunc) -> NDArray[Any]:
    """The largest (or smallest) of each row, by halves: many times faster than along a short axis."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = pick(rows[:, :half], rows[:, half:])
    return rows[:, 0]
