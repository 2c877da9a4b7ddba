"""A folder that looks like the repository's and takes no room: small files whole, weight files with their headers only.

The weight files are sparse, of their true sizes; what has been read of them lies where it belongs, and
:class:`convert.hub.pool.RemotePool` knows how much that is. Headers are found by asking for the first bytes and, where
they go on, once more; of a torch file, for its end and what that names.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from convert.errors import ConvertError, FormatError, Problem
from convert.formats.zip_directory import ZipDirectory, ZipEntry
from convert.hub.names import Name
from convert.hub.place import Place
from convert.hub.pool import RemotePool
from convert.hub.ranges import Ranges
from convert.hub.repository import RemoteFile, Repository, look_up, patiently
from convert.hub.selection import index_of, select

#: How much of a file is asked for first: most headers are shorter. A conversion needs the first MiB for its record.
FIRST_BYTES = 64 << 10
STREAM_BYTES = 1 << 20
#: A GGUF header is a few kB without a vocabulary, and up to about 8 MB with one.
_GGUF_MORE = 8 << 20
#: The directory of a torch file of a thousand tensors.
_TAIL_BYTES = 128 << 10
#: A record's own header, before its name; and what padding, or a small record, takes at most.
_LOCAL_BYTES, _EXTRA_BYTES = 30, 1024
#: Requests at a time.
PARALLEL = 32
#: Without tensors' values nobody needs a vocabulary of many megabytes.
_SMALL_BYTES = 1 << 20


def look(name: Name, *, layout: str | None = None, stream: bool = False, everything: bool = True) -> Place:
    """Look into a repository.

    Args:
        name: Which.
        layout: The layout that was asked for.
        stream: Prepare for reading all tensors.
        everything: Fetch the tokenizer's files, too, however large.

    Raises:
        ConvertError: It cannot be seen, or a file is damaged; all damaged files at once.
    """
    from convert.locate import weight_map

    repository = look_up(name)
    ranges = Ranges(repository)
    folder = Path(tempfile.mkdtemp(prefix="convert-hub-"))
    pool = RemotePool(ranges, folder)
    try:
        base = folder / repository.name.repo.rpartition("/")[2]
        index = index_of(repository, layout=layout)
        mapping = None
        if index is not None:
            _whole(base, [index], ranges, repository)
            mapping = weight_map(base / index.path)
        chosen = select(repository, layout=layout, weight_map=mapping)
        small = [f for f in chosen.small if f is not index and (everything or stream or f.size <= _SMALL_BYTES)]
        with ThreadPoolExecutor(PARALLEL) as threads:
            jobs: list[Callable[[], None]] = [lambda f=f: _whole(base, [f], ranges, repository) for f in small]  # type: ignore[misc]
            first = STREAM_BYTES if stream else FIRST_BYTES
            for file in chosen.weights:
                pool.add(base / file.path, file)
                jobs.append(lambda f=file: _header(pool, base / f.path, f, first))  # type: ignore[misc]
            _all([threads.submit(job) for job in jobs])
        path = base / (name.inside if name.inside in repository.files else chosen.folder)
    except BaseException:
        pool.close()
        raise
    files = [{"name": f.name, "bytes": f.size, "sha256": f.sha256} for f in chosen.weights]
    notes = [f"{repository.title} on the Hub", *([] if stream else ["headers only were read"])]
    left = [f.name for f in chosen.small if f is not index and f not in small]
    notes += [f"not fetched for this: {', '.join(left)}"] if left else []
    return Place(path, name, repository.commit, files, [*notes, *chosen.notes], pool)


def _all(futures: list) -> None:  # type: ignore[type-arg]
    problems: list[Problem] = []
    for future in futures:
        try:
            future.result()
        except ConvertError as error:
            problems += [p for p in error.problems if p.kind not in {q.kind for q in problems} or p.kind == "header"]
    if problems:
        raise ConvertError(problems)


def _whole(base: Path, files: list[RemoteFile], ranges: Ranges, repository: Repository) -> None:
    """Small files, through the library's cache: the next look costs nothing."""
    from huggingface_hub import hf_hub_download

    for file in files:
        target = base / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        call = lambda f=file: hf_hub_download(  # noqa: E731
            repository.name.repo, f.path, revision=repository.commit, library_name="ckpt-convert"
        )
        got = Path(patiently(call, name=repository.name))  # type: ignore[arg-type]
        if got.stat().st_size != file.size:
            raise ConvertError(
                Problem(
                    "hub_damaged",
                    f"{file.path} has {got.stat().st_size:,} bytes in the cache, and the Hub says {file.size:,}.",
                    file=file.path,
                    hint="Delete it from the cache and try again.",
                )
            )
        os.symlink(got.resolve(), target)


def _header(pool: RemotePool, path: Path, file: RemoteFile, first: int) -> None:
    """Bring the header of one weight file to its place."""
    pool.keep(path, 0, min(first, file.size))
    with path.open("rb") as opened:
        start = opened.read(8)
    if start[:4] == b"GGUF":
        _gguf(pool, path, file, min(first, file.size))
    elif start[:4] == b"PK\x03\x04":
        _torch(pool, path, file)
    elif len(start) == 8 and not file.name.endswith((".bin", ".pth", ".pt")):
        from convert.formats.safetensors import MAX_HEADER

        end = 8 + int.from_bytes(start, "little")
        if end <= min(MAX_HEADER, file.size):  # else it is no header, as its reader will say
            pool.keep(path, 0, end)


def _gguf(pool: RemotePool, path: Path, file: RemoteFile, have: int) -> None:
    from convert.formats.gguf_header import read_header

    while True:
        os.truncate(path, have)  # so that the reader says when the header goes on
        try:
            header = read_header(path)
            break
        except FormatError as error:
            if have == file.size or not any(p.kind == "truncated" for p in error.problems):
                header = None
                break
        finally:
            os.truncate(path, file.size)
        more = min(file.size, max(_GGUF_MORE, 2 * have))
        pool.keep(path, 0, more)
        have = more
    pool.dated(path)
    for info in header.infos if header is not None else ():
        if info.name == "rope_freqs.weight":  # a few numbers that belong to the config
            at = header.data_start + info.offset  # type: ignore[union-attr]
            size = 4 * max(1, *info.dims) if info.dims else 4
            pool.keep(path, at, min(file.size, at + size))


def _torch(pool: RemotePool, path: Path, file: RemoteFile) -> None:
    """A zip archive: its directory ends it, and that tells where the pickle lies."""
    pool.keep(path, max(0, file.size - _TAIL_BYTES), file.size)
    with open(path, "rb", buffering=0) as opened:
        opened.seek(max(0, file.size - _TAIL_BYTES))
        tail = opened.read(_TAIL_BYTES)
        start = _directory_start(tail, file.size)
        if start is not None and start < file.size - _TAIL_BYTES:
            pool.keep(path, start, file.size)
        directory = ZipDirectory(opened, path)

    def local(item: tuple[str, ZipEntry]) -> None:
        name, entry = item
        pickle = entry.size + _EXTRA_BYTES if name.endswith("/data.pkl") or entry.size < _EXTRA_BYTES else 0
        pool.keep(path, entry.header, min(file.size, entry.header + _LOCAL_BYTES + len(name.encode()) + pickle))

    with ThreadPoolExecutor(PARALLEL) as threads:  # where a record begins, only its own header tells
        list(threads.map(local, directory.entries.items()))


def _directory_start(tail: bytes, size: int) -> int | None:
    """Offset of the central directory, from the end of the file; None where that is not there."""
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + 22 > len(tail):
        return None
    start = int.from_bytes(tail[at + 16 : at + 20], "little")
    wide = tail.rfind(b"PK\x06\x06", 0, at)
    if start == 0xFFFFFFFF and wide >= 0:
        start = int.from_bytes(tail[wide + 48 : wide + 56], "little")
    return start if start < size else None
