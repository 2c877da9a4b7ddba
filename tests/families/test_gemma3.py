"""Gemma 3 against transformers, real llama.cpp, and the key sets that running code has."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert import config as configs
from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError
from convert.layout import Dims, expand
from convert.plan import Request, make_plan
from convert.reference.layers import KVCache
from convert.reference.loading import load_reference
from convert.run import run
from convert.table import load_table
from tests.families import faults
from tests.families.gemma import gelu_table, keys, small
from tests.families.golden import same, shapes
from tests.families.mixed import LENGTH, Tiny, off, prompt
from tests.gguf_files import keys as gguf_keys
from tests.reference.models import one_thread  # noqa: F401

transformers = pytest.importorskip("transformers")

KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 24,
    "layer_types": KINDS,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 512,
}


def make(folder: Path, **changes: Any) -> Tiny:
    """A tiny model: zero-centred norms within ±0.5, everything else of std 0.2."""
    config = transformers.Gemma3TextConfig(**SIZES | changes)
    model = transformers.Gemma3ForCausalLM(config).eval()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = rng.uniform(-0.5, 0.5, parameter.shape) if "norm" in name else rng.normal(0, 0.2, parameter.shape)
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    model.save_pretrained(folder)
    return Tiny(folder, model, {k: v.detach().clone() for k, v in model.state_dict().items()})


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Tiny:
    """Untied, so that head and embedding can be told apart; 4B's linear scaling on its full layers."""
    folder = tmp_path_factory.mktemp("gemma3")
    return make(folder, tie_word_embeddings=False, rope_scaling={"rope_type": "linear", "factor": 8.0})


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Tiny:
    """As the book's class can hold it: tied and without scaling."""
    return make(tmp_path_factory.mktemp("gemma3"))


def run_reference(path: Path) -> torch.Tensor:
    with open_checkpoint(path) as opened, torch.no_grad():
        return load_reference(opened)(prompt(SIZES["vocab_size"]))


# ---- names, shapes, configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(keys("gemma3")))
def test_the_very_keys_and_shapes_that_the_classes_have(name):
    layout, case = name.split("/")[0], keys("gemma3")[name]
    hub = configs.to_hub(load_table("gemma3"), layout, case["config"])
    want = {k.replace("model.language_model.", "model."): v for k, v in case["keys"].items()}
    want = {k: v for k, v in want.items() if "vision_tower" not in k and "multi_modal_projector" not in k}
    assert shapes("gemma3", layout, hub) == want
    kinds = hub["layer_types"]
    short = hub | {"num_hidden_layers": len(kinds) - 1, "layer_types": kinds[:-1]}
    assert shapes("gemma3", layout, short) != want
    assert shapes("gemma3", layout, hub | {"head_dim": hub["head_dim"] + 2}) != want


@pytest.mark.parametrize("layout", ["hf", "scratch", "gguf"])
def test_golden(layout):
    assert same("gemma3", layout, small("gemma3")), "python -m tests.families.gemma writes them anew; read the diff"


@pytest.mark.parametrize(
    ("size", "parameters"),
    [  # the releases' safetensors; of the multimodal ones without the 416,866,032 of tower and projector (transformers)
        ("gemma3-270m", 268_098_176),
        ("gemma3-1b", 999_885_952),
        ("gemma3-4b", 3_880_263_168),
        ("gemma3-12b", 11_766_034_176),
        ("gemma3-27b", 27_009_346_304),
    ],
)
def test_published_sizes(size, parameters):
    table = load_table("gemma3")
    hub = configs.published(table, size)
    for layout in table.layouts:
        slots = expand(table, Dims(table, hub), layout).values()
        assert sum(math.prod(s.shape) for s in slots if not table.rows[s.keys[0][0]].tied_to) == parameters
    assert Dims(table, hub)["layer_period"] == 6
    assert hub["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_configs_of_every_spelling_say_the_same():
    table = load_table("gemma3")
    v5 = transformers.Gemma3TextConfig(**SIZES, rope_scaling={"rope_type": "linear", "factor": 8.0}).to_dict()
    v4 = {k: v for k, v in v5.items() if k not in ("rope_parameters", "layer_types", "_sliding_window_pattern")} | {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    hub = configs.to_hub(table, "hf", v5)
    assert hub["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    for raw in (v4, {"text_config": v4, "model_type": "gemma3"}):
        old = configs.to_hub(table, "hf", raw)
        assert old["rope_parameters"] == hub["rope_parameters"] and old["layer_types"] == KINDS
    # what we write is read by transformers as what it was
    written = configs.to_hf(table, hub, "F32")
    assert written["rope_local_base_freq"] == 1e4 and written["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    again = transformers.Gemma3TextConfig(**{k: v for k, v in written.items() if k != "architectures"})
    assert again.rope_parameters["full_attention"] == hub["rope_parameters"]["full_attention"]
    assert again.rope_parameters["sliding_attention"]["rope_theta"] == 1e4 and again.layer_types == KINDS
    # the book's dict, in which local and global have names of their own
    book = configs.to_scratch(table, configs.to_hub(table, "hf", SIZES), "F32")
    assert (book["rope_base"], book["rope_local_base"], book["qk_norm"]) == (1e6, 1e4, True)
    assert configs.to_hub(table, "scratch", book | {"rope_local_base": 500.0})["rope_parameters"][
        "sliding_attention"
    ] == {
        "rope_type": "default",
        "rope_theta": 500.0,
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_local_base_freq": 20000.0}, "sliding_attention layers twice"),
        ({"rope_theta": 10000.0}, "full_attention layers twice"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "full_attention layers twice"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "one set of settings per kind"),
        ({"rope_parameters": {"chunked_attention": {"rope_type": "default"}}}, "one set of settings per kind"),
        ({"layer_types": KINDS[:3]}, "3 entries for 4 layers"),
    ],
)
def test_contradictions_in_a_config_stop(change, said):
    raw = transformers.Gemma3TextConfig(**SIZES, rope_scaling={"rope_type": "linear", "factor": 8.0}).to_dict()
    with pytest.raises(ConvertError, match=said):
        configs.to_hub(load_table("gemma3"), "hf", raw | change)


@pytest.mark.parametrize("names", ["on_disk_keys", "keys"])
def test_the_text_part_of_a_multimodal_model(tmp_path, names):
    """Both beginnings that its names have: as saved, and as a state dict has them."""
    case = keys("gemma3")["hf/gemma3_mm"]
    found = {k: torch.randn(shape) for k, shape in case[names].items()}
    if names == "keys":
        found.pop("lm_head.weight")
    save_file(found, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    convert.convert_checkpoint(tmp_path, tmp_path / "scratch", to="scratch")
    convert.convert_checkpoint(tmp_path / "scratch", tmp_path / "hf", to="hf")
    text = load_file(tmp_path / "hf" / "model.safetensors")
    wanted = {
        k.replace("language_model.model.", "model.").replace("model.language_model.", "model."): v
        for k, v in found.items()
    }
    wanted = {k: v for k, v in wanted.items() if "vision_tower" not in k and "multi_modal_projector" not in k}
    assert text.keys() == wanted.keys() and all(torch.equal(text[k], wanted[k]) for k in wanted)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == "gemma3_text" and config["architectures"] == ["Gemma3ForCausalLM"]
    assert "vision_config" not in config and "text_config" not in config
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(model).__name__ == "Gemma3ForCausalLM" and not info["missing_keys"] and not info["unexpected_keys"]


# ---- the reference model ---------------------------------------------------------------------------------------


def test_the_reference_computes_what_transformers_does(made):
    wanted = made.logits
    with open_checkpoint(made.path) as opened, torch.no_grad():
        model = load_reference(opened)
        ids = prompt(SIZES["vocab_size"])
        found = model(ids)
        exact = made.model.double()(ids).logits
        made.model.float()
        assert off(found, wanted) < 1e-4
        assert off(found, exact) < 4 * off(wanted, exact)
        faults = {}
        for control in model.controls:
            with control.apply(model):
                faults[control.name] = off(model(ids), wanted)
        kept = model.ropes
        model.ropes = torch.nn.ModuleDict(dict(zip(kept, reversed(list(kept.values())), strict=True)))
        faults["local and global bases exchanged"] = off(model(ids), wanted)
        model.ropes = kept
        for block in model.blocks:
            block.kind = "full_attention"
        faults["no window"] = off(model(ids), wanted)
    assert min(faults.values()) > 100 * 1e-4, faults


@pytest.mark.parametrize(
    "change",
    [
        {"query_pre_attn_scalar": 24},
        {"final_logit_softcapping": 3.0},
        {"rms_norm_eps": 1e-2},
        {"attention_bias": True},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e4}}},
        {"sliding_window": 100},
    ],
    ids=lambda c: next(iter(c)),
)
def test_what_a_config_can_say_is_heeded(tmp_path, plain, change):
    other = make(tmp_path, **change)
    assert off(run_reference(tmp_path), other.logits) < 1e-4
    assert off(other.logits, plain.logits) > 1e-2  # it does change the model


def test_a_cache_changes_nothing(made):
    ids = prompt(SIZES["vocab_size"])
    with open_checkpoint(made.path) as opened, torch.no_grad():
        model = load_reference(opened)
        cache = KVCache(model.n_layers)
        parts = [model(ids[:, :100], cache), *(model(ids[:, i : i + 1], cache) for i in range(100, LENGTH))]
        assert off(torch.cat(parts, 1), model(ids)) < 2e-5


# ---- there and back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scratch_and_back_is_bit_equal(tmp_path, plain, dtype):
    state = {k: v.to(getattr(torch, dtype)) for k, v in load_file(plain.path / "model.safetensors").items()}
    source = tmp_path / "source"
    source.mkdir()
    save_file(state, source / "model.safetensors")
    (source / "config.json").write_text((plain.path / "config.json").read_text())
    convert.convert_checkpoint(source, tmp_path / "scratch", to="scratch")
    book = load_file(tmp_path / "scratch" / "model.safetensors")
    assert torch.equal(book["blocks.2.att.q_norm.scale"], state["model.layers.2.self_attn.q_norm.weight"])  # no +1
    convert.convert_checkpoint(tmp_path / "scratch", tmp_path / "back", to="hf")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == state.keys() and all(torch.equal(back[k], state[k]) for k in state)
    was, now = (json.loads((p / "config.json").read_text()) for p in (source, tmp_path / "back"))
    assert {k: now[k] for k in was if k not in ("dtype", "transformers_version")} == {
        k: v for k, v in was.items() if k not in ("dtype", "transformers_version")
    }


def test_gguf_and_back(tmp_path, made):
    """Every matrix bit-equal; norms, shifted by one and back in float32, within its rounding."""
    convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "back", to="hf", tokenizer=False)
    state, back = load_file(made.path / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        if "norm" in name:
            assert off(back[name], tensor) <= 2.0**-23, name
        else:
            assert torch.equal(back[name], tensor), name
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    wanted = json.loads((made.path / "config.json").read_text())
    for key in (*SIZES, "rope_parameters", "tie_word_embeddings", "hidden_activation"):
        assert config[key] == wanted[key], key


def test_bfloat16_to_gguf_and_back_is_bit_equal(tmp_path, plain):
    """A bfloat16 norm plus one fits float32 (from 2^-16 on): nothing is lost where bfloat16 is asked for again."""
    state = {k: v.bfloat16() for k, v in load_file(plain.path / "model.safetensors").items()}
    state = {k: v.masked_fill(v.abs() < 2.0**-16, 0.25) if "norm" in k else v for k, v in state.items()}
    source = tmp_path / "source"
    source.mkdir()
    save_file(state, source / "model.safetensors")
    (source / "config.json").write_text((plain.path / "config.json").read_text())
    convert.convert_checkpoint(source, tmp_path / "m.gguf", to="gguf", tokenizer=False)
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "back", to="hf", dtype="bf16", tokenizer=False)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == state.keys() and all(torch.equal(back[k], state[k]) for k in state)


def test_a_gguf_file_from_elsewhere_is_understood(tmp_path, made):
    """Without our record: the period, both bases and the scalar follow from GGUF's own keys and llama.cpp's rules."""
    convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    stored = gguf_keys(tmp_path / "m.gguf")
    assert stored["gemma3.attention.sliding_window_pattern"] == ("UINT32", 3)
    assert stored["gemma3.rope.freq_base_swa"] == ("FLOAT32", 10000.0)
    raw = {k: v for k, (_, v) in stored.items() if not k.startswith("convert.")}
    hub = configs.to_hub(load_table("gemma3"), "gguf", raw)
    wanted = configs.to_hub(load_table("gemma3"), "hf", json.loads((made.path / "config.json").read_text()))
    for key in (*SIZES, "rope_parameters"):
        assert hub[key] == wanted[key], key


def test_llama_cpp_computes_the_same(tmp_path, made, plain, monkeypatch):
    pytest.importorskip("xllamacpp")
    from convert.engines.llama_cpp import logprobs

    for which in (made, plain):
        out = tmp_path / f"{which.path.name}.gguf"
        convert.convert_checkpoint(which.path, out, to="gguf", type="f32", tokenizer=False)
        row = prompt(SIZES["vocab_size"])[0].tolist()
        places = (1, 7, 40, LENGTH)
        found = torch.from_numpy(logprobs(out, [row[:n] for n in places], threads=1))
        rows = [n - 1 for n in places]
        wanted = which.logits[0].double().log_softmax(-1)[rows]
        assert off(found, wanted) < 5e-3
        assert off(run_reference(out)[0].log_softmax(-1)[rows], wanted) < 1e-4
        with monkeypatch.context() as patched:
            patched.setattr(torch.nn.functional, "gelu", gelu_table)
            assert off(found, run_reference(out)[0].log_softmax(-1)[rows]) < 5e-4
        with open_checkpoint(which.path) as opened, torch.no_grad():
            model = load_reference(opened)
            for control in model.controls:
                with control.apply(model):
                    broken = model(torch.tensor([row]))[0].log_softmax(-1)[rows]
                assert off(found, broken) > 0.5, control.name


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        ("gguf", {"query_pre_attn_scalar": 24}, "query_pre_attn_scalar"),
        ("gguf", {"layer_types": ["full_attention", *KINDS[1:]]}, "every n-th place"),
        ("gguf", {"layer_types": ["full_attention"] * len(KINDS)}, "no layer of this architecture slides"),
        ("gguf", {"attention_bias": True}, "no biases"),
        ("gguf", {"attn_logit_softcapping": 50.0}, "caps no attention scores"),
        ("gguf", {"use_bidirectional_attention": True}, "embedding model"),
        ("gguf", {"hidden_activation": "silu"}, "GELU"),
        ("scratch", {"attention_bias": True}, "bias=False"),
        ("scratch", {"rms_norm_eps": 1e-5}, "1e-6"),
        ("scratch", {"final_logit_softcapping": 30.0}, "caps no"),
        ("scratch", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "no word for"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused_before_writing(tmp_path, layout, change, said):
    make(tmp_path / "hf", **change)
    with pytest.raises(ConvertError, match=said):
        convert.convert_checkpoint(tmp_path / "hf", tmp_path / "out.gguf", to=layout, tokenizer=False)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_our_reference_class_holds_what_the_books_does_not(tmp_path, made):
    convert.convert_checkpoint(made.path, tmp_path / "scratch", to="scratch", allow_reference=True)
    assert off(run_reference(tmp_path / "scratch"), made.logits) < 1e-4
    convert.convert_checkpoint(tmp_path / "scratch", tmp_path / "hf", to="hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["rope_parameters"] == json.loads((made.path / "config.json").read_text())["rope_parameters"]


# ---- verify ----------------------------------------------------------------------------------------------------

LAYOUTS = ("scratch", "gguf")
FAULTS = [("norm", "gguf"), ("norm", "scratch"), ("rope", "gguf"), ("rope", "scratch")]
PAIRS = faults.pairs("gemma3", configs.to_hub(load_table("gemma3"), "hf", SIZES), "scratch")


def converted(made: Tiny, folder: Path, layout: str, table: Any = None) -> Path:
    out = folder / ("out.gguf" if layout == "gguf" else "out")
    with open_checkpoint(made.path) as opened:
        request = Request(layout, tokenizer=False, allow_reference=True)
        request.gguf.type = "f32"
        run(make_plan(opened, request, table=table), out)
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_verify_passes(tmp_path, made, layout):
    result = convert.verify(made.path, converted(made, tmp_path, layout), device="cpu")
    assert result.verdict == "pass", result.message
    assert result.distance.max_abs < 1e-4


@pytest.mark.parametrize(("convention", "layout"), FAULTS)
def test_a_convention_the_other_way_round_is_caught(tmp_path, made, convention, layout):
    out = converted(made, tmp_path, layout, faults.flipped("gemma3", layout, convention))
    result = convert.verify(made.path, out, device="cpu")
    assert result.verdict == "fail" and result.distance.max_abs > 100 * 1e-4, result.message


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda v: v)
def test_tensors_of_one_shape_exchanged_are_caught(tmp_path, made, one, other):
    out = converted(made, tmp_path, "scratch", faults.exchanged("gemma3", "scratch", one, other))
    result = convert.verify(made.path, out, device="cpu")
    assert result.verdict == "fail" and result.distance.max_abs > 100 * 1e-4, result.message
