"""The store in which ranks meet, asked so that nobody waits forever.

A store's client waits in C++ for an answer, where no signal and no timeout reaches it, and a network that is cut gives
none. So one thread asks, and whoever wants the answer waits for that thread, for so long.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Line:
    """A store with a limit on every answer.

    Args:
        store: What :mod:`torch.distributed` offers (``TCPStore``, ``PrefixStore``).
        seconds: How long an answer may take.
    """

    def __init__(self, store: Any, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lost = False
        threading.Thread(target=self._work, name="store", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        """Store a text."""
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """A value that is there."""
        return bytes(self._ask(self._store.get, key))

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return bool(self._ask(self._store.check, [key]))

    def add(self, key: str, count: int) -> int:
        """Add to a counter; returns what it is then."""
        return int(self._ask(self._store.add, key, count))

    def first(self, key: str, value: str) -> bytes:
        """Store a text unless there is one; returns what is there then."""
        return bytes(self._ask(self._store.compare_set, key, "", value))

    def close(self) -> None:
        """Ask nothing more."""
        self._lost = True
        self._asked.put(None)

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """The answer.

        Raises:
            RuntimeError: The store says so, or nothing.
        """
        if self._lost:
            raise RuntimeError("the store does not answer")
        answered = threading.Event()
        answer: list[Any] = []

        def ask() -> None:
            try:
                answer.append(call(*args))
            except BaseException as error:
                answer.append(error)
            answered.set()

        self._asked.put(ask)
        if not answered.wait(self._seconds):
            self._lost = True
            raise RuntimeError("the store does not answer")
        if isinstance(answer[0], BaseException):
            raise RuntimeError(str(answer[0])) from answer[0]
        return answer[0]

    def _work(self) -> None:
        while (ask := self._asked.get()) is not None:
            ask()
