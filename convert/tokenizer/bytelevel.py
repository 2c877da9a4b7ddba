"""The byte alphabet of byte-level BPE: every byte has one printable character.

GPT-2 writes tokens in this alphabet so that a vocabulary file holds no control characters; every
byte-level BPE since does the same. This module knows nothing of merges or files.
"""

from __future__ import annotations

from functools import cache


@cache
def byte_to_char() -> dict[int, str]:
    """Byte value to its character: printable Latin-1 stands for itself, the rest follow from U+0100 on.

    Source: the ``bytes_to_unicode`` table published with GPT-2 (``encoder.py``).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {value: chr(value) for value in printable}
    spare = 0x100
    for value in range(256):
        if value not in table:
            table[value] = chr(spare)
            spare += 1
    return table


@cache
def char_to_byte() -> dict[str, int]:
    """The inverse of :func:`byte_to_char`."""
    return {char: value for value, char in byte_to_char().items()}


def encode(raw: bytes) -> str:
    """``raw`` in the byte alphabet, one character per byte."""
    table = byte_to_char()
    return "".join(table[value] for value in raw)


def decode(text: str) -> bytes | None:
    """The bytes that ``text`` stands for, or None when it holds a character outside the alphabet."""
    table = char_to_byte()
    try:
        return bytes(table[char] for char in text)
    except KeyError:
        return None
