"""What is wrong with the files beside a tokenizer, each with everything at once.

Only what is of the wrong kind is found here; whether the files agree with each other and with the embedding is
:mod:`convert.tokenizer.audit`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from convert.tokenizer.hf_checks import brief, text_damage, what

ROLES = ("bos", "eos", "unk", "sep", "pad", "mask", "cls")
#: Characters of the longest chat template that is believed; published ones have some 20,000.
_LONGEST = 1 << 20


def config_damage(config: Mapping[str, Any]) -> list[str]:
    """Of a ``tokenizer_config.json``, or (which has fewer keys) a ``special_tokens_map.json``."""
    return [*_roles(config), *_decoder(config.get("added_tokens_decoder")), *_template(config.get("chat_template"))]


def _roles(config: Mapping[str, Any]) -> Iterator[str]:
    for role in ROLES:
        text = _text(config, role)
        if text is not None and not isinstance(text, str):
            yield f"its {role}_token is {brief(config[f'{role}_token'])}, not a text"
        elif text is not None:
            yield from text_damage([text])


def used(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts that begin, end and pad, by key, of a sound ``tokenizer_config.json``."""
    texts = {f"{role}_token": _text(config, role) for role in ("bos", "eos", "pad")}
    return {key: text for key, text in texts.items() if text is not None}


def _text(config: Mapping[str, Any], role: str) -> Any:
    value = config.get(f"{role}_token")
    return value.get("content") if isinstance(value, Mapping) else value


def _decoder(tokens: Any) -> Iterator[str]:
    if tokens is None:
        return
    if not isinstance(tokens, Mapping):
        yield f"its added_tokens_decoder is {what(tokens)}, not an object"
        return
    for index, entry in tokens.items():
        if not (index.isascii() and index.isdigit()) or len(index) > 12:
            yield f"its added_tokens_decoder has the key {brief(index)}, which is no id"
            return
        content = entry.get("content") if isinstance(entry, Mapping) else None
        if not isinstance(content, str) or not content:
            yield f"entry {index} of its added_tokens_decoder is {brief(entry)}, which has no text"
            return
        yield from text_damage([content])


def _template(value: Any) -> Iterator[str]:
    if value is None:
        return
    texts = [value]
    if isinstance(value, list):
        texts = [entry.get("template") if isinstance(entry, Mapping) else None for entry in value]
        if not all(isinstance(entry.get("name"), str) for entry in value if isinstance(entry, Mapping)):
            yield "a chat template in it has no name"
    elif isinstance(value, Mapping):
        texts = list(value.values())
    if not all(isinstance(text, str) for text in texts):
        yield f"its chat_template is {brief(value)}, not a text or a list of names and texts"
    elif any(len(text) > _LONGEST for text in texts):
        yield f"its chat template has {max(map(len, texts)):,} characters, which none has"


def template_file_damage(raw: bytes) -> list[str]:
    """Of a ``chat_template.jinja``."""
    try:
        return list(_template(raw.decode()))
    except UnicodeDecodeError as error:
        return [f"it is no UTF-8 (byte {error.start:,})"]


def added_file_damage(tokens: Mapping[str, Any]) -> list[str]:
    """Of an ``added_tokens.json``, an object of texts and ids."""
    for text, index in tokens.items():
        if type(index) is not int or not 0 <= index < 1 << 40:
            return [f"the id of {brief(text)} is {brief(index)}, not a whole number"]
    if len(set(tokens.values())) < len(tokens):
        return ["two texts in it have the same id"]
    return list(text_damage(tokens))


def wrong_ids(config: Mapping[str, Any], rows: int) -> dict[str, str]:
    """Token ids of a ``config.json`` or ``generation_config.json`` that are none, by key, in words.

    Args:
        config: The content.
        rows: Rows of the embedding.
    """
    out: dict[str, str] = {}
    for role in ROLES:
        key = f"{role}_token_id"
        value = config.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if value == [] or any(type(index) is not int for index in ids):
            out[key] = f"its {key} is {brief(value)}, neither a whole number nor a list of them"
        # -1 stood for "none" in the first configs of Llama.
        elif beyond := [index for index in ids if not -1 <= index < rows]:
            out[key] = f"its {key} is {brief(beyond[0])}, the embedding has {rows:,} rows"
    return out
