"""Every pair of layouts, on values: what we write from A equals what others' code writes for B, bit for bit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import convert
from convert.errors import ConvertError
from tests.fixtures import Fixture, make_gguf, make_hf, make_meta, make_scratch
from tests.fixtures.weights import llama3_scaling, to_interleaved

MAKERS = {"hf": make_hf, "meta": make_meta, "scratch": make_scratch, "gguf": make_gguf}
TARGETS = ("hf", "meta", "scratch")
SHAPES = ("gqa8", "gqa6", "mha", "tied", "hd6", "h32kv4")


def make(layout: str, folder: Path, shape: str, **options: object) -> Fixture:
    """A fixture; a GGUF one is a file."""
    return MAKERS[layout](folder / "m.gguf" if layout == "gguf" else folder, shape, **options)


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an output that is not sharded by model parallelism, read by others' code."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    for file in sorted([*folder.glob("*.pth"), *folder.glob("*.bin")]):
        found |= torch.load(file, weights_only=True)
    return found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same names, types and bits."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    wrong = [k for k in wanted if found[k].dtype != wanted[k].dtype or not torch.equal(found[k], wanted[k])]
    assert not wrong, wrong


@pytest.mark.parametrize(("source", "target"), [(s, t) for s, t in itertools.product(MAKERS, TARGETS) if s != t])
@pytest.mark.parametrize("shape", SHAPES)
def test_pair(tmp_path, source, target, shape):
    made = make(source, tmp_path / "source", shape)
    wanted = make(target, tmp_path / "wanted", shape)
    convert.convert_checkpoint(made.path, tmp_path / "out", to=target)
    stored = dict(wanted.tensors)
    if target == "hf" and shape == "tied":
        stored.pop("lm_head.weight", None)
    same(read(tmp_path / "out"), stored)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(TARGETS, 2)))
def test_there_and_back(tmp_path, first, second, dtype):
    made = make(first, tmp_path / "source", "gqa8", dtype=dtype)
    convert.convert_checkpoint(made.path, tmp_path / "there", to=second)
    convert.convert_checkpoint(tmp_path / "there", tmp_path / "back", to=first)
    same(read(tmp_path / "back"), made.tensors)


def test_control_unpermuted_rows_are_seen(tmp_path):
    """The control of this file: rows left in the other order are not taken for equal."""
    made = make_hf(tmp_path, "gqa8")
    wrong = dict(made.tensors)
    name = "model.layers.1.self_attn.k_proj.weight"
    wrong[name] = to_interleaved(wrong[name], made.shape.kv_heads)
    with pytest.raises(AssertionError, match="k_proj"):
        same(wrong, made.tensors)


@pytest.mark.parametrize(("mp", "kind"), [(2, "llama2"), (2, "llama3"), (8, "llama2"), (8, "llama3")])
@pytest.mark.parametrize("target", ["hf", "scratch"])
def test_joining_model_parallel_files(tmp_path, mp, kind, target):
    made = make_meta(tmp_path / "m", "h32kv8", mp=mp, embedding_axis=kind, rope_freqs=True, vocab_minus_one=True)
    convert.convert_checkpoint(made.path, tmp_path / "out", to=target)
    same(read(tmp_path / "out"), make(target, tmp_path / "wanted", "h32kv8").tensors)
    if target == "hf":
        assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == made.shape.vocab


@pytest.mark.parametrize("mp", [1, 2, 4, 8])
def test_writing_model_parallel_files(tmp_path, mp):
    made = make_hf(tmp_path / "hf", "h32kv8", dtype="bfloat16")
    convert.convert_checkpoint(made.path, tmp_path / "out", to="meta", model_parallel=mp)
    wanted = make_meta(tmp_path / "wanted", "h32kv8", mp=mp, dtype="bfloat16").path
    files = sorted(p.name for p in (tmp_path / "out").glob("*.pth"))
    assert files == sorted(p.name for p in wanted.glob("*.pth")) and len(files) == mp
    for name in files:
        same(torch.load(tmp_path / "out" / name, weights_only=True), torch.load(wanted / name, weights_only=True))


@pytest.mark.parametrize("mp", [3, 16])
def test_a_number_of_files_that_does_not_fit_is_refused(tmp_path, mp):
    made = make_hf(tmp_path / "hf", "h32kv8")
    with pytest.raises(ConvertError, match=str(mp)):
        convert.convert_checkpoint(made.path, tmp_path / "out", to="meta", model_parallel=mp)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("factor", [8, 32])
@pytest.mark.parametrize("style", ["v4", "v5"])
def test_llama3_scaling_travels(tmp_path, factor, style):
    made = make_hf(tmp_path / "hf", "gqa8", scaling=factor, config_style=style)
    convert.convert_checkpoint(made.path, tmp_path / "scratch", to="scratch")
    said = json.loads((tmp_path / "scratch" / "scratch_config.json").read_text())
    assert said["rope_freq"] == {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_context_length": 8192,
    }
    assert said["rope_base"] == made.shape.theta
    convert.convert_checkpoint(tmp_path / "scratch", tmp_path / "back", to="hf")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    wanted = llama3_scaling(factor)
    assert wanted is not None
    assert {k: back["rope_parameters"][k] for k in wanted} == wanted
    assert {k: back["rope_scaling"][k] for k in wanted} == wanted
    assert back["rope_theta"] == back["rope_parameters"]["rope_theta"] == made.shape.theta


@pytest.mark.parametrize("target", ["meta", "scratch"])
@pytest.mark.parametrize(
    "options", [{"attention_bias": True}, {"mlp_bias": True}, {"shape": "hd16"}], ids=["attention", "mlp", "head_dim"]
)
def test_what_a_layout_cannot_hold_is_refused(tmp_path, target, options):
    made = make_hf(tmp_path / "hf", **{"shape": "gqa8", **options})
    with pytest.raises(ConvertError, match=r"bias|head_dim"):
        convert.convert_checkpoint(made.path, tmp_path / "out", to=target)
    assert not list(tmp_path.glob("out*"))


def test_biases_of_a_gguf_file_are_permuted_too(tmp_path):
    options = {"attention_bias": True, "mlp_bias": True}
    made = make_gguf(tmp_path / "m.gguf", "gqa8", **options)
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf")
    same(read(tmp_path / "out"), make_hf(tmp_path / "wanted", "gqa8", **options).tensors)


@pytest.mark.parametrize("head", ["equal", "different"])
@pytest.mark.parametrize("flag", [True, False])
def test_head_is_dropped_only_when_bit_equal(tmp_path, head, flag):
    made = make_hf(tmp_path / "hf", "std", head=head, tie_flag=flag)
    convert.convert_checkpoint(made.path, tmp_path / "meta", to="meta")
    assert "output.weight" in read(tmp_path / "meta")
    convert.convert_checkpoint(tmp_path / "meta", tmp_path / "back", to="hf")
    assert ("lm_head.weight" in read(tmp_path / "back")) == (head == "different")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["tie_word_embeddings"] == (head == "equal")


@pytest.mark.parametrize("wrapper", [None, "model_state_dict", "model", "_orig_mod.", "module."])
def test_training_checkpoints_are_unwrapped(tmp_path, wrapper):
    made = make_scratch(tmp_path / "s", "gqa8", format="pth", wrapper=wrapper, strided=True)
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf")
    same(read(tmp_path / "out"), make_hf(tmp_path / "wanted", "gqa8").tensors)


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_shards_in_and_out(tmp_path, format):
    made = make_hf(tmp_path / "hf", "gqa8", sharded=3, format=format)
    convert.convert_checkpoint(made.path, tmp_path / "scratch", to="scratch", format="pth")
    convert.convert_checkpoint(tmp_path / "scratch", tmp_path / "back", to="hf", max_shard_size=60_000)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    same(read(tmp_path / "back"), made.tensors)


@pytest.mark.parametrize("shape", ["gqa8", "tied"])
@pytest.mark.parametrize("source", ["meta", "scratch", "gguf"])
def test_transformers_loads_what_we_write(tmp_path, source, shape):
    transformers = pytest.importorskip("transformers")
    from tests.fixtures import tokens
    from tests.fixtures.witness import meta_logits

    made = make(source, tmp_path / "source", shape)
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = tokens(made.shape)
    wanted = meta_logits(make_meta(tmp_path / "wanted", shape).tensors, made.shape, ids)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-3, atol=1e-3)
