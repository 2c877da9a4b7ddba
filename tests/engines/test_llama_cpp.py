"""Real llama.cpp in its subprocess: against transformers, on files with and without vocabulary, and when it dies."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest
import torch

from convert.engines import llama_cpp
from convert.engines.llama_cpp import logprobs
from convert.errors import ConvertError, FormatError
from convert.formats import gguf
from convert.formats.gguf_edit import set_metadata
from convert.formats.gguf_header import read_header
from convert.formats.gguf_values import Str
from tests.fixtures import make_gguf, tokens
from tests.fixtures.hf import hf_config

pytest.importorskip("xllamacpp")

LENGTHS = (1, 2, 7, 40, 101, 128)


def prompts(made, lengths=LENGTHS):
    ids = tokens(made.shape)[0].tolist()
    return [ids[:n] for n in lengths]


def expected(made, lengths=LENGTHS, **config):
    """transformers' log-probabilities of the fixture's (dequantised) values."""
    transformers = pytest.importorskip("transformers")
    stated = hf_config(made.shape, dtype="float32") | config
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**stated)).eval()
    loaded = model.load_state_dict(made.hf, strict=False)
    assert not loaded.unexpected_keys
    assert all(key == "lm_head.weight" for key in loaded.missing_keys)
    model.tie_weights()
    with torch.no_grad():
        logits = model(tokens(made.shape)).logits[0].double()
    return logits.log_softmax(-1)[[n - 1 for n in lengths]].numpy()


@pytest.mark.parametrize("shape", ["gqa8", "tied", "hd16"])
def test_float32_files_agree_with_transformers(tmp_path, shape):
    made = make_gguf(tmp_path / "m.gguf", shape)
    got = logprobs(made.path, prompts(made))
    assert got.shape == (len(LENGTHS), made.shape.vocab)
    assert got.dtype == np.float32
    np.testing.assert_allclose(np.exp(got.astype(np.float64)).sum(-1), 1.0, atol=1e-5)
    wanted = expected(made)
    assert np.abs(got - wanted).max() < 2e-4
    # the control: a theta that is off shows from the second position on
    other = expected(made, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    assert np.abs(got - other)[0].max() < 2e-4
    assert np.abs(got - other)[-1].max() > 0.1


def test_a_prompt_alone_is_the_same_as_after_others(tmp_path):
    """Prompts share what llama.cpp has cached; each starts from scratch all the same."""
    made = make_gguf(tmp_path / "m.gguf")
    given = prompts(made)
    together = logprobs(made.path, [given[4], given[1], given[5]])
    alone = logprobs(made.path, [given[1]], threads=1)
    assert np.abs(together[1] - alone[0]).max() < 5e-5


def test_tokens_that_are_no_text_of_their_own(tmp_path):
    """The likeliest token is a part of a character or an end: the probabilities come all the same."""
    made = make_gguf(tmp_path / "m.gguf", "kquant", type="q6_k")
    got = logprobs(made.path, prompts(made, (1, 2, 3)))
    assert not np.isnan(got).any()
    assert np.isneginf(got).any()  # probabilities too small for float32


@pytest.mark.parametrize("model", [None, "none", "no_vocab"])
def test_a_file_without_vocabulary_gets_a_placeholder_for_the_run(tmp_path, model):
    made = make_gguf(tmp_path / "m.gguf", "std")
    wanted = logprobs(made.path, prompts(made, (5, 100)))
    keys = [key for key in read_header(made.path).metadata if key.startswith("tokenizer.")]
    set_metadata(made.path, dict.fromkeys(keys) | ({"tokenizer.ggml.model": Str(model)} if model else {}))
    before = made.path.read_bytes()
    got = logprobs(made.path, prompts(made, (5, 100)))
    assert np.abs(got - wanted).max() < 1e-6
    assert made.path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_the_placeholder_needs_room(tmp_path, monkeypatch):
    made = make_gguf(tmp_path / "m.gguf", "std")
    keys = [key for key in read_header(made.path).metadata if key.startswith("tokenizer.")]
    set_metadata(made.path, dict.fromkeys(keys))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(ConvertError, match="10 free"):
        logprobs(made.path, prompts(made, (5,)))


def test_a_file_that_llama_cpp_refuses(tmp_path):
    made = make_gguf(tmp_path / "m.gguf", "std")
    set_metadata(made.path, {"general.architecture": Str("nonsense")})
    with pytest.raises(ConvertError, match="unknown model architecture: 'nonsense'") as error:
        logprobs(made.path, prompts(made, (5,)))
    assert error.value.problems[0].kind == "engine"


def test_a_crash_names_the_signal(tmp_path, monkeypatch):
    made = make_gguf(tmp_path / "m.gguf", "std")
    child = tmp_path / "child.py"
    child.write_text("import os, sys; print('GGML_ASSERT(x) failed', file=sys.stderr, flush=True); os.abort()")
    monkeypatch.setattr(llama_cpp, "_CHILD", child)
    with pytest.raises(ConvertError, match=r"ended by SIGABRT. It said: GGML_ASSERT\(x\) failed"):
        logprobs(made.path, prompts(made, (5,)))


def test_a_missing_package_and_a_time_out(tmp_path, monkeypatch):
    made = make_gguf(tmp_path / "m.gguf", "std")
    with pytest.raises(ConvertError, match="did not finish"):
        logprobs(made.path, prompts(made, (5,)), timeout=0.05)
    monkeypatch.setattr(llama_cpp, "PACKAGE", "no_such_package_here")
    assert not llama_cpp.available()
    started = []
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: started.append(a))
    with pytest.raises(ConvertError, match=r"llama\.cpp is not installed"):
        logprobs(made.path, prompts(made, (5,)))
    assert not started


def test_bad_requests(tmp_path):
    made = make_gguf(tmp_path / "m.gguf", "std")
    with pytest.raises(ConvertError, match="outside the vocabulary of 96"):
        logprobs(made.path, [[1, 96]])
    with pytest.raises(ConvertError, match="a prompt is empty"):
        logprobs(made.path, [[1], []])
    assert logprobs(made.path, []).shape == (0, 96)
    (tmp_path / "broken.gguf").write_bytes(made.path.read_bytes()[:5000])
    with pytest.raises(FormatError):
        logprobs(tmp_path / "broken.gguf", [[1]])


def test_the_printable_token_is_plain_text(tmp_path):
    made = make_gguf(tmp_path / "m.gguf", "std")
    container = gguf.read(made.path)
    index = llama_cpp.printable_token(container)
    assert container.metadata["tokenizer.ggml.tokens"][index].isalnum()
    assert container.metadata["tokenizer.ggml.token_type"][index] == 1
