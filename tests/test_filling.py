"""Tensors filled in many small pieces are those that torch reads; a file that ends early stops everything."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

from convert import filling, plan  # noqa: E402
from convert.errors import FormatError  # noqa: E402
from convert.filling import fill_all  # noqa: E402
from convert.formats import safetensors  # noqa: E402
from convert.source import Cast, FilePool, FileSource, RopePermuted  # noqa: E402
from tests.fixtures.weights import to_interleaved  # noqa: E402


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A bfloat16 matrix in a file, its source, and pieces of a few rows."""
    monkeypatch.setattr(filling, "COPY_BYTES", 3 * 34 * 2)
    monkeypatch.setattr(plan, "PIECE_BYTES", 5 * 34 * 2)
    values = torch.randn(96, 34, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    save_file({"a": torch.zeros(3), "w": values}, tmp_path / "f.safetensors")
    pool = FilePool()
    yield values, FileSource(safetensors.read(tmp_path / "f.safetensors").tensors["w"], pool), pool
    pool.close()


def outputs(dtype):
    return {"contiguous": torch.full((96, 34), 7, dtype=dtype), "strided": torch.full((34, 96), 7, dtype=dtype).T}


@pytest.mark.parametrize("kind", ["contiguous", "strided"])
@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_make_the_whole(stored, kind, threads):
    values, source, pool = stored
    out = outputs(torch.bfloat16)[kind]
    permuted = outputs(torch.bfloat16)[kind]
    wide = outputs(torch.float32)[kind]
    jobs = [(out, source), (permuted, RopePermuted(source, head_dim=8, to="interleaved")), (wide, Cast(source, "F32"))]
    fill_all(jobs, pool, threads)
    assert torch.equal(out, values) and torch.equal(wide, values.float())
    assert torch.equal(permuted, to_interleaved(values, 12)) and not torch.equal(permuted, values)


def test_parameters_are_filled_in_place(stored):
    values, source, pool = stored
    weight = torch.nn.Parameter(outputs(torch.bfloat16)["contiguous"])
    before = weight.data_ptr()
    fill_all([(weight, source)], pool, 2)
    assert torch.equal(weight, values) and weight.data_ptr() == before and weight.requires_grad and weight.is_leaf


@pytest.mark.parametrize("kind", ["contiguous", "strided"])
def test_a_file_that_became_shorter(stored, kind):
    _, source, pool = stored
    os.truncate(source.spec.file, source.spec.offset + 200)
    with pytest.raises(FormatError, match="ended while it was being read"):
        fill_all([(outputs(torch.bfloat16)[kind], source)] * 3, pool, 2)
