"""tiktoken-style files: against tiktoken itself and llama.cpp."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from convert.errors import ConvertError
from convert.tokenizer import bytelevel, pretokenizers
from convert.tokenizer.source import read_tokenizer
from convert.tokenizer.to_gguf import gguf_metadata
from convert.tokenizer.to_hf import hf_files_from

from . import llama_cpp, trained

tokenizers = pytest.importorskip("tokenizers")
tiktoken = pytest.importorskip("tiktoken")


def encoding(ranks: dict[bytes, int], regex: str) -> Any:
    return tiktoken.Encoding("test", pat_str=regex, mergeable_ranks=ranks, special_tokens={})


def read(path: Path) -> dict[bytes, int]:
    lines = path.read_bytes().splitlines()
    return {base64.b64decode(piece): int(rank) for piece, rank in (line.split() for line in lines)}


@pytest.fixture
def small(multilingual: str, tmp_path: Path) -> Path:
    """A rank file whose ranks are those of trained merges."""
    tokenizer = trained.byte_level(multilingual, split=False, steps=[trained_split()])
    vocab = json.loads(tokenizer.to_str())["model"]["vocab"]
    pieces = [bytelevel.decode(text) for text in sorted(vocab, key=vocab.get)][2:]
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"".join(base64.b64encode(p) + b" %d\n" % rank for rank, p in enumerate(pieces) if p is not None))
    return path


def trained_split() -> Any:
    return tokenizers.pre_tokenizers.Split(tokenizers.Regex(pretokenizers.LLAMA3), "isolated")


def test_ids_equal_those_of_tiktoken(small: Path, texts: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"598 ranks.*--pre llama-bpe"):
        read_tokenizer(small)
    tokenizer = read_tokenizer(small, pre="llama-bpe")
    oracle = encoding(read(small), pretokenizers.LLAMA3)
    ours = tokenizers.Tokenizer.from_str(hf_files_from(tokenizer)["tokenizer.json"].decode())
    keys = gguf_metadata(tokenizer, rows=600, config={"eos_token_id": 5})
    path = llama_cpp.write_model(tmp_path / "m.gguf", keys, rows=600)
    for text, (ids, _) in zip(texts, llama_cpp.tokenize(path, texts), strict=True):
        assert ours.encode(text).ids == ids == oracle.encode(text), text
    wrong = read_tokenizer(small, pre="qwen2")
    theirs = tokenizers.Tokenizer.from_str(hf_files_from(wrong)["tokenizer.json"].decode())
    assert any(theirs.encode(text).ids != oracle.encode(text) for text in texts)


def test_damaged_files(small: Path) -> None:
    lines = small.read_bytes().splitlines(keepends=True)
    for broken in ([*lines[:-2], b"no!base64 7\n"], lines[:100] + lines[101:]):
        small.write_bytes(b"".join(broken))
        with pytest.raises(ConvertError, match=r"Line 597|gaps"):
            read_tokenizer(small, pre="llama-bpe")


def test_llama_3(texts: list[str], tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llama_models")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package llama-models (pip install --no-deps llama-models), which carries Llama 3's file")
    path = Path(spec.submodule_search_locations[0]) / "llama3" / "tokenizer.model"
    tokenizer = read_tokenizer(path)
    assert len(tokenizer.merges) == 280147  # as in the tokenizer.json that Meta publishes
    assert (len(tokenizer.tokens), tokenizer.special) == (128256, {"bos": 128000, "eos": 128001})
    assert tokenizer.id_of("<|eot_id|>") == 128009
    assert tokenizer.id_of("<|reserved_special_token_247|>") == 128255
    oracle = encoding(read(path), pretokenizers.LLAMA3)
    ours = tokenizers.Tokenizer.from_str(hf_files_from(tokenizer)["tokenizer.json"].decode())
    keys = gguf_metadata(tokenizer, rows=128256, config={"eos_token_id": [128001, 128008, 128009]})
    assert keys["tokenizer.ggml.eot_token_id"].value == 128009
    assert keys["tokenizer.ggml.eom_token_id"].value == 128008
    gguf = llama_cpp.write_model(tmp_path / "m.gguf", keys, rows=128256)
    for text, (ids, _) in zip(texts, llama_cpp.tokenize(gguf, texts, add_special=True), strict=True):
        assert ids == ours.encode(text).ids == [128000, *oracle.encode(text)], text
