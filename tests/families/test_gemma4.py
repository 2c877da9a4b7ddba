"""Gemma 4 against transformers, real llama.cpp, and the key sets that running code has."""

from __future__ import annotations

import copy
import json
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
from convert.plan import Request, make_plan
from convert.reference.gemma4 import build as build_reference
from convert.reference.layers import KVCache
from convert.reference.loading import load_reference
from convert.run import run
from convert.table import build, load_table
from tests.families import faults
from tests.families.gemma import gelu_table, keys, small
from tests.families.golden import same, shapes
from tests.families.mixed import LENGTH, Tiny, off, prompt
from tests.gguf_files import keys as gguf_keys
from tests.gguf_files import tensors as gguf_tensors
from tests.reference.models import one_thread  # noqa: F401
from tests.tokenizer import trained

transformers = pytest.importorskip("transformers")

S, G = "sliding_attention", "full_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 12,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "layer_types": [S, S, S, G, S, S, G],
    "max_position_embeddings": 512,
    "final_logit_softcapping": 30.0,
}
#: What the releases differ in, and a dense model without embeddings per layer whose values are its keys.
VARIANTS: dict[str, dict[str, Any]] = {
    "e2b": {},
    "e4b": {"use_double_wide_mlp": False, "num_kv_shared_layers": 2, "layer_types": [S, S, G, S, G, S, G]},
    "k_eq_v": {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "final_logit_softcapping": None,
    },
}
UNUSED = ("k_proj.weight", "v_proj.weight", "k_norm.weight")


def make(folder: Path, **changes: Any) -> Tiny:
    """A tiny model: norms and layer scalars in 0.5–1.5, matrices of std 0.2.

    Norms of queries and keys are smaller: scores are not scaled down, and with heads of 32 they would be so large that
    float32 alone moves transformers' logits by 1e-4.
    """
    config = transformers.Gemma4TextConfig(**SIZES | {"tie_word_embeddings": False} | changes)
    model = transformers.Gemma4ForCausalLM(config).eval()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            values = rng.uniform(0.5, 1.5, tensor.shape) if tensor.ndim == 1 else rng.normal(0, 0.2, tensor.shape)
            values *= 0.6 if "q_norm" in name or "k_norm" in name else 1.0
            tensor.copy_(torch.from_numpy(values.astype(np.float32)))
    model.save_pretrained(folder)
    return Tiny(folder, model, {k: v.detach().clone() for k, v in model.state_dict().items()})


def with_unused(made: Tiny, folder: Path) -> Path:
    """The same model as the releases store it: layers without keys and values of their own have tensors for them."""
    state = load_file(made.path / "model.safetensors")
    shapes_ = shapes("gemma4", "hf", hub(made.path) | {"_shared_kv": True})
    rng = torch.Generator().manual_seed(3)
    state |= {k: torch.randn(shape, generator=rng) for k, shape in shapes_.items() if k not in state}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text((made.path / "config.json").read_text())
    return folder


def hub(folder: Path) -> dict[str, Any]:
    return configs.to_hub(load_table("gemma4"), "hf", json.loads((folder / "config.json").read_text()))


def book(folder: Path) -> dict[str, Any]:
    written = configs.to_scratch(load_table("gemma4"), hub(folder), "F32")
    return {k: v for k, v in written.items() if k not in ("family", "layout", "class")}


@pytest.fixture(scope="module", params=list(VARIANTS))
def variant(request, tmp_path_factory) -> Tiny:
    return make(tmp_path_factory.mktemp(request.param), **VARIANTS[request.param])


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Tiny:
    return make(tmp_path_factory.mktemp("gemma4"))


def run_reference(path: Path) -> torch.Tensor:
    with open_checkpoint(path) as opened, torch.no_grad():
        return load_reference(opened)(prompt(SIZES["vocab_size"]))


# ---- names, shapes, configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(keys("gemma4")))
def test_the_very_keys_and_shapes_that_the_classes_have(name):
    layout, case = name.split("/")[0], keys("gemma4")[name]
    found = configs.to_hub(load_table("gemma4"), layout, case["config"])
    want = {k.replace("model.language_model.", "model."): v for k, v in case["keys"].items()}
    want = {k: v for k, v in want.items() if "vision" not in k}
    for stored in (False, True) if layout == "scratch" else (False,):
        assert shapes("gemma4", layout, found | {"_shared_kv": stored}) == want
    assert shapes("gemma4", layout, found | {"global_head_dim": found["global_head_dim"] + 2}) != want
    assert shapes("gemma4", layout, found | {"num_kv_shared_layers": 1, "use_double_wide_mlp": True}) != want


@pytest.mark.parametrize("layout", ["hf", "scratch", "gguf"])
def test_golden(layout):
    assert same("gemma4", layout, small("gemma4")), "python -m tests.families.gemma writes them anew; read the diff"


@pytest.mark.parametrize(("size", "tensors"), [("gemma4-e2b", 601), ("gemma4-e4b", 720)])
def test_published_sizes_are_what_transformers_builds(size, tensors):
    """And with the unused tensors, as many as the book's loader counts."""
    table = load_table("gemma4")
    published = configs.published(table, size)
    config = transformers.Gemma4TextConfig(**table.sizes[size] | {"layer_types": published["layer_types"]})
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(config)
    found = shapes("gemma4", "hf", published | {"_shared_kv": False})
    assert found == {k: list(v.shape) for k, v in model.state_dict().items()}
    assert len(shapes("gemma4", "scratch", published)) == tensors


def test_per_layer_config_and_what_it_replaces():
    table = load_table("gemma4")
    new = transformers.Gemma4TextConfig(**SIZES).to_dict()
    assert {int(k) for k in new["per_layer_config"]} == {3, 6} and "global_head_dim" not in new
    assert configs.to_hub(table, "hf", new)["global_head_dim"] == 32
    padded = new | {"per_layer_config": {f"{int(k):02}": v for k, v in new["per_layer_config"].items()}}
    old = {k: v for k, v in new.items() if k != "per_layer_config"} | {"global_head_dim": 32}
    for raw in (padded, old, {"text_config": padded, "model_type": "gemma4"}):
        found = configs.to_hub(table, "hf", raw)
        assert found["global_head_dim"] == 32 and "per_layer_config" not in found
        again = transformers.Gemma4TextConfig(**configs.to_hf(table, found, "F32"))
        assert again.per_layer_config[3].head_dim == 32 and again.per_layer_config[0].head_dim == 16
        assert again.rope_parameters == new["rope_parameters"]
    for wrong in ({"3": {"head_dim": 32}}, {k: {"head_dim": 8 + int(k)} for k in "36"}, {"1": {"head_dim": 32}}):
        with pytest.raises(ConvertError, match="per_layer_config"):
            configs.to_hub(table, "hf", new | {"per_layer_config": wrong})
    with pytest.raises(ConvertError, match="global_head_dim"):
        configs.to_hub(table, "hf", new | {"global_head_dim": 64})


@pytest.mark.parametrize("shared", [7, 9, -1, 5])
def test_sharing_without_anything_to_share_stops(shared):
    raw = transformers.Gemma4TextConfig(**SIZES).to_dict() | {"num_kv_shared_layers": shared}
    with pytest.raises(ConvertError, match="num_kv_shared_layers"):
        configs.to_hub(load_table("gemma4"), "hf", raw)


@pytest.mark.parametrize("widths", [[96] * 6 + [100], [96, 192] * 3 + [96], [192] * 3 + [96] * 4])
def test_widths_that_no_config_says_stop(widths):
    raw = {"general.architecture": "gemma4", "gemma4.feed_forward_length": widths, "gemma4.block_count": 7}
    with pytest.raises(ConvertError, match="layers of the widths"):
        configs.to_hub(load_table("gemma4"), "gguf", raw | {"gemma4.attention.shared_kv_layers": 3})


def test_the_books_dict():
    table = load_table("gemma4")
    raw = keys("gemma4")["scratch/gemma4_e2b_like"]["config"]
    written = configs.to_scratch(table, configs.to_hub(table, "scratch", raw), "BF16")
    assert {k: written[k] for k in raw if raw[k] is not None and k != "dtype"} == {
        k: v for k, v in raw.items() if v is not None and k != "dtype"
    }
    half = configs.to_hub(table, "scratch", raw | {"rope_global_partial_rotary_factor": 0.5})
    assert half["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 0.5


def test_the_text_part_of_a_multimodal_model(tmp_path):
    case = keys("gemma4")["hf/gemma4_mm"]
    found = {k: torch.randn(shape) for k, shape in case["keys"].items() if k != "lm_head.weight"}
    save_file(found, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    convert.convert_checkpoint(tmp_path, tmp_path / "scratch", to="scratch")
    convert.convert_checkpoint(tmp_path / "scratch", tmp_path / "hf", to="hf")
    text = load_file(tmp_path / "hf" / "model.safetensors")
    wanted = {k.replace("model.language_model.", "model."): v for k, v in found.items() if "vision" not in k}
    assert text.keys() == wanted.keys() and all(torch.equal(text[k], wanted[k]) for k in wanted)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(model).__name__ == "Gemma4ForCausalLM" and not info["missing_keys"] and not info["unexpected_keys"]


# ---- the reference model ---------------------------------------------------------------------------------------


def test_the_reference_computes_what_transformers_does(variant):
    wanted = variant.logits
    ids = prompt(SIZES["vocab_size"])
    with torch.no_grad():
        exact = variant.model.double()(ids).logits
        variant.model.float()
        found = run_reference(variant.path)
        assert off(found, wanted) < 1e-4
        assert off(found, exact) < 4 * off(wanted, exact)


def test_faults_are_seen(tmp_path, made):
    """Each thing that sets the family apart, left out."""
    wanted = made.logits
    ids = prompt(SIZES["vocab_size"])
    seen = {}

    def broken(change: Any, path: Path = made.path) -> float:
        with open_checkpoint(path) as opened, torch.no_grad():
            model = load_reference(opened)
            change(model)
            return off(model(ids), wanted)

    def blocks(change: Any) -> Any:
        return lambda model: [change(block) for block in model.blocks]

    def exchange(model: Any) -> None:
        first, second = model.ropes[S].frequencies, model.ropes[G].frequencies
        model.ropes[G].frequencies = model.ropes[G].frequencies.clone()
        model.ropes[G].frequencies[: len(first) // 2] = first[: len(first) // 2]
        model.ropes[S].frequencies = second[: len(first)].clone()
        for rope in model.ropes.values():
            rope._fill(256, torch.float32)

    def unshare(model: Any) -> None:
        for block in model.blocks:
            block.att.shares = False

    def all_turn(model: Any) -> None:
        rope = model.ropes[G]
        rope.frequencies = 1e6 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
        rope._fill(256, torch.float32)

    seen["exact"] = broken(lambda model: None)
    assert seen.pop("exact") < 1e-4
    seen["bases exchanged"] = broken(exchange)
    seen["every pair turns"] = broken(all_turn)
    seen["no window"] = broken(lambda m: setattr(m, "windows", lambda: {S: None, G: None}))
    seen["no scalars"] = broken(blocks(lambda b: b.layer_scalar.data.fill_(1.0)))
    seen["layers' embeddings in another order"] = broken(blocks(lambda b: setattr(b, "layer", 6 - b.layer)))
    seen["nothing shared"] = broken(unshare, with_unused(made, tmp_path / "all"))
    seen["softcap"] = broken(lambda m: setattr(m, "head", lambda x: m.out_head(m.final_norm(x))))
    with open_checkpoint(made.path) as opened, torch.no_grad():
        model = load_reference(opened)
        for control in model.controls:
            with control.apply(model):
                seen[control.name] = off(model(ids), wanted)
    assert min(seen.values()) > 100 * 1e-4, seen


def test_unused_tensors_change_nothing(tmp_path, made):
    assert off(run_reference(with_unused(made, tmp_path / "all")), made.logits) < 1e-4


def test_a_cache_changes_nothing(variant):
    ids = prompt(SIZES["vocab_size"])
    with open_checkpoint(variant.path) as opened, torch.no_grad():
        model = load_reference(opened)
        cache = KVCache(model.n_layers)
        parts = [model(ids[:, :100], cache), *(model(ids[:, i : i + 1], cache) for i in range(100, LENGTH))]
        assert off(torch.cat(parts, 1), model(ids)) < 1e-4


# ---- there and back --------------------------------------------------------------------------------------------


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    assert all(torch.equal(found[k], wanted[k]) and found[k].dtype == wanted[k].dtype for k in wanted)


@pytest.mark.parametrize("stored", [False, True], ids=["without unused", "with unused"])
def test_scratch_and_back_is_bit_equal(tmp_path, made, stored):
    source = with_unused(made, tmp_path / "all") if stored else made.path
    state = load_file(source / "model.safetensors")
    convert.convert_checkpoint(source, tmp_path / "scratch", to="scratch")
    book = load_file(tmp_path / "scratch" / "model.safetensors")
    assert len(book) == 6 + 17 * 7  # the class has them all, whatever the source has
    donors = {4: 2, 5: 2, 6: 3} if not stored else {4: 4, 5: 5, 6: 6}
    for layer, donor in donors.items():
        for end in UNUSED:
            assert torch.equal(book[f"blocks.{layer}.att.{end}"], state[f"model.layers.{donor}.self_attn.{end}"])
    assert convert.verify(source, tmp_path / "scratch", device="cpu").verdict == "pass"
    convert.convert_checkpoint(tmp_path / "scratch", tmp_path / "back", to="hf")
    equal(load_file(tmp_path / "back" / "model.safetensors"), state)
    was, now = (json.loads((p / "config.json").read_text()) for p in (source, tmp_path / "back"))
    assert "_shared_kv" not in now
    for key in was:
        assert key in ("transformers_version", "dtype") or now[key] == was[key], key


@pytest.mark.parametrize("stored", [False, True], ids=["without unused", "with unused"])
def test_gguf_and_back_is_bit_equal(tmp_path, made, stored):
    source = with_unused(made, tmp_path / "all") if stored else made.path
    convert.convert_checkpoint(source, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "back", to="hf", tokenizer=False)
    equal(load_file(tmp_path / "back" / "model.safetensors"), load_file(source / "model.safetensors"))
    was, now = (json.loads((p / "config.json").read_text()) for p in (source, tmp_path / "back"))
    for key in (*SIZES, "rope_parameters", "tie_word_embeddings"):
        assert key == "global_head_dim" or now[key] == was[key], key


def test_a_sentencepiece_tokenizer_goes_along_as_the_kind_that_llama_cpp_has_for_it(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = make(tmp_path / "hf", vocab_size=900, vocab_size_per_layer_input=900)
    text = (Path(__file__).parents[1] / "data" / "multilingual.txt").read_text(encoding="utf-8")
    trained.byte_fallback(text, style="bare").save(str(made.path / "tokenizer.json"))
    (made.path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type="f32")
    assert gguf_keys(tmp_path / "m.gguf")["tokenizer.ggml.model"] == ("STRING", "gemma4")
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "back", to="hf")
    old, new = (tokenizers.Tokenizer.from_file(str(p / "tokenizer.json")) for p in (made.path, tmp_path / "back"))
    for line in text.splitlines():
        assert new.encode(line, add_special_tokens=False).ids == old.encode(line, add_special_tokens=False).ids
    pytest.importorskip("xllamacpp")
    from convert.engines.llama_cpp import logprobs

    ids = old.encode(text).ids[:100]
    wanted = made.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).detach()
    assert off(torch.from_numpy(logprobs(tmp_path / "m.gguf", [ids], threads=1)[0]), wanted) < 2e-2


@pytest.mark.parametrize("name", ["e2b", "e4b", "k_eq_v"])
def test_a_gguf_file_from_elsewhere_is_understood(tmp_path, name):
    source = make(tmp_path / "hf", **VARIANTS[name])
    convert.convert_checkpoint(source.path, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    stored = gguf_keys(tmp_path / "m.gguf")
    raw = {k: v for k, (_, v) in stored.items() if not k.startswith("convert.")}
    found, wanted = configs.to_hub(load_table("gemma4"), "gguf", raw), hub(source.path)
    for key in {*SIZES, "rope_parameters", "attention_k_eq_v"} - {"vocab_size_per_layer_input"}:  # from the tensor
        assert (found.get(key) or 0) == (wanted.get(key) or 0), key
    assert stored["gemma4.attention.sliding_window_pattern"][0] == "ARRAY:BOOL"
    assert stored["gemma4.feed_forward_length"][0] == ("ARRAY:INT32" if name == "e2b" else "UINT32")
    assert stored["gemma4.attention.head_count_kv"][0] == ("ARRAY:INT32" if name == "k_eq_v" else "UINT32")
    divisors = gguf_tensors(tmp_path / "m.gguf")["rope_freqs.weight"][1]
    assert divisors.tolist() == [1.0] * 4 + [np.float32(1e30)] * 12


@torch.no_grad()
def test_no_cap_comes_back_from_gguf_as_none(tmp_path):
    """GGUF states it as 0, by which transformers would divide."""
    made = make(tmp_path / "hf", **VARIANTS["k_eq_v"])
    convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    assert gguf_keys(tmp_path / "m.gguf")["gemma4.final_logit_softcapping"][1] == 0.0
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "back", to="hf", tokenizer=False)
    again = transformers.Gemma4ForCausalLM.from_pretrained(tmp_path / "back")
    assert torch.equal(again(prompt(SIZES["vocab_size"])).logits, made.logits)
    config = json.loads((tmp_path / "back" / "config.json").read_text()) | {"final_logit_softcapping": 0.0}
    (tmp_path / "back" / "config.json").write_text(json.dumps(config))
    broken = transformers.Gemma4ForCausalLM.from_pretrained(tmp_path / "back")
    assert not torch.equal(broken(prompt(SIZES["vocab_size"])).logits, made.logits)


def test_the_proportion_is_read_from_the_tensor(tmp_path, made):
    changed = json.loads((made.path / "config.json").read_text())
    changed["rope_parameters"]["full_attention"]["partial_rotary_factor"] = 0.5
    source = tmp_path / "hf"
    source.mkdir()
    save_file(load_file(made.path / "model.safetensors"), source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(changed))
    convert.convert_checkpoint(source, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    with open_checkpoint(tmp_path / "m.gguf") as opened:
        assert opened.config["rope_parameters"] == changed["rope_parameters"]


def test_llama_cpp_computes_the_same(tmp_path, variant, monkeypatch):
    pytest.importorskip("xllamacpp")
    from convert.engines.llama_cpp import logprobs

    out = tmp_path / "m.gguf"
    convert.convert_checkpoint(variant.path, out, to="gguf", type="f32", tokenizer=False)
    row = prompt(SIZES["vocab_size"])[0].tolist()
    places = (1, 7, 40, LENGTH)
    found = torch.from_numpy(logprobs(out, [row[:n] for n in places], threads=1))
    rows = [n - 1 for n in places]
    wanted = variant.logits[0].double().log_softmax(-1)[rows]
    assert off(found, wanted) < 1e-2
    assert off(run_reference(out)[0].log_softmax(-1)[rows], wanted) < 1e-4
    monkeypatch.setattr(torch.nn.functional, "gelu", gelu_table)
    told = run_reference(out)[0].log_softmax(-1)[rows]
    assert off(found[0], told[0]) < 1e-4
    assert off(found, told) < 2e-3  # a value on the border of two float16 goes either way
    with open_checkpoint(variant.path) as opened, torch.no_grad():
        model = load_reference(opened)
        for control in model.controls:
            with control.apply(model):
                broken = model(torch.tensor([row]))[0].log_softmax(-1)[[n - 1 for n in places]]
            assert off(found, broken) > 0.5, control.name


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        ("gguf", {"vocab_size_per_layer_input": 100}, "as many rows"),
        ("gguf", {"layer_types": [S, S, G, S, G, S, G]}, "share the keys and values of the two before"),
        ("gguf", {"rope_parameters": {k: {"rope_type": "default", "rope_theta": 1e4} for k in (S, G)}}, "rope_freqs"),
        ("gguf", {"use_bidirectional_attention": "all"}, "backwards only"),
        ("gguf", {"layer_types": [G] * 7}, "no layer of this architecture slides"),
        ("gguf", {"hidden_activation": "silu"}, "GELU"),
        ("scratch", {"hidden_activation": "silu"}, "GELU"),
        ("scratch", VARIANTS["k_eq_v"], "value projection"),
        ("scratch", {"hidden_size_per_layer_input": 0}, "embeddings per layer"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused_before_writing(tmp_path, layout, change, said):
    make(tmp_path / "hf", **change)
    with pytest.raises(ConvertError, match=said):
        convert.convert_checkpoint(tmp_path / "hf", tmp_path / "out.gguf", to=layout, tokenizer=False)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("stored", [False, True], ids=["without unused", "with unused"])
def test_modules_are_filled(tmp_path, made, stored):
    """One with the book's names, whose scalars are buffers and whose every layer has keys and values; transformers'."""
    source = with_unused(made, tmp_path / "all") if stored else made.path
    names = set(shapes("gemma4", "scratch", hub(source) | {"_shared_kv": True}))
    module = build_reference(hub(source), names=names)
    for block in module.blocks:
        del block._parameters["layer_scalar"]
        block.register_buffer("layer_scalar", torch.ones(1))
    convert.load_into(module, source)
    theirs = transformers.Gemma4ForCausalLM(made.model.config).eval()
    convert.load_into(theirs, source)
    ids = prompt(SIZES["vocab_size"])
    with torch.no_grad():
        assert off(module(ids), made.logits) < 1e-4
        assert off(theirs(ids).logits, made.logits) == 0.0
        # and back: the scalars, which are no parameters, are saved; what the class has for layers that share stays
        convert.save_model(module, tmp_path / "saved", layout="hf", config=book(source))
        saved, state = (load_file(p / "model.safetensors") for p in (tmp_path / "saved", source))
        assert len(saved) == 116 + 9 and all(torch.equal(saved[k], state[k]) for k in state)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert off(again(ids).logits, made.logits) == 0.0
        module.blocks[3].layer_scalar.fill_(1.0)
        assert off(module(ids), made.logits) > 1e-2


# ---- verify ----------------------------------------------------------------------------------------------------

PAIRS = faults.pairs("gemma4", configs.to_hub(load_table("gemma4"), "hf", SIZES), "scratch")


def converted(made: Tiny, folder: Path, layout: str, table: Any = None) -> Path:
    out = folder / ("out.gguf" if layout == "gguf" else "out")
    with open_checkpoint(made.path) as opened:
        request = Request(layout, tokenizer=False, allow_reference=True)
        request.gguf.type = "f32"
        run(make_plan(opened, request, table=table), out)
    return out


@pytest.mark.parametrize("layout", ["scratch", "gguf"])
def test_verify_passes(tmp_path, variant, layout):
    result = convert.verify(variant.path, converted(variant, tmp_path, layout), device="cpu")
    assert result.verdict == "pass", result.message
    assert result.distance.max_abs < 1e-4


@pytest.mark.parametrize("layout", ["scratch", "gguf"])
@pytest.mark.parametrize("convention", ["norm", "rope"])
def test_a_convention_the_other_way_round_is_caught(tmp_path, made, convention, layout):
    out = converted(made, tmp_path, layout, faults.flipped("gemma4", layout, convention))
    result = convert.verify(made.path, out, device="cpu")
    assert result.verdict == "fail" and result.distance.max_abs > 100 * 1e-4, result.message


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda v: v)
def test_tensors_of_one_shape_exchanged_are_caught(tmp_path, made, one, other):
    raw = copy.deepcopy(dict(load_table("gemma4").raw))
    if (one, other) == ("block.attn.q_norm", "block.attn.k_norm"):  # which has one row more for each kind of layer
        rows = raw["block"]["attn"]
        for row in (rows["k_norm"], rows["unused_k_norm"], rows["filler_k_norm"]):
            row["scratch"] = "att.q_norm.weight"
        rows["q_norm"]["scratch"] = "att.k_norm.weight"
        table = build(raw, "wrong.toml")
    else:
        table = faults.exchanged("gemma4", "scratch", one, other)
    out = converted(made, tmp_path, "scratch", table)
    result = convert.verify(made.path, out, device="cpu")
    assert result.verdict == "fail" and result.distance.max_abs > 100 * 1e-4, result.message
