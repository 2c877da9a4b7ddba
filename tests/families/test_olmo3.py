"""Olmo 3 against transformers, real llama.cpp, and the key sets that running code has."""

from __future__ import annotations

import json
import math
import warnings
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
from convert.reference.layers import RotaryEmbedding
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

FAMILY = "olmo3"
KEYS = json.loads((Path(__file__).parents[1] / "data" / "olmo3_keys.json").read_text(encoding="utf-8"))
VOCAB = 128
#: Stretched eight times from 32 positions, so that 160 tokens see it.
SHORT = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
YARN = SHORT | {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0}
PLAIN = {"rope_type": "default", "rope_theta": 500000.0}
ROPE = {"full_attention": YARN | {"rope_theta": 500000.0}, "sliding_attention": PLAIN}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "sliding_window": 24,
    "layer_types": KINDS,
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPE,
    "eos_token_id": 3,
    "pad_token_id": 1,
}


def config_of(**changes: Any) -> Any:
    return transformers.Olmo3Config(**json.loads(json.dumps(SIZES | changes)))  # it changes nested settings in place


def make(folder: Path, **changes: Any) -> Tiny:
    return tiny(folder, transformers.Olmo3ForCausalLM(config_of(**changes)))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Tiny:
    """As the released models: untied, with YaRN."""
    return make(tmp_path_factory.mktemp(FAMILY))


def hub_of(raw: dict[str, Any], layout: str = "hf") -> dict[str, Any]:
    return configs.to_hub(load_table(FAMILY), layout, raw)


# ---- names, shapes, configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(KEYS))
def test_the_very_keys_and_shapes_that_the_classes_have(name):
    layout, case = name.split("/")[0], KEYS[name]
    hub = hub_of(configs.plain(case["config"]), layout)
    assert golden.shapes(FAMILY, layout, hub) == case["keys"]
    assert golden.shapes(FAMILY, layout, hub | {"head_dim": 12}) != case["keys"]
    assert golden.shapes(FAMILY, layout, hub | {"num_hidden_layers": 1}) != case["keys"]


@pytest.mark.parametrize("layout", ["hf", "scratch", "gguf"])
def test_golden(layout):
    assert golden.same(FAMILY, layout, SIZES), "python -m tests.families.test_olmo3 writes it anew; read the diff"


@pytest.mark.parametrize(("size", "count"), [("olmo3-7b", 7_298_011_136), ("olmo3-32b", 32_233_522_176)])
def test_published_sizes(size, count):
    table = load_table(FAMILY)
    hub = configs.published(table, size)
    for layout in table.layouts:
        slots = expand(table, Dims(table, hub), layout).values()
        assert sum(math.prod(s.shape) for s in slots) == count  # what the book's class has
    assert hub["layer_types"] == [*["sliding_attention"] * 3, "full_attention"] * (hub["num_hidden_layers"] // 4)
    full = ROPE["full_attention"] | {"original_max_position_embeddings": 8192}
    assert hub["rope_parameters"] == {"full_attention": full, "sliding_attention": PLAIN}


def test_configs_of_every_spelling_say_the_same():
    v5 = config_of().to_dict()
    v4 = {k: v for k, v in v5.items() if k not in ("rope_parameters", "layer_types")}
    v4 |= {"rope_theta": 500000.0, "rope_scaling": YARN}
    hub = hub_of(v5)
    assert hub["rope_parameters"] == ROPE
    for scaling in (YARN, SHORT):
        old = hub_of(v4 | {"rope_scaling": scaling})
        assert {k: old[k] for k in SIZES} == {k: hub[k] for k in SIZES}
    book = configs.to_scratch(load_table(FAMILY), hub, "F32")
    assert (book["n_kv_heads"], book["rope_base"], book["rope_type"]) == (2, 500000.0, "yarn")
    assert (book["rope_factor"], book["rope_orig_max"], book["beta_fast"]) == (8.0, 32, 32.0)
    assert book["rope_attention_factor"] == YARN["attention_factor"]
    again = hub_of(book, "scratch")
    assert {k: again[k] for k in SIZES} == {k: hub[k] for k in SIZES}
    # what we write is read by transformers as what it was: nested, and older keys that agree
    written = configs.to_hf(load_table(FAMILY), hub, "F32")
    assert written["rope_scaling"] == YARN and written["rope_theta"] == 500000.0
    theirs = transformers.Olmo3Config(**{k: v for k, v in written.items() if k != "architectures"}).to_dict()
    assert {k: theirs[k] for k in SIZES} == {k: v5[k] for k in SIZES}


def test_bases_that_differ_by_kind_have_no_older_key():
    rope = {"full_attention": ROPE["full_attention"], "sliding_attention": PLAIN | {"rope_theta": 10000.0}}
    written = configs.to_hf(load_table(FAMILY), hub_of(SIZES | {"rope_parameters": rope}), "F32")
    assert "rope_theta" not in written and written["rope_parameters"] == rope
    assert hub_of(written)["rope_parameters"] == rope
    with pytest.raises(ConvertError, match="no word for rope_theta = 10000"):
        configs.to_scratch(load_table(FAMILY), hub_of(written), "F32")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_parameters": YARN | {"rope_theta": 5e5}}, "one set of settings per kind"),
        ({"rope_scaling": YARN | {"factor": 4.0}}, "full_attention layers twice"),
        ({"rope_theta": 10000.0}, "layers twice"),
        ({"rope_scaling": YARN | {"truncate": False}}, "truncate"),
        ({"layer_types": KINDS[:3]}, "3 entries for 5 layers"),
    ],
)
def test_contradictions_in_a_config_stop(change, said):
    with pytest.raises(ConvertError, match=said):
        hub_of(SIZES | change)


# ---- the reference model ---------------------------------------------------------------------------------------


def _each_head(norm: torch.nn.Module) -> Any:
    """The norm as a Qwen3 has it: over each head alone."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (-1, 8))
        normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + norm.eps)
        return normed.flatten(-2) * norm.weight

    return forward


def test_the_reference_computes_what_transformers_does(made):
    wanted, ids = made.logits, prompt(VOCAB)
    model = reference(made.path)
    sliding, full = model.ropes["sliding_attention"], model.ropes["full_attention"]
    quiet = RotaryEmbedding(8, 500000.0, scaling=YARN | {"attention_factor": 1.0})
    with torch.no_grad():
        found = model(ids)
        exact = made.model.double()(ids).logits
        made.model.float()
        assert off(found, wanted) < 1e-4
        assert off(found, exact) < 4 * off(wanted, exact)
        faults = {}
        with model.controls[0].apply(model):
            faults["interleaved pairs"] = off(model(ids), wanted)
        for fault, (a, b) in {
            "YaRN on all layers, as the book's": (full, full),
            "YaRN on none": (sliding, sliding),
            "YaRN on the sliding ones": (full, sliding),
            "no attention factor": (sliding, quiet),
        }.items():
            model.rotations = lambda a=a, b=b: {"sliding_attention": a, "full_attention": b}
            faults[fault] = off(model(ids), wanted)
        del model.rotations
        for fault, window in {"no window": None, "a window of one more": 25}.items():
            model.windows = lambda window=window: {"sliding_attention": window, "full_attention": None}
            faults[fault] = off(model(ids), wanted)
        del model.windows
        block = model.blocks[2]

        def before(x, context, cache=None):
            here = context[block.kind]
            x = x + block.att(block.post_attention_layernorm(x), rotation=here.rotation, mask=here.mask)
            return x + block.ff(block.post_feedforward_layernorm(x))

        block.forward = before
        faults["norms before, as a Llama's"] = off(model(ids), wanted)
        del block.forward
        block.att.q_norm.forward = _each_head(block.att.q_norm)
        faults["a norm of each head"] = off(model(ids), wanted)
        del block.att.q_norm.forward
        assert torch.equal(model(ids), found)  # every fault is taken back
    assert min(faults.values()) > 100 * 1e-4, faults


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 0.1},
        {"attention_bias": True},
        {"sliding_window": 100},
        {"head_dim": 16},
        {"tie_word_embeddings": True},
        {"layer_types": ["full_attention", *KINDS[1:]]},
        {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}},
        {"rope_parameters": ROPE | {"sliding_attention": PLAIN | {"rope_theta": 100.0}}},
        {"rope_parameters": ROPE | {"full_attention": ROPE["full_attention"] | {"beta_fast": 2.0, "beta_slow": 0.1}}},
    ],
    ids=str,
)
def test_what_a_config_can_say_is_heeded(tmp_path, made, change):
    other = make(tmp_path, **change)
    assert off(run_reference(tmp_path, VOCAB), other.logits) < 1e-4
    assert off(other.logits, made.logits) > 1e-2  # it does change the model


def test_a_cache_changes_nothing(made):
    assert off(*with_and_without_cache(made.path, VOCAB)) < 4e-5


# ---- there and back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scratch_and_back_is_bit_equal(tmp_path, made, dtype):
    state = {k: v.to(getattr(torch, dtype)) for k, v in load_file(made.path / "model.safetensors").items()}
    (tmp_path / "source").mkdir()
    save_file(state, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text((made.path / "config.json").read_text())
    scratch = converted(tmp_path / "source", tmp_path, "scratch")
    back = load_file(converted(scratch, tmp_path, "hf") / "model.safetensors")
    assert back.keys() == state.keys() and all(torch.equal(back[k], state[k]) for k in state)
    was, now = (json.loads((p / "config.json").read_text()) for p in (tmp_path / "source", tmp_path / "out_hf"))
    assert {k: now[k] for k in was if k != "dtype"} == {k: v for k, v in was.items() if k != "dtype"}


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_and_back_is_bit_equal_and_llama_cpp_computes_the_same(tmp_path, made, tied):
    source = make(tmp_path / "tied", tie_word_embeddings=True) if tied else made
    out = converted(source.path, tmp_path, "gguf")
    stored = gguf_keys(out)
    assert stored["general.architecture"][1] == "olmo2"
    assert stored["olmo2.attention.sliding_window_pattern"] == ("UINT32", 4)
    assert stored["olmo2.rope.scaling.type"] == ("STRING", "yarn")
    assert stored["olmo2.rope.scaling.original_context_length"] == ("UINT32", 32)
    state, back = (load_file(p / "model.safetensors") for p in (source.path, converted(out, tmp_path, "hf")))
    assert ("lm_head.weight" in state) == (not tied)
    assert back.keys() == state.keys() and all(torch.equal(back[k], state[k]) for k in state)
    config, wanted = (json.loads((p / "config.json").read_text()) for p in (tmp_path / "out_hf", source.path))
    for key in (*SIZES, "tie_word_embeddings"):
        assert config[key] == wanted[key], key
    if not available():
        return
    found = llama_cpp(out, VOCAB)  # the loader wants the output tensor of a tied model too
    assert off(found, at_places(source.logits)) < 2e-4
    model, ids = reference(out), prompt(VOCAB)
    assert off(found, at_places(run_reference(out, VOCAB))) < 2e-4
    with torch.no_grad():
        with model.controls[0].apply(model):
            assert off(found, at_places(model(ids))) > 0.5
        model.rotations = lambda: dict.fromkeys(model.ropes, model.ropes["full_attention"])
        assert off(found, at_places(model(ids))) > 0.05  # llama.cpp, too, stretches the full layers only


@pytest.mark.parametrize("pattern", [4, None, [True, True, True, False, True]])
def test_a_gguf_file_from_elsewhere_is_understood(tmp_path, made, pattern):
    """Without our record; the pattern as a number, absent (llama.cpp takes 4), and as its converter writes it."""
    stored = gguf_keys(converted(made.path, tmp_path, "gguf"))
    raw = {k: v for k, (_, v) in stored.items() if not k.startswith("convert.") and k != "olmo2.rope.freq_base_swa"}
    raw["olmo2.attention.sliding_window_pattern"] = pattern
    hub = hub_of({k: v for k, v in raw.items() if v is not None}, "gguf")
    for key, value in hub_of(SIZES).items():
        if key in SIZES and not key.endswith("token_id"):
            assert hub[key] == (pytest.approx(value) if key == "rms_norm_eps" else value), key


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        ("gguf", {"attention_bias": True}, "no biases"),
        ("gguf", {"head_dim": 16}, "hidden_size / heads"),
        ("gguf", {"layer_types": ["full_attention", *KINDS[1:]]}, "these layer_types have none"),
        ("gguf", {"layer_types": ["full_attention"] * len(KINDS)}, "no layer that slides"),
        ("gguf", {"hidden_act": "gelu"}, "SiLU"),
        ("gguf", {"rope_parameters": ROPE | {"full_attention": ROPE["full_attention"] | {"beta_fast": 9.0}}}, "itself"),
        ("gguf", {"rope_parameters": ROPE | {"sliding_attention": ROPE["full_attention"]}}, "no key for rope_type"),
        ("scratch", {"rms_norm_eps": 1e-5}, "1e-6"),
        ("scratch", {"hidden_act": "gelu"}, "SiLU"),
        ("scratch", {"rope_parameters": ROPE | {"sliding_attention": ROPE["full_attention"]}}, "no word for"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused_before_writing(tmp_path, layout, change, said):
    make(tmp_path / "hf", **change)
    with pytest.raises(ConvertError, match=said):
        converted(tmp_path / "hf", tmp_path, layout)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_our_reference_class_holds_what_the_books_does_not(tmp_path):
    source = make(tmp_path / "hf", rms_norm_eps=0.01)
    scratch = converted(source.path, tmp_path, "scratch", allow_reference=True)
    assert off(run_reference(scratch, VOCAB), source.logits) < 1e-4
    converted(scratch, tmp_path, "hf")
    assert json.loads((tmp_path / "out_hf" / "config.json").read_text())["rms_norm_eps"] == 0.01


def test_who_converts_to_the_books_class_is_told_what_it_computes(tmp_path, made):
    plain = make(tmp_path / "plain", rope_parameters={"full_attention": PLAIN, "sliding_attention": PLAIN})
    for path, told in ((made.path, True), (plain.path, False)):
        notes = convert.convert_checkpoint(path, tmp_path / f"out{told}", to="scratch", tokenizer=False).notes
        assert any("stretches the sliding layers too" in note for note in notes) == told


@pytest.mark.parametrize("theta", [500000.0, 10000.0])
def test_a_module_of_the_books_names_is_filled_and_its_tables_are_looked_at(made, theta):
    """Tables as the book's class keeps them: one for all layers, stretched, multiplied by the attention factor."""
    from convert.reference.olmo3 import build

    model = build(hub_of(SIZES))
    table = RotaryEmbedding(8, theta, scaling=YARN)(0, 256).cos
    model.register_buffer("cos", torch.cat([table, table], 1), persistent=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert.load_into(model, made.path)
    assert [("another base or scaling" in str(w.message)) for w in caught] == [True] * (theta == 10000.0)
    with torch.no_grad():
        assert off(model(prompt(VOCAB)), made.logits) < 1e-4


def test_its_tokenizer_goes_along(tmp_path):
    """The rules by which the released tokenizer cuts texts have a name in llama.cpp, and come back."""
    source = make(tmp_path / "hf", vocab_size=640)
    give_tokenizer(source.path, (pretokenizers.LLAMA3,))
    convert.convert_checkpoint(source.path, tmp_path / "m.gguf", to="gguf", type="f32")
    assert gguf_keys(tmp_path / "m.gguf")["tokenizer.ggml.pre"] == ("STRING", "dbrx")
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "back", to="hf")
    assert token_ids(tmp_path / "back") == token_ids(source.path)
    if available():
        assert off(llama_cpp(tmp_path / "m.gguf", 640), at_places(source.logits)) < 2e-4


# ---- verify ----------------------------------------------------------------------------------------------------

PAIRS = wrong_tables.pairs(FAMILY, hub_of(SIZES), "scratch")


@pytest.mark.parametrize("layout", ["scratch", "gguf"])
def test_verify_passes(tmp_path, made, layout):
    result = convert.verify(made.path, converted(made.path, tmp_path, layout), device="cpu")
    assert result.verdict == "pass", result.message
    assert result.distance.max_abs < 1e-4


@pytest.mark.parametrize("layout", ["scratch", "gguf"])
def test_rows_in_metas_order_are_caught(tmp_path, made, layout):
    out = converted(made.path, tmp_path, layout, wrong_tables.flipped(FAMILY, layout, "rope"))
    result = convert.verify(made.path, out, device="cpu")
    assert result.verdict == "fail" and result.distance.max_abs > 100 * 1e-4, result.message


def test_the_pairs_that_could_be_taken_for_each_other():
    assert len(PAIRS) == 7 and ("block.attn.norm", "block.mlp.norm") in PAIRS


@pytest.mark.parametrize("layout", ["scratch", "gguf"])
@pytest.mark.parametrize(("one", "other"), PAIRS, ids="-".join)
def test_tensors_of_one_shape_exchanged_are_caught(tmp_path, made, layout, one, other):
    out = converted(made.path, tmp_path, layout, wrong_tables.exchanged(FAMILY, layout, one, other))
    result = convert.verify(made.path, out, device="cpu")
    assert result.verdict == "fail" and result.distance.max_abs > 100 * 1e-4, result.message


if __name__ == "__main__":
    golden.write(FAMILY, SIZES)
