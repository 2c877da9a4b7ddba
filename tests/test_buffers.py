"""Masks and rotary tables of the book's classes: their names, and values as torch computes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import convert
from convert.buffers import Buffer
from convert.checkpoint import open_checkpoint
from convert.layout import Dims
from convert.table import load_table
from tests.fixtures import make_hf

KEYS = json.loads((Path(__file__).parent / "data" / "llama_keys.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("buffers") / "hf"
    make_hf(folder, "mha")
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": 23, "rope_theta": 10000.0}
    config.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_notebooks_llama_2(source, tmp_path):
    options = {"to": "scratch", "book_class": "Llama2Model", "tokenizer": False}
    convert.convert_checkpoint(source, tmp_path / "with", buffers=True, **options)
    convert.convert_checkpoint(source, tmp_path / "without", **options)
    found, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("with", "without"))
    more = {k: v for k, v in found.items() if k not in plain}
    names = {k.replace("blocks.1.", "blocks.0.") for k in more}
    wanted = ("trf_blocks.0.att.mask", "trf_blocks.0.att.cos", "trf_blocks.0.att.sin")
    book = KEYS["scratch/llama2"]["keys"]
    assert names == set(wanted) == {k for k in book if k.endswith(("0.att.mask", "0.att.cos", "0.att.sin"))}
    head_dim = found["trf_blocks.0.att.cos"].shape[1]
    # as the notebook computes them
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, head_dim, 2)[: head_dim // 2].float() / head_dim))
    angles = torch.arange(23)[:, None] * frequencies[None, :]
    angles = torch.cat([angles, angles], dim=1)
    for layer in range(2):
        assert torch.equal(found[f"trf_blocks.{layer}.att.mask"], torch.triu(torch.ones(23, 23), diagonal=1))
        torch.testing.assert_close(found[f"trf_blocks.{layer}.att.cos"], torch.cos(angles), rtol=0, atol=2e-6)
        torch.testing.assert_close(found[f"trf_blocks.{layer}.att.sin"], torch.sin(angles), rtol=0, atol=2e-6)
    with open_checkpoint(tmp_path / "with") as opened:  # and they are dropped again
        assert not opened.match.problems and len(opened.match.ignored) == len(more)


def test_a_class_without_buffers(source, tmp_path):
    convert.convert_checkpoint(source, tmp_path / "out", to="scratch", buffers=True, tokenizer=False)
    assert not [k for k in load_file(tmp_path / "out" / "model.safetensors") if k.endswith(("mask", "cos", "sin"))]


@pytest.mark.parametrize("start,stop", [(0, 1), (0, 50), (7, 9), (49, 50)])
def test_rows_of_a_mask(start, stop):
    whole = torch.triu(torch.ones(50, 50), diagonal=1)
    dims = Dims(load_table("llama"), {})
    found = torch.from_numpy(Buffer("causal_mask", (50, 50), dims).read(start, stop))
    assert torch.equal(found, whole[start:stop])


@pytest.mark.parametrize("target", ["hf", "meta", "gguf"])
def test_a_target_without_them_refuses(source, tmp_path, target):
    with pytest.raises(convert.UsageError, match="--buffers only applies"):
        convert.convert_checkpoint(source, tmp_path / "out.gguf", to=target, buffers=True)
