"""A disk on paper: what a run has changed, call by call, and what a power cut may leave of it.

The model is more careful than any file system in use: of data that was not synced, each page may be there, be what it
was, be zeros or rubbish; names that were not synced by an ``fsync`` of their folder may be there or not. Data that was
synced, and names whose folder was, last. The sync of a file says nothing of its name.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import convert.claim

PAGE = 4096
#: The folder that is recorded.
ROOT = 0
NAMES = ("nothing", "everything", "journal", "folders", "any")
DATA = ("nothing", "everything", "zeros", "mixed")

Place = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes of a file (``data``), or its new length (``size``)."""

    node: int
    offset: int = 0
    data: bytes = b""
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Named:
    """Names that changed in one step: (folder, name) → what it is a name of."""

    names: Mapping[Place, int | None]


@dataclass(frozen=True, slots=True)
class Synced:
    """A file's data, or a folder's names, are on the disk."""

    node: int


@dataclass(slots=True)
class Disk:
    """What lay there before a run, all of it durable, and what the run changed, in order."""

    names: dict[Place, int] = field(default_factory=dict)
    data: dict[int, bytes] = field(default_factory=dict)
    folders: set[int] = field(default_factory=lambda: {ROOT})
    inodes: dict[int, int] = field(default_factory=dict)
    events: list[Written | Named | Synced] = field(default_factory=list)

    def after(self, cut: int, rng: random.Random, *, names: str, data: str) -> dict[str, tuple[int, bytes | None]]:
        """What may lie there when the power goes before event ``cut``: path → node, bytes (of a folder None)."""
        events = self.events[:cut]
        shown = self._names(events, rng, names)
        files = {node: self._data(events, node, rng, data) for node in set(shown.values()) - self.folders}
        out: dict[str, tuple[int, bytes | None]] = {}
        todo = [(ROOT, "")]
        while todo:
            folder, above = todo.pop()
            for (within, name), node in shown.items():
                if within == folder:
                    out[above + name] = node, files.get(node)
                    if node in self.folders:
                        todo.append((node, f"{above}{name}/"))
        return out

    def _names(self, events: list[Any], rng: random.Random, how: str) -> dict[Place, int]:
        shown: dict[Place, int | None] = dict(self.names)
        halves = how in ("any", "nothing")  # of a step that touches two folders, one half may last
        steps = [
            (at, {place: node for place, node in event.names.items() if folder is None or place[0] == folder})
            for at, event in enumerate(events)
            if isinstance(event, Named)
            for folder in (sorted({f for f, _ in event.names}) if halves else [None])
        ]
        synced = {event.node: at for at, event in enumerate(events) if isinstance(event, Synced)}
        must = [any(at < synced.get(folder, -1) for folder, _ in names) for at, names in steps]
        if not halves:  # one journal: what comes before a durable step in a folder is durable, too
            need: set[int] = set()
            for number in reversed(range(len(steps))):
                touched = {folder for folder, _ in steps[number][1]}
                must[number] |= bool(touched & need)
                need |= touched if must[number] else set()
        last = max((n for n, m in enumerate(must) if m), default=-1)
        upto = rng.randint(last, len(steps)) if how == "journal" else 0
        likely = rng.random()
        blocked: set[int] = set()
        for number, (_, names) in enumerate(steps):
            touched = {folder for folder, _ in names}
            lasts = {
                "nothing": False,
                "everything": True,
                "journal": number <= upto,
                "folders": not touched & blocked and rng.random() < likely,
                "any": rng.random() < likely,
            }[how]
            if must[number] or lasts:
                shown.update(names)
            else:
                blocked |= touched
        return {place: node for place, node in shown.items() if node is not None}

    def _data(self, events: list[Any], node: int, rng: random.Random, how: str) -> bytes:
        durable = bytearray(self.data.get(node, b""))
        begin = max((at for at, e in enumerate(events) if isinstance(e, Synced) and e.node == node), default=0)
        changes = [e for e in events[:begin] if isinstance(e, Written) and e.node == node]
        for change in changes:
            _apply(durable, change)
        if how == "nothing":
            return bytes(durable)
        newest = bytearray(durable)
        sizes = [len(durable)]
        for change in (e for e in events[begin:] if isinstance(e, Written) and e.node == node):
            _apply(newest, change)
            sizes.append(len(newest))
        if how == "everything":
            return bytes(newest)
        size = len(newest) if how == "zeros" else rng.choice(sizes)
        out = bytearray(size)
        for start in range(0, size, PAGE):
            stop = min(start + PAGE, size)
            before, after = (bytes(side[start:stop]).ljust(stop - start, b"\0") for side in (durable, newest))
            choice = "zeros" if how == "zeros" else rng.choice(("old", "new", "new", "zeros", "rubbish"))
            page = bytearray({"old": before, "new": after}.get(choice, bytes(stop - start)))
            if choice == "rubbish":
                page[:] = rng.randbytes(stop - start)
            kept = max(0, min(len(durable) - start, stop - start))  # what was durable is not lost to an append
            for at in range(kept) if choice in ("zeros", "rubbish") else ():
                page[at] = before[at] if before[at] == after[at] else page[at] and before[at]
            out[start:stop] = page
        return bytes(out)


def _apply(data: bytearray, change: Written) -> None:
    if change.size is not None:
        del data[change.size :]
        data.extend(bytes(change.size - len(data)))
        return
    stop = change.offset + len(change.data)
    data.extend(bytes(max(0, stop - len(data))))
    data[change.offset : stop] = change.data


class Recorder:
    """Within the block, all that this process changes below a folder goes into :attr:`disk`.

    Args:
        root: The folder; what lies there is taken for durable.
        deaf: Syncs that do nothing: asked with "file" or "folder".
    """

    def __init__(self, root: Path, *, deaf: Callable[[str], bool] = lambda _: False) -> None:
        self.root = Path(os.path.realpath(root))
        self.deaf = deaf
        self.disk = Disk()
        self.strays: list[str] = []
        self._device = self.root.stat().st_dev
        self._nodes = {self.root.stat().st_ino: ROOT}
        self._lock = threading.RLock()
        self._real: dict[str, Callable[..., Any]] = {}
        for folder, folders, files in os.walk(self.root):
            for name in (*folders, *files):
                path = Path(folder, name)
                node = self._new(path.stat().st_ino, folder=path.is_dir())
                self.disk.names[self._place(path)] = node
                if path.is_file():
                    self.disk.data[node] = path.read_bytes()

    def __enter__(self) -> Recorder:
        for name, call in {
            "open": self._open,
            "write": self._write,
            "pwrite": self._pwrite,
            "copy_file_range": self._copy,
            "ftruncate": self._ftruncate,
            "fsync": self._sync,
            "fdatasync": self._sync,
            "replace": self._rename,
            "rename": self._rename,
            "unlink": self._remove,
            "remove": self._remove,
            "rmdir": self._remove,
            "mkdir": self._mkdir,
        }.items():
            self._real[name] = getattr(os, name)
            setattr(os, name, self._wrap(call, getattr(os, name)))
        self._real["exchange"] = convert.claim.exchange  # type: ignore[attr-defined]
        convert.claim.exchange = self._wrap(self._exchange, convert.claim.exchange)  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        convert.claim.exchange = self._real.pop("exchange")  # type: ignore[attr-defined]
        for name, real in self._real.items():
            setattr(os, name, real)

    def _wrap(self, call: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **options: Any) -> Any:
            with self._lock:
                return call(real, *args, **options)

        return recorded

    def _new(self, inode: int, *, folder: bool) -> int:
        node = len(self.disk.inodes) + 1
        self.disk.inodes[node] = inode
        self._nodes[inode] = node
        if folder:
            self.disk.folders.add(node)
        return node

    def _node(self, fd: int) -> int | None:
        found = os.fstat(fd)
        return self._nodes.get(found.st_ino) if found.st_dev == self._device else None

    def _place(self, path: Any, dir_fd: int | None = None) -> Place | None:
        text = os.fsdecode(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        folder, name = os.path.split(os.path.abspath(text))
        try:
            found = os.stat(folder)
        except OSError:
            return None
        node = self._nodes.get(found.st_ino) if found.st_dev == self._device else None
        return None if node is None else (node, name)

    def _of(self, path: Any, dir_fd: int | None = None) -> int | None:
        try:
            return self._nodes.get(os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_ino)
        except OSError:
            return None

    def _names(self, names: dict[Place | None, int | None]) -> None:
        self.disk.events.append(Named({place: node for place, node in names.items() if place is not None}))

    def _open(self, real: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & (os.O_CREAT | os.O_TRUNC):
            return int(real(path, flags, mode, dir_fd=dir_fd))
        there = self._of(path, dir_fd)
        fd = int(real(path, flags, mode, dir_fd=dir_fd))
        place = self._place(path, dir_fd)
        if place is None:
            self.strays.append(os.fsdecode(path))
        elif there is None:
            self._names({place: self._new(os.fstat(fd).st_ino, folder=False)})
        elif flags & os.O_TRUNC:
            self.disk.events.append(Written(there, size=0))
        return fd

    def _wrote(self, fd: int, offset: int, data: bytes) -> None:
        node = self._node(fd)
        if node is not None:
            self.disk.events.append(Written(node, offset, data))

    def _write(self, real: Any, fd: int, data: Any) -> int:
        at = -1
        if self._node(fd) is not None:
            appends = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
            at = os.fstat(fd).st_size if appends else os.lseek(fd, 0, os.SEEK_CUR)
        count = int(real(fd, data))
        self._wrote(fd, at, bytes(data)[:count])
        return count

    def _pwrite(self, real: Any, fd: int, data: Any, offset: int) -> int:
        count = int(real(fd, data, offset))
        self._wrote(fd, offset, bytes(data[:count]))
        return count

    def _copy(self, real: Any, source: int, target: int, count: int, start: int, to: int) -> int:
        moved = int(real(source, target, count, start, to))
        self._wrote(target, to, os.pread(target, moved, to))
        return moved

    def _ftruncate(self, real: Any, fd: int, size: int) -> None:
        real(fd, size)
        node = self._node(fd)
        if node is not None:
            self.disk.events.append(Written(node, size=size))

    def _sync(self, real: Any, fd: int) -> None:
        real(fd)
        node = self._node(fd)
        if node is not None and not self.deaf("folder" if node in self.disk.folders else "file"):
            self.disk.events.append(Synced(node))

    def _rename(self, real: Any, a: Any, b: Any) -> None:
        places, node = (self._place(a), self._place(b)), self._of(a)
        real(a, b)
        self._names({places[0]: None, places[1]: node})

    def _exchange(self, real: Any, a: Any, b: Any) -> bool:
        places, nodes = (self._place(a), self._place(b)), (self._of(a), self._of(b))
        done = bool(real(a, b))
        if done:
            self._names({places[0]: nodes[1], places[1]: nodes[0]})
        return done

    def _remove(self, real: Any, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        real(path, dir_fd=dir_fd)
        if place is not None:
            self._names({place: None})

    def _mkdir(self, real: Any, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        real(path, mode, dir_fd=dir_fd)
        place, found = self._place(path, dir_fd), os.stat(path, dir_fd=dir_fd)
        if place is not None:
            self._names({place: self._new(found.st_ino, folder=True)})


def build(state: Mapping[str, tuple[int, bytes | None]], root: Path) -> dict[int, int]:
    """Lay a state out in a folder, which is emptied before; inode → node."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    made: dict[int, Path] = {}
    out: dict[int, int] = {}
    for name, (node, data) in sorted(state.items()):
        path = root / name
        if data is None:
            path.mkdir()
        elif node in made:  # half of a move: both names
            os.link(made[node], path)
        else:
            path.write_bytes(data)
            made[node] = path
        out[path.stat().st_ino] = node
    return out
