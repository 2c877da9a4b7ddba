"""What shapes tell about a config: right numbers, nothing invented, head counts never guessed."""

from __future__ import annotations

import pytest

from convert import config as configs
from convert import shapes
from convert.expr import Expr
from convert.layout import Dims, expand
from convert.table import load_table

TABLE = load_table("llama")


def full(size: str, layout: str) -> tuple[dict, dict]:
    config = configs.published(TABLE, size)
    return config, {n: s.shape for n, s in expand(TABLE, Dims(TABLE, config), layout).items()}


@pytest.mark.parametrize("layout", TABLE.layouts)
@pytest.mark.parametrize("size", ["llama3.2-1b", "llama2-7b", "smollm2-135m"])
def test_everything_but_the_heads_follows_from_shapes(size, layout):
    config, found = full(size, layout)
    kept = {"num_attention_heads": config["num_attention_heads"]}
    filled, notes = shapes.fill(TABLE, kept, layout, found)
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"):
        assert filled[key] == config[key], key
        assert any(note.startswith(f"{key} = {config[key]}, from") for note in notes)
    assert filled["attention_bias"] is False and filled["mlp_bias"] is False
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    assert Dims(TABLE, filled)["hd"] == head_dim
    assert Dims(TABLE, filled)["K"] == config["num_key_value_heads"]


def test_what_the_config_says_is_left_alone():
    config, found = full("llama3.2-1b", "hf")
    filled, notes = shapes.fill(TABLE, config | {"vocab_size": 5, "attention_bias": True}, "hf", found)
    assert filled["vocab_size"] == 5 and filled["attention_bias"] is True
    assert not any("vocab_size" in n for n in notes)


def test_one_damaged_layer_does_not_speak_for_all():
    config, found = full("llama3.2-1b", "hf")
    kept = {k: config[k] for k in ("num_attention_heads", "num_key_value_heads")}
    wrong = found | {
        "model.layers.0.self_attn.q_proj.weight": (1024, 2048),
        "model.layers.0.mlp.up_proj.weight": (9, 2048),
    }
    del wrong["model.layers.1.mlp.gate_proj.weight"]
    filled, _ = shapes.fill(TABLE, kept, "hf", wrong)
    assert filled["intermediate_size"] == 8192
    assert Dims(TABLE, filled)["hd"] == 64


def test_head_counts_are_not_guessed():
    _, found = full("llama3.2-1b", "hf")
    filled, _ = shapes.fill(TABLE, {}, "hf", found)
    assert filled.get("num_attention_heads") is None
    said = shapes.head_candidates({}, 2048, 512)
    assert "32 heads, 8 kv heads of 64" in said and "16 heads, 4 kv heads of 128" in said
    assert not any(s.startswith("2048 heads") for s in said)
    assert all(int(s.split()[0]) % int(s.split()[2]) == 0 for s in said)


def test_explicit_head_dim_and_biases():
    config = configs.published(TABLE, "llama3.2-1b") | {"head_dim": 128, "attention_bias": True}
    found = {n: s.shape for n, s in expand(TABLE, Dims(TABLE, config), "hf").items()}
    kept = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048}
    filled, notes = shapes.fill(TABLE, kept, "hf", found)
    assert filled["head_dim"] == 128
    assert filled["attention_bias"] is True and filled["mlp_bias"] is False
    assert any("q_proj.bias" in n for n in notes)


@pytest.mark.parametrize(
    ("text", "size", "known", "want"),
    [
        ("V", 96, {}, ("vocab_size", 96)),
        ("K*hd", 16, {"head_dim": 8}, ("num_key_value_heads", 2)),
        ("K*hd", 17, {"head_dim": 8}, None),
        ("K*hd", 16, {}, None),
        ("2*F", 160, {}, ("intermediate_size", 80)),
        ("F + 1", 81, {}, None),
        ("V", 96, {"vocab_size": 96}, None),
    ],
)
def test_solve(text, size, known, want):
    assert shapes.solve(TABLE, Dims(TABLE, known), Expr(text), size) == want


def test_a_contradiction_is_explained_by_the_number_that_would_fit():
    dims = Dims(TABLE, {"num_key_value_heads": 3, "head_dim": 8})
    assert shapes.solve(TABLE, dims, Expr("K*hd"), 16, known=True) == ("num_key_value_heads", 2)


def test_layers_are_counted_by_their_highest_number():
    names = {"model.layers.0.x": 0, "model.layers.11.x": 0, "model.layers.a.x": 0, "other.layers.99.x": 0}
    assert shapes.count_layers(TABLE, "hf", names) == 12
    assert shapes.count_layers(TABLE, "hf", {}) == 0
