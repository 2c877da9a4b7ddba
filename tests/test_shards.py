"""Models spread over files: Hugging Face's shards and index, Meta's model-parallel files."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import convert
from convert.errors import ConvertError
from tests.fixtures import get_shape, make_hf, make_meta, make_scratch, tokens
from tests.reference.models import one_thread  # noqa: F401


@pytest.mark.parametrize("limit", [1, 20_000, 60_000, 100_000])
def test_shards_and_index(tmp_path, limit):
    """As huggingface_hub lays them out: in order, each file up to the limit, a larger tensor alone."""
    made = make_scratch(tmp_path / "source", "gqa8")
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf", max_shard_size=limit)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files and len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    found = {}
    for name in files:
        part = load_file(tmp_path / "out" / name)
        assert {k for k, v in index["weight_map"].items() if v == name} == set(part)
        nbytes = sum(t.nbytes for t in part.values())
        assert nbytes <= limit or len(part) == 1
        found |= part
    assert found.keys() == made.hf.keys()
    assert all(torch.equal(found[k], made.hf[k]) for k in found)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in found.values())


def test_one_file_has_no_index(tmp_path):
    made = make_scratch(tmp_path / "source", "gqa8")
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf", max_shard_size=10**9)
    assert [p.name for p in (tmp_path / "out").glob("model*")] == ["model.safetensors"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()


def test_files_are_those_that_huggingface_hub_would_make(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    made = make_scratch(tmp_path / "source", "gqa8")
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf", max_shard_size=60_000)
    ours = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    state = {k: made.hf[k] for k in ours}
    theirs = hub.split_torch_state_dict_into_shards(state, max_shard_size=60_000)
    assert set(theirs.filename_to_tensors) == set(ours.values())
    assert {k: f for f, names in theirs.filename_to_tensors.items() for k in names} == ours


def test_transformers_loads_shards(tmp_path):
    transformers = pytest.importorskip("transformers")
    made = make_scratch(tmp_path / "source", "gqa8")
    models = {}
    for limit in (10**9, 30_000):
        out = tmp_path / str(limit)
        convert.convert_checkpoint(made.path, out, to="hf", max_shard_size=limit)
        models[limit], info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = tokens(made.shape)
    with torch.no_grad():
        one, many = (m(ids).logits for m in models.values())
    assert torch.equal(one, many)


@pytest.mark.parametrize(
    ("shape", "ranks", "units"),
    [("h32kv8", 16, 8), ("h32kv8", 3, 8), ("gqa8", 4, 2), ("std", 5, 2), ("mha", 4, 6)],
)
def test_heads_that_cannot_be_shared_evenly(tmp_path, shape, ranks, units):
    """Every tensor that does not fit is named, layers folded, and the rule is said."""
    made = make_hf(tmp_path / "m", shape)
    with pytest.raises(ConvertError) as caught:
        convert.plan_conversion(made.path, "meta", model_parallel=ranks)
    problems = caught.value.problems
    assert {p.kind for p in problems} == {"model_parallel"}
    keys = next(p for p in problems if "attention.wk" in str(p.tensor))
    assert keys.found == units and keys.wanted == f"a multiple of {ranks}"
    assert f"has {units} heads on its parallel axis, which {ranks} files cannot share" in keys.message
    assert keys.tensor == "layers.{0-1}.attention.wk.weight"
    (hint,) = {p.hint for p in problems}  # numbers that do fit, and no other up to the one that was asked for
    fits = [int(n) for n in hint.removesuffix(".").rpartition(": ")[2].split(", ")]
    for number in range(1, ranks + 1):
        with contextlib.ExitStack() as stack:
            if number not in fits:
                stack.enter_context(pytest.raises(ConvertError, match="cannot share"))
            convert.plan_conversion(made.path, "meta", model_parallel=number)


def test_rows_that_cannot_be_shared_evenly(tmp_path):
    made = make_hf(tmp_path / "m", replace(get_shape("h32kv8"), vocab=163))
    with pytest.raises(ConvertError) as caught:
        convert.plan_conversion(made.path, "meta", model_parallel=8)
    assert {p.tensor for p in caught.value.problems} == {"tok_embeddings.weight", "output.weight"}
    assert "163 rows" in str(caught.value)
    # Llama 2 splits the embedding's width, but the head by rows
    llama2 = make_hf(tmp_path / "l2", replace(get_shape("h32kv8"), vocab=163, theta=10000.0))
    with pytest.raises(ConvertError) as caught:
        convert.plan_conversion(llama2.path, "meta", model_parallel=8)
    assert {p.tensor for p in caught.value.problems} == {"output.weight"}


@pytest.mark.parametrize(("theta", "kind"), [(10000.0, "llama2"), (500000.0, "llama3")])
@pytest.mark.parametrize("ranks", [2, 8])
def test_the_embedding_is_split_as_its_generation_does(tmp_path, theta, kind, ranks):
    shape = replace(get_shape("h32kv8"), theta=theta)
    made = make_hf(tmp_path / "m", shape)
    convert.convert_checkpoint(made.path, tmp_path / "out", to="meta", model_parallel=ranks)
    wanted = make_meta(tmp_path / "wanted", shape, mp=ranks, embedding_axis=kind)
    other = make_meta(tmp_path / "other", shape, mp=ranks, embedding_axis="llama3" if kind == "llama2" else "llama2")
    for rank in range(ranks):
        name = f"consolidated.{rank:02d}.pth"
        found, right, wrong = (
            torch.load(folder / name, weights_only=True) for folder in (tmp_path / "out", wanted.path, other.path)
        )
        assert found.keys() == right.keys()
        assert all(torch.equal(found[k], right[k]) for k in right)
        assert found["tok_embeddings.weight"].shape != wrong["tok_embeddings.weight"].shape  # the control


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_split_and_joined_again(tmp_path, ranks):
    made = make_hf(tmp_path / "m", "h32kv8", dtype="bfloat16")
    convert.convert_checkpoint(made.path, tmp_path / "meta", to="meta", model_parallel=ranks)
    convert.convert_checkpoint(tmp_path / "meta", tmp_path / "other", to="meta", model_parallel=8 // ranks)
    convert.convert_checkpoint(tmp_path / "other", tmp_path / "back", to="hf")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == made.tensors.keys()
    assert all(torch.equal(found[k], made.tensors[k]) for k in found)
