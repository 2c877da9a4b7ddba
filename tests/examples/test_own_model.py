"""The worked example of one's own names: the same logits as the reference implementation, straight and by file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from tests.fixtures import make_hf, tokens

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("own_model", ROOT / "examples" / "own_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("shape", ["gqa8", "tied"])
def test_own_model_filled_from_hugging_face(tmp_path, example, shape):
    transformers = pytest.importorskip("transformers")
    made = make_hf(tmp_path, shape)
    ids = tokens(made.shape)
    with torch.no_grad():
        wanted = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids).logits
        model = example.load(tmp_path)
        torch.testing.assert_close(model(ids), wanted, rtol=1e-4, atol=2e-4)
        # the control: rows in the other rotary order are another model
        rows = model.blocks[0].qkv.weight.data
        rows[: made.shape.hidden] = made.hf["model.layers.0.self_attn.q_proj.weight"]
        assert (model(ids) - wanted).abs().max() > 0.1


def test_own_names_by_file_and_back(tmp_path, example):
    from safetensors.torch import load_file

    import convert

    made = make_hf(tmp_path / "hf", "gqa8")
    names = ROOT / "examples" / "own_names.toml"
    convert.convert_checkpoint(made.path, tmp_path / "own", to="scratch", names=names)
    convert.convert_checkpoint(tmp_path / "own", tmp_path / "back", to="hf", names=names)
    model = example.OwnLlama(json.loads((made.path / "config.json").read_text()))
    model.load_state_dict(load_file(tmp_path / "own" / "model.safetensors"), strict=True)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == made.hf.keys()
    assert all(torch.equal(back[k], made.hf[k]) for k in back)
