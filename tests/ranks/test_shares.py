"""Shares of an output: every row has one owner, and all shares are about as large."""

from __future__ import annotations

import random

import pytest

from convert.ranks.shares import STRETCHES, Shares


def pieces(seed: int) -> list[tuple[int, int, int, int]]:
    """Outputs of many sizes, cut into pieces of rows as a writer does."""
    draw = random.Random(seed)
    out = []
    for number in range(80):
        rows, row = draw.choice([1, 7, 640, 5000]), draw.choice([2, 128, 4096])
        step = max(1, 65536 // row)
        out += [(number, a, min(a + step, rows), (min(a + step, rows) - a) * row) for a in range(0, rows, step)]
    return out


@pytest.mark.parametrize("world", [2, 3, 4, 16])
@pytest.mark.parametrize("seed", range(5))
def test_every_row_has_one_owner_and_shares_are_balanced(world, seed):
    listed = pieces(seed)
    shares = Shares(iter(listed), world)
    found = [0] * world
    for number, start, stop, nbytes in listed:
        owners = {shares.owner(number, row) for row in {start, (start + stop) // 2, stop - 1}}
        assert len(owners) == 1
        found[owners.pop()] += nbytes
    total = sum(p[3] for p in listed)
    assert found == shares.nbytes and sum(found) == total
    largest = max(p[3] for p in listed)
    assert max(found) - min(found) <= total // (world * STRETCHES) + 2 * largest


def test_one_output_is_shared_too():
    """A single large tensor does not fall to one rank, and small models leave no rank with everything."""
    shares = Shares([(0, a, a + 1, 1000) for a in range(256)], 2)
    assert sum(shares.nbytes) == 256_000 and abs(shares.nbytes[0] - shares.nbytes[1]) <= 2_000
    assert {shares.owner(0, row) for row in range(256)} == {0, 1}
    assert Shares([(0, 0, 1, 10), (1, 0, 1, 10)], 3).nbytes == [10, 10, 0]
