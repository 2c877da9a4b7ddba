"""Conversions straight from the Hub, killed and cut off (``tests/trust``): a few; 200 and 64 with ``--all``."""

from __future__ import annotations

import os

import pytest

from tests.trust import kill_points, kinds, power_cuts

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the scripts kill children")
STREAMED = [kind for kind in kinds.MORE_KINDS if kind.way == "hub"]


@pytest.fixture(autouse=True)
def here(hub, monkeypatch):
    monkeypatch.setattr(kinds, "hub", lambda: hub)
    with kinds.kept_sizes():
        yield


@pytest.mark.parametrize("kind", STREAMED, ids=str)
def test_killed_and_resumed(tmp_path, kind):
    assert kill_points.disturb(kind, tmp_path / "w", 3, seed=os.getpid())["killed"] >= 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMED, ids=str)
def test_at_many_points(tmp_path, kind):
    assert kill_points.disturb(kind, tmp_path / "killed", 200)["resumed in the middle"] >= 50
    assert power_cuts.disturb(kind, tmp_path / "cut", 64)["cuts"] >= 64
