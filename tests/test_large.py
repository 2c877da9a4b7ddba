"""405B, Qwen3-235B and 120,000 tensors without their weights: what looks and plans take, and that they are right.

Files with holes stand for the weights (:mod:`tests.fixtures.sparse`). Time is measured by ``tests.benchmark`` and only
bounded generously here, since a test does not know what else the machine does; memory is what the issue allows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import sparse

#: Runs the command line and says on standard error what the kernel saw as its peak (a child's ``ru_maxrss`` has its
#: parent's in it), and how much processor time it took.
CHILD = """
import os, sys
from convert.cli import main
sys.argv = ["convert", *sys.argv[1:]]
code = 0
try:
    code = main()
except SystemExit as end:
    code = end.code
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
times = os.times()
print("MEASURED", peak, times.user + times.system, file=sys.stderr)
sys.exit(code)
"""
MIB = 1 << 20
#: How many times slower than the machine of the figures, which the limits of time are for, another one may be.
SLOWER = 4


@dataclass(frozen=True, slots=True)
class Ran:
    """Exit code, standard output, standard error; MiB and processor seconds."""

    code: int
    out: str
    err: str
    peak: float
    cpu: float

    @property
    def said(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


def run(*words: object) -> Ran:
    done = subprocess.run([sys.executable, "-c", CHILD, *map(str, words)], capture_output=True, text=True, check=False)
    err, _, measured = done.stderr.rpartition("MEASURED")
    peak, cpu = measured.split()
    return Ran(done.returncode, done.stdout, err, float(peak) / 1024, float(cpu))


def plan(source: Path, out: Path, to: str, *words: object) -> Ran:
    more = ["--no-tokenizer"] if to == "gguf" else []
    # 800 GB are not free here, which a plan says with exit code 1; --force asks for the plan all the same.
    return run("to", to, source, out, "--dry-run", "--force", "--json", *more, *words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak of a process is read from /proc, which this system lacks")
    found: Path = tmp_path_factory.mktemp("large")
    if not sparse.holes(found):
        pytest.skip("this filesystem has no holes, and the files would take 800 GB")
    return found


@pytest.fixture(scope="module")
def llama(folder) -> sparse.Sparse:
    """405B in 191 shards, as its publisher cuts it."""
    return sparse.sparse_hf(folder / "l405", sparse.LLAMA_405B, files=191)


@pytest.fixture(scope="module")
def qwen(folder) -> sparse.Sparse:
    return sparse.sparse_hf(folder / "q235", sparse.QWEN3_235B, files=118)


@pytest.fixture(scope="module")
def many(folder) -> sparse.Sparse:
    return sparse.sparse_hf(folder / "many", sparse.MANY_TENSORS, files=64)


def within(ran: Ran, *, peak: float, seconds: float) -> None:
    """Good, without a warning, in the memory allowed, and in processor time that load of the machine changes little."""
    assert ran.code == 0, ran.err
    assert ran.peak <= peak
    assert ran.cpu <= seconds * SLOWER


def test_the_files_take_no_room_and_others_read_them(llama):
    from safetensors import safe_open

    assert (llama.tensors, llama.files) == (126 * 9 + 3, 191)
    assert llama.nbytes == 2 * 405_853_388_800  # the parameters that its model card counts
    assert sparse.taken(llama.path) < 128 * MIB
    with safe_open(llama.path / "model-00001-of-00191.safetensors", framework="np") as first:
        assert "model.embed_tokens.weight" in set(first.keys())
        assert first.get_slice("model.embed_tokens.weight").get_shape() == [128256, 16384]


def test_405b_is_seen(llama):
    looked = run("inspect", llama.path, "--json")
    within(looked, peak=400, seconds=5)
    assert looked.said["parameters"] == 405_853_388_800
    assert looked.said["tied"] is False
    checked = run("validate", llama.path, "--json")
    within(checked, peak=400, seconds=5)
    assert checked.said["ok"] is True


@pytest.mark.parametrize(
    ("to", "words", "files"),
    [
        ("scratch", (), 1),
        pytest.param("scratch", ("--format", "pth", "--dtype", "float16"), 1, marks=pytest.mark.slow),
        ("meta", ("--model-parallel", 8), 8),
        pytest.param("meta", (), 1, marks=pytest.mark.slow),
        ("hf", ("--dtype", "float16"), 191),
        pytest.param("hf", ("--max-shard-size", "50GB"), 17, marks=pytest.mark.slow),
        pytest.param("gguf", ("--type", "bf16"), 1, marks=pytest.mark.slow),
        pytest.param("gguf", ("--type", "f16"), 1, marks=pytest.mark.slow),
        ("gguf", ("--type", "q8_0"), 1),
        ("gguf", ("--type", "q4_k_m", "--split-max-size", "50GB"), 5),
    ],
)
def test_405b_is_planned(llama, tmp_path, to, words, files):
    ran = plan(llama.path, tmp_path / ("out.gguf" if to == "gguf" else "out"), to, *words)
    within(ran, peak=400, seconds=5)
    said = ran.said
    assert said["bytes_read"] > llama.nbytes
    assert len(said["files"]) == files
    assert said["tied"] is False
    assert said["problems"] == []
    # What it will write, from the numbers of parameters alone: the headers and small files are below 3 MB.
    matrices, vectors = (llama.nbytes // 2 - 253 * 16384), 253 * 16384
    if to == "gguf":
        per = {"bf16": 2.0, "f16": 2.0, "q8_0": 34 / 32}.get(str(words[1]))
        data = said["bytes_written"] if per is None else int(matrices * per) + 4 * (vectors + 64)
        low, high = (matrices * 0.59, matrices * 0.62) if per is None else (data, data + 3_000_000)
    else:
        copies = 8 if "--model-parallel" in words else 1
        low, high = llama.nbytes, llama.nbytes + 2 * vectors * (copies - 1) + 3_000_000
    assert low <= said["bytes_written"] <= high
    assert not (tmp_path / "out").exists() and not list(tmp_path.iterdir())


def test_what_meta_cannot_share_evenly_is_refused(llama, tmp_path):
    ran = plan(llama.path, tmp_path / "out", "meta", "--model-parallel", 16)
    assert ran.code == 1 and "8 heads" in ran.err
    assert ran.peak <= 400


@pytest.mark.parametrize("files", [8, 16])
def test_405b_from_meta(folder, tmp_path, files):
    """Meta's own two cuts; with 16 files each key/value head is stored twice, which samples tell here."""
    source = sparse.sparse_meta(folder / f"m{files}", files=files)
    assert sparse.taken(source.path) < 128 * MIB
    ran = plan(source.path, tmp_path / "out", "hf")
    within(ran, peak=400, seconds=8)
    said = ran.said
    assert said["bytes_written"] - 2 * 405_853_388_800 in range(3_000_000)
    assert any("each of the 8 key/value heads is stored 2 times" in note for note in said["notes"]) == (files == 16)
    checked = run("validate", source.path, "--json")
    within(checked, peak=400, seconds=8)
    assert checked.said["ok"] is True


def test_405b_from_gguf(folder, tmp_path):
    source = sparse.sparse_gguf(folder / "g405" / "model.gguf")
    assert sparse.taken(source.path.parent) < 128 * MIB
    within(run("validate", source.path), peak=400, seconds=5)
    ran = plan(source.path, tmp_path / "out", "hf", "--no-tokenizer")
    within(ran, peak=400, seconds=5)
    ran = plan(source.path, tmp_path / "out.gguf", "gguf", "--type", "q6_k")
    within(ran, peak=400, seconds=5)
    assert ran.said["bytes_written"] / source.nbytes == pytest.approx(210 / 256 / 2, rel=0.01)


def test_of_equal_heads_a_dry_run_reads_a_sample_and_says_so(folder, tmp_path):
    """Both matrices are 4.2 GB; here they are equal, down to the last byte that a conversion would compare."""
    source = sparse.sparse_hf(folder / "tied", sparse.LLAMA_405B | {"num_hidden_layers": 1}, files=3)
    (last,) = [p for p in source.path.glob("*.safetensors") if p.stat().st_blocks and "-00003-" in p.name]
    with open(last, "r+b") as file:  # without the marks that make them two
        size = int.from_bytes(file.read(8), "little")
        at = json.loads(file.read(size))["lm_head.weight"]["data_offsets"]
        for place in (8 + size + at[0], 8 + size + at[1] - 8):
            file.seek(place)
            file.write(bytes(8))
    ran = plan(source.path, tmp_path / "out", "hf")
    within(ran, peak=400, seconds=5)
    assert ran.said["tied"] is True
    assert any("equal in samples" in note for note in ran.said["notes"])

    from convert.conversion import plan_conversion
    from convert.errors import UsageError
    from convert.run import run as carry_out

    with pytest.raises(UsageError, match="for a look"):
        carry_out(plan_conversion(source.path, "hf", way="look"), tmp_path / "out")


def test_qwen3_235b_is_seen(qwen):
    assert (qwen.tensors, qwen.files) == (36945, 118)
    looked = run("inspect", qwen.path, "--json")
    within(looked, peak=400, seconds=10)
    assert looked.said["parameters"] == 235_093_634_560
    within(run("validate", qwen.path), peak=400, seconds=10)


@pytest.mark.parametrize(
    ("to", "words"),
    [
        pytest.param("scratch", (), marks=pytest.mark.slow),
        pytest.param("hf", ("--dtype", "float16"), marks=pytest.mark.slow),
        ("gguf", ("--type", "q4_k_m", "--split-max-size", "50GB")),
    ],
    ids=["scratch", "hf", "gguf"],
)
def test_qwen3_235b_is_planned(qwen, tmp_path, to, words):
    ran = plan(qwen.path, tmp_path / ("out.gguf" if to == "gguf" else "out"), to, *words)
    within(ran, peak=400, seconds=10)
    said = ran.said
    count = sum(file["tensors"] for file in said["files"])
    assert count == (qwen.tensors if to != "gguf" else 94 * 12 + 3)  # 128 experts are one tensor there
    if to != "gguf":
        assert said["bytes_written"] - qwen.nbytes in range(20_000_000)


@pytest.mark.slow
def test_120_000_tensors(many, tmp_path):
    assert many.tensors == 120_003
    for ran in (
        run("inspect", many.path),
        run("validate", many.path),
        plan(many.path, tmp_path / "out", "scratch"),
        plan(many.path, tmp_path / "out", "hf", "--dtype", "float16"),
        plan(many.path, tmp_path / "out.gguf", "gguf", "--type", "q8_0"),
    ):
        within(ran, peak=700, seconds=25)
