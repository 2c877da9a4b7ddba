"""FP8 with scales: every code against torch, blocks against torch's arithmetic and transformers' own, faults named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import convert
from convert.errors import ConvertError
from convert.float8 import TABLES, Float8
from convert.formats.readers import read_container
from convert.formats.spec import Scale
from convert.source import FilePool
from tests.fixtures.float8 import KINDS, TYPES, make_float8, quantised

COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
}


@pytest.mark.parametrize("kind", sorted(TABLES))
def test_all_codes_are_what_torch_says(kind):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    wanted = codes.view(TYPES[kind]).to(torch.float32).numpy()
    assert np.array_equal(np.isnan(TABLES[kind]), np.isnan(wanted))
    plain = ~np.isnan(wanted)
    assert np.array_equal(TABLES[kind][plain].view(np.uint32), wanted[plain].view(np.uint32))  # -0 too
    assert np.isnan(wanted).sum() == {"F8_E4M3": 2, "F8_E5M2": 6}[kind]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


@pytest.mark.parametrize("dtype", sorted(TYPES))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "cols"), [(40, 70), (16, 32), (7, 5), (33, 96)])
def test_any_rows_are_codes_times_scales(tmp_path, kind, dtype, rows, cols):
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)) * 0.2
    codes, scales, values = quantised(weight, kind, dtype=TYPES[dtype])
    save_file({"w": codes, "s": scales}, tmp_path / "x.safetensors")
    specs = read_container(tmp_path / "x.safetensors", "safetensors").tensors
    block = {"block": (16, 32), "tensor": (rows, cols), "group": (1, 16)}.get(kind, (1, cols))
    pool = FilePool()
    source = Float8(replace(specs["w"], scale=Scale(specs["s"], block)), pool)
    assert (source.shape, source.dtype) == ((rows, cols), "F32")
    for start, stop in [(0, rows), (1, 2), (3, min(rows, 30)), (rows - 1, rows), (rows // 2, rows)]:
        got = torch.from_numpy(source.read(start, stop))
        assert torch.equal(bits(got), bits(values[start:stop])), (start, stop)
    wrong = Float8(replace(specs["w"], scale=Scale(specs["s"], block)), pool)
    wrong.scales = pool.source(replace(specs["s"], offset=specs["w"].offset))  # other scales are seen
    assert not torch.equal(torch.from_numpy(wrong.read(0, rows)), values)
    pool.close()


@pytest.mark.parametrize(
    ("kind", "suffix", "config"),
    [
        ("block", "weight_scale_inv", None),
        ("tensor", "weight_scale_inv", {"quant_method": "fp8", "weight_block_size": None}),
        ("tensor", "weight_scale", {"quant_method": "fp8", "activation_scheme": "static"}),
        ("channel", "weight_scale", {"quant_method": "fbgemm_fp8"}),
        ("channel1", "weight_scale", COMPRESSED),
        ("tensor", "weight_scale", {"quant_method": "modelopt", "quant_algo": "FP8"}),
    ],
)
def test_a_folder_converts_to_what_its_codes_mean(tmp_path, kind, suffix, config):
    source = tmp_path / "source"
    dtype = "F8_E5M2" if config is COMPRESSED else "F8_E4M3"
    meant = make_float8(source, kind, suffix=suffix, dtype=TYPES[dtype], config=config, activations=True)
    done = convert.convert_checkpoint(source, tmp_path / "wide", to="hf", dtype="float32", check="full")
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert set(wide) == set(meant)
    assert all(torch.equal(bits(wide[n]), bits(meant[n])) for n in meant)
    assert any("multiplied by their scales: 14 with one" in n for n in done.notes), done.notes
    assert any("input_scale" in n and "k_scale" in n and "activations" in n for n in done.notes)
    convert.convert_checkpoint(source, tmp_path / "out", to="hf", check="full")
    kept = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(bits(kept[n]), bits(meant[n].to(torch.bfloat16))) for n in meant)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written and written["dtype"] == "bfloat16"


def test_transformers_dequantises_to_the_same_bits(tmp_path):
    transformers = pytest.importorskip("transformers")
    source = tmp_path / "source"
    make_float8(source, "block")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        source, quantization_config=transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 32))
    ).state_dict()
    convert.convert_checkpoint(source, tmp_path / "out", to="hf")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in ours.items():
        assert torch.equal(tensor.float(), theirs[name].float()), name


@pytest.mark.parametrize("target", ["scratch", "meta", "gguf"])
def test_other_layouts_verify_and_come_back(tmp_path, target):
    source = tmp_path / "source"
    meant = make_float8(source, "block")
    out = tmp_path / ("x.gguf" if target == "gguf" else "out")
    options = {"tokenizer": False} if target == "gguf" else {}
    convert.convert_checkpoint(source, out, to=target, **options)
    assert convert.verify(source, out).verdict == "pass"
    convert.convert_checkpoint(out, tmp_path / "back", to="hf", **options)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[n].float(), meant[n].to(torch.bfloat16).float()) for n in meant)
    assert {str(t.dtype) for n, t in back.items() if "proj" in n} == {"torch.bfloat16"}
    assert not convert.check(out, source=source).problems
    found = convert.diff(source, out)
    counts = found.as_json()["counts"]
    assert counts == {"equal": 7, "rounded": 14}, counts


def edit(folder, change):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop(Q + "_scale_inv"), "its scale is missing"),
        (lambda s: s.update({Q + "_scale": torch.ones(())}), "scales twice"),
        (lambda s: s.update({Q: s[Q].to(torch.bfloat16)}), "scale without an FP8 weight"),
        (lambda s: s.pop(Q), "there is no"),
        (lambda s: s.update({Q + "_scale_inv": s[Q + "_scale_inv"][:-1].clone()}), "does not go with"),
        (lambda s: s.update({Q + "_scale_inv": s[Q + "_scale_inv"].to(torch.int32)}), "no type for scales"),
        (lambda s: s.update({Q + "_scale_inv": s[Q + "_scale_inv"].t().contiguous()}), "does not go with"),
    ],
)
def test_scales_that_lack_or_do_not_fit_stop(tmp_path, change, words):
    make_float8(tmp_path, "block")
    with convert.open_checkpoint(tmp_path) as whole:
        assert not whole.match.problems
    edit(tmp_path, change)
    with pytest.raises(ConvertError, match=words) as error:
        convert.open_checkpoint(tmp_path)
    assert error.value.problems[0].hint


def test_a_code_that_is_no_number_is_found(tmp_path):
    make_float8(tmp_path, "block")
    assert not [p for p in convert.validate(tmp_path, scan=True).problems if p.kind == "nan"]

    def spoil(state):
        state[Q].view(torch.uint8)[3, 4] = 0x7F

    edit(tmp_path, spoil)
    found = [p for p in convert.validate(tmp_path, scan=True).problems if p.kind == "nan"]
    assert [(p.tensor, p.found) for p in found] == [(Q, 1)]


def test_float16_says_what_is_too_large(tmp_path):
    make_float8(tmp_path / "source", "tensor", config={"quant_method": "fp8"}, suffix="weight_scale")

    def grow(state):
        state[Q + "_scale"].fill_(1000.0)

    edit(tmp_path / "source", grow)
    with pytest.raises(ConvertError, match=r"float16|F16"):
        convert.convert_checkpoint(tmp_path / "source", tmp_path / "out", to="hf", dtype="float16")
    convert.convert_checkpoint(tmp_path / "source", tmp_path / "out", to="hf", dtype="float16", clamp=True)


def test_a_torch_file_too(tmp_path):
    meant = make_float8(tmp_path / "source", "block")
    shutil.copytree(tmp_path / "source", tmp_path / "bin")
    state = load_file(tmp_path / "bin" / "model.safetensors")
    (tmp_path / "bin" / "model.safetensors").unlink()
    state[Q] = state[Q].t().contiguous().t()  # with strides
    torch.save(state, tmp_path / "bin" / "pytorch_model.bin")
    convert.convert_checkpoint(tmp_path / "bin", tmp_path / "out", to="hf", dtype="float32")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as got:
        assert all(torch.equal(got.get_tensor(n), meant[n]) for n in meant)


def test_experts_too(tmp_path):
    """One matrix of scales per expert; the layouts stack experts or keep them apart."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "moe_intermediate_size": 40}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
    config = transformers.Qwen3MoeConfig(
        **sizes, **heads, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, dtype="bfloat16"
    )
    source = tmp_path / "source"
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(source)
    state, meant = load_file(source / "model.safetensors"), {}
    for name in list(state):
        meant[name] = state[name]
        if name.endswith("_proj.weight"):
            state[name], state[name + "_scale_inv"], values = quantised(state[name], "block")
            meant[name] = values.to(torch.bfloat16)
    assert sum(".experts." in name for name in meant) == 24
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((source / "config.json").read_text())
    stated["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    (source / "config.json").write_text(json.dumps(stated))
    for target in ("scratch", "gguf"):
        out = tmp_path / ("x.gguf" if target == "gguf" else target)
        convert.convert_checkpoint(source, out, to=target, tokenizer=False)
        convert.convert_checkpoint(out, tmp_path / f"back-{target}", to="hf", tokenizer=False)
        back = load_file(tmp_path / f"back-{target}" / "model.safetensors")
        assert set(back) == set(meant) and all(torch.equal(back[n].float(), meant[n].float()) for n in meant)
