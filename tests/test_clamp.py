"""Values that do not fit their new type: clamped where asked, counted, and otherwise as torch rounds them."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.cast import CastLoss, cast
from convert.clamp import clamp
from convert.errors import ConvertError
from tests.fixtures import make_hf

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def made(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8", dtype="bfloat16")
    state = load_file(made.path / "model.safetensors")
    flat = state[UP].view(-1)
    flat[:8] = torch.tensor([70000, -1e30, 65000, 3e38, 1e-9, -1e-12, 6e-8, -0.0], dtype=torch.bfloat16)
    save_file(state, made.path / "model.safetensors")
    return made


def clamped(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The oracle: torch rounds, then infinity of a finite value becomes the largest value."""
    most = torch.finfo(torch.float16).max
    return {
        k: torch.where(t.isfinite() & t.half().isinf(), t.half().sign() * most, t.half()).half()
        for k, t in state.items()
    }


def test_too_large_is_refused_and_clamped_where_asked(made, tmp_path):
    with pytest.raises(ConvertError, match="--clamp") as caught:
        convert.convert_checkpoint(made.path, tmp_path / "out", to="hf", dtype="float16")
    assert caught.value.problems[0].kind == "overflow" and caught.value.problems[0].found == 3
    assert not (tmp_path / "out").exists()
    summary = convert.convert_checkpoint(
        made.path, tmp_path / "out", to="hf", dtype="float16", clamp=True, check="full"
    )
    state = load_file(made.path / "model.safetensors")
    zeros = sum(int(((t.half() == 0) & (t != 0)).sum()) for t in state.values())
    assert (summary.clamped, summary.underflowed) == (3, zeros) and zeros >= 2
    (note,) = [n for n in summary.notes if "3 values were too large" in n]
    assert "--clamp" in note and f"3 of {state[UP].numel():,} in {UP!r}" in note and "--dtype bfloat16" in note
    (note,) = [n for n in summary.notes if "became zero" in n]
    lost = int(((state[UP].half() == 0) & (state[UP] != 0)).sum())
    assert (
        f"{lost:,} of {state[UP].numel():,} in {UP!r}" in note and "harmless" in note and "float32 keeps them" in note
    )
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["losses"] == {"underflowed": zeros, "clamped": 3}
    assert record["target"]["options"]["clamp"] is True
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, wanted in clamped(state).items():
        assert torch.equal(found[name].view(torch.int16), wanted.view(torch.int16)), name


def test_what_fits_is_not_touched(tmp_path):
    """The control: clamping changes no file that needs no clamping, and nothing is said of it."""
    made = make_hf(tmp_path / "source", "gqa8", dtype="bfloat16")
    for clamp_ in (False, True):
        out = tmp_path / str(clamp_)
        summary = convert.convert_checkpoint(made.path, out, to="scratch", dtype="float16", clamp=clamp_)
        assert summary.clamped == 0 and not any("clamp" in n for n in summary.notes)
    a, b = (load_file(tmp_path / n / "model.safetensors") for n in ("False", "True"))
    assert all(torch.equal(a[k].view(torch.int16), b[k].view(torch.int16)) for k in a)


def test_a_gguf_file_is_clamped_too(made, tmp_path):
    options = {"to": "gguf", "type": "f16", "tokenizer": False}
    with pytest.raises(ConvertError, match="--clamp"):
        convert.convert_checkpoint(made.path, tmp_path / "out.gguf", **options)
    summary = convert.convert_checkpoint(made.path, tmp_path / "out.gguf", **options, clamp=True)
    assert summary.clamped == 3
    found = next(t for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors if t.name == "blk.0.ffn_up.weight")
    wanted = clamped({"x": load_file(made.path / "model.safetensors")[UP]})["x"].numpy()
    assert np.array_equal(np.asarray(found.data).view(np.uint16), wanted.view(np.uint16))


def test_infinity_and_nan_are_not_clamped(made, tmp_path):
    state = load_file(made.path / "model.safetensors")
    state[UP].view(-1)[:3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    state[UP].view(-1)[3] = 0.5
    save_file(state, made.path / "model.safetensors")
    summary = convert.convert_checkpoint(made.path, tmp_path / "out", to="hf", dtype="float16", clamp=True)
    found = load_file(tmp_path / "out" / "model.safetensors")[UP].view(-1)
    assert summary.clamped == 0
    (note,) = [n for n in summary.notes if "3 values are NaN or infinite in the source and stay so" in n]
    assert f"3 of {state[UP].numel():,} in {UP!r}" in note and "validate --scan" in note
    assert found[0] == float("inf") and found[1] == float("-inf") and found[2].isnan()


TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
AS_INTEGERS = {"F64": torch.int64, "F32": torch.int32, "F16": torch.int16, "BF16": torch.int16}


@pytest.mark.parametrize("target", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("source", ["F64", "F32", "BF16"])
def test_clamp_agrees_with_torch(source, target):
    if source == target:
        return
    rng = np.random.default_rng(3)
    bits = torch.from_numpy(rng.integers(0, 1 << 64, 50_000, np.uint64).view(np.int64))
    exponents = torch.from_numpy(rng.integers(-330, 308, 50_000))
    values = torch.where(torch.arange(50_000) % 2 == 0, bits.view(torch.float64), 10.0 ** exponents.double())
    values[:2] = torch.tensor([3.4028234e38, -3.402e38])
    values = values.to(TORCH[source])
    raw = values.view(AS_INTEGERS[source]).numpy()
    raw = raw.view({"F64": np.float64, "F32": np.float32, "BF16": np.uint16}[source])
    loss = CastLoss()
    narrow = cast(raw, source, target, loss)
    found = torch.from_numpy(clamp(raw, source, narrow, target).view(f"i{narrow.dtype.itemsize}"))
    found = found.view(TORCH[target])
    plain = values.to(torch.float32).to(TORCH[target])  # as the cast does; through float32
    lost = values.isfinite() & plain.isinf()
    assert loss.overflowed == int(lost.sum()) and (loss.overflowed > 0 or source == "BF16")
    assert loss.underflowed == int(((plain == 0) & (values != 0)).sum())
    wanted = torch.where(lost, torch.finfo(TORCH[target]).max * values.sign().to(TORCH[target]), plain)
    same = found.view(AS_INTEGERS[target]) == wanted.view(AS_INTEGERS[target])
    assert bool((same | (found.isnan() & wanted.isnan())).all())
    assert not bool((found.isinf() & values.isfinite()).any())
