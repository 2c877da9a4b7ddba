"""Which family and layout: by names and config, never by a file's suffix; what is no plain model is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convert.detect import detect, score
from convert.errors import ConvertError
from convert.layout import Dims, expand
from convert.names import load_names, ready_made
from convert.table import families, load_table

KEYS = json.loads((Path(__file__).parent / "data" / "llama_keys.json").read_text(encoding="utf-8"))
LLAMA = load_table("llama")
CONFIG = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def names(layout: str, table=LLAMA) -> list[str]:
    return list(expand(table, Dims(table, CONFIG), layout))


@pytest.mark.parametrize("layout", ["hf", "meta", "scratch"])
@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_layouts_are_told_apart_without_a_config(layout, format):
    table, found = detect(names(layout), None, format=format)
    assert (table.family, found) == ("llama", layout)
    others = {"hf", "meta", "scratch"} - {layout}
    assert score(LLAMA, layout, names(layout)) == 1.0
    assert all(score(LLAMA, other, names(layout)) < 0.3 for other in others)


@pytest.mark.parametrize("case", sorted(KEYS))
def test_real_key_sets(case):
    config = KEYS[case]["config"]
    table, found = detect(KEYS[case]["keys"], config, format="safetensors")
    assert (table.family, found) == ("llama", case.split("/")[0])


def test_a_head_or_a_few_tensors_may_lack():
    some = [n for n in names("hf") if "lm_head" not in n and "0.mlp.up" not in n]
    assert detect(some, {"model_type": "llama"}, format="safetensors")[1] == "hf"


def test_gguf_goes_by_its_architecture():
    assert detect(names("gguf"), {"general.architecture": "llama"}, format="gguf")[1] == "gguf"
    with pytest.raises(ConvertError, match="'rwkv'") as error:
        detect(names("gguf"), {"general.architecture": "rwkv"}, format="gguf")
    assert error.value.problems[0].kind == "unknown_architecture"
    for family in families():
        assert family in str(error.value)


@pytest.mark.parametrize("kind", ["mamba", "gpt_neox", "t5"])
def test_an_unknown_model_type_stops_although_names_fit(kind):
    with pytest.raises(ConvertError, match=kind) as error:
        detect(names("hf"), {"model_type": kind}, format="safetensors")
    assert "--family" in str(error.value)
    assert detect(names("hf"), {"model_type": kind}, format="safetensors", family="llama")[1] == "hf"


def test_unknown_names_point_to_a_names_file():
    with pytest.raises(ConvertError, match=r"'layer\.\{0-3\}\.w'") as error:
        detect([f"layer.{i}.w" for i in range(4)], None, format="torch")
    (problem,) = error.value.problems
    assert "--names" in str(problem.hint) and "--family NAME`; `convert families`" in str(problem.hint)
    with pytest.raises(ConvertError, match=r"the llama table does not know .*'layer\.\{0-3\}\.w'") as error:
        detect([f"layer.{i}.w" for i in range(4)], None, format="torch", family="llama")
    assert "init --family llama`)" in str(error.value)


@pytest.mark.parametrize("said", [{"family": "gpt2"}, {"layout": "meta"}, {"config": {"model_type": "gpt2"}}])
def test_names_of_another_family_or_layout_than_was_said_are_called_so(said):
    with pytest.raises(ConvertError, match=r"table does not know|no table knows") as error:
        detect(names("hf"), said.pop("config", None), format="safetensors", **said)
    hint = str(error.value.problems[0].hint)
    assert "names of llama in the hf layout" in hint and "names file" not in hint
    assert detect(names("hf"), None, format="safetensors")[1] == "hf"  # the control


@pytest.mark.parametrize("name", ready_made())
def test_names_files(name):
    table = load_names(name)
    found = detect(names("scratch", table), None, format="torch", layout="scratch", table=table)
    assert found == (table, "scratch")
    assert score(table, "scratch", names("scratch", table)) == 1.0
    assert score(table, "scratch", names("scratch")) < 0.5


@pytest.mark.parametrize("name", ["base_model.model.layers.0.q_proj.lora_A.weight", "trf_blocks.0.att.W_query.lora.A"])
def test_adapters_are_named_with_the_way_to_merge(name):
    with pytest.raises(ConvertError, match="LoRA") as error:
        detect([*names("hf"), name], None, format="safetensors")
    assert "merge" in str(error.value).lower()


@pytest.mark.parametrize(
    ("architecture", "known"),
    [
        ("LlamaForCausalLM", True),
        ("LlamaModel", True),
        ("LlamaForSequenceClassification", True),
        ("MistralForCausalLM", True),
        ("MixtralForCausalLM", False),
        ("LlamaGuardianForCausalLM", False),
    ],
)
def test_architectures_decide_where_there_is_no_model_type(architecture, known):
    config = {"architectures": [architecture]}
    if known:
        assert detect(names("hf"), config, format="safetensors")[0].family == "llama"
        return
    with pytest.raises(ConvertError, match=architecture) as error:
        detect(names("hf"), config, format="safetensors")
    assert "--family" in str(error.value)
    assert detect(names("hf"), config, format="safetensors", family="llama")[1] == "hf"
    assert detect(names("hf"), config | {"model_type": "llama"}, format="safetensors")[1] == "hf"
