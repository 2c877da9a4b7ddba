"""Rows of the vocabulary that are alike, against a plain count."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from convert.checkpoint import open_checkpoint
from convert.scan import scan_checkpoint
from convert.source import FilePool
from convert.vocabulary_rows import Marks, dead_rows, equal_rows, ranges
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


def test_rows_are_marked_while_all_is_read_and_not_read_again(tmp_path, monkeypatch):
    """The scan's blocks give the same sets; the control, a block that is missing, has the matrix read again."""
    made = make_hf(tmp_path / "m", "std")
    file = made.path / "model.safetensors"
    state = load_file(file)
    state["model.embed_tokens.weight"][[3, 40, 41, 90]] = 0
    save_file(state, file, metadata={"format": "pt"})
    monkeypatch.setattr("convert.scan.BLOCK_BYTES", 4096)  # several blocks
    with open_checkpoint(made.path) as checkpoint:
        plain = list(dead_rows(checkpoint))
        marks, blocks = Marks(checkpoint), []
        scan_checkpoint(checkpoint, seen=lambda *block: (blocks.append(block), marks.add(*block)))
        read: list[int] = []
        read_into = FilePool.read_into
        monkeypatch.setattr(FilePool, "read_into", lambda s, p, b, at: (read.append(len(b)), read_into(s, p, b, at)))
        assert list(dead_rows(checkpoint, marks=marks)) == plain and "4 of 96 rows" in plain[0]["message"]
        few = sum(read)
        table = state["model.embed_tokens.weight"].nbytes
        assert few < table / 4

        partial, left = Marks(checkpoint), [b for b in blocks if b[0].name == "model.embed_tokens.weight"][1:]
        assert left
        for block in left:
            partial.add(*block)
        assert list(dead_rows(checkpoint, marks=partial)) == plain and sum(read) - few > table
