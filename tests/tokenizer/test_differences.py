"""Tokenizers compared: planted differences of each kind, and the way through GGUF, which must show none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import convert
from convert.tokenizer.differences import tokenizer_differences
from tests.fixtures import make_gguf, make_hf, make_meta
from tests.fixtures.tokenizer import BOS, EOS, save_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def folder(path: Path, *, size: int = 120, change: Any = None, template: str | None = TEMPLATE) -> Path:
    """A model with a trained tokenizer, some of whose ``tokenizer.json`` ``change`` may change."""
    make_hf(path, "gqa8")
    save_tokenizer(path, size, template=template)
    if change is not None:
        tree = json.loads((path / "tokenizer.json").read_text())
        change(tree)
        (path / "tokenizer.json").write_text(json.dumps(tree))
    return path


def differences(a: Path, b: Path) -> dict[str, Any]:
    with convert.open_checkpoint(a) as first, convert.open_checkpoint(b) as second:
        return {d.key: d for d in tokenizer_differences(first, second)}


def test_the_same_has_none(tmp_path):
    assert differences(folder(tmp_path / "a"), folder(tmp_path / "b")) == {}


def test_vocabulary_and_merges(tmp_path):
    found = differences(folder(tmp_path / "a"), folder(tmp_path / "b", size=100))
    assert (found["vocabulary.size"].a, found["vocabulary.size"].b) == (120, 100)
    a, b = (json.loads((tmp_path / x / "tokenizer.json").read_text())["model"]["merges"] for x in "ab")
    pairs = [{tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in side} for side in (a, b)]
    assert f"{len(pairs[0] ^ pairs[1])} merges are on one side only" in found["merges"].note
    assert f"rank {len(b)} " in found["merges"].note and found["merges"].b is None
    assert all(found[k].weighs for k in found)

    def exchange(tree):
        vocab = tree["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        merges = tree["model"]["merges"]
        merges[3], merges[5] = merges[5], merges[3]

    found = differences(tmp_path / "a", folder(tmp_path / "c", change=exchange))
    assert set(found) == {"vocabulary.tokens", "merges"}
    assert sorted(found["vocabulary.tokens"].a.values()) == ["a", "b"] and found["vocabulary.tokens"].note.startswith(
        "2 ids"
    )
    assert found["merges"].note == "rank 3 is the first that differs; 0 merges are on one side only"


def test_added_special_and_templates(tmp_path):
    def plant(tree):
        tree["added_tokens"][1]["lstrip"] = True
        tree["added_tokens"].append(
            {"id": 120, "content": "<|new|>", "special": False, "normalized": True}
            | dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
        )

    good, bad = (
        folder(tmp_path / "a"),
        folder(tmp_path / "b", change=plant, template=TEMPLATE.replace("content", "text")),
    )
    config = json.loads((bad / "tokenizer_config.json").read_text())
    (bad / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": BOS, "add_bos_token": True}))
    found = differences(good, bad)
    assert found["added_tokens.lstrip"].a == {EOS: False} and found["added_tokens.lstrip"].b == {EOS: True}
    assert found["added_tokens"].b == ["<|new|>"] and found["added_tokens"].a is None
    assert (found["special.eos"].a, found["special.eos"].b) == (f"1 {EOS!r}", f"0 {BOS!r}")
    assert found["chat_template"].note == f"from character {TEMPLATE.index('content')} on"
    assert (found["add_bos"].a, found["add_bos"].b) == (False, True)
    assert set(found) == {
        "vocabulary.size",
        "added_tokens",
        "added_tokens.lstrip",
        "special.eos",
        "chat_template",
        "add_bos",
    }
    (bad / "chat_template.jinja").write_text(TEMPLATE + "\n")
    assert not differences(good, bad)["chat_template"].weighs


def test_through_gguf_and_back_nothing_differs(tmp_path):
    """Also what GGUF has no word for: how an added token treats what stands around it."""

    def flags(tree):
        for token, flag in zip(tree["added_tokens"], ("lstrip", "single_word"), strict=True):
            token[flag] = True
        tree["added_tokens"].append(
            {"id": 120, "content": "<|new|>", "special": False, "normalized": True, "lstrip": False}
            | {"rstrip": True, "single_word": False}
        )

    source = folder(tmp_path / "hf", change=flags)
    convert.convert_checkpoint(source, tmp_path / "m.gguf", to="gguf")
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "n.gguf", to="gguf", type="q8_0")
    convert.convert_checkpoint(tmp_path / "n.gguf", tmp_path / "back", to="hf")
    for other in ("m.gguf", "n.gguf", "back"):
        assert not [d for d in differences(source, tmp_path / other).values() if d.weighs], other
        assert not [k for k in differences(source, tmp_path / other) if k.startswith(("added", "vocab"))], other
    back = json.loads((tmp_path / "back" / "tokenizer.json").read_text())["added_tokens"]
    wanted = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    assert back == wanted


def test_what_a_foreign_gguf_cannot_say_does_not_weigh(tmp_path):
    def flag(tree):
        tree["added_tokens"][1]["lstrip"] = True

    made = make_gguf(tmp_path / "m.gguf", "gqa8", tokenizer=120)
    found = differences(folder(tmp_path / "hf", change=flag, template=None), made.path)
    assert not [d for d in found.values() if d.weighs]
    assert "B cannot say it" in found["added_tokens.lstrip"].note


def test_none_and_one_side(tmp_path):
    a, b = make_hf(tmp_path / "a", "gqa8").path, make_meta(tmp_path / "b", "gqa8").path
    assert differences(a, b) == {}
    (found,) = differences(folder(tmp_path / "c"), b).values()
    assert not found.weighs and found.b is None
    (a / "tokenizer.json").write_text("{")
    (found,) = differences(a, tmp_path / "c").values()
    assert "not whole JSON" in found.a and not found.weighs


@pytest.mark.parametrize("pre", ["llama3", "smollm"])
def test_other_splitting_rules(tmp_path, pre):
    a, b = folder(tmp_path / "a", template=None), make_hf(tmp_path / "b", "gqa8").path
    save_tokenizer(b, 120, pre=pre)
    assert differences(a, b)["pre_tokenizer"].weighs


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.model", "additional_chat_templates/x.jinja"])
def test_a_file_of_a_gigabyte_is_not_read(name, tmp_path):
    """Beside a sound tokenizer: `diff` once took three gigabytes of memory for a template of one."""
    import tracemalloc

    from convert.errors import ConvertError
    from convert.tokenizer.source import read_tokenizer
    from tests.fixtures import save_tokenizer

    save_tokenizer(tmp_path, 320)
    assert read_tokenizer(tmp_path).tokens
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(1 << 30)
    tracemalloc.start()
    with pytest.raises(ConvertError, match=f"{path.name} has 1,073,741,824 bytes"):
        read_tokenizer(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()


def test_a_template_that_is_no_text(tmp_path):
    from convert.errors import ConvertError
    from convert.tokenizer.source import read_tokenizer
    from tests.fixtures import save_tokenizer

    save_tokenizer(tmp_path, 320)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConvertError, match=r"chat_template.jinja is no UTF-8"):
        read_tokenizer(tmp_path)
