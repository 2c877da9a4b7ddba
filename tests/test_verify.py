"""What verify says of sound and of broken conversions, in both rotary orders and several storage types."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from convert import ggml, prompt, quants
from convert.dtypes import DTYPES
from convert.errors import ConvertError, TableError, UsageError
from convert.reference.loading import fill, load_reference, read_tensor
from convert.rounding import grain, holds, perturb, round_through, stored_dtype
from convert.source import Cast, Joined, Rows, Source
from convert.tensor_diff import diff_tensors
from convert.verify import SCHEMA, VerifyResult, verify
from tests.fixtures.shapes import get_shape
from tests.fixtures.weights import Tensors, tokens
from tests.reference.models import StandIn, TensorSource, interleaved, model_of, one_thread, stand_in  # noqa: F401

KEYS = ["schema", "verdict", "device", "max_abs", "nmse", "kl_max", "kl_mean", "top1", "first_diff_position", "control"]


def run(a: StandIn, b: StandIn, **options: Any) -> VerifyResult:
    return verify(a, b, device="cpu", **options)


def swap(one: str, other: str) -> Any:
    def change(state: Tensors) -> None:
        for layer in range(2):
            a, b = (f"model.layers.{layer}.{name}.weight" for name in (one, other))
            state[a], state[b] = state[b], state[a]

    return change


@pytest.mark.parametrize("shape", ["gqa8", "std", "mha", "hd16", "hd6", "h32kv4", "tied"])
@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")], ids="-".join
)
def test_sound_conversions_pass(shape, dtypes):
    """From half to interleaved order, in other storage types; float16 of bfloat16 weights and float32 of either."""
    a = stand_in(shape, dtype=dtypes[0])
    b = replace(
        a, state={k: t.to(getattr(torch, dtypes[1])) for k, t in interleaved(a.state, get_shape(shape)).items()}
    )
    b.pairing = "interleaved"
    for one, other in ((a, b), (b, a)):
        got = run(one, other)
        assert got.verdict == "pass", got.message
        assert got.exit_code == 0
        assert got.first_diff_position is None
        assert got.distance.nmse <= got.tolerance < got.control.nmse / 5
        assert got.control.kl_mean > 0.3
    if dtypes[0] == dtypes[1]:
        assert got.tolerance < 1e-9  # nothing but the arithmetic


@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")], ids="-".join
)
def test_broken_conversions_fail(dtypes):
    a = stand_in(dtype=dtypes[0])
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    faults = {
        "gate and up": {"change": swap("mlp.gate_proj", "mlp.up_proj")},
        "norms": {"change": swap("input_layernorm", "post_attention_layernorm")},
        "theta": {"config": theta},
        "epsilon": {"config": {"rms_norm_eps": 1e-1}},
        "other weights": {"seed": 1},
    }
    for fault, options in faults.items():
        got = run(a, stand_in(dtype=dtypes[1], **options))
        assert got.verdict == "fail", fault
        assert got.exit_code == 1
        assert got.distance.nmse > 5 * got.tolerance
        rotary = fault == "theta"
        assert got.first_diff_position == (1 if rotary else 0), fault
        assert ("rotary fault (the order" in " ".join(got.hints)) is rotary


@pytest.mark.parametrize("stored", ["half", "interleaved"])
def test_unpermuted_q_and_k_fail_from_position_1_and_the_hint_says_why(stored):
    """B claims the other order than its rows are in: a converter that did not permute, or did it twice."""
    a = stand_in()
    b = stand_in(pairing=stored)
    b.pairing = "half" if stored == "interleaved" else "interleaved"
    got = run(a, b)
    assert (got.verdict, got.first_diff_position) == ("fail", 1)
    assert "once B is run with the rows of Q and K in the other rotary order" in " ".join(got.hints)
    back = run(b, a)
    assert (back.verdict, back.first_diff_position) == ("fail", 1)
    assert "once A is run with" in " ".join(back.hints)
    assert got.distance.by_position[0] < got.tolerance


def test_k_permuted_with_the_wrong_head_count_fails():
    """The old bug of K permuted as heads // kv heads: right for 4/2, wrong here."""
    a = stand_in()
    b = stand_in(pairing="interleaved")
    b.state = dict(b.state)
    half = get_shape("gqa8")
    wrong = interleaved(a.state, replace(half, kv_heads=half.heads // half.kv_heads))
    for name in b.state:
        if "k_proj" in name:
            b.state[name] = wrong[name]
    got = run(a, b)
    assert (got.verdict, got.first_diff_position) == ("fail", 1)
    assert "rotary fault" in got.hints[0]


@pytest.mark.parametrize("shape", ["std", "gqa8", "h32kv4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_near_untrained_weights_are_weak(shape, dtype):
    a = stand_in(shape, std=0.02)
    same = run(a, stand_in(shape, std=0.02, pairing="interleaved", dtype=dtype))
    assert (same.verdict, same.exit_code) == ("weak", 3)
    assert "All 21 tensors hold equal values, 4 of them in the other rotary order" in " ".join(same.hints)
    assert not same.control_seen
    assert run(a, a).verdict == "weak"
    assert "bit-equal" in run(a, a).message
    # The trap: these would pass any fixed tolerance, one of them broken.
    b = stand_in(shape, std=0.02, dtype=dtype)
    b.pairing = "interleaved"
    broken = run(a, b)
    assert broken.verdict in ("fail", "weak")
    if shape == "std":
        assert broken.distance.nmse < 1e-4
    assert "equal values, 4 of them" not in " ".join(broken.hints)
    assert "att.W_query" in " ".join(broken.hints)  # what the logits cannot show, the tensors do
    if dtype == "float32":
        assert broken.verdict == "fail"


def test_short_prompts_are_weak():
    a, b = stand_in(), stand_in(pairing="interleaved")
    assert run(a, b, tokens=[5]).verdict == "weak"
    assert run(a, b, tokens=[5]).control.nmse < 1e-9  # at position 0 nothing turns
    few = run(a, b, n_tokens=8)
    assert few.verdict == "weak"
    assert "too few" in few.message
    assert run(a, b, n_tokens=16).verdict == "pass"


def test_two_dimensional_heads_are_weak():
    """With head_dim 2 both rotary orders are the same, so that no control of theirs can be seen."""
    shape = replace(get_shape("std"), head_dim=2)
    got = run(stand_in(shape), stand_in(shape))
    assert got.verdict == "weak"
    assert got.control.nmse < 1e-9


def test_a_single_wrong_row_of_the_head_fails():
    def change(state: Tensors) -> None:
        state["lm_head.weight"][77] = -state["lm_head.weight"][77]

    got = run(stand_in(), stand_in(pairing="interleaved", change=change))
    assert got.verdict == "fail"
    assert got.distance.top1 > 0.9


def test_nan_never_passes():
    def change(state: Tensors) -> None:
        state["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")

    broken = stand_in(change=change)
    for a, b, who in ((stand_in(), broken, "B computes"), (broken, broken, "A and B compute")):
        got = run(a, b)
        assert got.verdict == "fail"
        assert (
            got.message.startswith(f"{who} values that are no finite numbers (") and "of 128 positions" in got.message
        )
        assert got.distance.as_json()["top1"] is None  # no token is the likeliest: neither 100 % nor 0 % is true
        json.dumps(got.as_json(), allow_nan=False)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_arithmetic(dtype):
    a, b = stand_in(), stand_in(pairing="interleaved", dtype="bfloat16")
    got = run(a, b, dtype=dtype)
    assert (got.verdict, got.dtype) == ("pass", dtype)
    b.pairing = "half"
    assert run(a, b, dtype=dtype).verdict == "fail"


def test_llama3_scaling_lost_fails():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    a = stand_in(scaling={**scaling, "original_max_position_embeddings": 32})
    assert run(a, stand_in(scaling={**scaling, "original_max_position_embeddings": 32})).verdict == "pass"
    lost = run(a, stand_in())
    assert (lost.verdict, lost.first_diff_position) == ("fail", 1)


def test_json_has_the_documented_keys():
    got = run(stand_in(), stand_in(pairing="interleaved")).as_json()
    assert list(got)[: len(KEYS)] == KEYS
    assert set(got) == {*KEYS, "tolerance", "noise", "dtype", "n_tokens", "layerwise", "departs", "message", "hints"}
    assert got["schema"] == SCHEMA == "convert.verify/1"
    assert (got["device"], got["dtype"], got["n_tokens"]) == ("cpu", "float32", 128)
    figures = {"max_abs", "nmse", "kl_max", "kl_mean", "top1", "first_diff_position"}
    assert figures <= set(got["control"])
    assert got["control"]["first_diff_position"] == 1
    assert (got["control"]["name"], got["control"]["seen"]) == ("rotary", True)
    json.dumps(got, allow_nan=False)


class Wrapped(Source):
    """A block-quantised tensor as a checkpoint hands it over: float32 values, the file's type below."""

    class Blocks(Source):
        def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
            self.shape, self.dtype = shape, dtype

        def read(self, start: int, stop: int) -> np.ndarray:
            raise NotImplementedError

    def __init__(self, values: np.ndarray, dtype: str) -> None:
        self.values, self.shape, self.dtype = values, values.shape, "F32"
        self.source = self.Blocks(values.shape, dtype)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.values[start:stop]


def _quantised(ckpt: StandIn, name: str) -> StandIn:
    """Every matrix through the gguf package's own quantiser."""
    quants = pytest.importorskip("gguf.quants")
    import gguf

    kind = getattr(gguf.GGMLQuantizationType, name)
    state: dict[str, Any] = {}
    for key, tensor in ckpt.state.items():
        state[key] = tensor
        if tensor.ndim == 2:
            state[key] = Wrapped(quants.dequantize(quants.quantize(tensor.float().numpy(), kind), kind), name)
    return replace(ckpt, state=state)


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_quantised_sides_have_the_tolerance_of_their_type(name):
    a = stand_in("kquant")
    b = _quantised(stand_in("kquant", pairing="interleaved"), name)
    assert stored_dtype(next(s for n, s in b.reference_tensors() if "W_query" in n)) == name
    got = run(a, b)
    assert got.distance.nmse <= got.tolerance
    assert got.verdict == ("pass" if name == "Q8_0" else got.verdict)
    assert got.verdict in ("pass", "weak")
    assert diff_tensors(a, b).same
    assert len(diff_tensors(a, b).close) == 16
    if name == "Q8_0":
        broken = replace(b, pairing="half")
        assert run(a, broken).verdict == "fail"
        # Errors of a coarser type than the file claims are found.
        assert (
            run(
                a, replace(b, state=_relabel(_quantised(stand_in("kquant", pairing="interleaved"), "Q4_0"), "Q8_0"))
            ).verdict
            == "fail"
        )


def _relabel(ckpt: StandIn, name: str) -> Tensors:
    return {k: Wrapped(t.values, name) if isinstance(t, Wrapped) else t for k, t in ckpt.state.items()}


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_imitated_rounding_is_as_large_as_the_real_one(name):
    package = pytest.importorskip("gguf.quants")
    import gguf

    kind = getattr(gguf.GGMLQuantizationType, name)
    weights = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    real = torch.from_numpy(package.dequantize(package.quantize(weights.numpy(), kind), kind))
    ratio = (round_through(weights, name) - weights).square().mean() / (real - weights).square().mean()
    assert 0.7 < ratio < 1.5


@pytest.mark.skipif(not ggml.available(), reason="needs the extra: quantize")
@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("before", ["F32", "Q4_1"])
def test_imitated_rounding_of_k_types_is_as_large_as_the_real_one(name, before):
    """Also of values that 4 bits hold already: what is lost is in the scales, which have few bits themselves."""
    weights = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    if before != "F32":
        weights = torch.from_numpy(quants.dequantize(quants.quantize(weights.numpy(), before), before))
    real = torch.from_numpy(quants.dequantize(quants.quantize(weights.numpy(), name), name))
    ratio = (round_through(weights, name) - weights).square().mean() / (real - weights).square().mean()
    assert 0.7 < ratio < 1.5


def test_rounding_of_plain_types():
    weights = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    for name, kind in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        assert torch.equal(round_through(weights, name), weights.to(kind).float())
    error = (weights.bfloat16().float() - weights) / weights
    assert error.square().mean().sqrt().item() == pytest.approx(grain("BF16"), rel=0.1)
    assert torch.equal(round_through(weights[0], "Q8_0"), weights[0])  # block types hold no vectors
    assert holds("F32", "BF16")
    assert holds("F32", "Q4_K")
    assert not holds("F16", "BF16")
    assert not holds("BF16", "F16")
    assert not holds("Q8_0", "F16")


def test_shaking_is_as_large_as_asked():
    model = torch.nn.Linear(300, 200)
    before = model.weight.clone()
    perturb(model, shake=1e-3)
    change = ((model.weight - before) / before).detach()
    torch.testing.assert_close(change.abs(), torch.full_like(change, 1e-3), rtol=1e-2, atol=0)
    assert abs(change.mean()) < 1e-4


def test_stored_type_is_found_below_wrappers():
    source = TensorSource(torch.zeros(8, 4, dtype=torch.bfloat16))
    assert stored_dtype(Rows(Cast(Joined([source, source], 0), "F32"), 0, 8)) == "BF16"


def test_fixed_tokens_visit_the_whole_vocabulary_in_no_order():
    ids = prompt.fixed_tokens(128256, 128)
    assert ids[:4] == prompt.fixed_tokens(128256, 128)[:4]
    assert sorted(i * 128 // 128256 for i in ids) == list(range(128))
    steps = np.diff(ids)
    assert 40 < (steps > 0).sum() < 88
    assert len(set(steps.tolist())) > 120
    assert all(0 <= i < 50 for i in prompt.fixed_tokens(50, 128))
    assert len(set(prompt.fixed_tokens(50, 128))) > 45


def test_fixed_tokens_never_change():
    """Results of different versions and machines can be compared."""
    assert prompt.fixed_tokens(32000, 8) == [20142, 29819, 3742, 16275, 7321, 27206, 13638, 9699]


def test_unusable_requests():
    a = stand_in()
    with pytest.raises(UsageError, match="int8"):
        run(a, a, dtype="int8")
    with pytest.raises(UsageError, match=r"\[128\] are outside"):
        run(a, a, tokens=[1, 128])
    with pytest.raises(UsageError, match="no tokens"):
        run(a, a, tokens=[])
    with pytest.raises(UsageError, match="not both"):
        run(a, a, tokens=[1], text="x")
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        run(a, a, text="x")
    with pytest.raises(ConvertError, match="A has 128 tokens and B has 96"):
        run(a, stand_in("std"))
    with pytest.raises(TableError, match="nosuch"):
        run(replace(a, table=SimpleNamespace(reference="nosuch")), a)


def test_text_is_encoded_by_the_tokenizer_beside_a_side(tmp_path):
    pytest.importorskip("tokenizers")
    from tests.fixtures.tokenizer import save_tokenizer

    save_tokenizer(tmp_path, 128)
    a, b = stand_in(), replace(stand_in(), path=tmp_path)
    got = run(a, b, text="The llama asks what a llama eats, and another llama says: grass, of course. " * 3)
    assert got.n_tokens >= 30
    assert got.verdict == "pass"


@torch.no_grad()
def test_loading_is_load_state_dict():
    shape = get_shape("gqa8")
    ckpt = stand_in(shape, attention_bias=True, mlp_bias=True)
    ids = tokens(shape)
    model = load_reference(ckpt)
    assert torch.equal(model(ids), model_of(ckpt.state, ckpt.config)(ids))
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())
    # No layout but Hugging Face's has a key for biases: the tensors tell.
    ckpt.config |= {"attention_bias": False, "mlp_bias": False}
    assert torch.equal(load_reference(ckpt)(ids), model(ids))


def test_tied_and_stored_twice():
    tied = load_reference(stand_in("tied"))
    assert tied.out_head.weight is tied.tok_emb.weight
    twice = stand_in("tied")
    twice.state["lm_head.weight"] = twice.state["model.embed_tokens.weight"] * 2
    model = load_reference(twice)
    assert torch.equal(model.out_head.weight, model.tok_emb.weight * 2)  # as stored, whatever is claimed


def test_every_parameter_exactly_once():
    ckpt = stand_in()
    pairs = dict(ckpt.reference_tensors())
    pairs.pop("trf_blocks.1.norm2.weight")
    pairs["final_norm.weight"] = TensorSource(torch.zeros(65))
    pairs["trf_blocks.7.norm2.weight"] = TensorSource(torch.zeros(64))
    doubled = [*pairs.items(), ("tok_emb.weight", pairs["tok_emb.weight"])]
    model = model_of(ckpt.state, ckpt.config)
    with pytest.raises(ConvertError) as caught:
        fill(model, doubled, device="cpu", dtype=torch.float32)
    assert sorted(p.kind for p in caught.value.problems) == [
        "duplicate_tensor",
        "missing_tensor",
        "shape",
        "unexpected_tensor",
    ]
    assert not any(s.reads for s in pairs.values())
    integers = TensorSource(torch.zeros(64))
    integers.dtype = "I8"
    with pytest.raises(ConvertError, match="I8"):
        fill(
            model,
            [*dict(ckpt.reference_tensors(), **{"final_norm.weight": integers}).items()],
            device="cpu",
            dtype=torch.float32,
        )


def test_values_come_in_aligned_blocks(monkeypatch):
    from convert.reference import loading

    monkeypatch.setattr(loading, "BLOCK_BYTES", 1000)
    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensor = torch.randn(50, 16, generator=torch.Generator().manual_seed(0)).to(kind)
        source = TensorSource(tensor, align=6)
        got = read_tensor(source, device="cpu", dtype=torch.float32)
        assert torch.equal(got, tensor.float())
        assert len(source.reads) > 1
        assert all(start % 6 == 0 for start, _ in source.reads)
        assert max(b - a for a, b in source.reads) * 16 * DTYPES[source.dtype].block_bytes <= 1000
