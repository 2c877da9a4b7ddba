"""Tensors that are several others in one: said so, with what to do, and what to do works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.validate import validate
from tests.fixtures import make_hf

PARTS = {"self_attn.qkv_proj": ["q", "k", "v"], "mlp.gate_up_proj": ["gate", "up"]}
NAMES = """
extends    = "llama"
prefix     = "model.layers.{l}."
convention = { rope = "half" }
[top]
token_embd  = "model.embed_tokens.weight"
output_norm = "model.norm.weight"
output      = "lm_head.weight"
[block]
attn.norm = "input_layernorm.weight"
attn.o    = "self_attn.o_proj.weight"
mlp.norm  = "post_attention_layernorm.weight"
mlp.down  = "mlp.down_proj.weight"
[[fused]]
name  = "self_attn.qkv_proj.weight"
parts = ["attn.q", "attn.k", "attn.v"]
[[fused]]
name  = "mlp.gate_up_proj.weight"
parts = ["mlp.gate", "mlp.up"]
"""


def fuse(folder: Path, rows: int | None = None) -> dict[str, torch.Tensor]:
    """Put the parts of every layer into one tensor, as some trainers keep them; returns what was there."""
    before = load_file(folder / "model.safetensors")
    state = dict(before)
    for layer in range(2):
        for name, parts in PARTS.items():
            inside = f"model.layers.{layer}.{name.partition('.')[0]}."
            taken = [state.pop(f"{inside}{part}_proj.weight") for part in parts]
            state[f"model.layers.{layer}.{name}.weight"] = torch.cat(taken)[:rows].contiguous()
    save_file(state, folder / "model.safetensors")
    return before


def test_fused_tensors_are_named_and_a_names_file_takes_them(tmp_path):
    made = make_hf(tmp_path / "m", "gqa8")
    before = fuse(made.path)
    found = validate(made.path)
    text = "\n".join(found.lines())
    assert (
        "layers.{0-1}.self_attn.qkv_proj.weight' [96, 64] looks like fused q, k and v: its 96 rows are 64 + 16" in text
    )
    assert "looks like fused gate and up: its 192 rows are 96 + 96" in text
    assert "[[fused]]" in text and "litgpt" in text and "config of another model" not in text
    assert len(found.problems) == 14  # nothing is dropped
    (tmp_path / "names.toml").write_text(NAMES)
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf", names=tmp_path / "names.toml", layout="scratch")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("rows", [90, 50])
def test_another_number_of_rows_is_no_fused_tensor(tmp_path, rows):
    made = make_hf(tmp_path / "m", "gqa8")
    fuse(made.path, rows)
    assert "fused" not in "\n".join(validate(made.path).lines())
