"""What is wrong with a ``conversion.json``: parts of the wrong kind, all at once.

Whether the files are as it says is :mod:`convert.check`'s business; what it is for, :mod:`convert.record` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: Digits of SHA-256 in hexadecimal; shorter ones are kept of tables only.
_HASHES = ("head_sha256", "header_sha256", "sha256")
_HEX = frozenset("0123456789abcdef")
#: What every record has, objects; and what may be missing, with the type.
_PARTS = ("source", "target")
_OPTIONAL = {"decisions": dict, "config": dict, "notes": list, "repair": dict, "generation_config": dict}
_SHOWN = 4


def damage(record: Any) -> list[str]:
    """Everything in a record that is not as this product writes it, in words; empty for a sound one."""
    if not isinstance(record, Mapping) or not str(record.get("schema", "")).startswith("convert.record/"):
        return ["it is no record of a conversion"]
    found = [f"its {key} is {_brief(record.get(key))}" for key in _PARTS if not isinstance(record.get(key), dict)]
    found += [
        f"its {key} is {_brief(record[key])}"
        for key, kind in _OPTIONAL.items()
        if record.get(key) is not None and not isinstance(record[key], kind)
    ]
    for part in _PARTS:
        value = record.get(part)
        if isinstance(value, Mapping):
            found += _part(part, value)
    return found if len(found) <= _SHOWN else [*found[:_SHOWN], f"and {len(found) - _SHOWN:,} findings more"]


def _part(name: str, part: Mapping[str, Any]) -> Iterator[str]:
    for key in ("options", "names", "hub"):
        if part.get(key) is not None and not isinstance(part[key], Mapping):
            yield f"the {key} of its {name} are {_brief(part[key])}"
    for key in ("files", "beside"):
        listed = part.get(key)
        if listed is None:
            continue
        if not isinstance(listed, list):
            yield f"the {key} of its {name} are {_brief(listed)}"
            continue
        for item in listed:
            yield from _file(f"{key} of its {name}", item)


def _file(where: str, item: Any) -> Iterator[str]:
    name = item.get("name") if isinstance(item, Mapping) else None
    if not isinstance(name, str) or not name:
        yield f"among the {where} is {_brief(item)}, which has no name"
        return
    parts = name.replace("\\", "/").split("/")
    drive = len(parts[0]) == 2 and parts[0][1] == ":"
    if ".." in parts or "" in parts or drive or not name.isprintable():
        yield f"among the {where} is {_brief(name)}, which is no file of that folder"
    size = item.get("bytes")
    if size is not None and (type(size) is not int or not 0 <= size < 1 << 63):
        yield f"{_brief(name)} among the {where} has {_brief(size)} bytes"
    for key in _HASHES:
        value = item.get(key)
        if value is not None and not (isinstance(value, str) and len(value) == 64 and set(value) <= _HEX):
            yield f"the {key} of {_brief(name)} among the {where} is {_brief(value)}"


def _brief(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
