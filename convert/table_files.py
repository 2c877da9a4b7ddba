"""Table files as they are: TOML, with what one extends merged in. What they mean is :mod:`convert.table`'s matter.

They may come from strangers. TOML's parser is recursive, and quadratic in the parts of a dotted key: 40 KB can ask for
gigabytes. So size, dots and depth are bounded.
"""

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
#: Bounds of a file: bytes (the largest table has 18 KB), dots in a line (6), tables in tables (4).
MAX_BYTES, MAX_DOTS, MAX_DEPTH = 1 << 20, 100, 16


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
    if not plain_name(base):
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
    return dict(_loaded(_text(path), path.name))


def load_head(path: Path) -> dict[str, Any]:
    """The keys before a file's first table: the family's name, model types and architectures.

    A whole table takes tens of milliseconds to parse, and most commands need one of them.

    Raises:
        TableError: The file cannot be read, or this part is no TOML.
    """
    head, _, _ = f"\n{_text(path)}".partition("\n[")
    return _loaded(head[1:], path.name)


def plain_name(name: str) -> bool:
    """Whether a name can be that of a file beside another one, and of no other."""
    return 0 < len(name) <= 100 and name != ".." and Path(name).name == name and name.isprintable()


def _text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, a device has no end
            raise TableError(f"{path}: no regular file.")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise TableError(f"{path.name}: more than {MAX_BYTES:,} bytes, which no table has.")
        return raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise TableError(f"{path.name}: not valid TOML: {error}.") from None
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror}.") from None


def _loaded(text: str, name: str) -> dict[str, Any]:
    if (dots := max((line.count(".") for line in text.splitlines()), default=0)) > MAX_DOTS:
        raise TableError(f"{name}: a line with {dots:,} dots; no key has that many parts.")
    try:
        return _parsed(text)
    except RecursionError:
        raise TableError(f"{name}: nested too deep; tables have {MAX_DEPTH} levels at most.") from None
    except ValueError as error:  # TOMLDecodeError is one, and so is a number of 5,000 digits
        raise TableError(f"{name}: not valid TOML: {error}.") from None


@lru_cache(maxsize=64)
def _parsed(text: str) -> dict[str, Any]:
    raw = tomllib.loads(text)
    level: list[Any] = [raw]
    for _ in range(MAX_DEPTH):
        below = (inner.values() if isinstance(inner, dict) else inner for inner in level)
        level = [value for values in below for value in values if isinstance(value, (dict, list))]
    if level:
        raise RecursionError
    return raw


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
