"""CRCs of storages: files of torch.save, with and without, one byte changed, one of eight files; chunks of DCP."""

from __future__ import annotations

import json
import shutil
import threading
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import convert
from convert import storage_crcs
from convert.cli import cli, run
from convert.errors import ConvertError
from convert.storage_crcs import compare_crcs
from tests.fixtures import make_meta, make_scratch


def flip(path: Path, name: str) -> int:
    """Change the last byte of a record; what zipfile says of it is the control."""
    with zipfile.ZipFile(path) as archive:
        info = next(i for i in archive.infolist() if i.filename.endswith(name))
        whole = archive.read(info)
    data = bytearray(path.read_bytes())
    at = data.index(whole, info.header_offset) + len(whole) - 1
    data[at] ^= 1
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() == info.filename
    return info.CRC


def kinds(path: Path, **options: object) -> list[str]:
    return [p.kind for p in convert.validate(path, **options).problems]


@pytest.fixture
def eight(tmp_path: Path) -> Path:
    return make_meta(tmp_path / "meta", "h32kv8", mp=8).path


def test_every_storage_of_torch_files(eight: Path) -> None:
    with convert.open_checkpoint(eight) as ckpt:
        compared, problems = compare_crcs(ckpt)
        assert not problems
        assert compared == sum(len(parts) for parts in ckpt.tensors.values())
        read: list[int] = []
        compare_crcs(ckpt, threads=3, progress=read.append)
        assert sum(read) == sum(s.nbytes for parts in ckpt.tensors.values() for s in parts)
        stopped = threading.Event()
        stopped.set()
        assert compare_crcs(ckpt, cancel=stopped) == (0, [])


def test_one_byte_in_one_of_eight(eight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert.convert_checkpoint(eight, tmp_path / "sound", to="scratch")  # the control
    assert kinds(eight, scan=True) == kinds(eight, hashes=True) == []
    path = eight / "consolidated.05.pth"
    wanted = flip(path, "/data/3")
    with pytest.raises(ConvertError) as caught:
        convert.convert_checkpoint(eight, tmp_path / "out", to="scratch")
    (problem,) = caught.value.problems
    assert (problem.kind, problem.file, problem.wanted) == ("crc", str(path), f"{wanted:08x}")
    names = list(torch.load(path, weights_only=True))  # torch says nothing
    assert problem.tensor in names
    assert problem.tensor in problem.message
    assert "--hash" in (problem.hint or "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["meta", "sound"]
    assert kinds(eight) == []  # headers only
    assert kinds(eight, scan=True) == kinds(eight, hashes=True) == ["crc"]
    # A large source is compared while it is written, whatever else is asked for.
    monkeypatch.setattr("convert.storage_crcs.SMALL", 1000)
    for number, how in enumerate(({}, {"check": "full"}, {"hashes": True}, {"resume": True})):
        with pytest.raises(ConvertError) as caught:
            convert.convert_checkpoint(eight, tmp_path / f"out{number}", to="hf", **how)
        assert [p.as_json() for p in caught.value.problems] == [problem.as_json()]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["meta", "sound"]


def test_the_command(eight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(eight / "consolidated.00.pth", "/data/0")
    assert run(cli, ["validate", str(eight), "--scan", "--json"]) == 1
    assert [p["kind"] for p in json.loads(capsys.readouterr().out)["problems"]] == ["crc"]
    assert run(cli, ["meta-to-hf", str(eight), str(tmp_path / "out"), "--quiet"]) == 1
    assert "CRC-32" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_our_own_files(eight: Path, tmp_path: Path) -> None:
    convert.convert_checkpoint(eight, tmp_path / "out", to="meta", model_parallel=2)
    with convert.open_checkpoint(tmp_path / "out") as ckpt:
        compared, problems = compare_crcs(ckpt)
    assert compared > 20
    assert not problems
    flip(tmp_path / "out" / "consolidated.01.pth", "/data/2")
    assert kinds(tmp_path / "out", scan=True) == ["crc"]


@pytest.mark.parametrize("way", ["no CRCs", "new format", "one storage for all"])
def test_other_ways_of_torch(tmp_path: Path, way: str) -> None:
    """``set_crc32_options(False)`` writes zeros, which state nothing; views of one storage are all named."""
    made = make_meta(tmp_path / "one", "gqa8", mp=1).path
    path = made / "consolidated.00.pth"
    state = torch.load(path, weights_only=True)
    if way == "one storage for all":
        joined = torch.cat([t.flatten() for t in state.values()])
        parts = joined.split([t.numel() for t in state.values()])
        state = {n: p.view(t.shape) for (n, t), p in zip(state.items(), parts, strict=True)}
    torch.serialization.set_crc32_options(way != "no CRCs")
    try:
        torch.save(state, path, _use_new_zipfile_serialization=True)
    finally:
        torch.serialization.set_crc32_options(True)
    with convert.open_checkpoint(made) as ckpt:
        compared, problems = compare_crcs(ckpt)
    assert not problems
    assert compared == {"no CRCs": 0, "new format": len(state), "one storage for all": 1}[way]
    if way == "no CRCs":
        convert.convert_checkpoint(made, tmp_path / "out", to="hf")
        return
    flip(path, "/data/0")
    (problem,) = [p for p in convert.validate(made, scan=True).problems if p.kind == "crc"]
    assert problem.tensor == next(iter(state))
    if way == "one storage for all":
        assert "norm.weight" in problem.message
        assert "tok_embeddings" in problem.message


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_chunks_of_distributed_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """A byte of one chunk changed: torch's own reader loads it without a word."""
    monkeypatch.setattr(storage_crcs, "SMALL", limit)
    made = make_scratch(tmp_path / "start", "gqa8", dtype="bfloat16").path
    state = load_file(made / "model.safetensors")
    folder = tmp_path / "dcp"
    dcp.save({"model": state, "optimizer": {"m": torch.ones(500)}}, checkpoint_id=folder, no_dist=True)
    shutil.copy(made / "scratch_config.json", folder)
    ours = tmp_path / "ours"
    convert.convert_checkpoint(folder, ours, to="scratch", format="dcp")
    for path in (folder, ours):
        with convert.open_checkpoint(path) as ckpt:
            assert compare_crcs(ckpt) == (len(state), [])
            spec = ckpt.tensors["trf_blocks.1.ff.fc2.weight"][0]
        data = bytearray(spec.file.read_bytes())
        data[spec.offset + spec.nbytes - 1] ^= 1
        spec.file.write_bytes(data)
        assert kinds(path, scan=True) == ["crc"]
        with pytest.raises(ConvertError) as caught:
            convert.convert_checkpoint(path, tmp_path / "out", to="hf")
        (problem,) = caught.value.problems
        assert (problem.kind, problem.tensor, problem.file) == ("crc", "trf_blocks.1.ff.fc2.weight", str(spec.file))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["dcp", "ours", "start"]
    loaded = {"model": {n: torch.zeros_like(t) for n, t in state.items()}}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert [n for n, t in state.items() if not torch.equal(t, loaded["model"][n])] == ["trf_blocks.1.ff.fc2.weight"]
