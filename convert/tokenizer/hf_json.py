"""``tokenizer.json``, the one-file format of Hugging Face's ``tokenizers``.

It reads what decides ids: the model, the added tokens, the normaliser, the splitting rules and the template.
What a GGUF file cannot express becomes a reason in ``Tokenizer.blockers``, not a guess.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from convert.errors import ConvertError, Problem
from convert.tokenizer import hf_checks, pretokenizers
from convert.tokenizer import merges as bpe
from convert.tokenizer.hf_files import AddedToken
from convert.tokenizer.tokenizer import (
    ADDED_SCORE,
    BYTE,
    BYTE_LEVEL,
    NORMAL,
    SENTENCEPIECE,
    SPACE,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    WITHOUT,
    Tokenizer,
    padding_token,
)

_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


def parse(tree: Mapping[str, Any], *, origin: str, checked: bool = False) -> Tokenizer:
    """The tokenizer in the parsed content of a ``tokenizer.json``, whose list of merges is used up.

    Args:
        tree: The content.
        origin: Name of the file, for messages.
        checked: :func:`convert.tokenizer.hf_checks.damage` found nothing in it already.

    Raises:
        ConvertError: The model is of a kind no layout here can hold (WordPiece, WordLevel), or damaged.
    """
    try:
        return _parse(tree, origin, checked)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise ConvertError(_damaged(origin, f"a part of it is not as it should be ({error!r})")) from error


def _parse(tree: Mapping[str, Any], origin: str, checked: bool) -> Tokenizer:
    if not checked and (wrong := hf_checks.damage(tree)):
        raise ConvertError([_damaged(origin, what) for what in wrong])
    model = tree["model"]
    kind = _kind(model, tree)
    if kind is None:
        raise ConvertError(
            Problem(
                "tokenizer_kind",
                f"{origin} holds a tokenizer of type {model.get('type')!r} that works neither on bytes nor with "
                "byte fallback.",
                file=origin,
                found=model.get("type"),
                wanted=", ".join((BYTE_LEVEL, SENTENCEPIECE, UNIGRAM)),
                hint=WITHOUT,
            )
        )
    added = [_added(entry) for entry in tree.get("added_tokens") or ()]
    tokens, types, scores = _tokens(model, added, kind)
    tokenizer = Tokenizer(kind, origin, tokens, types, scores=scores, pre_tokenizer=tree.get("pre_tokenizer"))
    tokenizer.ignore_merges = bool(model.get("ignore_merges"))
    tokenizer.byte_fallback = bool(model.get("byte_fallback"))
    tokenizer.add(added)
    _unknown(tokenizer, model)
    _normalizer(tokenizer, tree.get("normalizer"))
    if kind != UNIGRAM:
        tokenizer.merges = _merges(model.get("merges") or [], tokens, origin)
        affixes = [key for key in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
        tokenizer.blockers += [f"its pieces carry a {key}, which llama.cpp does not know" for key in affixes]
    if kind == BYTE_LEVEL:
        recognise(tokenizer)
    else:
        _sentencepiece_split(tokenizer, tree.get("pre_tokenizer"))
    _template(tokenizer, tree.get("post_processor"))
    return tokenizer


def _kind(model: Mapping[str, Any], tree: Mapping[str, Any]) -> str | None:
    kind = model.get("type")
    if kind is None:  # written before the field existed: Unigram lists pieces, BPE has merges
        kind = "Unigram" if isinstance(model["vocab"], list) else "BPE" if "merges" in model else None
    if kind == "Unigram":
        return UNIGRAM
    if kind != "BPE":
        return None
    if any(node.get("type") == "ByteLevel" for node in pretokenizers.flatten(tree.get("pre_tokenizer"))):
        return BYTE_LEVEL
    if any(node.get("type") == "ByteLevel" for node in _flat(tree.get("decoder"), "decoders")):
        return BYTE_LEVEL
    return SENTENCEPIECE if model.get("byte_fallback") else None


def _damaged(origin: str, what: str) -> Problem:
    return Problem("tokenizer_damaged", f"{origin} cannot be used: {what}.", file=origin, hint=WITHOUT)


def _flat(tree: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    if not tree:
        return []
    return [leaf for node in tree[key] for leaf in _flat(node, key)] if key in tree else [tree]


def _added(entry: Mapping[str, Any]) -> AddedToken:
    flags = {key: bool(entry.get(key, False)) for key in ("special", "normalized", "lstrip", "rstrip", "single_word")}
    return AddedToken(int(entry["id"]), str(entry["content"]), **flags)


def _merges(entries: list[Any], tokens: list[str], origin: str) -> list[tuple[str, str]]:
    """Merges as pairs of the token objects themselves.

    A large vocabulary has 280,000 merges; own copies of their pieces would cost more than all else. ``entries`` is
    used up on the way.
    """
    own = {text: text for text in tokens}
    merges = []
    entries.reverse()
    while entries:
        entry = entries.pop()
        parts = entry.split(" ") if isinstance(entry, str) else entry
        if len(parts) != 2 or parts[0] not in own or parts[1] not in own or parts[0] + parts[1] not in own:
            raise ConvertError(_damaged(origin, hf_checks.merge_damage([entry], own) or ""))
        merges.append((own[parts[0]], own[parts[1]]))
    return merges


def _tokens(
    model: Mapping[str, Any], added: list[AddedToken], kind: str
) -> tuple[list[str], list[int], list[float] | None]:
    """Texts and types by id (ids nobody uses are padding), and Unigram's scores."""
    vocab = model["vocab"]
    by_id = dict(enumerate(piece for piece, _ in vocab)) if kind == UNIGRAM else {i: t for t, i in vocab.items()}
    size = max([*by_id, *(token.id for token in added)]) + 1
    tokens, types = [], []
    for index in range(size):
        text = by_id.get(index)
        tokens.append(padding_token(index) if text is None else text)
        types.append(UNUSED if text is None else BYTE if kind != BYTE_LEVEL and _is_byte(text) else NORMAL)
    if kind != UNIGRAM:
        return tokens, types, None
    return tokens, types, [float(score) for _, score in vocab] + [ADDED_SCORE] * (size - len(vocab))


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _unknown(tokenizer: Tokenizer, model: Mapping[str, Any]) -> None:
    index = model.get("unk_id")
    if index is None and model.get("unk_token"):
        index = tokenizer.id_of(model["unk_token"])
    if index is None:
        return
    tokenizer.special["unk"] = int(index)
    if tokenizer.kind != BYTE_LEVEL:
        tokenizer.types[int(index)] = UNKNOWN


def recognise(tokenizer: Tokenizer) -> None:
    """Find the row of the table whose rules a byte-level tokenizer has; ``pre`` stays None when there is none."""
    for flag in (tokenizer.ignore_merges, not tokenizer.ignore_merges):
        row = pretokenizers.recognise(tokenizer.pre_tokenizer, normalizer=tokenizer.normalizer, ignore_merges=flag)
        if row is None:
            continue
        if flag == tokenizer.ignore_merges or _flag_is_moot(tokenizer):
            tokenizer.pre = row
            return


def _flag_is_moot(tokenizer: Tokenizer) -> bool:
    normal = [text for text, kind in zip(tokenizer.tokens, tokenizer.types, strict=True) if kind == NORMAL]
    return bpe.reach(tokenizer.merges, normal)


def _normalizer(tokenizer: Tokenizer, tree: Mapping[str, Any] | None) -> None:
    tokenizer.space_prefix = False
    for node in _flat(tree, "normalizers"):
        kind, pattern = node.get("type"), node.get("pattern") or {}
        if kind in _FORMS:
            tokenizer.normalizer = kind
            tokenizer.caveats.append(f"The tokenizer brings text to Unicode form {kind} first; llama.cpp does not.")
        elif tokenizer.kind == BYTE_LEVEL:
            tokenizer.blockers.append(f"it normalises text by {kind}, which llama.cpp cannot do")
        elif kind == "Precompiled":
            _charsmap(tokenizer, node.get("precompiled_charsmap") or "")
        elif kind == "Prepend" and node.get("prepend") == SPACE:
            tokenizer.space_prefix = True
        elif kind == "Replace" and pattern.get("Regex") == " {2,}":
            tokenizer.merge_spaces = True
        elif kind == "Replace" and pattern.get("String") == " " and node.get("content") == SPACE:
            continue  # a space is written ▁ in every model of these kinds
        elif kind == "Strip" and tokenizer.kind == UNIGRAM:
            continue
        else:
            tokenizer.blockers.append(f"it normalises text by {kind}, which llama.cpp cannot do")


def _charsmap(tokenizer: Tokenizer, text: str) -> None:
    try:
        tokenizer.charsmap = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ConvertError(_damaged(tokenizer.origin, "its precompiled_charsmap is not base64")) from error


def _sentencepiece_split(tokenizer: Tokenizer, tree: Mapping[str, Any] | None) -> None:
    nodes = pretokenizers.flatten(tree)
    escaped = False
    for node in nodes:
        kind, pattern = node.get("type"), node.get("pattern") or {}
        if kind == "Metaspace" and node.get("replacement", SPACE) == SPACE:
            scheme = node.get("prepend_scheme", "always" if node.get("add_prefix_space", True) else "never")
            tokenizer.space_prefix = tokenizer.space_prefix or scheme != "never"
            escaped = True
            if scheme != "never":
                tokenizer.caveats.append(
                    "Text that begins with a space gets one more token in llama.cpp: the tokenizer puts no second "
                    "space before it (Metaspace)."
                )
            if node.get("split", True) and tokenizer.kind == SENTENCEPIECE:
                _words_only(tokenizer)
        elif kind == "Split" and pattern.get("String") == " " and not escaped:
            continue  # spaces are ▁ by then: it never matches
        elif kind == "WhitespaceSplit" and tokenizer.kind == UNIGRAM:
            tokenizer.merge_spaces = True
        else:
            tokenizer.blockers.append(f"it splits text by {kind}, which llama.cpp's {tokenizer.kind} cannot do")


def _words_only(tokenizer: Tokenizer) -> None:
    """A split at every space is the same as none, unless a token reaches across one."""
    across = [
        text
        for text, kind in zip(tokenizer.tokens, tokenizer.types, strict=True)
        if kind == NORMAL and SPACE in text[1:]
    ]
    if across:
        tokenizer.blockers.append(f"it splits text at every space, yet its tokens reach across spaces ({across[0]!r})")


def _template(tokenizer: Tokenizer, tree: Mapping[str, Any] | None) -> None:
    """add_bos, add_eos and the tokens they mean, from the template for a single sequence."""
    for node in _flat(tree, "processors"):
        if node.get("type") in ("BertProcessing", "RobertaProcessing"):
            tokenizer.add_bos = tokenizer.add_eos = True
            tokenizer.special.setdefault("bos", int(node["cls"][1]))
            tokenizer.special.setdefault("eos", int(node["sep"][1]))
        if node.get("type") != "TemplateProcessing":
            continue
        before: list[str] = []
        after: list[str] = []
        seen = False
        for piece in node.get("single", ()):
            if "Sequence" in piece:
                seen = True
            elif "SpecialToken" in piece:
                (after if seen else before).append(piece["SpecialToken"]["id"])
        tokenizer.add_bos, tokenizer.add_eos = bool(before), bool(after)
        for role, texts in (("bos", before), ("eos", after)):
            index = tokenizer.id_of(texts[0]) if texts else None
            if index is not None:
                tokenizer.special.setdefault(role, index)
        if len(before) > 1 or len(after) > 1:
            tokenizer.blockers.append(f"its template adds {len(before)} tokens before and {len(after)} after the text")
