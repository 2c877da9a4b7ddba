"""``convert diff`` as typed: exit codes, one screen, JSON, and the options of either side."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

from convert.cli import cli, run
from tests.fixtures import make_gguf, make_hf, make_meta, make_scratch


def diff(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = run(cli, ["diff", *map(str, args)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_exit_codes(tmp_path, capsys):
    a, b = make_hf(tmp_path / "a", "gqa8").path, make_meta(tmp_path / "b", "gqa8").path
    other = make_gguf(tmp_path / "m.gguf", "gqa8", seed=1).path
    assert diff(capsys, a, b)[0] == 0
    code, out, err = diff(capsys, a, other)
    assert code == 1 and out.startswith("diff: different\n") and not err
    assert diff(capsys, a, other, "--quiet") == (1, "", "")
    assert diff(capsys, a, tmp_path / "none")[0] == 2
    assert diff(capsys, a)[0] == 2
    assert diff(capsys, a, b, "--atol", "-1")[0] == 2
    assert diff(capsys, a, other, "--atol", "9")[0] == 0


def test_one_screen_layers_folded(tmp_path, capsys):
    a, b = make_hf(tmp_path / "a", "gqa6").path, make_hf(tmp_path / "b", "gqa6").path
    state = load_file(b / "model.safetensors")
    for layer in (0, 2):
        state[f"model.layers.{layer}.mlp.up_proj.weight"] *= 1.25
    save_file(state, b / "model.safetensors")
    code, out, _ = diff(capsys, a, b)
    lines = out.splitlines()
    assert code == 1 and len(lines) < 25
    assert lines[1] == "  2 of 30 tensors differ."
    (row,) = (line for line in lines if "up_proj" in line)
    assert (
        "model.layers.{0,2}.mlp.up_proj.weight" in row
        and "different" in row
        and "2.50e-01" in row
        and "100.000%" in row
    )
    tall = make_hf(tmp_path / "c", "h32kv4").path
    assert len(diff(capsys, a, tall)[1].splitlines()) < 45


def test_json(tmp_path, capsys):
    a = make_hf(tmp_path / "a", "gqa8").path
    code, out, _ = diff(capsys, a, make_scratch(tmp_path / "b", "gqa8", seed=1).path, "--json", "--only", "k_proj")
    value = json.loads(out)
    assert code == 1 and value["counts"] == {"different": 2} and len(value["tensors"]) == 2
    assert value["tensors"][0].keys() >= {"name", "max_abs", "error", "cosine", "changed", "where", "dtype", "shape"}
    code, out, _ = diff(capsys, a, tmp_path / "none", "--json")
    assert code == 2 and json.loads(out)["schema"] == "convert.error/1"


def test_options_of_a_side(tmp_path, capsys):
    """A file that needs a names file, and one whose rows are in another order than its names say."""
    a = make_hf(tmp_path / "a", "gqa8")
    mine = tmp_path / "mine"
    assert run(cli, ["hf-to-scratch", str(a.path), str(mine), "--names", "litgpt", "--quiet", "--verify", "never"]) == 0
    (mine / "conversion.json").unlink()
    capsys.readouterr()
    assert diff(capsys, a.path, mine, "--names", "litgpt")[0] == 0
    assert diff(capsys, mine, a.path, "--names", "litgpt")[0] == 0
    assert diff(capsys, a.path, a.path, "--qk-layout", "meta")[0] == 1
    raw = make_meta(tmp_path / "m", "gqa8").path
    (raw / "params.json").rename(tmp_path / "params.json")
    assert diff(capsys, a.path, raw)[0] != 0
    assert diff(capsys, a.path, raw, "--config-b", tmp_path / "params.json")[0] == 0
    assert diff(capsys, raw, a.path, "--config", tmp_path / "params.json")[0] == 0


def test_verify_tensors(tmp_path, capsys):
    a, b = make_hf(tmp_path / "a", "gqa8").path, make_gguf(tmp_path / "m.gguf", "gqa8").path
    other = make_hf(tmp_path / "c", "gqa8", seed=1).path

    def verify(*args: object) -> tuple[int, str]:
        code = run(cli, ["verify", *map(str, args), "--tensors"])
        return code, capsys.readouterr().out

    code, out = verify(a, b)
    assert code == 0 and out.startswith("verify --tensors: pass\n")
    code, out = verify(a, other, "--json")
    value = json.loads(out)
    assert code == 1 and (value["schema"], value["verdict"]) == ("convert.verify-tensors/1", "fail")
    assert value["counts"] == {"different": 21} and "config" not in value
    assert verify(a, other, "--atol", "9")[0] == 0
    assert verify(a, other, "--only", "no such tensor")[0] == 1  # nothing compared is nothing verified
    (b.parent / "c" / "config.json").write_text((a / "config.json").read_text().replace("500000", "10000"))
    assert verify(a, b)[0] == 0
    assert verify(a)[0] == 2 and verify(a, b, "--text", "x")[0] == 2 and verify(a, b, "--engine", "llama.cpp")[0] == 2
    assert run(cli, ["verify", str(a), str(b), "--atol", "1"]) == 2


def test_layers_that_lack_the_same_are_one_line(tmp_path, capsys):
    a, b = make_hf(tmp_path / "a", "gqa6").path, make_hf(tmp_path / "b", "gqa6").path
    state = load_file(b / "model.safetensors")
    for layer in (0, 1):
        for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"):
            del state[f"model.layers.{layer}.{part}.weight"]
    del state["model.layers.2.mlp.down_proj.weight"]
    save_file(state, b / "model.safetensors")
    lines = diff(capsys, a, b)[1].splitlines()
    rows = [line.split("  only in A")[0].strip() for line in lines if "only in A" in line]
    assert rows == ["model.layers.{0-1}.* (6 tensors)", "model.layers.2.mlp.down_proj.weight"]
