"""Orders of rotary rows against the permutations as torch does them, and against what a rotation needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from convert.row_orders import Order, distances, fault, frequencies, nearness, orders, reorder
from tests.fixtures.planted import to_half, to_interleaved


@pytest.mark.parametrize("width", [6, 8, 16, 64, 128])
def test_reordering_is_what_converters_do(width):
    rows = torch.arange(width, dtype=torch.float32)[:, None]
    for block in {width, width // 2} - {3}:
        count = width // block
        assert reorder(width, "interleaved", block).tolist() == to_interleaved(rows, count)[:, 0].tolist()
        assert reorder(width, "half", block).tolist() == to_half(rows, count)[:, 0].tolist()
    assert (reorder(width, "half", width) != reorder(width, "interleaved", width)).any()


@pytest.mark.parametrize("width", [6, 16, 64])
def test_pairs_follow_the_rows(width):
    """Number the rows by frequency in the plain order, permute with torch: the numbers are the frequencies."""
    half = torch.arange(width) % (width // 2)
    inter = to_interleaved(half[:, None].float(), 1)[:, 0].int()
    assert frequencies(Order("interleaved"), width).tolist() == inter.tolist()
    twice = to_half(half[:, None].float(), 1)[:, 0].int()
    assert frequencies(Order("half", "half"), width).tolist() == twice.tolist()
    for order in orders(width):
        apart = distances(order, width)
        assert (apart == 0).sum() == 2 * width  # every row with itself and with its partner
        near = nearness(width)[order]
        assert near.sum() == pytest.approx(1) and (near == near.T).all() and not near.diagonal().any()
        assert near.max() == near[(apart == 0) & ~np.eye(width, dtype=bool)].min()  # partners are nearest


def test_orders_that_are_the_same_are_one():
    assert len(orders(4)) == 2  # the permutation of four rows is its own inverse
    assert len(orders(16)) == 4 and orders(16)[:2] == (Order("half"), Order("interleaved"))
    assert len(orders(64, (16, 32))) == 12
    assert len(orders(16, (4, 8))) == 10 and Order("interleaved", "half", 4) in orders(16, (4, 8))
    assert orders(16, (16, 3, 2, 32)) == orders(16)


def test_names_of_faults_exist_and_depend_on_what_is_expected():
    from convert.faults import FAULTS

    both = {
        order: {"q": order, "k": order}
        for order in (Order("half"), Order("interleaved"), Order("half", "half"), Order("interleaved", "interleaved"))
    }
    assert fault(both[Order("interleaved")], "half") == ("qk-permuted", None)
    assert fault(both[Order("half")], "interleaved") == ("qk-permuted", None)
    assert fault(both[Order("half", "half")], "half") == ("qk-permuted-twice", None)
    assert fault(both[Order("half", "half")], "interleaved") == ("qk-inverse", None)
    assert fault({"k": Order("interleaved", "half", 4)}, "half") == ("k-wrong-heads", 4)
    assert fault({"k": Order("half", "interleaved", 4)}, "half") == ("k-wrong-heads-back", 4)
    assert fault({"q": Order("interleaved"), "k": Order("half", "half")}, "half") is None
    assert fault({}, "half") is None
    named = [fault(o, e) for o in both.values() for e in ("half", "interleaved")]
    assert {n[0] for n in named if n} <= FAULTS.keys()
