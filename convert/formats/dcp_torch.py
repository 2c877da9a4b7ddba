"""torch's own reader of distributed checkpoints, with a metadata file that cannot execute anything.

``torch.distributed.checkpoint.load`` unpickles ``.metadata``, which may run whatever that names. Give it this reader
instead: ``dcp.load(state, storage_reader=RestrictedReader(folder))``. Conversions do not need it: they find the bytes
of the tensors themselves (:mod:`convert.formats.dcp`). Imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import metadata as classes
from torch.distributed.checkpoint.filesystem import _StorageInfo

from convert.formats.dcp import read
from convert.formats.placeholders import TORCH_TYPES


class RestrictedReader(FileSystemReader):  # type: ignore[misc]
    """Reads a distributed checkpoint of an unknown origin.

    The streams are read by torch with ``weights_only=True``. Objects that are no tensors are left out: torch would
    unpickle them without restriction.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> classes.Metadata:
        """The metadata, built anew from what our own reader found in the pickle.

        Raises:
            FormatError: It names anything but its own classes, or is damaged.
        """
        found = read(Path(self.path))
        names = {ours: name for name, ours in TORCH_TYPES.items()}
        stored: dict[str, Any] = {}
        storage: dict[Any, Any] = {}
        for name, chunks in found.metadata["chunks"].items():
            if name not in found.tensors:  # of a type that we do not have
                continue
            spec = found.tensors[name]
            stored[name] = classes.TensorStorageMetadata(
                classes.TensorProperties(dtype=getattr(torch, names[spec.dtype])),
                torch.Size(spec.shape),
                [classes.ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.shape)) for c in chunks],
            )
            for chunk in chunks:
                index = classes.MetadataIndex(name, torch.Size(chunk.offsets))
                storage[index] = _StorageInfo(chunk.file.name, chunk.start, chunk.length)
        paths = {name: path for name, path in found.metadata["paths"].items() if name in stored}
        made = classes.Metadata(stored, paths or None, storage)
        made.storage_meta = classes.StorageMeta(load_id=self.load_id)
        return made
