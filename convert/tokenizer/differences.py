"""Where two tokenizers differ, whatever files they come from: vocabulary, merges, added and special tokens, templates.

What a side has no word for is told and does not weigh (GGUF keeps no white-space flags of added tokens, unless this
product wrote them).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.differences import Difference
from convert.errors import ConvertError
from convert.tokenizer.tokenizer import BYTE_LEVEL, ROLES, UNIGRAM, UNUSED, Tokenizer

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint

#: Differing tokens, merges, added tokens … that are shown.
_SHOWN = 4
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


def tokenizer_differences(a: Checkpoint, b: Checkpoint) -> list[Difference]:
    """Where the tokenizers of two checkpoints differ, what weighs first; empty where neither has one."""
    found: list[Tokenizer | None] = []
    said: list[str | None] = []
    for side in (a, b):
        try:
            found.append(tokenizer_of(side))
            said.append(None if found[-1] is None else found[-1].kind)
        except ConvertError as error:
            found.append(None)
            said.append(error.problems[0].message)
    one, other = found
    if one is None or other is None:
        if said == [None, None]:
            return []
        return [Difference("tokenizer", said[0], said[1], False, "only where both sides have one are they compared")]
    return sorted(compare(one, other), key=lambda d: not d.weighs)


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer inside or beside a checkpoint, or None.

    Raises:
        ConvertError: There is one, and it cannot be read.
    """
    from convert.tokenizer.from_gguf import read_gguf
    from convert.tokenizer.source import find, read_tokenizer

    if checkpoint.format != "gguf":
        return read_tokenizer(checkpoint.folder) if find(checkpoint.folder) else None
    metadata = checkpoint.metadata
    if metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return None
    return read_gguf(metadata)


def compare(a: Tokenizer, b: Tokenizer) -> Iterator[Difference]:
    """Differences of two tokenizers."""
    if a.kind != b.kind:
        yield Difference("kind", a.kind, b.kind)
        return
    yield from _vocabulary(a, b)
    yield from _merges(a, b)
    yield from _added(a, b)
    yield from _special(a, b)
    yield from _templates(a, b)
    yield from _rules(a, b)


def _vocabulary(a: Tokenizer, b: Tokenizer) -> Iterator[Difference]:
    one, other = _used(a), _used(b)
    if one != other:
        both = min(len(one), len(other))
        wrong = [i for i in range(both) if one[i] != other[i]]
        if len(one) != len(other):
            yield Difference("vocabulary.size", len(one), len(other))
        if wrong:
            shown = wrong[:_SHOWN]
            note = f"{len(wrong):,} ids have other texts, the first {wrong[0]}"
            yield Difference("vocabulary.tokens", {i: one[i] for i in shown}, {i: other[i] for i in shown}, True, note)
    types = [i for i in range(min(len(one), len(other))) if one[i] == other[i] and a.types[i] != b.types[i]]
    if types:
        shown = types[:_SHOWN]
        note = f"{len(types):,} ids have another type, the first {types[0]} ({one[types[0]]!r})"
        yield Difference("vocabulary.types", {i: a.types[i] for i in shown}, {i: b.types[i] for i in shown}, True, note)
    if a.kind == UNIGRAM and a.scores is not None and b.scores is not None and len(one) == len(other):
        x, y = (np.asarray(t.scores[: len(one)], np.float32) for t in (a, b))  # type: ignore[index]
        count = int(np.count_nonzero(x != y))
        if count:
            at = int((x != y).argmax())
            yield Difference("vocabulary.scores", float(x[at]), float(y[at]), True, f"{count:,} differ, the first {at}")


def _used(tokenizer: Tokenizer) -> list[str]:
    """Tokens without the padding at the end."""
    end = len(tokenizer.tokens)
    while end and tokenizer.types[end - 1] == UNUSED:
        end -= 1
    return tokenizer.tokens[:end]


def _merges(a: Tokenizer, b: Tokenizer) -> Iterator[Difference]:
    from convert.tokenizer.to_hf import merges_of

    if a.kind == UNIGRAM:
        return
    if a.scores is not None and b.scores is not None and a.scores == b.scores and a.tokens == b.tokens:
        return
    one, other = merges_of(a), merges_of(b)
    if one == other:
        return
    both = min(len(one), len(other))
    at = next((i for i in range(both) if one[i] != other[i]), both)
    apart = len(set(one) ^ set(other))
    note = f"rank {at} is the first that differs; {apart:,} merges are on one side only"
    yield Difference("merges", _at(one, at), _at(other, at), True, note)


def _at(merges: Sequence[tuple[str, str]], index: int) -> str | None:
    return " ".join(merges[index]) if index < len(merges) else None


def _added(a: Tokenizer, b: Tokenizer) -> Iterator[Difference]:
    one, other = ({t.id: t for t in side.added} for side in (a, b))
    for sign, mine, theirs in (("A", one, other), ("B", other, one)):
        alone = [t for i, t in mine.items() if i not in theirs]
        if alone:
            texts = [t.content for t in alone[:_SHOWN]]
            shown: tuple[Any, Any] = (texts, None) if sign == "A" else (None, texts)
            yield Difference("added_tokens", *shown, True, f"{len(alone):,} are added tokens in {sign} only")
    for flag in _FLAGS:
        ids = [i for i in one if i in other and getattr(one[i], flag) != getattr(other[i], flag)]
        if not ids:
            continue
        x, y = ({t[i].content: getattr(t[i], flag) for i in ids[:_SHOWN]} for t in (one, other))
        silent = [n for n, side in (("A", a), ("B", b)) if flag != "special" and not side.says_flags]
        note = f"{len(ids):,} tokens" + (f"; {' and '.join(silent)} cannot say it" if silent else "")
        yield Difference(f"added_tokens.{flag}", x, y, not silent, note)


def _special(a: Tokenizer, b: Tokenizer) -> Iterator[Difference]:
    for role in ROLES:
        x, y = a.special.get(role), b.special.get(role)
        if x != y:
            both = x is not None and y is not None
            note = None if both else "one side names none"
            yield Difference(f"special.{role}", _named(a, x), _named(b, y), both, note)
    for key in ("add_bos", "add_eos"):
        x, y = getattr(a, key), getattr(b, key)
        if bool(x) != bool(y):
            yield Difference(key, x, y, x is not None and y is not None)


def _named(tokenizer: Tokenizer, index: int | None) -> str | None:
    if index is None:
        return None
    return f"{index} {tokenizer.tokens[index]!r}" if index < len(tokenizer.tokens) else str(index)


def _templates(a: Tokenizer, b: Tokenizer) -> Iterator[Difference]:
    for name in dict.fromkeys((*a.chat_templates, *b.chat_templates)):
        x, y = a.chat_templates.get(name), b.chat_templates.get(name)
        if x == y:
            continue
        key = "chat_template" if name == "default" else f"chat_template.{name}"
        if x is None or y is None:
            yield Difference(key, _length(x), _length(y), True, "on one side only")
        elif x.rstrip() == y.rstrip():
            yield Difference(key, _length(x), _length(y), False, "white space at the end only")
        else:
            at = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
            yield Difference(key, x[at : at + 40], y[at : at + 40], True, f"from character {at} on")


def _length(text: str | None) -> str | None:
    return None if text is None else f"{len(text):,} characters"


def _rules(a: Tokenizer, b: Tokenizer) -> Iterator[Difference]:
    names: list[tuple[str, Callable[[Tokenizer], Any]]] = [("normalizer", lambda t: t.normalizer)]
    if a.kind == BYTE_LEVEL:
        if a.pre is None and b.pre is None:
            names.append(("pre_tokenizer", lambda t: t.pre_tokenizer))
        else:
            names.append(("pre_tokenizer", lambda t: t.pre.name if t.pre else "rules that are not in the table"))
        if not (a.pre and a.pre is b.pre):  # the table knows when it makes no difference
            names.append(("ignore_merges", lambda t: t.ignore_merges))
    else:
        names += [(k, lambda t, k=k: getattr(t, k)) for k in ("space_prefix", "merge_spaces", "byte_fallback")]  # type: ignore[misc]
        names.append(("charsmap", lambda t: hashlib.sha256(t.charsmap).hexdigest()[:12] if t.charsmap else None))
    for key, value in names:
        x, y = value(a), value(b)
        if x != y:
            yield Difference(key, x, y)
