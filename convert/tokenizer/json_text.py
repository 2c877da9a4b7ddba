"""The JSON of tokenizer files: parsed, or refused before it takes memory that no real one takes.

A file from a stranger may hold millions of empty lists, which take sixty times their bytes. What the values mean is
the business of :mod:`convert.tokenizer.hf_checks`.
"""

from __future__ import annotations

import gc
import json
from typing import Any

#: The largest ``tokenizer.json`` that is published has 35 MB.
MAX_BYTES = 96 << 20
#: How often a character may occur. A vocabulary of 262,144 with 514,906 merges as pairs (the largest published) has
#: 520,000 lists, 1.3 million commas and 2.6 million quotes.
_MOST_MARKS = {b"[": 1_500_000, b"{": 400_000, b",": 3_000_000, b'"': 6_000_000}
#: Below this size commas and quotes are not counted: what takes memory has four bytes or more with its comma, so that
#: there are fewer than in the largest file that passes.
_UNCOUNTED = 10 << 20
#: Python keeps a text with one emoji in four bytes per character.
_MOST_WIDE = 48 << 20
#: Bytes that begin a character beyond U+FFFF in UTF-8.
_WIDE = [bytes([first]) for first in range(0xF0, 0xF5)]
_PIECE = 1 << 20
_MOST_ESCAPES = 10_000


def load(raw: bytes, *, texts: bool = True, constants: bool = False) -> Any:
    """The value in a JSON file.

    Args:
        raw: The file.
        texts: Without, texts beyond ASCII come as their UTF-8 bytes, one character each: a quarter of the memory, and
            enough to count and compare.
        constants: Let ``NaN`` and ``Infinity`` pass, which only Python's JSON knows.

    Raises:
        ValueError: It is no JSON, no UTF-8, or holds more than any tokenizer; the message says which.
    """
    if len(raw) > MAX_BYTES:
        raise ValueError(f"it has {len(raw):,} bytes, more than any tokenizer")
    for mark, most in _MOST_MARKS.items():
        if (mark in b"[{" or len(raw) > _UNCOUNTED) and raw.count(mark) > most:
            raise ValueError(f"it holds more than {most:,} times {mark.decode()!r}, more values than any tokenizer")
    if texts and len(raw) > _MOST_WIDE and any(first in raw for first in _WIDE):
        raise ValueError(f"it has {len(raw):,} bytes of text beyond ASCII, more than any tokenizer")
    narrow = not texts or _is_better_narrow(raw)
    try:
        if narrow:
            _want_utf8(raw)
        text = raw.decode("latin-1" if narrow else "utf-8-sig")
        del raw  # a copy of 30 MB; the caller has none
        text = text.removeprefix("\xef\xbb\xbf") if narrow else text
        value = _parse(text, constants)
        del text
        return _widened(value) if texts and narrow else value
    except RecursionError:
        raise ValueError("it is nested deeper than any tokenizer") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no UTF-8 (byte {error.start:,})") from None


def _parse(text: str, constants: bool) -> Any:
    """The value, made without Python looking for cycles all along, which JSON has none of."""
    was = gc.isenabled()
    gc.disable()
    try:
        return json.loads(text, parse_constant=None if constants else _no_constant)
    finally:
        if was:
            gc.enable()


def _is_better_narrow(raw: bytes) -> bool:
    """Whether the file takes four times its size as one text, and can be parsed by its bytes all the same.

    Not if it writes characters beyond ASCII as escapes: those would be taken for bytes. A tokenizer has some dozens of
    escapes, for control characters.
    """
    if len(raw) < _UNCOUNTED or not any(first in raw for first in _WIDE):
        return False
    at = -1
    for _ in range(_MOST_ESCAPES):
        at = raw.find(b"\\u", at + 1)
        if at < 0:
            return True
        if raw[at + 2 : at + 4] != b"00" or raw[at + 4 : at + 5] not in b"01234567":
            return False
    return False


def _widened(value: Any) -> Any:
    """A value whose texts are UTF-8 bytes, one character each, with the texts themselves; lists change in place."""
    kind = type(value)
    if kind is str:
        return value if value.isascii() else value.encode("latin-1").decode()
    if kind is list:
        for index, inner in enumerate(value):
            kind = type(inner)
            if kind is str:
                if not inner.isascii():
                    value[index] = inner.encode("latin-1").decode()
            elif kind is list or kind is dict:
                value[index] = _widened(inner)
    elif kind is dict:
        return {
            key if key.isascii() else key.encode("latin-1").decode(): inner if type(inner) is int else _widened(inner)
            for key, inner in value.items()
        }
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _want_utf8(raw: bytes) -> None:
    """Decode in pieces, for the error alone; no two characters share a byte that could begin one."""
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(raw), _PIECE):
        decoder.decode(raw[at : at + _PIECE])
    decoder.decode(b"", final=True)
