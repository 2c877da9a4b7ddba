"""CRC-32 of pieces, joined.

A zip archive holds a CRC-32 of every record. Pieces of a tensor are written by several threads in any order;
each computes the CRC of its own piece, and :func:`crc32_combine` joins them. The CRC itself is zlib's.

The CRC is linear over GF(2): appending n zero bytes multiplies the remainder by x^(8n) modulo the
polynomial. That product is a linear map of 32 bits, kept here as four tables of 256 words per length
(method: Mark Adler's note in zlib's ``crc32.c``; the code is our own).
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # CRC-32 of zip, reflected: bit 31 is x^0
_ONE = 1 << 31

_Tables = tuple[list[int], list[int], list[int], list[int]]


def crc32_combine(crc1: int, crc2: int, len2: int) -> int:
    """The CRC-32 of two pieces one after the other.

    Args:
        crc1: ``zlib.crc32`` of the first piece.
        crc2: ``zlib.crc32`` of the second.
        len2: Bytes of the second piece.

    Returns:
        ``zlib.crc32(first + second)``. Lengths seen recently cost well under a microsecond.
    """
    if len2 <= 0:
        return crc1
    t0, t1, t2, t3 = _operator(len2)
    return t0[crc1 & 255] ^ t1[crc1 >> 8 & 255] ^ t2[crc1 >> 16 & 255] ^ t3[crc1 >> 24] ^ crc2


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials modulo the CRC's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


def _power(exponent: int) -> int:
    """``x ** exponent`` modulo the CRC's polynomial."""
    result, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        exponent >>= 1
    return result


@lru_cache(maxsize=256)
def _operator(length: int) -> _Tables:
    """Tables of the map "append ``length`` zero bytes", one for each byte of a CRC."""
    factor = _power(8 * length)
    tables: list[list[int]] = []
    for shift in range(0, 32, 8):
        table = [0]
        for bit in range(8):
            image = _multiply(factor, 1 << (shift + bit))
            table += [image ^ value for value in table]
        tables.append(table)
    return tables[0], tables[1], tables[2], tables[3]
