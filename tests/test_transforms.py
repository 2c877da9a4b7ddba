"""Operations of table rows against numpy on whole arrays, in blocks of every size, and back."""

from __future__ import annotations

import numpy as np
import pytest

from convert.source import Source
from convert.transforms import OPERATIONS, HeadsRegrouped


class Held(Source):
    """An array in memory."""

    def __init__(self, array: np.ndarray, dtype: str = "F32", align: int = 1) -> None:
        self.array, self.shape, self.dtype, self.align = array, array.shape, dtype, align

    def read(self, start: int, stop: int) -> np.ndarray:
        assert start % self.align == 0 and (stop % self.align == 0 or stop == self.shape[0])
        return self.array[start:stop]


def whole(source: Source, rows: int | None = None) -> np.ndarray:
    """All of a source, read in blocks of about ``rows`` rows, as the writer does."""
    total = source.shape[0]
    step = total if rows is None else max(source.align, rows // source.align * source.align)
    parts = [source.read(start, min(start + step, total)) for start in range(0, total, step)]
    assert all(part.dtype == parts[0].dtype for part in parts)
    return np.concatenate(parts)


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("groups", "per_group", "head", "start"), [(3, 4, 5, 0), (2, 3, 1, 0), (4, 2, 6, 14), (2, 5, 3, 6)]
)
@pytest.mark.parametrize("rows", [1, 4, 7, None])
@pytest.mark.parametrize("tail", [(), (3,), (1, 2)])
def test_value_heads_dealt_out_by_rows(groups, per_group, head, start, rows, tail):
    """Facts: the hub's [key head, its value heads, rows] is [value head, key head, rows] in GGUF."""
    array = numbers(start + groups * per_group * head, *tail)
    operation, arguments = OPERATIONS["tile_heads"], {"groups": groups, "per_group": per_group, "head": head}
    dealt = operation.forward(Held(array), **arguments, start=start)
    behind = array[start:].reshape(groups, per_group, head, *tail)
    wanted = np.concatenate([array[:start], behind.swapaxes(0, 1).reshape(-1, *tail)])
    assert dealt.shape == array.shape and dealt.dtype == "F32"
    assert np.array_equal(whole(dealt, rows), wanted)
    assert not np.array_equal(wanted, array)
    back = operation.inverse(Held(wanted), **arguments, start=start)
    assert np.array_equal(whole(back, rows), array)
    assert np.array_equal(whole(operation.inverse(dealt, **arguments, start=start), rows), array)
    if groups != per_group:  # the inverse is another permutation
        assert not np.array_equal(whole(operation.forward(Held(wanted), **arguments, start=start)), array)


@pytest.mark.parametrize(("groups", "per_group", "head"), [(3, 4, 5), (2, 3, 1), (4, 2, 6)])
@pytest.mark.parametrize("rows", [1, 4, None])
@pytest.mark.parametrize("align", [1, 2])
def test_value_heads_dealt_out_by_columns(groups, per_group, head, rows, align):
    array = numbers(8, groups * per_group * head)
    operation, arguments = OPERATIONS["tile_columns"], {"groups": groups, "per_group": per_group, "head": head}
    dealt = operation.forward(Held(array, align=align), **arguments)
    wanted = array.reshape(8, groups, per_group, head).swapaxes(1, 2).reshape(8, -1)
    assert dealt.shape == array.shape and np.array_equal(whole(dealt, rows), wanted)
    by_rows = OPERATIONS["tile_heads"].forward(Held(np.ascontiguousarray(array.T)), **arguments)
    assert np.array_equal(whole(by_rows).T, wanted)
    assert np.array_equal(whole(operation.inverse(Held(wanted), **arguments), rows), array)
    assert not np.array_equal(wanted, array)


@pytest.mark.parametrize("name", ["tile_heads", "tile_columns"])
def test_one_value_head_per_key_head_moves_nothing(name):
    source = Held(numbers(12, 12))
    for groups, per_group in ((4, 1), (1, 4)):
        arguments = {"groups": groups, "per_group": per_group, "head": 3}
        assert OPERATIONS[name].forward(source, **arguments) is source
        assert OPERATIONS[name].inverse(source, **arguments) is source


def test_heads_that_do_not_fill_the_rows_are_named():
    with pytest.raises(ValueError, match="13 rows are not 0 \\+ 2 x 3 x 2"):
        HeadsRegrouped(Held(numbers(13, 2)), first=0, outer=2, inner=3, head=2)
    with pytest.raises(ValueError, match="13 columns are not 2 x 3 x 2"):
        OPERATIONS["tile_columns"].forward(Held(numbers(2, 13)), groups=2, per_group=3, head=2)


def test_counts_that_do_not_go_with_the_rows_are_seen_also_where_nothing_moves():
    with pytest.raises(ValueError, match="6 rows are not 0 \\+ 4 x 1 x 1"):
        OPERATIONS["tile_heads"].inverse(Held(numbers(6, 2)), groups=1, per_group=4, head=1)


def test_decay_rates_come_back_within_the_rounding_of_float32():
    log = np.random.default_rng(0).uniform(-6, 4, 1000).astype(np.float32)
    stored = OPERATIONS["neg_exp"].forward(Held(log))
    assert np.array_equal(whole(stored), -np.exp(log)) and (whole(stored) < 0).all()
    back = whole(OPERATIONS["neg_exp"].inverse(stored))
    # exp turns half a unit in the last place of its result into that much of its argument
    assert np.abs(back - log).max() <= 2.0**-24 + 2.0**-22 * 1.01
    assert np.abs(back - log).max() > 0
    half = (log.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16 is widened first
    assert np.array_equal(
        whole(OPERATIONS["neg_exp"].forward(Held(half, "BF16"))),
        -np.exp((half.astype(np.uint32) << 16).view(np.float32)),
    )


def test_a_depthwise_convolution_loses_its_axis_of_one():
    array = numbers(10, 1, 4)
    flat = OPERATIONS["squeeze"].forward(Held(array))
    assert flat.shape == (10, 4) and np.array_equal(whole(flat, 3), array[:, 0])
    assert np.array_equal(whole(OPERATIONS["squeeze"].inverse(flat), 3), array)
    with pytest.raises(ValueError, match="cannot be seen as"):
        OPERATIONS["squeeze"].forward(Held(numbers(10, 2, 4)))
