"""Whether two tensors are one: decided from storage, checksums and bytes, never from a flag.

The full comparison reads both tensors; the sampled one at most :data:`SAMPLE_BYTES` of each and says so.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from convert.formats.spec import TensorSpec
from convert.source import Source

SAMPLE_BYTES = 8 << 20
_BLOCK_BYTES = 4 << 20


def quick(a: TensorSpec, b: TensorSpec) -> bool | None:
    """What headers alone tell: True (same storage), False (types, shapes or checksums differ), None (unknown)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.file == b.file and a.offset == b.offset and a.strides == b.strides:
        return True
    if a.crc is not None and b.crc is not None and a.crc != b.crc:
        return False
    return None


def same_values(a: Source, b: Source, *, sampled: bool = False, threads: int = 2) -> bool:
    """Whether two tensors hold the same bits.

    Args:
        a: One tensor.
        b: The other.
        sampled: Compare rows spread over the tensor, together at most :data:`SAMPLE_BYTES` of each, instead of all.
        threads: How many blocks are compared at once.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    rows = a.shape[0]
    step = max(1, _BLOCK_BYTES // max(1, a.row_bytes))
    blocks = [(i, min(i + step, rows)) for i in range(0, rows, step)]
    if sampled:
        few = max(1, (SAMPLE_BYTES // 16) // max(1, a.row_bytes))
        starts = sorted({int(x) for x in np.linspace(0, max(0, rows - few), 16)})
        blocks = [(i, min(i + few, rows)) for i in starts]

    def equal(block: tuple[int, int]) -> bool:
        left, right = a.read(*block), b.read(*block)
        return left.tobytes() == right.tobytes() if left.nbytes % 8 else bool(_words(left, right))

    # Ends first: two heads that differ nearly always differ there, and nothing else is read then.
    if not equal(blocks[0]) or not equal(blocks[-1]):
        return False
    if len(blocks) <= 2:
        return True
    with ThreadPoolExecutor(threads) as pool:
        return all(pool.map(equal, blocks[1:-1]))


def _words(left: np.ndarray, right: np.ndarray) -> bool:
    x = np.ascontiguousarray(left).reshape(-1).view(np.uint64)
    y = np.ascontiguousarray(right).reshape(-1).view(np.uint64)
    return np.array_equal(x, y)
