"""What a plan decides before a byte of data is read: refusals, ties, types, files, and every assumption said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.errors import ConvertError, UsageError
from convert.plan import ConversionPlan
from convert.source import FilePool
from tests.fixtures import Shape, get_shape, make_gguf, make_hf, make_meta, make_scratch

TARGETS = ("hf", "meta", "scratch", "gguf")
HEADS = {"hf": "lm_head.weight", "meta": "output.weight", "scratch": "out_head.weight", "gguf": "output.weight"}


def plan(source: Path, target: str, **options: object) -> ConversionPlan:
    if target == "gguf":
        options.setdefault("tokenizer", False)
    return convert.plan_conversion(source, target, **options)


def entries(found: ConversionPlan) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {e.name: (e.dtype, e.shape) for f in found.files for e in f.entries}


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["meta", "scratch"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention_bias": True}, "bias"),
        ({"mlp_bias": True}, "bias"),
        ({"shape": "hd16"}, r"hd \* H|head_dim"),
    ],
    ids=["attention", "mlp", "head_dim"],
)
def test_what_a_layout_cannot_hold(tmp_path, target, options, said):
    made = make_hf(tmp_path / "m", **{"shape": "gqa8", **options})
    with pytest.raises(ConvertError, match=f"the {target} layout cannot hold this model") as caught:
        plan(made.path, target)
    assert {p.kind for p in caught.value.problems} == {"refused"}
    import re

    assert re.search(said, str(caught.value))
    assert ("--allow-reference" in str(caught.value)) == (target == "scratch")
    if target == "meta":
        with pytest.raises(ConvertError):
            plan(made.path, target, allow_reference=True)
        return
    found = entries(plan(made.path, target, allow_reference=True))
    assert len(found) == len(made.tensors)
    assert not plan(made.path, "hf").request.allow_reference
    assert len(entries(plan(made.path, "hf"))) == len(made.tensors)  # the control: its own layout holds it


@pytest.mark.parametrize("target", ["meta", "scratch", "gguf"])
def test_another_activation_is_not_dropped(tmp_path, target):
    """Nowhere but in config.json is there a word for it, and every other loader computes SiLU."""
    made = make_hf(tmp_path / "m", "gqa8")
    said = json.loads((made.path / "config.json").read_text())
    for act, fits in {"gelu": False, "swish": True, "silu": True}.items():
        (made.path / "config.json").write_text(json.dumps({**said, "hidden_act": act}))
        if fits:
            assert len(entries(plan(made.path, target))) == len(made.tensors)
            continue
        with pytest.raises(ConvertError, match="SiLU hard-wired"):
            plan(made.path, target, **({} if target == "gguf" else {"allow_reference": True}))
        kept = plan(made.path, "hf").sidecars["config.json"]
        assert isinstance(kept, bytes) and json.loads(kept)["hidden_act"] == act


def test_all_reasons_at_once(tmp_path):
    shape = replace(get_shape("hd16"), eps=1e-6)
    made = make_hf(tmp_path / "m", shape, attention_bias=True)
    with pytest.raises(ConvertError) as caught:
        plan(made.path, "scratch")
    assert len(caught.value.problems) == 3
    text = str(caught.value)
    assert "head_dim" in text and "eps" in text and "bias" in text and "1e-06" in text


def test_the_books_epsilon(tmp_path):
    made = make_hf(tmp_path / "m", replace(get_shape("gqa8"), eps=1e-6))
    with pytest.raises(ConvertError, match="1e-5 hard-wired"):
        plan(made.path, "scratch")
    assert plan(made.path, "meta").config["rms_norm_eps"] == 1e-6
    kept = plan(made.path, "scratch", allow_reference=True)
    assert json.loads(kept.sidecars["scratch_config.json"])["rms_norm_eps"] == 1e-6


def test_the_books_llama2_class(tmp_path):
    llama2 = make_hf(tmp_path / "a", replace(get_shape("mha"), theta=10000.0))
    config = json.loads(plan(llama2.path, "scratch", book_class="Llama2Model").sidecars["scratch_config.json"])
    assert config["class"] == "Llama2Model" and "n_kv_groups" not in config and "rope_base" not in config
    grouped = make_hf(tmp_path / "b", "gqa8", scaling=8)
    with pytest.raises(ConvertError) as caught:
        plan(grouped.path, "scratch", book_class="Llama2Model")
    text = str(caught.value)
    assert "theta 10000" in text and "grouped-query" in text and "scaling" in text
    with pytest.raises(UsageError, match=r"no class 'Llama9'.*Llama2Model"):
        plan(grouped.path, "scratch", book_class="Llama9")


@pytest.mark.parametrize("target", ["meta", "scratch"])
def test_a_sliding_window_that_matters(tmp_path, target):
    made = make_hf(tmp_path / "m", "gqa8")
    path = made.path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"model_type": "mistral", "sliding_window": 128}))
    with pytest.raises(ConvertError, match="sliding window"):
        plan(made.path, target)
    path.write_text(json.dumps(config | {"model_type": "mistral", "sliding_window": 4096}))  # wider than the context
    plan(made.path, target)


def test_scaling_that_metas_flag_cannot_say(tmp_path):
    for factor in (4.0, 16.0):
        made = make_hf(tmp_path / str(factor), "gqa8", scaling=factor)
        with pytest.raises(ConvertError, match="factor"):
            plan(made.path, "meta")
    linear = make_hf(tmp_path / "linear", "gqa8", scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(ConvertError, match="linear"):
        plan(linear.path, "meta")


def test_unknown_options_and_targets(tmp_path):
    made = make_hf(tmp_path / "m", "gqa8")
    with pytest.raises(UsageError, match=r"unknown option 'colour'") as caught:
        convert.plan_conversion(made.path, "hf", colour="red")
    assert "max_shard_size" in str(caught.value)
    with pytest.raises(ConvertError, match="paper"):
        convert.plan_conversion(made.path, "paper")
    with pytest.raises((ConvertError, KeyError)):
        convert.plan_conversion(made.path, "hf", dtype="int3")


def test_nothing_is_read_before_the_plan_is_made(tmp_path, monkeypatch):
    """Refusals come from headers: no byte of data is touched, and none is for a plan without a question of tying."""
    made = make_hf(tmp_path / "m", "gqa8", attention_bias=True)
    monkeypatch.setattr(FilePool, "read_into", lambda *_: pytest.fail("data was read"))
    with pytest.raises(ConvertError, match="bias"):
        plan(made.path, "meta")
    tied = make_hf(tmp_path / "t", "tied")
    for target in TARGETS:
        plan(tied.path, target)


# --- tying ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("head", ["equal", "different", "absent"])
def test_ties_follow_the_tensors(tmp_path, head, flag, target):
    """Flag and tensors in every combination, towards every layout (pains B1 to B6, B9)."""
    made = make_hf(tmp_path / "m", "gqa8", head=head, tie_flag=flag)
    if head == "absent" and not flag:
        with pytest.raises(ConvertError, match=r"'lm_head.weight' is missing although tie_word_embeddings is false"):
            plan(made.path, target)
        with pytest.raises(ConvertError, match="--tie share"):
            plan(made.path, target)
        found = plan(made.path, target, tie="share")
    else:
        found = plan(made.path, target)
    tied = head != "different"
    assert found.tied == tied
    stored = HEADS[target] in entries(found)
    assert stored == (not tied or target in ("meta", "scratch"))  # Meta's and the book's classes need their own
    if target == "hf":
        config = json.loads(found.sidecars["config.json"])
        assert config["tie_word_embeddings"] is tied
    said = any(f"tie_word_embeddings = {flag}, the tensors say {tied}" in n for n in found.notes)
    assert said == (flag != tied)


@pytest.mark.parametrize("target", TARGETS)
def test_a_copy_on_request(tmp_path, target):
    made = make_hf(tmp_path / "m", "tied")
    found = plan(made.path, target, tie="copy")
    assert HEADS[target] in entries(found)
    if target == "hf":
        assert json.loads(found.sidecars["config.json"])["tie_word_embeddings"] is False
    shared = plan(make_hf(tmp_path / "e", "gqa8", head="equal").path, target, tie="copy")
    assert HEADS[target] in entries(shared)


@pytest.mark.parametrize("source", ["meta", "scratch"])
def test_equal_heads_of_layouts_without_a_flag(tmp_path, source):
    """pains B8: separate bytes, equal values: one tensor in Hugging Face's and GGUF's layouts."""
    make = {"meta": make_meta, "scratch": make_scratch}[source]
    tied, untied = make(tmp_path / "t", "tied"), make(tmp_path / "u", "std")
    for target in ("hf", "gguf"):
        assert HEADS[target] not in entries(plan(tied.path, target))
        assert HEADS[target] in entries(plan(untied.path, target))


def test_one_bit_makes_two_heads(tmp_path):
    made = make_hf(tmp_path / "m", "gqa8", head="equal", tie_flag=True)
    state = load_file(made.path / "model.safetensors")
    flat = state["lm_head.weight"].view(torch.int32)
    flat[77, 31] ^= 1
    save_file(state, made.path / "model.safetensors")
    found = plan(made.path, "hf")
    assert "lm_head.weight" in entries(found)
    assert json.loads(found.sidecars["config.json"])["tie_word_embeddings"] is False


# --- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["meta", "scratch", "hf"])
def test_mixed_types_are_kept_per_tensor(tmp_path, target):
    made = make_hf(tmp_path / "m", "gqa8", dtype="bfloat16")
    state = load_file(made.path / "model.safetensors")
    state = {k: t.float() if "norm" in k else t.half() if "mlp" in k else t for k, t in state.items()}
    save_file(state, made.path / "model.safetensors")
    kinds: dict[str, set[str]] = {}
    for name, (dtype, _) in entries(plan(made.path, target)).items():
        part = "norm" if "norm" in name else "mlp" if any(x in name for x in ("mlp", "feed_forward", "ff.")) else "rest"
        kinds.setdefault(part, set()).add(dtype)
    assert kinds == {"norm": {"F32"}, "mlp": {"F16"}, "rest": {"BF16"}}
    cast = entries(plan(made.path, target, dtype="float32"))
    assert {d for d, _ in cast.values()} == {"F32"}


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_the_config_says_the_type_that_is_written(tmp_path, name):
    made = make_hf(tmp_path / "m", "gqa8")
    config = json.loads(plan(made.path, "hf", dtype=name).sidecars["config.json"])
    assert config["dtype"] == config["torch_dtype"] == name
    book = json.loads(plan(made.path, "scratch", dtype=name).sidecars["scratch_config.json"])
    assert book["dtype"] == name


def test_quantised_sources_become_float16_and_it_is_said(tmp_path):
    made = make_gguf(tmp_path / "m.gguf", "gqa8", type="q8_0")
    found = plan(made.path, "hf")
    assert {d for d, s in entries(found).values() if len(s) == 2} == {"F16"}
    assert any("block-quantised tensors (Q8_0) are dequantised to F16" in n for n in found.notes)
    assert {d for d, s in entries(plan(made.path, "hf", dtype="float32")).values()} == {"F32"}


# --- notes and sizes --------------------------------------------------------------------------------------------------


def test_notes_say_what_is_done(tmp_path):
    made = make_hf(tmp_path / "m", "gqa8")
    to_meta, to_scratch = plan(made.path, "meta"), plan(made.path, "scratch")
    assert "rows of Q and K are put from half into interleaved order (4 tensors)" in to_meta.notes
    assert not any("rows of Q and K" in n for n in to_scratch.notes)
    meta = make_meta(tmp_path / "meta", "gqa8", rope_freqs=True)
    found = plan(meta.path, "hf")
    assert any(n.startswith("ignored rope.freqs: ") for n in found.notes)
    assert any("does not say how many positions" in n for n in found.notes)
    assert not any("positions" in n for n in plan(meta.path, "hf", context=256).notes)
    assert plan(meta.path, "hf", context=256).config["max_position_embeddings"] == 256


@pytest.mark.parametrize("target", TARGETS)
def test_the_planned_size_is_the_real_one(tmp_path, target):
    made = make_hf(tmp_path / "m", "gqa8", tokenizer=120)
    found = convert.plan_conversion(made.path, target)
    out = tmp_path / ("out.gguf" if target == "gguf" else "out")
    convert.convert_checkpoint(made.path, out, to=target)
    files = [p for p in tmp_path.rglob("*") if p.is_file() and made.path not in p.parents]
    found.bind(out)
    assert sum(p.stat().st_size for p in files) == found.nbytes
    found.source.close()


def test_the_estimate_of_memory_grows_with_threads_and_not_with_depth(tmp_path):
    shallow = plan(make_hf(tmp_path / "a", Shape(48, 6, 2, 8, 80, 96, layers=1)).path, "meta")
    deep = plan(make_hf(tmp_path / "b", Shape(48, 6, 2, 8, 80, 96, layers=6)).path, "meta")
    assert shallow.peak_memory(2) == deep.peak_memory(2) < deep.peak_memory(8)


def test_the_file_says_how_it_was_made(tmp_path):
    from safetensors import safe_open

    made = make_meta(tmp_path / "m", "gqa8")
    convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        said = file.metadata()
    assert (
        said["convert.layout"] == "scratch" and said["convert.qk_layout"] == "half" and said["convert.tied"] == "false"
    )


@pytest.mark.parametrize(("theta", "positions"), [(500000.0, 8192), (10000.0, 4096)])
def test_positions_that_no_config_states_are_assumed_and_said(tmp_path, theta, positions):
    """The book's dict and a GGUF file state them usually, but nothing in the weights needs them."""
    made = make_scratch(tmp_path / "m", replace(get_shape("gqa8"), theta=theta))
    place = made.path / "scratch_config.json"
    place.write_text(json.dumps({k: v for k, v in json.loads(place.read_text()).items() if k != "context_length"}))
    found = plan(made.path, "hf")
    written = found.sidecars["config.json"]
    assert isinstance(written, bytes) and json.loads(written)["max_position_embeddings"] == positions
    assert any(f"{positions} is assumed" in note for note in found.notes)
    stated = plan(made.path, "hf", context=77)  # the control
    assert isinstance(stated.sidecars["config.json"], bytes)
    assert json.loads(stated.sidecars["config.json"])["max_position_embeddings"] == 77
    assert not any("is assumed" in note for note in stated.notes)


@pytest.mark.parametrize(("make", "name"), [(make_hf, "config.json"), (make_scratch, "scratch_config.json")])
def test_a_base_that_no_config_states_is_assumed_and_said(tmp_path, make, name):
    made = make(tmp_path / "m", "gqa8")
    place = made.path / name
    config = json.loads(place.read_text())
    assert not any("is assumed" in note for note in plan(made.path, "gguf", tokenizer=False).notes)  # the control
    bare = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_parameters", "rope_base", "rope_scaling")}
    place.write_text(json.dumps(bare))
    for target in ("meta", "gguf"):
        assert any("rope_theta); 10000" in note for note in plan(made.path, target, tokenizer=False).notes)
    if make is make_scratch:  # the book's Llama2Model has it hard-wired
        place.write_text(json.dumps(bare | {"class": "Llama2Model"}))
        assert not any("rope_theta" in note for note in plan(made.path, "hf").notes)


def test_a_size_states_the_base_that_a_config_does_not(tmp_path):
    made = make_scratch(tmp_path / "m", "gqa8")
    place = made.path / "scratch_config.json"
    config = {k: v for k, v in json.loads(place.read_text()).items() if k not in ("rope_base", "rope_freq")}
    place.write_text(json.dumps(config))
    found = plan(made.path, "hf", size="llama3-8b")
    assert found.config["rope_theta"] == 500000 and not any("rope_theta" in note for note in found.notes)
    place.write_text(json.dumps(config | {"rope_base": 777.0}))
    assert plan(made.path, "hf", size="llama3-8b").config["rope_theta"] == 777  # the control: what is stated counts


def test_a_gguf_file_that_states_no_context(tmp_path):
    path = make_gguf(tmp_path / "m.gguf", "gqa8").path
    data = path.read_bytes()
    path.write_bytes(data.replace(b"llama.context_length", b"llama.context_lengtX"))
    assert any("8192 is assumed" in note for note in plan(path, "hf").notes)
