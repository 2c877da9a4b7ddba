"""CRCs of large sources, compared beside the writing: refused, cancelled, resumed. Every source is large here."""

from __future__ import annotations

import errno
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import convert
from convert import storage_crcs
from convert.errors import ConvertError, Problem
from convert.run import Cancelled
from convert.source import FilePool
from convert.storage_crcs import Beside
from convert.storages import storages
from convert.writer import Writer
from tests.fixtures import make_meta
from tests.test_storage_crcs import flip
from tests.trust.kinds import hashes

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def eight(tmp_path: Path) -> Path:
    return make_meta(tmp_path / "meta", "h32kv8", mp=8).path


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_crcs, "SMALL", 0)


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "crc"]


def in_crc_threads(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path, int], None]) -> None:
    """Do something at every read of the comparison, and at no other."""
    plain = FilePool.read_into

    def read_into(self: FilePool, path: Path, buffer: memoryview, offset: int) -> None:
        if threading.current_thread().name == "crc":
            act(path, offset)
        plain(self, path, buffer, offset)

    monkeypatch.setattr(FilePool, "read_into", read_into)


TARGETS: list[dict[str, Any]] = [
    {"to": "hf"},
    {"to": "scratch", "format": "pth"},
    {"to": "meta", "model_parallel": 2},
    {"to": "hf", "dtype": "float32"},
    {"to": "hf", "threads": 5},
]


@pytest.mark.parametrize("options", TARGETS, ids=str)
def test_the_same_bytes_and_no_wrong_ones(
    eight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """What a conversion without the comparison writes is the control, of a sound source and of a damaged one."""
    options = {"overwrite": True, **options}
    out = tmp_path / "out"
    read: set[tuple[Path, int]] = set()
    convert.convert_checkpoint(eight, out, **options)
    wanted = hashes(out)
    shutil.rmtree(out)
    with monkeypatch.context() as patch:
        patch.setattr(storage_crcs, "SMALL", 0)
        in_crc_threads(patch, lambda path, offset: read.add((path, offset)))
        convert.convert_checkpoint(eight, out, **options)
        assert hashes(out) == wanted
        with convert.open_checkpoint(eight) as ckpt:
            assert read == {(s.key[0], s.offset) for s in storages(ckpt)}
        shutil.rmtree(out)
        flip(eight / "consolidated.07.pth", "/data/1")
        with pytest.raises(ConvertError, match="CRC-32"):
            convert.convert_checkpoint(eight, out, **options)
        assert [p.name for p in tmp_path.iterdir()] == ["meta"]
        patch.setattr(storage_crcs, "storages", lambda ckpt: [])
        convert.convert_checkpoint(eight, out, **options)
    assert not readers()


@pytest.mark.usefixtures("large")
def test_an_existing_output_stays(eight: Path, tmp_path: Path) -> None:
    convert.convert_checkpoint(eight, tmp_path / "out", to="hf")
    before = hashes(tmp_path / "out")
    flip(eight / "consolidated.03.pth", "/data/2")
    with pytest.raises(ConvertError, match="CRC-32"):
        convert.convert_checkpoint(eight, tmp_path / "out", to="hf", overwrite=True)
    assert hashes(tmp_path / "out") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["meta", "out"]


@pytest.mark.usefixtures("large")
def test_a_wrong_storage_stops_the_writing(eight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer goes no further than the piece in which it hears of it; the comparison ahead of it has all found."""
    for number in (2, 6):
        flip(eight / f"consolidated.{number:02}.pth", "/data/0")
    begin, told = Beside.begin, []

    def slow(self: Beside, writer: Writer, threads: int) -> None:
        begin(self, writer, threads)
        while readers():
            time.sleep(0.01)

    monkeypatch.setattr(Beside, "begin", slow)
    with pytest.raises(ConvertError) as caught:
        convert.convert_checkpoint(eight, tmp_path / "out", to="hf", progress=told.append)
    assert [Path(p.file or "").name for p in caught.value.problems] == ["consolidated.02.pth", "consolidated.06.pth"]
    assert told == []
    assert [p.name for p in tmp_path.iterdir()] == ["meta"]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("way", ["no CRCs", "one storage for all"])
def test_what_states_nothing_is_not_refused(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRCs of zero over changed bytes; and a storage of which tensors are views, padding between them."""
    made = make_meta(tmp_path / "meta", "gqa8", mp=1).path
    path = made / "consolidated.00.pth"
    state = torch.load(path, weights_only=True)
    if way == "one storage for all":
        whole = torch.full((sum(t.numel() + 7 for t in state.values()),), 5.0, dtype=next(iter(state.values())).dtype)
        at = 0
        for name, tensor in state.items():
            view = whole[at : at + tensor.numel()].view(tensor.shape)
            state[name] = view.copy_(tensor)
            at += tensor.numel() + 7
    torch.serialization.set_crc32_options(way != "no CRCs")
    try:
        torch.save(state, path)
    finally:
        torch.serialization.set_crc32_options(True)
    monkeypatch.setattr(storage_crcs, "_AHEAD", 0)
    monkeypatch.setattr(storage_crcs, "_PIECE", 1000)
    monkeypatch.setattr(storage_crcs, "_READ", 300)
    if way == "no CRCs":
        data = bytearray(path.read_bytes())
        with convert.open_checkpoint(made) as ckpt:
            data[next(iter(ckpt.tensors.values()))[0].offset] ^= 1
        path.write_bytes(data)
        convert.convert_checkpoint(made, tmp_path / "out", to="hf")
        return
    convert.convert_checkpoint(made, tmp_path / "out", to="hf", dtype="float16")
    flip(path, "/data/0")  # in the padding: of no tensor, but who changed it?
    with pytest.raises(ConvertError, match="CRC-32"):
        convert.convert_checkpoint(made, tmp_path / "out2", to="hf")


@pytest.mark.usefixtures("large")
def test_it_reads_as_the_plan_does_and_not_far_ahead(
    eight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_crcs, "_AHEAD", 5000)
    orders, ahead, written = [], [], [0]
    plain, begin = storage_crcs.put_in_order, Beside.begin

    def seen(found: list[Any], plan: Any) -> int:
        orders.append((plain(found, plan), found, plan))
        return orders[0][0]

    def at(path: Path, offset: int) -> None:
        due = next(s.due for s in orders[0][1] if s.key[0] == path and s.offset == offset)
        ahead.append(due - written[0])

    def slow(self: Beside, writer: Writer, threads: int) -> None:
        begin(self, writer, threads)
        plain_piece = writer.write_piece

        def piece(*args: Any) -> Any:
            time.sleep(0.002)
            found = plain_piece(*args)
            written[0] += 0 if writer.failed.is_set() else (args[2] - args[1]) * args[0].source.row_bytes
            return found

        monkeypatch.setattr(writer, "write_piece", piece)

    monkeypatch.setattr(storage_crcs, "put_in_order", seen)
    monkeypatch.setattr(Beside, "begin", slow)
    in_crc_threads(monkeypatch, at)
    convert.convert_checkpoint(eight, tmp_path / "out", to="scratch", threads=1)
    total, found, plan = orders[0]
    assert total == sum(o.source.shape[0] * o.source.row_bytes for o in plan.outputs)
    assert len(ahead) == len(found) > len(plan.outputs)
    dues = [s.due for s in found]
    assert dues == sorted(dues)
    assert all("norm" in n for s in found if s.due == total for n in s.names)  # copies that the plan does not read
    assert max(ahead) <= 5000 + max(s.nbytes for s in found) * 8  # a piece may be written and not yet counted
    assert max(dues) > 5 * max(ahead)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("resume", [False, True])
def test_cancelled_in_the_middle(eight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool) -> None:
    """All is written and the comparison goes on when the event is set; with resume, a later run begins it anew."""
    convert.convert_checkpoint(eight, tmp_path / "wanted", to="hf")
    cancel, written, reads = threading.Event(), threading.Event(), []

    def at(path: Path, offset: int) -> None:
        reads.append(offset)
        time.sleep(0.01)
        if len(reads) >= 30:
            written.wait(100)  # something is there to go on from, however slow the writing is
            cancel.set()

    with monkeypatch.context() as patch:
        in_crc_threads(patch, at)
        with pytest.raises(Cancelled):
            convert.convert_checkpoint(
                eight, tmp_path / "out", to="hf", cancel=cancel, resume=resume, progress=lambda _: written.set()
            )
        assert len(reads) <= 32 and not readers()
        left = ["meta", "out.partial", "wanted"] if resume else ["meta", "wanted"]
        assert sorted(p.name for p in tmp_path.iterdir()) == left
        reads.clear()
        reads += [0] * 30
        if not resume:
            return
        shutil.copytree(tmp_path / "out.partial", tmp_path / "keep")
        done = convert.convert_checkpoint(eight, tmp_path / "out", to="hf", resume=True)
        with convert.open_checkpoint(eight) as ckpt:
            assert len(reads) - 30 == len(storages(ckpt))
    assert done.resumed > 0
    assert hashes(tmp_path / "out") == hashes(tmp_path / "wanted")


@pytest.mark.usefixtures("large")
def test_what_is_wrong_is_not_gone_on_with(eight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is interrupted before it comes to the damage leaves its pieces; the next one takes all of it away."""
    flip(eight / "consolidated.01.pth", "/data/4")
    cancel = threading.Event()
    with monkeypatch.context() as patch:
        in_crc_threads(patch, lambda path, offset: cancel.set())
        with pytest.raises(Cancelled):
            convert.convert_checkpoint(eight, tmp_path / "out", to="hf", cancel=cancel, resume=True)
    assert (tmp_path / "out.partial").exists()
    with pytest.raises(ConvertError, match="CRC-32") as caught:
        convert.convert_checkpoint(eight, tmp_path / "out", to="hf", resume=True)
    assert "--resume" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["meta"]


@pytest.mark.usefixtures("large")
def test_a_read_that_fails_may_be_tried_again(eight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def at(path: Path, offset: int) -> None:
        if path.name == "consolidated.04.pth":
            raise ConvertError(Problem("read", f"{path.name} could not be read: so there.", file=str(path)))

    with monkeypatch.context() as patch:
        in_crc_threads(patch, at)
        with pytest.raises(ConvertError, match="so there"):
            convert.convert_checkpoint(eight, tmp_path / "gone", to="hf")
        with pytest.raises(ConvertError, match=r"so there(.|\n)*--resume goes on from there"):
            convert.convert_checkpoint(eight, tmp_path / "out", to="hf", resume=True)
    assert not readers()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["meta", "out.partial"]
    convert.convert_checkpoint(eight, tmp_path / "out", to="hf", resume=True)


@pytest.mark.usefixtures("large")
def test_a_write_that_fails_ends_the_reading(eight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("convert.writer.write_at", full)
    in_crc_threads(monkeypatch, lambda path, offset: time.sleep(0.05))
    with pytest.raises(ConvertError, match="No space left"):
        convert.convert_checkpoint(eight, tmp_path / "out", to="scratch", format="pth")
    assert not readers()
    assert [p.name for p in tmp_path.iterdir()] == ["meta"]


@pytest.mark.usefixtures("large")
def test_no_memory_for_a_thread(eight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "crc":
            raise RuntimeError("can't start new thread")
        plain(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(MemoryError):
            convert.convert_checkpoint(eight, tmp_path / "out", to="hf")
    assert [p.name for p in tmp_path.iterdir()] == ["meta"]


HELD = """
import sys, time
from convert import cli, storage_crcs
plain = storage_crcs._Reader._crc
def held(self, *args):
    while not self._stopped():
        time.sleep(0.01)
    return plain(self, *args)
storage_crcs._Reader._crc = held
storage_crcs.SMALL = 0
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_all_is_written(eight: Path, tmp_path: Path, number: int, code: int) -> None:
    """The main thread waits for the comparison then, which here ends only when it is stopped."""

    def listening() -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    child = subprocess.Popen(
        [sys.executable, "-c", HELD, "to", "hf", str(eight), str(tmp_path / "out"), "--verify", "never", "--quiet"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=listening,
    )
    partial, end = tmp_path / "out.partial", time.monotonic() + 100
    while not any(p.suffix == ".safetensors" for p in partial.glob("*")) and time.monotonic() < end:
        assert child.poll() is None
        time.sleep(0.02)
    time.sleep(0.7)
    assert child.poll() is None
    child.send_signal(number)
    err = child.communicate(timeout=100)[1]
    assert child.returncode == code, err
    assert "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["meta"]
