"""The files beside a tokenizer: ``tokenizer_config.json``, ``special_tokens_map.json``, chat templates.

They say which tokens play a role, whether bos and eos are added, and how a chat is written. They never decide
how text becomes ids, except through the tokens they add.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.errors import ConvertError, Problem
from convert.tokenizer import json_text, sidecar_checks
from convert.tokenizer.hf_files import AddedToken
from convert.tokenizer.json_text import MAX_BYTES
from convert.tokenizer.tokenizer import ROLES, SENTENCEPIECE, Tokenizer

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
#: Classes of transformers that add nothing by themselves: where ``tokenizer.json`` has no template, there is no bos.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
TEMPLATE, TEMPLATE_JSON, TEMPLATES = "chat_template.jinja", "chat_template.json", "additional_chat_templates"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one when there is no such file.

    Raises:
        ConvertError: The file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES >> 20} MB")
        value = json_text.load(path.read_bytes(), constants=True)
    except ValueError as error:
        raise ConvertError(
            Problem("json", f"{path.name} is not JSON: {error}.", file=str(path), hint="Fetch the file again.")
        ) from error
    if not isinstance(value, dict):
        raise ConvertError(
            Problem("json", f"{path.name} holds a {type(value).__name__}.", file=str(path), wanted="an object")
        )
    return value


def damaged(path: Path, what: str) -> Problem:
    """The finding for a file whose content is of the wrong kind."""
    return Problem(
        "tokenizer_damaged",
        f"{path.name} cannot be used: {what}.",
        file=str(path),
        hint="Fetch it again, or move it away: only special tokens and the chat template are there.",
    )


def sound_config(folder: Path) -> dict[str, Any]:
    """The tokenizer's config, where it and the files beside it are of the known form.

    Raises:
        ConvertError: One of the files is not JSON, or not of the known form; everything that is wrong.
    """
    config = read_json(folder / CONFIG)
    wrong = {CONFIG: sidecar_checks.config_damage(config)}
    wrong[MAP] = sidecar_checks.config_damage(read_json(folder / MAP))
    wrong[ADDED] = sidecar_checks.added_file_damage(read_json(folder / ADDED))
    if any(wrong.values()):
        raise ConvertError(damaged(folder / name, what) for name, found in wrong.items() for what in found)
    return config


def apply(tokenizer: Tokenizer, folder: Path) -> None:
    """Complete ``tokenizer`` with what the files in ``folder`` say.

    Raises:
        ConvertError: One of the files is not JSON, or not of the known form.
    """
    config = sound_config(folder)
    try:
        _apply(tokenizer, folder, config)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConvertError(
            Problem(
                "json",
                f"The files beside {tokenizer.origin} are not as they should be ({error!r}).",
                file=str(folder / CONFIG),
                hint="Fetch them again, or move them away: only special tokens and the chat template are there.",
            )
        ) from error


def _apply(tokenizer: Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    _added(tokenizer, config, read_json(folder / ADDED))
    for source in (read_json(folder / MAP), config):
        for role in ROLES:
            text = _text(source.get(f"{role}_token"))
            index = None if text is None else tokenizer.id_of(text)
            if index is not None:
                tokenizer.special[role] = index
    if tokenizer.add_bos is None and "tokenizer.json" in tokenizer.files and config.get("tokenizer_class") in _GENERIC:
        tokenizer.add_bos = False
    if isinstance(config.get("add_bos_token"), bool):
        tokenizer.add_bos = config["add_bos_token"]
    if isinstance(config.get("add_eos_token"), bool):
        tokenizer.add_eos = config["add_eos_token"]
    length = config.get("model_max_length")
    if isinstance(length, int) and length < 1 << 40:  # transformers writes 1e30 for "no limit"
        tokenizer.max_length = length
    tokenizer.chat_templates = chat_templates(folder, config)
    stripping = [token.content for token in tokenizer.added if token.lstrip or token.rstrip]
    if stripping:
        tokenizer.caveats.append(
            f"{len(stripping)} added tokens take white space beside them ({stripping[0]!r}); llama.cpp is not told."
        )


def _text(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _added(tokenizer: Tokenizer, config: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """Tokens that only these files know (a SentencePiece model does not hold what was added later)."""
    known = {token.id for token in tokenizer.added}
    extra: dict[int, AddedToken] = {}
    for content, index in plain.items():
        extra[int(index)] = AddedToken(int(index), content, False)
    for index, entry in (config.get("added_tokens_decoder") or {}).items():
        flags = {key: bool(entry.get(key)) for key in ("special", "normalized", "lstrip", "rstrip", "single_word")}
        extra[int(index)] = AddedToken(int(index), entry["content"], **flags)
    if tokenizer.scores is None or tokenizer.kind != SENTENCEPIECE:
        extra = {index: token for index, token in extra.items() if index not in known}
    tokenizer.add(extra.values())


def read_small(path: Path) -> bytes:
    """A file beside a tokenizer, whole.

    Raises:
        ConvertError: It is larger than any such file; nothing of it was read.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        message = f"{path.name} has {size:,} bytes, which no such file has."
        raise ConvertError(Problem("tokenizer", message, file=str(path), found=size, wanted=f"at most {MAX_BYTES:,}"))
    return path.read_bytes()


def chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Every chat template of a folder, from all its homes; the file wins over the config, as in transformers."""
    out: dict[str, str] = {}
    old = read_json(folder / TEMPLATE_JSON).get("chat_template")
    for value in (old, config.get("chat_template")):
        if isinstance(value, str):
            out["default"] = value
        elif isinstance(value, list):
            out |= {entry["name"]: entry["template"] for entry in value}
        elif isinstance(value, Mapping):
            out |= {str(name): str(source) for name, source in value.items()}
    if (folder / TEMPLATE).is_file():
        out["default"] = _template(folder / TEMPLATE)
    for path in sorted((folder / TEMPLATES).glob("*.jinja")):
        out[path.stem] = _template(path)
    return out


def _template(path: Path) -> str:
    try:
        return read_small(path).decode()
    except UnicodeDecodeError as error:
        raise ConvertError(Problem("tokenizer", f"{path.name} is no UTF-8: {error}.", file=str(path))) from None
