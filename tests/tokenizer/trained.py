"""Small tokenizers, really trained on the multilingual text, one builder per kind."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

BEGIN, END = "<|begin|>", "<|end|>"


def byte_level(
    text: str, *, split: bool = True, steps: list[Any] | None = None, size: int = 600, bos: bool = False, **model: Any
) -> Tokenizer:
    """Byte-level BPE; ids 0 and 1 are the special tokens.

    Args:
        text: What it is trained on.
        split: With ``ByteLevel``'s own rule.
        steps: Splitting steps before ``ByteLevel`` (which then has no rule of its own unless ``split``).
        size: Tokens.
        bos: With a template that adds the first special token.
        model: Arguments of the BPE model.
    """
    tokenizer = Tokenizer(models.BPE(**model))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BEGIN, END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, 0)]
        )
    return tokenizer


def byte_fallback(text: str, *, style: str, size: int = 900) -> Tokenizer:
    """SentencePiece-style BPE with byte fallback as ``tokenizers`` trains it.

    Args:
        text: What it is trained on.
        style: ``metaspace`` (a splitting step) or ``prepend`` (a normaliser, as Llama 2 has it) or ``bare`` (no space
            in front, as Gemma has it).
        size: Tokens.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    if style == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    elif style == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    else:
        tokenizer.normalizer = replace
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([] if style == "bare" else [decoders.Strip(" ", 1, 0)]))
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>", *bytes_], limit_alphabet=300, show_progress=False
    )
    # Words as SentencePiece cuts them: merges never reach across a space, except in "bare", which learns them too.
    tokenizer.train_from_iterator([word for line in text.splitlines() for word in _words(line, style)], trainer)
    tree = json.loads(tokenizer.to_str())
    tree["added_tokens"] = tree["added_tokens"][:3]  # byte tokens are not matched in text
    return Tokenizer.from_str(json.dumps(tree))


def _words(line: str, style: str) -> list[str]:
    return [line] if style == "metaspace" else [" " + word for word in line.split(" ")]


def unigram(text: str, *, size: int = 500) -> Tokenizer:
    """A Unigram tokenizer as ``tokenizers`` trains it, with scores that a float32 holds (as SentencePiece's are)."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    tree = json.loads(tokenizer.to_str())
    tree["model"]["vocab"] = [
        [piece, struct.unpack("f", struct.pack("f", score))[0]] for piece, score in tree["model"]["vocab"]
    ]
    return Tokenizer.from_str(json.dumps(tree))


def sentencepiece_model(text: str, **options: Any) -> bytes:
    """A SentencePiece model file, trained by SentencePiece."""
    sentencepiece = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.split("\n") * 3),
        model_writer=out,
        vocab_size=1000,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return out.getvalue()
