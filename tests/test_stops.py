"""Signals while threads are at work: put off where raising would leave them waiting for ever."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from convert import stops
from convert.stops import arrived, put_off, still_pending
from tests.fixtures import make_hf

ROOT = Path(__file__).parents[1]


class Stop(BaseException):
    pass


def test_at_once_where_nothing_puts_it_off():
    with pytest.raises(Stop):
        arrived(Stop())
    with put_off():
        pass
    with pytest.raises(Stop):
        arrived(Stop())


def test_when_it_is_asked_for():
    seen = []
    with pytest.raises(Stop), put_off() as check:
        check()
        arrived(Stop())
        seen.append("went on")
        check()
        seen.append("never")
    assert seen == ["went on"] and stops._waiting is None


def test_at_the_end_of_the_block():
    with pytest.raises(Stop), put_off():
        with put_off():
            pass
        arrived(Stop())
    with pytest.raises(ValueError, match="first"), put_off():  # what ends the block by itself is what is told
        arrived(Stop())
        raise ValueError("first")
    with put_off() as check:
        check()  # nothing is left of it


def test_another_thread_puts_nothing_off():
    """A conversion in a thread of a larger program: Control-C is not the thread's."""
    inside, end = threading.Event(), threading.Event()

    def work() -> None:
        with put_off():
            inside.set()
            end.wait(100)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(100)
    try:
        with pytest.raises(Stop):
            arrived(Stop())
    finally:
        end.set()
        thread.join()


def test_work_that_fails_and_work_that_lasts():
    hold = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        try:
            pending = {pool.submit(hold.wait, 100)}
            assert still_pending(pending, lambda: None) == pending
            with pytest.raises(Stop), put_off() as check:
                arrived(Stop())
                still_pending(pending, check)
            failing = {pool.submit(int, "x")}
            with pytest.raises(ValueError, match="invalid literal"):
                while failing:
                    failing = still_pending(failing, lambda: None)
        finally:
            hold.set()


#: A signal just where the main thread has taken the locks of all work under way.
INTERRUPTED = """
import os, signal, sys
from concurrent.futures import _base
from convert import cli, plan, stops, writer
plan.PIECE_BYTES = writer.COPY_BYTES = 4096
enter, count = _base._AcquireFutures.__enter__, [0]
def taken(self):
    enter(self)
    count[0] += 1
    if count[0] == 3:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # it is handled somewhere here
            pass
_base._AcquireFutures.__enter__ = taken
if sys.argv[1] == "at once":
    cli.arrived = lambda stop: (_ for _ in ()).throw(stop)
cli.main(sys.argv[2:])
"""


@pytest.mark.parametrize("how", ["put off", "at once"])
def test_a_signal_while_the_workers_locks_are_held(tmp_path, how):
    made = make_hf(tmp_path / "m", "gqa8")
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, how, "hf-to-scratch", str(made.path), str(tmp_path / "out"), "--quiet"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        err = child.communicate(timeout=100 if how == "put off" else 8)[1]
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        assert how == "at once"  # the control: it waited for its workers, and they for the lock
        return
    assert how == "put off" and child.returncode == 130, err
    assert "Nothing was left behind" in err and [p.name for p in tmp_path.iterdir()] == ["m"]
