"""Finding a tokenizer: by content, whatever it is called, and one clear error when there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convert.errors import ConvertError
from convert.tokenizer.source import find, read_tokenizer
from convert.tokenizer.to_gguf import gguf_metadata
from convert.tokenizer.to_hf import hf_files_from
from convert.tokenizer.tokenizer import BYTE_LEVEL, SENTENCEPIECE

from . import llama_cpp, trained

tokenizers = pytest.importorskip("tokenizers")

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 499723\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (POINTER, "Git LFS pointer"),
        (b"<!DOCTYPE html><html><body>Access denied</body></html>", "web page"),
        (b"", "is empty"),
        (b'{"model": {"type": "BPE"', "not whole JSON"),
        (b"\x00\x01\x02\x03 nothing of the kind", "neither JSON"),
        (b'{"config": {"pattern": "x"}, "vocab": [{"rank": 0}]}', "tekken"),
        (b'{"architectures": ["Llama"]}', "no tokenizer"),
    ],
)
def test_what_is_not_a_tokenizer(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConvertError, match=message) as caught:
        read_tokenizer(tmp_path)
    [problem] = caught.value.problems
    assert problem.kind == "tokenizer_missing"
    assert problem.found == "config.json, tokenizer.model"
    assert "--no-tokenizer" in str(caught.value)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="none of its files") as caught:
        read_tokenizer(tmp_path)
    assert "tokenizer.json" in str(caught.value.problems[0].wanted)
    assert find(tmp_path) is None


def test_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConvertError, match="WordLevel"):
        read_tokenizer(tmp_path)


def test_names_do_not_matter(multilingual: str, tmp_path: Path) -> None:
    """A JSON called tokenizer.model, and a SentencePiece model called tokenizer.json."""
    trained.byte_level(multilingual).save(str(tmp_path / "tokenizer.model"))
    assert read_tokenizer(tmp_path).kind == BYTE_LEVEL
    raw = trained.sentencepiece_model(multilingual, model_type="bpe", byte_fallback=True)
    (tmp_path / "tokenizer.json").write_bytes(raw)
    assert read_tokenizer(tmp_path).kind == SENTENCEPIECE
    (tmp_path / "tokenizer.json").write_bytes(POINTER)  # the next best is taken
    assert read_tokenizer(tmp_path).kind == BYTE_LEVEL


def test_a_meta_folder_finds_the_file_one_level_up(multilingual: str, tmp_path: Path) -> None:
    raw = trained.sentencepiece_model(multilingual, model_type="bpe", byte_fallback=True)
    (tmp_path / "tokenizer.model").write_bytes(raw)
    (tmp_path / "7B").mkdir()
    with pytest.raises(ConvertError):
        read_tokenizer(tmp_path / "7B")
    (tmp_path / "7B" / "params.json").write_text("{}")
    assert read_tokenizer(tmp_path / "7B").kind == SENTENCEPIECE
    assert find(tmp_path / "7B") == tmp_path / "tokenizer.model"


def test_hugging_face_files_are_carried_unchanged(multilingual: str, tmp_path: Path) -> None:
    trained.byte_level(multilingual).save(str(tmp_path / "tokenizer.json"), pretty=True)
    (tmp_path / "tokenizer_config.json").write_text('{ "eos_token":"<|end|>" , "model_max_length": 1e30}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}\n")
    (tmp_path / "weights.bin").write_text("no")
    files = hf_files_from(read_tokenizer(tmp_path))
    assert sorted(files) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert all(content == (tmp_path / name).read_bytes() for name, content in files.items())


def test_gpt2_files(multilingual: str, texts: list[str], tmp_path: Path) -> None:
    tokenizer = trained.byte_level(multilingual)
    tokenizer.model.save(str(tmp_path))
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|end|>", "eos_token": "<|end|>"}')
    source = read_tokenizer(tmp_path)
    keys = gguf_metadata(source, rows=600)
    assert keys["tokenizer.ggml.pre"].value == "gpt-2"
    assert keys["tokenizer.ggml.eos_token_id"].value == 1
    ours = tokenizers.Tokenizer.from_str(hf_files_from(source)["tokenizer.json"].decode())
    path = llama_cpp.write_model(tmp_path / "m.gguf", keys, rows=600)
    for text, (ids, _) in zip(texts, llama_cpp.tokenize(path, texts), strict=True):
        assert ids == ours.encode(text).ids == tokenizer.encode(text).ids
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    assert gguf_metadata(read_tokenizer(tmp_path), rows=600)["tokenizer.ggml.pre"].value == "qwen2"
    config.write_text(json.dumps({"tokenizer_class": "SomeTokenizer"}))
    with pytest.raises(ConvertError, match=r"SomeTokenizer.*--pre"):
        read_tokenizer(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ConvertError, match="without its merges"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", {"model": {"type": "BPE", "byte_fallback": True, "vocab": {"a": "one"}, "merges": []}}),
        ("tokenizer.json", {"model": {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0}, "merges": ["a b c"]}}),
        ("tokenizer.json", {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}, "added_tokens": [{"content": "b"}]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": "text"}}),
        ("tokenizer_config.json", {"chat_template": [{"name": "x"}]}),
        ("special_tokens_map.json", ["<s>"]),
    ],
)
def test_damaged_json_is_an_error_with_the_file(name: str, content: object, multilingual: str, tmp_path: Path) -> None:
    trained.byte_level(multilingual).save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(tmp_path).generation_ids() == {}
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConvertError) as caught:
        read_tokenizer(tmp_path)
    assert caught.value.problems[0].file
