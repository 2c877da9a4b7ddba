"""GGUF to Hugging Face: the real SmolLM2, and every pre-tokenizer, against llama.cpp and transformers."""

from __future__ import annotations

import json
import random
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from convert.errors import ConvertError
from convert.formats.gguf_values import U32, Array, Str, Value
from convert.tokenizer import pretokenizers
from convert.tokenizer.from_gguf import hf_files, special_ids

from . import llama_cpp, trained

tokenizers = pytest.importorskip("tokenizers")


def write(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.fixture(scope="module")
def folder(smollm2: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(hf_files(smollm2), tmp_path_factory.mktemp("smollm2"))


def test_smollm2_ids_equal_those_of_llama_cpp(folder: Path, smollm2_path: Path, texts: list[str]) -> None:
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [*texts, *odd_strings(texts), "<|im_start|>user\nWhat do llamas eat? 123<|im_end|>\n"]
    for text, (ids, back) in zip(texts, llama_cpp.tokenize(smollm2_path, texts), strict=True):
        assert ours.encode(text).ids == ids
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert back == text


def test_a_wrong_pre_tokenizer_would_be_seen(smollm2: dict[str, Any], folder: Path, multilingual: str) -> None:
    wrong = hf_files(smollm2 | {"tokenizer.ggml.pre": "gpt-2"})["tokenizer.json"].decode()
    right = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizers.Tokenizer.from_str(wrong).encode(multilingual).ids != right.encode(multilingual).ids


def test_smollm2_in_transformers(folder: Path, multilingual: str, smollm2: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer(multilingual).input_ids
    assert ids == reference.encode(multilingual).ids
    assert tokenizer.decode(ids) == multilingual
    assert tokenizer("<|im_start|>").input_ids == [1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert (len(tokenizer), tokenizer.model_max_length) == (49152, 8192)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n")
    assert (folder / "chat_template.jinja").read_text() == smollm2["tokenizer.chat_template"]
    assert special_ids(smollm2) == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@pytest.fixture(scope="module")
def small(multilingual: str) -> dict[str, Value]:
    """A byte-level BPE of 600 tokens without splitting rules of its own, as GGUF keys."""
    model = json.loads(trained.byte_level(multilingual, split=False).to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": Str("gpt2"),
        "tokenizer.ggml.tokens": Array("str", tokens),
        "tokenizer.ggml.token_type": Array("i32", [3, 3] + [1] * (len(tokens) - 2)),
        "tokenizer.ggml.merges": Array("str", [" ".join(pair) for pair in model["merges"]]),
        "tokenizer.ggml.bos_token_id": U32(0),
        "tokenizer.ggml.eos_token_id": U32(1),
    }


def odd_strings(texts: list[str]) -> list[str]:
    """Random strings of the file's characters, every kind of white space and number, and contractions."""
    rng = random.Random(1)
    chars = sorted(set(texts[0])) + list(
        "\u00a0\u0085\u2028\u200b\u3000\x0b\x0c\r\x1c\u1680\ufeffⅧ①ǅʰªˆſKİı\U00020000\ue000\u0378"
    )
    pieces = ["'s", "'LL", "'Re", " ", "  ", "\n", "\r\n", "12", "345", "1234x", " \u3000"]
    return [
        "".join(rng.choice(chars) if rng.random() < 0.6 else rng.choice(pieces) for _ in range(rng.randint(3, 25)))
        for _ in range(150)
    ]


def explained(name: str, text: str) -> bool:
    """Whether the caveat of the rules called ``name`` speaks of something in ``text``."""
    if name == "tiny_aya":
        return "1234x" in text or any(a.isdigit() and b.isalpha() for a, b in pairwise(text)) or marked(text)
    return " \u3000" in text if name == "deepseek-coder" else marked(text)


def marked(text: str) -> bool:
    return any(unicodedata.category(char) in ("Mn", "Mc", "Me") for char in text)


@pytest.mark.parametrize("name", pretokenizers.names())
def test_every_pre_tokenizer_splits_as_llama_cpp_does(
    name: str, small: dict[str, Value], texts: list[str], tmp_path: Path
) -> None:
    keys = small | {"tokenizer.ggml.pre": Str(name)}
    path = llama_cpp.write_model(tmp_path / "m.gguf", keys, rows=600)
    rebuilt = json.loads(hf_files(llama_cpp.values(keys))["tokenizer.json"])
    rebuilt["normalizer"] = None  # llama.cpp never normalises
    ours = tokenizers.Tokenizer.from_str(json.dumps(rebuilt))
    texts = [*texts, *odd_strings(texts)]
    answers = llama_cpp.tokenize(path, texts, add_special=True)
    differing = [text for text, (ids, _) in zip(texts, answers, strict=True) if ours.encode(text).ids != ids]
    row = pretokenizers.by_name(name)
    assert row is not None
    assert bool(differing) == (row.caveat is not None)
    assert all(explained(name, text) for text in differing)


@pytest.mark.parametrize(
    "name",
    [
        "alias",
        "unknown",
        "none",
        "rwkv",
        "no scores",
        "no merges",
        "half a merge",
        "not UTF-8",
        "merges",
        "template",
        "types",
        "duplicate",
    ],
)
def test_damaged_and_foreign_tokenizers(name: str, small: dict[str, Value]) -> None:
    keys = llama_cpp.values(small)
    if name == "alias":
        assert hf_files(keys | {"tokenizer.ggml.pre": "smaug-bpe"}) == hf_files(keys | {"tokenizer.ggml.pre": "dbrx"})
        return
    broken: dict[str, dict[str, Any]] = {
        "unknown": keys | {"tokenizer.ggml.pre": "no-such-rules"},
        "none": {"tokenizer.ggml.model": "none"},
        "rwkv": keys | {"tokenizer.ggml.model": "rwkv"},
        "no scores": keys | {"tokenizer.ggml.model": "llama"},
        "half a merge": keys | {"tokenizer.ggml.merges": ["ab"]},
        "merges": keys | {"tokenizer.ggml.merges": [*keys["tokenizer.ggml.merges"][:-1], "a \udcff"]},
        "template": keys | {"tokenizer.chat_template": "{{ '\udcff' }}"},
        "not UTF-8": keys | {"tokenizer.ggml.tokens": [*keys["tokenizer.ggml.tokens"][:-1], "\udcff"]},
        "types": keys | {"tokenizer.ggml.token_type": ["x"] * 600},
        "no merges": {key: value for key, value in keys.items() if "merges" not in key},
        "duplicate": keys | {"tokenizer.ggml.tokens": [*keys["tokenizer.ggml.tokens"][:-1], "!"]},
    }
    with pytest.raises(ConvertError, match="--no-tokenizer"):
        hf_files(broken[name])


def test_padding_is_dropped_and_added_tokens_keep_their_ids(small: dict[str, Value], multilingual: str) -> None:
    keys = llama_cpp.values(small)
    tokens = [*keys["tokenizer.ggml.tokens"], "[PAD600]", "<user defined>", "<|eot|>", "[PAD603]", "[PAD604]"]
    keys |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*keys["tokenizer.ggml.token_type"], 5, 4, 3, 5, 5],
        "tokenizer.ggml.eot_token_id": 602,
        "tokenizer.ggml.pre": "llama-bpe",
    }
    ours = tokenizers.Tokenizer.from_str(hf_files(keys)["tokenizer.json"].decode())
    assert ours.get_vocab_size() == 603
    assert ours.encode("<user defined><|eot|>").ids == [0, 601, 602]  # llama-bpe adds bos unless told otherwise
    assert ours.decode([0, 601, 602]) == "<user defined>"
    assert special_ids(keys)["eos_token_id"] == [1, 602]
    silent = hf_files(keys | {"tokenizer.ggml.add_bos_token": False})["tokenizer.json"].decode()
    assert tokenizers.Tokenizer.from_str(silent).encode(multilingual).ids == ours.encode(multilingual).ids[1:]
