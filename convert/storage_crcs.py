"""The CRC-32 that a ``torch.save`` archive states of each storage, compared with the storage's bytes.

torch itself does not look at them when it loads. Small sources are compared before every conversion, larger ones
where all bytes are to be looked at anyway. A CRC of zero states nothing: it is what torch writes under
``torch.serialization.set_crc32_options(False)``, and for storages left empty by ``torch.serialization.skip_data()``.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from convert.errors import Problem
from convert.formats.crc import crc32_combine
from convert.formats.zip_directory import ZipDirectory
from convert.io_errors import reading
from convert.report import fold_names

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint

#: Up to so many bytes of storages every conversion compares (about a quarter of a second on one core).
SMALL = 256 << 20
_PIECE = 16 << 20
_READ = 1 << 20


@dataclass(slots=True)
class _Storage:
    """Where a storage lies, what CRC its archive states, and the tensors in it."""

    file: Path
    offset: int
    nbytes: int
    wanted: int
    names: list[str] = field(default_factory=list)
    found: int = 0


def compare_crcs(
    ckpt: Checkpoint,
    *,
    limit: int | None = None,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
) -> tuple[int, list[Problem]]:
    """Compare the storages that hold the checkpoint's tensors with their CRCs.

    Args:
        ckpt: Of any format; only archives of ``torch.save`` on this machine have such CRCs.
        limit: Compare nothing where the storages have more bytes in all.
        threads: Pieces read at once, through buffers of 1 MiB.
        progress: Called with the bytes read since the last call, from any thread.
        cancel: When set, reading stops; nothing is found then.

    Returns:
        How many storages were compared, and a problem of kind ``crc`` for each that is not what its archive states.

    Raises:
        ConvertError: The system cannot read a file, or it is damaged or shorter than before.
    """
    if ckpt.format != "torch" or not ckpt.pool.local:
        return 0, []
    storages = _storages(ckpt)
    if limit is not None and sum(s.nbytes for s in storages) > limit:
        return 0, []
    pool, local = ckpt.pool, threading.local()
    stop = cancel or threading.Event()

    def pieces() -> Iterator[tuple[_Storage, int, int]]:
        for storage in storages:
            for at in range(0, storage.nbytes, _PIECE):
                yield storage, at, min(_PIECE, storage.nbytes - at)

    def work(piece: tuple[_Storage, int, int]) -> tuple[_Storage, int, int]:
        storage, start, length = piece
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(_READ))
        value = 0
        for at in range(start, start + length, _READ):
            if stop.is_set():
                break
            part = local.buffer[: min(_READ, start + length - at)]
            pool.read_into(storage.file, part, storage.offset + at)
            value = zlib.crc32(part, value)
        if progress is not None:
            progress(length)
        return storage, value, length

    with ThreadPoolExecutor(max(1, threads)) as workers:
        for storage, value, length in workers.map(work, pieces()):
            storage.found = crc32_combine(storage.found, value, length)
    if stop.is_set():
        return 0, []
    return len(storages), [_problem(s) for s in storages if s.found != s.wanted]


def _storages(ckpt: Checkpoint) -> list[_Storage]:
    """Every storage that holds a tensor of the checkpoint and has a CRC, in the order of the files."""
    keys: dict[Path, dict[str, list[str]]] = {}
    for name, specs in ckpt.tensors.items():
        for spec in specs:
            for part in spec.parts or (spec,):
                if part.storage is not None:
                    names = keys.setdefault(part.file, {}).setdefault(part.storage, [])
                    names += [name] if name not in names else []
    found: list[_Storage] = []
    for path, wanted in keys.items():
        with reading(path), open(path, "rb", buffering=0) as file:
            directory = ZipDirectory(file, path)
            root = next(n for n in directory.entries if n.endswith("/data.pkl") and n.count("/") == 1)
            root = root.removesuffix("data.pkl")
            for key, names in wanted.items():
                entry = directory.entries.get(f"{root}data/{key}")
                if entry is not None and entry.crc and entry.size:
                    found.append(_Storage(path, directory.data_offset(entry), entry.size, entry.crc, names))
    return sorted(found, key=lambda s: (str(s.file), s.offset))


def _problem(storage: _Storage) -> Problem:
    what = f"the {storage.nbytes:,} bytes of {', '.join(fold_names(storage.names))}"
    return Problem(
        "crc",
        f"{storage.file.name}: {what} do not have the CRC-32 that the archive states.",
        tensor=storage.names[0],
        file=str(storage.file),
        found=f"{storage.found:08x}",
        wanted=f"{storage.wanted:08x}",
        hint="The file was damaged or changed after it was written: fetch it again, and compare its hash with the "
        "published one (convert validate --hash, or --checksums FILE).",
    )
