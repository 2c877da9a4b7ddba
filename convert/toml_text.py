"""Writes TOML: the resolved tables that ``convert tables show --resolved`` prints. Python only reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


def dumps(data: Mapping[str, Any]) -> str:
    """TOML text of a dict as ``tomllib`` returns it (no dates)."""
    return "\n".join(_table(data, "")) + "\n"


def _table(data: Mapping[str, Any], path: str) -> Iterator[str]:
    for key, value in data.items():
        if not _is_table(value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in data.items():
        if not _is_table(value):
            continue
        full = f"{path}{_key(key)}"
        for item, header in (
            [(value, f"[{full}]")] if isinstance(value, Mapping) else [(x, f"[[{full}]]") for x in value]
        ):
            if isinstance(value, list) or not item or any(not _is_table(v) for v in item.values()):
                yield ""
                yield header
            yield from _table(item, full + ".")


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and bool(value) and isinstance(value[0], Mapping))


def _key(key: str) -> str:
    return key if key and set(key) <= _BARE else json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    return repr(value)
