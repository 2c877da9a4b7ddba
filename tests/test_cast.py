"""Casts between the plain types: every 16-bit pattern and random wide values against torch, losses counted.

From float64 to a 16-bit type torch rounds twice, so numpy (float16) and exact arithmetic are asked there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch

from convert import ggml
from convert.cast import CastLoss, cast, float32_to_bf16, to_float32
from convert.dtypes import DTYPES

TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PAIRS = [(a, b) for a in TYPES for b in TYPES]


@pytest.fixture(params=["ggml", "numpy"], autouse=True)
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With and without ggml's library; nothing may warn."""
    if request.param == "numpy":
        monkeypatch.setattr(ggml, "_loaded", None)
    elif not ggml.available():
        pytest.skip("libggml-python is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield request.param


def raw(tensor: torch.Tensor) -> np.ndarray:
    """A tensor in the storage type of its numpy side."""
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def inputs(dtype: str) -> torch.Tensor:
    """Every pattern of a 16-bit type; for a wide one each sign and exponent, and values around rounding boundaries."""
    kind = TYPES[dtype]
    if kind.itemsize == 2:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(kind)
    top = np.arange(1 << 16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    rng = np.random.default_rng(0)
    chosen = top[rng.permutation(1 << 16)[: 1 << 14]]
    values = (chosen[:, None] | low).reshape(-1).view(np.float32)
    values = np.concatenate([values, rng.normal(0, 0.2, 4096).astype(np.float32), top.view(np.float32)])
    if dtype == "F32":
        return torch.from_numpy(values)
    with np.errstate(all="ignore"):
        wide = values.astype(np.float64)
    between = wide + np.spacing(np.abs(wide)) * rng.integers(-3, 4, wide.size)
    special = np.array([1e300, -1e300, 1e-300, -1e-300, 5e-324, 3.5e38, 70000.0, 65519.99, 65520.0, 1e-46])
    return torch.from_numpy(np.concatenate([wide, between, special]))


def narrows_twice(source: str, target: str) -> bool:
    return source == "F64" and DTYPES[target].block_bytes == 2


def rounded_once(values: np.ndarray, target: str) -> np.ndarray:
    """float64 to a 16-bit type in one step: numpy's own for float16, for bfloat16 whole units counted in float64.

    A unit is a power of two: dividing by it is exact, and what is rounded are integers of 8 binary digits.
    """
    with np.errstate(all="ignore"):
        if target == "F16":
            return values.astype(np.float16)
        unit = np.ldexp(1.0, np.maximum(np.frexp(values)[1] - 1, -126) - 7)
        near = np.where(np.isfinite(values), np.rint(values / unit) * unit, values)
        out = np.where(np.abs(near) >= 2.0**128, np.copysign(np.inf, near), near).astype(np.float32)  # exact: bfloat16s
    return (out.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def test_the_rounding_to_compare_with_is_that_of_rational_numbers():
    rng = np.random.default_rng(6)
    values = np.concatenate([rng.choice(beside_middles("BF16"), 300), rng.normal(0, 1e-39, 50), rng.normal(0, 1, 50)])
    near = torch.from_numpy(rounded_once(values, "BF16").view(np.int16)).view(torch.bfloat16).double().tolist()
    for value, found in zip(values.tolist(), near, strict=True):
        exact = Fraction(value)
        unit = Fraction(2) ** (max(math.frexp(value)[1] - 1, -126) - 7)
        wanted = round(exact / unit) * unit  # Python rounds halves to even
        assert (
            Fraction(found) == wanted if abs(wanted) < Fraction(2) ** 128 else found == math.copysign(math.inf, value)
        )


def beside_middles(target: str) -> np.ndarray:
    """The middle between each two neighbours of a 16-bit type, and float64 values so near that float32 makes it one."""
    bits = np.arange(0x7C00 if target == "F16" else 0x7F80, dtype=np.int32).astype(np.int16)
    low = torch.from_numpy(bits).view(TYPES[target]).double().numpy()
    high = np.append(low[1:], 65536.0 if target == "F16" else 2.0**128)
    middle = (low + high) / 2
    near = [middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf), middle * (1 - 2.0**-30)]
    return np.concatenate([*near, middle * (1 + 2.0**-30), *(-v for v in near)])


@pytest.mark.parametrize("target", ["F16", "BF16"])
def test_float64_is_rounded_once(target):
    values = beside_middles(target)
    found = cast(values, "F64", target)
    wanted = rounded_once(values, target)
    assert np.array_equal(found.view(np.uint16), wanted.view(np.uint16))
    torchs = raw(torch.from_numpy(values).to(TYPES[target]))  # the control: twice, and so wrong for many of these
    assert np.count_nonzero(torchs.view(np.uint16) != wanted.view(np.uint16)) > len(values) // 8
    losses, before = CastLoss(), np.isfinite(values) & (values != 0)
    cast(values, "F64", target, losses)
    infinite = np.isinf(torch.from_numpy(found.view(np.int16)).view(TYPES[target]).float().numpy())
    assert losses == CastLoss(
        int((infinite & before).sum()), int(((found.view(np.uint16) & 0x7FFF) == 0)[before].sum())
    )
    assert losses.overflowed >= 3 and losses.underflowed >= 4


@pytest.mark.parametrize("target", ["F16", "BF16"])
def test_any_float64_is_rounded_once(target):
    """All exponents, and more values than are worked on at a time; shapes and strides too."""
    values = np.random.default_rng(5).integers(0, 1 << 64, 70_000, np.uint64).view(np.float64)
    near = np.ldexp(1 + np.arange(70_000) / 70_000, np.arange(70_000) % 30 - 25)
    for chosen in (values, near):
        found = cast(chosen, "F64", target).view(np.uint16)
        nan = np.isnan(chosen)
        assert np.array_equal(found[~nan], rounded_once(chosen, target).view(np.uint16)[~nan])
        assert np.isnan(to_float32(cast(chosen, "F64", target)[nan], target)).all()
    table = near.reshape(700, 100).T
    assert np.array_equal(cast(table, "F64", target), cast(table.copy(), "F64", target))
    assert cast(table[:, :0], "F64", target).shape == (100, 0)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_bits_are_those_of_torch(source, target):
    values = inputs(source)
    found = cast(raw(values), source, target)
    wanted = rounded_once(values.numpy(), target) if narrows_twice(source, target) else raw(values.to(TYPES[target]))
    assert found.dtype == DTYPES[target].storage and found.shape == wanted.shape
    nan = torch.isnan(values).numpy()
    bits = np.dtype(f"u{wanted.itemsize}")
    assert np.array_equal(found.view(bits)[~nan], wanted.view(bits)[~nan])  # ±0, subnormals, infinities too
    back = torch.from_numpy(found.view(np.int16)).view(TYPES[target]) if target == "BF16" else torch.from_numpy(found)
    assert torch.isnan(back).numpy().tolist() == nan.tolist()
    assert np.array_equal(
        np.signbit(back.double().numpy()[nan]), np.signbit(values.double().numpy()[nan])
    )  # NaN keeps its sign


@pytest.mark.parametrize("target", ["F16", "BF16"])
def test_a_nan_stays_one_and_keeps_the_top_of_its_payload(target):
    bits = np.array([0x7F800001, 0x7FC00000, 0x7FABCDEF, 0xFF800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32)
    found = cast(bits.view(np.float32), "F32", target).view(np.uint16)
    keep, shift, quiet = (0x3FF, 13, 0x7E00) if target == "F16" else (0x7F, 16, 0x7FC0)
    wanted = (bits >> 16 & 0x8000) | quiet | (bits >> shift & keep)
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", TYPES)
def test_the_same_type_is_not_touched(dtype):
    values = raw(inputs(dtype))
    assert cast(values, dtype, dtype) is values


@pytest.mark.parametrize("source", ["F64", "F32", "BF16"])
def test_too_large_and_too_small_are_counted(source):
    values = torch.tensor([70000.0, -70000.0, 65504.0, 1e-9, -1e-9, 1e-7, 0.0, -0.0, float("inf"), float("nan"), 1.0])
    loss = CastLoss()
    cast(raw(values.to(TYPES[source])), source, "F16", loss)
    # in bfloat16, 65504 is 65536, which float16 does not hold
    assert loss.overflowed == (3 if source == "BF16" else 2)
    assert loss.underflowed == 2  # zeros were zeros before; 1e-7 is a subnormal
    assert loss.not_finite == 2


@pytest.mark.parametrize("target", ["F32", "F16", "BF16"])
def test_losses_of_float64_are_counted_from_its_own_values(target):
    values = np.array([1e300, -1e39, 1e-300, -1e-60, 0.0, -0.0, np.inf, -np.inf, np.nan, 1.5])
    loss = CastLoss()
    cast(values, "F64", target, loss)
    assert loss == CastLoss(2, 2, 3)
    other = CastLoss(1, 1, 1)
    other.add(loss)
    assert other == CastLoss(3, 3, 4)


@pytest.mark.parametrize(("source", "target"), [("F16", "F32"), ("BF16", "F32"), ("F32", "F64"), ("F16", "F64")])
def test_widening_loses_nothing_and_counts_nothing(source, target):
    values = inputs(source)
    loss = CastLoss()
    wide = cast(raw(values), source, target, loss)
    assert loss == CastLoss()
    finite = torch.isfinite(values).numpy()
    back = cast(wide, target, source)
    assert np.array_equal(raw(values)[finite], back[finite])


def test_torchs_counts_of_losses_on_every_pattern():
    values = inputs("BF16")
    narrow = values.to(torch.float16)
    loss = CastLoss()
    cast(raw(values), "BF16", "F16", loss)
    assert loss.overflowed == int((torch.isinf(narrow) & torch.isfinite(values)).sum()) > 0
    assert loss.underflowed == int(((narrow == 0) & (values != 0)).sum()) > 0


def test_shapes_strides_and_empty_arrays():
    values = np.arange(60, dtype=np.float32).reshape(5, 12)
    for view in (values.T, values[::2, ::3], values[:0], values.reshape(5, 3, 4).transpose(2, 0, 1)):
        for target in ("F16", "BF16", "F64"):
            found = cast(view, "F32", target)
            wanted = raw(torch.from_numpy(view.copy()).to(TYPES[target]))
            assert found.shape == view.shape and np.array_equal(found, wanted)
            assert np.array_equal(cast(found, target, "F32"), view)


def test_widening_into_a_buffer():
    for dtype in ("BF16", "F16", "F32", "F64"):
        values = raw(torch.linspace(-3, 3, 7).to(TYPES[dtype]))
        buffer = np.full(7, np.nan, np.float32)
        assert to_float32(values, dtype, buffer) is buffer
        assert np.array_equal(buffer, to_float32(values, dtype))


def test_control_truncation_is_not_rounding():
    """Cutting the low half off, the classic wrong bfloat16, differs on this input."""
    values = inputs("F32").numpy()
    cut = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert np.count_nonzero(cut != float32_to_bf16(values)) > 1000
