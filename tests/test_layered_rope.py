"""RoPE settings per kind of layer: every spelling, what silence means, contradictions, and the table's section."""

from __future__ import annotations

import pytest

from convert import layered_rope, rope, rope_divisors
from convert.errors import ConvertError, TableError

SECTION = {
    "full_attention": {
        "default": {"rope_theta": 1e6},
        "scaled": True,
        "hf": {"rope_theta": "rope_theta"},
        "scratch": {"rope_theta": "rope_base"},
        "gguf": {"rope_theta": "{arch}.rope.freq_base"},
    },
    "sliding_attention": {
        "default": {"rope_theta": 1e4},
        "hf": {"rope_theta": "rope_local_base_freq"},
        "scratch": {"rope_theta": ["rope_local_base", "rope_swa_base"]},
        "gguf": {"rope_theta": "{arch}.rope.freq_base_swa"},
    },
}
KINDS = layered_rope.read_section(SECTION, "mine.toml")
LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def test_every_spelling():
    older = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}}
    assert layered_rope.read(KINDS, "hf", {"rope_parameters": LINEAR}) == LINEAR
    assert layered_rope.read(KINDS, "hf", older, scaling=older["rope_scaling"]) == LINEAR
    assert layered_rope.read(KINDS, "hf", older | {"rope_parameters": LINEAR}, scaling=older["rope_scaling"]) == LINEAR
    gguf = {"x.rope.freq_base": 1e6, "x.rope.freq_base_swa": 1e4}
    assert layered_rope.read(KINDS, "gguf", gguf, arch="x", scaling={"rope_type": "linear", "factor": 8.0}) == LINEAR
    assert layered_rope.read(KINDS, "scratch", {"rope_swa_base": 7.0})["sliding_attention"]["rope_theta"] == 7.0


def test_silence_means_the_default():
    assert layered_rope.read(KINDS, "hf", {}) == {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    one = layered_rope.read(KINDS, "hf", {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}})
    assert one["full_attention"]["rope_theta"] == 5e5 and one["sliding_attention"]["rope_theta"] == 1e4
    proportional = SECTION | {"full_attention": {"default": {"rope_theta": 1e6, "rope_type": "proportional"}}}
    kinds = layered_rope.read_section(proportional, "mine.toml")
    # the default's type goes with its fields; a stated one stands alone
    assert layered_rope.read(kinds, "hf", {})["full_attention"]["partial_rotary_factor"] == 1.0
    stated = {"rope_parameters": {"full_attention": {"rope_type": "default"}}}
    assert layered_rope.read(kinds, "hf", stated)["full_attention"] == {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_parameters": LINEAR, "rope_theta": 5e5},
        {"rope_parameters": LINEAR, "rope_local_base_freq": 5e5},
        {"rope_parameters": LINEAR["full_attention"]},
        {"rope_parameters": {"linear_attention": {}}},
        {"rope_parameters": [1]},
        {"rope_parameters": {"full_attention": {"rope_type": "unheard"}}},
        {"rope_parameters": {"full_attention": {"rope_theta": "many"}}},
        {"rope_theta": {}},
        {"rope_theta": -1.0},
    ],
    ids=str,
)
def test_what_stops(raw):
    with pytest.raises(ConvertError):
        layered_rope.read(KINDS, "hf", raw)


def test_writing_says_it_in_every_spelling():
    written = layered_rope.to_hf(KINDS, LINEAR)
    assert written["rope_parameters"] == LINEAR and written["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert (written["rope_theta"], written["rope_local_base_freq"]) == (1e6, 1e4)
    assert layered_rope.read(KINDS, "hf", written, scaling=written["rope_scaling"]) == LINEAR
    assert layered_rope.to_gguf(KINDS, LINEAR, "x") == {"x.rope.freq_base": 1e6, "x.rope.freq_base_swa": 1e4}
    with pytest.raises(ConvertError, match="no word for"):
        layered_rope.to_scratch(KINDS, LINEAR)
    whole = layered_rope.to_scratch(KINDS, LINEAR, reference=True)
    assert layered_rope.read(KINDS, "scratch", whole) == LINEAR


@pytest.mark.parametrize(
    "section",
    [
        {"full_attention": {}},
        {"full_attention": {"default": {"rope_theta": 1.0}, "meta": {}}},
        {"full_attention": {"default": {"rope_theta": 1.0}, "hf": "rope_theta"}},
    ],
)
def test_a_wrong_section_is_named(section):
    with pytest.raises(TableError, match=r"mine\.toml: rope\.full_attention"):
        layered_rope.read_section(section, "mine.toml")


def test_proportional_frequencies_are_those_of_transformers_and_their_divisors_say_them():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.Gemma4TextConfig(num_hidden_layers=6)
    wanted, _ = ROPE_INIT_FUNCTIONS["proportional"](config, "cpu", layer_type="full_attention")
    settings = rope.clean({"rope_type": "proportional", "partial_rotary_factor": 0.25}, 1e6)
    found = rope.inverse_frequencies(settings, 512)
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-6, atol=0)
    divisors = rope.divisors(settings, 512)
    assert rope_divisors.proportion(divisors, settings) == settings
    half = [1.0] * 128 + [1e30] * 128
    assert rope_divisors.proportion(half, settings)["partial_rotary_factor"] == 0.5
    for wrong in ([2.0] * 256, [1e30, *([1.0] * 255)], [1.0, 5.0] * 128):
        with pytest.raises(ConvertError, match="no proportional RoPE"):
            rope_divisors.proportion(wrong, settings)
    with pytest.raises(ConvertError, match="factor"):
        rope.clean({"rope_type": "proportional", "factor": 2.0}, 1e6)
