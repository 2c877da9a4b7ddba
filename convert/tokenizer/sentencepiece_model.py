"""SentencePiece's ``tokenizer.model``: the few fields of its protobuf that decide ids.

The message is ``ModelProto`` of ``sentencepiece_model.proto``; field numbers below are from that file. No
protobuf library is needed: the wire format is tags, varints and byte runs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from convert.errors import ConvertError, Problem
from convert.tokenizer.hf_files import AddedToken
from convert.tokenizer.tokenizer import (
    CONTROL,
    NORMAL,
    SENTENCEPIECE,
    SPACE,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    WITHOUT,
    Tokenizer,
    duplicate_token,
)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TYPES = {1: UNIGRAM, 2: SENTENCEPIECE}
_ROLES = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}
_BYTE_FALLBACK, _MODEL_TYPE, _SUFFIX = 35, 3, 24
_CHARSMAP, _PREFIX, _EXTRA_SPACES, _ESCAPE = 2, 3, 4, 5


def is_model(raw: bytes) -> bool:
    """Whether ``raw`` starts as a ``ModelProto`` does: with a piece that has a text."""
    try:
        number, wire, value = next(_fields(raw[: 1 << 12], partial=True))
        return number == 1 and wire == _BYTES and any(n == 1 for n, _, _ in _fields(value))
    except (StopIteration, ValueError):
        return False


def parse(raw: bytes, *, origin: str) -> Tokenizer:
    """The tokenizer in a SentencePiece model file.

    Raises:
        ConvertError: The file is damaged, or holds a word or character model.
    """
    tokens: list[str] = []
    types: list[int] = []
    scores: list[float] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for number, wire, value in _fields(raw):
            if wire != _BYTES:
                continue  # as protobuf does with what has another type than the schema's
            if number == 1:
                text, score, kind = _piece(value)
                # A symbol that users defined is matched in the text as it is written, with real spaces.
                tokens.append(text.replace(SPACE, " ") if kind == USER_DEFINED else text)
                scores.append(score)
                types.append(kind)
            elif number == 2:
                trainer |= {n: v for n, w, v in _fields(value) if w == _VARINT}
            elif number == 3:
                normalizer |= {n: v for n, w, v in _fields(value) if w == (_BYTES if n == _CHARSMAP else _VARINT)}
    except (ValueError, UnicodeDecodeError, struct.error) as error:
        raise ConvertError(
            Problem(
                "tokenizer_damaged",
                f"{origin} begins as a SentencePiece model but is damaged: {error}.",
                file=origin,
                hint=f"Fetch it again. {WITHOUT}",
            )
        ) from error
    if wrong := _incomplete(tokens, types):
        raise ConvertError(
            Problem(
                "tokenizer_damaged",
                f"{origin} is a SentencePiece model that SentencePiece itself refuses: {wrong}.",
                file=origin,
                hint=f"Fetch it again. {WITHOUT}",
            )
        )
    kind_name = _TYPES.get(trainer.get(_MODEL_TYPE, 1))
    if kind_name is None:
        raise ConvertError(
            Problem(
                "tokenizer_kind",
                f"{origin} is a SentencePiece model of type {trainer.get(_MODEL_TYPE)} (word or character).",
                file=origin,
                found=trainer.get(_MODEL_TYPE),
                wanted="1 (Unigram) or 2 (BPE)",
                hint=WITHOUT,
            )
        )
    tokenizer = Tokenizer(kind_name, origin, tokens, types, scores=scores)
    special = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}
    tokenizer.added = [AddedToken(i, tokens[i], special[kind]) for i, kind in enumerate(types) if kind in special]
    for role, (number, default) in _ROLES.items():
        index = _signed(trainer.get(number, default))
        if 0 <= index < len(tokens):
            tokenizer.special[role] = index
    _rules(tokenizer, trainer, normalizer)
    return tokenizer


def _incomplete(tokens: list[str], types: list[int]) -> str | None:
    """What ``ModelInterface::InitializePieces`` of ``model_interface.cc`` refuses, in words, or None."""
    if types.count(UNKNOWN) != 1:
        return f"{types.count(UNKNOWN)} of its {len(tokens):,} pieces are of the type for unknown text, not one"
    if len(set(tokens)) < len(tokens):
        problem = duplicate_token(tokens)
        return None if problem is None else f"two of its pieces are {problem.found!r}"
    return None


def _rules(tokenizer: Tokenizer, trainer: dict[int, Any], normalizer: dict[int, Any]) -> None:
    tokenizer.byte_fallback = bool(trainer.get(_BYTE_FALLBACK, 0))
    tokenizer.space_prefix = bool(normalizer.get(_PREFIX, 1))
    tokenizer.merge_spaces = bool(normalizer.get(_EXTRA_SPACES, 1))
    tokenizer.charsmap = bytes(normalizer.get(_CHARSMAP, b""))
    if trainer.get(_SUFFIX):
        tokenizer.blockers.append("it puts spaces at the ends of words (treat_whitespace_as_suffix)")
    if not normalizer.get(_ESCAPE, 1):
        tokenizer.blockers.append("it keeps spaces as they are (escape_whitespaces is off)")


def _piece(raw: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, NORMAL
    for number, wire, value in _fields(raw):
        if number == 1 and wire == _BYTES:
            text = value.decode()
        elif number == 2 and wire == _FIXED32:
            score = struct.unpack("<f", value)[0]
        elif number == 3 and wire == _VARINT:
            kind = value
    return text, score, kind


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(raw) or shift > 63:
            raise ValueError("a number runs past the end")
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7


def _fields(raw: bytes, *, partial: bool = False) -> Iterator[tuple[int, int, Any]]:
    """Field number, wire type and value (int or bytes) of a message.

    Args:
        raw: The message.
        partial: ``raw`` is only the beginning; a field that runs past its end ends the iteration.
    """
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(raw, at)
            yield number, wire, value
            continue
        if wire == _BYTES:
            size, at = _varint(raw, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + size > len(raw):
            if partial:
                return
            raise ValueError(f"a field of {size} bytes at byte {at} runs past the end")
        yield number, wire, raw[at : at + size]
        at += size
