"""The tokenizer of a GGUF file as Hugging Face files.

It reads the ``tokenizer.*`` keys of a header (as plain Python values) and writes ``tokenizer.json``,
``tokenizer_config.json`` and the chat template. It reads no file and knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from convert.errors import ConvertError, Problem
from convert.tokenizer import pretokenizers
from convert.tokenizer.hf_files import AddedToken, TokenizerFiles, merge_lines

#: Token types, ``tokenizer.ggml.token_type`` (llama.h, ``llama_token_type``).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

#: Role to the spelling in GGUF keys; two of them are misspelt or long in the format itself.
ROLE_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}

_WITHOUT = "The weights can be converted without it: --no-tokenizer."


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
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        files = _byte_level(metadata)
    else:
        raise ConvertError(_unsupported(model))
    _common(files, metadata)
    return files.files()


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int | list[int]]:
    """The ids a ``generation_config.json`` needs: ``bos_token_id``, ``eos_token_id``, ``pad_token_id``.

    ``eos_token_id`` is a list when the file names several ends (end of sequence, of turn, of message; or the
    full list that this product writes as ``convert.eos_token_ids``). A role the file does not name is absent.
    """
    out: dict[str, int | list[int]] = {}
    for role in ("bos", "pad"):
        value = metadata.get(f"tokenizer.ggml.{ROLE_KEYS[role]}_token_id")
        if value is not None:
            out[f"{role}_token_id"] = int(value)
    ends = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
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
            wanted="tokenizer.ggml.model of 'gpt2' or 'llama'",
            hint=_WITHOUT,
        )
    return Problem(
        "tokenizer_kind",
        f"The tokenizer of this GGUF file is of the kind {model!r}, which is not rebuilt for Hugging Face.",
        found=model,
        wanted="'gpt2' (byte-level BPE)",
        hint=_WITHOUT,
    )


def _byte_level(metadata: Mapping[str, Any]) -> TokenizerFiles:
    name = metadata.get("tokenizer.ggml.pre") or "default"
    pre = pretokenizers.by_name(name)
    if pre is None:
        raise ConvertError(
            Problem(
                "pre_tokenizer",
                f"The GGUF file says its text is split by the rules called {name!r}, which are not in the table.",
                found=name,
                wanted=", ".join(pretokenizers.names()),
                hint=_WITHOUT,
            )
        )
    if "tokenizer.ggml.merges" not in metadata:
        raise ConvertError(
            Problem("tokenizer_damaged", "The GGUF file has byte-level BPE tokens but no merges.", hint=_WITHOUT)
        )
    tokens, types = token_list(metadata)
    added = added_tokens(tokens, types)
    merges = []
    for line in metadata["tokenizer.ggml.merges"]:
        cut = line.find(" ", 1)  # as llama.cpp splits it: a piece may begin with a space
        merges.append((line[:cut], line[cut + 1 :]))
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre.ignore_merges,
        "vocab": vocabulary(tokens, added),
        "merges": merge_lines(merges),
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return TokenizerFiles(
        model=model,
        added_tokens=added,
        normalizer={"type": pre.normalizer} if pre.normalizer else None,
        pre_tokenizer=pre.hf_pre_tokenizer(),
        decoder=byte_level,
        post_steps=[byte_level | {"add_prefix_space": False, "trim_offsets": False}],
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    )


def token_list(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens and their types without the padding that fills the list up to the embedding's rows.

    Raises:
        ConvertError: Two tokens have the same text, or the lists differ in length.
    """
    tokens = list(metadata.get("tokenizer.ggml.tokens", ()))
    types = list(metadata.get("tokenizer.ggml.token_type", ())) or [NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise ConvertError(
            Problem(
                "tokenizer_damaged",
                f"The GGUF file has {len(tokens):,} tokens and {len(types):,} token types.",
                found=len(types),
                wanted=len(tokens),
                hint=_WITHOUT,
            )
        )
    while types and types[-1] == UNUSED and tokens[-1] == padding_token(len(tokens) - 1):
        tokens.pop()
        types.pop()
    if len(set(tokens)) != len(tokens):
        raise ConvertError(duplicate_tokens(tokens))
    return tokens, types


def padding_token(index: int) -> str:
    """The text of the unused token that fills row ``index`` (llama.cpp's converter writes the same)."""
    return f"[PAD{index}]"


def duplicate_tokens(tokens: Sequence[str]) -> Problem:
    """The finding for a token list that holds one text twice."""
    first: dict[str, int] = {}
    for index, text in enumerate(tokens):
        if text in first:
            return Problem(
                "duplicate_token",
                f"Tokens {first[text]} and {index} have the same text {text!r}; ids would not be unique.",
                found=text,
                wanted="every token text once",
                hint=_WITHOUT,
            )
        first[text] = index
    raise ValueError("no duplicates")


def added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[AddedToken]:
    """The tokens that are matched in the text as a whole: control, unknown (special) and user-defined ones."""
    special = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}
    return [
        AddedToken(index, text, special[kind])
        for index, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in special
    ]


def vocabulary(tokens: Sequence[str], added: Sequence[AddedToken]) -> dict[str, int]:
    """The model's vocabulary: every token but the added ones at the end of the list.

    ``tokenizers`` gives an added token that the vocabulary lacks the next free id, so only an unbroken run at
    the end may be left out (Llama 3 does: 128000 tokens, then 256 added ones).
    """
    end = len(tokens)
    ids = {token.id for token in added}
    while end - 1 in ids:
        end -= 1
    return {text: index for index, text in enumerate(tokens[:end])}


def _common(files: TokenizerFiles, metadata: Mapping[str, Any]) -> None:
    """Special tokens, chat templates and the context length, alike for every kind."""
    tokens = metadata["tokenizer.ggml.tokens"]
    for role, key in ROLE_KEYS.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and 0 <= int(index) < len(tokens):
            files.special[role] = (int(index), tokens[int(index)])
    architecture = metadata.get("general.architecture")
    length = metadata.get(f"{architecture}.context_length")
    files.max_length = None if length is None else int(length)
    if "tokenizer.chat_template" in metadata:
        files.chat_templates["default"] = metadata["tokenizer.chat_template"]
    for name in metadata.get("tokenizer.chat_templates", ()):
        source = metadata.get(f"tokenizer.chat_template.{name}")
        if source is not None:
            files.chat_templates[name] = source
