"""What every container format gives back: where each tensor lies, and what else the file says.

No format here compresses its data, so a tensor is a range (or a strided view) of a file. Readers parse
headers only; bytes are read later by :mod:`convert.source`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.dtypes import DTYPES, DType


@dataclass(frozen=True, slots=True)
class Scale:
    """What the codes of an FP8 tensor are multiplied by.

    Attributes:
        spec: The tensor of scales.
        block: Rows and columns that share a scale.
    """

    spec: TensorSpec
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor.

    Attributes:
        name: The name in the file.
        dtype: Canonical type name (:data:`convert.dtypes.DTYPES`).
        shape: Dimensions in torch order (GGUF's reversed order is undone by its reader).
        file: The file that holds the bytes.
        offset: Absolute byte offset of the first element.
        strides: Strides in elements for a tensor that is not stored contiguously, else None.
        storage: Identifies the storage inside ``file``; two tensors with equal ``(file, storage)`` share
            memory. None where the format has no sharing.
        crc: CRC-32 of the whole storage when this tensor covers exactly that, else None.
        parts: What it is joined of, where it is stored in pieces; ``file`` and ``offset`` are then those of the first.
        axis: Along which dimension.
        scale: The scales of an FP8 tensor, once they are found.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    strides: tuple[int, ...] | None = None
    storage: str | None = None
    crc: int | None = None
    parts: tuple[TensorSpec, ...] = ()
    axis: int = 0
    scale: Scale | None = None

    @property
    def type(self) -> DType:
        """The element type."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor when written contiguously."""
        return self.type.nbytes(self.shape)


@dataclass(slots=True)
class Container:
    """An opened file or set of files: headers only.

    Attributes:
        format: ``safetensors``, ``torch`` or ``gguf``.
        files: All files that hold tensors, in order.
        tensors: Every tensor by name, in file order.
        metadata: What else is stored: safetensors' ``__metadata__``, GGUF key-values, or for torch files the
            unpickled tree with :class:`TensorSpec` leaves and inert placeholders.
        notes: Remarks for ``inspect`` (stray files, placeholders …).
    """

    format: str
    files: tuple[Path, ...]
    tensors: dict[str, TensorSpec]
    metadata: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor that is to be written: its name, canonical type name and shape (torch order)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return DTYPES[self.dtype].nbytes(self.shape)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A file whose every byte position is known before any data is read.

    Attributes:
        name: The file's name, relative to the output folder.
        format: The container format.
        size: Total bytes.
        offsets: Absolute byte offset of each tensor's data.
        entries: The tensors, in file order.
        needs_crc: Whether :attr:`frame` wants each tensor's CRC-32.
        frame: Given ``{tensor: crc32}`` (empty unless ``needs_crc``), returns all bytes that are not tensor
            data as ``(offset, bytes)`` pairs.
    """

    name: str
    format: str
    size: int
    offsets: dict[str, int]
    entries: tuple[Entry, ...]
    frame: Callable[[dict[str, int]], Iterable[tuple[int, bytes]]]
    needs_crc: bool = False
