"""The scripts of ``tests/trust``, a little of each; all of it with ``--all``."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.trust import faults, kill_points
from tests.trust.kinds import ALL_KINDS, KINDS, kept_sizes

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the scripts kill children")

#: One of each way that an output gets its name: a folder, files of one set, replacing a folder.
FEW = (
    *("hf-to-scratch --format pth", "hf-to-gguf, split", "hf-to-scratch --overwrite"),
    *("hf-to-scratch --overwrite, no renameat2", "repair"),
)


@pytest.fixture(autouse=True)
def sizes():
    with kept_sizes():
        yield


def kind(name):
    return next(k for k in ALL_KINDS if k.name == name)


@pytest.mark.parametrize("name", FEW)
def test_killed_and_resumed(tmp_path, name):
    counts = kill_points.disturb(kind(name), tmp_path, 4)
    assert counts["killed"] >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", [k.name for k in ALL_KINDS if k.way != "hub"])
def test_killed_at_200_points_and_resumed(tmp_path, name):
    counts = kill_points.disturb(kind(name), tmp_path, 200)
    assert counts["killed"] >= 200 and counts["resumed in the middle"] >= 50


@pytest.mark.parametrize("fault", ["writes that fail", "reads that fail", "in parts", "missing", "change"])
def test_faults(tmp_path, fault):
    found = faults.inject(kind("hf-to-scratch --format pth"), tmp_path, fault, every=31)
    assert sum(found.values()) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [k.name for k in KINDS])
def test_all_faults(tmp_path, name):
    assert sum(faults.inject(kind(name), tmp_path).values()) >= 150


def test_a_run_that_writes_in_place_is_caught(tmp_path, monkeypatch):
    """The control: without the partial folder, kills leave half an output, and the script says so."""
    from convert import claim

    monkeypatch.setattr(claim, "partial_folder", lambda out, single: out)
    monkeypatch.setattr(claim.Claim, "commit", lambda self, announce=None: self._close())
    with pytest.raises((AssertionError, RuntimeError)):
        kill_points.disturb(kind("hf-to-scratch"), tmp_path, 20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_ranks_killed_and_resumed(tmp_path):
    """In a process of its own, which forks before torch has threads."""
    words = [sys.executable, "-m", "tests.trust.killed_ranks", "--kills", "20", "--kind", "pth"]
    done = subprocess.run(
        [*words, "--workdir", str(tmp_path / "w")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "all resumed to the same bytes" in done.stdout, done.stderr
