"""Resuming: what a stopped run has left is compared with the source and completed to the same bytes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import convert
from convert import writer
from convert.errors import ConvertError, UsageError
from convert.journal import JOURNAL_NAME, Finished, read_commit
from convert.run import Cancelled, run
from tests.fixtures import make_hf
from tests.trust.kinds import KINDS, Scene, hashes, kept_sizes, small_pieces


@pytest.fixture(autouse=True)
def small():
    with kept_sizes():
        small_pieces()
        yield


@pytest.fixture
def made(tmp_path):
    return make_hf(tmp_path / "source", "gqa8", dtype="bfloat16")


def stop_after(made, out: Path, nbytes: int, *, to: str = "scratch", **options: object) -> None:
    """A run that its caller stops when so many bytes are written, and whose partial folder stays."""
    cancel, seen = threading.Event(), [0]

    def progress(n: int) -> None:
        seen[0] += n
        if seen[0] >= nbytes:
            cancel.set()

    with pytest.raises(Cancelled) as caught:
        convert.convert_checkpoint(
            made.path, out, to=to, resume=True, threads=1, progress=progress, cancel=cancel, **options
        )
    assert "--resume goes on from there" in caught.value.__notes__[0]


def test_ranges_join():
    found = Finished()
    assert not found
    for start, stop in ((0, 4), (8, 12), (4, 6), (20, 30), (11, 21)):
        found.add(7, start, stop)
    assert found and found.covers(7, 0, 6) and found.covers(7, 9, 30) and found.covers(7, 3, 5)
    assert not found.covers(7, 5, 8) and not found.covers(7, 29, 31) and not found.covers(6, 0, 1)


@pytest.mark.parametrize("form", ["safetensors", "pth"])
def test_a_stopped_run_is_continued_to_the_same_bytes(made, tmp_path, form):
    convert.convert_checkpoint(made.path, tmp_path / "wanted", to="scratch", format=form)
    stop_after(made, tmp_path / "out", 60_000, format=form)
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial" / JOURNAL_NAME).exists()
    summary = convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", format=form, resume=True)
    assert 50_000 < summary.resumed < summary.bytes_written and summary.as_json()["resumed"] == summary.resumed
    assert any("agree with the source" in n for n in summary.notes) and not any("again" in n for n in summary.notes)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "wanted")
    assert not (tmp_path / "out.partial").exists()


def test_a_run_that_does_not_resume_says_what_it_cleared_away(made, tmp_path):
    stop_after(made, tmp_path / "out", 60_000)
    summary = convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch")
    assert any("cleared away; with --resume" in note for note in summary.notes)
    again = convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", overwrite=True)
    assert not any("cleared away" in note for note in again.notes)  # the control: nothing was


def test_what_is_wrong_in_the_partial_folder_is_written_again(made, tmp_path):
    """The journal is not believed: a finished piece that is not the source's is found and made again."""
    convert.convert_checkpoint(made.path, tmp_path / "wanted", to="scratch")
    stop_after(made, tmp_path / "out", 60_000)
    path = tmp_path / "out.partial" / "model.safetensors"
    data = bytearray(path.read_bytes())
    wanted = (tmp_path / "wanted" / "model.safetensors").read_bytes()
    at = next(i for i in range(len(data) // 4, len(data)) if data[i] and data[i] == wanted[i])
    data[at] ^= 0x40
    path.write_bytes(data)
    summary = convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", resume=True)
    assert any("were not, and were written again" in n for n in summary.notes)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "wanted")


def test_a_changed_source_or_plan_is_refused_with_the_reason(made, tmp_path):
    out = tmp_path / "out"
    stop_after(made, out, 60_000)
    before = hashes(tmp_path / "out.partial")
    with pytest.raises(ConvertError, match="dtype was not given, is F32") as caught:
        convert.convert_checkpoint(made.path, out, to="scratch", dtype="float32", resume=True)
    assert caught.value.problems[0].kind == "resume" and "Without --resume" in str(caught.value)
    with pytest.raises(ConvertError, match="format was safetensors, is pth"):
        convert.convert_checkpoint(made.path, out, to="scratch", format="pth", resume=True)
    assert hashes(tmp_path / "out.partial") == before  # nothing was cleared away
    path = made.path / "model.safetensors"
    os.utime(path, ns=(1, 1))
    with pytest.raises(ConvertError, match=r"model\.safetensors has changed since: its time of change"):
        convert.convert_checkpoint(made.path, out, to="scratch", resume=True)
    state = load_file(path)
    state["model.norm.weight"] += 1
    save_file(state, path)
    with pytest.raises(ConvertError, match="header"):
        convert.convert_checkpoint(made.path, out, to="scratch", resume=True)
    convert.convert_checkpoint(made.path, out, to="scratch")  # without it the remains are cleared
    assert not (tmp_path / "out.partial").exists()


def test_nothing_to_resume(made, tmp_path):
    summary = convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", resume=True)
    assert summary.resumed == 0 and any("nothing to go on from" in n for n in summary.notes)
    with pytest.raises(UsageError, match="exists already"):
        convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", resume=True)


@pytest.mark.parametrize("damage", ["cut", "garbage", "no header", "other schema", "empty", "gone"])
def test_a_damaged_journal_costs_time_and_nothing_else(made, tmp_path, damage):
    convert.convert_checkpoint(made.path, tmp_path / "wanted", to="scratch")
    stop_after(made, tmp_path / "out", 60_000)
    path = tmp_path / "out.partial" / JOURNAL_NAME
    data = path.read_bytes()
    first, rest = data.split(b"\n", 1)
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            {
                "cut": data[:-2],
                "garbage": first + b"\n" + rest[:8] + b"\xff\x00 1 x\n0 0 99999\n",
                "no header": rest,
                "other schema": json.dumps({"schema": "another/1"}).encode() + b"\n" + rest,
                "empty": b"",
            }[damage]
        )
    convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", resume=True)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "wanted")


def test_a_full_disk_keeps_what_is_finished_only_where_asked(made, tmp_path, monkeypatch):
    real, calls = writer.write_at, iter(range(10_000))

    def full(fd, data, offset):
        if next(calls) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, data, offset)

    monkeypatch.setattr(writer, "write_at", full)
    with pytest.raises(ConvertError) as caught:
        convert.convert_checkpoint(made.path, tmp_path / "a", to="meta")
    assert "--resume" not in str(caught.value)
    calls = iter(range(10_000))
    with pytest.raises(ConvertError, match="the same command with --resume goes on"):
        convert.convert_checkpoint(made.path, tmp_path / "b", to="meta", resume=True)
    assert {p.name for p in tmp_path.iterdir()} == {"source", "b.partial"}
    monkeypatch.undo()
    assert convert.convert_checkpoint(made.path, tmp_path / "b", to="meta", resume=True).resumed > 0


def test_an_overflow_keeps_nothing(made, tmp_path):
    """Where another try would end alike, --resume is no reason to leave anything."""
    state = load_file(made.path / "model.safetensors")
    state["model.norm.weight"][0] = 1e30
    save_file(state, made.path / "model.safetensors")
    with pytest.raises(ConvertError, match="too large"):
        convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", dtype="float16", resume=True)
    assert {p.name for p in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize("after", [0, 1])
def test_no_memory_for_a_thread(made, tmp_path, monkeypatch, after):
    """Said as what it is; nothing is left, or with --resume what can be gone on from."""
    real, calls = threading.Thread.start, iter(range(10_000))

    def start(self):
        if next(calls) >= after:
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(MemoryError, match="thread"):
        convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch")
    assert {p.name for p in tmp_path.iterdir()} == {"source"}
    calls = iter(range(10_000))
    with pytest.raises(MemoryError) as caught:
        convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", resume=True)
    assert "--resume goes on" in caught.value.__notes__[0]
    monkeypatch.undo()
    convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", resume=True)


def test_a_source_that_changes_meanwhile_is_noticed(made, tmp_path):
    path = made.path / "model.safetensors"

    def touch(_: int) -> None:
        with path.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x01")

    with pytest.raises(ConvertError, match="was written to while it was being read") as caught:
        convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", progress=touch)
    assert caught.value.problems[0].kind in ("source_changed", "check")
    assert {p.name for p in tmp_path.iterdir()} == {"source"}
    with convert.open_checkpoint(made.path) as opened:  # and between opening and running
        plan = convert.plan_conversion(opened, "scratch")
        touch(0)
        with pytest.raises(ConvertError, match="was written to"):
            run(plan, tmp_path / "out")
    convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch")  # the control


def test_pieces_of_a_split_file_come_all_or_none(tmp_path, monkeypatch):
    """At every rename: who finds piece 1 finds the others, of one output; and a failure gives the old ones back."""
    kind = next(k for k in KINDS if k.name == "hf-to-gguf, split, --overwrite")
    scene = Scene(kind, tmp_path)
    real, count = os.replace, [0]

    def watch(a, b, *, at=0):
        count[0] += 1
        if count[0] == at:
            raise KeyboardInterrupt
        real(a, b)
        assert scene.judge() is None

    monkeypatch.setattr(os, "replace", watch)
    scene.convert()
    total = count[0]
    assert total >= 10 and scene.judge_finished() is None
    for at in range(1, total + 1):
        scene.clear()
        count[0] = 0
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda a, b, at=at: watch(a, b, at=at))
            with pytest.raises(KeyboardInterrupt):
                scene.convert()
        assert hashes(scene.place) == scene.old, at


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a child is killed in the middle")
def test_pieces_moved_before_a_kill_are_taken_back(tmp_path):
    scene = Scene(next(k for k in KINDS if k.name == "hf-to-gguf, split"), tmp_path)
    names = {Path(k).name for k in scene.wanted}
    real = os.replace

    def dying(a, b):
        if "-00002-of-" in str(a):
            os.kill(os.getpid(), signal.SIGKILL)
        real(a, b)

    pid = os.fork()
    if not pid:
        os.replace = dying
        scene.convert()
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    there = {p.name for p in scene.place.iterdir()}
    assert "out-00003-of-00007.gguf" in there and "out-00002-of-00007.gguf" not in there, there
    assert set(read_commit(scene.place / "out.gguf.partial")) == names
    assert scene.judge() is None
    with pytest.raises(UsageError, match="exists already"):
        scene.convert()
    scene.convert(resume=True)
    assert scene.judge_finished() is None


def test_the_judge_sees_what_it_shall_see(tmp_path):
    """The control of the scripts: damage of each sort is told."""
    scene = Scene(next(k for k in KINDS if k.name == "hf-to-gguf, split"), tmp_path)
    scene.convert()
    assert scene.judge() is None and scene.judge_finished() is None
    pieces = sorted(p for p in scene.place.iterdir() if p.suffix == ".gguf")
    pieces[1].rename(tmp_path / "away")
    assert "piece 1 without the others" in str(scene.judge()) and scene.judge_finished()
    pieces[0].unlink()
    assert scene.judge() is None  # nothing that a reader would take for a whole
    (tmp_path / "away").rename(pieces[1])
    source = next(scene.source.glob("*.safetensors"))
    with source.open("ab") as file:
        file.write(b"x")
    assert scene.judge() == "the source is damaged"
    folder = Scene(KINDS[0], tmp_path / "other")
    folder.convert()
    (folder.place / "out" / "model.safetensors").write_bytes(b"half")
    assert "half an output" in str(folder.judge())
    shutil.rmtree(folder.place)


def test_a_journal_that_names_other_files(made, tmp_path):
    """Somebody else may have written it: what is no file of this output stays where it is."""
    out, mine = tmp_path / "out.gguf", tmp_path / "mine"
    cancel = threading.Event()
    with pytest.raises(Cancelled):
        convert.convert_checkpoint(
            made.path, out, to="gguf", resume=True, cancel=cancel, progress=lambda _: cancel.set(), tokenizer=False
        )
    mine.write_text("mine")
    what = [mine.stat().st_ino, 4]
    with (tmp_path / "out.gguf.partial" / ".journal").open("a") as file:
        file.write("commit " + json.dumps({"mine": what, "../mine": what, "": what}) + "\n")
        file.write("commit " + json.dumps({"mine": what, "x": None}) + "\n")
    convert.convert_checkpoint(made.path, out, to="gguf", resume=True, tokenizer=False)
    assert mine.read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"source", "mine", "out.gguf", "out.gguf.conversion.json"}
