from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from convert import tensor_comparison
from convert.tensor_diff import diff_tensors
from tests.fixtures.shapes import get_shape
from tests.reference.models import StandIn, interleaved, one_thread, stand_in  # noqa: F401

QK = [f"trf_blocks.{layer}.att.W_{part}.weight" for layer in range(2) for part in ("query", "key")]


@pytest.fixture(params=[1 << 20, 500], ids=["whole", "in blocks"], autouse=True)
def blocks(request, monkeypatch):
    monkeypatch.setattr(tensor_comparison, "BLOCK", request.param)


@pytest.mark.parametrize("shape", ["gqa8", "hd6", "hd16", "mha"])
def test_the_declared_rotary_order_is_equality(shape):
    a, b = stand_in(shape), stand_in(shape, pairing="interleaved")
    for one, other in ((a, b), (b, a)):
        got = diff_tensors(one, other)
        assert got.same
        assert sorted(got.turned) == sorted(QK)
    b.pairing = "half"  # the same tensors, declared wrongly
    got = diff_tensors(a, b)
    assert not got.same
    assert sorted(got.reordered) == sorted(QK)
    assert not got.different
    assert (
        "The same rows in another order: trf_blocks.{0-1}.att.W_query.weight, trf_blocks.{0-1}.att.W_key.weight."
        in got.lines()
    )


def test_k_with_the_wrong_head_count_is_an_order_nobody_declared():
    a, b = stand_in("gqa8"), stand_in("gqa8", pairing="interleaved")
    wrong = interleaved(a.state, replace(get_shape("gqa8"), kv_heads=4))
    b.state = {k: wrong[k] if "k_proj" in k else t for k, t in b.state.items()}
    got = diff_tensors(a, b)
    assert got.reordered == [n for n in QK if "key" in n]
    assert sorted(got.turned) == [n for n in sorted(QK) if "query" in n]


def test_types_are_compared_after_the_rounding_of_the_coarser():
    a = stand_in()
    rounded = StandIn(a.config, {k: t.bfloat16() for k, t in a.state.items()})
    half = StandIn(a.config, {k: t.bfloat16().half() for k, t in a.state.items()})
    assert diff_tensors(a, rounded).same
    assert diff_tensors(rounded, a).same
    assert diff_tensors(rounded, half).same
    cut = {k: (t.view(torch.int32) & -65536).view(torch.float32).bfloat16() for k, t in a.state.items()}
    assert not diff_tensors(a, StandIn(a.config, cut)).same  # cut off, not rounded


def test_what_differs_is_named():
    a, b = stand_in(), stand_in()
    b.state = {k: t.clone() for k, t in b.state.items()}
    b.state["model.layers.1.mlp.gate_proj.weight"][95, 63] += 1e-6
    del b.state["lm_head.weight"]
    got = diff_tensors(a, b)
    assert got.different == ["trf_blocks.1.ff.fc1.weight"]
    assert got.only_one == ["out_head.weight"]
    assert got.lines()[-1] == "The other 19 tensors hold equal values."
