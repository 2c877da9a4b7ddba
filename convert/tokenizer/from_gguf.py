"""The tokenizer of a GGUF file as Hugging Face files.

It reads the ``tokenizer.*`` keys of a header (as plain Python values). It reads no file, writes none, and knows
nothing of weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from convert.errors import ConvertError, Problem
from convert.tokenizer import pretokenizers
from convert.tokenizer.hf_files import AddedToken
from convert.tokenizer.to_hf import hf_files_from
from convert.tokenizer.tokenizer import (
    BYTE_LEVEL,
    CONTROL,
    NORMAL,
    SENTENCEPIECE,
    SPACE,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WITHOUT,
    Tokenizer,
    duplicate_token,
    padding_token,
)

#: Role to the spelling in GGUF keys; two of them are misspelt or long in the format itself.
ROLE_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}

#: The keys of all ids: of the roles, and two further ends.
ID_KEYS = tuple(f"tokenizer.ggml.{key}_token_id" for key in (*ROLE_KEYS.values(), "eot", "eom"))
#: No id: llama.cpp takes -1 for none, which a file holds as all bits of 32.
NO_IDS = (None, -1, 0xFFFFFFFF)

#: A key of ours: the Unicode form a tokenizer applies first, where the rules' name does not imply it ('' for none).
NORMALIZER_KEY = "convert.tokenizer_normalizer"
#: Keys of ours: ids of the added tokens that carry each flag; GGUF's own keys have no word for them. A file that has
#: any of these has been told of all added tokens' flags.
FLAGS_KEY = "convert.tokenizer_added"
FLAGS = ("normalized", "lstrip", "rstrip", "single_word")

#: ``tokenizer.ggml.model`` to the kind, with llama.cpp's default for add_bos, add_eos and the unknown token.
_MODELS = {
    "gpt2": (BYTE_LEVEL, None, False, None),
    "llama": (SENTENCEPIECE, True, False, 0),
    "t5": (UNIGRAM, False, True, 2),
    "gemma4": (SENTENCEPIECE, True, False, None),
}


def hf_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Build the Hugging Face tokenizer files of a GGUF file.

    Args:
        metadata: Every key of the header with its value; long arrays may be lazy sequences.

    Returns:
        File name to content: ``tokenizer.json``, ``tokenizer_config.json``, ``special_tokens_map.json`` and,
        when the file has a chat template, ``chat_template.jinja``.

    Raises:
        ConvertError: The file has no tokenizer, one of a kind that cannot be rebuilt, or a damaged one.
            Weights are convertible all the same; whether to go on without is the caller's decision.
    """
    return hf_files_from(read_gguf(metadata))


def read_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in a GGUF header.

    Args:
        metadata: Every key of the header with its value; long arrays may be lazy sequences.

    Raises:
        ConvertError: As :func:`hf_files`.
    """
    model = metadata.get("tokenizer.ggml.model")
    model = model if isinstance(model, str) else None if model is None else repr(model)[:60]
    if model not in _MODELS:
        raise ConvertError(_unsupported(model))
    try:
        return _read(metadata, *_MODELS[model])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConvertError(_damaged(f"a key of it is not as it should be ({error!r})")) from error


def _damaged(what: str, found: Any = None, wanted: Any = None) -> Problem:
    message = f"The tokenizer of the GGUF file cannot be used: {what}."
    return Problem("tokenizer_damaged", message, found=found, wanted=wanted, hint=WITHOUT)


def _read(
    metadata: Mapping[str, Any], kind: str, add_bos: bool | None, add_eos: bool, unknown: int | None
) -> Tokenizer:
    tokens, types = _token_list(metadata)
    tokenizer = Tokenizer(kind, "the GGUF file", tokens, types)
    special = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}
    tokenizer.added = [
        AddedToken(index, tokens[index], special[number])
        for index, number in enumerate(types)
        # A user-defined run of spaces written as ▁▁ (llama.cpp's converter) is never found in text; it is merged.
        if number in special and not (number == USER_DEFINED and kind == SENTENCEPIECE and SPACE in tokens[index])
    ]
    _flags(tokenizer, metadata)
    _special(tokenizer, metadata, unknown)
    if kind == BYTE_LEVEL:
        _byte_level(tokenizer, metadata)
        add_bos = bool(tokenizer.pre and tokenizer.pre.add_bos)
    else:
        _scored(tokenizer, metadata)
    if NORMALIZER_KEY in metadata:
        tokenizer.normalizer = str(metadata[NORMALIZER_KEY]) or None
    tokenizer.add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    tokenizer.add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", add_eos))
    return tokenizer


def _flags(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """How added tokens treat what is around them, where this product wrote the file."""
    held = {flag: metadata.get(f"{FLAGS_KEY}.{flag}") for flag in FLAGS}
    tokenizer.says_flags = any(ids is not None for ids in held.values())
    if tokenizer.says_flags:
        normalized, lstrip, rstrip, single = ({int(index) for index in held[flag] or ()} for flag in FLAGS)
        tokenizer.added = [
            replace(
                token,
                normalized=token.id in normalized,
                lstrip=token.id in lstrip,
                rstrip=token.id in rstrip,
                single_word=token.id in single,
            )
            for token in tokenizer.added
        ]


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int | list[int]]:
    """The ids a ``generation_config.json`` needs: ``bos_token_id``, ``eos_token_id``, ``pad_token_id``.

    ``eos_token_id`` is a list when the file names several ends (end of sequence, of turn, of message; or the
    full list that this product writes as ``convert.eos_token_ids``). A role the file does not name is absent.
    """
    out: dict[str, int | list[int]] = {}
    for role in ("bos", "pad"):
        value = metadata.get(f"tokenizer.ggml.{ROLE_KEYS[role]}_token_id")
        if value not in NO_IDS:
            out[f"{role}_token_id"] = int(value)  # type: ignore[arg-type]
    ends = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    ends = [value for value in ends if value not in NO_IDS]
    ends += list(metadata.get("convert.eos_token_ids", ()))
    unique = list(dict.fromkeys(int(value) for value in ends if value is not None))
    if unique:
        out["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return out


def _unsupported(model: Any) -> Problem:
    if model in (None, "none", "no_vocab"):
        return Problem(
            "tokenizer_missing",
            "The GGUF file holds no tokenizer.",
            found=model,
            wanted=f"tokenizer.ggml.model of {', '.join(_MODELS)}",
            hint=WITHOUT,
        )
    return Problem(
        "tokenizer_kind",
        f"The tokenizer of this GGUF file is of the kind {model!r}, which is not rebuilt for Hugging Face.",
        found=model,
        wanted=", ".join(_MODELS),
        hint=WITHOUT,
    )


def _byte_level(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    name = metadata.get("tokenizer.ggml.pre") or "default"
    tokenizer.pre = pretokenizers.by_name(name)
    if tokenizer.pre is None:
        raise ConvertError(
            Problem(
                "pre_tokenizer",
                f"The GGUF file says its text is split by the rules called {name!r}, which are not in the table.",
                found=name,
                wanted=", ".join(pretokenizers.names()),
                hint=WITHOUT,
            )
        )
    if "tokenizer.ggml.merges" not in metadata:
        raise ConvertError(_damaged("it has byte-level BPE tokens but no merges"))
    tokenizer.normalizer = tokenizer.pre.normalizer
    tokenizer.ignore_merges = tokenizer.pre.ignore_merges
    tokenizer.merges = _merges(metadata, tokenizer.tokens)


def _merges(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Merges as pairs of the token objects themselves (copies of 280,000 pairs would cost more than all else)."""
    own = {text: text for text in tokens}
    _want_utf8("merges", metadata["tokenizer.ggml.merges"])
    merges = []
    for line in metadata["tokenizer.ggml.merges"]:
        cut = line.find(" ", 1)  # as llama.cpp splits it: a piece may begin with a space
        if cut < 0:
            raise ConvertError(_damaged("a merge is not two pieces with a space between", line))
        left, right = line[:cut], line[cut + 1 :]
        merges.append((own.get(left, left), own.get(right, right)))
    return merges


def _scored(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    scores = [float(score) for score in metadata.get("tokenizer.ggml.scores", ())][: len(tokenizer.tokens)]
    if len(scores) < len(tokenizer.tokens):
        raise ConvertError(_damaged("scores are missing", len(scores), len(tokenizer.tokens)))
    tokenizer.scores = scores
    spm = tokenizer.kind == SENTENCEPIECE
    merged = "tokenizer.ggml.merges" in metadata  # "gemma4": SentencePiece text with merges; scores mean nothing
    if spm and merged:
        tokenizer.merges, tokenizer.scores = _merges(metadata, tokenizer.tokens), None
    tokenizer.space_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", spm and not merged))
    tokenizer.byte_fallback = spm
    tokenizer.merge_spaces = bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False))
    tokenizer.charsmap = bytes(value & 0xFF for value in metadata.get("tokenizer.ggml.precompiled_charsmap", ()))


def _token_list(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens and their types without the padding that fills the list up to the embedding's rows."""
    tokens = list(metadata.get("tokenizer.ggml.tokens", ()))
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())] or [NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise ConvertError(_damaged("tokens and token types differ in number", len(types), len(tokens)))
    _want_utf8("tokens", tokens)
    while types and types[-1] == UNUSED and tokens[-1] == padding_token(len(tokens) - 1):
        tokens.pop()
        types.pop()
    problem = duplicate_token(tokens)
    if problem:
        raise ConvertError(problem)
    return tokens, types


def _want_utf8(what: str, texts: Sequence[str]) -> None:
    """Bytes that are no UTF-8 came in as surrogates, and no JSON file can hold those."""
    joined = "".join(texts)
    if not joined.isascii() and any(0xD800 <= ord(char) < 0xE000 for char in joined):
        raise ConvertError(_damaged(f"{what} are not UTF-8, which a tokenizer's files must be"))


def _special(tokenizer: Tokenizer, metadata: Mapping[str, Any], unknown: int | None) -> None:
    """Special tokens, chat templates and the context length, alike for every kind."""
    rows = len(metadata["tokenizer.ggml.tokens"])
    for key in ID_KEYS:
        index = metadata.get(key)
        if index not in NO_IDS and (type(index) is not int or not 0 <= index < rows):
            raise ConvertError(
                _damaged(f"{key} is {index!r:.60}, there are {rows:,} tokens", str(index)[:60], f"< {rows}")
            )
    if not isinstance(metadata.get("tokenizer.chat_template", ""), str):
        raise ConvertError(_damaged("its chat template is no text"))
    for role, key in ROLE_KEYS.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id", unknown if role == "unk" else None)
        if index is not None and 0 <= int(index) < len(tokenizer.tokens):
            tokenizer.special[role] = int(index)
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    tokenizer.max_length = None if length is None else int(length)
    if "tokenizer.chat_template" in metadata:
        tokenizer.chat_templates["default"] = str(metadata["tokenizer.chat_template"])
    names = metadata.get("tokenizer.chat_templates")
    for name in names if isinstance(names, Sequence) and not isinstance(names, str) else ():
        source = metadata.get(f"tokenizer.chat_template.{name}")
        if source is not None:
            tokenizer.chat_templates[name] = source
    _want_utf8("chat templates", [str(text) for text in tokenizer.chat_templates.values()])
