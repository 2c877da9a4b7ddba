"""Writes the few pickles that torch reads, opcode by opcode, without torch: protocol 2.

What :mod:`convert.formats.torch_zip_writer` uses is known to ``weights_only``. Sources: Python's ``pickletools``, and
what ``torch.save`` of torch 2.13 writes.
"""

from __future__ import annotations

import struct

from convert.formats.placeholders import STORAGES, TORCH_TYPES
from convert.formats.spec import Entry

_CLASSES = {dtype: name for name, dtype in STORAGES.items()}
#: Element types as torch names them, by ours.
TORCH_NAMES = {ours: name for name, ours in TORCH_TYPES.items()}


class PickleWriter:
    """Opcodes with a memo for what every tensor repeats."""

    def __init__(self) -> None:
        self._memo: dict[str, int] = {}

    def once(self, key: str, opcodes: bytes) -> bytes:
        """``opcodes`` the first time, a reference to their result afterwards."""
        if key in self._memo:
            return b"h%c" % self._memo[key]
        self._memo[key] = len(self._memo)
        return opcodes + b"q%c" % self._memo[key]

    def tensor(self, key: str, entry: Entry) -> bytes:
        """A contiguous tensor that covers the storage ``key``."""
        count, strides = 1, []
        for length in reversed(entry.shape):
            strides.append(count)
            count *= max(length, 1)
        count = 0 if 0 in entry.shape else count
        typed = _CLASSES.get(entry.dtype)
        if typed is not None:
            rebuild = self.once("v2", b"ctorch._utils\n_rebuild_tensor_v2\n")
            storage = self.once(typed, f"ctorch\n{typed}\n".encode())
            element = b""
        else:  # types without a storage class of their own: bytes, and the type beside them
            rebuild = self.once("v3", b"ctorch._utils\n_rebuild_tensor_v3\n")
            storage = self.once("untyped", b"ctorch.storage\nUntypedStorage\n")
            element = self.once(entry.dtype, f"ctorch\n{TORCH_NAMES[entry.dtype]}\n".encode())
            count = entry.nbytes
        return b"".join(
            [
                rebuild,
                b"((",
                self.once("storage", text("storage")),
                storage,
                text(key),
                self.once("cpu", text("cpu")),
                integer(count),
                b"tQ",
                integer(0),
                numbers(entry.shape),
                numbers(tuple(reversed(strides))),
                b"\x89",  # requires_grad
                self.once("OrderedDict", b"ccollections\nOrderedDict\n"),
                b")R",  # no hooks
                element,
                b"tR",
            ]
        )


def text(value: str) -> bytes:
    """A text."""
    raw = value.encode("utf-8")
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(value: int) -> bytes:
    """A number that is not negative, of 63 bits at most."""
    if value < 1 << 8:
        return b"K%c" % value
    if value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)


def numbers(values: tuple[int, ...]) -> bytes:
    """A tuple of such numbers."""
    body = b"".join(map(integer, values))
    if len(values) > 3:
        return b"(" + body + b"t"
    return body + (b")", b"\x85", b"\x86", b"\x87")[len(values)]
