"""Which tests run, and for how long: ``--all`` (or RUN_SLOW=1) adds the slow ones; a hanging test is stopped."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

#: Seconds one test may take (set-up not counted); ``@pytest.mark.timeout(n)`` overrules.
USUAL_LIMIT = 600  # nothing takes a tenth of it on a quiet machine
SLOW_LIMIT = 1800

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too")


def pytest_configure(config: pytest.Config) -> None:
    slow_too = config.getoption("--all") or os.environ.get("RUN_SLOW", "") not in ("", "0")
    if not slow_too and not config.option.markexpr:
        config.option.markexpr = "not slow"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device on this machine")


def _limit(item: pytest.Item) -> int:
    own = item.get_closest_marker("timeout")
    if own is not None:
        return int(own.args[0])
    return SLOW_LIMIT if item.get_closest_marker("slow") else USUAL_LIMIT


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    usable = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
    if not usable:
        return (yield)
    seconds = _limit(item)

    def expired(_signal: int, _frame: FrameType | None) -> None:
        pytest.fail(f"ran for more than {seconds} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
