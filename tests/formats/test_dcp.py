"""Folders of torch.distributed.checkpoint: those that torch saved are read, those that we write torch loads."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import convert
from convert.errors import ConvertError, FormatError
from convert.formats import dcp as dcp_format
from convert.formats.dcp import METADATA, read
from tests.fixtures import make_hf, make_scratch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def save(state: dict[str, object], folder: Path, config: Path) -> Path:
    """What torch itself writes, and a config beside it."""
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    shutil.copy(config / "scratch_config.json", folder)
    return folder


def weights(path: Path, out: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors, by way of a from-scratch folder."""
    convert.convert_checkpoint(path, out, to="scratch", tokenizer=False)
    return load_file(out / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a
    )


@pytest.fixture
def made(tmp_path):
    return make_scratch(tmp_path / "start", "gqa8", dtype="bfloat16")


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module."])
def test_a_state_dict_that_torch_saved_is_read(made, tmp_path, prefix):
    state = load_file(made.path / "model.safetensors")
    folder = save({prefix + k: v for k, v in state.items()}, tmp_path / "dcp", made.path)
    assert same(weights(folder, tmp_path / "out"), state)
    with convert.open_checkpoint(folder / METADATA) as opened:
        assert (opened.format, opened.layout, opened.family) == ("dcp", "scratch", "llama")
        assert not opened.match.problems


@pytest.mark.parametrize("keys", [("model",), ("app", "model"), ()])
def test_what_a_trainer_saves_beside_the_model_is_not_looked_at(made, tmp_path, keys):
    state = load_file(made.path / "model.safetensors")
    moments = {name: torch.full((3,), 7.0) for name in state}
    beside = {"state": {"exp_avg": moments}, "lr": 0.1, "betas": [0.9, 0.95]}
    inner: dict[str, object] = dict(state)
    for key in reversed(keys):
        inner = {key: inner}
    folder = save({**inner, "optim": beside, "step": 12}, tmp_path / "dcp", made.path)
    damaged = sorted(folder.glob("*.distcp"))
    data = {p: p.read_bytes() for p in damaged}
    place = read(folder).metadata["chunks"]["optim.state.exp_avg." + next(iter(state))][0]
    with place.file.open("r+b") as file:
        file.seek(place.start)
        file.write(b"\0" * place.length)
    assert place.file.read_bytes() != data[place.file]
    assert same(weights(folder, tmp_path / "out"), state)
    place = read(folder).metadata["chunks"][".".join([*keys, next(iter(state))])][0]
    with place.file.open("r+b") as file:  # the control: a tensor of the model
        file.seek(place.start)
        file.write(b"\0" * place.length)
    with pytest.raises(FormatError):
        weights(folder, tmp_path / "other")


def test_to_hugging_face_and_gguf_in_one_command(tmp_path):
    hf = make_hf(tmp_path / "hf", "gqa8", dtype="bfloat16")
    convert.convert_checkpoint(hf.path, tmp_path / "start", to="scratch", tokenizer=False)
    state = load_file(tmp_path / "start" / "model.safetensors")
    folder = save({"model": state}, tmp_path / "dcp", tmp_path / "start")
    convert.convert_checkpoint(folder, tmp_path / "back", to="hf", tokenizer=False)
    assert same(load_file(tmp_path / "back" / "model.safetensors"), load_file(hf.path / "model.safetensors"))
    for name, source in (("a.gguf", folder), ("b.gguf", hf.path)):
        convert.convert_checkpoint(source, tmp_path / name, to="gguf", type="q8_0", tokenizer=False)
    from gguf import GGUFReader

    a, b = (GGUFReader(tmp_path / name) for name in ("a.gguf", "b.gguf"))
    assert [(t.name, t.data.tobytes()) for t in a.tensors] == [(t.name, t.data.tobytes()) for t in b.tensors]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_torch_loads_what_we_write(tmp_path, dtype):
    made = make_scratch(tmp_path / "start", "gqa8", dtype=dtype)
    state = load_file(made.path / "model.safetensors")
    out = tmp_path / "dcp"
    convert.convert_checkpoint(made.path, out, to="scratch", format="dcp", check="full", max_shard_size=60_000)
    assert len(list(out.glob("*.distcp"))) > 1
    found = {k: torch.zeros_like(v) for k, v in state.items()}
    dcp.load(found, checkpoint_id=out, no_dist=True)
    assert same(found, state)
    dcp_to_torch_save(out, tmp_path / "all.pt")
    assert same(torch.load(tmp_path / "all.pt", weights_only=True), state)
    assert same(weights(out, tmp_path / "back"), state)
    with open(out / "__0_0.distcp", "r+b") as file:  # the control: torch does read these bytes
        place = read(out).metadata["chunks"]["tok_emb.weight"][0]
        file.seek(place.start + place.length // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    dcp.load(found, checkpoint_id=out, no_dist=True)
    assert not same(found, state)


def test_the_metadata_is_what_torch_s_own_classes_say(made, tmp_path):
    """Written without them; the control is another shape."""
    from torch.distributed.checkpoint import metadata as classes

    code = (
        "import sys, convert; convert.convert_checkpoint(sys.argv[1], sys.argv[2], to='scratch', format='dcp'); "
        "sys.exit('torch' in sys.modules)"
    )
    out = tmp_path / "dcp"
    subprocess.run([sys.executable, "-c", code, str(made.path), str(out)], check=True, cwd=ROOT)
    found = pickle.loads((out / METADATA).read_bytes())
    wanted = {}
    for name, tensor in load_file(made.path / "model.safetensors").items():
        zero, size = torch.Size([0] * tensor.dim()), tensor.shape
        chunk = classes.ChunkStorageMetadata(zero, size)
        wanted[name] = classes.TensorStorageMetadata(classes.TensorProperties(tensor.dtype), size, [chunk])
    assert found.state_dict_metadata == wanted
    assert found.planner_data == {name: (name,) for name in wanted}
    assert set(found.storage_data) == {classes.MetadataIndex(name, [0] * len(wanted[name].size)) for name in wanted}
    assert (found.version, found.storage_meta) == ("1.0.0", None)
    some = next(iter(wanted.values()))
    some.size = torch.Size([1])
    assert found.state_dict_metadata != wanted


def test_into_a_module_with_torch_s_own_load(made, tmp_path):
    """The reference module, empty, filled by torch from our folder: the same logits as from the source."""
    from convert.reference.loading import load_reference

    convert.convert_checkpoint(made.path, tmp_path / "dcp", to="scratch", format="dcp", dtype="float32")
    with convert.open_checkpoint(made.path) as opened:
        model, other = load_reference(opened), load_reference(opened)
    for parameter in other.parameters():
        parameter.data.zero_()
    state = dict(other.state_dict())
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other.load_state_dict(state)
    ids = torch.arange(9).view(1, -1)
    with torch.inference_mode():
        assert torch.equal(model(ids), other(ids))


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_metadata_that_would_execute_something_is_refused(made, tmp_path, monkeypatch):
    from convert.formats.dcp_torch import RestrictedReader

    monkeypatch.chdir(tmp_path)
    state = load_file(made.path / "model.safetensors")
    folder = save(state, tmp_path / "dcp", made.path)
    found = {k: torch.zeros_like(v) for k, v in state.items()}
    dcp.load(found, storage_reader=RestrictedReader(folder), no_dist=True)
    assert same(found, state)
    meta = pickle.loads((folder / METADATA).read_bytes())
    meta.planner_data["x"] = Evil()
    (folder / METADATA).write_bytes(pickle.dumps(meta))
    for act in (
        lambda: convert.open_checkpoint(folder),
        lambda: dcp.load(found, storage_reader=RestrictedReader(folder), no_dist=True),
    ):
        with pytest.raises(BaseException) as caught:  # torch's own is no Exception
            act()
        assert "system" in str(caught.value) and "nothing " in str(caught.value)
        assert not Path("executed").exists()
    dcp.load(found, checkpoint_id=folder, no_dist=True)  # the control: torch's own reader runs it
    assert Path("executed").exists()


def edit(folder: Path, change) -> None:
    meta = pickle.loads((folder / METADATA).read_bytes())
    change(meta)
    (folder / METADATA).write_bytes(pickle.dumps(meta))


def test_how_much_metadata_is_read_grows_with_the_data(made, tmp_path, monkeypatch):
    """3,000,000 operations are more than a small model's metadata has; a large one's may."""
    folder = save(load_file(made.path / "model.safetensors"), tmp_path / "dcp", made.path)
    data = (folder / METADATA).read_bytes()
    (folder / METADATA).write_bytes(data[:2] + b"N0" * 1_500_000 + data[2:])
    with pytest.raises(FormatError, match="2,500,000 operations"):
        read(folder)
    with open(folder / "__9_0.distcp", "wb") as file:
        file.truncate(4 << 30)
    if dcp_format._written(folder / "__9_0.distcp") < 4 << 30:  # where a file system tells of holes
        with pytest.raises(FormatError, match="2,500,000 operations"):
            read(folder)
    monkeypatch.setattr(dcp_format, "_written", lambda path: path.stat().st_size)
    read(folder)


def test_damage_is_told(made, tmp_path):
    state = load_file(made.path / "model.safetensors")
    folder = save(state, tmp_path / "dcp", made.path)
    name = "trf_blocks.0.ff.fc1.weight"

    def traversal(meta):
        next(iter(meta.storage_data.values())).relative_path = "../start/model.safetensors"

    def longer(meta):
        next(iter(meta.storage_data.values())).length = 1 << 40

    def gap(meta):
        meta.state_dict_metadata[name].size = torch.Size([1000, 64])

    def other_type(meta):
        meta.state_dict_metadata[name].properties.dtype = torch.float16

    def compressed(meta):
        next(iter(meta.storage_data.values())).transform_descriptors = ["zstd"]

    for change, said in (
        (traversal, "outside its own folder"),
        (longer, "ends before"),
        (gap, "gaps or overlaps"),
        (other_type, "where the metadata has F16"),
        (compressed, "compressed or encrypted"),
    ):
        copy = tmp_path / change.__name__
        shutil.copytree(folder, copy)
        edit(copy, change)
        with pytest.raises(ConvertError, match=said):
            convert.open_checkpoint(copy)
    for cut in range(0, 4000, 97):
        data = (folder / METADATA).read_bytes()
        (copy / METADATA).write_bytes(data[: min(cut, len(data) - 1)])
        with pytest.raises(ConvertError):
            convert.open_checkpoint(copy)
    (copy / METADATA).unlink()
    with pytest.raises(ConvertError, match="written last"):
        convert.open_checkpoint(copy)
    shutil.copy(folder / METADATA, copy)
    next(copy.glob("*.distcp")).unlink()
    with pytest.raises(ConvertError, match="absent"):
        convert.open_checkpoint(copy)


def train(tmp_path: Path, kind: str, world: int) -> dict[str, torch.Tensor]:
    """Train with several processes and save; returns what the model then was, as torch gathered it."""
    make_scratch(tmp_path / "start", "gqa8", dtype="float32")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*run, "-m", "tests.ranks.train", str(tmp_path), kind], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    shutil.copy(tmp_path / "start" / "scratch_config.json", tmp_path / "dcp")
    return torch.load(tmp_path / "full.pt", weights_only=True)


@pytest.mark.parametrize(
    ("kind", "world"),
    [("fsdp2", 2), pytest.param("fsdp1", 2, marks=pytest.mark.slow), pytest.param("mesh", 4, marks=pytest.mark.slow)],
)
def test_a_training_run_of_several_processes_is_converted(tmp_path, kind, world):
    """FSDP2, FSDP and FSDP2 with tensor parallelism, of the reference Llama on the CPU."""
    full = train(tmp_path, kind, world)
    found = weights(tmp_path / "dcp", tmp_path / "out")
    assert same(found, full)
    start = load_file(tmp_path / "start" / "model.safetensors")
    assert not torch.equal(full["tok_emb.weight"], start["tok_emb.weight"])  # it has learned something
    chunks = read(tmp_path / "dcp").metadata["chunks"]["app.model.trf_blocks.0.ff.fc1.weight"]
    assert len(chunks) == world
    convert.convert_checkpoint(tmp_path / "dcp", tmp_path / "again", to="scratch", format="dcp")
    assert same(weights(tmp_path / "again", tmp_path / "third"), full)


def test_a_hole_vouches_for_no_metadata(tmp_path, monkeypatch):
    """How much metadata is read grows with the data there is; 24 GB of hole take no room and are none."""
    hollow, solid = tmp_path / "__0_0.distcp", tmp_path / "__1_0.distcp"
    with hollow.open("wb") as file:
        file.write(b"x" * 5000)
        file.truncate(24 << 30)
        file.seek(1 << 30)
        file.write(b"y" * 5000)
    solid.write_bytes(b"z" * 50_000)
    monkeypatch.setattr(dcp_format, "_BYTES_PER_SCALE", 20_000)
    if hollow.stat().st_blocks * 512 > 1 << 20 or dcp_format._written(hollow) == 24 << 30:
        pytest.skip("this file system keeps no holes, or does not tell of them")
    assert 10_000 <= dcp_format._written(hollow) < 1 << 20
    assert dcp_format._written(solid) == 50_000
    hollow.unlink()
    assert dcp_format._scale(tmp_path) == 3
    hollow.write_bytes(b"")
    with hollow.open("r+b") as file:
        file.truncate(24 << 30)
    assert dcp_format._scale(tmp_path) == 3
    monkeypatch.setattr(dcp_format, "_written", lambda path: path.stat().st_size)  # the control: by their sizes
    assert dcp_format._scale(tmp_path) == 12
