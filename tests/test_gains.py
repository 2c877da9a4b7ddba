"""Gains: a real one is seen, and false alarms are as rare as promised, counted."""

from __future__ import annotations

import numpy as np
import pytest

from convert.gains import gain, interval, segments


def correlated(rng: np.random.Generator, count: int, mean: float) -> np.ndarray:
    """Differences of neighbouring tokens hang together: an autoregression of 0.5."""
    noise = rng.normal(size=count + 20)
    for i in range(1, len(noise)):
        noise[i] += 0.5 * noise[i - 1]
    return mean + 0.3 * noise[20:]


def test_a_gain_is_seen_and_none_is_not():
    rng = np.random.default_rng(0)
    base = rng.gamma(2.0, 1.5, size=383)
    found = gain(base, base - correlated(rng, 383, 0.4))
    assert found.beyond(0.01, 1e-4) and found.low < 0.4 < found.high
    assert not gain(base, base + correlated(rng, 383, 0.4)).beyond(0.0, 0.5)
    assert not gain(base, base).beyond(0.0, 0.5)


def test_false_alarms_are_as_rare_as_promised():
    rng = np.random.default_rng(1)
    base = np.zeros(383)
    alarms = sum(gain(base, correlated(rng, 383, 0.0)).chance < 0.05 for _ in range(400))
    assert 4 <= alarms <= 40  # 20 expected; segments take care of most of the correlation
    assert sum(gain(base, correlated(rng, 383, 0.0)).beyond(0.0, 1e-4) for _ in range(400)) <= 1


def test_the_interval_holds_the_mean():
    rng = np.random.default_rng(2)
    held = 0
    for _ in range(200):
        low, high = interval(correlated(rng, 1023, 3.0))
        held += low < 3.0 < high
    assert 178 <= held <= 200


@pytest.mark.parametrize(("count", "parts"), [(3071, 95), (383, 12), (127, 12), (7, 7)])
def test_segments_are_of_32_tokens_or_at_least_twelve(count, parts):
    assert len(segments(np.ones(count))) == parts
