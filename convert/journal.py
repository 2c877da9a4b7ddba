"""The journal of a run: which pieces of the output are finished, and of what they are pieces.

It lies in the partial folder as lines of text, one appended per finished piece, after the piece's data has reached the
disk; so a run that was killed can be continued. The first line is a fingerprint of source and plan: pieces of another
conversion are never taken for this one's. It is a list of what is worth comparing with the source, not a proof: that
comparison is :mod:`convert.writer`'s business. Pieces whose source lies elsewhere are listed with CRCs, to be compared
with those (:mod:`convert.fetched`).
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.errors import ConvertError, Problem
from convert.io_errors import writing
from convert.platform import sync_data, sync_folder

if TYPE_CHECKING:
    from convert.plan import ConversionPlan

JOURNAL_NAME = ".journal"
SCHEMA = "convert.journal/1"
#: Finished data is made durable, and then listed, when so many bytes or seconds have come together.
BATCH_BYTES = 512 << 20
BATCH_SECONDS = 5.0

_COMMIT = "commit "
#: Options that name a place; what lies there is in the hashes of tables and config, or written anew at the end.
_ELSEWHERE = frozenset({"names", "config", "table", "tokenizer_path"})


class Finished:
    """Rows of outputs that are finished: for each output's number, ranges that do not touch.

    Attributes:
        crcs: For pieces that were listed with them, number, first row, row after the last → CRC-32 at each target.
    """

    def __init__(self) -> None:
        self.crcs: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    def add(self, number: int, start: int, stop: int) -> None:
        """Note rows ``start`` to ``stop`` of output ``number``."""
        ranges = self._ranges.setdefault(number, [])
        low = bisect.bisect_left(ranges, (start, start))
        if low and ranges[low - 1][1] >= start:
            low -= 1
        high = low
        while high < len(ranges) and ranges[high][0] <= stop:
            start, stop = min(start, ranges[high][0]), max(stop, ranges[high][1])
            high += 1
        ranges[low:high] = [(start, stop)]

    def covers(self, number: int, start: int, stop: int) -> bool:
        """Whether all of these rows are finished."""
        ranges = self._ranges.get(number, [])
        at = bisect.bisect_right(ranges, (start, float("inf"))) - 1
        return at >= 0 and ranges[at][1] >= stop

    def __bool__(self) -> bool:
        return bool(self._ranges)


class Journal:
    """The journal of the run that holds the partial folder.

    Args:
        folder: The partial folder.
        identity: From :func:`fingerprint`.
        resume: Take over what an earlier run listed there.
        name: Its file; each rank of a run by several has its own (:mod:`convert.ranks.journals`).

    Attributes:
        finished: What the earlier run had finished.
        moved: Files that it was about to move to their places: name → ``[inode, bytes]``.

    Raises:
        ConvertError: The earlier run was of another source or plan; what differs is said.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, resume: bool, name: str = JOURNAL_NAME) -> None:
        self.path = folder / name
        self.finished = Finished()
        self.moved: dict[str, list[int]] = {}
        if resume:
            from convert.ranks.journals import join_parts

            with writing(self.path):
                join_parts(folder)
        kept = _read(self.path) if resume else None
        if kept is not None:
            _refuse_other(folder, kept[0], identity)
            self.finished, self.moved = kept[1], kept[2]
        mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        self._fds: list[int] = []
        self._lock = threading.Condition()
        self._pending: list[tuple[tuple[int, ...], frozenset[int]]] = []
        self._bytes = 0
        self._since = time.monotonic()
        self._error: BaseException | None = None
        self._stop = self._settled = self._named = False
        self._thread: threading.Thread | None = None
        with writing(self.path):
            self._fd = os.open(self.path, mode if kept else mode | os.O_TRUNC, 0o666)
            if kept is None:
                os.write(self._fd, (json.dumps(identity) + "\n").encode())
            else:
                os.ftruncate(self._fd, kept[3])  # a line that was cut off by the end of its writer
            sync_data(self._fd)

    def follow(self, fds: list[int]) -> None:
        """Take note of the output's descriptors, in the order of the plan's files, and start listing.

        Raises:
            MemoryError: There is none for a thread.
        """
        self._fds = fds
        thread = threading.Thread(target=self._work, name="journal", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # so does Python say that there is no memory for a stack
            raise MemoryError(str(error)) from error
        self._thread = thread

    def add(
        self, number: int, start: int, stop: int, *, files: frozenset[int], nbytes: int, crcs: tuple[int, ...] = ()
    ) -> None:
        """A piece has been written: rows of output ``number``, into ``files`` (numbers), ``nbytes`` in all.

        With ``crcs`` a later run can tell it without its source: of the bytes at each of the output's targets.

        Raises:
            ConvertError: Earlier pieces did not reach the disk.
        """
        with self._lock:
            self._raise()
            self._pending.append(((number, start, stop, *crcs), files))
            self._bytes += nbytes
            if self._bytes >= BATCH_BYTES or time.monotonic() - self._since >= BATCH_SECONDS:
                self._lock.notify()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._stop and not (
                    self._bytes >= BATCH_BYTES or (self._pending and time.monotonic() - self._since >= BATCH_SECONDS)
                ):
                    self._lock.wait()
                if self._stop:
                    return
            try:
                self._flush()
            except BaseException as error:
                with self._lock:
                    self._error = error
                return

    def _flush(self, *, durable: bool = True) -> None:
        """Data first, then the lines that speak of it; not ``durable``: they may be lost to a power cut."""
        with self._lock:
            batch, self._pending, self._bytes = self._pending, [], 0
            self._since = time.monotonic()
        if not batch:
            return
        if durable and not self._named:  # lines in a file that has no name after a power cut are of no use
            sync_folder(self.path.parent)
            sync_folder(self.path.parent.parent)
            self._named = True
        for number in sorted(frozenset().union(*(files for _, files in batch))) if not self._settled else ():
            with writing(self.path.parent):
                sync_data(self._fds[number])  # should it fail, nobody knows what has become of these pieces
        try:
            self._append("".join(f"{' '.join(map(str, piece))}\n" for piece, _ in batch), durable=durable)
        except BaseException:
            with self._lock:
                self._pending[:0] = batch
            raise

    def _append(self, text: str, *, durable: bool = True) -> None:
        data = text.encode()
        with writing(self.path):
            start = os.fstat(self._fd).st_size
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
                if durable:
                    sync_data(self._fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, start)  # half a line would end what is believed
                raise

    def settle(self) -> None:
        """All is written, and the caller has synced the files: nothing more is listed until the end.

        Raises:
            ConvertError: Data did not reach the disk.
        """
        self._end_thread()
        self._settled = True
        with self._lock:
            self._raise()

    def commit(self, names: Mapping[str, list[int]]) -> None:
        """List everything, and that these files are now moved to their places; and close.

        Args:
            names: Name → ``[inode, bytes]``.
        """
        self._flush()
        self._append(_COMMIT + json.dumps(dict(names)) + "\n")
        self.close(keep=False)

    def close(self, *, keep: bool) -> None:
        """Close it; ``keep`` lists what was finished, as far as the disk lets it."""
        self._end_thread()
        if keep and self._fd >= 0:
            with contextlib.suppress(ConvertError, OSError):
                self._flush(durable=not self._settled)  # the end of a run, which costs no sync
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _end_thread(self) -> None:
        with self._lock:
            self._stop = True
            self._lock.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def read_commit(folder: Path) -> dict[str, list[int]]:
    """The files that a killed run was moving out of its partial folder: name → ``[inode, bytes]``."""
    kept = _read(folder / JOURNAL_NAME)
    return kept[2] if kept else {}


def read_journal(folder: Path) -> tuple[dict[str, Any], Finished] | None:
    """Fingerprint of the run that holds a partial folder, and what it found finished; None without a journal."""
    kept = _read(folder / JOURNAL_NAME)
    return (kept[0], kept[1]) if kept else None


#: A journal has some sixty bytes for a piece of megabytes; one of 800 GB in the smallest pieces has less than this.
_MOST_BYTES = 64 << 20
_Kept = tuple[dict[str, Any], Finished, dict[str, list[int]], int]


def _read(path: Path) -> _Kept | None:
    """Fingerprint, pieces, files being moved, and how many bytes of the journal are whole; None without one."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # a pipe would wait for ever, a link lead elsewhere
            return None
        if path.lstat().st_size > _MOST_BYTES:  # nor did a run of ours write that much
            return None
        data = path.read_bytes()
    except OSError:
        return None
    lines = data.split(b"\n")[:-1]  # the last line is empty, or was cut off
    try:
        identity = json.loads(lines[0])
    except (IndexError, ValueError, RecursionError):
        return None
    if not isinstance(identity, dict) or identity.get("schema") != SCHEMA:
        return None
    size = len(lines[0]) + 1
    finished = Finished()
    moved: dict[str, list[int]] = {}
    for line in lines[1:]:
        try:
            if line.startswith(_COMMIT.encode()):
                moved = {name: [int(inode), int(size)] for name, (inode, size) in _moves(line)}
            else:
                number, start, stop, *crcs = map(int, line.split())
                finished.add(number, start, stop)
                finished.crcs[number, start, stop] = tuple(crcs)
        except (ValueError, TypeError, RecursionError):  # what follows a damaged line is not believed either
            break
        size += len(line) + 1
    return identity, finished, moved, size


def _moves(line: bytes) -> Iterable[tuple[str, Any]]:
    """What a line says of files being moved; none of a name that leads elsewhere (a stranger may have written it)."""
    return ((n, what) for n, what in dict(json.loads(line[len(_COMMIT) :])).items() if n and os.path.basename(n) == n)


def fingerprint(plan: ConversionPlan) -> dict[str, Any]:
    """What a partial output belongs to: tool, source files, options, tables, and where every byte goes."""
    from convert import __version__
    from convert.hashing import head_hash
    from convert.record import table_hash

    source = plan.source
    outputs = [(o.source.shape, o.source.dtype, [asdict(t) for t in o.targets]) for o in plan.outputs]
    files = [(f.name, f.format, f.size, f.offsets) for f in plan.files]
    return {
        "schema": SCHEMA,
        "tool": __version__,
        "source": [
            {"name": f.name, "bytes": s.st_size, "mtime_ns": s.st_mtime_ns, "head_sha256": head_hash(f)}
            for f, s in ((f, f.stat()) for f in source.files)
        ],
        "said of the source": _texts(source.options),
        "request": _texts(plan.request) | _repairs(plan),
        "tables": [table_hash(source.table.raw), table_hash(plan.table.raw), table_hash(plan.config)],
        "layout": _hash([files, outputs, source.pairing, sorted((plan.table.names or {}).items()), plan.tied]),
    }


def _texts(options: Any) -> dict[str, str]:
    """The fields of a dataclass that are set, as texts; without those whose contents tables and config hold already."""
    out: dict[str, str] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if is_dataclass(value) and field.name != "table":
            out |= _texts(value)
        elif value not in (None, (), [], {}) and field.name not in _ELSEWHERE:
            out[field.name] = json.dumps(value, default=str).strip('"')  # a list and a tuple say the same
    return out


def _repairs(plan: ConversionPlan) -> dict[str, str]:
    fixes = [fix["fix"] for fix in plan.repair.get("fixes", ())]
    return {"fix": ", ".join(fixes)} if fixes else {}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]


def _refuse_other(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    new = json.loads(json.dumps(new))
    if old == new:
        return
    raise ConvertError(
        Problem(
            "resume",
            f"{folder} cannot be continued: it was begun otherwise ({'; '.join(differences(old, new)[:5])}).",
            file=str(folder),
            hint="Without --resume it is cleared away and the conversion starts anew.",
        )
    )


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """How two fingerprints differ, in words; never empty."""
    out = []
    if old.get("tool") != new["tool"]:
        out.append(f"by version {old.get('tool')}, this is {new['tool']}")
    before, after = ({f["name"]: f for f in side.get("source", [])} for side in (old, new))
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            out.append(f"{name} {'is new' if name in after else 'is gone'}")
        elif before[name] != after[name]:
            keys = [k for k in after[name] if before[name].get(k) != after[name][k]]
            words = {"bytes": "size", "mtime_ns": "time of change", "head_sha256": "header"}
            out.append(f"{name} has changed since: its {' and '.join(words.get(k, k) for k in keys)}")
    for part in ("said of the source", "request"):
        a, b = old.get(part, {}), new[part]
        out += [
            f"{key.replace('_', '-')} was {a.get(key, 'not given')}, is {b.get(key, 'not given')}"
            for key in sorted({*a, *b})
            if a.get(key) != b.get(key)
        ]
    if old.get("tables") != new["tables"]:
        out.append("another mapping table or config")
    return out or ["the files planned are others"]
