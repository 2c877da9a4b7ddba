"""Q8_0 of 16-bit weights, at the speed of the vector routine and with the bytes of the reference.

ggml has two quantisers for this type. The reference computes ``round(x * (1 / (max / 127)))`` with halves away from
zero; the SIMD one ``rint(x * (127 / max))`` with halves to even. Both are within 3 roundings of ``x * 127 / max``, so
they can disagree only where that is (almost) a half. For 16-bit sources that is rare, and ``max`` alone tells where:

Let ``max = I * 2^a`` and ``|x| = X * 2^b`` with integers of at most 11 bits. A half, ``x * 127 / max = k + 1/2``, means
``254 X = (2k + 1) I`` up to a power of two. If the two sides differ, they differ by one at least, which is 1.9e-6 of
their size (below 255 * 2047), ten times what three roundings of 2^-24 can bridge. If they are equal, the prime 127
divides ``(2k + 1) I``: either ``2k + 1 = 127``, which is ``|x| = max / 2``, or ``I`` is a multiple of 127. So a block
whose largest mantissa is not a multiple of 127, and for which both routines agree about ``max / 2``, is right as the
fast routine wrote it. Of bfloat16's 128 mantissas, 26 fail that; those blocks are done again by the reference.

This module holds nothing else; float32 sources go to the reference (:mod:`convert.quants`).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from convert import ggml
from convert.cast import to_float32

_BLOCK, _BYTES = 32, 34


@lru_cache(maxsize=1)
def doubtful_mantissas() -> NDArray[np.bool_]:
    """For each 10-bit mantissa of a block's largest value, whether the fast routine may differ from the reference.

    bfloat16's mantissas are every eighth entry. One block per mantissa asks both routines about ``max / 2``.
    """
    integers = np.arange(1024, 2048)
    probe = np.zeros((1024, _BLOCK), np.float32)
    probe[:, 0] = integers
    probe[:, 1] = integers / 2
    probe[:, 2] = -integers / 2
    fast = np.empty((1024, _BYTES), np.uint8)
    ggml.quantize_q8_0_simd(probe, out=fast)
    return (fast != ggml.quantize_rows(probe, "Q8_0")).any(axis=1) | (integers % 127 == 0)


@lru_cache(maxsize=2)
def doubtful_scales(dtype: str) -> NDArray[np.bool_]:
    """For each stored float16 scale, whether a block with it must be done again (``bool [65536]``).

    The largest value of a block is not at hand after the fast routine, but its quotient by 127 is: the scale. Where
    several values give one scale (small ones, among float16's subnormals), one doubtful value is enough. Scale 0
    holds all values too small to argue about.

    Args:
        dtype: ``"BF16"`` or ``"F16"``, the source's type.
    """
    patterns = np.arange(1, 0x7F80 if dtype == "BF16" else 0x7C00, dtype=np.uint16)
    values = to_float32(patterns if dtype == "BF16" else patterns.view(np.float16), dtype)
    with np.errstate(under="ignore"):
        scales = ggml.float32_to_float16(values / np.float32(127)).view(np.uint16)
    table = np.zeros(65536, bool)
    mantissas = (values.view(np.uint32) >> np.uint32(13)) & np.uint32(0x3FF)
    table[scales[doubtful_mantissas()[mantissas]]] = True
    table[0] = True
    return table


def quantize_q8_0(values: NDArray[np.float32], dtype: str, out: NDArray[np.uint8]) -> None:
    """Quantise values that came from a 16-bit type; needs ggml.

    Args:
        values: float32, one-dimensional, finite, whole blocks of 32; every value is exact in ``dtype``.
        dtype: ``"BF16"`` or ``"F16"``.
        out: ``uint8``, one-dimensional, contiguous, 34 bytes per block; the same bytes as
            ``ggml.quantize_rows(…, "Q8_0")``.
    """
    ggml.quantize_q8_0_simd(values, out=out)
    blocks = out.reshape(-1, _BYTES)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.uint16)[:, 0]
    again = np.flatnonzero(doubtful_scales(dtype)[scales])
    if again.size:
        picked = values.reshape(-1, _BLOCK)[again]
        blocks[again] = ggml.quantize_rows(picked.reshape(1, -1), "Q8_0").reshape(-1, _BYTES)
