"""Q8_0 of 16-bit weights, at the speed of the vector routine and with the bytes of the reference.

ggml has two quantisers for this type. The reference computes ``round(x * (1 / (max / 127)))`` with halves away from
zero; the SIMD one ``rint(x * (127 / max))`` with halves to even. Both are within 3 roundings of ``x * 127 / max``, so
they can disagree only where that is (almost) a half. For 16-bit sources that is rare, and ``max`` alone tells where:

Let ``max = I * 2^a`` and ``|x| = X * 2^b`` with integers of at most 11 bits. A half, ``x * 127 / max = k + 1/2``, means
``254 X = (2k + 1) I`` up to a power of two. If the two sides differ, they differ by one at least, which is 1.9e-6 of
their size (below 255 * 2047), ten times what three roundings of 2^-24 can bridge. If they are equal, the prime 127
divides ``(2k + 1) I``: either ``2k + 1 = 127``, which is ``|x| = max / 2``, or ``I`` is a multiple of 127. So there are
three kinds of blocks: those that are right as the fast routine wrote them; those in which ``max / 2`` alone is in
dispute (25 of bfloat16's 128 mantissas), where the few values that are exactly that take the reference's answer; and
those whose largest mantissa is a multiple of 127 (one of 128), which the reference does again.

This module holds nothing else; float32 sources go to the reference (:mod:`convert.quants`).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from convert import ggml
from convert.cast import to_float32

_BLOCK, _BYTES = 32, 34


#: No magnitude of a finite value.
_NEVER = 0xFFFF


@lru_cache(maxsize=1)
def doubtful_mantissas() -> NDArray[np.bool_]:
    """For each 10-bit mantissa of a block's largest value, whether the fast routine may differ from the reference.

    bfloat16's mantissas are every eighth entry. One block per mantissa asks both routines about ``max / 2``.
    """
    fast, reference = _halves()
    return (fast != reference).any(axis=1) | _multiples_of_127()


def _multiples_of_127() -> NDArray[np.bool_]:
    return np.arange(1024, 2048) % 127 == 0


@lru_cache(maxsize=1)
def _halves() -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """What the two routines make of ``max``, ``max / 2`` and ``-max / 2``, for each 10-bit mantissa of ``max``."""
    integers = np.arange(1024, 2048)
    probe = np.zeros((1024, _BLOCK), np.float32)
    probe[:, 0] = integers
    probe[:, 1] = integers / 2
    probe[:, 2] = -integers / 2
    fast = np.empty((1024, _BYTES), np.uint8)
    ggml.quantize_q8_0_simd(probe, out=fast)
    return fast.view(np.int8)[:, 2:5], ggml.quantize_rows(probe, "Q8_0").view(np.int8)[:, 2:5]


@lru_cache(maxsize=2)
def _by_scale(dtype: str) -> tuple[NDArray[np.bool_], NDArray[np.uint16], NDArray[np.int8]]:
    """What to do with a block, by the float16 scale that the fast routine stored (tables of 65536).

    The largest value of a block is not at hand after the fast routine, but its quotient by 127 is: the scale. Where
    several values give one scale (small ones, among float16's subnormals), one doubtful value is enough for the whole
    block to be done again. Scale 0 holds all values too small to argue about.

    Args:
        dtype: ``"BF16"`` or ``"F16"``, the source's type.

    Returns:
        Whether the reference does the block again; else which magnitude (bits of ``dtype``) is in dispute, or
        :data:`_NEVER`; and the reference's answer for it.
    """
    patterns = np.arange(1, 0x7F80 if dtype == "BF16" else 0x7C00, dtype=np.uint16)
    values = to_float32(patterns if dtype == "BF16" else patterns.view(np.float16), dtype)
    with np.errstate(under="ignore"):
        scales = ggml.float32_to_float16(values / np.float32(127)).view(np.uint16)
    mantissas = (values.view(np.uint32) >> np.uint32(13)) & np.uint32(0x3FF)
    doubtful = doubtful_mantissas()[mantissas]
    # Half of a value is one exponent less, unless that leaves the normal numbers.
    exponent = 0x80 if dtype == "BF16" else 0x400
    halved = patterns >= 2 * exponent
    alone = np.bincount(scales, minlength=65536)[scales] == 1
    _, reference = _halves()
    symmetric = (reference[:, 0] == 127) & (reference[:, 1] == -reference[:, 2])
    one = doubtful & alone & halved & (symmetric & ~_multiples_of_127())[mantissas]
    again = np.zeros(65536, bool)
    again[scales[doubtful & ~one]] = True
    again[0] = True
    disputed = np.full(65536, _NEVER, np.uint16)
    disputed[scales[one]] = patterns[one] - np.uint16(exponent)
    answer = np.zeros(65536, np.int8)
    answer[scales[one]] = reference[mantissas[one], 1]
    return again, disputed, answer


def quantize_q8_0(values: NDArray[np.float32], stored: NDArray[np.generic], dtype: str, out: NDArray[np.uint8]) -> None:
    """Quantise values that came from a 16-bit type; needs ggml.

    Args:
        values: float32, one-dimensional, finite, whole blocks of 32.
        stored: The same values as they are stored in ``dtype``, contiguous.
        dtype: ``"BF16"`` or ``"F16"``.
        out: ``uint8``, one-dimensional, contiguous, 34 bytes per block; the same bytes as
            ``ggml.quantize_rows(…, "Q8_0")``.
    """
    ggml.quantize_q8_0_simd(values, out=out)
    redo, disputed, answer = _by_scale(dtype)
    blocks = out.reshape(-1, _BYTES)
    scales = out.view(np.uint16)[:: _BYTES // 2]  # the first two bytes of each block
    bits = stored.view(np.uint16)
    magnitudes = (bits & np.uint16(0x7FFF)).reshape(-1, _BLOCK)
    found = np.flatnonzero(magnitudes == disputed.take(scales)[:, None])
    if found.size:
        block, lane = np.divmod(found, _BLOCK)
        half = answer.take(scales.take(block))
        blocks.view(np.int8)[block, 2 + lane] = np.where(bits.take(found) >> np.uint16(15), -half, half)
    again = np.flatnonzero(redo.take(scales))
    if again.size:
        picked = values.reshape(-1, _BLOCK).take(again, axis=0)
        blocks[again] = ggml.quantize_rows(picked.reshape(1, -1), "Q8_0").reshape(-1, _BYTES)
