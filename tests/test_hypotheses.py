"""The search for the cause, with a bench whose losses are known: what is named, what is not, and what is left out."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import pytest

from convert.checkpoint import open_checkpoint
from convert.faults import parse_fix
from convert.gains import gain
from convert.hypotheses import BETTER, frequency_level, test_all
from convert.trials import Passage, passage
from tests.fixtures.hf import make_hf
from tests.fixtures.shapes import Shape

SHAPE = Shape(64, 8, 2, 8, 96, 128, layers=5, context=4096)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    with open_checkpoint(make_hf(tmp_path_factory.mktemp("hypotheses") / "model", SHAPE).path) as opened:
        yield opened


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(5).integers(128, size=3200).tolist()


class Bench:
    """Losses by what is undone: ``base`` for the model itself, ``known`` nats for a fix, ``worse`` for any other."""

    def __init__(self, ckpt, base, known, *, worse=1.0, noise=0.3):
        self.ckpt, self.base, self.worse, self.noise = ckpt, base, worse, noise
        self.known = {self._key(parse_fix(fix).undo(ckpt)): loss for fix, loss in known.items()}
        self.ran: list[int] = []

    @staticmethod
    def _key(view):
        values = [(name, source.read(0, source.shape[0]).tobytes()) for name, source in view.changed_tensors()]
        return crc32(repr((sorted(values), view.config["rope_parameters"], tuple(view.removed))).encode())

    def losses(self, text: Passage, view=None):
        count = text.tokens
        tokens = np.random.default_rng(0).gamma(2.0, 0.5, size=count)
        self.ran.append(count)
        if view is None:
            return tokens + self.base
        key = self._key(view)
        jitter = np.random.default_rng(key).normal(size=count) * self.noise
        found = self.known.get(key, self.base + self.worse)
        return tokens + (found(count) if callable(found) else found) + jitter


def search(ckpt, ids, base, known, **more):
    bench = Bench(ckpt, base, known, **more)
    return test_all(bench, ids), bench


def test_a_good_model_is_left_alone(ckpt, ids):
    found, bench = search(ckpt, ids, 1.0, {})
    assert found.cause is None and not found.open and found.sensible and found.power > 0.5
    assert found.level == pytest.approx(frequency_level(ids)) and 4.7 < found.level < np.log(128) + 0.1
    assert max(bench.ran) <= 1023  # every number lost on the way: none was tried on the long text


def test_noise_is_no_cause(ckpt, ids):
    """Hypotheses that change nothing but noise, a hundred of them."""
    for seed in range(3):
        found, _ = search(ckpt, ids, 1.0 + seed / 100, {}, worse=0.0, noise=0.2)
        assert found.cause is None


def test_a_gross_fault_is_named_without_the_long_text(ckpt, ids):
    found, bench = search(ckpt, ids, 4.0, {"unpermute-qk": 1.0, "unpermute-k": 2.5})
    assert found.cause is not None and found.cause.fixes == ["unpermute-qk"] and not found.rivals
    assert found.cause.gain.mean == pytest.approx(3.0, abs=0.1)
    assert max(bench.ran) < 400 and {"layers", "numbers"} <= set(found.skipped)


def test_what_is_no_better_than_frequencies_explains_nothing(ckpt, ids):
    """Dividing the logits of a model without its head by something makes it less sure, and its loss lower."""
    found, _ = search(ckpt, ids, 12.0, {"unscale-embedding": 9.0})
    assert found.cause is None and not found.sensible
    assert any(t.note for t in found.trials if t.fixes == ["unscale-embedding"])


def test_one_layer_is_found_where_nothing_else_explains_it(ckpt, ids):
    found, _ = search(ckpt, ids, 2.0, {"exchange-layers=2": 1.2, "swap-norms": 1.9})
    assert found.cause is not None and found.cause.fixes == ["exchange-layers=2"]


def test_numbers_are_decided_on_the_long_text(ckpt, ids):
    def theta(count):
        return 1.2 if count == 3071 else 1.5  # better in the long window, where positions are far apart

    found, bench = search(ckpt, ids, 1.5, {"set-theta=100000": theta})
    assert found.cause is not None and found.cause.fixes == ["set-theta=100000"] and found.cause.tokens == 3071
    assert 3071 in bench.ran


def test_numbers_that_the_text_does_not_tell_apart_are_said(ckpt, ids):
    found, _ = search(ckpt, ids, 1.5, {"set-theta=100000": 1.5, "set-theta=1000000": 1.501}, noise=0.2)
    assert found.cause is None
    assert {t.fixes[0] for t in found.open} == {"set-theta=100000", "set-theta=1000000"}


def test_two_equally_good_ones_are_rivals(ckpt, ids):
    found, _ = search(ckpt, ids, 4.0, {"unpermute-qk": 1.0, "permute-k": 1.002}, noise=0.2)
    assert found.cause is not None and [t.fixes for t in (found.cause, *found.rivals)] in (
        [["unpermute-qk"], ["permute-k"]],
        [["permute-k"], ["unpermute-qk"]],
    )


def test_what_makes_the_model_worse_is_no_rival(ckpt, ids):
    """Its few bad tokens may be chance; that it is no better than the model as it is remains."""

    def theta(count):
        return 2.0 + 2.2 * (np.arange(count) // 31 % 3 == 0)  # in every third segment

    known = {"swap-norms": 1.8, "set-theta=100000": theta}
    found, _ = search(ckpt, ids, 2.0, known, noise=0.1)
    assert found.cause is not None and found.cause.fixes == ["swap-norms"] and not found.rivals
    seen = next(t for t in found.trials if t.fixes == ["set-theta=100000"] and t.tokens == found.cause.tokens)
    assert seen.gain.mean < -0.5 and not gain(seen.losses, found.cause.losses).beyond(0.0, BETTER)  # the control


def test_windows_are_no_longer_than_the_model_takes():
    text = passage(list(range(1000)), window=256)
    assert text.ids.shape == (3, 256) and text.tokens == 765
