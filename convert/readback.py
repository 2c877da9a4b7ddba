"""The check after writing: sizes, headers, and the tensors, some or all, against what they were made from.

The sampled check is cheap on purpose: at most :data:`BLOCKS` tensors are looked into. The full one reads every byte
from the disk again and makes it from the source again (:mod:`convert.rederive`). Whether the model computes the same
is :mod:`convert.verify`'s business.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.errors import ConvertError, Problem
from convert.formats.readers import read_container
from convert.formats.spec import FileLayout, TensorSpec
from convert.plan import ConversionPlan, Output, Target
from convert.platform import forget_cached, read_at
from convert.rederive import rederive

if TYPE_CHECKING:
    from convert.writer import Writer

#: How many outputs are compared with their sources, and about how many bytes of each.
BLOCKS = 64
_BLOCK_BYTES = 64 << 10
#: A source whose rows are scattered must be read whole for a few of them; past this size it is not.
_SCATTERED_BYTES = 8 << 20


def read_back(plan: ConversionPlan, folder: Path, writer: Writer, *, full: bool = False, threads: int = 2) -> int:
    """Compare what lies in ``folder`` with the plan and its sources.

    Args:
        plan: The plan that was carried out.
        folder: Where its files are.
        writer: What wrote them; its files are still open.
        full: Compare every byte, not samples.
        threads: Workers of the full comparison.

    Returns:
        How many blocks were compared; of a full comparison, how many tensors.

    Raises:
        ConvertError: Something is not as planned.
    """
    fds = writer.fds
    for file, fd in zip(plan.files, fds, strict=True) if writer.leads else ():
        size = os.fstat(fd).st_size
        if size != file.size:
            raise _failed(file.name, f"has {size:,} bytes, planned were {file.size:,}")
        _compare_header(file, folder / file.name)
    if full:
        return _compare_all(plan, folder, writer, threads)
    chosen = plan.outputs
    if len(chosen) > BLOCKS:
        chosen = [chosen[i] for i in sorted({int(x) for x in np.linspace(0, len(chosen) - 1, BLOCKS)})]
    return sum(_compare_block(plan, writer, output, number) for number, output in enumerate(chosen))


def _compare_all(plan: ConversionPlan, folder: Path, writer: Writer, threads: int) -> int:
    """Every tensor, and everything around the tensors."""
    for number, (file, fd) in enumerate(zip(plan.files, writer.fds, strict=True)):
        forget_cached(fd)  # what was synced is now read from where it was written to
        for offset, data in file.frame(writer.crcs(number)) if writer.leads else ():
            found = bytearray(len(data))
            if read_at(fd, memoryview(found), offset) != len(data) or found != data:
                raise _failed(file.name, f"differs from the plan in the {len(data):,} bytes at {offset:,}")

    def place(target: Target) -> tuple[int, int]:
        return writer.fds[target.file], plan.files[target.file].offsets[target.name]

    result = rederive(plan, place, threads=threads, cancel=writer.cancel, chosen=writer.mine)
    if writer.cancel.is_set():
        raise writer.cancelled
    if result.differences:
        raise ConvertError(
            [
                _failed(
                    d.file, f"differs from the source in {d.tensor!r}: {d.nbytes:,} bytes, the first in row {d.row:,}"
                ).problems[0]
                for d in result.differences
            ]
        )
    return result.tensors if writer.leads else 0  # a tensor may be compared by several ranks


def read_beside(plan: ConversionPlan, folder: Path) -> None:
    """Compare the small files beside the weights with what was to be written.

    Raises:
        ConvertError: One of them is another.
    """
    for name, value in plan.sidecars.items():
        if (folder / name).read_bytes() != (value if isinstance(value, bytes) else value.read_bytes()):
            raise _failed(name, "is not what was written")


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


def _compare_block(plan: ConversionPlan, writer: Writer, output: Output, number: int) -> int:
    source = output.source
    rows = source.shape[0]
    step = min(rows, max(source.align, _BLOCK_BYTES // max(1, source.row_bytes) // source.align * source.align))
    if rows == 0 or (source.whole and source.row_bytes * rows > _SCATTERED_BYTES):
        return 0
    blocks = max(1, rows // step)
    start = (number * 7919 % blocks) * step  # another place in each tensor
    if not writer.mine(output, start):
        return 0
    block = source.read(start, min(start + step, rows))
    for target in output.targets:
        part = block if target.columns is None else block[:, slice(*target.columns)]
        wanted = np.ascontiguousarray(part).tobytes()
        row = len(wanted) // len(block)
        file = plan.files[target.file]
        found = bytearray(len(wanted))
        read_at(writer.fds[target.file], memoryview(found), file.offsets[target.name] + start * row)
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
