"""Rows of the vocabulary that are alike, against a plain count."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from convert.checkpoint import open_checkpoint
from convert.vocabulary_rows import dead_rows, equal_rows, ranges
from tests.fixtures.hf import make_hf


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 3, 48, 200])
def test_sets_of_equal_rows(tmp_path, dtype, width):
    from convert.formats.readers import read_container
    from convert.source import FilePool, open_source

    torch.manual_seed(width)
    rows = torch.randn(3000, width).to(getattr(torch, dtype))
    rows[100:140] = 0
    rows[[5, 77, 2000, 2999, 1500]] = rows[6].clone()
    rows[[8, 9]] = rows[10].clone()  # three: too few for a word, where chance makes none
    save_file({"x": rows}, tmp_path / "x.safetensors")
    spec = read_container(tmp_path / "x.safetensors", "safetensors").tensors["x"]
    spec = spec[0] if isinstance(spec, list) else spec
    pool = FilePool()
    found = equal_rows(open_source(spec, pool))
    pool.close()
    count = Counter(r.numpy().tobytes() for r in rows.view(torch.uint8).reshape(3000, -1))
    assert sorted(map(len, found), reverse=True) == sorted((n for n in count.values() if n >= 4), reverse=True)
    if width > 1:
        assert found[0].tolist() == list(range(100, 140)) and found[1].tolist() == [5, 6, 77, 1500, 2000, 2999]


def test_what_is_said(tmp_path):
    made = make_hf(tmp_path / "m", "std")
    with open_checkpoint(made.path) as checkpoint:
        assert list(dead_rows(checkpoint)) == []
    file = made.path / "model.safetensors"
    state = load_file(file)
    state["model.embed_tokens.weight"][90:96] = 0
    state["lm_head.weight"][[1, 2, 3, 7, 9, 11, 13]] = state["lm_head.weight"][0].clone()
    save_file(state, file, metadata={"format": "pt"})
    with open_checkpoint(made.path) as checkpoint:
        said = {p["tensor"]: p for p in dead_rows(checkpoint)}
    assert "6 of 96 rows" in said["model.embed_tokens.weight"]["message"]
    assert "6 of zeros (ids 90-95)" in said["model.embed_tokens.weight"]["message"]
    assert "8 equal (ids 0-3, 7, 9, 11 …)" in said["lm_head.weight"]["message"]


def test_ranges():
    assert ranges(np.array([5])) == "5" and ranges(np.array([1, 2, 3, 9])) == "1-3, 9"
