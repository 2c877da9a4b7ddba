"""Carrying a plan out: complete or not at all, whatever fails where, in memory that does not grow with the model."""

from __future__ import annotations

import errno
import itertools
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert import run as engine
from convert import writer as pieces
from convert.errors import ConvertError
from convert.platform import write_at
from convert.run import Cancelled, run
from convert.source import FilePool, Joined, Source
from tests.fixtures import Shape, make_hf, make_meta
from tests.fixtures.hf import hf_config
from tests.fixtures.weights import hf_state
from tests.reference.models import one_thread  # noqa: F401


@pytest.fixture
def made(tmp_path):
    return make_hf(tmp_path / "source", "gqa8", dtype="bfloat16")


def left(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()} - {"source"}


def changed(made, change) -> None:
    """The source with other values in one tensor."""
    state = load_file(made.path / "model.safetensors")
    change(state)
    save_file(state, made.path / "model.safetensors")


# --- a failure anywhere leaves nothing --------------------------------------------------------------------------------


class Broken(Exception):
    pass


@pytest.mark.parametrize("target", ["scratch", "meta", "hf", "gguf"])
@pytest.mark.parametrize("at", [0, 1, 7, 20])
def test_an_error_in_a_piece(made, tmp_path, monkeypatch, target, at):
    """The error itself comes out, nothing stays, and the same plan works afterwards."""
    count = iter(range(10_000))
    real = pieces.Writer.write_piece

    def fail(self, *piece):
        if next(count) == at:
            raise Broken
        return real(self, *piece)

    name = "out.gguf" if target == "gguf" else "out"
    options = {"tokenizer": False} if target == "gguf" else {}
    plan = convert.plan_conversion(made.path, target, **options)
    monkeypatch.setattr(pieces.Writer, "write_piece", fail)
    with pytest.raises(Broken):
        run(plan, tmp_path / name)
    assert not left(tmp_path)
    monkeypatch.undo()
    run(plan, tmp_path / name)
    assert name in left(tmp_path) and not any(n.endswith(".partial") for n in left(tmp_path))
    plan.source.close()


@pytest.mark.parametrize("after", [0, 3, 25])
def test_a_full_disk_in_the_middle(made, tmp_path, monkeypatch, after):
    calls = iter(range(10_000))

    def full(fd, data, offset):
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_at(fd, data, offset)

    monkeypatch.setattr(pieces, "write_at", full)
    with pytest.raises(ConvertError, match="No space left") as caught:
        convert.convert_checkpoint(made.path, tmp_path / "out", to="meta")
    assert caught.value.problems[0].kind == "disk_full" and "consolidated.00.pth" in str(caught.value)
    assert not left(tmp_path)


def test_a_sidecar_that_cannot_be_written(made, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "write_sidecar", lambda *_: (_ for _ in ()).throw(OSError(errno.EDQUOT, "quota")))
    with pytest.raises(OSError, match="quota"):
        convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch")
    assert not left(tmp_path)


def test_the_callers_event_stops_it_and_is_left_alone(made, tmp_path):
    cancel = threading.Event()
    with pytest.raises(Cancelled):
        convert.convert_checkpoint(
            made.path, tmp_path / "out", to="meta", cancel=cancel, progress=lambda _: cancel.set()
        )
    assert not left(tmp_path)
    cancel = threading.Event()
    changed(made, lambda s: s["model.norm.weight"].fill_(70000))
    with pytest.raises(ConvertError):
        convert.convert_checkpoint(made.path, tmp_path / "out", to="meta", dtype="float16", cancel=cancel)
    assert not cancel.is_set()  # a failure is not the caller's wish to stop
    cancel.set()
    with pytest.raises(Cancelled):
        convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", cancel=cancel)
    assert not left(tmp_path)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads_and_progress(made, tmp_path, threads):
    """Every byte of the tensors is counted once; the number of workers does not change a bit."""
    seen: list[int] = []
    convert.convert_checkpoint(made.path, tmp_path / "out", to="meta", threads=threads, progress=seen.append)
    written = torch.load(tmp_path / "out" / "consolidated.00.pth", weights_only=True)
    assert sum(seen) == sum(t.nbytes for t in written.values())
    convert.convert_checkpoint(made.path, tmp_path / "one", to="meta", threads=1)
    files = [(tmp_path / n / "consolidated.00.pth").read_bytes() for n in ("out", "one")]
    assert files[0] == files[1]


# --- values that do not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["scratch", "meta", "hf"])
def test_overflow_stops_with_every_tensor_named(made, tmp_path, target):
    def change(state):
        state["model.layers.0.mlp.up_proj.weight"][3, 5] = 70000
        state["model.layers.1.mlp.up_proj.weight"][:2, 5] = -70000
        state["model.norm.weight"][7] = 1e30

    changed(made, change)
    options = {"model_parallel": 2} if target == "meta" else {}
    with pytest.raises(ConvertError) as caught:
        convert.convert_checkpoint(made.path, tmp_path / "out", to=target, dtype="float16", **options)
    problems = caught.value.problems
    assert len(problems) == 3 and {p.kind for p in problems} == {"overflow"}
    up = {"scratch": "ff.fc2", "meta": "feed_forward.w3", "hf": "mlp.up_proj"}[target]
    counts = {p.tensor: p.found for p in problems}
    assert sorted(n for t, n in counts.items() if up in str(t)) == [1, 2]
    assert "too large for F16" in str(caught.value) and "--dtype bfloat16" in str(caught.value)
    assert not left(tmp_path)
    convert.convert_checkpoint(made.path, tmp_path / "out", to=target, dtype="float32", **options)  # the control


@pytest.mark.parametrize(
    ("source", "value", "dtype", "hint"),
    [("float32", 3.4e38, "bfloat16", "float32"), ("float64", 1e300, "float32", "keep")],
)
def test_overflow_names_a_type_that_is_wider(tmp_path, source, value, dtype, hint):
    wide = make_hf(tmp_path / "wide", "gqa8", dtype=source)
    changed(wide, lambda state: state["model.norm.weight"].fill_(value))
    with pytest.raises(ConvertError, match=f"(?s)too large for .*--dtype {hint};"):
        convert.convert_checkpoint(wide.path, tmp_path / "out", to="scratch", dtype=dtype)
    assert left(tmp_path) == {"wide"}
    convert.convert_checkpoint(wide.path, tmp_path / "out", to="scratch", dtype=hint)


def test_what_becomes_zero_is_counted_once(made, tmp_path):
    def change(state):
        state["model.layers.0.mlp.up_proj.weight"][:4, 5] = 1e-9
        state["model.norm.weight"][:3] = -1e-12

    changed(made, change)
    plan = convert.plan_conversion(made.path, "meta", dtype="float16")
    summary = run(plan, tmp_path / "out")
    state = load_file(made.path / "model.safetensors").values()
    wanted = sum(int(((t.half() == 0) & (t != 0)).sum()) for t in state)
    assert summary.underflowed == wanted >= 7
    assert any(f"{wanted:,} non-zero values became zero" in n for n in summary.notes)
    assert summary.as_json()["underflowed"] == wanted
    assert run(plan, tmp_path / "again").underflowed == wanted
    plan.source.close()
    assert convert.convert_checkpoint(made.path, tmp_path / "kept", to="meta").underflowed == 0


# --- the check after writing ------------------------------------------------------------------------------------------


def corrupt(monkeypatch, edit) -> None:
    """Let ``edit`` damage the partial output just after it was written."""
    real = pieces.Writer.write

    def write(self, threads, **options):
        found = real(self, threads, **options)
        edit(self)
        return found

    monkeypatch.setattr(pieces.Writer, "write", write)


@pytest.mark.parametrize("target", ["scratch", "meta", "hf"])
def test_one_flipped_bit_in_any_tensor_is_seen(made, tmp_path, monkeypatch, target):
    plan = convert.plan_conversion(made.path, target, **({"model_parallel": 2} if target == "meta" else {}))
    rng = np.random.default_rng(0)
    for number, file in enumerate(plan.files):
        for entry in file.entries:
            at = file.offsets[entry.name] + int(rng.integers(entry.nbytes))

            def edit(writer, number=number, at=at):
                path = writer.folder / plan.files[number].name
                data = bytearray(path.read_bytes())
                data[at] ^= 1
                write_at(writer.fds[number], data[at : at + 1], at)

            with monkeypatch.context() as patch:
                corrupt(patch, edit)
                with pytest.raises(ConvertError, match="the check after writing failed") as caught:
                    run(plan, tmp_path / "out")
            assert entry.name in str(caught.value)
    assert not left(tmp_path)
    run(plan, tmp_path / "out")
    plan.source.close()


@pytest.mark.parametrize(("target", "name"), [("scratch", "model.safetensors"), ("meta", "consolidated.00.pth")])
@pytest.mark.parametrize("damage", ["short", "long", "header", "other header"])
def test_damage_to_the_file_around_the_tensors(made, tmp_path, monkeypatch, target, name, damage):
    def edit(writer):
        path = writer.folder / name
        data = path.read_bytes()
        if damage == "short":
            path.write_bytes(data[:-1])
        elif damage == "long":
            path.write_bytes(data + b"\0")
        elif damage == "header":
            write_at(writer.fds[0], bytes(40), 0 if target == "scratch" else len(data) - 40)
        else:
            old, new = (b'"tok_emb.weight"', b'"tok_enb.weight"') if target == "scratch" else (b"norm", b"nork")
            at = data.index(old)
            write_at(writer.fds[0], new, at)

    corrupt(monkeypatch, edit)
    with pytest.raises(ConvertError, match=f"the check after writing failed: {name}"):
        convert.convert_checkpoint(made.path, tmp_path / "out", to=target)
    assert not left(tmp_path)


def test_more_tensors_than_blocks(tmp_path):
    """A deep model is sampled; the summary tells how much."""
    made = make_hf(tmp_path / "source", Shape(48, 6, 2, 8, 80, 96, layers=9))
    summary = convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch")
    assert summary.tensors == 9 * 9 + 3 and summary.checked_blocks == 64


def test_checksums_of_metas_files_are_real(tmp_path):
    made = make_hf(tmp_path / "source", Shape(256, 32, 8, 8, 1024, 3000), dtype="float32")
    convert.convert_checkpoint(made.path, tmp_path / "out", to="meta", model_parallel=4, threads=3)
    for path in sorted((tmp_path / "out").glob("*.pth")):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            assert all(info.CRC for info in archive.infolist() if "/data/" in info.filename)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with zipfile.ZipFile(path) as archive:  # the control
            assert archive.testzip() is not None


# --- pieces -----------------------------------------------------------------------------------------------------------


class Recorded(Source):
    """Wraps a source and notes what is read from it."""

    def __init__(self, source: Source, reads: list[int]) -> None:
        self.source, self.reads = source, reads
        self.shape, self.dtype, self.align = source.shape, source.dtype, source.align

    def extent(self, start, stop):
        return self.source.extent(start, stop)

    def read(self, start, stop):
        self.reads.append((stop - start) * self.row_bytes)
        return self.source.read(start, stop)


def test_where_two_files_meet_only_a_small_piece_passes_through_memory(tmp_path, monkeypatch):
    """Model-parallel files joined by rows move inside the kernel but for the piece across the border."""
    monkeypatch.setattr(pieces, "COPY_BYTES", 1 << 17)
    monkeypatch.setattr("convert.plan.PIECE_BYTES", 1 << 12)
    made = make_meta(tmp_path / "source", Shape(256, 32, 8, 8, 1008, 2500), mp=2)
    plan = convert.plan_conversion(made.path, "hf")
    reads: list[int] = []
    for i, output in enumerate(plan.outputs):
        if isinstance(output.source, Joined) and output.source.axis == 0:
            plan.outputs[i] = pieces.Output(Recorded(output.source, reads), output.targets)
    found = list(pieces.Writer(plan, tmp_path, None, threading.Event()).pieces())
    for output in plan.outputs:  # every row once, in order
        spans = [(a, b) for o, a, b in found if o is output]
        assert spans[0][0] == 0 and spans[-1][1] == output.source.shape[0]
        assert all(x[1] == y[0] for x, y in itertools.pairwise(spans))
    monkeypatch.setattr(engine, "read_back", lambda *_, **__: 0)
    run(plan, tmp_path / "out")
    assert reads and max(reads) <= 1 << 12
    monkeypatch.undo()
    plan.source.close()
    made_of = load_file(tmp_path / "out" / "model.safetensors")
    wanted = make_hf(tmp_path / "wanted", made.shape).tensors
    assert all(torch.equal(made_of[k], wanted[k]) for k in wanted)


# --- memory -----------------------------------------------------------------------------------------------------------

MEASURE = """
import sys
from pathlib import Path
from convert.conversion import plan_conversion
from convert.run import run

source, target, out, dtype = sys.argv[1:]
plan = plan_conversion(source, target, dtype=None if dtype == "keep" else dtype)
summary = run(plan, Path(out), threads=2)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024, plan.peak_memory(2), sum(f.stat().st_size for f in plan.source.files))
"""


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Two models, the second twice as deep; wide enough that a tensor is cut into pieces."""
    folder = tmp_path_factory.mktemp("deep")
    for layers in (8, 16):
        shape = Shape(512, 8, 2, 64, 2048, 8192, layers=layers)
        (folder / str(layers)).mkdir()
        values = np.random.default_rng(layers).integers(0x3C00, 0x3F00, 1 << 18, np.int16)  # bfloat16, 0.008 to 0.5
        state = {}
        for name, tensor in hf_state(Shape(64, 8, 2, 8, 96, 128, layers=layers)).items():
            sizes = {64: 512, 16: 128, 96: 2048, 128: 8192}
            dims = tuple(sizes[n] for n in tensor.shape)
            tensor = np.resize(np.roll(values, len(state)), dims)
            state[name] = torch.from_numpy(tensor).view(torch.bfloat16)
        save_file(state, folder / str(layers) / "model.safetensors")
        (folder / str(layers) / "config.json").write_text(json.dumps(hf_config(shape, dtype="bfloat16")))
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
@pytest.mark.parametrize(("target", "dtype"), [("scratch", "keep"), ("meta", "keep"), ("meta", "float16")])
def test_memory_does_not_grow_with_the_model(deep, tmp_path, target, dtype):
    peaks = {}
    for layers in (8, 16):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, deep / str(layers), target, tmp_path / str(layers), dtype],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks[layers], estimate, size = map(int, done.stdout.split())
        assert peaks[layers] <= estimate * 1.15, (peaks[layers], estimate)
        assert estimate <= 150 << 20
    assert peaks[16] <= peaks[8] + (12 << 20), peaks
    assert size > peaks[16] * 1.2  # and the model would not have fitted


def test_too_little_memory_is_said_before_it_could_kill(made, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "available_memory", lambda: 50 << 20)
    with pytest.raises(ConvertError, match=r"52,428,800 are available.*--threads"):
        convert.convert_checkpoint(made.path, tmp_path / "out", to="meta")
    assert not left(tmp_path)
    with convert.open_checkpoint(made.path) as opened:
        run(convert.plan_conversion(opened, "meta"), tmp_path / "forced", force=True)
    monkeypatch.setattr(engine, "available_memory", lambda: None)  # nobody knows
    convert.convert_checkpoint(made.path, tmp_path / "out", to="meta")


def test_a_pool_is_closed_after_a_conversion(made, tmp_path, monkeypatch):
    closed = []
    real = FilePool.close
    monkeypatch.setattr(FilePool, "close", lambda self: (closed.append(self), real(self)))
    convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch")
    assert closed


# --- the full check ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["scratch", "meta", "gguf"])
def test_the_full_check_sees_any_byte(tmp_path, monkeypatch, target):
    """A bit that the samples do not reach; and bytes around the tensors."""
    made = make_hf(tmp_path / "source", Shape(64, 8, 2, 8, 96, 4096), dtype="float32")
    options = {"tokenizer": False, "type": "q8_0"} if target == "gguf" else {}
    name = "out.gguf" if target == "gguf" else "out"
    plan = convert.plan_conversion(made.path, target, **options)
    plan.bind(tmp_path / name)
    file = plan.files[0]
    largest = max(file.entries, key=lambda e: e.nbytes)
    at = file.offsets[largest.name] + largest.nbytes // 2 + 1

    def edit(writer):
        byte = bytearray(1)
        writer_read = pieces.read_at(writer.fds[0], memoryview(byte), at)
        assert writer_read == 1
        write_at(writer.fds[0], bytes([byte[0] ^ 1]), at)

    with monkeypatch.context() as patch:
        corrupt(patch, edit)
        with pytest.raises(ConvertError, match="the check after writing failed") as caught:
            run(plan, tmp_path / name, check="full")
        assert largest.name in str(caught.value) and "1 bytes" in str(caught.value)
    assert not left(tmp_path)
    summary = run(plan, tmp_path / name, check="full")
    assert summary.checked == "full" and summary.checked_blocks == sum(len(f.entries) for f in plan.files)
    assert summary.as_json()["check"] == "full"
    plan.source.close()
    with pytest.raises(convert.UsageError, match="check"):
        convert.convert_checkpoint(made.path, tmp_path / "x", to="scratch", check="some")
