"""Configs: published numbers of Meta's formula, missing and impossible values, and every spelling and back."""

from __future__ import annotations

import json

import pytest

from convert import config as configs
from convert import json_file
from convert.errors import ConvertError, FormatError, UsageError
from convert.table import families, load_table

# dim, width, multiple_of, ffn_dim_multiplier of the released params.json files
RELEASED = [
    (4096, 11008, 256, None),
    (5120, 13824, 256, None),
    (8192, 28672, 4096, 1.3),
    (4096, 14336, 1024, 1.3),
    (16384, 53248, 4096, 1.2),
    (2048, 8192, 256, 1.5),
    (3072, 8192, 256, 1.0),
]


def meta_ffn(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Meta's FeedForward.__init__, statement by statement."""
    hidden_dim = 4 * dim
    hidden_dim = int(2 * hidden_dim / 3)
    if multiplier is not None:
        hidden_dim = int(multiplier * hidden_dim)
    return multiple_of * ((hidden_dim + multiple_of - 1) // multiple_of)


@pytest.mark.parametrize(("dim", "width", "multiple", "multiplier"), RELEASED)
def test_the_released_numbers(dim, width, multiple, multiplier):
    assert configs.ffn_width(dim, multiple, multiplier) == meta_ffn(dim, multiple, multiplier) == width
    found = configs.ffn_formula(dim, width)
    assert meta_ffn(dim, found["multiple_of"], found.get("ffn_dim_multiplier")) == width


def test_the_published_pair_is_found_where_it_is_the_first_that_fits():
    for dim, width, multiple, multiplier in RELEASED:
        found = configs.ffn_formula(dim, width)
        same = (found["multiple_of"], found.get("ffn_dim_multiplier")) == (multiple, multiplier)
        # 8B (1024, 1.3) and 70B (4096, 1.3) are reached with 256 or 512 as well; what counts is the width.
        assert same or width % found["multiple_of"] == 0


@pytest.mark.parametrize("width", [1, 7, 80, 97, 112, 144, 192, 1000, 1001, 1536, 5632, 11007, 28673])
@pytest.mark.parametrize("dim", [36, 48, 64, 576, 2048])
def test_a_formula_for_any_width(dim, width):
    found = configs.ffn_formula(dim, width)
    assert meta_ffn(dim, found["multiple_of"], found.get("ffn_dim_multiplier")) == width


def hub(layout: str, raw: dict, **more) -> dict:
    return configs.to_hub(load_table("llama"), layout, raw, **more)


PARAMS = {"dim": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": -1, "multiple_of": 256, "norm_eps": 1e-6}


def test_meta():
    found = hub("meta", PARAMS)
    assert "vocab_size" not in found  # -1: the embedding tells
    assert "num_key_value_heads" not in found  # absent: as many as heads, the table's dim says so
    assert found["rope_theta"] == 10000.0
    assert found["rms_norm_eps"] == 1e-6
    assert hub("meta", {"model": PARAMS, "lora": {"rank": 8}}) == found
    assert hub("meta", PARAMS | {"n_kv_heads": None}) == found
    assert hub("meta", PARAMS | {"n_kv_heads": 8})["num_key_value_heads"] == 8


def test_eps_of_every_layout_where_the_config_is_silent():
    assert hub("hf", {"hidden_size": 64})["rms_norm_eps"] == 1e-6  # LlamaConfig's default
    assert hub("meta", {"dim": 64, "n_layers": 1})["rms_norm_eps"] == 1e-5
    assert hub("scratch", {"emb_dim": 64})["rms_norm_eps"] == 1e-5


@pytest.mark.parametrize("value", ["64", 64.0, -1, 1e400, float("nan"), True, [64], 2**50])
def test_no_sensible_number(value):
    with pytest.raises(ConvertError, match="hidden_size"):
        hub("hf", {"hidden_size": value, "num_hidden_layers": 2})


def test_all_bad_numbers_at_once():
    with pytest.raises(ConvertError) as error:
        hub("hf", {"hidden_size": "a", "num_hidden_layers": 99_999, "vocab_size": -7})
    assert len(error.value.problems) == 3


@pytest.mark.parametrize("size", load_table("llama").sizes)
def test_there_and_back_in_every_spelling(size):
    table = load_table("llama")
    config = configs.published(table, size)
    structure = {k: config[k] for k in table.config if k in config}
    as_hf = json.loads(json.dumps(configs.to_hf(table, config, "BF16")))
    assert as_hf["dtype"] == as_hf["torch_dtype"] == "bfloat16"
    assert as_hf["architectures"] == ["LlamaForCausalLM"]
    back = hub("hf", as_hf)
    assert {k: back[k] for k in structure} == structure
    assert back["rope_parameters"] == config["rope_parameters"]

    params = json.loads(json.dumps(configs.to_meta(table, config)))
    width = params["multiple_of"], params.get("ffn_dim_multiplier")
    assert meta_ffn(config["hidden_size"], *width) == config["intermediate_size"]
    back = hub("meta", params)
    kept = {k: v for k, v in structure.items() if k in back and k != "max_position_embeddings"}
    assert {"hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"} <= set(kept)
    assert {k: back[k] for k in kept} == kept
    assert back["rope_parameters"] == config["rope_parameters"]

    back = hub("scratch", json.loads(json.dumps(configs.to_scratch(table, config, "BF16"))))
    assert {k: back[k] for k in structure} == structure
    assert back["rope_parameters"] == config["rope_parameters"]


def test_transformers_reads_what_we_write():
    pytest.importorskip("transformers")
    from transformers import LlamaConfig

    table = load_table("llama")
    config = configs.published(table, "llama3.2-1b")
    read = LlamaConfig(**configs.to_hf(table, config, "BF16"))
    assert (read.hidden_size, read.num_key_value_heads, read.head_dim) == (2048, 8, 64)
    assert read.rope_parameters["factor"] == 32.0
    assert read.rope_parameters["rope_theta"] == 500000.0
    assert read.tie_word_embeddings is True


def test_the_record_fills_what_meta_cannot_say_and_changes_nothing_it_says():
    recorded = {"max_position_embeddings": 131072, "hidden_size": 1, "bos_token_id": 5}
    found = hub("meta", PARAMS, recorded=recorded)
    assert found["max_position_embeddings"] == 131072
    assert found["bos_token_id"] == 5
    assert found["hidden_size"] == 4096


def test_whose_spelling():
    tables = [load_table(f) for f in families()]
    assert configs.layout_of({"hidden_size": 1}, tables) == "hf"
    assert configs.layout_of({"model_type": "llama"}, tables) == "hf"
    assert configs.layout_of(PARAMS, tables) == "meta"
    assert configs.layout_of({"emb_dim": 1, "n_layers": 2, "n_heads": 2, "n_kv_groups": 1}, tables) == "scratch"
    assert configs.layout_of({"learning_rate": 1e-3, "vocab_size": 5}, tables) is None


def test_files_that_are_no_config(tmp_path):
    path = tmp_path / "config.json"
    for content, word in (
        (b"{", "JSON"),
        (b"\xff\xfe\x00", "JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n", "LFS"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"[" * 100_000, "JSON"),
    ):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=f"(?i){word}"):
            configs.read_json(path)
    path.write_bytes(b'\xef\xbb\xbf{"hidden_size": 5}')  # the mark that editors on Windows put in front
    assert configs.read_json(path) == {"hidden_size": 5}
    with path.open("wb") as file:
        file.truncate(json_file.MAX_BYTES + 1)
    with pytest.raises(FormatError, match="bytes"):
        configs.read_json(path)


def test_an_unknown_size_lists_the_known():
    with pytest.raises(UsageError, match=r"llama3\.2-1b"):
        configs.published(load_table("llama"), "llama9")


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        ("hf", {"head_dim": 0}),
        ("hf", {"rms_norm_eps": 0}),
        ("hf", {"num_attention_heads": 4, "num_key_value_heads": 3}),
        ("hf", {"max_position_embeddings": 0}),
        ("hf", {"attention_bias": "false"}),
        ("hf", {"sliding_window": 0}),
        ("meta", {"multiple_of": 0}),
        ("meta", {"multiple_of": 256.0}),
        ("meta", {"ffn_dim_multiplier": float("inf")}),
        ("meta", {"ffn_dim_multiplier": [1]}),
        ("meta", {"use_scaled_rope": "yes"}),
        ("gguf", {"llama.attention.head_count": 0}),
        ("gguf", {"llama.rope.freq_base": 0.0}),
        ("scratch", {"n_heads": True}),
        ("scratch", {"rope_freq": 0}),
    ],
)
def test_values_that_no_model_has(layout, config):
    sound = {
        "hf": {"hidden_size": 64, "num_hidden_layers": 2},
        "meta": {"dim": 64, "n_layers": 2},
        "scratch": {"emb_dim": 64, "n_layers": 2},
        "gguf": {"general.architecture": "llama", "llama.embedding_length": 64},
    }[layout]
    (key,) = (k for k in reversed(config) if k not in ("num_attention_heads",)) if layout == "hf" else config
    said = {"llama.attention.head_count": "head_count", "llama.rope.freq_base": "rope_theta"}.get(key, key)
    hub(layout, sound)
    with pytest.raises(ConvertError, match=said) as error:
        hub(layout, sound | config)
    assert error.value.problems[0].found is not None


def test_null_and_the_zeros_that_say_none_are_no_values():
    assert hub("meta", PARAMS | {"ffn_dim_multiplier": None, "use_scaled_rope": None, "multiple_of": None})
    gguf = {"general.architecture": "llama", "llama.embedding_length": 64, "llama.attention.sliding_window": 0}
    assert "sliding_window" not in hub("gguf", gguf)


def test_more_experts_than_there_are():
    table = load_table("qwen3_moe")
    sound = {"hidden_size": 64, "num_experts": 4, "num_experts_per_tok": 4}
    configs.to_hub(table, "hf", sound)
    with pytest.raises(ConvertError, match="num_experts_per_tok is 5"):
        configs.to_hub(table, "hf", sound | {"num_experts_per_tok": 5})


def test_an_unknown_kind_of_layer():
    config = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    configs.to_hub(load_table("gemma3"), "hf", config)
    with pytest.raises(ConvertError, match="layer_types"):
        configs.to_hub(load_table("gemma3"), "hf", config | {"layer_types": ["full_attention", "evil"]})


def test_a_key_twice(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": 1, "b": {"c": [1], "c": [1]}, "a": 1}')
    assert configs.read_json(path) == {"a": 1, "b": {"c": [1]}}
    path.write_text('{"a": 1, "b": {"c": 1, "c": 2}, "a": true}')
    with pytest.raises(FormatError, match="twice and differently") as error:
        configs.read_json(path)
    assert len(error.value.problems) == 2
    path.write_bytes('{"a": 1}'.encode("utf-16"))
    with pytest.raises(FormatError, match="UTF-16") as error:
        configs.read_json(path)
    assert "UTF-8" in (error.value.problems[0].hint or "")
