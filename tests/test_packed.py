"""Weights that somebody has quantised already are named, with what to do, by config or by tensors alone."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.errors import ConvertError
from convert.packed import ENDINGS, SCHEMES, refuse_packed
from tests.fixtures import make_hf

Q = "model.layers.0.self_attn.q_proj."
U8, I8, I32 = torch.uint8, torch.int8, torch.int32


def words(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


#: What each library's own files hold in place of ``q_proj.weight`` (64 x 64).
TENSORS = {
    "bitsandbytes 4-bit": {
        "weight": words(U8, 2048, 1),
        "weight.absmax": words(U8, 64),
        "weight.nested_absmax": torch.ones(1),
        "weight.nested_quant_map": torch.ones(256),
        "weight.quant_map": torch.ones(16),
        "weight.quant_state.bitsandbytes__nf4": words(U8, 90),
    },
    "bitsandbytes int8": {"weight": words(I8, 64, 64), "SCB": torch.ones(64), "weight_format": words(U8, 1)},
    "GPTQ": {
        "qweight": words(I32, 8, 64),
        "qzeros": words(I32, 2, 8),
        "scales": torch.ones(2, 64),
        "g_idx": words(I32, 64),
    },
    "AWQ": {"qweight": words(I32, 64, 8), "qzeros": words(I32, 2, 8), "scales": torch.ones(2, 64)},
    "HQQ": {"W_q": words(U8, 32, 64), "scale": torch.ones(64, 1), "zero": torch.ones(64, 1), "nbits": words(I32)},
    "compressed-tensors with integers": {
        "weight_packed": words(I32, 64, 8),
        "weight_scale": torch.ones(64, 2),
        "weight_shape": words(torch.int64, 2),
    },
    "MLX": {"weight": words(torch.uint32, 64, 8), "scales": torch.ones(64, 1), "biases": torch.ones(64, 1)},
    "Quanto": {"weight._data": words(I8, 64, 64), "weight._scale": torch.ones(64, 1)},
    "NVFP4": {"weight": words(U8, 64, 32), "weight_scale": torch.ones(64, 4), "weight_scale_2": torch.ones(())},
    "BitNet": {"weight": words(U8, 16, 64), "weight_scale": torch.ones(1)},
    "EETQ": {"weight": words(I8, 64, 64), "weight_scales": torch.ones(64)},
}
INT8 = {"weight": words(I8, 64, 64), "weight_scale": torch.ones(64, 1)}
CONFIGS = {
    "bitsandbytes 4-bit": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bitsandbytes int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 32},
    "AWQ": {"quant_method": "awq", "bits": 4},
    "HQQ": {"quant_method": "hqq"},
    "compressed-tensors with integers": {"quant_method": "compressed-tensors"},
    "MXFP4": {"quant_method": "mxfp4"},
    "NVFP4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "MLX": {"group_size": 64, "bits": 4},
    "torchao": {"quant_method": "torchao"},
}


def packed(folder, tensors, config=None):
    made = make_hf(folder, "gqa8")
    state = load_file(made.path / "model.safetensors")
    del state[Q + "weight"]
    state |= {Q + name: tensor for name, tensor in tensors.items()}
    save_file(state, made.path / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((made.path / "config.json").read_text())
    if config is not None:
        stated["quantization_config"] = config
    (made.path / "config.json").write_text(json.dumps(stated))
    return made.path


def refusal(path):
    with pytest.raises(ConvertError) as error:
        convert.open_checkpoint(path)
    (problem,) = error.value.problems
    assert problem.kind == "quantized_source"
    return problem


@pytest.mark.parametrize("scheme", sorted(TENSORS))
def test_tensors_alone_tell(tmp_path, scheme):
    problem = refusal(packed(tmp_path, TENSORS[scheme]))
    assert scheme in problem.message and problem.hint == SCHEMES[scheme].cure
    assert problem.tensor.startswith(Q)
    assert "unquantised model" in problem.hint


def test_integers_with_a_scale_are_no_fp8(tmp_path):
    assert "compressed-tensors with integers" in refusal(packed(tmp_path, INT8)).message


@pytest.mark.parametrize("scheme", sorted(CONFIGS))
def test_the_config_alone_tells(tmp_path, scheme):
    made = make_hf(tmp_path, "gqa8")
    stated = json.loads((made.path / "config.json").read_text()) | {"quantization_config": CONFIGS[scheme]}
    (made.path / "config.json").write_text(json.dumps(stated))
    problem = refusal(made.path)
    assert scheme in problem.message and SCHEMES[scheme].cure in problem.hint
    assert "take quantization_config out" in problem.hint  # its tensors are plain


@pytest.mark.parametrize("scheme", sorted(set(CONFIGS) & set(TENSORS)))
def test_config_and_tensors_agree(tmp_path, scheme):
    problem = refusal(packed(tmp_path, TENSORS[scheme], CONFIGS[scheme]))
    assert scheme in problem.message and problem.hint == SCHEMES[scheme].cure


def test_a_method_nobody_knows_is_named():
    with pytest.raises(ConvertError, match="frobnicate") as error:
        refuse_packed(["model.norm.weight"], {"quantization_config": {"quant_method": "frobnicate"}})
    assert error.value.problems[0].hint


@pytest.mark.parametrize("ending", sorted(ENDINGS))
def test_every_ending_is_seen_among_names_alone(ending):
    names = ["model.norm.weight", Q + "weight"]
    refuse_packed(names, None)  # and plain names pass
    with pytest.raises(ConvertError, match="already quantised") as error:
        refuse_packed([*names, Q.rstrip(".") + ending], None)
    assert error.value.problems[0].tensor == Q.rstrip(".") + ending


def test_gpt_oss_blocks_are_mxfp4():
    with pytest.raises(ConvertError, match="MXFP4"):
        refuse_packed(["model.layers.0.mlp.experts.gate_up_proj_blocks"], None)


def test_fp8_beside_integers_is_refused(tmp_path):
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4}}},
    }
    tensors = {"weight": torch.ones(64, 64).to(torch.float8_e4m3fn), "weight_scale": torch.ones(64, 1)}
    assert "compressed-tensors" in refusal(packed(tmp_path, tensors, config)).message
