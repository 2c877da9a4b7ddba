"""The check after writing: sizes, headers, and blocks spread over the tensors against what they were made from.

Cheap on purpose: at most :data:`BLOCKS` tensors are sampled. Whether the model computes the same is
:mod:`convert.verify`'s business.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert.errors import ConvertError, Problem
from convert.formats.readers import read_container
from convert.formats.spec import FileLayout, TensorSpec
from convert.plan import ConversionPlan, Output
from convert.platform import read_at

#: How many outputs are compared with their sources, and about how many bytes of each.
BLOCKS = 64
_BLOCK_BYTES = 64 << 10
#: A source whose rows are scattered must be read whole for a few of them; past this size it is not.
_SCATTERED_BYTES = 8 << 20


def read_back(plan: ConversionPlan, folder: Path, fds: Sequence[int]) -> int:
    """Compare what lies in ``folder`` with the plan and its sources.

    Args:
        plan: The plan that was carried out.
        folder: Where its files are.
        fds: Open descriptors of ``plan.files``, readable.

    Returns:
        How many blocks were compared.

    Raises:
        ConvertError: Something is not as planned.
    """
    for file, fd in zip(plan.files, fds, strict=True):
        size = os.fstat(fd).st_size
        if size != file.size:
            raise _failed(file.name, f"has {size:,} bytes, planned were {file.size:,}")
        _compare_header(file, folder / file.name)
    chosen = plan.outputs
    if len(chosen) > BLOCKS:
        chosen = [chosen[i] for i in sorted({int(x) for x in np.linspace(0, len(chosen) - 1, BLOCKS)})]
    return sum(_compare_block(plan, fds, output, number) for number, output in enumerate(chosen))


def _compare_header(file: FileLayout, path: Path) -> None:
    try:
        container = read_container(path, file.format)
    except ConvertError as error:
        raise _failed(file.name, f"cannot be read again: {error.problems[0].message}") from error
    found: dict[str, Any] = container.metadata["tree"] if file.format == "torch" else container.tensors
    for entry in file.entries:
        spec = found.get(entry.name)
        wanted = (entry.dtype, entry.shape, file.offsets[entry.name], None)
        if not isinstance(spec, TensorSpec) or (spec.dtype, spec.shape, spec.offset, spec.strides) != wanted:
            raise _failed(file.name, f"does not hold {entry.name!r} as planned")


def _compare_block(plan: ConversionPlan, fds: Sequence[int], output: Output, number: int) -> int:
    source = output.source
    rows = source.shape[0]
    step = min(rows, max(source.align, _BLOCK_BYTES // max(1, source.row_bytes) // source.align * source.align))
    if rows == 0 or (source.whole and source.row_bytes * rows > _SCATTERED_BYTES):
        return 0
    blocks = max(1, rows // step)
    start = (number * 7919 % blocks) * step  # another place in each tensor
    block = source.read(start, min(start + step, rows))
    for target in output.targets:
        part = block if target.columns is None else block[:, slice(*target.columns)]
        wanted = np.ascontiguousarray(part).tobytes()
        row = len(wanted) // len(block)
        file = plan.files[target.file]
        found = bytearray(len(wanted))
        read_at(fds[target.file], memoryview(found), file.offsets[target.name] + start * row)
        if found != wanted:
            raise _failed(file.name, f"differs from the source in {target.name!r} at row {start}")
    return 1


def _failed(name: str, what: str) -> ConvertError:
    return ConvertError(
        Problem(
            "check",
            f"the check after writing failed: {name} {what}.",
            file=name,
            hint="The output was removed. Did the source change meanwhile, or is the disk failing?",
        )
    )
