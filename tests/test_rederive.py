"""A plan against files that exist: every byte counts, wherever it lies and however the output was cut."""

from __future__ import annotations

import os
import threading

import pytest

import convert
from convert import rederive as module
from convert.rederive import rederive
from convert.run import run
from tests.fixtures import make_hf

OPTIONS = {
    "scratch": {},
    "half precision": {"to": "scratch", "dtype": "bfloat16"},
    "pth": {"to": "scratch", "format": "pth"},
    "meta": {"model_parallel": 2},
    "hf": {"max_shard_size": 20_000},
    "gguf": {"type": "q8_0", "tokenizer": False},
}


@pytest.fixture(params=OPTIONS)
def made(request, tmp_path):
    options = {"to": request.param, **OPTIONS[request.param]}
    source = make_hf(tmp_path / "source", "gqa8")
    plan = convert.plan_conversion(source.path, **options)
    out = tmp_path / "out.gguf" if options["to"] == "gguf" else tmp_path / "out"
    run(plan, out)
    folder = out.parent if plan.single_file else out
    paths = [folder / file.name for file in plan.files]
    fds = [os.open(path, os.O_RDWR) for path in paths]
    yield plan, paths, lambda t: (fds[t.file], plan.files[t.file].offsets[t.name])
    for fd in fds:
        os.close(fd)
    plan.source.close()


def test_a_finished_output_is_equal(made):
    plan, _, place = made
    seen = []
    found = rederive(plan, place, progress=seen.append)
    total = sum(e.nbytes for f in plan.files for e in f.entries)
    assert found.nbytes == total == sum(seen) and not found.differences and not found.absent
    assert found.tensors == sum(len(f.entries) for f in plan.files)


def test_one_flipped_byte_of_any_tensor_is_found(made, monkeypatch):
    plan, paths, place = made
    monkeypatch.setattr(module, "COMPARE_BYTES", 1 << 10)  # several pieces per tensor
    for number, file in enumerate(plan.files):
        for which, entry in enumerate(file.entries):
            inside = (0, entry.nbytes - 1, entry.nbytes // 3)[which % 3]
            at = file.offsets[entry.name] + inside
            with paths[number].open("r+b") as stream:
                stream.seek(at)
                byte = stream.read(1)[0]
                stream.seek(at)
                stream.write(bytes([byte ^ 1]))
            (one,) = rederive(plan, place).differences
            assert (one.file, one.tensor, one.nbytes, one.first) == (file.name, entry.name, 1, inside)
            assert one.total == entry.nbytes
            with paths[number].open("r+b") as stream:
                stream.seek(at)
                stream.write(bytes([byte]))
    assert not rederive(plan, place).differences


def test_a_short_file_and_an_absent_tensor(made):
    plan, paths, place = made
    file = plan.files[-1]
    last = max(file.entries, key=lambda e: file.offsets[e.name])
    os.truncate(paths[-1], file.offsets[last.name] + 5)
    found = rederive(plan, lambda t: None if t.name == file.entries[0].name and t.file == 0 else place(t))
    lost = [d for d in found.differences if d.tensor == last.name]
    assert [(d.nbytes, d.first) for d in lost] == [(last.nbytes - 5, 5)]
    if plan.files[0] is file:
        assert found.absent == [(file.name, file.entries[0].name)]


def test_it_can_be_stopped(made):
    stop = threading.Event()
    stop.set()
    assert rederive(made[0], made[2], cancel=stop).nbytes == 0
