"""CRC-32 joined from pieces, against zlib on the whole."""

from __future__ import annotations

import random
import zlib

import pytest

from convert.formats.crc import _operator, crc32_combine


@pytest.mark.parametrize("seed", range(20))
def test_joined_equals_whole(seed: int) -> None:
    rng = random.Random(seed)
    first, second = rng.randbytes(rng.randrange(0, 5000)), rng.randbytes(rng.randrange(0, 70_000))
    joined = crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + second)
    if second:  # control: the length matters
        assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second) + 1) != joined


def test_many_pieces_in_any_order() -> None:
    data = random.Random(1).randbytes(1 << 20)
    pieces = [data[at : at + 77_777] for at in range(0, len(data), 77_777)]
    crcs: dict[int, int] = {}
    for index in random.Random(2).sample(range(len(pieces)), len(pieces)):
        crcs[index] = zlib.crc32(pieces[index])
    total = 0
    for index, piece in enumerate(pieces):
        total = crc32_combine(total, crcs[index], len(piece))
    assert total == zlib.crc32(data)


def test_lengths_beyond_4_gib() -> None:
    """Zeros in halves: an independent way to the CRC of 6 GiB, by doubling."""
    block = zlib.crc32(bytes(3 << 20))
    length = 3 << 20
    for _ in range(11):
        block, length = crc32_combine(block, block, length), 2 * length
    assert length == 6 << 30
    direct = 0
    mebibytes = zlib.crc32(bytes(1 << 20))
    for _ in range(6 << 10):
        direct = crc32_combine(direct, mebibytes, 1 << 20)
    assert block == direct


def test_repeated_lengths_are_cheap() -> None:
    crc32_combine(1, 2, 1 << 20)
    before = _operator.cache_info()
    for value in range(20_000):
        crc32_combine(value, 5, 1 << 20)
    after = _operator.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 20_000)
    crc32_combine(1, 5, (1 << 20) + 1)  # the control
    assert _operator.cache_info().misses == before.misses + 1
