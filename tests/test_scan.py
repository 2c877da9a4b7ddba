"""Reading every value: counts equal torch's, for every type, wherever the bad value lies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from convert.formats.spec import TensorSpec
from convert.scan import BLOCK_BYTES, count, scan
from convert.source import FilePool

TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy().copy()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["nan", "inf", "-inf", "both", "largest", "tiny", "zero", "-0.0"])
def test_counts_are_torchs(dtype, kind):
    torch.manual_seed(0)
    tensor = torch.randn(37, 11).to(TYPES[dtype])
    if kind in ("nan", "both"):
        tensor[20:23, 4] = float("nan")
    if kind in ("inf", "both"):
        tensor[17, 2] = float("inf")
    if kind == "-inf":
        tensor[36, 10] = float("-inf")
    if kind == "largest":
        tensor[3, 3] = torch.finfo(TYPES[dtype]).max
        tensor[3, 4] = torch.finfo(TYPES[dtype]).min
    if kind == "tiny":
        tensor.zero_()[36, 10] = torch.finfo(TYPES[dtype]).smallest_normal / 4
    if kind in ("zero", "-0.0"):
        tensor = torch.zeros_like(tensor) * (-1 if kind == "-0.0" else 1)
    storage = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}[dtype]
    found = count(raw(tensor).view(storage).reshape(37, 11), dtype, start=100)
    assert found.nan == int(torch.isnan(tensor).sum())
    assert found.infinite == int(torch.isinf(tensor).sum())
    assert found.zero == bool((tensor == 0).all())
    bad = ~torch.isfinite(tensor).all(dim=1)
    assert found.first_row == (100 + int(bad.int().argmax()) if bad.any() else None)


def test_nan_of_every_payload():
    bits = np.arange(2**16, dtype=np.uint16)
    for dtype, kind in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        tensor = torch.from_numpy(bits.view(np.int16).copy()).view(kind)
        view = bits.view(np.float16) if dtype == "F16" else bits
        found = count(view, dtype)
        assert (found.nan, found.infinite) == (int(torch.isnan(tensor).sum()), 2)


def test_blocks_of_a_large_tensor(tmp_path):
    """More rows than one block: the row that is named is counted from the tensor's own start."""
    rows, width = 3 * BLOCK_BYTES // 2048, 1024
    data = np.full((rows, width), 0x3F80, np.uint16)  # bfloat16 one
    last = rows - 2
    data[last, 7] = 0x7FC0
    data[rows - 1, 7] = 0xFF80
    path = tmp_path / "x"
    path.write_bytes(data.tobytes() + np.zeros((4, width), np.uint16).tobytes())
    specs = [
        TensorSpec("big", "BF16", (rows, width), path, 0),
        TensorSpec("zeros", "BF16", (4, width), path, data.nbytes),
        TensorSpec("spared", "BF16", (4 * width,), path, data.nbytes),
        TensorSpec("ids", "I64", (4,), path, data.nbytes),
        TensorSpec("none", "F32", (0, 4), path, data.nbytes),
        TensorSpec("scalar", "F32", (), path, 0),
    ]
    read: list[int] = []
    pool = FilePool()
    problems, zeros = scan(specs, pool, may_be_zero=frozenset({"spared"}), progress=read.append)
    pool.close()
    assert [(p.kind, p.tensor, p.found) for p in problems] == [
        ("nan", "big", 1),
        ("inf", "big", 1),
        ("zeros", "zeros", 0),
    ]
    assert f"row is {last}." in problems[0].message
    assert zeros == ["spared"]
    assert sum(read) == data.nbytes + 2 * 4 * width * 2 + 4


def test_a_file_that_ends_early_is_a_problem_and_no_exception(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"\0" * 64)
    pool = FilePool()
    problems, _ = scan([TensorSpec("w", "F32", (100, 4), path, 0)], pool)
    pool.close()
    assert "truncated" in {p.kind for p in problems}
