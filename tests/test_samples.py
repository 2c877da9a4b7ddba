"""Statistics of samples against torch's on whole tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from convert.checkpoint import open_checkpoint
from convert.samples import samples
from tests.fixtures.ggml import make_gguf
from tests.fixtures.hf import make_hf


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_moments_and_spreads_are_torchs(tmp_path, dtype):
    made = make_hf(tmp_path / "m", "gqa8", dtype=dtype)
    with open_checkpoint(made.path) as checkpoint:
        found = {s.name: s for s in samples(checkpoint)}
    assert found.keys() == made.tensors.keys()
    for name, tensor in made.tensors.items():
        wide, s = tensor.double(), found[name]
        assert s.shape == tuple(tensor.shape) and s.count == tensor.numel()
        assert s.mean == pytest.approx(float(wide.mean()), abs=1e-6)
        assert s.std == pytest.approx(float(wide.std(correction=0)), rel=1e-4)
        kurtosis = float((wide**4).mean() / (wide**2).mean() ** 2)
        assert s.kurtosis == pytest.approx(kurtosis, rel=1e-4)
        if wide.ndim < 2:
            assert s.vector is not None and np.array_equal(s.vector, tensor.float().numpy())
            continue
        by_chance = ((kurtosis - 1) / (4 * wide.shape[1])) ** 0.5
        rows = wide.norm(dim=1).log()
        assert s.row_spread == pytest.approx(float(rows.std(correction=0)) / by_chance, rel=1e-3)
        assert (wide.shape[0] == wide.shape[1]) == (s.profiles is not None)
        if s.profiles is not None:
            assert np.allclose(s.profiles[0], rows.numpy(), atol=1e-5)
            assert np.allclose(s.profiles[1], wide.norm(dim=0).log().numpy(), atol=1e-5)


def test_large_matrices_are_sampled_and_small_ones_not(tmp_path):
    made = make_hf(tmp_path / "m", "std")
    state = load_file(made.path / "model.safetensors")
    torch.manual_seed(0)
    names = [n for n in state if "embed" in n or "lm_head" in n]
    for name in names:
        state[name] = torch.randn(20000, 48) * 0.3
    save_file(state, made.path / "model.safetensors", metadata={"format": "pt"})
    config = (made.path / "config.json").read_text().replace('"vocab_size": 96', '"vocab_size": 20000')
    (made.path / "config.json").write_text(config)
    with open_checkpoint(made.path) as checkpoint:
        found = {s.name: s for s in samples(checkpoint, threads=3)}
    s = found["model.embed_tokens.weight"]
    assert 0.8 * 2**18 < s.count <= 2**18 < 20000 * 48
    assert s.std == pytest.approx(0.3, rel=0.01) and s.kurtosis == pytest.approx(3, rel=0.05)
    assert s.row_spread == pytest.approx(1, abs=0.1) and s.column_spread == pytest.approx(1, abs=0.4)
    assert s.digest != found["lm_head.weight"].digest


def test_blocks_are_widened(tmp_path):
    made = make_gguf(tmp_path / "m.gguf", "kquant", type="q8_0")
    with open_checkpoint(made.path) as checkpoint:
        found = samples(checkpoint)
    assert found and all(np.isfinite(s.rms) for s in found)
