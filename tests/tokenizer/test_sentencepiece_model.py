"""SentencePiece files: against SentencePiece itself, tokenizers, and llama.cpp."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from convert.errors import ConvertError
from convert.formats.gguf_values import Array
from convert.tokenizer.from_gguf import hf_files
from convert.tokenizer.source import read_tokenizer
from convert.tokenizer.to_gguf import gguf_metadata
from convert.tokenizer.to_hf import hf_files_from

from . import llama_cpp, trained

tokenizers = pytest.importorskip("tokenizers")
sentencepiece = pytest.importorskip("sentencepiece")

PLAIN: dict[str, Any] = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama 2": {"model_type": "bpe", "byte_fallback": True, **PLAIN},
    "symbols": {
        "model_type": "bpe",
        "byte_fallback": True,
        "user_defined_symbols": ["<custom>"],
        "control_symbols": ["<ctl>"],
        **PLAIN,
    },
    "no prefix": {
        "model_type": "bpe",
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["▁▁", "▁▁▁", "▁▁▁▁"],
        **PLAIN,
    },
    "unigram": {"model_type": "unigram", **PLAIN},
    "unigram, normalised": {"model_type": "unigram"},
}


def hf(files: dict[str, bytes]) -> Any:
    return tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())


def test_runs_of_spaces_that_other_converters_leave_escaped(
    multilingual: str, texts: list[str], tmp_path: Path
) -> None:
    """llama.cpp's converter keeps user-defined runs of spaces as ``▁▁``; llama.cpp then makes them by merging."""
    (tmp_path / "tokenizer.model").write_bytes(trained.sentencepiece_model(multilingual, **MODELS["no prefix"]))
    keys = gguf_metadata(read_tokenizer(tmp_path), rows=1000)
    tokens = [text.replace(" ", "▁") for text in keys["tokenizer.ggml.tokens"].value]
    keys["tokenizer.ggml.tokens"] = Array("str", tokens)
    path = llama_cpp.write_model(tmp_path / "m.gguf", keys, rows=1000)
    ours = hf(hf_files(llama_cpp.values(keys)))
    assert "▁▁" in tokens
    for text, (ids, _) in zip(texts, llama_cpp.tokenize(path, texts, add_special=True), strict=True):
        assert ours.encode(text).ids == ids, text


@pytest.mark.parametrize("name", MODELS)
def test_ids_equal_in_all_four(name: str, multilingual: str, texts: list[str], tmp_path: Path) -> None:
    raw = trained.sentencepiece_model(multilingual, **MODELS[name])
    oracle = sentencepiece.SentencePieceProcessor(model_proto=raw)
    (tmp_path / "tokenizer.model").write_bytes(raw)
    tokenizer = read_tokenizer(tmp_path)
    keys = gguf_metadata(tokenizer, rows=1003)
    path = llama_cpp.write_model(tmp_path / "m.gguf", keys, rows=1003)
    ours, back = hf(hf_files_from(tokenizer)), hf(hf_files(llama_cpp.values(keys)))
    assert back.to_str() == ours.to_str()
    # llama.cpp puts no space before text that is nothing but spaces (Unigram only).
    texts = [text for text in texts if text.strip(" ") or "unigram" not in name]
    # A score tie between "--" "-" and "-" "--" is broken by rounding; SentencePiece sums in float32.
    texts = [text for text in texts if "---" not in text] if name == "unigram, normalised" else texts
    for text, (ids, _) in zip(texts, llama_cpp.tokenize(path, texts), strict=True):
        wanted = oracle.encode(text)
        assert ours.encode(text, add_special_tokens=False).ids == wanted, text
        assert ids == wanted, text


def test_transformers_reads_what_comes_back_from_gguf(multilingual: str, texts: list[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    raw = trained.sentencepiece_model(multilingual, **MODELS["llama 2"])
    (tmp_path / "tokenizer.model").write_bytes(raw)
    keys = gguf_metadata(read_tokenizer(tmp_path), rows=1003)
    out = tmp_path / "out"
    out.mkdir()
    for name, content in hf_files(llama_cpp.values(keys)).items():
        (out / name).write_bytes(content)
    (out / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=raw)
    for text in texts:
        assert tokenizer(text).input_ids == [1, *oracle.encode(text)], text
        assert tokenizer.decode(oracle.encode(text)) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")


def test_bos_is_added_unless_told_otherwise(multilingual: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained.sentencepiece_model(multilingual, **MODELS["llama 2"]))
    tokenizer = read_tokenizer(tmp_path)
    ours = hf(hf_files_from(tokenizer))
    assert ours.encode("a").ids == [1, *ours.encode("a", add_special_tokens=False).ids]
    assert gguf_metadata(tokenizer, rows=1000)["tokenizer.ggml.add_bos_token"].value is True
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false, "add_eos_token": true}')
    silent = gguf_metadata(read_tokenizer(tmp_path), rows=1000)
    assert silent["tokenizer.ggml.add_bos_token"].value is False
    assert silent["tokenizer.ggml.add_eos_token"].value is True
    path = llama_cpp.write_model(tmp_path / "m.gguf", silent, rows=1000)
    [(ids, _)] = llama_cpp.tokenize(path, ["a"], add_special=True)
    assert ids == [*ours.encode("a", add_special_tokens=False).ids, 2]


def test_tokens_added_later(multilingual: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained.sentencepiece_model(multilingual, **MODELS["llama 2"]))
    (tmp_path / "added_tokens.json").write_text('{"<|im_end|>": 1001, "<think>": 1000}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "<|im_end|>"}, "added_tokens_decoder":'
        ' {"1001": {"content": "<|im_end|>", "special": true}}}'
    )
    tokenizer = read_tokenizer(tmp_path)
    keys = gguf_metadata(tokenizer, rows=1002)
    assert keys["tokenizer.ggml.token_type"].value[-2:] == [4, 3]
    assert keys["tokenizer.ggml.eos_token_id"].value == 1001
    path = llama_cpp.write_model(tmp_path / "m.gguf", keys, rows=1002)
    text = "<think> a b<|im_end|>"
    [(ids, _)] = llama_cpp.tokenize(path, [text])
    assert ids == hf(hf_files_from(tokenizer)).encode(text, add_special_tokens=False).ids
    assert ids[0] == 1000 and ids[-1] == 1001


def test_what_llama_cpp_cannot_do_is_refused(multilingual: str, tmp_path: Path) -> None:
    for name, options, reason in (
        ("no bytes", {"model_type": "bpe", **PLAIN}, "byte tokens"),
        ("unigram with bytes", {"model_type": "unigram", "byte_fallback": True, **PLAIN}, "byte fallback"),
        ("suffix", {"model_type": "bpe", "byte_fallback": True, "treat_whitespace_as_suffix": True}, "suffix"),
    ):
        path = tmp_path / name
        path.write_bytes(trained.sentencepiece_model(multilingual, **options))
        with pytest.raises(ConvertError, match=reason) as caught:
            gguf_metadata(read_tokenizer(path), rows=1000)
        assert "--no-tokenizer" in str(caught.value)
    raw = trained.sentencepiece_model(multilingual, model_type="char", **PLAIN)
    (tmp_path / "char").write_bytes(raw)
    with pytest.raises(ConvertError, match="word or character"):
        read_tokenizer(tmp_path / "char")
    (tmp_path / "cut").write_bytes(trained.sentencepiece_model(multilingual, **MODELS["llama 2"])[:-7])
    with pytest.raises(ConvertError, match="damaged"):
        read_tokenizer(tmp_path / "cut")


def test_mistral_7b(texts: list[str], tmp_path: Path) -> None:
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package mistral-common, which carries the tokenizer of Mistral 7B")
    path = Path(spec.submodule_search_locations[0]) / "data" / "tokenizer.model.v1"
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = read_tokenizer(path)
    ours = hf(hf_files_from(tokenizer))
    gguf = llama_cpp.write_model(tmp_path / "m.gguf", gguf_metadata(tokenizer, rows=32000), rows=32000)
    for text, (ids, _) in zip(texts, llama_cpp.tokenize(gguf, texts), strict=True):
        assert ids == ours.encode(text, add_special_tokens=False).ids == oracle.encode(text), text
