"""Byte ranges fetched ahead of their readers: each once, in the order in which they lie, in bounded memory.

Files are cut into chunks; a few threads fetch the next ones while those before are being read, and a chunk is dropped
when all of it that is needed has been read. Files that pass whole are hashed on the way.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.hub.intervals import Intervals
from convert.hub.ranges import Ranges
from convert.hub.repository import RemoteFile
from convert.platform import read_at
from convert.workers import Workers

#: Bytes of a request, how many are held at most, and how many are asked for at a time.
CHUNK_BYTES = 8 << 20
WINDOW_BYTES = 96 << 20
CONNECTIONS = 4
#: What may wait for its turn to be hashed.
_HASH_AHEAD = 64 << 20

_NEW, _COMING, _HERE, _GONE = range(4)


@dataclass(slots=True)
class Wanted:
    """What is to be fetched of one file.

    Attributes:
        path: What readers call it.
        file: The repository's.
        ranges: What is not here yet.
        needed: What readers will ask for.
        fd: Where the rest of the file lies, if it is to be hashed; else None.
    """

    path: Path
    file: RemoteFile
    ranges: list[tuple[int, int]]
    needed: Intervals
    fd: int | None = None


@dataclass(slots=True)
class _Chunk:
    wanted: Wanted
    start: int
    stop: int
    left: int
    state: int = _NEW
    data: bytearray | None = None
    error: BaseException | None = None


@dataclass(slots=True)
class _Passing:
    """One file that is hashed as it passes."""

    wanted: Wanted
    sha: Any = field(default_factory=hashlib.sha256)
    at: int = 0
    waiting: dict[int, bytes | bytearray] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    given_up: bool = False


class Stream(Workers):
    """Fetches ahead.

    Args:
        ranges: Reads byte ranges.
        wanted: What is wanted, in order.
        passed: Called with every chunk that came, once: its file, its first byte there, and its bytes.
    """

    def __init__(
        self,
        ranges: Ranges,
        wanted: list[Wanted],
        passed: Callable[[Path, int, bytearray], None] = lambda *_: None,
    ) -> None:
        super().__init__()
        self._ranges = ranges
        self._passed = passed
        self._chunks: list[_Chunk] = []
        self._places: dict[Path, tuple[list[int], list[_Chunk]]] = {}
        self._passing = {w.path: _Passing(w) for w in wanted if w.fd is not None}
        for item in wanted:
            chunks = [
                _Chunk(item, at, min(at + CHUNK_BYTES, stop), item.needed.overlap(at, min(at + CHUNK_BYTES, stop)))
                for start, stop in item.ranges
                for at in range(start, stop, CHUNK_BYTES)
            ]
            self._chunks += chunks
            self._places[item.path] = ([c.start for c in chunks], chunks)
        self._held = 0
        self._next = 0
        self._begin(self._work, CONNECTIONS, "hub")

    def read(self, path: Path, buffer: memoryview, offset: int) -> bool:
        """Fill ``buffer``; False where some of it is not in the stream (any more).

        Raises:
            ConvertError: It could not be fetched.
        """
        starts, chunks = self._places.get(path, ([], []))
        at, stop = offset, offset + len(buffer)
        while at < stop:
            number = bisect.bisect_right(starts, at) - 1
            if number < 0 or chunks[number].stop <= at:
                return False
            chunk = chunks[number]
            end = min(stop, chunk.stop)
            data = self._have(chunk)
            if data is None:
                return False
            buffer[at - offset : end - offset] = memoryview(data)[at - chunk.start : end - chunk.start]
            self._took(chunk, end - at)
            at = end
        return True

    def finish(self) -> dict[Path, str]:
        """Fetch what no reader needs, for the hashes; returns the SHA-256 of every file that has passed whole."""
        for chunk in self._chunks:
            passing = self._passing.get(chunk.wanted.path)
            if passing is not None and not passing.given_up and chunk.left <= 0:
                self._have(chunk)
        out = {}
        for path, passing in self._passing.items():
            with passing.lock:
                self._advance(passing)
                if passing.at == passing.wanted.file.size and not passing.given_up:
                    out[path] = passing.sha.hexdigest()
        return out

    def _work(self) -> None:
        while True:
            with self._news:
                while not self._stop and self._next < len(self._chunks) and self._held >= WINDOW_BYTES:
                    self._news.wait()
                while self._next < len(self._chunks) and self._chunks[self._next].state != _NEW:
                    self._next += 1
                if self._stop or self._next >= len(self._chunks):
                    return
                chunk = self._take(self._chunks[self._next])
            self._fetch(chunk)

    def _take(self, chunk: _Chunk) -> _Chunk:
        chunk.state = _COMING
        self._held += chunk.stop - chunk.start
        return chunk

    def _have(self, chunk: _Chunk) -> bytearray | None:
        """The chunk's bytes, fetched now if nobody has begun; None if they were dropped."""
        with self._news:
            mine = chunk.state == _NEW
            if mine:
                self._take(chunk)
                self._make_room()
        if mine:
            self._fetch(chunk)
        with self._news:
            while chunk.state == _COMING and not self._stop:
                self._news.wait()
            if chunk.error is not None:
                raise chunk.error
            return chunk.data

    def _make_room(self) -> None:
        """A reader is ahead of the window: what has waited longest goes, and is asked for again if it is missed."""
        for chunk in self._chunks[: self._next]:
            if self._held <= WINDOW_BYTES + 4 * CHUNK_BYTES:
                return
            if chunk.state == _HERE:
                self._drop(chunk)

    def _fetch(self, chunk: _Chunk) -> None:
        data = bytearray(chunk.stop - chunk.start)
        try:
            self._ranges.read_into(chunk.wanted.file, memoryview(data), chunk.start, cancel=lambda: self._stop)
            self._hash(chunk, data)
            self._passed(chunk.wanted.path, chunk.start, data)
        except BaseException as error:
            chunk.error = error
        with self._news:
            chunk.data, chunk.state = data, _HERE
            if chunk.left <= 0 or chunk.error is not None:
                self._drop(chunk)
            self._news.notify_all()

    def _took(self, chunk: _Chunk, count: int) -> None:
        with self._news:
            chunk.left -= count
            if chunk.left <= 0 and chunk.state == _HERE:
                self._drop(chunk)

    def _drop(self, chunk: _Chunk) -> None:
        chunk.data, chunk.state = None, _GONE
        self._held -= chunk.stop - chunk.start
        self._news.notify_all()

    def _hash(self, chunk: _Chunk, data: bytearray) -> None:
        passing = self._passing.get(chunk.wanted.path)
        if passing is None or self._stop:
            return
        with passing.lock:
            if passing.given_up:
                return
            passing.waiting[chunk.start] = data
            self._advance(passing)
            if sum(map(len, passing.waiting.values())) > _HASH_AHEAD:
                passing.given_up = True
                passing.waiting.clear()

    def _advance(self, passing: _Passing) -> None:
        """Hash as far as the file is here: chunks that came, and what lay here before."""
        starts = self._places[passing.wanted.path][0]
        while not passing.given_up and passing.at < passing.wanted.file.size:
            data = passing.waiting.pop(passing.at, None)
            if data is None:
                number = bisect.bisect_left(starts, passing.at)
                upto = starts[number] if number < len(starts) else passing.wanted.file.size
                if upto == passing.at:
                    return  # not here yet
                data = bytearray(min(CHUNK_BYTES, upto - passing.at))
                assert passing.wanted.fd is not None
                with contextlib.suppress(OSError):
                    read_at(passing.wanted.fd, memoryview(data), passing.at)
            passing.sha.update(data)
            passing.at += len(data)
