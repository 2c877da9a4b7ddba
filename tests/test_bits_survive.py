"""Copies in the same type keep every bit: NaN payloads, −0, subnormals; each tensor its own type; buffers told."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from tests.fixtures import make_hf

INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def odd(dtype: torch.dtype) -> torch.Tensor:
    """Values that arithmetic would change: NaN with payloads, quiet and not, zeros, infinities, subnormals."""
    if dtype == torch.float32:
        bits = [0x7F800001, 0x7FC00001, 0xFFABCDEF, 0xFFFFFFFF, 0x80000000, 0, 0x7F800000, 0xFF800000, 1, 0x807FFFFF]
        return torch.from_numpy(np.array(bits, np.uint32).view(np.int32)).view(dtype)
    top = 0x7C00 if dtype == torch.float16 else 0x7F80
    bits = [top | 1, top | 0x41, 0x8000 | top | 0x2A, 0xFFFF, 0x8000, 0, top, 0x8000 | top, 1, 0x8003]
    return torch.from_numpy(np.array(bits, np.uint16).view(np.int16)).view(dtype)


@pytest.fixture
def mixed(tmp_path):
    """A model of which the norms are float32, the MLP float16 and the rest bfloat16, each with odd values in it."""
    made = make_hf(tmp_path / "source", "gqa8", dtype="bfloat16")
    state = load_file(made.path / "model.safetensors")
    for name, tensor in state.items():
        dtype = torch.float32 if "norm" in name else torch.float16 if ".mlp." in name else torch.bfloat16
        tensor = tensor.to(dtype).contiguous()
        tensor.view(-1)[:10] = odd(dtype)  # copies bits: same type
        state[name] = tensor
    save_file(state, made.path / "model.safetensors")
    return made


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.dtype])


def test_the_fixture_holds_what_it_says(mixed):
    state = load_file(mixed.path / "model.safetensors")
    assert {t.dtype for t in state.values()} == set(INTEGERS)
    for tensor in state.values():
        assert torch.equal(bits(tensor).view(-1)[:10], bits(odd(tensor.dtype)))


@pytest.mark.parametrize("way", [["scratch"], ["meta"], ["scratch", "meta"], ["meta", "scratch"]])
@pytest.mark.parametrize("form", ["safetensors", "pth"])
def test_every_bit_and_every_type_survives_a_round_trip(mixed, tmp_path, way, form):
    at = mixed.path
    for number, layout in enumerate(way):
        options = {"format": form} if layout == "scratch" else {"model_parallel": 2}
        convert.convert_checkpoint(at, tmp_path / str(number), to=layout, check="full", **options)
        at = tmp_path / str(number)
    convert.convert_checkpoint(at, tmp_path / "back", to="hf", check="full", max_shard_size=20_000)
    found = {}
    for path in (tmp_path / "back").glob("*.safetensors"):
        found |= load_file(path)
    wanted = load_file(mixed.path / "model.safetensors")
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(bits(found[name]), bits(tensor)), name


PATTERNS = INTEGERS | {torch.float64: torch.int64}


def scrambled(made, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A model of nothing but random bits: every exponent, NaN with all payloads, infinities, subnormals, both signs."""
    rng = np.random.default_rng(11)
    state = {}
    for name, tensor in load_file(made.path / "model.safetensors").items():
        raw = rng.integers(0, 256, tensor.numel() * dtype.itemsize, np.uint8)
        state[name] = torch.from_numpy(raw).view(dtype).reshape(tensor.shape)
    save_file(state, made.path / "model.safetensors", metadata={"format": "pt"})
    return state


@pytest.mark.parametrize("dtype", sorted(PATTERNS, key=str))
@pytest.mark.parametrize("form", ["safetensors", "pth"])
def test_random_bits_survive_every_layout(tmp_path, dtype, form):
    """Rows are put into other orders on the way, files are split and joined; no bit of any value may turn."""
    made = make_hf(tmp_path / "source", "gqa8")
    state = scrambled(made, dtype)
    at = made.path
    for number, layout in enumerate(["scratch", "meta", "hf", "meta", "scratch", "hf"]):
        options = {"scratch": {"format": form}, "meta": {"model_parallel": 2}, "hf": {"max_shard_size": 30_000}}[layout]
        convert.convert_checkpoint(at, tmp_path / str(number), to=layout, check="full", **options)
        at = tmp_path / str(number)
    found = {}
    for path in at.glob("*.safetensors"):
        found |= load_file(path)
    kind = PATTERNS[dtype]
    assert set(found) == set(state)
    for name, tensor in state.items():
        assert found[name].dtype == dtype and torch.equal(found[name].view(kind), tensor.view(kind)), name
        turned = tensor.view(kind).clone()
        turned.view(-1)[-1] ^= 1
        assert not torch.equal(found[name].view(kind), turned)  # the control: the lowest bit of the last value


@pytest.mark.parametrize("way", [["hf"], ["scratch", "hf"], ["meta", "hf"], ["gguf", "hf"]])
def test_float64_is_rounded_once_through_every_layout(tmp_path, way):
    """As numpy does in one step; torch rounds these values twice, and differs."""
    made = make_hf(tmp_path / "source", "gqa8")
    state = {}
    for name, tensor in load_file(made.path / "model.safetensors").items():
        near = np.abs(tensor.numpy()).astype(np.float16)
        middle = near.astype(np.float64) + np.spacing(near).astype(np.float64) / 2
        state[name] = torch.from_numpy(middle * (1 + 2.0**-40))  # a hair above the middle: up, in one step
    save_file(state, made.path / "model.safetensors", metadata={"format": "pt"})
    at = made.path
    for number, layout in enumerate(way):
        out = tmp_path / (f"{number}.gguf" if layout == "gguf" else str(number))
        options = {"type": "f16"} if layout == "gguf" else {"dtype": "float16"}
        convert.convert_checkpoint(at, out, to=layout, check="full", tokenizer=False, **options)
        at = out
    found = load_file(at / "model.safetensors")
    matrices = [n for n, t in state.items() if t.ndim > 1]  # GGUF holds the others as float32
    for name in matrices if "gguf" in way else state:
        assert np.array_equal(
            found[name].numpy().view(np.uint16), state[name].numpy().astype(np.float16).view(np.uint16)
        )
        assert not torch.equal(state[name].half(), found[name])  # the control


BUFFERS = ["bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float64", "complex64"]


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("target", ["scratch", "meta", "hf", "gguf"])
def test_buffers_of_any_type_are_ignored_with_a_reason_or_stop_by_name(tmp_path, kind, target):
    """A known one is left out and told; of an unknown one nobody can say that the model does without it."""
    made = make_hf(tmp_path / "source", "gqa8", dtype="bfloat16")
    state = load_file(made.path / "model.safetensors")
    known, unknown = "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.bias"
    out = tmp_path / ("out.gguf" if target == "gguf" else "out")
    values = torch.ones(1, 1, 8, 8).to(getattr(torch, kind))
    save_file(state | {known: values.view(-1)[:4].clone(), unknown: values}, made.path / "model.safetensors")
    with pytest.raises(convert.ConvertError, match=r"self_attn\.bias' \[1, 1, 8, 8\] has no place") as caught:
        convert.convert_checkpoint(made.path, out, to=target, tokenizer=False)
    assert [p.tensor for p in caught.value.problems] == [unknown] and not out.exists()
    save_file(state | {known: values.view(-1)[:4].clone()}, made.path / "model.safetensors")
    summary = convert.convert_checkpoint(made.path, out, to=target, tokenizer=False)
    assert f"ignored {known}: recomputed from rope_theta" in summary.notes
    if target != "gguf":
        (path,) = [*out.glob("*.safetensors"), *out.glob("*.pth")]
        written = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        assert len(written) == len(state) and {t.dtype for t in written.values()} == {torch.bfloat16}


@pytest.mark.parametrize("suffix", ["bin", "pth", "safetensors"])
def test_every_container_gives_the_same_bits(mixed, tmp_path, suffix):
    """Torch files too, contiguous or with strides, and with what is not a number in them."""
    wanted = load_file(mixed.path / "model.safetensors")
    if suffix != "safetensors":
        stored = {n: t.t().contiguous().t() if "o_proj" in n else t for n, t in wanted.items()}
        assert not stored["model.layers.0.self_attn.o_proj.weight"].is_contiguous()
        (mixed.path / "model.safetensors").unlink()
        torch.save(stored, mixed.path / f"pytorch_model.{suffix}")
    convert.convert_checkpoint(mixed.path, tmp_path / "out", to="hf", check="full")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(bits(found[name]), bits(tensor)), name


@pytest.mark.parametrize("dtype", sorted(INTEGERS, key=str))
def test_zeros_and_subnormals_survive_gguf(tmp_path, dtype):
    """Matrices keep their type; one-dimensional tensors are float32 there, which holds every value of the others."""
    made = make_hf(tmp_path / "source", "gqa8", dtype=str(dtype).removeprefix("torch."))
    state = load_file(made.path / "model.safetensors")
    chosen = odd(dtype)
    finite = chosen[torch.isfinite(chosen)]
    assert {0} < set(bits(finite).tolist()) and len(finite) == 4  # both zeros, two subnormals
    for tensor in state.values():
        tensor.view(-1)[: len(finite)] = finite
    save_file(state, made.path / "model.safetensors", metadata={"format": "pt"})
    kind = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    plain = {"tokenizer": False, "check": "full"}
    convert.convert_checkpoint(made.path, tmp_path / "a.gguf", to="gguf", type=kind, **plain)
    convert.convert_checkpoint(tmp_path / "a.gguf", tmp_path / "b.gguf", to="gguf", **plain)
    convert.convert_checkpoint(tmp_path / "b.gguf", tmp_path / "back", to="hf", **plain)
    found = load_file(tmp_path / "back" / "model.safetensors")
    for name, tensor in state.items():
        if tensor.ndim > 1:
            assert found[name].dtype == dtype
        assert torch.equal(bits(found[name].to(dtype)), bits(tensor)), name
    state["model.norm.weight"][0] = float("nan")  # control: what is no number is told, not carried
    save_file(state, made.path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(convert.ConvertError, match=r"model\.norm|output_norm"):
        convert.convert_checkpoint(made.path, tmp_path / "c.gguf", to="gguf", type=kind, **plain)


def test_counters_are_ignored_with_a_reason(tmp_path):
    """What averages and trainers keep beside weights: integers and truth values."""
    made = make_hf(tmp_path / "source", "gqa8")
    state = load_file(made.path / "model.safetensors")
    (made.path / "model.safetensors").unlink()
    counters = {"n_averaged": torch.tensor(7), "initted": torch.tensor([True]), "module.step": torch.tensor(3)}
    torch.save(counters | {f"module.{n}": t for n, t in state.items()}, made.path / "pytorch_model.bin")
    summary = convert.convert_checkpoint(made.path, tmp_path / "out", to="hf")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(state)
    for name in counters:
        assert f"not converted: {name} (a counter)" in summary.notes
