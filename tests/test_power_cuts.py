"""Power cuts (``tests/trust/power_cuts.py``): a few of each way that an output gets its name; all with ``--all``."""

from __future__ import annotations

import os
import random

import pytest

from tests.trust import power_cuts
from tests.trust.disk import Disk, Named, Recorder, Synced, Written
from tests.trust.kinds import ALL_KINDS, kept_sizes

pytestmark = pytest.mark.skipif(not hasattr(os, "copy_file_range"), reason="the recorder wraps Linux's calls")


_FEW = ("hf-to-scratch --format pth", "hf-to-gguf, split", "hf-to-gguf --overwrite")


@pytest.fixture(autouse=True)
def sizes():
    with kept_sizes():
        yield


def kind(name):
    return next(k for k in ALL_KINDS if k.name == name)


@pytest.mark.parametrize("name", [*_FEW, "hf-to-scratch --overwrite, no renameat2"])
def test_nothing_is_lost(tmp_path, name):
    counts = power_cuts.disturb(kind(name), tmp_path, 6)
    assert counts["cuts"] >= 6 and counts["syncs"] >= 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [k.name for k in ALL_KINDS if k.way != "hub"])
def test_nothing_is_lost_at_200_points(tmp_path, name):
    counts = power_cuts.disturb(kind(name), tmp_path, 200)
    assert counts["cuts"] >= 200 and counts["cut again"] >= 20


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_run_that_does_not_sync_is_caught(tmp_path, what):
    """The control: files whose data, or whose names, are not synced are lost, and the script says so."""
    with pytest.raises(AssertionError, match=r"half an output|said to be complete"):
        power_cuts.disturb(kind("hf-to-scratch"), tmp_path, 20, deaf=lambda synced: synced == what)


def test_what_the_model_lets_last(tmp_path):
    """A file whose data was synced, and not its name; then its name, too; then an append that was not synced."""
    folder = tmp_path / "place"
    folder.mkdir()
    with Recorder(folder) as recorder:
        fd = os.open(folder / "a", os.O_RDWR | os.O_CREAT, 0o644)
        os.write(fd, b"x" * 5000)
        os.fsync(fd)
        named = os.open(folder, os.O_RDONLY)
        os.fsync(named)
        os.write(fd, b"y" * 5000)
        os.rename(folder / "a", folder / "b")
    os.close(fd)
    os.close(named)
    disk: Disk = recorder.disk
    assert [type(e) for e in disk.events] == [Named, Written, Synced, Synced, Written, Named]

    def states(cut):
        rng = random.Random(0)
        return [disk.after(cut, rng, names="any", data="mixed") for _ in range(60)]

    before = states(3)
    assert {tuple(s) for s in before} == {(), ("a",)}
    assert {s["a"][1] for s in before if s} == {b"x" * 5000}
    assert {tuple(s) for s in states(4)} == {("a",)}
    after = states(6)
    assert {tuple(s) for s in after} == {("a",), ("b",)}
    contents = {data for s in after for _, data in s.values()}
    assert len(contents) > 4 and all(data[:5000] == b"x" * 5000 for data in contents)
    assert b"x" * 5000 + b"y" * 5000 in contents and b"x" * 5000 in contents
