"""What a file is, from its content; and the error for one that holds no weights.

Suffixes are not trusted: a Git-LFS pointer, a login page or a half-made download carries the name of the
weights it stands for. A few kilobytes are read. This module opens no format; it only tells them apart.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

from convert.errors import FormatError, Problem
from convert.formats import sstable
from convert.io_errors import advice

_HEAD = 64 << 10
_SAMPLES = 64

#: First bytes of formats that hold no weights we read.
_MAGICS = (
    (b"\x89HDF\r\n\x1a\n", "hdf5"),
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"7z\xbc\xaf\x27\x1c", "7z"),
    (b"Rar!\x1a\x07", "rar"),
    (b"\x93NUMPY", "numpy"),
    (b"%PDF-", "pdf"),
    (b"lmgg", "ggml"),
    (b"fmgg", "ggml"),
    (b"tjgg", "ggml"),
)
_LFS = b"version https://git-lfs.github.com/spec/"
# torch.save before 1.6: a pickled magic number 0x1950a86a20f9469cfc6c, then protocol version, sizes, objects.
_LEGACY = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"

#: What each kind is called, and what to do about it.
_SENTENCES: dict[str, tuple[str, str | None]] = {
    "torch-legacy": (
        "is a torch file in the format from before torch 1.6 (no zip archive)",
        "Open it once in torch and save it again: "
        "torch.save(torch.load(path, map_location='cpu', weights_only=True), new_path).",
    ),
    "pickle": (
        "is a bare Python pickle, not an archive written by torch.save",
        "Load it where it was made and store the state dict with torch.save or safetensors.",
    ),
    "hdf5": ("is an HDF5 file (Keras weights)", "Export the weights to safetensors first."),
    "numpy": ("is a numpy array file", "Store the state dict with torch.save or safetensors."),
    "gzip": ("is gzip-compressed", "Decompress it first (gunzip)."),
    "bzip2": ("is bzip2-compressed", "Decompress it first (bunzip2)."),
    "xz": ("is xz-compressed", "Decompress it first (unxz)."),
    "zstd": ("is zstd-compressed", "Decompress it first (unzstd)."),
    "7z": ("is a 7z archive", "Unpack it first."),
    "rar": ("is a RAR archive", "Unpack it first."),
    "tar": ("is a tar archive", "Unpack it first (tar -xf) and give the folder."),
    "zip": ("is a zip archive that torch.save did not write", "Unpack it first and give the folder."),
    "pdf": ("is a PDF document", "Give the weights' file or folder."),
    "ggml": (
        "is a GGML file from before GGUF",
        "Its layout is no longer supported; get the model as GGUF, safetensors or .pth.",
    ),
    "json": (
        "is a JSON text, not weights",
        "Give the folder that holds the weights, or the .safetensors or .pth file.",
    ),
    "text": ("is a text, not weights", "Give the folder or file that holds the weights; or download it again."),
    "empty": ("is empty (0 bytes)", "Download or copy it again."),
    "zeros": (
        "holds nothing but zero bytes (all samples across the file)",
        "The download or copy did not finish; get it again.",
    ),
    "unknown": (
        "is in no format that can be recognised",
        "Readable are safetensors, torch zip files (.pth, .pt, .bin) and GGUF.",
    ),
}


def sniff(path: Path) -> str:
    """The kind of file at ``path``, from its content.

    Returns:
        ``safetensors``, ``torch``, ``gguf``, ``tensorflow`` (an index); or, for files that hold no weights we
        read, ``lfs``, ``html``, ``torch-legacy``, ``pickle``, ``zip``, ``tar``, ``hdf5``, ``gzip``, ``bzip2``,
        ``xz``, ``zstd``, ``7z``, ``rar``, ``numpy``, ``pdf``, ``ggml``, ``json``, ``text``, ``empty``, ``zeros``,
        ``unknown``.

    Raises:
        FormatError: There is no such file, or it cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD) or b""
            return _kind(file, head, size)
    except OSError as error:
        raise FormatError(
            Problem(
                "unreadable",
                f"{path} cannot be read: {error.strerror or error}.",
                file=str(path),
                hint=advice(error) or "Give the path of an existing file or folder.",
            )
        ) from None


def _kind(file: BinaryIO, head: bytes, size: int) -> str:
    if not head:
        return "empty"
    if head.startswith(b"GGUF"):
        return "gguf"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "torch" if _mentions_pickle(file, head, size) else "zip"
    # Before the short magics: the first two bytes are the low ones of a length, and may be anything.
    if len(head) > 8 and head[8:9] == b"{" and struct.unpack_from("<Q", head)[0] < 1 << 40:
        return "safetensors"
    if head.startswith(_LFS):
        return "lfs"
    for magic, kind in _MAGICS:
        if head.startswith(magic):
            return kind
    if head[257:262] == b"ustar":
        # The oldest torch files (0.1) were tar archives of these members.
        return "torch-legacy" if head[:100].rstrip(b"\0") in (b"sys_info", b"pickle", b"storages") else "tar"
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05":
        return "torch-legacy" if _LEGACY in head[:32] else "pickle"
    if not head.strip(b"\0") and _zeros(file, size):
        return "zeros"
    if _is_table(file, size):
        return "tensorflow"
    return _text_kind(head)


def _is_table(file: BinaryIO, size: int) -> bool:
    """Whether it ends as the index of a TensorFlow checkpoint does (a sorted table, which has no magic in front)."""
    file.seek(max(0, size - len(sstable.MAGIC)))
    return (file.read(len(sstable.MAGIC)) or b"") == sstable.MAGIC


def _mentions_pickle(file: BinaryIO, head: bytes, size: int) -> bool:
    """Whether a zip lists a ``data.pkl``: it comes first in files of torch.save; the directory is at the end."""
    if b"/data.pkl" in head[:1024]:
        return True
    file.seek(max(0, size - _HEAD))
    return b"/data.pkl" in (file.read(_HEAD) or b"")


def _zeros(file: BinaryIO, size: int) -> bool:
    """Whether samples from the start to the end of the file are all zero."""
    for step in range(_SAMPLES + 1):
        file.seek(max(0, (size - 4096) * step // _SAMPLES))
        if (file.read(4096) or b"").strip(b"\0"):
            return False
    return True


def _text_kind(head: bytes) -> str:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    lower = start[:512].lower()
    if lower.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml", b"<!--")):
        return "html"
    if b"\0" in head:
        return "unknown"
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # not just a character cut at the end of what was read
            return "unknown"
        text = head[: error.start].decode("utf-8")
    if start.startswith((b"{", b"[")):
        return "json"
    printable = sum(character.isprintable() or character in "\r\n\t" for character in text)
    return "text" if printable >= 0.97 * len(text) else "unknown"


def refuse_non_weights(path: Path, kind: str) -> FormatError:
    """The error for a file that :func:`sniff` found to be something else than weights.

    Args:
        path: The file.
        kind: What :func:`sniff` said.

    Returns:
        An error to raise; its problem's kind is ``not_weights``, found is ``kind``.
    """
    hint: str | None
    if kind == "lfs":
        sentence, hint = _lfs(path)
    elif kind == "html":
        title = _title(path)
        sentence = f"is a web page (title: {title})" if title else "is a web page"
        hint = "The download was answered with a page, perhaps a login; log in (or accept the licence) and try again."
    elif kind == "text":
        sentence, hint = _SENTENCES[kind]
        sentence += f" (it begins {_first_line(path)!r})"
    else:
        sentence, hint = _SENTENCES.get(kind, (f"is a {kind} file, which does not belong here", None))
    problem = Problem("not_weights", f"{path.name} {sentence}.", file=str(path), found=kind, hint=hint)
    return FormatError(problem)


def lfs_size(path: Path) -> int | None:
    """The size in bytes of the file that a Git-LFS pointer stands for, or None."""
    for line in _head(path, 1024).splitlines():
        if line.startswith(b"size "):
            digits = line[5:].strip()
            return int(digits) if digits.isdigit() and len(digits) < 20 else None
    return None


def human_size(count: int) -> str:
    """``4.98 GB``: three digits, decimal units, as model pages print sizes."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    if units[0] == "bytes":
        return f"{count} bytes"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {units[0]}"


def _head(path: Path, count: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(count)


def _lfs(path: Path) -> tuple[str, str]:
    size = lfs_size(path)
    what = f"a {human_size(size)} file" if size is not None else "the real file"
    return f"is a Git-LFS pointer to {what}, not the file itself", "Run `git lfs pull` in its folder."


def _title(path: Path) -> str | None:
    text = _head(path, _HEAD).decode("utf-8", "replace")
    lower = text.lower()
    start = lower.find("<title")
    start = lower.find(">", start) + 1 if start >= 0 else 0
    end = lower.find("</title", start)
    if not start or end < 0:
        return None
    return " ".join("".join(c if c.isprintable() else " " for c in text[start:end]).split())[:80] or None


def _first_line(path: Path) -> str:
    lines = _head(path, 4096).decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in lines if line.strip()), "")[:80]
