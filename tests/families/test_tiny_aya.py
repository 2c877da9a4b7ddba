"""Tiny Aya (Cohere2) against transformers, real llama.cpp, and the key sets that running code has."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert import config as configs
from convert.engines.llama_cpp import available
from convert.errors import ConvertError
from convert.layout import Dims, expand
from convert.table import load_table
from convert.tokenizer import pretokenizers
from tests.families import faults as wrong_tables
from tests.families import golden
from tests.families.mixed import (
    KINDS,
    Tiny,
    at_places,
    converted,
    give_tokenizer,
    llama_cpp,
    off,
    prompt,
    reference,
    run_reference,
    tiny,
    token_ids,
    with_and_without_cache,
)
from tests.gguf_files import keys as gguf_keys
from tests.reference.models import one_thread  # noqa: F401

transformers = pytest.importorskip("transformers")

FAMILY = "tiny_aya"
KEYS = json.loads((Path(__file__).parents[1] / "data" / "tiny_aya_keys.json").read_text(encoding="utf-8"))
VOCAB = 128
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "sliding_window": 24,
    "layer_types": KINDS,
    "logit_scale": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 0,
}


def make(folder: Path, **changes: Any) -> Tiny:
    return tiny(folder, transformers.Cohere2ForCausalLM(transformers.Cohere2Config(**SIZES | changes)))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Tiny:
    """Tied, as the released models are."""
    return make(tmp_path_factory.mktemp(FAMILY))


@pytest.fixture(scope="module")
def untied(tmp_path_factory) -> Tiny:
    """So that head and embedding can be told apart."""
    return make(tmp_path_factory.mktemp(FAMILY), tie_word_embeddings=False)


# ---- names, shapes, configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(KEYS))
def test_the_very_keys_and_shapes_that_the_classes_have(name):
    layout, case = name.split("/")[0], KEYS[name]
    hub = configs.to_hub(load_table(FAMILY), layout, configs.plain(case["config"]))
    assert golden.shapes(FAMILY, layout, hub) == case["keys"]
    assert golden.shapes(FAMILY, layout, hub | {"head_dim": hub["head_dim"] + 2}) != case["keys"]
    assert golden.shapes(FAMILY, layout, hub | {"num_hidden_layers": 1}) != case["keys"]


@pytest.mark.parametrize("layout", ["hf", "scratch", "gguf"])
def test_golden(layout):
    assert golden.same(FAMILY, layout, SIZES), "python -m tests.families.test_tiny_aya writes it anew; read the diff"


def test_the_published_size():
    table = load_table(FAMILY)
    hub = configs.published(table, "tiny-aya-3.35b")
    for layout in table.layouts:
        slots = expand(table, Dims(table, hub), layout).values()
        count = sum(math.prod(s.shape) for s in slots if not table.rows[s.keys[0][0]].tied_to)
        assert count == 3_349_227_520  # what the book's class has
    assert hub["layer_types"] == [*["sliding_attention"] * 3, "full_attention"] * 9
    assert Dims(table, hub)["layer_period"] == 4


def test_configs_of_every_spelling_say_the_same():
    table = load_table(FAMILY)
    v5 = transformers.Cohere2Config(**SIZES).to_dict()
    v4 = {k: v for k, v in v5.items() if k not in ("rope_parameters", "layer_types")}
    v4 |= {"rope_theta": 50000.0, "sliding_window_pattern": 4, "torch_dtype": "float32"}
    hub = configs.to_hub(table, "hf", v5)
    quantities = (*SIZES, "layer_norm_eps", "tie_word_embeddings", "head_dim")
    old = configs.to_hub(table, "hf", v4)
    assert {k: old[k] for k in quantities} == {k: hub[k] for k in quantities}
    book = configs.to_scratch(table, hub, "F32")
    assert (book["n_kv_heads"], book["rope_base"], book["context_length"]) == (2, 50000.0, 512)
    assert book["tie_word_embeddings"] is True and book["attention_bias"] is False and "rope_freq" not in book
    again = configs.to_hub(table, "scratch", book)
    assert {k: again[k] for k in quantities} == {k: hub[k] for k in quantities}
    # what we write is read by transformers as what it was
    written = configs.to_hf(table, hub, "F32")
    theirs = transformers.Cohere2Config(**{k: v for k, v in written.items() if k != "architectures"}).to_dict()
    assert {k: theirs[k] for k in quantities} == {k: v5[k] for k in quantities}


def test_a_silent_config_means_what_transformers_takes_for_granted():
    silent = {"model_type": "cohere2", "hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 8}
    hub = configs.to_hub(load_table(FAMILY), "hf", silent)
    theirs = transformers.Cohere2Config(**{k: v for k, v in silent.items() if k != "model_type"})
    for key in ("logit_scale", "sliding_window", "layer_types", "layer_norm_eps", "tie_word_embeddings"):
        assert hub[key] == getattr(theirs, key), key
    assert hub["rope_parameters"]["rope_theta"] == theirs.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": KINDS[:3]}, "3 entries for 5 layers"),
        ({"layer_types": "sliding_attention"}, "sliding_attention entries"),
        ({"rope_theta": 10000.0}, "twice and differently"),
        ({"logit_scale": "one"}, "no sensible number"),
        ({"tie_word_embeddings": "yes"}, "no true or false"),
        ({"eos_token_id": ["a"]}, "no token id"),
    ],
)
def test_what_a_config_cannot_say(change, said):
    with pytest.raises(ConvertError, match=said):
        configs.to_hub(load_table(FAMILY), "hf", {"model_type": "cohere2", **SIZES, **change})


# ---- the reference model ---------------------------------------------------------------------------------------


@contextmanager
def attribute(owner: Any, name: str, value: Any):
    kept = owner.__dict__.get(name)
    setattr(owner, name, value)
    yield
    delattr(owner, name) if kept is None else setattr(owner, name, kept)


def test_the_reference_computes_what_transformers_does(untied):
    wanted, ids = untied.logits, prompt(VOCAB)
    model = reference(untied.path)
    with torch.no_grad():
        found = model(ids)
        exact = untied.model.double()(ids).logits
        untied.model.float()
        assert off(found, wanted) < 1e-4
        assert off(found, exact) < 4 * off(wanted, exact)
        faults = {}
        with model.controls[0].apply(model):
            faults["half pairs, as a Llama's"] = off(model(ids), wanted)
        sliding, full = "sliding_attention", "full_attention"
        for fault, change in {
            "full layers turn too": ("rotations", lambda: {sliding: model.rope, full: model.rope}),
            "nothing turns": ("rotations", lambda: {sliding: None, full: None}),
            "no window": ("windows", lambda: {sliding: None, full: None}),
            "a window of one more": ("windows", lambda: {sliding: 25, full: None}),
            "logits not scaled": ("logit_scale", 1.0),
        }.items():
            with attribute(model, *change):
                faults[fault] = off(model(ids), wanted)
        block = model.trf_blocks[2]

        def one_after_the_other(x, context, cache=None):
            here = context[block.kind]
            x = x + block.att(block.input_layernorm(x), rotation=here.rotation, mask=here.mask)
            return x + block.ff(block.input_layernorm(x))

        with attribute(block, "forward", one_after_the_other):
            faults["feed-forward after attention"] = off(model(ids), wanted)
        norm = model.final_norm
        with attribute(norm, "forward", lambda x: torch.rms_norm(x, (64,), norm.weight, norm.eps)):
            faults["a norm that keeps the mean"] = off(model(ids), wanted)
    assert min(faults.values()) > 100 * 1e-4, faults


@pytest.mark.parametrize(
    "change",
    [
        {"layer_norm_eps": 0.1},
        {"attention_bias": True},
        {"logit_scale": 0.0625},
        {"sliding_window": 100},
        {"head_dim": 16},
        {"layer_types": ["full_attention", *KINDS[1:]]},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0}},
    ],
    ids=lambda c: next(iter(c)),
)
def test_what_a_config_can_say_is_heeded(tmp_path, made, change):
    other = make(tmp_path, **change)
    assert off(run_reference(tmp_path, VOCAB), other.logits) < 1e-4
    assert off(other.logits, made.logits) > 1e-2  # it does change the model


def test_a_cache_changes_nothing(made):
    assert off(*with_and_without_cache(made.path, VOCAB)) < 2e-5


def test_a_config_of_another_architecture_is_told():
    from convert.reference.tiny_aya import Config

    hub = configs.to_hub(load_table(FAMILY), "hf", SIZES)
    assert Config.from_hf(hub).n_kv_groups == 2
    with pytest.raises(ConvertError, match=r"'vocab_size'[\s\S]*gelu[\s\S]*chunked"):
        Config.from_hf(
            {k: v for k, v in hub.items() if k != "vocab_size"}
            | {"hidden_act": "gelu", "layer_types": ["chunked_attention"] * 5}
        )


# ---- there and back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scratch_and_back_is_bit_equal(tmp_path, made, dtype):
    state = {k: v.to(getattr(torch, dtype)) for k, v in load_file(made.path / "model.safetensors").items()}
    (tmp_path / "source").mkdir()
    save_file(state, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text((made.path / "config.json").read_text())
    scratch = converted(tmp_path / "source", tmp_path, "scratch")
    book = load_file(scratch / "model.safetensors")
    query = "model.layers.2.self_attn.q_proj.weight"
    assert torch.equal(book["trf_blocks.2.att.W_query.weight"], state[query])  # never permuted
    assert torch.equal(book["out_head.weight"], book["tok_emb.weight"]) and "lm_head.weight" not in state
    back = load_file(converted(scratch, tmp_path, "hf") / "model.safetensors")
    assert back.keys() == state.keys() and all(torch.equal(back[k], state[k]) for k in state)
    was, now = (json.loads((p / "config.json").read_text()) for p in (tmp_path / "source", tmp_path / "out_hf"))
    assert {k: now[k] for k in was if k != "dtype"} == {k: v for k, v in was.items() if k != "dtype"}


def test_gguf_and_back_is_bit_equal(tmp_path, made):
    out = converted(made.path, tmp_path, "gguf")
    stored = gguf_keys(out)
    assert stored["cohere2.attention.sliding_window_pattern"] == ("UINT32", 4)
    assert stored["cohere2.logit_scale"] == ("FLOAT32", 0.25)
    assert stored["cohere2.rope.scaling.type"] == ("STRING", "none")
    state, back = (
        load_file(made.path / "model.safetensors"),
        load_file(converted(out, tmp_path, "hf") / "model.safetensors"),
    )
    assert back.keys() == state.keys() and all(torch.equal(back[k], state[k]) for k in state)
    config = json.loads((tmp_path / "out_hf" / "config.json").read_text())
    wanted = json.loads((made.path / "config.json").read_text())
    for key in (*SIZES, "layer_norm_eps", "tie_word_embeddings"):
        assert config[key] == wanted[key], key


@pytest.mark.parametrize("pattern", [4, None, [True, True, True, False, True]])
def test_a_gguf_file_from_elsewhere_is_understood(tmp_path, made, pattern):
    """Without our record; the pattern as a number, absent (llama.cpp takes 4), and as flags."""
    stored = gguf_keys(converted(made.path, tmp_path, "gguf"))
    raw = {k: v for k, (_, v) in stored.items() if not k.startswith("convert.")}
    raw["cohere2.attention.sliding_window_pattern"] = pattern
    hub = configs.to_hub(load_table(FAMILY), "gguf", {k: v for k, v in raw.items() if v is not None})
    wanted = configs.to_hub(load_table(FAMILY), "hf", json.loads((made.path / "config.json").read_text()))
    for key in (*SIZES, "layer_norm_eps", "tie_word_embeddings"):
        if not key.endswith("token_id"):
            assert hub[key] == pytest.approx(wanted[key]) if key == "layer_norm_eps" else hub[key] == wanted[key], key


def test_llama_cpp_computes_the_same(tmp_path, made):
    pytest.importorskip("xllamacpp")
    out = converted(made.path, tmp_path, "gguf")
    found = llama_cpp(out, VOCAB)
    assert off(found, at_places(made.logits)) < 2e-4
    model = reference(out)
    with model.controls[0].apply(model), torch.no_grad():
        assert off(found, at_places(model(prompt(VOCAB)))) > 0.5


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        ("gguf", {"tie_word_embeddings": False}, "always the embedding"),
        ("gguf", {"attention_bias": True}, "no biases"),
        ("gguf", {"head_dim": 16}, "hidden_size / heads"),
        ("gguf", {"layer_types": ["full_attention", *KINDS[1:]]}, "these layer_types have none"),
        ("gguf", {"hidden_act": "gelu"}, "SiLU"),
        ("gguf", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}}, "no RoPE scaling"),
        ("scratch", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}}, "no RoPE scaling"),
        ("scratch", {"hidden_act": "gelu"}, "SiLU"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused_before_writing(tmp_path, layout, change, said):
    make(tmp_path / "hf", **change)
    with pytest.raises(ConvertError, match=said):
        converted(tmp_path / "hf", tmp_path, layout)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_no_window_at_all_stays_none(tmp_path, made):
    """An explicit null is not the default of 4,096 (nor is it dropped on the way, which would mean the default)."""
    config = json.loads((made.path / "config.json").read_text())
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"sliding_window": None}))
    (tmp_path / "hf" / "model.safetensors").write_bytes((made.path / "model.safetensors").read_bytes())
    for target in ("gguf", "scratch"):
        with pytest.raises(ConvertError, match="needs a sliding window"):
            converted(tmp_path / "hf", tmp_path, target)
    out = converted(tmp_path / "hf", tmp_path, "hf")
    assert transformers.AutoConfig.from_pretrained(out).sliding_window is None
    assert reference(out).windows()["sliding_attention"] is None


@pytest.mark.parametrize(("said", "order"), [(None, "interleaved"), ("hf", "interleaved"), ("meta", "interleaved")])
def test_hugging_faces_order_is_that_of_this_familys_files(made, said, order):
    from convert.checkpoint import open_checkpoint

    with open_checkpoint(made.path, qk_layout=said) as opened:
        assert opened.pairing == order


def test_its_tokenizer_goes_along(tmp_path):
    """The rules by which the released tokenizer cuts texts have a name in llama.cpp, and come back."""
    source = make(tmp_path / "hf", vocab_size=640)
    give_tokenizer(source.path, (pretokenizers.TINY_AYA_DIGITS, pretokenizers.GPT4O), nfc=True)
    convert.convert_checkpoint(source.path, tmp_path / "m.gguf", to="gguf", type="f32")
    assert gguf_keys(tmp_path / "m.gguf")["tokenizer.ggml.pre"] == ("STRING", "tiny_aya")
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "back", to="hf")
    assert token_ids(tmp_path / "back") == token_ids(source.path)
    if available():
        assert off(llama_cpp(tmp_path / "m.gguf", 640), at_places(source.logits)) < 2e-4


# ---- verify ----------------------------------------------------------------------------------------------------

PAIRS = wrong_tables.pairs(FAMILY, configs.to_hub(load_table(FAMILY), "hf", SIZES), "scratch")


@pytest.mark.parametrize("layout", ["scratch", "gguf"])
def test_verify_passes(tmp_path, made, layout):
    result = convert.verify(made.path, converted(made.path, tmp_path, layout), device="cpu")
    assert result.verdict == "pass", result.message
    assert result.distance.max_abs < 1e-4


@pytest.mark.parametrize("layout", ["scratch", "gguf"])
def test_rows_in_a_llamas_order_are_caught(tmp_path, made, layout):
    out = converted(made.path, tmp_path, layout, wrong_tables.flipped(FAMILY, layout, "rope"))
    result = convert.verify(made.path, out, device="cpu")
    assert result.verdict == "fail" and result.distance.max_abs > 100 * 1e-4, result.message


def test_the_pairs_that_could_be_taken_for_each_other():
    assert {frozenset(p) for p in PAIRS} == {
        frozenset(("block.attn.q", "block.attn.o")),
        frozenset(("block.attn.k", "block.attn.v")),
        frozenset(("block.mlp.gate", "block.mlp.up")),
        frozenset(("top.token_embd", "top.output")),
    }


@pytest.mark.parametrize(
    ("layout", "one", "other"),
    [("scratch", *pair) for pair in PAIRS] + [("gguf", *pair) for pair in PAIRS if "top.output" not in pair],
)
def test_tensors_of_one_shape_exchanged_are_caught(tmp_path, made, untied, layout, one, other):
    source = untied if layout == "scratch" else made  # a GGUF file holds one tensor for embedding and head
    out = converted(source.path, tmp_path, layout, wrong_tables.exchanged(FAMILY, layout, one, other))
    result = convert.verify(source.path, out, device="cpu")
    assert result.verdict == "fail" and result.distance.max_abs > 100 * 1e-4, result.message


def test_a_head_of_its_own_is_refused_for_gguf_whatever_the_config_says(tmp_path, made):
    """llama.cpp does not load a file of this architecture that has an output tensor."""
    folder = tmp_path / "hf"
    shutil.copytree(made.path, folder)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    convert.convert_checkpoint(folder, tmp_path / "tied.gguf", to="gguf", type="f32", tokenizer=False)  # the control
    state["lm_head.weight"] += 1
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConvertError, match="always the embedding"):
        convert.convert_checkpoint(folder, tmp_path / "own.gguf", to="gguf", type="f32", tokenizer=False)
    assert not (tmp_path / "own.gguf").exists()


if __name__ == "__main__":
    golden.write(FAMILY, SIZES)
