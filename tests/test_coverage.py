"""Nothing is dropped on the way to a user's names, and nothing invented: biases without a row, false records."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.errors import ConvertError
from tests.fixtures import make_hf, make_meta

HEADLESS = """
extends = "llama"
prefix = "b.{l}."
[top]
token_embd = "e.weight"
output_norm = "n.weight"
[block]
attn.norm = "n1.weight"
attn.q = "q.weight"
attn.k = "k.weight"
attn.v = "v.weight"
attn.o = "o.weight"
mlp.norm = "n2.weight"
mlp.gate = "g.weight"
mlp.up = "u.weight"
mlp.down = "d.weight"
"""


@pytest.mark.parametrize("names", ["nanogpt", "llama2c"])
@pytest.mark.parametrize("biases", [{"attention_bias": True}, {"mlp_bias": True}], ids=["attention", "mlp"])
def test_biases_without_a_row_are_not_dropped(tmp_path, names, biases):
    made = make_hf(tmp_path / "hf", "gqa8", **biases)
    for more in ({}, {"allow_reference": True}):
        with pytest.raises(ConvertError, match=r"has no place for model\.layers\.\{0-1\}\..*bias"):
            convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", names=names, **more)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_names_with_rows_for_biases_take_them(tmp_path):
    made = make_hf(tmp_path / "hf", "gqa8", attention_bias=True, mlp_bias=True)
    convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", names="litgpt")
    found = load_file(tmp_path / "out" / "model.safetensors")
    want = torch.cat([made.tensors[f"model.layers.1.self_attn.{x}_proj.bias"] for x in "qkv"])
    assert torch.equal(found["transformer.h.1.attn.qkv.bias"], want)


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_names_without_a_head_take_a_tied_model_only(tmp_path, head):
    made = make_hf(tmp_path / "hf", "tied", head=head)
    (tmp_path / "names.toml").write_text(HEADLESS)
    options = {"to": "scratch", "names": tmp_path / "names.toml"}
    if head == "different":
        with pytest.raises(ConvertError, match=r"no place for lm_head\.weight"):
            convert.convert_checkpoint(made.path, tmp_path / "out", **options)
        return
    convert.convert_checkpoint(made.path, tmp_path / "out", **options)
    assert "e.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_a_record_cannot_promise_tensors(tmp_path):
    made = make_meta(tmp_path / "meta", "gqa8")
    convert.convert_checkpoint(made.path, tmp_path / "again", to="meta")
    place = tmp_path / "again" / "conversion.json"
    record = json.loads(place.read_text())
    record["config"]["attention_bias"] = True
    place.write_text(json.dumps(record))
    with pytest.raises(ConvertError, match=r"promises model\.layers\.\{0-1\}\.self_attn\.q_proj\.bias"):
        convert.convert_checkpoint(tmp_path / "again", tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("third", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_parts_of_a_fused_tensor_keep_their_values(tmp_path, third):
    """float16 and bfloat16 do not hold each other's values; a matrix that joins both needs float32."""
    made = make_hf(tmp_path / "hf", "gqa8")
    kinds = {"q_proj": torch.bfloat16, "k_proj": torch.float16, "v_proj": third}
    state = {n: t.to(next((k for p, k in kinds.items() if p in n), torch.bfloat16)) for n, t in made.tensors.items()}
    save_file(state, made.path / "model.safetensors")
    convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", names="litgpt")
    found = load_file(tmp_path / "out" / "model.safetensors")["transformer.h.0.attn.qkv.weight"]
    want = torch.cat([state[f"model.layers.0.self_attn.{x}_proj.weight"].double() for x in "qkv"])
    assert torch.equal(found.double(), want)
    assert found.dtype == (torch.float64 if third == torch.float64 else torch.float32)
