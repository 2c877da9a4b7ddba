"""Trial runs: losses as transformers computes them, views as planted copies, prefix states that change nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from convert.checkpoint import open_checkpoint
from convert.faults import parse_fix
from convert.trials import Bench, passage
from tests.fixtures.hf import make_hf
from tests.fixtures.planted import FAULTS, plant
from tests.fixtures.shapes import Shape

SHAPE = Shape(128, 8, 2, 16, 96, 160, layers=4)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_hf(tmp_path_factory.mktemp("trials") / "good", SHAPE).path


@pytest.fixture(scope="module")
def ids():
    return torch.randint(SHAPE.vocab, (120,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def bench(good):
    with open_checkpoint(good) as ckpt:
        yield Bench(ckpt)


def test_losses_are_those_of_transformers(bench, good, ids):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(good, dtype=torch.float32)
    text = passage(ids, window=60)
    with torch.no_grad():
        logits = model(text.ids).logits
    wanted = cross_entropy(logits[:, :-1].flatten(0, 1), text.ids[:, 1:].flatten(), reduction="none")
    found = bench.losses(text)
    assert text.tokens == len(found) == 118
    np.testing.assert_allclose(found, wanted.numpy(), atol=2e-4)
    assert abs(found.mean() - bench.losses(passage(ids, window=120)).mean()) > 1e-3  # the control: context matters


@pytest.mark.parametrize(
    "fault", ["qk-left-permuted", "qk-inverse", "k-other-heads", "gate-up-swapped", "theta-x5", "layers-exchanged"]
)
def test_a_fault_undone_is_the_good_model(fault, good, bench, ids, tmp_path):
    assert plant(good, tmp_path / "broken", fault)
    text = passage(ids, window=120, keep=True)
    wanted = bench.losses(text)
    with open_checkpoint(tmp_path / "broken") as ckpt:
        broken = Bench(ckpt)
        text = passage(ids, window=120, keep=True)
        spoilt = broken.losses(text)
        fix = FAULTS[fault].fix
        assert fix is not None
        case = parse_fix(fix(json.loads((good / "config.json").read_text())))
        view = case.undo(ckpt)
        assert view is not None
        found = broken.losses(text, view)
    assert np.abs(spoilt - wanted).max() > 0.01
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_prefix_states_change_nothing(bench, ids):
    kept, whole = passage(ids, window=120, keep=True), passage(ids, window=120)
    bench.losses(kept)
    assert len(kept.states) == SHAPE.layers + 1 and not whole.states
    for fix in ("exchange-layers=2", "transpose=block.attn.o@3", "tie-head"):
        view = parse_fix(fix).undo(bench.ckpt)
        assert view is not None and view.first_layer() > 1
        np.testing.assert_allclose(bench.losses(kept, view), bench.losses(whole, view), atol=1e-6)


def test_a_view_shares_what_it_does_not_change(bench):
    view = parse_fix("exchange-layers=1").undo(bench.ckpt)
    model = bench._model(view)
    assert model.tok_emb.weight is bench._base.tok_emb.weight
    assert model.trf_blocks[0].att.W_query.weight is bench._base.trf_blocks[0].att.W_query.weight
    assert torch.equal(model.trf_blocks[1].ff.fc1.weight, bench._base.trf_blocks[2].ff.fc1.weight)
