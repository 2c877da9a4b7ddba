"""Lays out folders of ``torch.distributed.checkpoint``, so that torch's own reader loads them.

Every tensor is one chunk: a stream of ``torch.save`` in a ``.distcp`` file, whose bytes are known but for values and
CRCs, as those of :mod:`convert.formats.torch_zip_writer`; so the engine writes them like any other file, in pieces and
in any order. The metadata is a pickle of torch's own classes, which is written without them. A load with another number
of processes cuts the chunks as it needs them; that is what the format is for. Read by :mod:`convert.formats.dcp`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from convert.errors import ConvertError, Problem
from convert.formats.dcp import METADATA, SUFFIX
from convert.formats.pickle_writer import TORCH_NAMES, integer, numbers, text
from convert.formats.spec import Entry, FileLayout
from convert.formats.torch_zip_writer import layout as zip_layout

#: As torch calls the archive when it saves to a stream.
_ROOT = "archive.pth"
_CLASSES = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
_NONE, _FALSE = b"N", b"\x89"


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
        ConvertError: A type that torch does not have, or a name given twice.
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


class _Pickle:
    """Opcodes that refer to a memo, which a prologue fills: each name and each repeated text stands once."""

    def __init__(self) -> None:
        self._memo: dict[bytes, bytes] = {}

    def once(self, opcodes: bytes) -> bytes:
        """A reference to what ``opcodes`` make."""
        return self._memo.setdefault(opcodes, b"j" + struct.pack("<I", len(self._memo)))

    def name(self, module: str, name: str) -> bytes:
        """A class or function."""
        return self.once(f"c{module}\n{name}\n".encode())

    def made(self, module: str, name: str, **fields: bytes) -> bytes:
        """An instance of a class whose state is a dict."""
        state = b"".join(self.once(text(key)) + value for key, value in fields.items())
        return self.name(module, name) + b")\x81}(" + state + b"ub"

    def called(self, module: str, name: str, argument: bytes) -> bytes:
        """The result of a function of one argument."""
        return self.name(module, name) + argument + b"\x85R"

    def pickle(self, body: bytes) -> bytes:
        """The whole pickle: what is repeated (made, remembered and dropped), then the object."""
        prologue = b"".join(opcodes + b"r" + reference[1:] + b"0" for opcodes, reference in self._memo.items())
        return b"\x80\x02" + prologue + body + b"."


def _metadata(places: Sequence[_Place]) -> bytes:
    """A pickle of ``torch.distributed.checkpoint.metadata.Metadata``, filled in as torch 2.13 does."""
    out = _Pickle()
    layout = out.once(out.called("torch.serialization", "_get_layout", text("torch.strided")))
    contiguous = out.once(out.called(_CLASSES, "_MEM_FORMAT_ENCODING", integer(0)))
    tensors, paths, storage = [], [], []
    for entry, file, start, length in places:
        name = text(entry.name)
        shape = out.called("torch", "Size", numbers(entry.shape))
        origin = out.called("torch", "Size", numbers((0,) * len(entry.shape)))
        state = out.name("torch", TORCH_NAMES[entry.dtype]) + layout + _FALSE + contiguous + _FALSE
        properties = out.name(_CLASSES, "TensorProperties") + b")\x81(" + state + b"tb"
        chunk = out.made(_CLASSES, "ChunkStorageMetadata", offsets=origin, sizes=shape)
        fields = {"properties": properties, "size": shape, "chunks": b"]" + chunk + b"a"}
        tensors.append(name + out.made(_CLASSES, "TensorStorageMetadata", **fields))
        paths.append(name + name + b"\x85")
        where = {"relative_path": out.once(text(file)), "offset": integer(start), "length": integer(length)}
        index = out.made(_CLASSES, "MetadataIndex", fqn=name, index=_NONE, offset=origin)
        storage.append(index + out.made(_STORAGE, "_StorageInfo", **where))
    fields = {
        "state_dict_metadata": _dict(tensors),
        "planner_data": _dict(paths),
        "storage_data": _dict(storage),
        "storage_meta": _NONE,
        "version": text("1.0.0"),
    }
    return out.pickle(out.made(_CLASSES, "Metadata", **fields))


def _dict(items: Sequence[bytes]) -> bytes:
    return b"}(" + b"".join(items) + b"u"
