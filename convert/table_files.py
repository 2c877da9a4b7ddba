"""Table files as they are: TOML, with what one extends merged in. What they mean is :mod:`convert.table`'s matter."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from convert.errors import TableError
from convert.resources import mappings_dir
from convert.table_types import check_types

_TOP_KEYS = frozenset(
    {
        "family",
        "title",
        "model_types",
        "architectures",
        "gguf_arch",
        "gguf_tokenizer",
        "reference",
        "layouts",
        "extends",
        "dims",
        "config",
    }
    | {"defaults", "presence", "prefix", "convention", "top", "block", "fused", "ignore", "refuse", "classes", "sizes"}
    | {"template", "normalise", "alias", "metadata", "buffers", "anew", "rope"}
)
#: What a table may begin `anew`, without what the extended one says.
_SECTIONS = ("config", "defaults", "presence", "fused", "ignore", "refuse", "classes", "sizes", "template", "alias")
_LISTS = ("fused", "ignore", "refuse", "alias", "metadata")
#: How many tables may extend one another in a row.
MAX_EXTENDS = 2


def resolve(path: Path, *, _depth: int = 0) -> dict[str, Any]:
    """The raw table with what it extends merged in.

    Raises:
        TableError: Bad TOML, an unknown top-level key, or more than two levels of ``extends``.
    """
    raw = load_toml(path)
    unknown = sorted(set(raw) - _TOP_KEYS)
    if unknown:
        raise TableError(f"{path.name}: unknown key {unknown[0]!r}.", hint=f"Known: {', '.join(sorted(_TOP_KEYS))}.")
    check_types(raw, path.name)
    base = raw.pop("extends", None)
    anew = raw.pop("anew", [])
    if strange := sorted(set(anew) - set(_SECTIONS)):
        raise TableError(f"{path.name}: anew: {strange[0]!r} is none of {', '.join(_SECTIONS)}.")
    if base is None:
        return raw
    if _depth == MAX_EXTENDS:
        raise TableError(f"{path.name}: tables may extend at most {MAX_EXTENDS} levels deep.")
    if Path(base).name != base:
        raise TableError(f"{path.name}: extends {base!r}, which is no plain name.")
    beside = path.with_name(f"{base}.toml")
    parent = beside if beside.is_file() else mappings_dir() / f"{base}.toml"
    if not parent.is_file():
        raise TableError(f"{path.name}: extends {base!r}, but there is no {base}.toml.")
    inherited = resolve(parent, _depth=_depth + 1)
    return merge({k: v for k, v in inherited.items() if k not in anew}, raw)


def load_toml(path: Path) -> dict[str, Any]:
    """One file as it is; parsed once as long as it does not change.

    Raises:
        TableError: It cannot be read, or is no TOML.
    """
    text = _text(path)
    try:
        return dict(_parsed(text))
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"{path.name}: not valid TOML: {error}.") from None


def load_head(path: Path) -> dict[str, Any]:
    """The keys before a file's first table: the family's name, model types and architectures.

    A whole table takes tens of milliseconds to parse, and most commands need one of them.

    Raises:
        TableError: The file cannot be read, or this part is no TOML.
    """
    lines = _text(path).splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if line.startswith("[")), len(lines))
    try:
        return tomllib.loads("".join(lines[:end]))
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"{path.name}: not valid TOML: {error}.") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TableError(f"{path.name}: not valid TOML: {error}.") from None
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror}.") from None


@lru_cache(maxsize=64)
def _parsed(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge; the lists of ``[[fused]]``, ``[[ignore]]`` and ``[[refuse]]`` add up; ``false`` removes."""
    out = dict(base)
    for key, value in over.items():
        if value is False and isinstance(out.get(key), dict):
            del out[key]
        elif isinstance(value, dict) and isinstance(out.get(key), dict):
            out[key] = merge(out[key], value)
        elif isinstance(value, list) and key in _LISTS:
            out[key] = [*out.get(key, []), *value]
        else:
            out[key] = value
    return out
