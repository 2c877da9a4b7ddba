"""What a model card says of a model: the front matter of a ``README.md``.

Only the plain part of YAML that cards are written in: ``key: value``, ``key: [a, b]``, and lists of ``- item``
lines. Anything else is passed over; a card is a courtesy, and nothing here raises.
"""

from __future__ import annotations

from pathlib import Path

Card = dict[str, str | list[str]]

NAME = "README.md"
_MOST_BYTES = 1 << 20


def read_card(folder: Path) -> Card:
    """The front matter of the card in ``folder``; empty where there is none, or none that can be read."""
    path = folder / NAME
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return {}
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    lines = text.removeprefix("\ufeff").splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    ends = [number for number, line in enumerate(lines[1:], 1) if line.strip() == "---"]
    return _parse(lines[1 : ends[0]]) if ends else {}


def _parse(lines: list[str]) -> Card:
    out: Card = {}
    key: str | None = None
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if text.startswith("- "):
            item = text[2:].strip()
            found = out.get(key) if key else None
            if isinstance(found, list) and ": " not in item and not item.endswith(":"):
                found.append(_scalar(item))
            continue
        if line[0].isspace():
            continue  # a nested mapping
        name, colon, value = text.partition(":")
        key = name.strip() if colon else None
        if key is None:
            continue
        value = value.strip()
        if value.startswith("[") and value.endswith("]"):
            out[key] = [_scalar(part) for part in value[1:-1].split(",") if part.strip()]
        elif value in ("|", ">", "|-", ">-"):
            key = None
        else:
            out[key] = _scalar(value) if value else []
    return {name: value for name, value in out.items() if value}


def _scalar(text: str) -> str:
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text.split(" #", 1)[0].strip()


def one(card: Card, key: str) -> str | None:
    """The value of ``key`` as a text (the first of a list), or None."""
    value = card.get(key)
    return (value[0] if value else None) if isinstance(value, list) else value


def many(card: Card, key: str) -> list[str]:
    """The value of ``key`` as a list."""
    value = card.get(key, [])
    return value if isinstance(value, list) else [value]
