"""The files of a Hugging Face tokenizer, built from plain values.

It knows how ``tokenizer.json``, ``tokenizer_config.json`` and the chat template file are written, not
where the tokens come from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in the text before anything is split.

    Attributes:
        id: Its row in the embedding.
        content: Its text as a user writes it.
        special: Hidden when decoding with ``skip_special_tokens``, and not matched in untrusted text.
        normalized: Matched in the normalised text rather than in the text as given.
        lstrip: Takes the white space to its left with it.
        rstrip: Takes the white space to its right with it.
        single_word: Matches only whole words.
    """

    id: int
    content: str
    special: bool
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    def as_json(self) -> dict[str, Any]:
        """The entry of ``tokenizer.json``'s ``added_tokens``."""
        return {"id": self.id, **self.without_id()}

    def without_id(self) -> dict[str, Any]:
        """The value in ``tokenizer_config.json``'s ``added_tokens_decoder``, which is keyed by id."""
        return {
            "content": self.content,
            "single_word": self.single_word,
            "lstrip": self.lstrip,
            "rstrip": self.rstrip,
            "normalized": self.normalized,
            "special": self.special,
        }


@dataclass(slots=True)
class TokenizerFiles:
    """Everything that goes into the Hugging Face files of one tokenizer.

    Attributes:
        model: The ``model`` section.
        added_tokens: In id order.
        normalizer, pre_tokenizer, decoder: Those sections.
        post_steps: Steps that come before the bos/eos template in the post-processor.
        special: ``bos``, ``eos``, ``unk``, ``pad``, ``sep``, ``mask`` to (id, text).
        add_bos, add_eos: Whether encoding adds them.
        chat_templates: Name to Jinja source; the plain one is called ``default``.
        max_length: The context length in tokens, or None.
        config_extra: Further keys of ``tokenizer_config.json``.
    """

    model: dict[str, Any]
    added_tokens: list[AddedToken]
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    post_steps: list[dict[str, Any]] = field(default_factory=list)
    special: dict[str, tuple[int, str]] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    chat_templates: dict[str, str] = field(default_factory=dict)
    max_length: int | None = None
    config_extra: dict[str, Any] = field(default_factory=dict)

    def files(self) -> dict[str, bytes]:
        """File name to content."""
        out = {
            "tokenizer.json": _dump_parts(self._tokenizer_json()),
            "tokenizer_config.json": _dump(self._tokenizer_config()),
            "special_tokens_map.json": _dump({f"{role}_token": text for role, (_, text) in self.special.items()}),
        }
        # transformers reads the others from tokenizer_config.json only where this file does not exist.
        if list(self.chat_templates) == ["default"]:
            out["chat_template.jinja"] = self.chat_templates["default"].encode()
        return out

    def _tokenizer_json(self) -> dict[str, Any]:
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [token.as_json() for token in self.added_tokens],
            "normalizer": self.normalizer,
            "pre_tokenizer": self.pre_tokenizer,
            "post_processor": self._post_processor(),
            "decoder": self.decoder,
            "model": self.model,
        }

    def _post_processor(self) -> dict[str, Any] | None:
        steps = list(self.post_steps)
        wrap = [role for role, wanted in (("bos", self.add_bos), ("eos", self.add_eos)) if wanted]
        wrap = [role for role in wrap if role in self.special]
        if wrap:
            steps.append(_template({role: self.special[role] for role in wrap}))
        if not steps:
            return None
        return steps[0] if len(steps) == 1 else {"type": "Sequence", "processors": steps}

    def _tokenizer_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "add_bos_token": self.add_bos,
            "add_eos_token": self.add_eos,
            "added_tokens_decoder": {str(token.id): token.without_id() for token in self.added_tokens},
        }
        config |= {f"{role}_token": text for role, (_, text) in self.special.items()}
        if list(self.chat_templates) == ["default"]:
            config["chat_template"] = self.chat_templates["default"]
        elif self.chat_templates:
            config["chat_template"] = [
                {"name": name, "template": source} for name, source in self.chat_templates.items()
            ]
        config["clean_up_tokenization_spaces"] = False
        if self.max_length is not None:
            config["model_max_length"] = self.max_length
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        return config | self.config_extra


def _template(special: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
    """A ``TemplateProcessing`` step that puts bos before and eos after every sequence."""

    def wrapped(sequence: str, type_id: int) -> list[dict[str, Any]]:
        def piece(role: str) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": special[role][1], "type_id": type_id}}] if role in special else []

        return [*piece("bos"), {"Sequence": {"id": sequence, "type_id": type_id}}, *piece("eos")]

    return {
        "type": "TemplateProcessing",
        "single": wrapped("A", 0),
        "pair": wrapped("A", 0) + wrapped("B", 1),
        "special_tokens": {text: {"id": text, "ids": [i], "tokens": [text]} for i, text in special.values()},
    }


def merge_lines(pairs: Sequence[tuple[str, str]]) -> list[Any]:
    """Merges as every version of ``tokenizers`` reads them: ``"a b"``, or pairs when a piece holds a space."""
    if any(" " in left or " " in right for left, right in pairs):
        return [list(pair) for pair in pairs]
    return [f"{left} {right}" for left, right in pairs]


def _dump_parts(tree: dict[str, Any]) -> bytes:
    """A ``tokenizer.json``, encoded part by part: at once, a large vocabulary takes ten times its size."""
    out = bytearray(b"{")
    for key, value in tree.items():
        out += (b"," if len(out) > 1 else b"") + json.dumps(key).encode() + b":"
        if key == "model":
            parts = [json.dumps(name).encode() + b":" + _dump(part, None).rstrip() for name, part in value.items()]
            out += b"{" + b",".join(parts) + b"}"
        else:
            out += _dump(value, None).rstrip()
    return bytes(out + b"}\n")


def _dump(value: Any, indent: int | None = 2) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=indent) + "\n").encode()
