"""Torch tensors filled from lazy sources: in pieces, in parallel, straight into their own memory where it can be.

Knows tensors and sources, nothing of modules or names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from torch import Tensor

from convert.choices import require_positive
from convert.module_tensors import as_array
from convert.plan import piece_rows
from convert.reference.loading import block_tensor
from convert.source import Array, FilePool, Source

#: Bytes per piece that is read straight into a tensor; half of it where it passes through a buffer.
COPY_BYTES = 32 << 20


def fill_all(jobs: Iterable[tuple[Tensor, Source]], pool: FilePool, threads: int) -> None:
    """Fill every tensor from its source, a few pieces at a time; the first failure stops.

    Args:
        jobs: Tensors (on any device, with any strides) and sources of the same shape; where a tensor is contiguous and
            on the CPU, the source must have its type too, else torch converts.
        pool: Open files of the sources.
        threads: How many pieces are moved at once.

    Raises:
        FormatError: A file ended early.
    """
    pending: deque[Future[None]] = deque()
    require_positive("threads", threads)
    with ThreadPoolExecutor(threads) as workers:
        try:
            for tensor, source in jobs:
                out = tensor.detach()  # no_grad would hold for this thread only
                view = as_array(out) if out.device.type == "cpu" and out.is_contiguous() else None
                rows = source.shape[0]
                step = _step(source, direct=view is not None)
                for start in range(0, rows, step):
                    if len(pending) >= 4 * threads:
                        pending.popleft().result()
                    pending.append(workers.submit(_fill, out, view, source, start, min(start + step, rows), pool))
            while pending:
                pending.popleft().result()
        except BaseException:
            workers.shutdown(cancel_futures=True)
            raise


def _step(source: Source, *, direct: bool) -> int:
    rows = piece_rows(source)
    if not source.whole and source.extent(0, min(1, source.shape[0])) is not None:
        size = COPY_BYTES if direct else COPY_BYTES // 2
        rows = max(rows, size // max(1, source.row_bytes) // source.align * source.align)
    return max(1, rows)


def _fill(out: Tensor, view: Array | None, source: Source, start: int, stop: int, pool: FilePool) -> None:
    """Rows of a source into the same rows of a tensor, without a detour where file and memory agree."""
    if view is None:
        out[start:stop].copy_(block_tensor(source, start, stop))
        return
    part = view[start:stop]
    extent = source.extent(start, stop)
    if extent is None:
        np.copyto(part, source.read(start, stop))
    elif part.nbytes:
        path, offset, _ = extent
        pool.read_into(path, part.reshape(-1).view(np.uint8).data, offset)
