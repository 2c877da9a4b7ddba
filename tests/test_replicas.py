"""Key/value heads that Meta stores several times: dropped when bit-equal in every layer, else kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import convert
from convert.errors import ConvertError
from convert.run import run
from tests.fixtures import make_hf, make_meta


def repeated(folder: Path, *, spoil: bool = False, row: int = 0) -> Path:
    """The 8/2 model in 4 files: 2 heads stored as a, a, b, b, one in each file, as Meta does it for 405B in 16."""
    make_meta(folder / "one", "gqa8")
    state = torch.load(folder / "one" / "consolidated.00.pth", weights_only=True)
    out = folder / "four"
    out.mkdir()
    for rank in range(4):
        part = {}
        for name, tensor in state.items():
            if name.endswith((".wk.weight", ".wv.weight")):
                head = rank // 2
                part[name] = tensor[head * 8 : (head + 1) * 8].clone()
                if spoil and rank == 3 and name.startswith("layers.1.") and "wv" in name:
                    part[name][row, 0] += 1
            elif name.endswith("norm.weight"):
                part[name] = tensor
            else:
                axis = 1 if name.endswith((".wo.weight", ".w2.weight")) else 0
                part[name] = tensor.chunk(4, axis)[rank].clone()
        torch.save(part, out / f"consolidated.{rank:02d}.pth")
    params = json.loads((folder / "one" / "params.json").read_text()) | {"n_kv_heads": 4}
    (out / "params.json").write_text(json.dumps(params))
    return out


def test_copies_are_dropped_and_said(tmp_path: Path) -> None:
    source = repeated(tmp_path)
    made = convert.convert_checkpoint(source, tmp_path / "hf", to="hf")
    wanted = make_hf(tmp_path / "wanted", "gqa8").tensors
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[k], wanted[k]) for k in wanted)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_key_value_heads"] == 2
    assert any("stored 2 times" in note for note in made.notes)


def test_one_different_value_keeps_all_heads(tmp_path: Path) -> None:
    source = repeated(tmp_path, spoil=True)
    made = convert.convert_checkpoint(source, tmp_path / "hf", to="hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found["model.layers.0.self_attn.k_proj.weight"].shape == (32, 64)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_key_value_heads"] == 4
    assert not any("stored 2 times" in note for note in made.notes)


@pytest.mark.parametrize("row", [0, 4, 7])
def test_a_look_compares_ends_and_a_conversion_every_row(tmp_path: Path, row: int) -> None:
    """Of 405B all key/value heads are 17 GB; a plan that is only looked at says by what it was decided."""
    source = repeated(tmp_path, spoil=True, row=row)
    looked = convert.plan_conversion(source, "hf", way="look")
    assert any("equal in their first and last rows" in note for note in looked.notes) == (row == 4)
    assert convert.inspect(source).as_json()["n_kv_heads"] == (2 if row == 4 else 4)
    full = convert.plan_conversion(source, "hf")
    assert full.config["num_key_value_heads"] == 4
    with pytest.raises(ConvertError, match="for a look"):
        run(looked, tmp_path / "out")


@pytest.mark.parametrize(("shape", "files"), [("gqa8", 2), ("h32kv8", 8), ("mha", 2)])
@pytest.mark.parametrize("axis", ["llama2", "llama3"])
def test_one_file_under_two_names_is_no_model(tmp_path: Path, shape: str, files: int, axis: str) -> None:
    """Shapes, norms and zip checksums are all right; 8/2 heads in 2 files look like heads stored twice."""
    made = make_meta(tmp_path / "meta", shape, mp=files, embedding_axis=axis)
    assert convert.validate(made.path).ok
    last = made.path / f"consolidated.{files - 1:02d}.pth"
    shutil.copy(made.path / "consolidated.00.pth", last)
    found = convert.validate(made.path)
    assert [(p.kind, p.found) for p in found.problems] == [("repeated_file", "consolidated.00.pth")]
    with pytest.raises(ConvertError, match=rf"{last.name} holds the same weights as consolidated\.00"):
        convert.convert_checkpoint(made.path, tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


def test_files_of_zeros_are_not_taken_for_copies(tmp_path: Path) -> None:
    made = make_meta(tmp_path / "meta", "gqa8", mp=2)
    for file in made.path.glob("*.pth"):
        torch.save({n: torch.zeros_like(t) for n, t in torch.load(file).items()}, file)
    assert {problem.kind for problem in convert.validate(made.path).problems} == {"zero_tail"}
