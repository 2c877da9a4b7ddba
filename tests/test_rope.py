"""RoPE settings: one meaning in every spelling, disagreement stops, transformers computes the same frequencies."""

from __future__ import annotations

import contextlib

import pytest

from convert import rope, rope_divisors
from convert.errors import ConvertError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
HUB = {"rope_theta": 500000.0, **LLAMA3}
PLAIN = {"rope_type": "default", "rope_theta": 500000.0}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_theta": 500000, "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in LLAMA3.items()}},
        {"rope_parameters": HUB},
        {"rope_parameters": HUB, "rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3, "rope_theta": 500000.0},
        {
            "rope_theta": 500000.0,
            "rope_scaling": {k: v for k, v in LLAMA3.items() if not k.startswith("original")},
            "max_position_embeddings": 8192,
        },
    ],
)
def test_spellings_of_hugging_face(config):
    assert rope.from_hf(config, 10000.0) == HUB


@pytest.mark.parametrize(
    ("config", "theta"),
    [({}, 10000.0), ({"rope_theta": 1e6, "rope_scaling": None}, 1e6), ({"rope_parameters": {"rope_theta": 1e5}}, 1e5)],
)
def test_no_scaling(config, theta):
    assert rope.from_hf(config, 10000.0) == {"rope_type": "default", "rope_theta": theta}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rope_theta": 10000.0}, "rope_theta"),
        ({"rope_scaling": LLAMA3 | {"factor": 8.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
    ],
)
def test_two_spellings_that_disagree_stop(change, word):
    good = {"rope_parameters": HUB, "rope_theta": 500000.0, "rope_scaling": LLAMA3}
    assert rope.from_hf(good, 1.0) == HUB
    with pytest.raises(ConvertError, match=f"twice and differently: {word}"):
        rope.from_hf(good | change, 1.0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope"])
def test_unknown_types_stop(kind):
    for config in (
        {"rope_scaling": {"type": kind, "factor": 4.0}},
        {"rope_parameters": {"rope_type": kind, "factor": 4.0}},
    ):
        with pytest.raises(ConvertError, match=kind) as error:
            rope.from_hf(config, 10000.0)
        assert "llama3" in str(error.value)


@pytest.mark.parametrize("value", [None, 0, -1.0, "8", True, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["factor", "high_freq_factor"])
def test_a_field_that_is_no_number_stops(field, value):
    with pytest.raises(ConvertError, match=field):
        rope.clean(LLAMA3 | {field: value}, 5e5)


@pytest.mark.parametrize("theta", [-1.0, float("nan"), float("inf")])
def test_a_base_that_is_none_stops(theta):
    with pytest.raises(ConvertError, match="rope_theta"):
        rope.clean({}, theta)


def test_nested_by_layer_type_stops():
    with pytest.raises(ConvertError, match="nested"):
        rope.from_hf({"rope_parameters": {"full_attention": HUB, "sliding_attention": PLAIN}}, 1.0)


def test_both_spellings_are_written_equal():
    out = rope.to_hf(HUB)
    assert out == {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "rope_parameters": HUB}
    assert rope.from_hf(out, 1.0) == HUB
    assert rope.to_hf(PLAIN)["rope_scaling"] is None


def test_meta_flag():
    for dim, factor in ((2048, 32.0), (3072, 32.0), (4096, 8.0), (8192, 8.0), (16384, 8.0)):
        found = rope.from_meta({"dim": dim, "rope_theta": 500000.0, "use_scaled_rope": True}, 1.0)
        assert found == HUB | {"factor": factor}
        assert rope.to_meta(found, dim) == {"rope_theta": 500000.0, "use_scaled_rope": True}
    assert rope.from_meta({"dim": 4096}, 10000.0) == {"rope_type": "default", "rope_theta": 10000.0}
    assert rope.to_meta(PLAIN, 4096) == {"rope_theta": 500000.0}


@pytest.mark.parametrize(
    ("settings", "dim"),
    [(HUB, 4096), (HUB | {"factor": 16.0}, 2048), ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, 4096)],
)
def test_what_the_flag_cannot_say_is_refused(settings, dim):
    with pytest.raises(ConvertError, match=r"params\.json cannot hold"):
        rope.to_meta(settings, dim)


def test_recorded_numbers_win_over_the_flags_usual_ones():
    exact = HUB | {"factor": 8.0, "low_freq_factor": 2.0}
    params = {"dim": 2048, "rope_theta": 500000.0, "use_scaled_rope": True}
    assert rope.from_meta(params, 1.0, exact) == exact
    assert rope.from_meta(params | {"rope_theta": 1e4}, 1.0, exact)["factor"] == 32.0  # of another model
    assert rope.from_meta(params | {"use_scaled_rope": False}, 1.0, exact)["rope_type"] == "default"


def test_the_books_dict():
    out = rope.to_scratch(HUB)
    assert out["rope_base"] == 500000.0
    assert set(out["rope_freq"]) == {"factor", "low_freq_factor", "high_freq_factor", "original_context_length"}
    assert rope.from_scratch(out, 1.0) == HUB
    assert rope.from_scratch(rope.to_scratch(PLAIN), 1.0) == PLAIN
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ConvertError, match="linear"):
        rope.to_scratch(linear)
    assert rope.from_scratch(rope.to_scratch(linear, reference=True), 1.0) == linear


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_are_those_of_transformers(factor, head_dim):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = HUB | {"factor": factor}
    config = LlamaConfig(
        hidden_size=8 * head_dim,
        num_attention_heads=8,
        head_dim=head_dim,
        rope_parameters=dict(settings),
        max_position_embeddings=131072,
    )
    wanted, scale = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    assert scale == 1.0
    found = rope.inverse_frequencies(settings, head_dim)
    assert found == pytest.approx(wanted.tolist(), rel=1e-6)
    assert rope.inverse_frequencies(PLAIN, head_dim) != pytest.approx(wanted.tolist(), rel=1e-2)
    # GGUF's divisors: the plain frequencies over the scaled ones
    plain = rope.inverse_frequencies(PLAIN, head_dim)
    ratio = [a / b for a, b in zip(plain, wanted.tolist(), strict=True)]
    assert rope.divisors(settings, head_dim) == pytest.approx(ratio, rel=1e-6)


def test_linear_frequencies_are_those_of_transformers():
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    config = LlamaConfig(hidden_size=512, num_attention_heads=8, rope_parameters=dict(settings))
    wanted, _ = ROPE_INIT_FUNCTIONS["linear"](config, "cpu")
    assert rope.inverse_frequencies(settings, 64) == pytest.approx(wanted.tolist(), rel=1e-6)


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize(
    "stated",
    [
        {"factor": 8.0, "original_max_position_embeddings": 8192},
        {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
        {"factor": 16.0, "original_max_position_embeddings": 512, "beta_fast": 20.0, "beta_slow": 2.0},
        {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 1.0},
        {"factor": 1.0, "original_max_position_embeddings": 4096},
    ],
    ids=str,
)
def test_yarn_is_that_of_transformers(stated, head_dim):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {"rope_type": "yarn", "rope_theta": 500000.0, **stated}
    cleaned = rope.clean(settings, 1.0)
    assert set(cleaned) == {"rope_type", "rope_theta", *rope.FIELDS["yarn"]}  # nothing is left to a reader's default
    for said in (settings, cleaned):
        config = LlamaConfig(
            hidden_size=8 * head_dim,
            num_attention_heads=8,
            head_dim=head_dim,
            rope_parameters=dict(said),
            max_position_embeddings=65536,
        )
        wanted, scale = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
        assert rope.inverse_frequencies(cleaned, head_dim) == pytest.approx(wanted.tolist(), rel=1e-6)
        assert cleaned["attention_factor"] == pytest.approx(scale, rel=1e-12)
    if stated["factor"] > 1:
        plain = rope.inverse_frequencies({**cleaned, "rope_type": "default"}, head_dim)
        assert plain != pytest.approx(wanted.tolist(), rel=1e-2)


def test_yarn_in_gguf_and_back():
    stated = {"factor": 8.0, "original_max_position_embeddings": 8192}
    settings = rope.clean({"rope_type": "yarn", **stated}, 500000.0)
    keys = rope.to_gguf(settings, "olmo2")
    stored = {k: _float32([v])[0] if isinstance(v, float) else v for k, v in keys.items()}
    raw = {"general.architecture": "olmo2", "olmo2.rope.freq_base": 500000.0, **stored}
    assert rope.clean(rope.from_gguf(raw), 1.0) == settings
    bare = {k: v for k, v in raw.items() if "yarn_" not in k}  # files of others
    assert rope.clean(rope.from_gguf(bare), 1.0) == settings
    for change in ({"attention_factor": 1.0}, {"beta_fast": 20.0}, {"beta_slow": 2.0}):
        with pytest.raises(ConvertError, match=f"llama.cpp computes.*{next(iter(change))}"):
            rope.to_gguf(settings | change, "olmo2")
    with pytest.raises(ConvertError, match="truncate"):
        rope.clean({**settings, "truncate": False}, 1.0)


def _float32(values: list[float]) -> list[float]:
    import numpy as np

    return np.array(values, np.float32).astype(float).tolist()


@pytest.mark.parametrize(
    "change",
    [{}, {"factor": 8.0}, {"original_max_position_embeddings": 4096}, {"high_freq_factor": 8.0}, {"factor": 4.5}],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_settings_come_back_from_divisors(change, head_dim):
    settings = HUB | change
    values = _float32(rope.divisors(settings, head_dim))
    found = rope_divisors.from_divisors(values, 500000.0, head_dim)
    assert rope.divisors(found, head_dim) == pytest.approx(values, rel=2e-6)
    if not set(change) - {"factor"}:
        assert found == settings


def test_recorded_settings_are_believed_only_if_they_give_the_divisors():
    odd = HUB | {"low_freq_factor": 2.0}
    values = _float32(rope.divisors(odd, 128))
    assert rope_divisors.from_divisors(values, 500000.0, 128, odd) == odd
    wrong = HUB | {"low_freq_factor": 3.0}
    with contextlib.suppress(ConvertError):  # no scaling with a low factor of 1 gives these
        assert rope_divisors.from_divisors(values, 500000.0, 128, wrong) != wrong


@pytest.mark.parametrize("values", [[1.0, 2.0, 1.5, 9.0], [3.0] * 32, [1.0] * 31 + [0.5]])
def test_divisors_of_no_llama3_scaling_stop(values):
    with pytest.raises(ConvertError, match="divisors"):
        rope_divisors.from_divisors(values, 500000.0, 2 * len(values))
