"""SHA-256 of files and of their headers: streaming, and of an output while it is being written.

hashlib releases the interpreter lock, so each file is hashed by a thread of its own beside the workers: it follows the
finished front of the file and reads it back from the page cache. What hashes are compared with is
:mod:`convert.checksums`' and :mod:`convert.check`'s business.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.errors import ConvertError, Problem
from convert.platform import read_at

if TYPE_CHECKING:
    from convert.formats.spec import FileLayout

#: Bytes per read: what a second-level cache holds is hashed faster than what comes from memory twice.
_CHUNK = 1 << 20
#: The first MiB of a file, which holds a safetensors header and some weights: tells two finetunes of a model apart.
_HEAD_BYTES = 1 << 20
#: Git's name of a file's content: SHA-1 of its length and its bytes. The hub calls small files so.
GIT = "git-sha1"


def head_hash(path: Path) -> str:
    """SHA-256 of the first MiB."""
    with path.open("rb") as file:
        return hashlib.sha256(file.read(_HEAD_BYTES)).hexdigest()


def header_hash(path: Path, format: str, *, data_start: int | None = None) -> str | None:
    """SHA-256 of what a weight file says about its tensors, without their values.

    safetensors: the length and the JSON. GGUF: everything before the tensors' data. torch: the object tree and the
    archive's directory, in which the CRC-32 of every tensor lies.

    Args:
        path: The file.
        format: Its container format.
        data_start: Where the tensors of a GGUF file begin, for one who knows: large vocabularies take 0.1 s to read.

    Returns:
        None for a format whose headers are files of their own.

    Raises:
        ConvertError: The file is not of this format.
    """
    if format == "gguf":
        from convert.formats.gguf_header import read_header

        return _hash_range(path, 0, read_header(path).data_start if data_start is None else data_start)
    if format == "torch":
        return _torch_header(path)
    if format != "safetensors":
        return None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    return _hash_range(path, 0, min(8 + length, path.stat().st_size))


def _torch_header(path: Path) -> str:
    from convert.formats.zip_directory import ZipDirectory

    with open(path, "rb", buffering=0) as file:
        directory = ZipDirectory(file, path)
        found = hashlib.sha256()
        for name, entry in directory.entries.items():
            if name.endswith("/data.pkl"):
                found.update(directory.read(entry))
        file.seek(directory.start)
        while data := file.read(_CHUNK):
            found.update(data)
    return found.hexdigest()


def _hash_range(path: Path, start: int, stop: int) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        while start < stop and (data := file.read(min(_CHUNK, stop - start))):
            found.update(data)
            start += len(data)
    return found.hexdigest()


def hash_file(
    path: Path,
    algorithm: str = "sha256",
    *,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
) -> str:
    """The hash of a whole file, as fast as hashlib.

    Args:
        path: The file.
        algorithm: A name that hashlib knows, or :data:`GIT`.
        progress: Called with the bytes hashed since the last call.
        cancel: When set, the work ends and the hash is of no use.

    Raises:
        OSError: It cannot be read.
    """
    found = hashlib.new("sha1" if algorithm == GIT else algorithm, usedforsecurity=False)
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        if algorithm == GIT:
            found.update(b"blob %d\0" % path.stat().st_size)
        while (got := file.readinto(buffer)) and not (cancel and cancel.is_set()):
            found.update(view[:got])
            if progress:
                progress(got)
    return found.hexdigest()


def hash_files(
    paths: Sequence[Path],
    algorithm: str = "sha256",
    *,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
) -> dict[Path, str]:
    """The hashes of several files, one thread each, ``threads`` at a time.

    Raises:
        ConvertError: Files that cannot be read, all of them.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(max(1, threads)) as pool:
        pending = {
            p: pool.submit(hash_file, p, algorithm, progress=progress, cancel=stop) for p in dict.fromkeys(paths)
        }
        try:
            return _results(pending)
        except BaseException:
            stop.set()
            raise


def _results(pending: dict[Path, Future[str]]) -> dict[Path, str]:
    out, problems = {}, []
    for path, future in pending.items():
        try:
            out[path] = future.result()
        except OSError as error:
            reason = error.strerror or str(error)
            problems.append(Problem("unreadable", f"{path} cannot be read: {reason}.", file=str(path)))
    if problems:
        raise ConvertError(problems)
    return out


@dataclass(slots=True)
class Hashes:
    """Full hashes of a conversion.

    Attributes:
        outputs: SHA-256 of each weight file, by its planned name.
        sources: SHA-256 of each source file.
    """

    outputs: dict[str, str] = field(default_factory=dict)
    sources: dict[Path, str] = field(default_factory=dict)


class Hasher:
    """Hashes the outputs of one run while they are written, and its sources beside them.

    A file whose header does not depend on its tensors is followed from the start: the header's bytes are known before
    they are written. A torch file, whose header holds CRCs, is read once it is complete.

    Args:
        files: The planned files.
        fds: Their open, readable descriptors.
        sources: Files to hash beside them.
        threads: How many files are hashed at a time, on each side.
    """

    def __init__(
        self, files: Sequence[FileLayout], fds: Sequence[int], sources: Iterable[Path] = (), *, threads: int = 2
    ) -> None:
        self._followers = [_Follower(file, fd) for file, fd in zip(files, fds, strict=True)]
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(max(1, threads))
        self._beside = ThreadPoolExecutor(max(1, threads))
        self._outputs = {f.file.name: self._pool.submit(f.follow) for f in self._followers}
        self._sources = {p: self._beside.submit(hash_file, p, cancel=self._stop) for p in dict.fromkeys(sources)}

    def wrote(self, number: int, start: int, count: int) -> None:
        """Bytes of file ``number`` are in place; called by any worker, in any order."""
        self._followers[number].wrote(start, count)

    def finish(self) -> Hashes:
        """Wait for the hashes; every byte of every file is in place.

        Raises:
            ConvertError: A source cannot be read any more.
        """
        for follower in self._followers:
            follower.complete()
        outputs = {name: future.result() for name, future in self._outputs.items()}
        found = Hashes(outputs, _results(self._sources))
        self.close()
        return found

    def close(self) -> None:
        """End all threads; what they had is dropped."""
        self._stop.set()
        for follower in self._followers:
            follower.stop()
        self._pool.shutdown(cancel_futures=True)
        self._beside.shutdown(cancel_futures=True)

    def __enter__(self) -> Hasher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Follower:
    """One file that is hashed behind its writers."""

    def __init__(self, file: FileLayout, fd: int) -> None:
        self.file = file
        self.fd = fd
        self._done: dict[int, int] = {}
        self._complete = False
        self._stopped = False
        self._news = threading.Condition()

    def wrote(self, start: int, count: int) -> None:
        with self._news:
            self._done[start] = start + count
            self._news.notify()

    def complete(self) -> None:
        with self._news:
            self._complete = True
            self._news.notify()

    def stop(self) -> None:
        with self._news:
            self._stopped = True
            self._news.notify()

    def follow(self) -> str:
        """The hash; waits for the writers where it has to."""
        found = hashlib.sha256()
        buffer = memoryview(bytearray(_CHUNK))
        at = 0
        for start, stop, data in self._segments():
            self._read(found, buffer, at, start)  # padding, which is zeros from the beginning
            at = start
            if data is not None:
                found.update(data)
                at = stop
            while at < stop:
                end = self._ready(at, stop)
                if end is None:
                    return ""
                self._read(found, buffer, at, end)
                at = end
        self._read(found, buffer, at, self.file.size)
        return found.hexdigest()

    def _segments(self) -> list[tuple[int, int, bytes | None]]:
        """The file in order: what is known (its bytes), and what is waited for (None)."""
        if self.file.needs_crc:
            return [(0, self.file.size, None)]
        known: list[Any] = [(at, at + len(data), bytes(data)) for at, data in self.file.frame({})]
        data = [(self.file.offsets[e.name], self.file.offsets[e.name] + e.nbytes, None) for e in self.file.entries]
        return sorted((x for x in known + data if x[0] < x[1]), key=lambda x: x[0])

    def _ready(self, at: int, stop: int) -> int | None:
        """How far the bytes from ``at`` are in place; None when the work was given up."""
        with self._news:
            while True:
                if self._stopped:
                    return None
                end = at
                while end < stop and end in self._done:
                    end = self._done.pop(end)
                if end > at:
                    return min(end, stop)
                if self._complete:
                    return stop
                self._news.wait()

    def _read(self, found: Any, buffer: memoryview, start: int, stop: int) -> None:
        while start < stop and not self._stopped:
            part = buffer[: min(len(buffer), stop - start)]
            got = read_at(self.fd, part, start)
            found.update(part[:got])
            if got < len(part):
                break
            start += got
