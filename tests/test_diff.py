"""The whole of a diff: verdicts, configs in every spelling, records, the JSON and the data of the report's figures."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.differences import same_value
from convert.errors import ConvertError, UsageError
from tests.fixtures import make_gguf, make_hf, make_meta, make_scratch

MAKERS = {"hf": make_hf, "meta": make_meta, "scratch": make_scratch, "gguf": make_gguf}
GATE = "model.layers.0.mlp.gate_proj.weight"


def make(layout: str, folder: Path, shape: str = "gqa8", **options: object) -> Path:
    return MAKERS[layout](folder / "m.gguf" if layout == "gguf" else folder, shape, **options).path


def weighing(found: convert.diff.Diff) -> dict[str, tuple[object, object]]:
    return {d.key: (d.a, d.b) for d in found.config if d.weighs}


@pytest.mark.parametrize(("first", "second"), list(itertools.product(MAKERS, MAKERS)))
@pytest.mark.parametrize("scaling", [None, 8])
def test_one_model_in_two_spellings_is_equal(tmp_path, first, second, scaling):
    def options(layout):
        return {} if scaling is None else {"use_scaled_rope": True} if layout == "meta" else {"scaling": scaling}

    found = convert.diff(make(first, tmp_path / "a", **options(first)), make(second, tmp_path / "b", **options(second)))
    assert found.verdict == "equal" and found.exit_code == 0, (found.message, weighing(found))
    assert found.message == "all 21 tensors hold equal values."


@pytest.mark.parametrize("style", ["v4", "v5"])
@pytest.mark.parametrize("other", list(MAKERS))
def test_the_differing_key_is_named_with_both_values(tmp_path, style, other):
    from dataclasses import replace

    from tests.fixtures.shapes import get_shape

    shape = replace(get_shape("gqa8"), theta=10000.0, eps=1e-6)
    a, b = make_hf(tmp_path / "a", "gqa8", config_style=style).path, make(other, tmp_path / "b", shape)
    found = convert.diff(a, b)
    eps = {} if other == "scratch" else {"rms_norm_eps": (1e-5, pytest.approx(1e-6))}  # the book's class hard-wires it
    assert weighing(found) == {"rope_parameters.rope_theta": (500000.0, 10000.0)} | eps
    assert found.verdict == "different" and "rope_parameters.rope_theta" in found.message
    assert {d.relation for d in found.deltas} <= {"equal", "turned"}


def test_keys_of_training_and_what_nothing_said_means_do_not_weigh(tmp_path):
    a, b = make_hf(tmp_path / "a", "gqa8").path, make_hf(tmp_path / "b", "gqa8").path

    def write(**changes):
        config = json.loads((a / "config.json").read_text()) | changes
        (b / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))
        return convert.diff(a, b)

    assert write(use_cache=False, transformers_version="4.1", attention_dropout=0.1, _name="x").verdict == "equal"
    assert write(head_dim="gone").verdict == "equal"
    assert write(sliding_window=None).verdict == "equal"
    assert write(eos_token_id=[1]).verdict == "equal"
    assert weighing(write(sliding_window=64)) == {"sliding_window": (None, 64)}
    assert weighing(write(eos_token_id=[1, 2])) == {"eos_token_id": (1, [1, 2])}
    assert weighing(write(hidden_act="gelu")) == {"hidden_act": ("silu", "gelu")}
    assert weighing(write(attention_bias=True))  # and the tensors are missing: no crash


def test_same_value():
    assert same_value(1e-5, 9.999999747378752e-06) and not same_value(1e-5, 1.00001e-5)
    assert same_value(2**24 + 1, 2**24 + 1) and not same_value(2**24 + 1, 2**24)  # counts are no float32
    assert same_value([1, 2.0], [1, 2]) and not same_value([1, 2], [1]) and same_value(3, [3])
    assert same_value(True, 1) and not same_value(None, 0) and not same_value("a", 1)


def test_json_and_detail(tmp_path):
    a, b = make_hf(tmp_path / "a", "gqa8").path, make_hf(tmp_path / "b", "gqa6").path
    found = convert.diff(a, b)
    value = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert (value["schema"], value["verdict"]) == ("convert.diff/1", "different")
    assert len(value["extra"]) == 9 and all(n.startswith("model.layers.2.") for n in value["extra"])
    assert {"name": "lm_head.weight", "a": [128, 64], "b": [128, 48]} in value["shapes"]
    assert {"key": "hidden_size", "a": 64, "b": 48, "weighs": True, "note": None} in value["config"]
    assert value["a"] == {
        "path": str(a),
        "layout": "hf",
        "format": "safetensors",
        "family": "llama",
        "dtypes": {"F32": 21},
    }
    cells = found.detail()["tensors"]
    assert len(cells) == 30 and {c["row"] for c in cells} == {"top", "layer 0", "layer 1", "layer 2"}
    assert {c["column"] for c in cells if c["row"] == "layer 2"} == {
        *("self_attn." + x + "_proj" for x in "qkvo"),
        *("mlp." + x + "_proj" for x in ("gate", "up", "down")),
        *("input_layernorm", "post_attention_layernorm"),
    }
    assert {c["column"] for c in cells if c["row"] == "top"} == {"model.embed_tokens", "model.norm", "lm_head"}


def test_worst_first(tmp_path):
    made = make_hf(tmp_path / "a", "gqa8")
    state = {k: t.clone() for k, t in made.tensors.items()}
    state[GATE] *= 1.5
    state["lm_head.weight"] *= 1.01
    state["model.norm.weight"][0] = float("nan")
    state["model.layers.1.mlp.up_proj.weight"] = state["model.layers.1.mlp.up_proj.weight"].bfloat16()
    del state["model.layers.0.self_attn.v_proj.weight"]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text((made.path / "config.json").read_text())
    save_file(state, tmp_path / "b" / "model.safetensors")
    found = convert.diff(made.path, tmp_path / "b")
    assert [d.relation for d in found.worst] == ["only_a", "different", "different", "different", "rounded"]
    names = ["model.norm.weight", GATE, "lm_head.weight", "model.layers.1.mlp.up_proj.weight"]
    assert [d.name for d in found.worst[1:]] == names
    assert found.worst[2].error == pytest.approx(0.5) and found.worst[3].error == pytest.approx(0.01, rel=1e-4)
    assert found.message == "4 of 21 tensors differ."
    assert found.as_json()["dtypes"] == [{"name": names[-1], "a": "F32", "b": "BF16"}]


def test_records_are_told_and_do_not_weigh(tmp_path):
    a = make_hf(tmp_path / "a", "gqa8").path
    for name in ("x", "y"):
        convert.convert_checkpoint(
            a, tmp_path / name, to="scratch", tokenizer=False, format="pth" if name == "y" else "safetensors"
        )
    found = convert.diff(tmp_path / "x", tmp_path / "y")
    assert found.verdict == "equal" and found.record and not any(d.weighs for d in found.record)
    assert convert.diff(a, tmp_path / "y").record == ()


def test_two_families(tmp_path):
    pytest.importorskip("transformers")
    from tests.families.test_gpt2 import make as make_gpt2
    from tests.families.test_qwen3 import make as make_qwen3

    llama = make_hf(tmp_path / "llama", "gqa8").path
    make_gpt2(tmp_path / "gpt2")
    make_qwen3(tmp_path / "qwen3")
    for other in ("gpt2", "qwen3"):
        for pair in ((llama, tmp_path / other), (tmp_path / other, llama)):
            found = convert.diff(*pair)
            assert found.verdict == "different" and weighing(found)["family"] in ((("llama", other)), (other, "llama"))
            value = found.as_json()
            assert value["missing"] + value["extra"] and json.dumps(value, allow_nan=False)


def test_a_damaged_side_is_compared_as_far_as_it_goes(tmp_path):
    made = make_hf(tmp_path / "a", "gqa8")
    state = load_file(made.path / "model.safetensors")
    state[GATE] = torch.zeros(7, 64)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text((made.path / "config.json").read_text())
    save_file(state, tmp_path / "b" / "model.safetensors")
    found = convert.diff(made.path, tmp_path / "b")
    (wrong,) = found.worst
    assert (wrong.relation, wrong.shapes, wrong.note) == (
        "shape",
        ((96, 64), (7, 64)),
        "its shape does not fit the config beside it",
    )
    assert any(hint.startswith("B: ") and "[7, 64]" in hint for hint in found.hints)


def test_only_one_thing_and_nonsense(tmp_path):
    a, b = make_hf(tmp_path / "a", "gqa8").path, make_hf(tmp_path / "b", "gqa8", seed=1).path
    found = convert.diff(a, b, only="norm", tensors_only=True)
    assert found.counts == {"different": 5} and found.config is None and found.tokenizer is None
    assert convert.diff(a, b, only="nothing").message == "no tensor matches 'nothing'."
    with pytest.raises(UsageError, match="atol"):
        convert.diff(a, b, atol=-1.0)
    with pytest.raises(ConvertError, match="nowhere"):
        convert.diff(a, tmp_path / "nowhere")
    assert convert.diff(a, b, atol=10).verdict == "close"
