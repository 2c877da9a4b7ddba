"""Torch files: what ``torch.save`` wrote, read without torch; what we lay out, read by ``torch.load``."""

from __future__ import annotations

import argparse
import os
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convert.errors import ConvertError, FormatError
from convert.formats import torch_zip, torch_zip_writer
from convert.formats.placeholders import TORCH_TYPES, Placeholder
from convert.formats.spec import Entry, FileLayout, TensorSpec
from convert.source import FilePool, open_source

DTYPES = [getattr(torch, name) for name in TORCH_TYPES]


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def values(spec: TensorSpec) -> bytes:
    """The bytes of a stored tensor, through the product's own sources."""
    pool = FilePool()
    try:
        source = open_source(spec, pool)
        return np.ascontiguousarray(source.read(0, source.shape[0])).tobytes()
    finally:
        pool.close()


def some(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random values of any type, none equal to another's bytes by accident."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return (torch.randn(shape, generator=generator) * 30).abs().to(dtype)


def save(tree: Any, path: Path) -> Any:
    torch.save(tree, path)
    return torch_zip.read(path).metadata["tree"]


def test_every_dtype(tmp_path: Path) -> None:
    tensors = {str(dtype): some((5, 7), dtype, index) for index, dtype in enumerate(DTYPES)}
    tree = save(tensors, tmp_path / "a.pth")
    assert list(tree) == list(tensors)
    for name, tensor in tensors.items():
        spec = tree[name]
        assert TORCH_TYPES[name.removeprefix("torch.")] == spec.dtype
        assert (spec.shape, spec.strides) == ((5, 7), None)
        assert values(spec) == raw(tensor), name
        assert spec.crc == zlib.crc32(raw(tensor))
        assert values(spec) != raw(tensor.flip(0))  # control


def test_views_slices_and_shared_storages(tmp_path: Path) -> None:
    parent = some((12, 10), torch.float32)
    tensors = {
        "parent": parent,
        "transposed": parent.T,
        "slice": parent[3:7],
        "columns": parent[:, 2:9:3],
        "row": parent[5],
        "expanded": parent[0].expand(6, 10),
        "permuted": some((2, 3, 4), torch.bfloat16).permute(2, 0, 1),
        "scalar": torch.tensor(3.25),
        "element": parent[4, 4],
        "empty": torch.zeros(0, 4),
        "conv": some((4, 1, 3), torch.float16).transpose(0, 1),
    }
    tree = save(tensors, tmp_path / "views.pt")
    for name, tensor in tensors.items():
        assert tree[name].shape == tuple(tensor.shape), name
        assert values(tree[name]) == raw(tensor), name
        if tree[name].strides is not None:
            assert tree[name].strides == tensor.stride()
    assert tree["parent"].storage == tree["transposed"].storage == tree["slice"].storage
    assert tree["parent"].storage != tree["permuted"].storage
    assert tree["slice"].strides is None
    assert tree["parent"].crc is not None
    assert tree["slice"].crc is None  # covers a part of the storage
    assert tree["transposed"].crc is None


def test_parameters_and_attributes(tmp_path: Path) -> None:
    plain = torch.nn.Parameter(some((3, 4), torch.float32))
    stated = torch.nn.Parameter(some((3, 4), torch.float32, 1))
    stated.tag = "decay"  # type: ignore[attr-defined]
    noted = some((2, 2), torch.float32, 2)
    noted.tag = 1  # type: ignore[attr-defined]
    tree = save(
        {"plain": plain, "stated": stated, "noted": noted, "buffer": torch.nn.Buffer(noted)}, tmp_path / "p.pth"
    )
    for name, tensor in (("plain", plain), ("stated", stated), ("noted", noted), ("buffer", noted)):
        assert values(tree[name]) == raw(tensor), name


def test_module_state_dict_and_training_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    path = tmp_path / "training.ckpt"
    torch.save(
        {
            "model_state_dict": model.state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
            "args": argparse.Namespace(lr=1e-3, dims=[4, 6]),
            "best": np.float64(0.5),
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
            "size": torch.Size([2, 3]),
        },
        path,
    )
    opened = torch_zip.read(path)
    tree = opened.metadata["tree"]
    assert (opened.format, opened.tensors) == ("torch", {})
    for name, tensor in model.state_dict().items():
        assert values(tree["model_state_dict"][name]) == raw(tensor)
    assert tree["optimizer_state_dict"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert isinstance(tree["args"], Placeholder)
    assert tree["args"].fields == {"lr": 1e-3, "dims": [4, 6]}
    assert tree["size"] == (2, 3)
    assert tree["device"] == "cpu"
    (note,) = opened.notes
    assert "argparse.Namespace" in note
    assert "numpy" in note


def test_a_whole_file_of_one_root_name(tmp_path: Path) -> None:
    """Dots, spaces and letters beyond ASCII in the name of the file, hence of the archive's folder."""
    for name in ("consolidated.00.pth", "my model.pt", "größe.bin"):
        tensor = some((2, 3), torch.float16)
        assert values(save({"w": tensor}, tmp_path / name)["w"]) == raw(tensor)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_the_file_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "made"
    torch.save({"w": torch.ones(2), "x": Evil(target)}, tmp_path / "e.pth")
    opened = torch_zip.read(tmp_path / "e.pth")
    assert isinstance(opened.metadata["tree"]["w"], TensorSpec)
    assert "mkdir" in opened.notes[0]
    assert not target.exists()
    torch.load(tmp_path / "e.pth", weights_only=False)  # control
    assert target.exists()


def test_crcs_switched_off(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        tensor = some((3, 3), torch.float32)
        spec = save({"w": tensor}, tmp_path / "n.pth")["w"]
    finally:
        torch.serialization.set_crc32_options(before)
    assert spec.crc is None
    assert values(spec) == raw(tensor)


@pytest.mark.parametrize("kind", ["conj", "sparse", "quantized"])
@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_tensors_of_other_kinds_are_placeholders(tmp_path: Path, kind: str) -> None:
    made = {
        "conj": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
        "sparse": lambda: torch.eye(3).to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    }[kind]()
    found = save({"w": made}, tmp_path / "k.pth")["w"]
    assert isinstance(found, Placeholder)
    assert found.name.startswith("torch._utils._rebuild")


# --- damage ------------------------------------------------------------------------------------------------


def refused(path: Path, *words: str) -> FormatError:
    with pytest.raises(FormatError) as caught:
        torch_zip.read(path)
    for word in (path.name, *words):
        assert word in str(caught.value)
    return caught.value


def test_cut_anywhere(tmp_path: Path) -> None:
    torch.save({f"w{i}": some((9, 9), torch.float32, i) for i in range(4)}, tmp_path / "w.pth")
    data = (tmp_path / "w.pth").read_bytes()
    path = tmp_path / "cut.pth"
    for cut in [*range(4, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:cut])
        refused(path)
    path.write_bytes(data[:-7])
    refused(path, "incomplete", "Download")
    path.write_bytes(data + b"x")
    refused(path)


def repack(source: Path, target: Path, change: Any) -> None:
    """The records of an archive, changed, in a new one."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            for name, data, kind in change(info.filename, old.read(info)):
                new.writestr(name, data, compress_type=kind)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda n, d: [(n, d, zipfile.ZIP_DEFLATED if "/data/" in n else 0)], ["compressed", "zip -0"]),
        (lambda n, d: [(n, d, 8 if n.endswith(".pkl") else 0)], ["compressed"]),
        (lambda n, d: [(n, d[:-4] if "/data/" in n else d, 0)], ["elements of F32 need"]),
        (lambda n, d: [] if "/data/" in n else [(n, d, 0)], ["missing from the archive"]),
        (lambda n, d: [(n, b"big" if n.endswith("byteorder") else d, 0)], ["byte order 'big'"]),
        (lambda n, d: [(n, d, 0)] * (2 if "/data/" in n else 1), ["twice"]),
        (lambda n, d: [(n, d, 0)] + ([("other/data.pkl", d, 0)] if n.endswith(".pkl") else []), ["2 object trees"]),
        (lambda n, d: [(n, d, 0)] + ([("w/constants.pkl", d, 0)] if n.endswith(".pkl") else []), ["TorchScript"]),
        (lambda n, d: [(n, d[:-30] if n.endswith(".pkl") else d, 0)], ["object tree"]),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_changed_archives(tmp_path: Path, change: Any, words: list[str]) -> None:
    torch.save({"w": some((9, 9), torch.float32), "v": some((3,), torch.float32)}, tmp_path / "w.pth")
    repack(tmp_path / "w.pth", tmp_path / "new.pth", change)
    refused(tmp_path / "new.pth", *words)


def test_an_unchanged_repack_is_read(tmp_path: Path) -> None:
    """The control of the test above: it is the change that is refused."""
    tensor = some((9, 9), torch.float32)
    torch.save({"w": tensor}, tmp_path / "w.pth")
    repack(tmp_path / "w.pth", tmp_path / "new.pth", lambda n, d: [(n, d, 0)])
    assert values(torch_zip.read(tmp_path / "new.pth").metadata["tree"]["w"]) == raw(tensor)


def test_tensors_outside_their_storage(tmp_path: Path) -> None:
    torch.save({"w": some((9, 9), torch.float32), "v": some((9, 11), torch.float32)[1:]}, tmp_path / "w.pth")
    shape = b"K\x09K\x09\x86"

    def change(name: str, data: bytes) -> list[tuple[str, bytes, int]]:
        return [(name, data.replace(shape, b"K\x09K\xff\x86", 1).replace(b"K\x0bK\x08", b"K\x0bK\xff", 1), 0)]

    repack(tmp_path / "w.pth", tmp_path / "new.pth", change)
    error = refused(tmp_path / "new.pth", "does not lie inside it", "[9, 255]")
    assert [problem.kind for problem in error.problems] == ["tensor_bounds"] * 2  # all at once


def test_overlapping_records(tmp_path: Path) -> None:
    torch.save({"w": some((9, 9), torch.float32), "v": some((9, 9), torch.float32, 1)}, tmp_path / "w.pth")
    data = bytearray((tmp_path / "w.pth").read_bytes())
    with zipfile.ZipFile(tmp_path / "w.pth") as archive:
        first, second = (archive.getinfo(f"w/data/{i}").header_offset for i in (0, 1))
    at = data.rindex(struct.pack("<I", second) + b"w/data/1")
    data[at : at + 4] = struct.pack("<I", first)
    path = tmp_path / "over.pth"
    path.write_bytes(data)
    refused(path, "reaches beyond")


def test_damaged_object_tree(tmp_path: Path) -> None:
    torch.save({"w": some((9, 9), torch.float32)}, tmp_path / "w.pth")
    data = bytearray((tmp_path / "w.pth").read_bytes())
    data[data.index(b"\x80\x02}") + 60] ^= 1
    (tmp_path / "w.pth").write_bytes(data)
    refused(tmp_path / "w.pth", "CRC-32")


@pytest.mark.parametrize("legacy", [True, False])
def test_not_torch_zip(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "model.pth"
    if legacy:
        torch.save(OrderedDict(w=torch.ones(2)), path, _use_new_zipfile_serialization=False)
        refused(path, "before torch 1.6", "save it again")
    else:
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 2471645608\n")
        refused(path, "Git-LFS pointer to a 2.47 GB file", "git lfs pull")


# --- writing -----------------------------------------------------------------------------------------------


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
    import time

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
    assert time.process_time() - start < 3  # 0.6 s on a quiet machine
    assert list(tree) == names
