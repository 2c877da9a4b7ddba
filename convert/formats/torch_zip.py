"""Reads ``.pth``, ``.pt`` and ``.bin`` files of ``torch.save`` without torch, executing nothing.

Such a file is a zip archive: ``<root>/data.pkl`` describes the objects, ``<root>/data/<key>`` holds each
storage, uncompressed. :func:`read` gives the objects as plain nested containers whose tensors are
:class:`~convert.formats.spec.TensorSpec` (name empty: only :mod:`convert.wrappers` knows which dict is the
model) and whose other objects are inert placeholders. Written by :mod:`convert.formats.torch_zip_writer`.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import BinaryIO

from convert.dtypes import DTYPES
from convert.errors import FormatError, Problem
from convert.formats import pickles
from convert.formats.placeholders import Placeholder, StorageRef
from convert.formats.sniff import refuse_non_weights, sniff
from convert.formats.spec import Container, TensorSpec
from convert.formats.zip_directory import ZipDirectory, ZipEntry

_MAX_PROBLEMS = 20
_MAX_ELEMENTS = 1 << 60


def read(path: Path) -> Container:
    """Open a torch file: its directory and object tree, no tensor data.

    Args:
        path: The file, whatever its suffix.

    Returns:
        A container of format ``torch`` with ``metadata={"tree": …}`` and no named tensors;
        :func:`convert.wrappers.unwrap` picks those. Its notes list the objects that were left unread.

    Raises:
        FormatError: Not a torch zip file, truncated, damaged, compressed, big-endian, a TorchScript archive;
            or tensors that reach outside their storages (all of them at once).
    """
    kind = sniff(path)
    if kind != "torch":
        raise refuse_non_weights(path, kind)
    with open(path, "rb", buffering=0) as file:
        found = read_stream(file, path)
    return Container("torch", (path,), {}, metadata={"tree": found.root}, notes=_notes(found.placeholders))


def read_stream(file: BinaryIO, path: Path) -> pickles.Unpickled:
    """The object tree of an open archive; offsets of its tensors count from the archive's first byte.

    Args:
        file: Opened in binary mode, unbuffered; a file, or something that reads a range of one.
        path: For error messages, and as the file of the tensors.

    Raises:
        FormatError: See :func:`read`.
    """
    directory = ZipDirectory(file, path)
    root = _root(directory, path)
    record = directory.entries[f"{root}/data.pkl"]
    pickles.check_size(record.size, file=path.name)
    data = directory.read(record)
    storages = _Storages(directory, root, path, has_crcs=_has_crcs(directory, record, data))
    found = pickles.load(data, tensor=storages.tensor, file=path.name)
    if storages.problems:
        raise FormatError(storages.problems)
    return found


def _root(directory: ZipDirectory, path: Path) -> str:
    """The archive's top folder, with what cannot be read refused."""
    roots = [name[: -len("/data.pkl")] for name in directory.entries if name.endswith("/data.pkl")]
    roots = [root for root in roots if "/" not in root]
    if len(roots) != 1:
        some = ", ".join(repr(name[:60]) for name in list(directory.entries)[:4])
        raise directory.error(
            "not_weights",
            f"is a zip archive that torch.save did not write: it has {len(roots)} object trees (it holds {some} …).",
            "Give the .pth or .safetensors file that holds the state dict.",
        )
    root = roots[0]
    if f"{root}/constants.pkl" in directory.entries:
        raise directory.error(
            "not_weights",
            "is a TorchScript archive (a compiled model), not a state dict.",
            "Extract the weights once: torch.save(torch.jit.load(path, map_location='cpu').state_dict(), new_path).",
        )
    if not {f"{root}/version", f"{root}/.data/version"} & directory.entries.keys():  # torch asks for it, and stops
        raise directory.error(
            "damaged",
            "lacks the record 'version', without which torch does not read it.",
            "Download or save the file again.",
        )
    order = directory.entries.get(f"{root}/byteorder")
    if order is not None and (word := directory.read(order) if order.size < 16 else b"?") != b"little":
        raise directory.error(
            "byteorder",
            f"was saved with byte order {word.decode('ascii', 'replace')!r}; only 'little' is read.",
            "Load it in torch on a little-endian machine and save it again.",
            found=word.decode("ascii", "replace"),
            wanted="little",
        )
    return root


def _has_crcs(directory: ZipDirectory, record: ZipEntry, data: bytes) -> bool:
    """Whether the archive's CRCs are real.

    ``torch.serialization.set_crc32_options(False)`` stores zeros; a CRC that is neither zero nor right means
    that the object tree itself is damaged.
    """
    if record.crc == 0:
        return False
    if zlib.crc32(data) != record.crc:
        raise directory.error(
            "damaged",
            "is damaged: the object tree does not have the CRC-32 that the archive states.",
            "Download or copy it again.",
            found=f"{zlib.crc32(data):08x}",
            wanted=f"{record.crc:08x}",
        )
    return True


def _notes(placeholders: dict[str, int]) -> list[str]:
    """One line that lists what was left unread."""
    if not placeholders:
        return []
    names = [f"{name[:120]} × {count}" if count > 1 else name[:120] for name, count in placeholders.items()]
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return [f"objects left unread (nothing in the file was executed): {', '.join(names[:12])}{more}"]


class _Storages:
    """Turns a pickle's tensors into specs, checking each against the archive; problems are collected."""

    def __init__(self, directory: ZipDirectory, root: str, path: Path, *, has_crcs: bool) -> None:
        self.directory = directory
        self.root = root
        self.path = path
        self.has_crcs = has_crcs
        self.problems: list[Problem] = []
        # By identity: the pickle reader gives one object per storage and element type.
        self.known: dict[StorageRef, tuple[int, int, int | None] | None] = {}

    def tensor(
        self, storage: StorageRef, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str
    ) -> TensorSpec | Placeholder:
        """The spec of one tensor (strides in elements), or a placeholder after a problem."""
        if storage in self.known:
            place = self.known[storage]
        else:
            place = self.known[storage] = self._place(storage)
        kind = DTYPES.get(dtype)
        if kind is None:
            return Placeholder(f"torch._utils._rebuild_tensor on a {dtype}", called=True)
        if place is None:
            return Placeholder("damaged tensor", called=True)
        start, nbytes, crc = place
        size = kind.block_bytes
        count = last = 1
        contiguous = True
        for length, stride in zip(reversed(shape), reversed(strides), strict=True):
            if type(length) is not int or type(stride) is not int or length < 0 or stride < 0:
                return self._bad(storage, "has a shape or strides that are not counts")
            if length != 1 and stride != count:
                contiguous = False
            last += (length - 1) * stride
            count *= length
            if count > _MAX_ELEMENTS or last > _MAX_ELEMENTS:
                return self._bad(storage, f"has more than 2**60 elements in its {len(shape)} dimensions")
        if not 0 <= offset <= _MAX_ELEMENTS or (count and (offset + last) * size > nbytes) or offset * size > nbytes:
            return self._bad(
                storage,
                f"does not lie inside it: shape {list(shape)}, strides {list(strides)}, {dtype}, from element "
                f"{min(offset, _MAX_ELEMENTS)}, in {nbytes:,} bytes",
            )
        whole = contiguous and offset == 0 and count * size == nbytes
        return TensorSpec(
            "",
            dtype,
            shape,
            self.path,
            start + offset * size,
            None if contiguous or not count else strides,
            storage.key,
            crc if whole else None,
        )

    def _place(self, storage: StorageRef) -> tuple[int, int, int | None] | None:
        """Data offset, bytes and CRC of a storage, or None after a problem."""
        entry = self.directory.entries.get(f"{self.root}/data/{storage.key}")
        if entry is None:
            self._problem("missing_storage", f"storage {storage.key[:80]!r} is missing from the archive")
            return None
        offset = self.directory.data_offset(entry)
        size = DTYPES[storage.dtype].block_bytes if storage.dtype in DTYPES else 0
        if size and entry.size != storage.numel * size:
            self._problem(
                "storage_size",
                f"storage {storage.key[:80]!r} has {entry.size:,} bytes; its {min(storage.numel, _MAX_ELEMENTS):,} "
                f"elements of {storage.dtype} need {min(storage.numel, _MAX_ELEMENTS) * size:,}",
            )
            return None
        return offset, entry.size, entry.crc or None if self.has_crcs else None

    def _bad(self, storage: StorageRef, why: str) -> Placeholder:
        self._problem("tensor_bounds", f"a tensor in storage {storage.key[:80]!r} {why}")
        return Placeholder("damaged tensor", called=True)

    def _problem(self, kind: str, why: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            hint = "The file is damaged; download or save it again."
            self.problems.append(Problem(kind, f"{self.path.name}: {why}.", file=str(self.path), hint=hint))
