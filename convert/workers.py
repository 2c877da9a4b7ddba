"""Threads that do one piece of work between them, hear news from each other, and end together."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Workers:
    """What such threads have in common, for classes that say what they do.

    Attributes:
        _news: Held while anything that they share changes, and notified of it.
        _stop: Whether they are to end; changed with ``_news`` held.
    """

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._stop = False
        self._threads: list[threading.Thread] = []

    def _begin(self, work: Callable[[], None], count: int, name: str) -> None:
        """Start ``count`` threads, or as many as there is memory for.

        Raises:
            MemoryError: There is none for a single one.
        """
        for _ in range(count):
            thread = threading.Thread(target=work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # so does Python say that there is no memory for a thread
                if not self._threads:
                    raise MemoryError(str(error)) from error
                return
            self._threads.append(thread)

    def _join(self) -> None:
        """Wait until all threads have ended."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """End all threads; after this none of them does anything any more."""
        with self._news:
            self._stop = True
            self._news.notify_all()
        self._join()
