"""What is said of values that narrowing lost: which tensors, how many, and what to do."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.cast import CastLoss
from convert.losses import Lost, loss_notes
from tests.fixtures import make_hf

UP = "model.layers.0.mlp.up_proj.weight"


def one(name: str, under: int, over: int = 0, *, size: int = 100_000, dtype: str = "F16", scaled: bool = False) -> Lost:
    return Lost(name, size, CastLoss(over, under), (dtype,), scaled)


def test_the_worst_are_told_by_name_and_the_rest_by_number():
    (note,) = loss_notes([one(f"w{n}", n) for n in range(1, 7)])
    assert note.startswith("21 non-zero values became zero in the narrower type: 6 of 100,000 in 'w6', 5 of 100,000")
    assert "'w4', the rest in 3 more tensors; a few are usual in float16 and harmless" in note and "'w3'" not in note
    assert loss_notes([one("w", 1)])[0].startswith("1 non-zero value became zero in the narrower type: 1 of")
    assert loss_notes([]) == [] and loss_notes([one("w", 0)]) == []


@pytest.mark.parametrize(
    ("dtype", "option", "words"),
    [
        ("F16", "--dtype", "--dtype bfloat16 or float32"),
        ("BF16", "--dtype", "--dtype float32"),
        ("F16", "--type", "--type bf16"),
        ("BF16", "--type", "--type f32"),
        ("F16", "dtype =", "dtype = bfloat16 or float32"),
    ],
)
def test_what_to_do_follows_from_the_type(dtype, option, words):
    under, over = loss_notes([one("w", 3, 2, dtype=dtype)], option=option)
    assert f"{words} keeps them" in under and f"{words} holds them" in over
    (much,) = loss_notes([one("w", 3000, dtype=dtype), one("v", 3, dtype=dtype)], option=option)
    assert "1 tensor loses more than 1% of the values" in much and f"keep them with {words}" in much
    assert "harmless" not in much


def test_fp8_with_scales_of_zero_is_not_called_harmless():
    (note,) = loss_notes([one("w", 3, dtype="F32", scaled=True)])
    assert "scale that is zero" in note and "harmless" not in note


def test_blocks_and_what_was_no_number_have_sentences_of_their_own():
    blocks = Lost("v", 512, CastLoss(0, 256), ("Q6_K",), False)
    odd = Lost("u", 512, CastLoss(0, 0, 7), ("F16",), False)
    notes = loss_notes([one("w", 3), blocks, odd], option="--type")
    assert len(notes) == 3
    assert notes[0].startswith(
        "256 values are too small for the scales of their blocks (Q6_K) and as good as zero: 256 of"
    )
    assert "--tensor-type NAME=bf16" in notes[0] and notes[1].startswith("3 non-zero values")
    assert notes[2].startswith("7 values are NaN or infinite in the source and stay so: 7 of 512 in 'u'")


def test_a_gguf_file_tells_of_blocks_that_vanish(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8", dtype="bfloat16")
    state = load_file(made.path / "model.safetensors")
    notes = {}
    for factor in (1e-7, 1.0):
        changed = dict(state) | {UP: state[UP] * factor}
        save_file(changed, made.path / "model.safetensors", metadata={"format": "pt"})
        done = convert.convert_checkpoint(
            made.path, tmp_path / f"{factor}.gguf", to="gguf", type="q8_0", tokenizer=False
        )
        notes[factor] = [n for n in done.notes if "as good as zero" in n]
        record = json.loads((tmp_path / f"{factor}.gguf.conversion.json").read_text())
        assert bool(record.get("losses")) == (factor < 1) and bool(done.underflowed) == (factor < 1)
    assert len(notes[1e-7]) == 1 and "'blk.0.ffn_up.weight'" in notes[1e-7][0] and notes[1.0] == []


def test_a_tensor_that_vanishes_is_told(tmp_path):
    """Against torch's own count; the control is the same tensor, large enough."""
    made = make_hf(tmp_path / "source", "gqa8", dtype="float32")
    notes = {}
    for factor in (1e-8, 1.0):
        state = load_file(made.path / "model.safetensors")
        state[UP] = state[UP] * factor
        save_file(state, made.path / "model.safetensors", metadata={"format": "pt"})
        lost = int(((state[UP].half() == 0) & (state[UP] != 0)).sum())
        done = convert.convert_checkpoint(made.path, tmp_path / str(factor), to="hf", dtype="float16")
        notes[factor] = [n for n in done.notes if "became zero" in n and f"{lost:,} of {state[UP].numel():,}" in n]
        state[UP] = state[UP] / factor
        save_file(state, made.path / "model.safetensors", metadata={"format": "pt"})
    assert len(notes[1e-8]) == 1 and "check with verify" in notes[1e-8][0]
    assert not any("check with verify" in n for n in notes[1.0])


def test_a_module_that_is_filled_hears_of_it_too(tmp_path):
    transformers = pytest.importorskip("transformers")
    made = make_hf(tmp_path / "source", "gqa8", dtype="float32")
    state = load_file(made.path / "model.safetensors")
    state[UP].view(-1)[:5] = torch.from_numpy(np.array([1e-9, -1e-12, 1e-30, 2e-8, 0.0], np.float32))
    save_file(state, made.path / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(made.path))
    report = convert.load_into(model.half(), made.path)
    (note,) = [n for n in report.notes if "became zero" in n]
    assert f"4 of {state[UP].numel():,} in" in note and "dtype = bfloat16" in note


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_damaged_blocks_of_a_gguf_file_are_told_or_stop(tmp_path, bad):
    """Counted as the gguf package reads them where the layout holds such values, and refused where none may be."""
    made = make_hf(tmp_path / "source", "gqa8", dtype="bfloat16")
    path = tmp_path / "x.gguf"
    convert.convert_checkpoint(made.path, path, to="gguf", type="q8_0", tokenizer=False)
    sound = convert.convert_checkpoint(path, tmp_path / "sound", to="hf", tokenizer=False)
    assert not any("NaN or infinite" in n for n in sound.notes)  # the control
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset) + 34 * 5)
        file.write(np.float16(bad).tobytes())
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    with np.errstate(all="ignore"):
        wanted = int(np.count_nonzero(~np.isfinite(gguf.quants.dequantize(tensor.data, tensor.tensor_type))))
    assert wanted > 20
    for dtype in ("float16", "float32"):
        done = convert.convert_checkpoint(path, tmp_path / dtype, to="hf", dtype=dtype, tokenizer=False, check="full")
        (note,) = [n for n in done.notes if "NaN or infinite" in n]
        assert note.startswith(f"{wanted} values are") and "'model.layers.1.mlp.up_proj.weight'" in note
    with pytest.raises(convert.ConvertError, match="not finite") as caught:
        convert.convert_checkpoint(path, tmp_path / "y.gguf", to="gguf", type="f16", tokenizer=False)
    assert caught.value.problems[0].found["count"] == wanted and not (tmp_path / "y.gguf").exists()
