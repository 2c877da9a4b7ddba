"""How an output gets its name, step by step, and what a killed run leaves is known for what it is."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

import convert
from convert import claim, platform
from convert.claim import Claim, identity
from convert.errors import ConvertError, UsageError
from convert.journal import JOURNAL_NAME
from convert.output import LOCK_NAME, refuse_names
from convert.run import run
from tests.fixtures import make_hf


@pytest.fixture
def plan(tmp_path):
    found = convert.plan_conversion(make_hf(tmp_path / "source", "gqa8").path, "scratch")
    yield found
    found.source.close()


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def prepared(out: Path) -> Claim:
    made = Claim(out, single=False)
    made.take()
    (made.folder / JOURNAL_NAME).write_bytes(b"x\n")
    (made.folder / "config.json").write_bytes(b"new")
    (made.folder / "conversion.json").write_bytes(b"{}")
    return made


def test_neither_lock_nor_journal_get_into_the_output(tmp_path):
    prepared(tmp_path / "out").commit()
    assert names(tmp_path) == {"out"} and names(tmp_path / "out") == {"config.json", "conversion.json"}


@pytest.mark.parametrize("how", ["in one step", "in two"])
def test_a_folder_is_replaced(tmp_path, monkeypatch, how):
    monkeypatch.setattr(platform, "DISABLED", set() if how == "in one step" else {"renameat2"})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.json").write_bytes(b"old")
    prepared(tmp_path / "out").commit()
    assert names(tmp_path) == {"out"} and names(tmp_path / "out") == {"config.json", "conversion.json"}


def test_at_no_moment_is_there_no_output(tmp_path, monkeypatch):
    """Where the system can exchange names: whoever looks finds the old folder or the new one."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_bytes(b"old")
    seen = []
    for name in ("replace", "rename", "unlink", "rmdir"):
        real = getattr(os, name)

        def watch(*args, real=real, **options):
            seen.append((tmp_path / "out" / "config.json").read_bytes())
            return real(*args, **options)

        monkeypatch.setattr(os, name, watch)
    if not platform.exchange(tmp_path / "out", tmp_path / "out"):
        pytest.skip("this system cannot exchange names")
    prepared(tmp_path / "out").commit()
    assert b"old" in seen and b"new" in seen


def test_exchange_and_its_absence(tmp_path, monkeypatch):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"1")
    b.write_bytes(b"2")
    if platform.exchange(a, b):
        assert (a.read_bytes(), b.read_bytes()) == (b"2", b"1")
        with pytest.raises(OSError, match="No such file"):
            platform.exchange(a, tmp_path / "nothing")
    monkeypatch.setattr(platform, "DISABLED", {"renameat2"})
    before = a.read_bytes()
    assert platform.exchange(a, b) is False and a.read_bytes() == before


def test_killed_while_the_old_folder_is_removed(plan, tmp_path, monkeypatch):
    """After the exchange the old output lies in the partial folder, marked as ours: the next run clears it away."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"old")
    monkeypatch.setattr(claim, "_clear", lambda folder: None)
    run(plan, tmp_path / "out", overwrite=True)
    monkeypatch.undo()
    if "out.partial" not in names(tmp_path):
        pytest.skip("this system cannot exchange names")
    assert names(tmp_path / "out.partial") == {"model.safetensors", LOCK_NAME}
    run(plan, tmp_path / "out", overwrite=True)
    assert names(tmp_path) == {"source", "out"} and LOCK_NAME not in names(tmp_path / "out")


@pytest.mark.parametrize("how", ["again", "asked before", "anothers"])
@pytest.mark.parametrize("named", [False, True])
def test_killed_between_two_renames(plan, tmp_path, monkeypatch, how, named):
    """Where names are not exchanged in one step, an older output gets its name back; it is told by our marker."""
    monkeypatch.setattr(platform, "DISABLED", {"renameat2"})
    out, aside = tmp_path / "out", tmp_path / "out.replaced"
    run(plan, out)
    (out / "README.md").write_text("of the older one")
    out.rename(aside)
    if how != "anothers":
        (aside / ".lock").touch()
    if named:  # the kill came when the new output had its name
        run(plan, tmp_path / "new")
        (tmp_path / "new").rename(out)
    if how == "asked before" and not named:
        with pytest.raises(UsageError, match="exists already"):
            run(plan, out)
        assert (out / "README.md").exists() and names(tmp_path) == {"source", "out"} and ".lock" not in names(out)
    run(plan, out, overwrite=True)
    assert names(tmp_path) == {"source", "out", *({"out.replaced"} if how == "anothers" else ())}
    assert not (out / "README.md").exists() and ".lock" not in names(out)
    assert how != "anothers" or (aside / "README.md").exists()


def test_a_spent_partial_folder_is_swept_away(plan, tmp_path):
    """Killed when only the lock was left to remove: the next run, which finds the output there, removes it."""
    run(plan, tmp_path / "out")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / LOCK_NAME).touch()
    with pytest.raises(UsageError, match="exists already"):
        run(plan, tmp_path / "out")
    assert names(tmp_path) == {"source", "out"}
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").touch()  # the control
    with pytest.raises(UsageError, match="exists already"):
        run(plan, tmp_path / "out")
    assert names(tmp_path) == {"source", "out", "out.partial"}


def test_the_folder_is_locked_too_until_it_has_its_name(tmp_path, monkeypatch):
    """Nobody takes the partial folder over between the end of the lock file and the rename."""
    made = prepared(tmp_path / "out")
    real, refused = os.replace, []

    def replace(a, b):
        try:
            Claim(tmp_path / "out", single=False).take()
        except ConvertError as error:
            refused.append(error.problems[0].kind)
        real(a, b)

    monkeypatch.setattr(os, "replace", replace)
    made.commit()
    assert refused == ["busy"] and names(tmp_path / "out") == {"config.json", "conversion.json"}


def test_a_place_where_no_folder_can_be_made(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(ConvertError, match="No space left") as caught:
        Claim(tmp_path / "a" / "b" / "out", single=False).take()
    assert caught.value.problems[0].kind == "disk_full"
    monkeypatch.undo()
    assert not names(tmp_path)


@pytest.mark.parametrize(
    "name", ["con", "NUL.gguf", "Lpt1", "a:b", "what?", "end.", "end ", 'a"b', "a\x07b", "com9.x.y"]
)
def test_names_that_windows_has_other_uses_for(plan, name):
    with pytest.raises(UsageError, match="Windows"):
        refuse_names(plan, Path("folder") / name / "out", windows=True)
    refuse_names(plan, Path("folder") / name / "out", windows=False)  # a name like any other elsewhere


@pytest.mark.parametrize("name", ["console", "out", "lpt10", "a.b", "..", "model-1.0", "com"])
def test_names_that_windows_takes(plan, name):
    refuse_names(plan, Path("folder") / name / "out", windows=True)


def test_names_that_differ_only_in_capitals(plan):
    plan.sidecars["Model.Safetensors"] = b""
    with pytest.raises(UsageError, match="capitals"):
        refuse_names(plan, Path("out"), windows=False)


@pytest.mark.parametrize("moment", range(4))
@pytest.mark.parametrize("resume", [False, True])
def test_a_signal_while_the_folder_is_taken_leaves_nothing(plan, tmp_path, monkeypatch, moment, resume):
    """Between the first folder and the claim that could have been given up, Control-C once left an empty folder."""
    real, moments = Claim._hold, itertools.count()

    def signal():
        if next(moments) == moment:
            raise KeyboardInterrupt

    def hold(self, fd, path):  # of the folder, then of the lock in it
        try:
            signal()
        except KeyboardInterrupt:
            os.close(fd)
            raise
        found = real(self, fd, path)
        signal()
        return found

    monkeypatch.setattr(Claim, "_hold", hold)
    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path / "deep" / "out", resume=resume)
    assert names(tmp_path) == {"source"}


def test_a_claim_that_is_refused_leaves_the_other_runs_folder(tmp_path):
    """The control of the test above: what somebody else holds is not swept away, be it as empty as it may."""
    first, second = Claim(tmp_path / "out", single=False), Claim(tmp_path / "out", single=False)
    first.take()
    with pytest.raises(ConvertError, match="another conversion"):
        second.take()
    second.abandon()
    assert names(tmp_path) == {"out.partial"}
    first.abandon()
    assert not names(tmp_path)


def test_half_of_a_move_is_taken_back(tmp_path):
    """After a power cut a file may have its old name and its new one: the new one goes, the first piece's first."""
    taken = Claim(tmp_path / "m.gguf", single=True)
    taken.take()
    pieces = [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for name in pieces:
        (taken.folder / name).write_text(name)
    moved = {name: identity(taken.folder / name) for name in pieces}
    os.link(taken.folder / pieces[0], tmp_path / pieces[0])
    os.rename(taken.folder / pieces[1], tmp_path / pieces[1])
    (tmp_path / pieces[2]).write_text("somebody else's")
    taken.take_back(moved)
    assert sorted(p.name for p in tmp_path.glob("*.gguf")) == [pieces[2]]
    assert [(taken.folder / name).read_text() for name in pieces] == pieces
    taken.abandon()
    assert (tmp_path / pieces[2]).read_text() == "somebody else's"
