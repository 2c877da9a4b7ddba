"""Model types without a table: each is named with its nearest family, and a table for it can be begun."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from convert.cli import cli, run
from convert.detect import detect
from convert.errors import ConvertError, TableError, UsageError
from convert.layout import Dims, expand
from convert.relatives import FILE, _bare, advice, nearest, relatives
from convert.resources import mappings_dir
from convert.skeleton import beginning
from convert.table import families, heads, load_table, read_table
from tests.fixtures.hf import make_hf

RAW = tomllib.loads((mappings_dir() / FILE).read_text(encoding="utf-8"))
#: Types that only models with code of their own have.
OWN_CODE = {"internlm2", "baichuan", "minicpm", "chatglm", "yi", "qwen", "exaone"}


def said(kind: str, names: list[str]) -> str:
    with pytest.raises(ConvertError) as error:
        detect(names, {"model_type": kind}, format="safetensors")
    (problem,) = error.value.problems
    assert problem.kind == "unknown_architecture" and repr(kind) in problem.message
    assert len(problem.message.splitlines()) == 1 and "\n" not in str(problem.hint)
    return str(problem.hint)


def test_every_type_is_real_and_none_has_a_table():
    configs = pytest.importorskip("transformers.models.auto.configuration_auto")
    known = set(configs.CONFIG_MAPPING_NAMES)
    assert known.isdisjoint({"nonsense"})
    assert set(RAW) - known <= OWN_CODE, sorted(set(RAW) - known - OWN_CODE)
    ours = {kind for head in heads().values() for kind in head["model_types"]}
    assert not ours & set(RAW)


def test_every_gguf_name_is_llama_cpps():
    constants = pytest.importorskip("gguf.constants")
    archs = set(constants.MODEL_ARCH_NAMES.values())
    stated = {name for row in RAW.values() for name in row.get("gguf", ())}
    assert stated and stated <= archs, sorted(stated - archs)
    ours = {str(head.get("gguf_arch")) for head in heads().values()}
    assert not stated & ours


def test_well_known_ones_are_there():
    wanted = "mixtral mistral3 qwen2 qwen2_moe gemma gemma2 phi phi3 falcon mpt gpt_neox gptj olmo olmo2 cohere"
    wanted += " deepseek_v2 deepseek_v3 llama4 mllama granite stablelm starcoder2 smollm3 internlm2 baichuan minicpm"
    wanted += " glm4 nemotron exaone bloom opt t5 bert"
    assert set(wanted.split()) <= set(relatives())
    assert {r.like for r in relatives().values()} == set(families())


@pytest.mark.parametrize("kind", sorted(RAW))
def test_two_lines(kind):
    hint = said(kind, ["some.weight"])
    row = RAW[kind]
    assert hint.startswith(f"`{kind}`: like `{row['like']}`, but {row['but']}; write a table with `convert tables init")
    assert not row["but"].endswith(".")


def test_class_names_and_gguf_architectures_as_well():
    with pytest.raises(ConvertError, match="like `qwen3_moe`, but"):
        detect(["x"], {"general.architecture": "deepseek2"}, format="gguf")
    with pytest.raises(ConvertError, match="like `gpt2`, but RoPE"):
        detect(["x"], {"architectures": ["GPTNeoXForCausalLM"]}, format="safetensors")
    with pytest.raises(ConvertError, match=r"`Mixtral`: like `llama`, but .*block_sparse_moe"):
        detect(["x"], {"architectures": ["MixtralForCausalLM"]}, format="safetensors")
    assert _bare("GPTNeoX") == _bare("gpt_neox") != _bare("gptj")


@pytest.mark.parametrize("family", families())
def test_others_go_by_their_tensor_names(family):
    table = load_table(family)
    from convert import config as configs

    dims = Dims(table, configs.published(table, next(iter(table.sizes))))
    names = list(expand(table, dims, "hf"))
    new = [*names, "model.layers.0.self_attn.strange.weight", "model.layers.1.self_attn.strange.weight"]
    found = nearest("brand_new", new, format="safetensors")
    assert found is not None
    # several families have the same names in Hugging Face's files: the one said must know all of them
    other = load_table(found.like)
    if found.like != family:
        assert len(other.rows) <= len(table.rows) or "has tensors" in found.but
    assert "model.layers.{0-1}.self_attn.strange.weight" in found.but
    assert nearest("brand_new", names, format="safetensors").but != found.but
    assert "--as brand_new" in str(advice("brand_new", new, format="safetensors"))


def test_what_is_like_nothing_says_so():
    assert nearest("brand_new", ["encoder.conv.weight"]) is None
    hint = said("brand_new", ["encoder.conv.weight"])
    assert "like" not in hint and "convert tables init" in hint


def test_a_wrong_file_is_an_error(tmp_path, monkeypatch):
    import convert.relatives as module

    cases = ('[x]\nlike = "nothing"\nbut = "y"\n', '[x]\nlike = "llama"\n', '[x]\nlike = "llama"\nbut = "y"\nz = 1\n')
    monkeypatch.setattr(module, "mappings_dir", lambda: tmp_path)
    for text in (*cases, '[x]\nlike = "llama"\nbut = 3\n'):
        (tmp_path / FILE).write_text(text, encoding="utf-8")
        with pytest.raises(TableError, match=FILE):
            relatives.__wrapped__()
    (tmp_path / FILE).write_text('[x]\nlike = "llama"\nbut = "y"\ngguf = ["z"]\n', encoding="utf-8")
    assert set(relatives.__wrapped__()) == {"x", "z"}


def test_the_command_line_writes_nothing(tmp_path, capsys):
    make_hf(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "mistral3", "architectures": ["Mistral3Model"]}
    path.write_text(json.dumps(config))
    code = run(cli, ["hf-to-scratch", str(tmp_path / "hf"), str(tmp_path / "out")])
    shown = capsys.readouterr().err
    assert code == 1 and [p.name for p in tmp_path.iterdir()] == ["hf"]
    assert "like `llama`, but a vision tower" in " ".join(shown.split()) and "Traceback" not in shown


# ---- the table to begin with -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families())
def test_a_begun_table_is_the_family(tmp_path, family):
    path = tmp_path / "mistral9.toml"
    path.write_text(beginning(load_table(family), "mistral9"), encoding="utf-8")
    new, old = read_table(path), load_table(family)
    assert (new.family, new.model_types) == ("mistral9", ("mistral9",))
    assert new.rows.keys() == old.rows.keys() and new.reference == old.reference
    assert new.gguf_arch != old.gguf_arch or "gguf" not in new.layouts


def test_tables_init_as(tmp_path):
    path = tmp_path / "mixtral.toml"
    arguments = ["tables", "init", "--family", "llama", "--as", "mixtral", "--out", str(path)]
    assert run(cli, arguments) == 0
    assert relatives()["mixtral"].but in read_table(path).title
    commented = path.read_text().replace("# [block.mlp]\n# gate = false", "[block.mlp]\ngate = false")
    path.write_text(commented)
    assert "block.mlp.gate" not in read_table(path).rows  # what the comment says is so
    for name in ("llama", "../x", "a b", ""):
        with pytest.raises(UsageError):
            beginning(load_table("llama"), name)


def test_the_file_is_no_family():
    assert "relatives" not in families() and Path(mappings_dir() / FILE).is_file()
