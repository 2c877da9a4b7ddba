from __future__ import annotations

import math

import pytest
import torch

from convert.errors import ConvertError
from convert.metrics import Distance, Meter, compare, compare_blocks


def _pair():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(40, 97, generator=generator)
    b = a + 0.3 * torch.randn(40, 97, generator=generator)
    b[:7] = a[:7]
    return a, b


def test_figures_against_torch():
    a, b = _pair()
    got = compare(a, b)
    kl = torch.nn.functional.kl_div(
        b.double().log_softmax(-1), a.double().log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert got.max_abs == pytest.approx(float((a - b).abs().max()))
    assert got.nmse == pytest.approx(float(torch.nn.functional.mse_loss(a, b) / a.square().mean()))
    assert got.kl_max == pytest.approx(float(kl.max()))
    assert got.kl_mean == pytest.approx(float(kl.mean()))
    assert got.top1 == pytest.approx(float((a.argmax(-1) == b.argmax(-1)).float().mean()))
    assert 0 < got.top1 < 1
    assert got.first_diff_position() == 7
    assert got.first_diff_position(1.0) is None
    assert got.worst == max(got.by_position)
    assert compare(b, a).kl_mean != pytest.approx(got.kl_mean)  # the order of the sides matters


def test_blocks_change_nothing():
    a, b = _pair()
    whole = compare(a, b, rows=100)
    for rows in (1, 7, 40):
        assert compare(a, b, rows=rows).as_json() == pytest.approx(whole.as_json())
    assert compare_blocks([(a[:3], b[:3]), (a[3:], b[3:])]).by_position == pytest.approx(whole.by_position)


def test_equal_logits_differ_by_nothing():
    a, _ = _pair()
    got = compare(a, a.clone())
    assert got.as_json() == {"max_abs": 0.0, "nmse": 0.0, "kl_max": 0.0, "kl_mean": 0.0, "top1": 1.0}
    assert got.first_diff_position() is None


def test_large_logits_do_not_overflow():
    a = torch.tensor([[3e4, 0.0, -3e4]])
    got = compare(a, a.flip(1))
    assert math.isfinite(got.kl_max)
    assert got.kl_max == pytest.approx(6e4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_never_equal(bad):
    a, b = _pair()
    b[30, 5] = bad
    got = compare(a, b)
    assert not got.finite
    assert not got.nmse <= 1e9
    assert got.first_diff_position(1e9) == 30
    assert got.as_json()["nmse"] is None
    assert not compare(b, b).finite


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("slabs", [1, 3])
def test_without_a_likeliest_token_there_is_no_agreement_on_it(bad, slabs):
    """What both sides have not is not the same: NaN on both was 100 % of agreement."""

    def measured(a: torch.Tensor, b: torch.Tensor) -> Distance:
        meter = Meter(len(a))
        for one, other in zip(a.chunk(slabs, -1), b.chunk(slabs, -1), strict=True):
            meter.update(one, other)
        return meter.result()

    a, _ = _pair()
    assert (measured(a, a).top1, measured(a, a).without) == (1.0, (0, 0))  # the control
    b, some = a.clone(), a.clone()
    b[:, 5], some[10:, -1] = bad, bad
    both = measured(b, b)
    assert math.isnan(both.top1) and both.without == (40, 40) and both.as_json()["top1"] is None
    assert measured(some, some).top1 == 0.25 and measured(some, some).without == (30, 30)
    assert measured(a, some).top1 == 0.25 and measured(a, some).without == (0, 30)
    assert measured(some, a).without == (30, 0) and math.isnan(measured(a, b).top1)


def test_shapes_must_agree():
    a, b = _pair()
    with pytest.raises(ConvertError, match=r"\[40, 97\] and \[40, 96\]"):
        compare(a, b[:, :96])
    with pytest.raises(ConvertError, match="no positions"):
        compare(a[:0], b[:0])
