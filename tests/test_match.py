"""Tensors against the table: every one exactly once, or a finding that names it, its shape, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError, Problem
from convert.match import Match
from tests.fixtures import Shape, get_shape, make_gguf, make_hf, make_meta, make_scratch
from tests.fixtures.weights import Tensors


def edit(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """The folder's one file with other tensors."""
    file = next(p for p in folder.iterdir() if p.suffix in (".safetensors", ".pth"))
    if file.suffix == ".pth":
        state = torch.load(file, weights_only=True)
        change(state)
        torch.save(state, file)
    else:
        state = load_file(file)
        change(state)
        save_file({k: t.contiguous() for k, t in state.items()}, file)
    return folder


def match(src: Path, **options: object) -> Match:
    with open_checkpoint(src, **options) as opened:
        return opened.match


def only(found: Match) -> Problem:
    assert len(found.problems) == 1, [p.message for p in found.problems]
    return found.problems[0]


def pop(*names: str) -> Callable[[Tensors], object]:
    return lambda state: [state.pop(name) for name in names]


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda state: state.update({name: tensor})


@pytest.mark.parametrize("make", [make_hf, make_meta, make_scratch])
def test_a_sound_checkpoint_matches_whole(tmp_path, make):
    made = make(tmp_path, "gqa8")
    found = match(made.path)
    assert not found.problems and not found.ignored and not found.notes
    assert {s.name for specs in found.specs.values() for s in specs} == set(made.tensors)
    assert len(found.logical) == len(made.tensors)
    assert match(make_gguf(tmp_path / "m.gguf", "gqa8").path).problems == []


# --- missing, unexpected, misshapen -----------------------------------------------------------------------------------


def test_missing(tmp_path):
    made = make_hf(tmp_path, "gqa8")
    problem = only(match(edit(made.path, pop("model.layers.1.mlp.up_proj.weight"))))
    assert problem.kind == "missing_tensor" and problem.tensor == "model.layers.1.mlp.up_proj.weight"
    assert problem.wanted == [96, 64] and "F = 96" in problem.message and "D = 64" in problem.message


def test_unexpected(tmp_path):
    made = make_hf(tmp_path, "gqa8")
    problem = only(match(edit(made.path, put("model.layers.0.self_attn.rel_bias", torch.zeros(3, 5)))))
    assert problem.kind == "unexpected_tensor" and problem.found == [3, 5]
    assert "'model.layers.0.self_attn.rel_bias' [3, 5]" in problem.message
    assert problem.file == str(made.path / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "shape", "hint"),
    [
        ("model.layers.1.mlp.up_proj.weight", (97, 64), "intermediate_size = 97"),
        ("model.layers.1.mlp.up_proj.weight", (64, 96), None),  # transposed
        ("model.layers.0.self_attn.k_proj.weight", (32, 64), "num_key_value_heads = 4"),
        ("model.norm.weight", (64, 1), None),
        ("model.norm.weight", (), None),
    ],
)
def test_misshapen(tmp_path, name, shape, hint):
    """What is there, what the config wants with its numbers, and which number would make it fit."""
    made = make_hf(tmp_path, "gqa8")
    problem = only(match(edit(made.path, put(name, torch.zeros(shape)))))
    assert problem.kind == "shape" and problem.tensor == name
    assert problem.found == list(shape) and problem.wanted == list(made.tensors[name].shape)
    if hint:
        assert hint in str(problem.hint)


def test_everything_at_once_and_layers_folded(tmp_path):
    shape = Shape(48, 6, 2, 8, 80, 96, layers=5)
    made = make_hf(tmp_path / "m", shape)

    def change(state: Tensors) -> None:
        for layer in (0, 1, 3, 4):
            del state[f"model.layers.{layer}.mlp.down_proj.weight"]
        state["model.norm.weight"] = torch.zeros(47)
        state["extra"] = torch.zeros(2)
        state["model.layers.2.mlp.up_proj.weight"] = state["model.layers.2.mlp.up_proj.weight"].to(torch.int8)

    edit(made.path, change)
    with pytest.raises(ConvertError) as caught:
        convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch")
    assert {p.kind for p in caught.value.problems} == {"missing_tensor", "shape", "unexpected_tensor", "dtype"}
    assert len(caught.value.problems) == 4
    assert "'model.layers.{0-1,3-4}.mlp.down_proj.weight' is missing" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_layer_more_and_a_layer_less_than_the_config_says(tmp_path):
    made = make_hf(tmp_path, Shape(48, 6, 2, 8, 80, 96, layers=3))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_hidden_layers": 2}))
    found = match(made.path)
    assert {p.kind for p in found.problems} == {"unexpected_tensor"} and len(found.problems) == 9
    assert "a layer more than the config says" in str(found.problems[0].hint)
    path.write_text(json.dumps(config | {"num_hidden_layers": 4}))
    found = match(made.path)
    assert {p.kind for p in found.problems} == {"missing_tensor"} and len(found.problems) == 9


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.int64, "I64"),
        (torch.bool, "BOOL"),
    ],
)
def test_types_that_are_no_plain_numbers(tmp_path, dtype, said):
    made = make_hf(tmp_path, "gqa8")
    name = "model.layers.0.mlp.up_proj.weight"
    problem = only(match(edit(made.path, lambda s: s.update({name: s[name].to(dtype)}))))
    assert problem.kind == "dtype" and problem.found == said


# --- biases -----------------------------------------------------------------------------------------------------------


def test_biases_follow_the_config(tmp_path):
    """Present and not declared, or declared and not there: findings, never dropped."""
    with_bias = make_hf(tmp_path / "a", "gqa8", attention_bias=True)
    assert not match(with_bias.path).problems
    path = with_bias.path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_bias": False}))
    assert {p.kind for p in match(with_bias.path).problems} == {"unexpected_tensor"}
    without = make_hf(tmp_path / "b", "gqa8")
    path = without.path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_bias": True}))
    found = match(without.path)
    assert {p.kind for p in found.problems} == {"missing_tensor"}
    assert all(str(p.tensor).endswith(".bias") for p in found.problems) and len(found.problems) == 8


# --- head and embedding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["hf", "meta", "scratch"])
def test_a_missing_head(tmp_path, layout):
    make, head = {
        "hf": (make_hf, "lm_head.weight"),
        "meta": (make_meta, "output.weight"),
        "scratch": (make_scratch, "out_head.weight"),
    }[layout]
    made = make(tmp_path, "gqa8")
    edit(made.path, pop(head))
    found = match(made.path)
    if layout == "scratch":  # its loaders tie
        assert not found.problems and found.tied(sampled=False)
        return
    problem = only(found)
    assert problem.kind == "missing_head" and head in problem.message and "--tie share" in str(problem.hint)
    assert ("tie_word_embeddings is false" if layout == "hf" else "always has one") in problem.message
    shared = match(made.path, tie="share")
    assert not shared.problems and shared.tied(sampled=False)


def test_no_flag_and_no_head(tmp_path):
    made = make_hf(tmp_path, "gqa8", head="absent")
    path = made.path / "config.json"
    config = json.loads(path.read_text())
    del config["tie_word_embeddings"]
    path.write_text(json.dumps(config))
    assert "no tie flag is set" in only(match(made.path)).message


def test_an_absent_embedding_is_the_head_where_the_config_ties_them(tmp_path):
    made = make_hf(tmp_path / "m", "gqa8", head="equal", tie_flag=True)
    edit(made.path, pop("model.embed_tokens.weight"))
    found = match(made.path)
    assert not found.problems and found.tied(sampled=False)
    assert any("embedding is not stored" in n for n in found.notes)
    convert.convert_checkpoint(made.path, tmp_path / "out", to="meta")
    state = torch.load(tmp_path / "out" / "consolidated.00.pth", weights_only=True)
    assert torch.equal(state["tok_embeddings.weight"], made.tensors["lm_head.weight"])
    assert torch.equal(state["output.weight"], made.tensors["lm_head.weight"])
    untied = make_hf(tmp_path / "u", "gqa8")
    edit(untied.path, pop("model.embed_tokens.weight"))
    assert only(match(untied.path)).kind == "missing_tensor"


# --- model-parallel files ---------------------------------------------------------------------------------------------


def part(folder: Path, rank: int, change: Callable[[Tensors], object]) -> None:
    path = folder / f"consolidated.{rank:02d}.pth"
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def test_replicated_norms_must_agree(tmp_path):
    made = make_meta(tmp_path, "h32kv8", mp=4)
    assert not match(made.path).problems
    part(made.path, 2, lambda s: s["layers.1.ffn_norm.weight"][5].add_(1))
    problem = only(match(made.path))
    assert problem.kind == "replica" and problem.tensor == "layers.1.ffn_norm.weight"
    assert problem.file == "consolidated.02.pth"


def test_a_tensor_that_one_file_lacks(tmp_path):
    made = make_meta(tmp_path, "h32kv8", mp=4)
    part(made.path, 3, pop("layers.0.feed_forward.w2.weight"))
    problem = only(match(made.path))
    assert problem.kind == "missing_tensor" and "is in 3 of 4 model-parallel files" in problem.message


def test_parts_of_different_types_or_shapes(tmp_path):
    made = make_meta(tmp_path / "a", "h32kv8", mp=2)
    name = "layers.0.feed_forward.w1.weight"
    part(made.path, 1, lambda s: s.update({name: s[name].half()}))
    problem = only(match(made.path))
    assert problem.kind == "dtype" and problem.found == ["F16", "F32"]
    made = make_meta(tmp_path / "b", replace(get_shape("h32kv8"), layers=3), mp=2)  # two sound layers outvote one
    part(made.path, 1, lambda s: s.update({name: s[name][:-1].clone()}))
    problem = only(match(made.path))
    assert problem.kind == "shape" and problem.found == [191, 256] and problem.wanted == [192, 256]


def test_a_tensor_in_two_shards(tmp_path):
    made = make_hf(tmp_path, "gqa8", sharded=2)
    first, second = sorted(made.path.glob("*.safetensors"))
    name = "model.embed_tokens.weight"
    state = load_file(second)
    save_file(state | {name: load_file(first)[name]}, second)
    with pytest.raises(ConvertError, match=name):
        convert.plan_conversion(made.path, "scratch")


# --- what is dropped --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [500000.0, 10000.0])
def test_rotary_buffers_are_dropped_and_checked(tmp_path, theta):
    """pains L4: never written, but they tell which theta the model was made with."""
    made = make_hf(tmp_path / "m", "gqa8")
    inv = 1.0 / theta ** (torch.arange(0, 8, 2).float() / 8)
    edit(
        made.path, lambda s: s.update({f"model.layers.{i}.self_attn.rotary_emb.inv_freq": inv.clone() for i in (0, 1)})
    )
    found = match(made.path)
    assert not found.problems and len(found.ignored) == 2
    said = any("does not agree with rope_theta = 500000" in n for n in found.notes)
    assert said == (theta != 500000.0)
    summary = convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch")
    assert any(n.startswith("ignored model.layers.{0-1}.self_attn.rotary_emb.inv_freq") for n in summary.notes)
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == len(made.tensors)


@pytest.mark.parametrize("theta", [500000.0, 10000.0])
def test_metas_frequencies(tmp_path, theta):
    made = make_meta(tmp_path, "gqa8", rope_freqs=True, dtype="bfloat16")
    edit(made.path, put("rope.freqs", (1.0 / theta ** (torch.arange(0, 8, 2).float() / 8)).bfloat16()))
    found = match(made.path)
    assert [name for name, _ in found.ignored] == ["rope.freqs"]
    assert any("does not agree" in n for n in found.notes) == (theta != 500000.0)


@pytest.mark.parametrize("right", [True, False])
def test_the_buffers_of_the_books_llama2_notebook(tmp_path, right):
    """Its class keeps mask, cos and sin in the state dict."""
    made = make_scratch(tmp_path, "mha", format="pth")
    theta = made.shape.theta if right else 10000.0
    angles = torch.outer(torch.arange(32).float(), 1.0 / theta ** (torch.arange(0, 8, 2).float() / 8))
    angles = torch.cat([angles, angles], 1)

    def change(state: Tensors) -> None:
        for layer in range(2):
            state[f"trf_blocks.{layer}.att.mask"] = torch.triu(torch.ones(32, 32), 1)
            state[f"trf_blocks.{layer}.att.cos"] = angles.cos()
            state[f"trf_blocks.{layer}.att.sin"] = angles.sin()

    found = match(edit(made.path, change))
    assert not found.problems and len(found.ignored) == 6
    assert any("does not agree" in n for n in found.notes) == (not right)


def test_scaled_frequencies_are_no_disagreement(tmp_path):
    made = make_hf(tmp_path, "gqa8", scaling=8)
    from tests.fixtures.ggml import rope_divisors
    from tests.fixtures.weights import llama3_scaling

    plain = 1.0 / 500000.0 ** (torch.arange(0, 8, 2).float() / 8)
    scaled = plain / torch.from_numpy(rope_divisors(made.shape, llama3_scaling(8)))
    for inv in (plain, scaled):
        edit(made.path, put("model.rotary_emb.inv_freq", inv))
        assert not any("does not agree" in n for n in match(made.path).notes)


# --- what runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_hf, make_meta, make_scratch])
def test_reference_names_and_bytes(tmp_path, make):
    """Each stored tensor under the reference model's name, untouched; the book's own names are those."""
    made = make(tmp_path / "m", "gqa8")
    book = make_scratch(tmp_path / "book", "gqa8")
    with open_checkpoint(made.path) as opened:
        found = {name: source.read(0, source.shape[0]) for name, source in opened.reference_tensors()}
    assert found.keys() == book.tensors.keys()
    stored = sorted(t.numpy().tobytes() for t in made.tensors.values())
    assert sorted(np.ascontiguousarray(t).tobytes() for t in found.values()) == stored
