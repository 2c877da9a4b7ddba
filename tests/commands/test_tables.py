"""`convert tables` and `convert families`: what they print loads again, fits checkpoints, and sees what does not."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from convert import toml_text
from convert.cli import cli, run
from convert.names import load_names, ready_made
from convert.table import build, families, load_table
from tests.fixtures import make_gguf, make_hf, make_meta, make_scratch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def said(capsys):
    """Runs the command line; returns exit code, standard output, standard error."""

    def call(*args: object) -> tuple[int, str, str]:
        code = run(cli, [str(a) for a in args])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def test_list(said):
    code, out, _ = said("tables", "list")
    assert code == 0
    assert all(name in out for name in (*families(), *ready_made()))
    code, out, _ = said("tables", "list", "--json")
    assert set(json.loads(out)["families"]) == set(families())


@pytest.mark.parametrize(
    "args",
    [
        ["list"],
        ["show", "llama"],
        ["show", "llama2c"],
        ["show", "llama", "--size", "smollm2-135m"],
        ["check", str(ROOT / "mappings" / "llama.toml")],
        ["check", str(ROOT / "mappings" / "names" / "llama2c.toml")],
    ],
    ids=" ".join,
)
def test_json_is_one_object_that_names_its_kind(said, args):
    code, out, _ = said("tables", *args, "--json")
    assert code == 0 and json.loads(out)["schema"].startswith("convert.table")
    plain = said("tables", *args)[1]  # the control
    with pytest.raises(json.JSONDecodeError):
        json.loads(plain)


@pytest.mark.parametrize("family", families())
def test_the_resolved_table_is_the_table(said, family, tmp_path):
    code, out, _ = said("tables", "show", family, "--resolved")
    assert code == 0
    raw = tomllib.loads(out)
    assert raw == load_table(family).raw
    assert build(raw, "again").rows.keys() == load_table(family).rows.keys()


@pytest.mark.parametrize("family", families())
def test_show_names_every_tensor_in_every_layout(said, family):
    _, out, _ = said("tables", "show", family)
    table = load_table(family)
    for row in table.rows.values():
        assert f"\n  {row.id}  [" in out
        for layout, name in row.names.items():
            assert name in out, (row.id, layout)
    assert "rows are rotary pairs of K heads, reordered between layouts" in out or family != "llama"
    _, one, _ = said("tables", "show", family, "--layout", table.layouts[-1])
    assert len(one) < len(out)


def test_show_a_size_is_what_the_class_has(said):
    transformers = pytest.importorskip("transformers")
    import torch

    code, out, _ = said("tables", "show", "llama", "--size", "smollm2-135m", "--json")
    assert code == 0
    from convert import config as configs

    raw = configs.to_hf(load_table("llama"), configs.published(load_table("llama"), "smollm2-135m"), "BF16")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**raw))
    assert json.loads(out)["schema"] == "convert.table-tensors/1"
    assert json.loads(out)["tensors"] == {n: list(t.shape) for n, t in model.state_dict().items()}
    _, text, _ = said("tables", "show", "llama", "--size", "smollm2-135m", "--layout", "gguf")
    assert "blk.29.attn_k.weight" in text and "[192, 576]" in text
    assert said("tables", "show", "llama", "--size", "nothing")[0] == 2


@pytest.mark.parametrize("name", ready_made())
def test_show_a_names_file(said, name):
    code, out, _ = said("tables", "show", name, "--layout", "scratch")
    assert code == 0
    for fused in load_names(name).fused:
        if fused.layout == "scratch":
            assert f"{fused.name}, part 1 of {len(fused.parts)}" in out


def test_check_our_table_against_every_layout(said, tmp_path):
    table = ROOT / "mappings" / "llama.toml"
    for made in (
        make_hf(tmp_path / "hf", "gqa8", attention_bias=True),
        make_meta(tmp_path / "meta", "gqa8", mp=2, rope_freqs=True),
        make_scratch(tmp_path / "scratch", "std", format="pth"),
        make_gguf(tmp_path / "m.gguf", "std"),
    ):
        code, out, err = said("tables", "check", table, "--against", made.path)
        assert code == 0 and out.startswith("ok: "), (made.path, out, err)
    assert "ignored: rope.freqs" in said("tables", "check", table, "--against", tmp_path / "meta")[1]
    assert said("tables", "check", table)[0] == 0


def test_check_finds_what_does_not_fit(said, tmp_path):
    made = make_hf(tmp_path / "hf", "gqa8")
    path = tmp_path / "mine.toml"
    path.write_text(
        'family = "mine"\nextends = "llama"\n'
        '[block.attn.q_norm]\nshape = ["hd"]\nhf = "self_attn.q_norm.weight"\n'
        '[block.mlp.up]\nshape = ["F + 1", "D"]\n[block.attn]\nv = false\n',
        encoding="utf-8",
    )
    code, out, _ = said("tables", "check", path, "--against", made.path, "--json")
    found = json.loads(out)
    assert code == 1 and found["ok"] is False and found["layout"] == "hf"
    both = range(2)
    assert found["missing_keys"] == [f"model.layers.{i}.self_attn.q_norm.weight" for i in both]
    assert found["unexpected_keys"] == [f"model.layers.{i}.self_attn.v_proj.weight" for i in both]
    assert found["mismatched_keys"] == [f"model.layers.{i}.mlp.up_proj.weight" for i in both]
    code, out, _ = said("tables", "check", path, "--against", made.path)
    assert code == 1 and "model.layers.{0-1}.self_attn.q_norm.weight" in out


def test_check_a_names_file(said, tmp_path):
    import convert

    made = make_hf(tmp_path / "hf", "gqa8")
    names = ROOT / "examples" / "own_names.toml"
    convert.convert_checkpoint(made.path, tmp_path / "own", to="scratch", names=names)
    code, out, err = said("tables", "check", names, "--against", tmp_path / "own")
    assert code == 0 and out.startswith("ok: "), (out, err)
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(names.read_text(encoding="utf-8").replace("shrink", "shrunk"), encoding="utf-8")
    code, out, _ = said("tables", "check", wrong, "--against", tmp_path / "own")
    assert code == 1
    assert "blocks.{0-1}.shrunk.weight" in out and "blocks.{0-1}.shrink.weight" in out


@pytest.mark.parametrize(
    ("content", "words"),
    [("[", "not valid TOML"), ('family = "x"\ncolour = 1\n', "colour"), ('extends = "llama"\nshape = 1\n', "'shape'")],
)
def test_check_a_wrong_file(said, tmp_path, content, words):
    path = tmp_path / "mine.toml"
    path.write_text(content, encoding="utf-8")
    code, _, err = said("tables", "check", path)
    assert code == 1 and words in err and "mine.toml" in err and "Traceback" not in err
    assert said("tables", "check", tmp_path / "absent.toml")[0] == 2


def test_init_gives_a_file_that_fits_the_books_checkpoint(said, tmp_path):
    path = tmp_path / "names.toml"
    assert said("tables", "init", "--family", "llama", "--out", path)[0] == 0
    made = make_scratch(tmp_path / "m", "std")
    assert said("tables", "check", path, "--against", made.path)[0] == 0
    text = path.read_text(encoding="utf-8")
    assert said("tables", "init", "--family", "llama")[1] == text
    for row in load_table("llama").rows:
        assert row.split(".", 1)[1] in text
    code, _, err = said("tables", "init", "--family", "llama", "--out", path)
    assert code == 2 and "exists" in err
    assert said("tables", "init", "--family", "nothing")[0] == 2
    assert said("tables", "init", "--family", "llama", "--out", tmp_path / "no" / "x.toml")[0] == 2


def test_families(said):
    code, out, _ = said("families")
    assert code == 0
    for family in families():
        table = load_table(family)
        assert f"{family}: {table.title}" in out
        assert all(size in out for size in table.sizes)
    _, out, _ = said("families", "--json")
    assert [f["family"] for f in json.loads(out)["families"]] == families()


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"a": 1, "b": 1e-5, "c": True, "d": 'quo"te\\ \n \u20ac', "e": [], "f": ["x", 1.5, [True]]},
        {"t": {"u": {"v": {}}}, "w": {"a b": 1, "x.y": {"z": 2}, "": 3}},
        {"list": [{"a": 1, "b": {"c": 2}}, {"a": [1], "d": [{"e": 1}, {}]}], "after": 3},
    ],
)
def test_toml_text_is_read_back_by_tomllib(data):
    assert tomllib.loads(toml_text.dumps(data)) == data
