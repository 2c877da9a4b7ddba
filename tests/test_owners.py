"""Two runs to one output where the system has no locks: the file says whose it is, until its process ends."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import convert
from convert import owners, platform
from convert.claim import Claim
from convert.errors import ConvertError
from convert.output import LOCK_NAME
from convert.run import Cancelled, run
from tests.fixtures import make_hf
from tests.trust.kinds import hashes

pytestmark = pytest.mark.skipif(os.name == "nt", reason="there the system's locks are missing, and this, too")

HOLD = """
import errno, fcntl, os, sys, time
from pathlib import Path
def flock(*_):
    raise OSError(getattr(errno, sys.argv[2]), "no locks here")
fcntl.flock = flock
from convert.claim import Claim
from convert.errors import ConvertError
claim = Claim(Path(sys.argv[1]), single=False)
print("ready", flush=True)
sys.stdin.readline()
try:
    claim.take()
    (claim.folder / "model.safetensors").write_bytes(b"half")
    print("claimed", flush=True)
except ConvertError as error:
    print(error.problems[0].message, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def plan(tmp_path):
    found = convert.plan_conversion(make_hf(tmp_path / "source", "gqa8").path, "scratch")
    yield found
    found.source.close()


def fail(code: int):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    return flock


@pytest.fixture(params=["ENOTSUP", "ENOLCK"])
def no_locks(request, monkeypatch):
    import fcntl

    monkeypatch.setattr(fcntl, "flock", fail(getattr(errno, request.param)))
    return request.param


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def start(out: Path, code: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out), code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def say(child: subprocess.Popen[str]) -> str:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    return child.stdout.readline()


def test_another_process_and_its_remains(plan, tmp_path, no_locks):
    out = tmp_path / "out"
    child = start(out, no_locks)
    try:
        assert say(child) == "claimed\n"
        with pytest.raises(ConvertError, match=f"another conversion is writing .*: process {child.pid}"):
            run(plan, out)
        assert (tmp_path / "out.partial" / "model.safetensors").read_bytes() == b"half"
    finally:
        child.kill()
        child.wait()
    run(plan, out)
    assert names(tmp_path) == {"source", "out"} and LOCK_NAME not in names(out)
    run(plan, out, overwrite=True)
    assert names(tmp_path) == {"source", "out"} and LOCK_NAME not in names(out)


def test_of_several_processes_one_gets_it(tmp_path, no_locks):
    """All at once, when nothing is there, and when a killed run's lock is."""
    for again in range(2):
        children = [start(tmp_path / "out", no_locks) for _ in range(4)]
        try:
            for child in children:
                assert child.stdin is not None
                child.stdin.write("\n")
                child.stdin.flush()
            said = [child.stdout.readline() for child in children if child.stdout]
            assert said.count("claimed\n") == 1, said
            assert sum("another conversion is writing" in line for line in said) == 3, again
        finally:
            for child in children:
                child.kill()
                child.wait()
        assert (tmp_path / "out.partial" / LOCK_NAME).stat().st_size


def test_without_it_two_would_write(tmp_path, monkeypatch, no_locks):
    """The control."""
    monkeypatch.setattr("convert.claim.own", lambda *_, **__: "")
    first, second = Claim(tmp_path / "out", single=False), Claim(tmp_path / "out", single=False)
    first.take()
    second.take()
    assert first.held and second.held


def test_threads_of_one_process(tmp_path, no_locks):
    got, refused = [], []
    barrier = threading.Barrier(8)

    def one() -> None:
        claim = Claim(tmp_path / "out", single=False)
        barrier.wait()
        try:
            claim.take()
            got.append(claim)
        except ConvertError:
            refused.append(1)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1 and len(refused) == 7
    got[0].abandon()
    assert not names(tmp_path)


def test_stopped_and_resumed_by_the_same_process_or_another(plan, tmp_path, no_locks):
    out, cancel = tmp_path / "out", threading.Event()
    wanted = run(plan, tmp_path / "wanted").out
    with pytest.raises(Cancelled):
        run(plan, out, resume=True, threads=1, cancel=cancel, progress=lambda _: cancel.set())
    assert (tmp_path / "out.partial" / LOCK_NAME).stat().st_size == 0
    assert run(plan, out, resume=True).resumed > 0
    assert hashes(out) == hashes(wanted) and names(tmp_path) == {"source", "out", "wanted"}


@pytest.mark.parametrize("how", ["this", "another machine", "rebooted", "used again", "empty", "empty and old", "text"])
def test_whose_a_file_is(tmp_path, monkeypatch, how):
    monkeypatch.setattr(platform, "DISABLED", {"flock"})
    monkeypatch.setattr(owners, "EMPTY_SECONDS", 10_000.0)
    folder = tmp_path / "out.partial"
    folder.mkdir()
    lock = folder / LOCK_NAME
    me = owners._me()
    said = {
        "this": me,
        "another machine": me | {"host": "elsewhere"},
        "rebooted": me | {"boot": "another"},
        "used again": me | {"began": "1"},
    }
    lock.write_text(json.dumps(said[how]) if how in said else "7" if how == "text" else "")
    if how in ("text", "empty and old"):
        os.utime(lock, (1, 1))
    claim = Claim(tmp_path / "out", single=False)
    if how in ("used again", "empty and old", "text"):
        claim.take()
        assert json.loads(lock.read_text()) == me and names(folder) == {LOCK_NAME}
        claim.abandon()
        assert not names(tmp_path)
        return
    with pytest.raises(ConvertError, match=r"another conversion is writing") as caught:
        claim.take()
    claim.abandon()
    assert lock.exists() and f"If it is no more, remove {lock}" in str(caught.value)
    assert how != "another machine" or f"process {os.getpid()} on elsewhere" in str(caught.value)
