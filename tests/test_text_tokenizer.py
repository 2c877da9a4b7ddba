"""Text and ids for a running checkpoint: pieces are whole characters, every home of an end token counts."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError
from convert.text_tokenizer import TextTokenizer, end_ids, load_library, text_tokenizer
from convert.tokenizer import hf_checks
from tests.fixtures import make_gguf, make_hf, save_tokenizer
from tests.fixtures.tokenizer import BOS, EOS, MULTILINGUAL, train_tokenizer
from tests.tokenizer.trained import byte_fallback, sentencepiece_model

WIDE = "Grüße 🦙🌿 羊驼吃草。 Ламы едят"


@pytest.mark.parametrize(
    "library",
    [
        pytest.param(lambda: train_tokenizer(300, full_bytes=True), id="byte-level"),
        pytest.param(lambda: byte_fallback(MULTILINGUAL, style="metaspace"), id="sentencepiece"),
        pytest.param(lambda: byte_fallback(MULTILINGUAL, style="prepend"), id="prepend"),
    ],
)
@pytest.mark.parametrize("text", [WIDE, "the head of the key", "🦙"])
@pytest.mark.parametrize("cut", [0, 3])
def test_streamed_pieces_are_whole_characters_and_make_up_the_text(library, text, cut):
    tokenizer = TextTokenizer(library(), "here")
    ids = tokenizer.encode(text, special=False)
    whole = tokenizer.decode(ids)
    cut = cut if "\ufffd" not in tokenizer.decode(ids[:cut]) else 0
    pieces = list(tokenizer.stream(ids[cut:], prompt=ids[:cut]))
    assert tokenizer.decode(ids[:cut]) + "".join(pieces) == whole
    assert all(piece and "\ufffd" not in piece for piece in pieces)
    if text == WIDE and not cut:
        assert len(pieces) > 5
        assert "".join(tokenizer.decode([i]) for i in ids) != whole  # the control: token by token


def test_an_unfinished_character_at_the_end_is_shown():
    tokenizer = TextTokenizer(train_tokenizer(300, full_bytes=True), "here")
    ids = tokenizer.encode("a🦙", special=False)
    assert "".join(tokenizer.stream(ids[:-1])) == tokenizer.decode(ids[:-1]) == "a\ufffd"


def test_the_same_ids_from_a_folder_and_from_gguf(tmp_path):
    hf = make_hf(tmp_path / "hf", "std", vocab=320, tokenizer=True)
    gguf = make_gguf(tmp_path / "m.gguf", "std", vocab=320, tokenizer=320)
    wanted = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    for path in (hf.path, gguf.path):
        with open_checkpoint(path) as ckpt:
            got = text_tokenizer(ckpt)
        assert got.encode(WIDE) == wanted.encode(WIDE).ids
        assert got.special["bos"] == wanted.token_to_id(BOS)
        assert got.token("eos") == EOS
        assert got.token("mask") == ""
    with open_checkpoint(hf.path) as ckpt:
        named = [text_tokenizer(ckpt, p) for p in (gguf.path, str(hf.path), hf.path / "tokenizer.json")]
    assert [n.encode(WIDE) for n in named] == [wanted.encode(WIDE).ids] * 3


def test_a_sentencepiece_model_beside_metas_files(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = sentencepiece_model(MULTILINGUAL, model_type="bpe", byte_fallback=True)
    (tmp_path / "tokenizer.model").write_bytes(model)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    meta = SimpleNamespace(format="torch", folder=tmp_path, path=tmp_path / "consolidated.00.pth")
    got = text_tokenizer(meta)
    for text in ("the llama eats", WIDE):
        assert got.encode(text) == [oracle.bos_id(), *oracle.encode(text)]
        assert "".join(got.stream(oracle.encode(text))) == oracle.decode(oracle.encode(text))
    assert got.ends == {oracle.eos_id()}


def test_llama_3s_own_file_ends_at_a_turn_too(tmp_path):
    """128,000 ranks of our own, of which only the number is Llama 3's."""
    pieces = [bytes([i]) for i in range(256)]
    pieces += [bytes([i, j]) for i in range(256) for j in range(256)]
    pieces += [bytes([i, j, k]) for i in range(4) for j in range(256) for k in range(256)][: 128000 - len(pieces)]
    lines = [b"%s %d" % (base64.b64encode(piece), rank) for rank, piece in enumerate(pieces)]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines))
    got = text_tokenizer(SimpleNamespace(format="torch", folder=tmp_path, path=tmp_path / "consolidated.00.pth"))
    assert got.ends == {128001, 128008, 128009}
    assert got.library.id_to_token(128009) == "<|eot_id|>"
    assert got.encode("ab") == [128000, 256 + 97 * 256 + 98]


def test_every_end_token_counts(tmp_path):
    hf = make_hf(tmp_path, "std", vocab=320, tokenizer=True)
    stated = {"config.json": 3, "generation_config.json": [4, 5], "tokenizer_config.json": None}
    for name, ends in stated.items():
        content = json.loads((tmp_path / name).read_text())
        if ends is not None:
            content["eos_token_id"] = ends
        (tmp_path / name).write_text(json.dumps(content))
    with open_checkpoint(hf.path) as ckpt:
        tokenizer = text_tokenizer(ckpt)
        assert end_ids(ckpt, tokenizer) == {3, 4, 5, tokenizer.library.token_to_id(EOS)}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 99999}))
    with open_checkpoint(hf.path) as ckpt:
        assert end_ids(ckpt, text_tokenizer(ckpt)) == {3, 1}  # an id without a row is none


def test_no_tokenizer_and_a_damaged_one(tmp_path):
    hf = make_hf(tmp_path / "hf", "std")
    with open_checkpoint(hf.path) as ckpt:
        with pytest.raises(ConvertError, match="No tokenizer lies beside") as error:
            text_tokenizer(ckpt)
        assert "--tokenizer PATH" in error.value.problems[0].hint
        with pytest.raises(ConvertError, match="no such file"):
            text_tokenizer(ckpt, tmp_path / "nowhere")
        save_tokenizer(hf.path, 96)
        (hf.path / "tokenizer.json").write_text('{"model": {"type": "nonsense"}}')
        with pytest.raises(ConvertError, match="unknown type, 'nonsense'"):
            text_tokenizer(ckpt)


def test_what_the_library_chokes_on_is_refused_before_it_sees_it(tmp_path, monkeypatch):
    """A charsmap makes it panic, which is no Exception of Python's; 30 MB of brackets make it take a gigabyte."""
    file = tmp_path / "tokenizer.json"
    tree = json.loads(train_tokenizer(300, full_bytes=True).to_str())
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "%"}
    file.write_text(json.dumps(tree | {"normalizer": charsmap}))
    with pytest.raises(ConvertError, match="base64") as error:
        load_library(file)
    assert error.value.problems[0].file == str(file)
    with monkeypatch.context() as patch:
        patch.setattr(hf_checks, "damage", lambda tree: [])
        with pytest.raises(ConvertError, match="cannot be loaded"):  # what the check is for, caught all the same
            load_library(file)
    for text, words in ((b'{"model":' + b"[]," * 2_000_000, "more than 1,500,000 times"), (b"[" * 99_999, "nested")):
        file.write_bytes(text)
        with pytest.raises(ConvertError, match=words):
            load_library(file)
    with file.open("wb") as hole:
        hole.truncate(1 << 30)
    with pytest.raises(ConvertError, match="which no such file has"):
        load_library(file)
    file.write_text(json.dumps(tree))
    assert load_library(file).encode("the head").ids
