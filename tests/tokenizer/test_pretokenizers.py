"""Recognising splitting rules by the rules, in every spelling, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from convert.tokenizer import pretokenizers
from convert.tokenizer.pretokenizers import GPT2, LLAMA3, recognise

tokenizers = pytest.importorskip("tokenizers")

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split(regex: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


@pytest.mark.parametrize("row", pretokenizers.PRETOKENIZERS, ids=lambda row: row.name)
def test_every_row_is_recognised_from_what_it_writes(row: pretokenizers.Pretokenizer) -> None:
    tree = row.hf_pre_tokenizer()
    found = recognise(tree, normalizer=row.normalizer, ignore_merges=row.ignore_merges)
    assert found is not None
    assert (found.steps, found.ignore_merges, found.caveat) == (row.steps, row.ignore_merges, row.caveat)
    if row.name != "starcoder":  # the same rules as smollm, which comes first
        assert found is row
    for alias in row.aliases:
        assert pretokenizers.by_name(alias) is row


SPELLINGS = {
    "own rule": (BYTES | {"use_regex": True}, "gpt-2"),
    "own rule, field absent": ({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}, "gpt-2"),
    "spelled out": (sequence(split(GPT2), BYTES), "gpt-2"),
    "nested": (sequence(sequence(split(GPT2)), BYTES), "gpt-2"),
    "inverted": (sequence(split(GPT2, "Removed", True), BYTES), "gpt-2"),
    "digits": (sequence(split(r"\p{N}"), BYTES | {"use_regex": True}), "smollm"),
    "contractions": (
        sequence(split(LLAMA3.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)")), BYTES),
        "dbrx",
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_that_split_alike(name: str, texts: list[str]) -> None:
    tree, wanted = SPELLINGS[name]
    row = recognise(tree, normalizer=None, ignore_merges=False)
    assert row is not None and row.name == wanted
    theirs, ours = (build(part) for part in (tree, row.hf_pre_tokenizer()))
    for text in texts:
        assert [p for p, _ in ours.pre_tokenize_str(text)] == [p for p, _ in theirs.pre_tokenize_str(text)]


def build(tree: dict[str, Any]) -> Any:
    import json

    empty = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    return tokenizers.Tokenizer.from_str(json.dumps(empty | {"pre_tokenizer": tree})).pre_tokenizer


@pytest.mark.parametrize(
    "tree",
    [
        None,
        sequence(split(GPT2)),
        BYTES,
        BYTES | {"add_prefix_space": True, "use_regex": True},
        sequence(split(GPT2, "MergedWithPrevious"), BYTES),
        sequence(split(GPT2 + "|x"), BYTES),
        sequence({"type": "Digits", "individual_digits": False}, BYTES | {"use_regex": True}),
        sequence({"type": "Punctuation", "behavior": "Isolated"}, BYTES | {"use_regex": True}),
    ],
)
def test_what_is_close_is_not_taken(tree: dict[str, Any] | None) -> None:
    assert recognise(tree, normalizer=None, ignore_merges=False) is None
