"""Hugging Face to GGUF: ids of real llama.cpp against those of ``tokenizers`` on multilingual text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from convert.errors import ConvertError, UsageError
from convert.tokenizer import pretokenizers
from convert.tokenizer.from_gguf import hf_files, special_ids
from convert.tokenizer.source import read_tokenizer
from convert.tokenizer.to_gguf import gguf_metadata, placeholder_metadata

from . import llama_cpp, trained

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers  # noqa: E402


def isolated(regex: str) -> Any:
    return pre_tokenizers.Split(Regex(regex), "isolated")


#: Name of the rules: how ``tokenizers`` builds them, and the arguments of the model.
STYLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt-2": ({}, {}),
    "smollm": ({"steps": [pre_tokenizers.Digits(individual_digits=True)]}, {}),
    "llama-bpe": ({"split": False, "steps": [isolated(pretokenizers.LLAMA3)], "bos": True}, {"ignore_merges": True}),
    "qwen2": ({"split": False, "steps": [isolated(pretokenizers.QWEN2)]}, {}),
    "qwen35": ({"split": False, "steps": [isolated(pretokenizers.QWEN35)]}, {}),
}


def save(tokenizer: Any, folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def agree(folder: Path, texts: list[str], *, rows: int, **options: Any) -> dict[str, Any]:
    """Check ids of llama.cpp, of the file and of what comes back from GGUF; return the keys."""
    keys = gguf_metadata(read_tokenizer(folder), rows=rows, **options)
    path = llama_cpp.write_model(folder / "m.gguf", keys, rows=rows)
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    back = tokenizers.Tokenizer.from_str(hf_files(llama_cpp.values(keys))["tokenizer.json"].decode())
    for text, (ids, _) in zip(texts, llama_cpp.tokenize(path, texts, add_special=True), strict=True):
        assert ids == theirs.encode(text).ids, text
        assert back.encode(text).ids == theirs.encode(text).ids, text
    return keys


@pytest.mark.parametrize("name", STYLES)
def test_a_trained_byte_level_tokenizer_with_tokens_added(
    name: str, multilingual: str, texts: list[str], tmp_path: Path
) -> None:
    options, model = STYLES[name]
    tokenizer = trained.byte_level(multilingual, **options, **model)
    if name.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
        texts = [text for text in texts if normalizers.NFC().normalize_str(text) == text]
    tokenizer.add_tokens(["<user>", AddedToken("<fine tune>", normalized=False)])
    tokenizer.add_special_tokens(["<|eot|>"])
    folder = save(tokenizer, tmp_path / "hf", eos_token="<|end|>", bos_token="<|begin|>")
    keys = agree(folder, [*texts, "<|begin|>a<user> b <fine tune><|eot|>\n"], rows=610)
    assert keys["tokenizer.ggml.pre"].value == name
    assert keys["tokenizer.ggml.token_type"].value[598:] == [1, 1, 4, 4, 3, 5, 5, 5, 5, 5, 5, 5]
    assert keys["tokenizer.ggml.tokens"].value[-1] == "[PAD609]"
    assert keys["tokenizer.ggml.add_bos_token"].value is (name == "llama-bpe")


def test_other_rules_would_be_seen(multilingual: str, texts: list[str], tmp_path: Path) -> None:
    folder = save(trained.byte_level(multilingual), tmp_path / "hf", eos_token="<|end|>")
    with pytest.raises(AssertionError):
        agree(folder, texts, rows=600, pre="smollm")


def test_unknown_rules_are_a_question(multilingual: str, texts: list[str], tmp_path: Path) -> None:
    odd = trained.byte_level(multilingual, split=False, steps=[isolated(r"[aeiou]+|[^aeiou]+")])
    folder = save(odd, tmp_path / "hf", eos_token="<|end|>")
    with pytest.raises(ConvertError, match=r"--pre .*smollm.*--no-tokenizer"):
        gguf_metadata(read_tokenizer(folder), rows=600)
    assert gguf_metadata(read_tokenizer(folder), rows=600, pre="gpt-2")["tokenizer.ggml.pre"].value == "gpt-2"
    assert gguf_metadata(read_tokenizer(folder, pre="dbrx"), rows=600)["tokenizer.ggml.pre"].value == "dbrx"
    for call in (
        lambda: gguf_metadata(read_tokenizer(folder), rows=600, pre="no such"),
        lambda: read_tokenizer(folder, pre="no such"),
    ):
        with pytest.raises(UsageError, match="no such"):
            call()


def test_ignore_merges_matters_only_where_merges_do_not_reach(multilingual: str, tmp_path: Path) -> None:
    options, _ = STYLES["llama-bpe"]
    tokenizer = trained.byte_level(multilingual, **options)
    folder = save(tokenizer, tmp_path / "hf")
    assert gguf_metadata(read_tokenizer(folder), rows=600)["tokenizer.ggml.pre"].value == "dbrx"
    tree = json.loads(tokenizer.to_str())
    tree["model"]["ignore_merges"] = True
    tree["pre_tokenizer"] = json.loads(trained.byte_level(multilingual).to_str())["pre_tokenizer"]
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    assert gguf_metadata(read_tokenizer(folder), rows=600)["tokenizer.ggml.pre"].value == "gpt-2"
    tree["model"]["merges"] = tree["model"]["merges"][:-50]  # tokens nothing makes: gpt-2 would never find them
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(ConvertError, match="--pre"):
        gguf_metadata(read_tokenizer(folder), rows=600)


@pytest.mark.parametrize("style", ["prepend", "metaspace", "bare"])
def test_byte_fallback_without_a_sentencepiece_file(
    style: str, multilingual: str, texts: list[str], tmp_path: Path
) -> None:
    tokenizer = trained.byte_fallback(multilingual, style=style)
    folder = save(tokenizer, tmp_path / "hf", bos_token="<s>", eos_token="</s>", add_bos_token=False)
    if style == "metaspace":  # it leaves a space out where the text begins with one; the others do not
        texts = [text for text in texts if not text.startswith(" ")]
    keys = agree(folder, texts, rows=900)
    assert keys["tokenizer.ggml.model"].value == "llama"
    assert keys["tokenizer.ggml.add_space_prefix"].value is (style != "bare")
    assert keys["tokenizer.ggml.token_type"].value[:4] == [2, 3, 3, 6]


def test_sentencepiece_text_with_merges(multilingual: str, texts: list[str], tmp_path: Path) -> None:
    """The kind of its own that llama.cpp calls gemma4; it always adds bos."""
    folder = save(trained.byte_fallback(multilingual, style="bare"), tmp_path / "hf", bos_token="<s>", eos_token="</s>")
    keys = gguf_metadata(read_tokenizer(folder), rows=900, model="gemma4")
    path = llama_cpp.write_model(folder / "m.gguf", keys, rows=900)
    back = tokenizers.Tokenizer.from_str(hf_files(llama_cpp.values(keys))["tokenizer.json"].decode())
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, (ids, _) in zip(texts, llama_cpp.tokenize(path, texts, add_special=True), strict=True):
        assert ids == [1, *theirs.encode(text).ids] == back.encode(text).ids, text
    with pytest.raises(UsageError, match="gemma4"):
        gguf_metadata(read_tokenizer(save(trained.byte_level(multilingual), tmp_path / "b")), rows=600, model="gemma4")


def test_normalisers_that_llama_cpp_lacks_are_refused(multilingual: str, tmp_path: Path) -> None:
    for style in ("byte level", "bare"):
        maker = trained.byte_level(multilingual) if style == "byte level" else None
        tokenizer = maker or trained.byte_fallback(multilingual, style=style)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(" ", "▁")])
        with pytest.raises(ConvertError, match=r"Lowercase.*--no-tokenizer"):
            gguf_metadata(read_tokenizer(save(tokenizer, tmp_path / style)), rows=900)


def test_unigram(multilingual: str, texts: list[str], tmp_path: Path) -> None:
    folder = save(trained.unigram(multilingual), tmp_path / "hf", eos_token="</s>")
    texts = [text for text in texts if not text.startswith(" ")]
    keys = agree(folder, texts, rows=len(read_tokenizer(folder).tokens))
    assert keys["tokenizer.ggml.model"].value == "t5"


def test_smollm2_round_trip(smollm2: dict[str, Any], smollm2_path: Path, texts: list[str], tmp_path: Path) -> None:
    for name, content in hf_files(smollm2).items():
        (tmp_path / name).write_bytes(content)
    keys = gguf_metadata(read_tokenizer(tmp_path), rows=49152)
    written = llama_cpp.values(keys)
    for key in ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "add_bos_token"):
        assert written[f"tokenizer.ggml.{key}"] == smollm2[f"tokenizer.ggml.{key}"], key
    assert written["tokenizer.chat_template"] == smollm2["tokenizer.chat_template"]


def test_every_end_of_text_is_kept(multilingual: str, tmp_path: Path) -> None:
    tokenizer = trained.byte_level(multilingual)
    tokenizer.add_special_tokens(["<|eot_id|>", "<|eom_id|>", "<|other|>"])
    folder = save(tokenizer, tmp_path / "hf", eos_token="<|end|>")
    keys = gguf_metadata(
        read_tokenizer(folder),
        rows=603,
        config={"eos_token_id": [1, 601], "pad_token_id": 602, "bos_token_id": 0},
        generation_config={"eos_token_id": [1, 600]},
    )
    ids = {key.removeprefix("tokenizer.ggml.").removesuffix("_token_id"): value.value for key, value in keys.items()}
    assert [ids[role] for role in ("eos", "eot", "eom", "padding", "bos")] == [1, 600, 601, 602, 0]
    assert special_ids(llama_cpp.values(keys)) == {
        "bos_token_id": 0,
        "eos_token_id": [1, 600, 601],
        "pad_token_id": 602,
    }
    assert special_ids({"tokenizer.ggml.eos_token_id": 7}) == {"eos_token_id": 7}
    reader = read_tokenizer(folder)
    gguf_metadata(reader, rows=603, config={"eos_token_id": [1, 600, 601, 602]})
    assert any("602 ('<|other|>')" in note for note in reader.notes)


def test_the_unicode_form_survives_the_round_trip(multilingual: str, tmp_path: Path) -> None:
    """A name of splitting rules implies a form; where the tokenizer has another one, a key of ours says so."""
    text = "e\u0301 \u00e9 ﬁ"
    for form in ("NFC", "NFKC", None):
        for maker in (
            trained.byte_level(multilingual, split=False, steps=[isolated(pretokenizers.QWEN2)]),
            trained.byte_fallback(multilingual, style="bare"),
        ):
            steps = [getattr(normalizers, form)()] if form else []
            if maker.normalizer is not None:
                steps.append(maker.normalizer)
            maker.normalizer = normalizers.Sequence(steps)
            folder = save(maker, tmp_path / "hf", add_bos_token=False)
            keys = gguf_metadata(read_tokenizer(folder), rows=900)
            back = tokenizers.Tokenizer.from_str(hf_files(llama_cpp.values(keys))["tokenizer.json"].decode())
            assert back.encode(text).ids == maker.encode(text).ids


def test_notes_speak_of_gguf_only_when_one_is_written(multilingual: str, tmp_path: Path) -> None:
    tokenizer = trained.byte_level(multilingual)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    source = read_tokenizer(save(tokenizer, tmp_path / "hf", eos_token="<|end|>"))
    assert source.notes == []
    gguf_metadata(source, rows=602)
    once = list(source.notes)
    assert [word for word in ("NFC", "<mask>", "602 rows") if any(word in note for note in once)] == [
        "NFC",
        "<mask>",
        "602 rows",
    ]
    gguf_metadata(source, rows=602)
    assert source.notes == once


def test_rows_win(multilingual: str, tmp_path: Path) -> None:
    tokenizer = trained.byte_level(multilingual)
    tokenizer.add_tokens(["[PAD602]"])  # takes id 600, and the text of the padding at 602
    folder = save(tokenizer, tmp_path / "hf", eos_token="<|end|>")
    tokens = gguf_metadata(read_tokenizer(folder), rows=604)["tokenizer.ggml.tokens"].value
    assert tokens[600:] == ["[PAD602]", "[PAD601]", "[PAD602]_", "[PAD603]"]
    with pytest.raises(ConvertError, match="601 tokens, the embedding only 599 rows"):
        gguf_metadata(read_tokenizer(folder), rows=599)


@pytest.mark.parametrize("kind", ["byte level", "bare"])
def test_added_tokens_without_a_row_are_left_out(
    kind: str, multilingual: str, texts: list[str], tmp_path: Path
) -> None:
    """As Gemma 3's text models have one; ids of all other text stay, and llama.cpp loads the file."""
    made = trained.byte_level(multilingual) if kind == "byte level" else trained.byte_fallback(multilingual, style=kind)
    rows = made.get_vocab_size()
    made.add_special_tokens(["<image_soft_token>"])
    names = {"eos_token": "<|end|>"} if kind == "byte level" else {"bos_token": "<s>", "eos_token": "</s>"}
    folder = save(made, tmp_path / "hf", add_bos_token=False, **names)
    keys = agree(folder, texts, rows=rows)
    assert len(keys["tokenizer.ggml.tokens"].value) == len(keys["tokenizer.ggml.token_type"].value) == rows
    (folder / "added_tokens.json").write_text(json.dumps({"<image_soft_token>": rows}))  # as Gemma 3 has it, too
    source = read_tokenizer(folder)
    for _ in range(2):  # planning and writing
        gguf_metadata(source, rows=rows)
    assert [f"'<image_soft_token>' ({rows:,})" in n for n in source.notes if "Left out" in n] == [True]
    assert source.tokens[rows] == "<image_soft_token>"
    control = read_tokenizer(folder)  # with a row it is there
    assert "<image_soft_token>" in gguf_metadata(control, rows=rows + 1)["tokenizer.ggml.tokens"].value
    assert not any("Left out" in note for note in control.notes)
    for config in ({"eos_token_id": [1, rows]}, {"text_config": {"pad_token_id": rows}}):
        with pytest.raises(ConvertError, match="image_soft_token"):
            gguf_metadata(read_tokenizer(folder), rows=rows, config=config)
    with pytest.raises(ConvertError, match="the embedding only"):  # a token of the vocabulary itself lacks a row
        gguf_metadata(read_tokenizer(folder), rows=rows - 1)
    (folder / "added_tokens.json").write_text(json.dumps({"far": rows + 5}))  # it does not follow the vocabulary
    for least in (rows, rows + 1, rows + 5):
        with pytest.raises(ConvertError, match="the embedding only"):
            gguf_metadata(read_tokenizer(folder), rows=least)


def test_templates_from_all_their_homes(multilingual: str, tmp_path: Path) -> None:
    folder = save(trained.byte_level(multilingual), tmp_path / "hf", eos_token="<|end|>", chat_template="in config")

    def template() -> dict[str, Any]:
        keys = gguf_metadata(read_tokenizer(folder), rows=600)
        return {key: value.value for key, value in keys.items() if "chat_template" in key}

    assert template() == {"tokenizer.chat_template": "in config"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]})
    )
    assert template() == {
        "tokenizer.chat_template": "d",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "t",
    }
    config = json.loads(
        hf_files(llama_cpp.values(gguf_metadata(read_tokenizer(folder), rows=600)))["tokenizer_config.json"]
    )
    assert {entry["name"] for entry in config["chat_template"]} == {"default", "tool_use"}
    _transformers_sees_both(folder, tmp_path / "back")
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.json").write_text('{"chat_template": "in json"}')
    assert template() == {"tokenizer.chat_template": "in json"}
    (folder / "chat_template.jinja").write_text("in jinja")
    assert template() == {"tokenizer.chat_template": "in jinja"}


def _transformers_sees_both(folder: Path, back: Path) -> None:
    """It reads only the file where chat_template.jinja lies beside the list."""
    transformers = pytest.importorskip("transformers")
    back.mkdir()
    for name, content in hf_files(llama_cpp.values(gguf_metadata(read_tokenizer(folder), rows=600))).items():
        (back / name).write_bytes(content)
    assert transformers.AutoTokenizer.from_pretrained(back).chat_template == {"default": "d", "tool_use": "t"}
    (back / "chat_template.jinja").write_text("d")  # the control
    assert transformers.AutoTokenizer.from_pretrained(back).chat_template == "d"


def test_a_placeholder_vocabulary_loads(tmp_path: Path) -> None:
    for rows in (96, 300):
        path = llama_cpp.write_model(tmp_path / f"{rows}.gguf", placeholder_metadata(rows), rows=rows)
        assert llama_cpp.tokenize(path, ["a"])
