"""Files that we lay out, read by ``torch.load``, ``zipfile`` and ``unzip``."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from convert.errors import ConvertError
from convert.formats import torch_zip, torch_zip_writer
from convert.formats.placeholders import TORCH_TYPES
from convert.formats.spec import Entry, FileLayout
from tests.fixtures.torch_files import DTYPES, raw, some, values


def write(path: Path, tensors: dict[str, torch.Tensor]) -> FileLayout:
    """Write a file as the engine does: data at its offsets, then the frame."""
    names = {getattr(torch, name): ours for name, ours in TORCH_TYPES.items()}
    entries = [Entry(name, names[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
    plan = torch_zip_writer.layout(path.name, entries)
    with open(path, "wb") as file:
        file.truncate(plan.size)
        crcs = {}
        for name, tensor in tensors.items():
            file.seek(plan.offsets[name])
            file.write(raw(tensor))
            crcs[name] = zlib.crc32(raw(tensor))
        for offset, data in plan.frame(crcs):
            file.seek(offset)
            file.write(data)
    assert path.stat().st_size == plan.size
    return plan


MIXED = {
    "tok_embeddings.weight": some((37, 9), torch.bfloat16),
    "layers.0.attention.wq.weight": some((8, 9), torch.float16, 1),
    "größe": some((3, 2, 2, 2), torch.float32, 2),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 5),
    "mask": some((4, 4), torch.bool, 3),
    "f8": some((300, 3), torch.float8_e4m3fn, 4),
    "u16": some((70_000,), torch.uint16, 5),
}


def check_with_torch(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert list(loaded) == list(tensors)
        for name, tensor in tensors.items():
            assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
            assert raw(loaded[name]) == raw(tensor), name
    subprocess.run([sys.executable, "-m", "zipfile", "-t", str(path)], check=True, capture_output=True)
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-tq", str(path)], check=True, capture_output=True)


def test_written_files_load_in_torch(tmp_path: Path) -> None:
    plan = write(tmp_path / "consolidated.00.pth", MIXED)
    check_with_torch(tmp_path / "consolidated.00.pth", MIXED)
    assert all(offset % 64 == 0 for offset in plan.offsets.values())
    tree = torch_zip.read(tmp_path / "consolidated.00.pth").metadata["tree"]
    for name, tensor in MIXED.items():
        assert values(tree[name]) == raw(tensor)
        assert tree[name].offset == plan.offsets[name]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_is_written(tmp_path: Path, dtype: torch.dtype) -> None:
    write(tmp_path / "a.pth", {"w": some((5, 3), dtype)})
    check_with_torch(tmp_path / "a.pth", {"w": some((5, 3), dtype)})


def test_wrong_crc_is_seen_by_zipfile(tmp_path: Path) -> None:
    """The control: CRCs are checked by others, and ours are real."""
    path = tmp_path / "a.pth"
    write(path, MIXED)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        at = archive.getinfo("a/data/0").header_offset
    data = bytearray(path.read_bytes())
    data[at + 200] ^= 1
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() == "a/data/0"


@pytest.mark.parametrize("threshold", [100, 700, 5000])
def test_zip64_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threshold: int) -> None:
    """A low threshold makes sizes, offsets and the directory use their 64-bit fields."""
    monkeypatch.setattr(torch_zip_writer, "ZIP64_FROM", threshold)
    write(tmp_path / "a.pth", MIXED)
    check_with_torch(tmp_path / "a.pth", MIXED)
    tree = torch_zip.read(tmp_path / "a.pth").metadata["tree"]
    assert all(values(tree[name]) == raw(tensor) for name, tensor in MIXED.items())


def test_really_more_than_4_gib(tmp_path: Path) -> None:
    """A sparse file of 9 GB: one entry beyond 4 GiB, others behind it. Only the ends hold data."""
    rows = (4 << 30) // 2048 + 7
    entries = [Entry("large", "BF16", (rows, 1024)), Entry("behind", "F32", (6,)), Entry("huge", "BF16", (rows, 1024))]
    plan = torch_zip_writer.layout("big.pth", entries)
    path = tmp_path / "big.pth"
    behind = torch.arange(6.0)
    with open(path, "wb") as file:
        file.truncate(plan.size)
        for name in ("large", "huge"):
            file.seek(plan.offsets[name] + entries[0].nbytes - 2)
            file.write(b"\x80\x3f")
        file.seek(plan.offsets["behind"])
        file.write(raw(behind))
        for offset, data in plan.frame({"large": 1, "behind": zlib.crc32(raw(behind)), "huge": 2}):
            file.seek(offset)
            file.write(data)
    if path.stat().st_blocks * 512 > 1 << 30:
        pytest.skip("this file system has no sparse files")
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded["large"][-1, -1] == loaded["huge"][-1, -1] == 1
    assert torch.equal(loaded["behind"], behind)
    tree = torch_zip.read(path).metadata["tree"]
    assert tree["huge"].offset == plan.offsets["huge"] > 4 << 30
    assert values(tree["behind"]) == raw(behind)
    del loaded


def test_equal_plans_give_equal_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "m.pth", MIXED)
    assert (tmp_path / "a" / "m.pth").read_bytes() == (tmp_path / "b" / "m.pth").read_bytes()


def test_what_torch_cannot_hold_is_refused() -> None:
    with pytest.raises(ConvertError) as caught:
        entries = [Entry("q", "Q8_0", (2, 32)), Entry("w", "F32", (1,)), Entry("w", "F32", (1,))]
        torch_zip_writer.layout("m.pth", entries)
    assert [problem.kind for problem in caught.value.problems] == ["dtype", "duplicate"]


def test_37000_tensors(tmp_path: Path) -> None:
    """As many as the largest mixture of experts has, written and read in about a second."""
    names = [f"model.layers.{i // 400}.mlp.experts.{i % 400}.down_proj.weight" for i in range(37_000)]
    plan = torch_zip_writer.layout("m.pth", [Entry(name, "BF16", (2, 3)) for name in names])
    path = tmp_path / "m.pth"
    with open(path, "wb") as file:
        file.truncate(plan.size)
        for offset, data in plan.frame(dict.fromkeys(names, zlib.crc32(bytes(12)))):
            file.seek(offset)
            file.write(data)
    start = time.process_time()
    tree = torch_zip.read(path).metadata["tree"]
    assert time.process_time() - start < 15  # 0.6 s on a quiet machine
    assert list(tree) == names
