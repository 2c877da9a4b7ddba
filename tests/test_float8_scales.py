"""Scales of FP8 weights that are exponents, no numbers, too large, or zero: against torch and transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.cast import CastLoss
from convert.errors import ConvertError
from convert.float8 import EXPONENTS, Float8
from convert.formats.readers import read_container
from convert.formats.spec import Scale
from convert.source import FilePool
from tests.fixtures import make_hf
from tests.fixtures.float8 import TYPES

Q = "model.layers.0.self_attn.q_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
MOST = torch.finfo(torch.float32).max
BLOCKS = {"tensor": None, "row": (1, 10**9), "block": (16, 32), "mx": (1, 32)}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def products(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """What torch says that codes mean, in float32, each scale repeated over its block."""
    wide = scales.float()
    if block is not None:
        wide = wide.repeat_interleave(min(block[0], codes.shape[0]), 0)[: codes.shape[0]]
        wide = wide.repeat_interleave(min(block[1], codes.shape[1]), 1)[:, : codes.shape[1]]
    return codes.float() * wide


def make(
    path: Path,
    kind: str,
    *,
    fmt: str = "F8_E4M3",
    scales: torch.dtype = torch.float8_e8m0fnu,
    config: dict[str, Any] | None = None,
    suffix: str = "_scale_inv",
) -> dict[str, torch.Tensor]:
    """A folder whose projections have random codes (no NaN) and random scales; returns what they mean by name."""
    made = make_hf(path, "gqa8", dtype="bfloat16")
    state = load_file(made.path / "model.safetensors")
    meant = {name: tensor.float() for name, tensor in state.items()}
    rng = np.random.default_rng(3)
    for name in [n for n in state if n.endswith("_proj.weight")]:
        rows, cols = state[name].shape
        height, width = BLOCKS[kind] or (rows, cols)
        cells = (-(-rows // height), -(-cols // width))
        most = {"F8_E4M3": 0x7F, "F8_E5M2": 0x7C}[fmt]
        codes = rng.integers(0, most, (rows, cols)) | rng.integers(0, 2, (rows, cols)) << 7
        state[name] = torch.from_numpy(codes.astype(np.uint8)).view(TYPES[fmt])
        exponents = torch.from_numpy(rng.integers(108, 124, cells if BLOCKS[kind] else (1,)).astype(np.uint8))
        scale = exponents.view(torch.float8_e8m0fnu)
        meant[name] = products(state[name], scale, BLOCKS[kind])
        state[name + suffix] = exponents if scales == torch.uint8 else scale.to(scales)
    save_file(state, made.path / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((path / "config.json").read_text())
    default = {"quant_method": "fp8", "weight_block_size": list(BLOCKS["block"])}
    stated["quantization_config"] = default if config is None else config
    (path / "config.json").write_text(json.dumps(stated))
    return meant


def edit(folder: Path, name: str, change: Any) -> dict[str, torch.Tensor]:
    state = load_file(folder / "model.safetensors")
    change(state[name])
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return state


def test_exponents_are_what_torch_says():
    wanted = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e8m0fnu).float().numpy()
    assert np.array_equal(EXPONENTS[:255].view(np.uint32), wanted[:255].view(np.uint32))  # 2^-127 is a subnormal
    assert np.isnan(EXPONENTS[255]) and np.isnan(wanted[255])
    assert wanted[0] == 2.0**-127 and wanted[127] == 1.0


@pytest.mark.parametrize(
    ("kind", "fmt", "scales", "config"),
    [
        *((kind, "F8_E4M3", torch.float8_e8m0fnu, None) for kind in BLOCKS),
        ("mx", "F8_E5M2", torch.float8_e8m0fnu, {"quant_method": "fp8", "weight_block_size": [1, 32]}),
        (
            "block",
            "F8_E4M3",
            torch.float8_e8m0fnu,
            {"quant_method": "fp8", "weight_block_size": [16, 32], "scale_fmt": "ue8m0"},
        ),
        ("block", "F8_E4M3", torch.uint8, {"quant_method": "fp8", "weight_block_size": [16, 32], "scale_fmt": "ue8m0"}),
        ("mx", "F8_E4M3", torch.uint8, None),
        ("row", "F8_E4M3", torch.uint8, {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
        (
            "mx",
            "F8_E4M3",
            torch.uint8,
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"type": "float", "num_bits": 8, "group_size": 32, "scale_dtype": "torch.uint8"}
                    }
                },
            },
        ),
        ("block", "F8_E4M3", torch.bfloat16, None),
        ("block", "F8_E4M3", torch.float16, None),
    ],
)
def test_a_folder_with_exponents_converts_to_what_torch_makes_of_it(tmp_path, kind, fmt, scales, config):
    suffix = "_scale" if config and config["quant_method"] != "fp8" else "_scale_inv"
    meant = make(tmp_path / "source", kind, fmt=fmt, scales=scales, config=config, suffix=suffix)
    done = convert.convert_checkpoint(tmp_path / "source", tmp_path / "out", to="hf", dtype="float32", check="full")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(meant) and all(torch.equal(bits(found[n]), bits(meant[n])) for n in meant)
    assert (done.underflowed, done.clamped) == (0, 0)
    word = {"tensor": "scale per tensor", "row": "per row", "block": "block of 16 x 32", "mx": "block of 1 x 32"}[kind]
    assert any(f"14 with one {word}" in n or f"14 with one per {word}" in n for n in done.notes), done.notes
    assert not [p for p in convert.validate(tmp_path / "source", scan=True).problems if p.severity == "error"]


@pytest.mark.parametrize("scales", [torch.float8_e8m0fnu, torch.uint8])
def test_transformers_dequantises_exponents_to_the_same_bits(tmp_path, scales):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    make(tmp_path / "source", "mx", scales=scales)
    state = load_file(tmp_path / "source" / "model.safetensors")
    convert.convert_checkpoint(tmp_path / "source", tmp_path / "out", to="hf")
    found = load_file(tmp_path / "out" / "model.safetensors")
    compared = 0
    for name, tensor in found.items():
        if name + "_scale_inv" in state and not state[name].shape[1] % 32:
            theirs = fp8.Fp8Dequantize(None)._dequantize_one(state[name], state[name + "_scale_inv"], torch.bfloat16)
            assert torch.equal(bits(tensor), bits(theirs)), name
            compared += 1
    assert compared


def test_torch_files_hold_exponents_too(tmp_path):
    meant = make(tmp_path / "source", "block")
    state = load_file(tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "source" / "pytorch_model.bin")
    convert.convert_checkpoint(tmp_path / "source", tmp_path / "out", to="hf", dtype="float32")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(bits(found[n]), bits(meant[n])) for n in meant)


def test_bytes_of_which_nobody_says_that_they_are_exponents_stop(tmp_path):
    make(tmp_path, "block", scales=torch.uint8)
    with pytest.raises(ConvertError, match="no type for scales") as caught:
        convert.open_checkpoint(tmp_path)
    assert len(caught.value.problems) <= 14 and "ue8m0" in (caught.value.problems[0].hint or "")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("target", ["hf", "scratch", "gguf"])
@pytest.mark.parametrize("clamp", [False, True])
def test_a_scale_that_is_no_number_stops(tmp_path, bad, target, clamp):
    """Clamping does not help: nothing tells what the block was."""
    make(tmp_path / "source", "block", scales=torch.float32)
    options = {"tokenizer": False, "type": "q8_0"} if target == "gguf" else {}
    out = tmp_path / ("x.gguf" if target == "gguf" else "out")
    edit(tmp_path / "source", UP + "_scale_inv", lambda t: t[1:2, :1].fill_(bad))
    with pytest.raises(ConvertError, match="not finite") as caught:
        convert.convert_checkpoint(tmp_path / "source", out, to=target, clamp=clamp, **options)
    (problem,) = caught.value.problems
    assert problem.kind == "scale" and problem.tensor == UP and problem.found["count"] == 1
    assert UP + "_scale_inv" in problem.message and problem.hint and not out.exists()


def test_the_exponent_that_is_no_number_stops_and_the_scan_names_it(tmp_path):
    make(tmp_path, "mx")
    assert not [p for p in convert.validate(tmp_path, scan=True).problems if p.kind == "scale"]  # the control
    edit(tmp_path, UP + "_scale_inv", lambda t: t.view(torch.uint8)[3:5, 0].fill_(255))
    found = [p for p in convert.validate(tmp_path, scan=True).problems if p.kind == "scale"]
    assert [(p.tensor, p.found["count"]) for p in found] == [(UP, 2)] and "2 NaN" in found[0].message


@pytest.mark.parametrize("target", ["float32", "bfloat16", "gguf", "q8_0"])
def test_products_that_are_too_large_stop_or_are_clamped_and_counted(tmp_path, target):
    source = tmp_path / "source"
    meant = make(source, "block", scales=torch.float32)
    as_gguf = target in ("gguf", "q8_0")
    options: dict[str, Any] = {"to": "hf", "dtype": target}
    if as_gguf:
        options = {"to": "gguf", "tokenizer": False, "type": {"gguf": "f32"}.get(target, target)}
    out = tmp_path / ("x.gguf" if as_gguf else "out")
    state = edit(source, UP + "_scale_inv", lambda t: t[1:2, :2].fill_(2.0**122))
    meant[UP] = products(state[UP], state[UP + "_scale_inv"], BLOCKS["block"])
    large = torch.isinf(meant[UP])
    rows = large.any(1)
    assert 0 < large.sum() < 1024 and torch.equal(rows.nonzero()[0], torch.tensor([16]))
    with pytest.raises(ConvertError, match="FP8 codes and scales") as caught:
        convert.convert_checkpoint(source, out, **options)
    (problem,) = caught.value.problems
    assert problem.kind == "overflow" and problem.tensor == UP and "--clamp" in problem.hint
    assert problem.found == {"row": 16, "count": int(large.sum())} and not out.exists()
    if target == "q8_0":  # a block type cannot hold the largest value of float32 either, and says so itself
        with pytest.raises(ConvertError, match="scale of"):
            convert.convert_checkpoint(source, out, clamp=True, **options)
        return
    done = convert.convert_checkpoint(source, out, clamp=True, check="full", **options)
    clamped = torch.where(large, MOST * meant[UP].sign(), meant[UP])
    if as_gguf:
        found = next(t for t in gguf.GGUFReader(out).tensors if t.name == "blk.1.ffn_up.weight")
        assert torch.equal(torch.from_numpy(np.array(found.data)).view(torch.int32), bits(clamped))
    else:
        found = load_file(out / "model.safetensors")[UP]
        narrow = clamped.to(getattr(torch, target))
        again = narrow.isinf()
        narrow[again] = torch.finfo(narrow.dtype).max * clamped.sign()[again].to(narrow.dtype)
        assert torch.equal(bits(found), bits(narrow))
    assert done.clamped >= int(large.sum()) and any(
        "too large" in n and (UP in n or "ffn_up" in n) for n in done.notes
    ), done.notes


def test_the_largest_products_that_fit_pass(tmp_path):
    """The control: one step below, nothing stops and nothing is counted."""
    meant = make(tmp_path / "source", "block", scales=torch.float32)
    state = edit(tmp_path / "source", UP + "_scale_inv", lambda t: t[1:2, :2].fill_(MOST / 448))
    meant[UP] = products(state[UP], state[UP + "_scale_inv"], BLOCKS["block"])
    assert torch.isfinite(meant[UP]).all() and meant[UP].abs().max() > 3.4e38
    done = convert.convert_checkpoint(tmp_path / "source", tmp_path / "out", to="hf", dtype="float32")
    assert torch.equal(bits(load_file(tmp_path / "out" / "model.safetensors")[UP]), bits(meant[UP]))
    assert (done.underflowed, done.clamped) == (0, 0)


@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-45, 3e-44])
@pytest.mark.parametrize("fmt", ["F8_E4M3", "F8_E5M2"])
def test_codes_that_become_zero_are_counted(tmp_path, scale, fmt):
    meant = make(tmp_path / "source", "block", fmt=fmt, scales=torch.float32)
    state = edit(tmp_path / "source", UP + "_scale_inv", lambda t: t[:2, :1].fill_(scale))
    meant[UP] = products(state[UP], state[UP + "_scale_inv"], BLOCKS["block"])
    lost = int(((meant[UP] == 0) & (state[UP].float() != 0)).sum())
    assert lost > 30
    done = convert.convert_checkpoint(tmp_path / "source", tmp_path / "out", to="hf", dtype="float32", check="full")
    assert done.underflowed == lost and any(f"{lost:,} non-zero" in n and UP in n for n in done.notes), done.notes
    assert torch.equal(bits(load_file(tmp_path / "out" / "model.safetensors")[UP]), bits(meant[UP]))  # -0, subnormals


def test_random_codes_and_scales_of_every_size_are_those_of_torch(tmp_path):
    """Any codes, scales from zero to 2^128, read in any pieces: values, refusals, clamped and vanished ones."""
    rng = np.random.default_rng(0)
    met = {"refused": 0, "clamped": 0, "vanished": 0, "plain": 0}
    for trial in range(80):
        rows, cols = int(rng.integers(1, 70)), int(rng.integers(1, 90))
        kind = list(TYPES.values())[trial % 2]
        codes = torch.from_numpy(rng.integers(0, 256, (rows, cols), np.uint8)).view(kind)
        height, width = [(rows, cols), (1, cols), (16, 32), (1, 32), (5, 7)][trial % 5]
        cells = (-(-rows // height), -(-cols // width))
        low, high = [(-150, 128), (-20, 20), (90, 128), (-150, -100)][int(rng.integers(4))]
        drawn = rng.random(cells) * np.ldexp(1.0, rng.integers(low, high, cells)) * rng.choice([1, 1, 1, -1, 0], cells)
        scales = torch.from_numpy(drawn.astype(np.float32))
        if trial % 4 == 3:
            scales = torch.from_numpy(rng.integers(0, 255, cells).astype(np.uint8)).view(torch.float8_e8m0fnu)
        save_file({"w": codes, "s": scales}, tmp_path / "x.safetensors")
        specs = read_container(tmp_path / "x.safetensors", "safetensors").tensors
        wanted = products(codes, scales, (height, width))
        large = wanted.isinf() & codes.float().isfinite()
        pool = FilePool()
        for clamp in (False, True):
            source = Float8(replace(specs["w"], scale=Scale(specs["s"], (height, width))), pool)
            source.clamp = clamp
            cuts = sorted({0, rows, *rng.integers(0, rows + 1, 3).tolist()})
            if large.any() and not clamp:
                with pytest.raises(ConvertError) as caught:
                    [source.read(a, b) for a, b in pairwise(cuts)]
                wrong = {"row": int(large.any(1).nonzero()[0]), "count": int(large.sum())}
                assert caught.value.problems[0].found == wrong
                met["refused"] += 1
                continue
            found = torch.from_numpy(np.concatenate([source.read(a, b) for a, b in pairwise(cuts)]))
            values = torch.where(large, MOST * wanted.sign(), wanted)
            assert bool(((bits(found) == bits(values)) | (found.isnan() & codes.float().isnan())).all()), trial
            vanished = int(((values == 0) & (codes.float() != 0)).sum())
            assert source.loss == CastLoss(int(large.sum()), vanished)
            met["clamped" if large.any() else "vanished" if vanished else "plain"] += 1
        pool.close()
    assert min(met.values()) >= 10, met
