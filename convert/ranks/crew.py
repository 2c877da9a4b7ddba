"""The processes of one conversion: they find each other, wait for each other, and stop together.

PyTorch's own ``torch.distributed`` is underneath: its store for signals that must never hang (words, failures, signs of
life), gloo for what ranks hand to each other. What they do together is :mod:`convert.ranks.shared`'s business.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

from convert.errors import ConvertError, Problem, UsageError
from convert.ranks import Place
from convert.ranks.interface import name_interface
from convert.ranks.line import Line

#: Seconds: for all ranks to have started; between signs of life; until a rank without one is given up.
JOIN_SECONDS = 300.0
BEAT_SECONDS = 0.5
LOST_SECONDS = 30.0
#: Seconds without a sign of life after which a rank is no longer waited for, once the work has failed anyway.
SILENT_SECONDS = 5.0
#: Seconds that a failing run waits for the others to have closed their files.
_END_SECONDS = 15.0
_POLL_SECONDS = 0.05
#: Of this process: the stores it has met others in, by host and port, and how often it has met anybody. A later
#: conversion meets in the same store, under a name of its own: the one before it may not be at its end everywhere.
_stores: dict[tuple[str, int], Any] = {}
_meetings = itertools.count()


class Crew:
    """This process among the ranks.

    Args:
        place: Which one it is.

    Attributes:
        rank: Its number.
        world: How many there are.
        stopped: Set as soon as any rank has failed; cancels the work of this one.
        progress: Told, on rank 0, of bytes that other ranks have written since the last call.

    Raises:
        ConvertError: The ranks did not find each other.
    """

    def __init__(self, place: Place) -> None:
        # The store's C++ side logs every connection that another rank closes at its end.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        try:
            import torch.distributed as dist
        except ImportError as error:
            raise ConvertError(
                Problem("torch", "several ranks meet by torch, which is not installed.", hint="pip install torch")
            ) from error
        self.rank, self.world = place.rank, place.world
        self.stopped = threading.Event()
        self.progress: Callable[[int], None] | None = None
        self._dist = dist
        self._place = place
        self._failure: dict[str, Any] | None = None
        self._done = 0
        self._step = 0
        self._closing = threading.Event()
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        wait = timedelta(seconds=JOIN_SECONDS)
        try:
            store = _stores.get((place.host, place.port)) or dist.TCPStore(
                place.host, place.port, self.world, is_master=self.rank == 0 and not agent, timeout=wait
            )
            _stores[place.host, place.port] = store
            again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            prefixed = dist.PrefixStore(f"convert/{again}/{next(_meetings)}", store)
            name_interface(place.host, place.port)
            dist.init_process_group("gloo", store=prefixed, rank=self.rank, world_size=self.world, timeout=wait)
        except (RuntimeError, ValueError) as error:
            said = str(error).splitlines()[0][:300]
            raise ConvertError(
                Problem(
                    "ranks",
                    f"rank {self.rank} of {self.world} did not meet the others at {place.host}:{place.port}: {said}",
                    hint="Were all of them started, and is the port open between the machines?",
                )
            ) from error
        self._store = Line(prefixed, LOST_SECONDS)
        self._store.set(f"name/{self.rank}", f"{socket.gethostname()}, process {os.getpid()}")
        self._watch = threading.Thread(target=self._work, name="ranks", daemon=True)
        self._watch.start()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def wrote(self, count: int) -> None:
        """This rank has written bytes."""
        self._done += count

    # --- words, and what goes with them --------------------------------------------------------------------

    def say(self, word: str, value: Any = None) -> None:
        """Let :meth:`hear` of the other ranks return ``value``."""
        with self._answered():
            self._store.set(f"say/{word}", json.dumps(value))

    def hear(self, word: str) -> Any:
        """Wait until some rank says ``word``.

        Raises:
            ConvertError: A rank failed meanwhile.
        """
        self._until(lambda: self._store.has(f"say/{word}"))
        with self._answered():
            return json.loads(self._store.get(f"say/{word}"))

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, in the order of the ranks; all must call this the same number of times.

        Raises:
            ConvertError: A rank failed before it had a value.
        """
        self._step += 1
        key = f"at/{self._step}"
        with self._answered():
            self._store.add(key, 1)
        self._until(lambda: self._store.add(key, 0) >= self.world)  # nobody enters gloo who may have to be left there
        out: list[Any] = [None] * self.world
        try:
            self._dist.all_gather_object(out, value)
        except RuntimeError as error:
            self._until(lambda: False, seconds=LOST_SECONDS)
            raise ConvertError(Problem("rank_lost", f"a rank was lost: {str(error).splitlines()[0][:200]}")) from error
        return out

    @contextlib.contextmanager
    def _answered(self) -> Iterator[None]:
        """The store answers in the block, or the rank that keeps it is lost."""
        try:
            yield
        except RuntimeError:
            self._store_gone()
            raise self.error from None

    def _until(self, ready: Callable[[], bool], *, seconds: float | None = None) -> None:
        end = None if seconds is None else time.monotonic() + seconds
        pause = 0.002
        while True:
            self.check()
            try:
                if ready():
                    return
            except RuntimeError:
                self._store_gone()
                continue
            if end is not None and time.monotonic() > end:
                return
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS)

    # --- failures ------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one has failed; the first to say so is heard."""
        if self._failure is not None:
            return
        if isinstance(error, ConvertError):
            problems = [problem.as_json() for problem in error.problems[:50]]
        elif isinstance(error, Exception):
            problems = [Problem("bug", f"{type(error).__name__}: {error}").as_json()]
        else:
            number = getattr(error, "number", None)
            said = f"was ended by signal {number}." if number else "was interrupted."
            problems = [Problem("rank_stopped", said).as_json()]
        self._post({"rank": self.rank, "usage": isinstance(error, UsageError), "problems": problems})

    def _post(self, failure: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):
            failure = json.loads(self._store.first("failed", json.dumps(failure)))
        self._failure = failure
        self.stopped.set()

    def check(self) -> None:
        """Raise what another rank failed with.

        Raises:
            ConvertError: One has; its message says which.
        """
        if self._failure is not None:
            raise self.error

    def check_other(self, stop: BaseException) -> None:
        """Raise what another rank failed with, where that is why this one was stopped.

        Raises:
            ConvertError: One has, before the signal came.
        """
        if self._failure is not None and self._failure["rank"] != self.rank:
            kinds = {problem["kind"] for problem in self._failure["problems"]}
            if kinds != {"rank_stopped"}:
                raise self.error from stop

    def speaks(self) -> bool:
        """Whether this is the first of the ranks that are left."""
        with contextlib.suppress(RuntimeError):
            lower = range(self.rank)
            return self.silent(lower, "left") == list(lower)
        return self.rank == 1

    @property
    def error(self) -> BaseException:
        """What another rank failed with, to be raised here."""
        from convert.writer import Cancelled

        failure = self._failure
        if failure is None or failure["rank"] == self.rank:
            return Cancelled()
        where = self.name(failure["rank"])
        problems = [
            Problem(**{**problem, "message": f"{where}: {problem['message']}" if where else problem["message"]})
            for problem in failure["problems"]
        ]
        return (UsageError if failure["usage"] else ConvertError)(problems)

    def name(self, rank: int) -> str:
        """``rank 1 (host, process 4711)``; empty for a number that is no rank."""
        if rank < 0:
            return ""
        try:
            if self._store.has(f"name/{rank}"):
                return f"rank {rank} ({self._store.get(f'name/{rank}').decode()})"
        except RuntimeError:
            pass
        return f"rank {rank}"

    def _store_gone(self) -> None:
        said = "the store in which the ranks meet is gone, and with it the process that kept it (rank 0, or torchrun)."
        self._failure = {"rank": -1, "usage": False, "problems": [Problem("rank_lost", said).as_json()]}
        self.stopped.set()
        _stores.pop((self._place.host, self._place.port), None)

    # --- signs of life -------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Give signs of life, look for the others', and for failures."""
        watched = [r for r in range(self.world) if r != self.rank] if self.leads else [0]
        seen: dict[int, tuple[bytes, float]] = {r: (b"", time.monotonic()) for r in watched}
        told, number = 0, 0
        while not self._closing.wait(BEAT_SECONDS):
            number += 1
            try:
                self._store.set(f"beat/{self.rank}", f"{number} {self._done}")
                if self._failure is None and self._store.has("failed"):
                    self._failure = json.loads(self._store.get("failed"))
                    self.stopped.set()
                total = 0
                for rank in watched:
                    beat = self._beat(rank)
                    if beat != seen[rank][0]:
                        seen[rank] = beat, time.monotonic()
                    elif time.monotonic() - seen[rank][1] > LOST_SECONDS and self._failure is None:
                        self._lost(rank)
                    total += int(beat.split()[1]) if beat else 0
            except RuntimeError:
                if self._failure is None and not self._closing.is_set():
                    self._store_gone()
                return
            if self.progress is not None and total > told:
                self.progress(total - told)
                told = total

    def _beat(self, rank: int) -> bytes:
        key = f"beat/{rank}"
        return self._store.get(key) if self._store.has(key) else b""

    def _lost(self, rank: int) -> None:
        said = f"{self.name(rank)} was lost: no sign of life for {LOST_SECONDS:.0f} s."
        hint = "It was killed, or its machine or the network between them is gone."
        self._post({"rank": -1, "usage": False, "problems": [Problem("rank_lost", said, hint=hint).as_json()]})

    # --- the end -------------------------------------------------------------------------------------------

    def note(self, what: str) -> None:
        """Note for the others that this rank has come to ``ended`` (it touches no file any more) or ``left``."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{what}/{self.rank}", "")

    def silent(self, ranks: Iterable[int], what: str) -> list[int]:
        """Wait until these ranks have noted ``what``; returns those that gave no sign of life instead."""
        waiting = {r: (b"", time.monotonic()) for r in ranks}
        lost = []
        end = time.monotonic() + _END_SECONDS
        while waiting and time.monotonic() < end:
            try:
                for rank in list(waiting):
                    if self._store.has(f"{what}/{rank}"):
                        del waiting[rank]
                    elif (beat := self._beat(rank)) != waiting[rank][0]:
                        waiting[rank] = beat, time.monotonic()
                    elif time.monotonic() - waiting[rank][1] > SILENT_SECONDS:
                        del waiting[rank]
                        lost.append(rank)
            except RuntimeError:
                return sorted(waiting)
            time.sleep(_POLL_SECONDS)
        return lost

    def end(self, code: int) -> int:
        """Wait for everybody, and return the exit code of all: 0 only where every rank succeeded."""
        if self.leads:
            with contextlib.suppress(RuntimeError):
                self.say("end", code)
            self.note("spoke")
            self.silent(range(1, self.world), "left")
            return code
        if code == 0:
            try:
                return int(self.hear("end"))
            except ConvertError:
                code = 1
        self.silent([0], "spoke")  # before it has, our end would have torchrun stop it
        return code

    def close(self) -> None:
        """Leave the others; nothing of this is of use afterwards, and this process may meet them anew."""
        self._closing.set()
        self._watch.join(LOST_SECONDS)
        leaving = threading.Thread(target=self._leave, name="leave", daemon=True)
        leaving.start()
        leaving.join(LOST_SECONDS if self._failure is None else SILENT_SECONDS)  # for a rank that may be no more
        self._store.close()

    def _leave(self) -> None:
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            self._dist.destroy_process_group()
