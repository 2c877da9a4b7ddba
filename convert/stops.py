"""Signals that end the process, put off where raising at once would leave threads waiting for ever.

Python handles a signal in the main thread, between any two steps of it: also where :mod:`concurrent.futures` has just
taken a lock that its workers need, and is not yet sure to give it back. Once in some thousand interruptions a
conversion then hung. What waits for workers puts signals off, and asks for them where it holds nothing. Which signals
these are, and what they raise, is :mod:`convert.cli`'s business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future

_depth = 0
_waiting: BaseException | None = None


def arrived(stop: BaseException) -> None:
    """A signal has come: raise ``stop``, or keep it for who has put it off. Called by the handler."""
    global _waiting
    if not _depth:
        raise stop
    _waiting = stop


@contextmanager
def put_off() -> Iterator[Callable[[], None]]:
    """Within the block a signal raises nothing until the function that it yields is called, or the block ends.

    In other threads than the main one, where no signal raises anything, this does nothing.
    """
    global _depth, _waiting
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    _depth += 1
    try:
        yield _raise
        _raise()
    finally:
        _depth -= 1
        if not _depth:
            _waiting = None


def _raise() -> None:
    global _waiting
    if _waiting is not None:
        stop, _waiting = _waiting, None
        raise stop


def still_pending(pending: set[Future[None]], check: Callable[[], None]) -> set[Future[None]]:
    """Wait until some work is done, or for a moment in which a signal may have come.

    Args:
        pending: Work under way.
        check: What :func:`put_off` yielded.

    Returns:
        The work that is not done yet.

    Raises:
        BaseException: What the signal raises, or what work was ended by.
    """
    from concurrent.futures import FIRST_COMPLETED, wait

    done, pending = wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
    check()
    for future in done:
        future.result()
    return pending
