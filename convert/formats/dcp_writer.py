"""Lays out folders of ``torch.distributed.checkpoint``, so that torch's own reader loads them.

Every tensor is one chunk: a stream of ``torch.save`` in a ``.distcp`` file, whose bytes are known but for values and
CRCs, as those of :mod:`convert.formats.torch_zip_writer`; so the engine writes them like any other file, in pieces and
in any order. The metadata is a pickle of torch's own classes; for it alone torch is imported. A load with another
number of processes cuts the chunks as it needs them; that is what the format is for. Read by
:mod:`convert.formats.dcp`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from convert.errors import ConvertError, Problem
from convert.formats.dcp import METADATA, SUFFIX
from convert.formats.placeholders import TORCH_TYPES
from convert.formats.spec import Entry, FileLayout
from convert.formats.torch_zip_writer import layout as zip_layout

#: As torch calls the archive when it saves to a stream.
_ROOT = "archive.pth"
#: The protocol of torch's own writer in torch 2.13 and Python 3.11, fixed here: equal plans give equal bytes.
_PROTOCOL = 4


def file_name(number: int) -> str:
    """The name of the numbered file of one process."""
    return f"__0_{number}{SUFFIX}"


def layouts(groups: Sequence[Sequence[Entry]]) -> list[FileLayout]:
    """Plan the files of a folder.

    Args:
        groups: The tensors of each ``.distcp`` file, in order.

    Returns:
        The files, and last the metadata, which has no tensors.

    Raises:
        ConvertError: A type that torch does not have, a name given twice, or torch is not installed.
    """
    files, places = [], []
    for number, group in enumerate(groups):
        file, found = _file(file_name(number), group)
        files.append(file)
        places += found
    data = _metadata(places)
    return [*files, FileLayout(METADATA, "dcp", len(data), {}, (), lambda _: [(0, data)])]


#: A tensor, and file, first byte and bytes of its stream.
_Place = tuple[Entry, str, int, int]


def _file(name: str, entries: Sequence[Entry]) -> tuple[FileLayout, list[_Place]]:
    streams, places, offsets, at = [], [], {}, 0
    for entry in entries:
        if entry.name in offsets:
            raise ConvertError(Problem("duplicate", f"{entry.name!r} would be stored twice.", tensor=entry.name))
        stream = zip_layout(_ROOT, [entry], bare=True)
        streams.append((entry.name, at, stream))
        places.append((entry, name, at, stream.size))
        offsets[entry.name] = at + stream.offsets[entry.name]
        at += stream.size

    def frame(crcs: dict[str, int]) -> Iterator[tuple[int, bytes]]:
        for tensor, start, stream in streams:
            for offset, data in stream.frame({tensor: crcs[tensor]} if tensor in crcs else {tensor: 0}):
                yield start + offset, data

    return FileLayout(name, "dcp", at, offsets, tuple(entries), frame, needs_crc=True), places


def _metadata(places: Sequence[_Place]) -> bytes:
    try:
        import torch
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.filesystem import _StorageInfo
    except ImportError as error:
        raise ConvertError(
            Problem(
                "torch",
                "the metadata of a distributed checkpoint is made of torch's classes, and torch is not installed.",
                hint="pip install torch, or choose --format safetensors.",
            )
        ) from error
    names = {ours: name for name, ours in TORCH_TYPES.items()}
    stored: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for entry, file, start, length in places:
        size, zero = torch.Size(entry.shape), torch.Size([0] * len(entry.shape))
        properties = dcp.TensorProperties(dtype=getattr(torch, names[entry.dtype]))
        chunk = dcp.ChunkStorageMetadata(offsets=zero, sizes=size)
        stored[entry.name] = dcp.TensorStorageMetadata(properties, size, [chunk])
        storage[dcp.MetadataIndex(entry.name, zero)] = _StorageInfo(file, start, length)
    paths = {name: (name,) for name in stored}
    more = {"version": "1.0.0"} if "version" in dcp.Metadata.__dataclass_fields__ else {}
    return pickle.dumps(dcp.Metadata(stored, paths, storage, **more), protocol=_PROTOCOL)
