# ruff: noqa: E501 (tables of inputs: one to a line)
"""Is the tokenizer beside a checkpoint sound? Judged beside ``tokenizers`` and SentencePiece, which load it or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")

from convert.errors import ConvertError  # noqa: E402
from convert.tokenizer import audit as audits  # noqa: E402
from convert.tokenizer import hf_json, json_text  # noqa: E402
from convert.tokenizer.audit import audit, audit_gguf  # noqa: E402
from tests.tokenizer import trained  # noqa: E402
from tests.trust.hostile import text_cases  # noqa: E402

#: ``tokenizers`` loads these; ids would mean nothing, or rows would lack.
STRICTER = {"an id twice", "ids beyond the rows", "one id beyond the rest"}
#: Sound in both eyes.
SOUND = {"a regular expression that explodes", "a million merges"}
ROWS = 40
SMALL = {n: c for n, c in text_cases.TOKENIZERS.items() if "MB" not in n and "million" not in n}


def folder(path: Path, **files: Any) -> Path:
    """Files by name, with ``__`` for the dot; a dict or list is written as JSON."""
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        (path / name.replace("__", ".")).write_bytes(raw)
    return path


@pytest.mark.parametrize("name", SMALL)
def test_as_tokenizers_judges(tmp_path, name):
    content = SMALL[name]
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    try:
        tokenizers.Tokenizer.from_str(raw.decode())
        loads = True
    except BaseException:  # pyo3's panics are no Exception
        loads = False
    assert loads == (name in STRICTER | SOUND)
    found = audit(folder(tmp_path / "m", tokenizer__json=raw), rows=ROWS, config={})
    assert (not found.problems) == (name in SOUND), found.problems
    for problem in found.problems:
        assert problem.hint and "tokenizer.json" in problem.message and len(problem.message) < 400


def test_the_one_that_the_hostile_are_made_from(tmp_path):
    assert tokenizers.Tokenizer.from_str(json.dumps(text_cases.SOUND)).encode("t7").ids
    found = audit(folder(tmp_path / "m", tokenizer__json=text_cases.SOUND), rows=ROWS, config={"eos_token_id": 39})
    assert not found.problems and not found.notes and "40 tokens" in found.checked


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "prepend", "bare", "unigram"])
@pytest.mark.parametrize("whole", [True, False])
def test_trained_ones_are_sound(tmp_path, multilingual, monkeypatch, kind, whole):
    if not whole:  # as files are read that are too large to be read whole
        monkeypatch.setattr(audits, "WHOLE_BYTES", 0)
    make = {"byte_level": trained.byte_level, "unigram": trained.unigram}.get(kind)
    made = make(multilingual) if make else trained.byte_fallback(multilingual, style=kind)
    place = folder(tmp_path / "m", tokenizer__json=made.to_str().encode())
    size = made.get_vocab_size()
    found = audit(place, rows=size, config={})
    assert not found.problems and not found.notes and ("--scan" in found.checked) != whole
    assert ["have no text" in note for note in audit(place, rows=size + 7, config={}).notes] == [True]
    short = audit(place, rows=size - 7, config={})
    assert "another model" in short.problems[0].message and short.problems[0].found == size - 1


def test_real_smollm2(smollm2):
    rows = len(smollm2["tokenizer.ggml.tokens"])
    found = audit_gguf(smollm2, rows=rows)
    assert not found.problems and f"{rows:,} tokens" in found.checked


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", 5),
        ("tokens", "x"),
        ("tokens", ["a"] * 40),
        ("token_type", [1] * 39),
        ("merges", "a b"),
        ("merges", ["ab"]),
        ("eos_token_id", 40),
        ("bos_token_id", -2),
        ("bos_token_id", "1"),
    ],
)
def test_gguf_keys(key, value):
    base = "tokenizer.ggml."
    good = {base + "model": "gpt2", base + "pre": "gpt-2", base + "tokens": [f"t{i}" for i in range(40)]}
    good |= {base + "token_type": [1] * 40, base + "merges": ["t 1"], base + "eos_token_id": 3}
    assert not audit_gguf(good, rows=40).problems  # the control
    found = audit_gguf(good | {base + key: value}, rows=40)
    assert found.problems and all(p.hint for p in found.problems)
    assert audit_gguf(good, rows=39).problems and not audit_gguf({base + "model": "no_vocab"}, rows=40).problems


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece(tmp_path, multilingual, kind):
    sentencepiece = pytest.importorskip("sentencepiece")
    raw = trained.sentencepiece_model(multilingual, model_type=kind, byte_fallback=True)
    size = sentencepiece.SentencePieceProcessor(model_proto=raw).vocab_size()
    assert not audit(folder(tmp_path / "m", tokenizer__model=raw), rows=size, config={}).problems
    assert audit(tmp_path / "m", rows=size - 1, config={}).problems
    first = raw[: raw.index(b"\n", 2)]  # its first piece, the unknown one, once more
    for bad in (raw + first, raw[len(first) :], raw[:-5] if raw[-5:].strip() else raw[:4000]):
        with pytest.raises(Exception):  # noqa: B017 (SentencePiece raises whatever it likes)
            sentencepiece.SentencePieceProcessor(model_proto=bad)
        assert audit(folder(tmp_path / "m", tokenizer__model=bad), rows=size, config={}).problems


@pytest.mark.parametrize(
    ("name", "good", "bad", "words"),
    [
        ("tokenizer_config__json", {"bos_token": "t1"}, {"bos_token": 5}, "bos_token is 5"),
        ("tokenizer_config__json", {"bos_token": {"content": "t1"}}, {"bos_token": {"content": 1}}, "bos_token"),
        ("tokenizer_config__json", {"model_max_length": 1e30}, {"chat_template": 7}, "chat_template is 7"),
        ("tokenizer_config__json", {"added_tokens_decoder": {"1": {"content": "0"}}}, {"added_tokens_decoder": {"2": {"content": "0"}}}, "the vocabulary 1"),
        ("tokenizer_config__json", {"added_tokens_decoder": {}}, {"added_tokens_decoder": {"x": {"content": "0"}}}, "no id"),
        ("special_tokens_map__json", {"pad_token": "t1"}, {"pad_token": ["t1"]}, "pad_token"),
        ("added_tokens__json", {"0": 1}, {"0": 2}, "the vocabulary 1"),
        ("added_tokens__json", {}, {"new": 50}, "too few"),
        ("added_tokens__json", {}, {"a": 5, "b": 5}, "same id"),
        ("generation_config__json", {"eos_token_id": [1, 39]}, {"eos_token_id": [1, 40]}, "eos_token_id is 40"),
        ("generation_config__json", {"pad_token_id": -1}, {"pad_token_id": True}, "neither a whole number"),
        ("chat_template__jinja", b"{{ messages }}", b"\xff{{", "no UTF-8"),
        ("merges__txt", b"#version: 0.2\nt 1\n", b"#version: 0.2\nt 1 2\n", "not a pair"),
        ("vocab__json", {"t": 0, "1": 1}, {"t": 0, "1": 0}, "same id"),
        ("vocab__json", {"t": 0}, {"t": 40}, "another model"),
    ],
)  # fmt: skip
def test_what_lies_beside(tmp_path, name, good, bad, words):
    place = folder(tmp_path / "m", tokenizer__json=text_cases.SOUND, **{name: good})
    assert not audit(place, rows=ROWS, config={}).problems  # the control
    (problem,) = audit(folder(place, **{name: bad}), rows=ROWS, config={}).problems
    assert words in problem.message and name.replace("__", ".") in problem.message


def test_everything_at_once(tmp_path):
    files = {"tokenizer_config__json": {"bos_token": 5, "eos_token": 6}, "added_tokens__json": [], "merges__txt": b""}
    found = audit(folder(tmp_path / "m", tokenizer__json={"model": 5}, **files), rows=ROWS, config={"bos_token_id": 40})
    assert len(found.problems) == 6, [p.message for p in found.problems]


def test_ids_of_a_config_without_tokenizer(tmp_path):
    """Small models keep the ids of the class's defaults; nobody uses them."""
    found = audit(folder(tmp_path / "m"), rows=ROWS, config={"bos_token_id": 50256})
    assert not found.problems and "50256" in found.notes[0] and found.checked == ""
    found = audit(folder(tmp_path / "m", tokenizer__json=text_cases.SOUND), rows=ROWS, config={"bos_token_id": 50256})
    assert "50256" in found.problems[0].message


def test_an_added_token_beyond_the_rows(tmp_path):
    """Gemma 3's text models have one, in three files; one far away has no row anywhere, and one that is used needs one.

    The first of each pair is the control.
    """
    token = {"content": "<image_soft_token>", "special": True}
    text = next(iter(text_cases.SOUND["model"]["vocab"]))

    def found(number: int, index: int = ROWS, **files):
        tree = {**text_cases.SOUND, "added_tokens": [{**token, "id": index}]}
        return audit(folder(tmp_path / str(number), tokenizer__json=tree, **files), rows=ROWS, config={})

    decoder = {str(text_cases.SOUND["model"]["vocab"][text]): {"content": text}, str(ROWS): token}
    for number, (name, good, bad) in enumerate(
        [
            ("added_tokens__json", {token["content"]: ROWS}, {"new": ROWS + 5}),
            ("tokenizer_config__json", {"added_tokens_decoder": decoder}, {"added_tokens_decoder": {ROWS + 1: token}}),
            ("tokenizer_config__json", {"image_token": token["content"]}, {"eos_token": token["content"]}),
            ("special_tokens_map__json", {"pad_token": {"content": text}}, {"pad_token": token}),
            ("generation_config__json", {"eos_token_id": [ROWS - 1]}, {"eos_token_id": [1, ROWS]}),
        ]
    ):
        sound = found(number, **{name: good})
        assert not sound.problems and len(sound.notes) == 1, (good, sound)
        assert "1 added token without a row" in sound.notes[0] and token["content"] in sound.notes[0]
        assert found(number, **{name: bad}).problems, bad
    assert "too few" in found(9, ROWS + 1).problems[0].message


def test_memory_is_bounded_before_anything_is_parsed():
    for mark in (b"[],", b"{},", b'"",', b"1,"):
        with pytest.raises(ValueError, match=r"more than any tokenizer|more values"):
            json_text.load(b"[" + mark * 6_100_000 + b"1]")
    assert json_text.load('\ufeff[1, "é\U0001f600"]'.encode()) == [1, "é\U0001f600"]
    assert json_text.load('\ufeff[1, "é"]'.encode(), texts=False) == [1, "Ã©"]
    for raw in (b'["\xff"]', b'["' + b"a" * ((1 << 20) - 2) + b'\xc3"]', b"[NaN]", b"[" * 100_000):
        for texts in (True, False):
            with pytest.raises(ValueError):
                json_text.load(raw, texts=texts)
    assert str(json_text.load(b"[NaN]", constants=True)) == "[nan]"


def test_readers_refuse_what_the_audit_refuses():
    """Not a check beside the readers, but theirs."""
    tree = json.loads(json.dumps(text_cases.SOUND))
    assert hf_json.parse(json.loads(json.dumps(tree)), origin="x").merges
    tree["model"]["merges"].append("x y")
    with pytest.raises(ConvertError, match="'x', which is not in the vocabulary"):
        hf_json.parse(tree, origin="x")
