"""What is wrong with the content of a ``tokenizer.json``, all of it at once.

These are the conditions on which Hugging Face's ``tokenizers`` loads a file, and two more: that ids are unique, and
that they lie close together. It makes nothing of the content; that is :mod:`convert.tokenizer.hf_json`'s business.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: Models that ``tokenizers`` knows; files from before the field existed have none.
_MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel", None)
#: The steps around the model, with the key under which a sequence of them lies.
_STEPS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
#: ``serde_json``, by which ``tokenizers`` reads, goes 128 deep.
_DEEPEST = 100
#: Characters of the longest token that is believed; published ones have some hundred.
_LONGEST = 1 << 16
#: Ids that nobody has are padding here, and a row each: this many may be, beyond as many as there are tokens.
SPARE_IDS = 100_000
_SHOWN = 3


def damage(tree: Mapping[str, Any]) -> list[str]:
    """Everything that keeps the parsed content of a ``tokenizer.json`` from being used, in words.

    Merges are only looked at as far as costs nothing: :func:`merge_damage` has the rest.
    """
    model = tree.get("model")
    if not isinstance(model, Mapping):
        return [f"its model is {what(model)}, not an object"]
    found = [] if model.get("type") in _MODELS else [f"its model is of an unknown type, {brief(model.get('type'))}"]
    added = tree.get("added_tokens")
    found += _vocabulary(model)
    found += added_damage(added)
    if not found:
        ids = list(model_ids(model))
        found += spread_damage(ids, (entry["id"] for entry in added or ()))
    merges = model.get("merges")
    if merges is not None and not isinstance(merges, list):
        found.append(f"its merges are {what(merges)}, not a list")
    elif merges and not set(map(type, merges)) <= {str, list}:
        found.append("its merges are not all pairs of texts")
    for section, key in _STEPS.items():
        found += _steps(tree.get(section), section, key, 0)
    return found


def model_ids(model: Mapping[str, Any]) -> Iterable[int]:
    """The ids of a sound model's own vocabulary."""
    vocab = model["vocab"]
    return range(len(vocab)) if isinstance(vocab, list) else vocab.values()


def spread_damage(ids: Iterable[int], more: Iterable[int] = ()) -> list[str]:
    """Whether ids reach far beyond the number of them: nothing has that many rows, and padding would fill them."""
    every = {*ids, *more}
    most = max(every, default=0)
    if most < 2 * len(every) + SPARE_IDS:
        return []
    return [f"an id is {brief(most)}, but there are only {len(every):,} tokens"]


def _vocabulary(model: Mapping[str, Any]) -> Iterator[str]:
    vocab = model.get("vocab")
    if not vocab:
        yield "it has no model with a vocabulary" if vocab in (None, [], {}) else f"its vocabulary is {what(vocab)}"
        return
    if isinstance(vocab, list) and model.get("type") in ("Unigram", None):
        yield from _unigram(vocab, model.get("unk_id"))
        return
    if not isinstance(vocab, Mapping):
        yield f"its vocabulary is {what(vocab)}, not an object"
        return
    yield from vocabulary_damage(vocab)


def vocabulary_damage(vocab: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with an object of texts and ids."""
    ids = list(vocab.values())
    if set(map(type, ids)) - {int}:
        wrong = [(text, i) for text, i in vocab.items() if type(i) is not int][:_SHOWN]
        yield "ids in its vocabulary are no whole numbers: " + ", ".join(f"{brief(t)}: {brief(i)}" for t, i in wrong)
        return
    if ids and min(ids) < 0:
        yield f"an id in its vocabulary is {brief(min(ids))}"
    if len(set(ids)) < len(ids):
        yield _twice(vocab)
    yield from text_damage(vocab)


def _twice(vocab: Mapping[str, int]) -> str:
    first: dict[int, str] = {}
    for text, index in vocab.items():
        if index in first:
            return f"{brief(first[index])} and {brief(text)} have the same id, {brief(index)}"
        first[index] = text
    return ""


def _unigram(vocab: list[Any], unknown: Any) -> Iterator[str]:
    for index, entry in enumerate(vocab):
        pair = isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[0], str)
        if not pair or isinstance(entry[1], bool) or not isinstance(entry[1], (int, float)):
            yield f"piece {index} of its vocabulary is {brief(entry)}, not a text and its score"
            return
        if not math.isfinite(entry[1]):
            yield f"piece {index} of its vocabulary, {brief(entry[0])}, has the score {entry[1]}"
            return
    texts = [text for text, _ in vocab]
    if len(set(texts)) < len(texts):
        first: set[str] = set()
        text = next(t for t in texts if t in first or first.add(t))  # type: ignore[func-returns-value]
        yield f"{brief(text)} is in its vocabulary twice"
    yield from text_damage(texts)
    if unknown is not None and (type(unknown) is not int or not 0 <= unknown < len(vocab)):
        yield f"its unk_id is {brief(unknown)}, the vocabulary has {len(vocab):,} pieces"


def text_damage(texts: Iterable[str]) -> Iterator[str]:
    """Texts that cannot be written as UTF-8, or are longer than any token."""
    joined = "".join(texts)
    if len(joined) > _LONGEST and (longest := max(map(len, texts))) > _LONGEST:
        yield f"a token has {longest:,} characters, which none has"
    elif not joined.isascii():
        try:
            joined.encode("latin-1")  # faster, and it has no surrogates either
            return
        except UnicodeEncodeError:
            pass
        try:
            joined.encode()
        except UnicodeEncodeError:
            yield "a token holds half a surrogate pair, which is no text"


def merge_damage(merges: Iterable[Any], known: Mapping[str, Any] | set[str]) -> str | None:
    """What is wrong with the first merge that is no pair of known pieces that make a known one, or None."""
    for entry in merges:
        parts = entry.split(" ") if isinstance(entry, str) else entry
        if len(parts) != 2 or not isinstance(parts[0], str) or not isinstance(parts[1], str):
            return f"the merge {brief(entry)} is not a pair of texts"
        left, right = parts
        if left not in known or right not in known or left + right not in known:
            lacking = next(text for text in (left, right, left + right) if text not in known)
            return f"the merge {brief(entry)} needs {brief(lacking)}, which is not in the vocabulary"
    return None


def added_damage(entries: Any) -> list[str]:
    """What is wrong with the list of added tokens."""
    if entries is None:
        return []
    if not isinstance(entries, list):
        return [f"its added tokens are {what(entries)}, not a list"]
    found: list[str] = []
    ids: dict[int, str] = {}
    for entry in entries:
        if not isinstance(entry, Mapping):
            found.append(f"the added token {brief(entry)} is not an object")
            continue
        index, text = entry.get("id"), entry.get("content")
        if type(index) is not int or index < 0:
            found.append(f"the id of the added token {brief(text)} is {brief(index)}, not a whole number")
        elif ids.setdefault(index, str(text)) != text:
            found.append(f"the added tokens {brief(ids[index])} and {brief(text)} have the same id, {index}")
        if not isinstance(text, str) or not text:
            found.append(f"the text of the added token of id {brief(index)} is {brief(text)}")
        else:
            found += text_damage([text])
    return found if len(found) <= _SHOWN else [*found[:_SHOWN], f"and {len(found) - _SHOWN:,} added tokens more"]


def _steps(node: Any, section: str, key: str, depth: int) -> Iterator[str]:
    if node is None and not depth:
        return
    if not isinstance(node, Mapping):
        yield f"its {section} is {what(node)}, not an object" if not depth else f"a step of its {section} is no object"
        return
    if depth > _DEEPEST:
        yield f"its {section} is nested deeper than {_DEEPEST} sequences"
        return
    kind = node.get("type")
    if not isinstance(kind, str):
        yield f"the type of a step of its {section} is {brief(kind)}"
    elif kind == "Sequence":
        inner = node.get(key)
        if not isinstance(inner, list):
            yield f"the sequence in its {section} is {what(inner)}, not a list"
        else:
            for step in inner:
                yield from _steps(step, section, key, depth + 1)
    elif kind == "Precompiled":
        try:
            base64.b64decode(node.get("precompiled_charsmap") or "", validate=True)
        except (binascii.Error, TypeError, ValueError):
            yield "its precompiled_charsmap is not base64"
    elif kind == "TemplateProcessing":
        yield from _template(node)


def _template(node: Mapping[str, Any]) -> Iterator[str]:
    for key in ("single", "pair"):
        pieces = node.get(key, [])
        if not isinstance(pieces, list) or not all(isinstance(piece, Mapping) for piece in pieces):
            yield f"the template for {key} sequences in its post_processor is no list of objects"
    if not isinstance(node.get("special_tokens", {}), Mapping):
        yield f"the special tokens of the template in its post_processor are {what(node.get('special_tokens'))}"


def what(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "missing"
    if isinstance(value, bool):
        return str(value).lower()
    kinds = {list: "a list", dict: "an object", str: "a text", int: "a number", float: "a number"}
    return kinds.get(type(value), type(value).__name__)


def brief(value: Any) -> str:
    """A value for a message, short (a number of 400 digits is one, too)."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    text = repr(value[:60] if isinstance(value, (str, list)) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
