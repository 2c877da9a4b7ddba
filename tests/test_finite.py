"""Which values stop: against numpy's and torch's own rounding, with the largest value that still fits as control."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from convert.cast import to_float32
from convert.errors import ConvertError
from convert.finite import Finite, largest
from convert.source import Array, Source

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Memory(Source):
    def __init__(self, values: torch.Tensor, dtype: str) -> None:
        self.raw = (values.view(torch.uint16) if dtype == "BF16" else values).numpy()
        self.shape, self.dtype = tuple(values.shape), dtype

    def read(self, start: int, stop: int) -> Array:
        return self.raw[start:stop]


def matrix(dtype: str, *bad: tuple[int, int, float]) -> Memory:
    values = torch.from_numpy(np.random.default_rng(0).normal(0, 1, (40, 24))).to(TORCH[dtype])
    for row, column, value in bad:
        values[row, column] = value
    return Memory(values, dtype)


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("bad", [0.0, -30000.0, float("inf"), float("-inf"), float("nan")])
def test_the_largest_magnitude(dtype, bad):
    source = matrix(dtype, (7, 3, bad))
    wide = source.raw if dtype == "F64" else to_float32(source.raw, dtype)
    found = largest(source.raw, dtype)
    assert found == np.abs(wide).max() if np.isfinite(bad) else not np.isfinite(found)


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("target", ["F32", "F16", "BF16", "Q8_0", "Q4_K"])
def test_values_that_are_not_finite_stop_with_row_and_count_of_the_whole_tensor(dtype, target):
    source = matrix(dtype, (7, 3, float("nan")), (7, 5, float("inf")), (30, 0, float("-inf")))
    checked = Finite(source, target, tensor="w")
    assert (checked.read(0, 7) == source.raw[:7]).all()
    with pytest.raises(ConvertError) as caught:
        checked.read(20, 40)  # the message is the same whichever block was read first
    (problem,) = caught.value.problems
    assert problem.kind == "not_finite" and problem.tensor == "w" and problem.found == {"row": 7, "count": 3}
    assert "3 values" in problem.message and "1 NaN" in problem.message and "row 7" in problem.message


@pytest.mark.parametrize(
    ("dtype", "target", "value"),
    [
        *(("F32", "F16", v) for v in (65519.996, 65520.0, 70000.0)),
        *(("BF16", "F16", v) for v in (65280.0, 65536.0)),
        *(("F64", "F16", v) for v in (65519.99999, 65519.9999999999, 65520.0)),
        *(("F32", "BF16", v) for v in (3.396177e38, 3.3961776e38, 3.4e38)),
        *(("F64", "F32", v) for v in (3.4028235677973362e38, 3.4028235677973366e38, 1e300)),
    ],
)
def test_too_large_is_what_rounds_to_infinity(dtype, target, value):
    source = matrix(dtype, (5, 1, -value), (9, 2, value))
    becomes = source.raw[5, 1:2] if dtype != "BF16" else None
    wide = torch.from_numpy(becomes.copy()) if becomes is not None else torch.tensor([-value], dtype=TORCH[dtype])
    overflows = bool(torch.isinf(wide.to(TORCH[target])).any())
    if (dtype, target) == ("F64", "F16"):  # torch rounds twice: what lies a hair below the limit becomes infinite there
        with np.errstate(over="ignore"):
            overflows = bool(np.isinf(becomes.astype(np.float16)).any())
    checked = Finite(source, target, tensor="w")
    if not overflows:
        checked.read(0, 40)
        return
    with pytest.raises(ConvertError) as caught:
        checked.read(0, 40)
    (problem,) = caught.value.problems
    assert problem.kind == "overflow" and problem.found == {"row": 5, "count": 2} and target in problem.message


def test_both_outcomes_are_met_above():
    """The control of the table above: each narrowing has a value on either side."""
    for target, low, high in (("F16", 65519.996, 65520.0), ("BF16", 3.396177e38, 3.3961776e38)):
        pair = torch.tensor([low, high], dtype=torch.float32).to(TORCH[target])
        assert torch.isinf(pair).tolist() == [False, True], target


def test_rows_of_a_tensor_with_three_dimensions_are_counted_over_all_leading_ones():
    values = torch.ones(4, 5, 8)
    values[2, 3, 1] = float("nan")
    with pytest.raises(ConvertError) as caught:
        Finite(Memory(values, "F32"), "F16", tensor="w").read(0, 4)
    assert caught.value.problems[0].found == {"row": 13, "count": 1}


def test_nothing_is_moved_in_the_kernel_unseen(tmp_path: Path):
    from convert.formats.spec import TensorSpec
    from convert.source import FilePool, FileSource

    (tmp_path / "w").write_bytes(np.ones((4, 4), np.float32).tobytes())
    plain = FileSource(TensorSpec("w", "F32", (4, 4), tmp_path / "w", 0), FilePool())
    assert plain.extent(0, 4) is not None
    assert Finite(plain, "F32", tensor="w").extent(0, 4) is None
    plain.pool.close()
