"""A tokenizer as Hugging Face files.

Files that were found are carried unchanged; the others are built: SentencePiece and tiktoken models, and what
a GGUF file holds.
"""

from __future__ import annotations

import base64
from typing import Any

from convert.tokenizer import merges as bpe
from convert.tokenizer.hf_files import TokenizerFiles, merge_lines
from convert.tokenizer.tokenizer import BYTE_LEVEL, NORMAL, SENTENCEPIECE, SPACE, UNUSED, USER_DEFINED, Tokenizer


def hf_files_from(tokenizer: Tokenizer) -> dict[str, bytes]:
    """File name to content: ``tokenizer.json``, ``tokenizer_config.json``, the chat template.

    What was read from Hugging Face files comes back byte for byte.
    """
    if "tokenizer.json" in tokenizer.files:
        return dict(tokenizer.files)
    build = {BYTE_LEVEL: _byte_level, SENTENCEPIECE: _sentencepiece}.get(tokenizer.kind, _unigram)
    files = build(tokenizer)
    files.special = {
        role: (index, tokenizer.tokens[index])
        for role, index in tokenizer.special.items()
        if 0 <= index < len(tokenizer.tokens)
    }
    files.add_eos = bool(tokenizer.add_eos)
    files.chat_templates = tokenizer.chat_templates
    files.max_length = tokenizer.max_length
    return {**tokenizer.files, **files.files()}


def _vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    """Every token but the added ones at the end of the list.

    ``tokenizers`` gives an added token that the vocabulary lacks the next free id, so only an unbroken run at
    the end may be left out (Llama 3 does: 128000 tokens, then 256 added ones).
    """
    end = len(tokenizer.tokens)
    ids = {token.id for token in tokenizer.added}
    while end - 1 in ids:
        end -= 1
    return {text: index for index, text in enumerate(tokenizer.tokens[:end])}


def _bpe(tokenizer: Tokenizer, merges: list[tuple[str, str]], **changed: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": tokenizer.ignore_merges,
        **changed,
        "vocab": _vocabulary(tokenizer),
        "merges": merge_lines(merges),
    }


def _byte_level(tokenizer: Tokenizer) -> TokenizerFiles:
    step = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    pre = tokenizer.pre
    return TokenizerFiles(
        model=_bpe(tokenizer, tokenizer.merges),
        added_tokens=tokenizer.added,
        normalizer={"type": tokenizer.normalizer} if tokenizer.normalizer else None,
        pre_tokenizer=pre.hf_pre_tokenizer() if pre else dict(tokenizer.pre_tokenizer or {}),
        decoder=step,
        post_steps=[step | {"add_prefix_space": False, "trim_offsets": False}],
        add_bos=bool(tokenizer.add_bos),
    )


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _normalizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """SentencePiece's normalisation: its table, its treatment of spaces, and ``▁`` for a space.

    Each stretch of text between special tokens gets one space in front, as in SentencePiece and llama.cpp; a
    ``Metaspace`` step would leave it out where the text begins with a space.
    """
    steps: list[dict[str, Any]] = []
    if tokenizer.normalizer:
        steps.append({"type": tokenizer.normalizer})
    if tokenizer.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(tokenizer.charsmap).decode()})
    if tokenizer.merge_spaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if tokenizer.space_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append(_replace(" ", SPACE))
    return {"type": "Sequence", "normalizers": steps}


def merges_of(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The merges of a SentencePiece model: those it has, or those its scores stand for.

    Control, unknown and byte tokens are never parts, and added ones are taken out of the text before anything is
    merged. User-defined tokens that are not added (a file that keeps their spaces escaped) llama.cpp makes by merging.
    """
    if tokenizer.merges or tokenizer.scores is None:
        return tokenizer.merges
    added = {token.id for token in tokenizer.added}
    usable = [
        index
        for index, kind in enumerate(tokenizer.types)
        if kind in (NORMAL, USER_DEFINED, UNUSED) and index not in added
    ]
    ids = {tokenizer.tokens[index]: index for index in usable}
    made = [index for index in usable if tokenizer.types[index] != UNUSED]
    order = bpe.order_by_score(tokenizer.tokens, tokenizer.scores, made)
    own = tokenizer.tokens  # pairs of the token objects themselves: copies of 500,000 pairs cost 60 MiB
    return [(own[ids[left]], own[ids[right]]) for left, right in bpe.from_order(order, ids)]


def _sentencepiece(tokenizer: Tokenizer) -> TokenizerFiles:
    unknown = tokenizer.special.get("unk")
    decoders = [_replace(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if tokenizer.space_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return TokenizerFiles(
        model=_bpe(
            tokenizer,
            merges_of(tokenizer),
            unk_token=None if unknown is None else tokenizer.tokens[unknown],
            fuse_unk=True,
            byte_fallback=tokenizer.byte_fallback,
        ),
        added_tokens=tokenizer.added,
        normalizer=_normalizer(tokenizer),
        decoder={"type": "Sequence", "decoders": decoders},
        add_bos=tokenizer.add_bos is not False,
    )


def _unigram(tokenizer: Tokenizer) -> TokenizerFiles:
    scores = tokenizer.scores or [0.0] * len(tokenizer.tokens)
    metaspace = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "always" if tokenizer.space_prefix else "never",
        "split": True,
    }
    return TokenizerFiles(
        model={
            "type": "Unigram",
            "unk_id": tokenizer.special.get("unk"),
            "vocab": [[text, score] for text, score in zip(tokenizer.tokens, scores, strict=True)],
            "byte_fallback": tokenizer.byte_fallback,
        },
        added_tokens=tokenizer.added,
        normalizer=_normalizer(tokenizer),
        decoder=metaspace,
        add_bos=bool(tokenizer.add_bos),
    )
