"""Converting straight from the Hub: the same bytes, each fetched once, in order; goes on after every interruption."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from pathlib import Path

import pytest

import convert
from convert.errors import ConvertError
from convert.hub import pool as pools
from convert.hub import stream as streams
from convert.hub.intervals import Intervals
from tests.fixtures.ggml import make_gguf
from tests.fixtures.hf import make_hf
from tests.fixtures.meta import make_meta
from tests.fixtures.shapes import SHAPES
from tests.hub.conftest import files_of, put
from tests.hub.server import Fault

WIDE = dataclasses.replace(SHAPES["gqa8"], layers=4, hidden=256, ff=768, head_dim=32, vocab=800)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Many chunks of a small file, and a window that they do not fit into."""
    monkeypatch.setattr(streams, "CHUNK_BYTES", 256 << 10)
    monkeypatch.setattr(streams, "WINDOW_BYTES", 2 << 20)


def fetched_twice(hub, data: bytes) -> int:
    """Bytes of a file that went over the wire more than once."""
    once, twice = Intervals(), 0
    for start, stop in hub.ranges_of(data):
        stop = min(stop, len(data))
        twice += once.overlap(start, stop)
        once.add(start, stop)
    return twice


SOURCES = {
    "hf": lambda p: make_hf(p, WIDE, sharded=3, tokenizer=300),
    "hf-tied-stored": lambda p: make_hf(p, WIDE, tied=True, head="equal"),
    "bin": lambda p: make_hf(p, WIDE, format="bin", sharded=2),
    "gguf": lambda p: make_gguf(p / "m.gguf", WIDE, type="q8_0", scaling=8),
    "meta": lambda p: make_meta(p, WIDE, mp=2),
}
PATHS = [
    ("hf", "scratch", {}),
    ("hf", "gguf", {"type": "q8_0"}),
    ("hf", "meta", {"model_parallel": 2}),
    ("hf", "scratch", {"format": "pth", "dtype": "bfloat16"}),
    ("hf-tied-stored", "hf", {"dtype": "float16"}),
    ("bin", "scratch", {}),
    ("gguf", "hf", {}),
    ("meta", "hf", {}),
]


@pytest.mark.parametrize("source,to,options", PATHS, ids=lambda v: str(v).replace(" ", ""))
def test_same_bytes_each_once(hub, tmp_path, source, to, options):
    SOURCES[source](tmp_path / "m")
    repo = put(hub, "org/m", tmp_path / "m")
    ends = ".gguf" if to == "gguf" else ""
    Path("a").mkdir()
    Path("b").mkdir()
    convert.convert_checkpoint("org/m", f"a/m{ends}", to=to, **options)
    hub.log.clear()
    done = convert.convert_checkpoint("org/m", f"b/m{ends}", to=to, download=False, **options)
    assert files_of(Path("a")) == files_of(Path("b"))
    for path, data in repo.files.items():
        if path.endswith((".safetensors", ".bin", ".pth", ".gguf")):
            ranges = hub.ranges_of(data)
            assert ranges, path
            # what is read again is what the check after writing samples; here that is much of a small file
            assert fetched_twice(hub, data) <= len(data) + (64 << 10)
    whole = [n for n in done.notes if "passed whole" in n]
    assert whole and (source != "hf" or "3 of 3 files" in whole[0])


def test_each_byte_once_and_in_order(hub, tmp_path, monkeypatch):
    """Without the check after writing, no byte at all is asked for twice."""
    from convert import run

    monkeypatch.setattr(run, "read_back", lambda *a, **k: 0)
    SOURCES["hf"](tmp_path / "m")
    repo = put(hub, "org/m", tmp_path / "m")
    convert.convert_checkpoint("org/m", "out", to="scratch", download=False)
    for path, data in repo.files.items():
        if path.endswith(".safetensors"):
            assert fetched_twice(hub, data) == 0
            starts = [a for a, _ in hub.ranges_of(data)]
            ahead = streams.WINDOW_BYTES + streams.CONNECTIONS * streams.CHUNK_BYTES
            assert all(a >= max(starts[: i + 1]) - ahead for i, a in enumerate(starts)), starts
            assert sorted(starts) != starts[::-1]
    assert not list((tmp_path / "cache").glob("**/*.safetensors"))


def test_disk_holds_the_output_only(hub, tmp_path, monkeypatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    SOURCES["hf"](tmp_path / "m")
    repo = put(hub, "org/m", tmp_path / "m")
    most = 0

    def progress(_: int) -> None:
        nonlocal most
        there = [p for place in ("tmp", "cache") for p in (tmp_path / place).rglob("*") if p.is_file()]
        most = max(most, sum(p.lstat().st_blocks * 512 for p in there))

    convert.convert_checkpoint("org/m", "out", to="scratch", download=False, progress=progress)
    heads = 3 * (1 << 20)
    assert heads / 2 < most < heads + (1 << 20) < sum(map(len, repo.files.values())) / 3
    assert not list((tmp_path / "tmp").glob("convert-hub-*"))


FAULTS = {
    "cut": Fault("/cdn/", 5, cut=100_000),
    "429": Fault("/cdn/", 3, status=429, headers={"Retry-After": "0"}),
    "503": Fault("/cdn/", 3, status=503, headers={"Retry-After": "0"}),
    "slow": Fault("/cdn/", 3, slow=0.3),
    "expired": Fault("/cdn/", 2, status=403),
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults_change_nothing(hub, tmp_path, what):
    SOURCES["hf"](tmp_path / "m")
    put(hub, "org/m", tmp_path / "m")
    convert.convert_checkpoint("m", "wanted", to="scratch")
    hub.faults = [dataclasses.replace(FAULTS[what])]
    convert.convert_checkpoint("org/m", "out", to="scratch", download=False)
    assert hub.faults[0].times == 0
    assert files_of(Path("out")) == files_of(Path("wanted"))
    if what == "cut":  # went on where it stopped
        asked = [r for r in hub.log if "/cdn/" in r.path and r.range]
        cuts = [(r.path, *r.range) for r in asked if r.sent == 100_000]
        starts = {}
        for r in asked:  # of each file, the last place from which a range was asked for
            starts[r.path, r.range[1]] = r.range[0]
        assert cuts and all(start < starts[path, stop] for path, start, stop in cuts), (cuts, starts)


@pytest.mark.parametrize("what", ["flip", "etag", "length", "whole"])
def test_another_file_is_refused(hub, tmp_path, what):
    SOURCES["hf"](tmp_path / "m")
    put(hub, "org/m", tmp_path / "m")
    at = {"flip": {"flip": 3_000_000}, "etag": {"tag": '"x"'}, "length": {"total": 5}, "whole": {"whole": True}}[what]
    from convert.hub.place import place

    opened = convert.open_checkpoint(place("org/m", way="stream"))
    hub.faults = [Fault("/cdn/", 99, **at)]
    with pytest.raises(ConvertError) as error:
        convert.convert_checkpoint(opened, "out", to="scratch")
    assert {p.kind for p in error.value.problems} == {"hub_damaged"}
    assert not Path("out").exists() and not list(tmp_path.glob(".out*"))
    opened.close()


@pytest.mark.parametrize("options", [{}, {"format": "pth"}, {"dtype": "float16"}], ids=str)
def test_interrupted_and_resumed(hub, tmp_path, monkeypatch, options):
    SOURCES["hf"](tmp_path / "m")
    repo = put(hub, "org/m", tmp_path / "m")
    convert.convert_checkpoint("m", "wanted", to="scratch", **options)
    cancel, done = threading.Event(), 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if done > (4e6 if "dtype" in options else 7e6):
            cancel.set()

    from convert import run

    with pytest.raises(run.Cancelled):
        convert.convert_checkpoint(
            "org/m", "out", to="scratch", download=False, resume=True, progress=progress, cancel=cancel, **options
        )
    assert not Path("out").exists()
    hub.log.clear()
    monkeypatch.setattr(run, "read_back", lambda *a, **k: 0)  # whose samples are large beside a small file
    summary = convert.convert_checkpoint("org/m", "out", to="scratch", download=False, resume=True, **options)
    assert summary.resumed > (2e6 if "dtype" in options else 5e6)
    narrowed = "dtype" in options  # of whose values losses are counted: all of them are read again
    assert any("not fetched again" in n for n in summary.notes) != narrowed
    assert files_of(Path("out")) == files_of(Path("wanted")) or _but_notes("out", "wanted")
    weights = sum(len(d) for p, d in repo.files.items() if p.endswith(".safetensors"))
    assert (hub.sent < weights - 3e6) != narrowed


@pytest.mark.parametrize("how", ["sound", "a bit", "zeros", "listed without CRCs", "unasked"])
def test_what_was_fetched_is_believed_only_as_it_was_written(hub, tmp_path, monkeypatch, how):
    """Damage to what an earlier run had fetched is found without fetching it; the control does not look."""
    monkeypatch.setattr(pools, "_SMALL_GAPS", 0)
    monkeypatch.setattr(pools, "_GAP_SHARE", 1000)
    SOURCES["hf"](tmp_path / "m")
    repo = put(hub, "org/m", tmp_path / "m")
    convert.convert_checkpoint("m", "wanted", to="scratch")
    cancel, done = threading.Event(), 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if done > 7e6:
            cancel.set()

    from convert import run, writer

    asked = {"to": "scratch", "download": False, "resume": True}
    with pytest.raises(run.Cancelled):
        convert.convert_checkpoint("org/m", "out", progress=progress, cancel=cancel, **asked)
    made, journal = Path("out.partial/model.safetensors"), Path("out.partial/.journal")
    data, wanted = bytearray(made.read_bytes()), Path("wanted/model.safetensors").read_bytes()
    at = next(n for n in range(200_000, len(data), 1000) if data[n : n + 999] == wanted[n : n + 999] != bytes(999))
    if how in ("a bit", "unasked"):
        data[at] ^= 16
    elif how == "zeros":
        data[at : at + 500] = bytes(500)
    elif how == "listed without CRCs":  # by an earlier version
        first, *lines = journal.read_text().splitlines()
        assert all(len(line.split()) > 3 for line in lines)
        journal.write_text("\n".join([first, *(" ".join(line.split()[:3]) for line in lines), ""]))
    made.write_bytes(data)
    monkeypatch.setattr(run, "read_back", lambda *a, **k: 0)  # whose samples are large beside a small file
    if how == "unasked":
        monkeypatch.setattr(writer, "confirm", lambda *_: None)
    hub.log.clear()
    summary = convert.convert_checkpoint("org/m", "out", **asked)
    assert (Path("out/model.safetensors").read_bytes() == wanted) == (how != "unasked")
    assert any("were written again" in n for n in summary.notes) == (how not in ("sound", "unasked"))
    assert (summary.resumed > 3e6) == (how != "listed without CRCs")
    weights = sum(len(d) for p, d in repo.files.items() if p.endswith(".safetensors"))
    assert (hub.sent < weights - 2e6) == (how != "listed without CRCs")


def _but_notes(a: str, b: str) -> bool:
    left, right = files_of(Path(a)), files_of(Path(b))
    return {k: v for k, v in left.items() if k != "conversion.json"} == {
        k: v for k, v in right.items() if k != "conversion.json"
    }


def test_hashes_in_the_record(hub, tmp_path):
    SOURCES["hf"](tmp_path / "m")
    repo = put(hub, "org/m", tmp_path / "m")
    convert.convert_checkpoint("org/m", "out", to="scratch", download=False, hashes=True)
    record = json.loads(Path("out/conversion.json").read_text())
    assert {f["name"]: f["sha256"] for f in record["source"]["files"]} == {
        p: hashlib.sha256(d).hexdigest() for p, d in repo.files.items() if p.endswith(".safetensors")
    }
    assert convert.check("out").ok


def _damaged(folder: Path) -> None:
    """One byte in the middle of the largest tensor of one file, before anybody hashed it."""
    with convert.open_checkpoint(folder) as ckpt:
        spec = max((s for parts in ckpt.tensors.values() for s in parts), key=lambda s: (s.nbytes, str(s.file)))
    data = bytearray(spec.file.read_bytes())
    data[spec.offset + spec.nbytes // 2] ^= 1
    spec.file.write_bytes(data)


@pytest.mark.parametrize("source", ["bin", "meta"])
def test_crcs_of_torch_files_are_compared_as_they_pass(hub, tmp_path, source):
    """Damaged before it came to the Hub, whose SHA-256 is of what it was given."""
    SOURCES[source](tmp_path / "m")
    put(hub, "org/m", tmp_path / "m")
    with convert.open_checkpoint(tmp_path / "m") as ckpt:
        count = len({(s.file, s.storage) for parts in ckpt.tensors.values() for s in parts})
    done = convert.convert_checkpoint("org/m", "out", to="scratch", download=False)
    assert f"the CRC-32 of {count} storages compared as they passed" in done.notes
    _damaged(tmp_path / "m")
    put(hub, "org/bad", tmp_path / "m")
    with pytest.raises(ConvertError) as error:
        convert.convert_checkpoint("org/bad", "bad", to="scratch", download=False)
    assert [p.kind for p in error.value.problems] == ["crc"]
    with pytest.raises(ConvertError) as local:
        convert.convert_checkpoint("m", "bad", to="scratch")
    assert [p.found for p in local.value.problems] == [p.found for p in error.value.problems]
    assert not Path("bad").exists() and not list(tmp_path.glob("*.partial"))


def test_what_was_fetched_by_an_earlier_run_is_said_not_to_be_compared(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "_SMALL_GAPS", 0)
    monkeypatch.setattr(pools, "_GAP_SHARE", 1000)
    SOURCES["meta"](tmp_path / "m")
    put(hub, "org/m", tmp_path / "m")
    cancel, done = threading.Event(), 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if done > 7e6:
            cancel.set()

    from convert import run

    asked = {"to": "scratch", "download": False, "resume": True}
    with pytest.raises(run.Cancelled):
        convert.convert_checkpoint("org/m", "out", progress=progress, cancel=cancel, **asked)
    notes = convert.convert_checkpoint("org/m", "out", **asked).notes
    assert any("compared as they passed" in n for n in notes)
    assert any("not compared: not all of them was fetched" in n for n in notes)


def test_large_gaps_are_not_fetched(hub, tmp_path, monkeypatch):
    """A tensor that is not used, and too large to be fetched for a hash's sake."""
    monkeypatch.setattr(pools, "_SMALL_GAPS", 0)
    monkeypatch.setattr(pools, "_GAP_SHARE", 1000)
    SOURCES["hf-tied-stored"](tmp_path / "m")
    repo = put(hub, "org/m", tmp_path / "m")
    done = convert.convert_checkpoint("org/m", "out", to="hf", download=False)
    data = repo.files["model.safetensors"]
    assert fetched_twice(hub, data) <= len(data)
    assert any("1 of 1" in n or "0 of 1" in n for n in done.notes)


def test_intervals():
    some = Intervals()
    for a, b in [(10, 20), (30, 40), (18, 31), (50, 50), (60, 70), (0, 5)]:
        some.add(a, b)
    assert list(some) == [(0, 5), (10, 40), (60, 70)]
    assert list(some.gaps(3, 65)) == [(5, 10), (40, 60)]
    assert some.covers(12, 40) and not some.covers(12, 41) and some.overlap(0, 100) == 45
