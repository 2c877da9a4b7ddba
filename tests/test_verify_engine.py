"""verify --engine llama.cpp: sound exports pass, wrong ones fail, what proves nothing is weak; for every type."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import convert
from convert.cli import cli, run
from convert.engines import llama_cpp
from convert.errors import ConvertError, UsageError
from convert.verify_engine import FLOOR, _rounded_gelu, prefixes, round_input, verify_engine
from tests.fixtures import ggml as ggml_fixtures
from tests.fixtures import make_gguf, make_hf
from tests.fixtures.weights import to_interleaved

pytest.importorskip("xllamacpp")


def test_prefixes_reach_from_one_token_to_all():
    assert prefixes(128) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert prefixes(5) == [1, 2, 3, 4, 5]
    assert prefixes(1) == [1]


@pytest.mark.parametrize("shape", ["gqa8", "tied"])
def test_a_float32_export_is_the_hugging_face_model(tmp_path, shape):
    a, b = make_gguf(tmp_path / "a.gguf", shape), make_hf(tmp_path / "b", shape)
    got = verify_engine(a.path, b.path, device="cpu")
    assert got.verdict == "pass"
    assert got.exit_code == 0
    assert got.distance.max_abs < 1e-4
    assert got.tolerance_abs == 2e-4
    assert got.control_seen
    assert got.control.kl_mean > 0.3
    assert got.control.max_abs > 1000 * got.tolerance_abs
    assert got.positions[-1] == 127


def test_llama3_scaling_and_biases(tmp_path):
    options = {"scaling": 8, "attention_bias": True}
    a, b = make_gguf(tmp_path / "a.gguf", "std", **options), make_hf(tmp_path / "b", "std", **options)
    assert verify_engine(a.path, b.path, device="cpu").verdict == "pass"
    unscaled = make_hf(tmp_path / "c", "std", attention_bias=True)
    got = verify_engine(a.path, unscaled.path, device="cpu")
    assert got.verdict == "fail"
    assert got.first_diff_position > 0


def permuted_wrongly(kind):
    """A stand-in for the fixture's permutation of Q and K."""
    return {
        "not at all": lambda rows, heads: rows,
        "twice": lambda rows, heads: to_interleaved(to_interleaved(rows, heads), heads),
        "K by the wrong head count": lambda rows, heads: to_interleaved(rows, 8 // heads if heads == 2 else heads),
    }[kind]


@pytest.mark.parametrize("kind", ["not at all", "twice", "K by the wrong head count"])
@pytest.mark.parametrize("type", ["f32", "q8_0"])
def test_q_and_k_permuted_wrongly_fail(tmp_path, monkeypatch, kind, type):
    monkeypatch.setattr(ggml_fixtures, "to_interleaved", permuted_wrongly(kind))
    a = make_gguf(tmp_path / "a.gguf", "gqa8", type=type)
    monkeypatch.undo()
    b = make_hf(tmp_path / "b", "gqa8")
    got = verify_engine(a.path, b.path, device="cpu")
    assert got.verdict == "fail"
    assert got.exit_code == 1
    assert got.first_diff_position == 1 if type == "f32" else got.first_diff_position > 0  # at 0 nothing turns
    if kind == "not at all" and type == "f32":
        assert "They agree once the reference runs with the rows of Q and K in the other rotary order" in got.hints[0]


def test_other_faults_fail(tmp_path):
    a = make_gguf(tmp_path / "a.gguf", "gqa8")
    other = make_hf(tmp_path / "b", "gqa8", seed=1)
    got = verify_engine(a.path, other.path, device="cpu")
    assert (got.verdict, got.first_diff_position) == ("fail", 0)
    with pytest.raises(ConvertError, match="128 tokens and B has 96"):
        verify_engine(a.path, make_hf(tmp_path / "c", "std").path, device="cpu")


@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0", "q4_1", "q5_0"])
def test_each_type_against_its_own_dequantised_tensors(tmp_path, type):
    """The estimate is the rounding that ggml really does: what is found lies near it, not merely below."""
    a = make_gguf(tmp_path / "a.gguf", "gqa8", type=type)
    got = verify_engine(a.path, device="cpu")
    assert got.verdict == "pass"
    assert 0.3 < got.distance.nmse / got.noise < 4
    assert got.control.nmse > 100 * got.tolerance
    assert not got.hints


@pytest.mark.parametrize("type", ["q4_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_types_only_ggml_can_write(tmp_path, type):
    hf = make_hf(tmp_path / "hf", "kquant")
    out = tmp_path / "a.gguf"
    try:
        convert.convert_checkpoint(hf.path, out, to="gguf", type=type, tokenizer=False)
    except ConvertError as error:
        pytest.skip(str(error))
    got = verify_engine(out, device="cpu")
    assert got.verdict == "pass"
    assert 0.3 < got.distance.nmse / got.noise < 4


@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0"])
def test_each_type_against_the_original(tmp_path, type):
    a, b = make_gguf(tmp_path / "a.gguf", "gqa8", type=type), make_hf(tmp_path / "b", "gqa8")
    got = verify_engine(a.path, b.path, device="cpu")
    assert got.verdict == "pass"
    assert "more coarsely" in got.hints[0]


def test_an_original_stored_more_coarsely_than_the_file(tmp_path):
    """From a q8_0 file to a bfloat16 folder: the folder lost something, and that is allowed for."""
    a = make_gguf(tmp_path / "a.gguf", "gqa8", type="q8_0")
    convert.convert_checkpoint(a.path, tmp_path / "b", to="hf", dtype="bfloat16")
    assert verify_engine(a.path, tmp_path / "b", device="cpu").verdict == "pass"


def test_a_coarser_type_that_lost_nothing_allows_nothing(tmp_path):
    """float32 holds what float16 held: the tolerance is that of float32."""
    hf = make_hf(tmp_path / "hf", "gqa8", dtype="float16")
    convert.convert_checkpoint(hf.path, tmp_path / "a.gguf", to="gguf", type="f32", tokenizer=False)
    got = verify_engine(tmp_path / "a.gguf", hf.path, device="cpu")
    assert got.verdict == "pass"
    assert got.tolerance_abs == 2e-4
    assert not got.hints


def test_what_proves_nothing_is_weak(tmp_path):
    a = make_gguf(tmp_path / "a.gguf", "gqa8")
    few = verify_engine(a.path, device="cpu", n_tokens=8)
    assert (few.verdict, few.exit_code) == ("weak", 3)
    assert "8 tokens are too few" in few.message


def test_near_untrained_weights_are_weak(tmp_path, monkeypatch):
    state = ggml_fixtures.hf_state
    monkeypatch.setattr(
        ggml_fixtures,
        "hf_state",
        lambda *a, **k: {n: t * 0.1 if t.ndim == 2 else t for n, t in state(*a, **k).items()},
    )
    a = make_gguf(tmp_path / "a.gguf", "std")
    got = verify_engine(a.path, device="cpu")
    assert got.verdict == "weak"
    assert "would look nearly the same" in got.message


def test_values_that_are_no_numbers_fail(tmp_path, monkeypatch):
    a = make_gguf(tmp_path / "a.gguf", "std")
    monkeypatch.setattr(
        llama_cpp, "logprobs", lambda path, prompts: np.full((len(prompts), 96), np.nan, dtype=np.float32)
    )
    got = verify_engine(a.path, device="cpu")
    assert got.verdict == "fail"
    assert "no finite numbers" in got.message
    assert got.as_json()["max_abs"] is None


def test_requests_that_make_no_sense(tmp_path):
    a, hf = make_gguf(tmp_path / "a.gguf", "std"), make_hf(tmp_path / "hf", "std")
    with pytest.raises(UsageError, match="runs GGUF files") as error:
        verify_engine(hf.path, a.path)
    assert "hf-to-gguf" in error.value.problems[0].hint
    with pytest.raises(UsageError, match="no engine"):
        verify_engine(a.path, engine="other")
    with pytest.raises(UsageError, match="float32 or float64"):
        verify_engine(a.path, dtype="float16")
    with pytest.raises(UsageError, match="room for 510"):
        verify_engine(a.path, tokens=[1] * 511)


def test_round_input_is_what_ggml_multiplies():
    """Against the gguf package's own quantiser, and torch's casts."""
    import gguf

    x = torch.from_numpy(np.random.default_rng(0).normal(0, 1, (5, 256)).astype(np.float32))
    wanted = gguf.quants.dequantize(
        gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
    )
    step = x.abs().unflatten(-1, (-1, 32)).amax(-1) / 127
    off = (round_input(x, "Q4_0") - torch.from_numpy(wanted)).unflatten(-1, (-1, 32)).abs().amax(-1)
    assert (off < step * 0.1).float().mean() > 0.9  # a scale in float16, and ties, differ
    assert (off <= step * 1.1).all()
    assert round_input(x, "F32") is x
    assert torch.equal(round_input(x, "F16"), x.half().float())
    assert not torch.equal(round_input(x, "Q6_K"), round_input(x, "Q4_0"))


def test_gelu_is_rounded_as_ggml_looks_it_up(tmp_path):
    """A float32 file of a GELU family differs by more than other ones do, and that is no fault."""
    from tests.families.gemma import gelu_table
    from tests.families.test_gemma3 import make

    x = torch.linspace(-12, 12, 4001)
    for approximate in ("none", "tanh"):
        with _rounded_gelu():
            found = torch.nn.functional.gelu(x, approximate=approximate)
        assert torch.equal(found, gelu_table(x, approximate))
        assert not torch.equal(torch.nn.functional.gelu(x, approximate=approximate), found)
    made = make(tmp_path / "hf")
    convert.convert_checkpoint(made.path, tmp_path / "a.gguf", to="gguf", type="f32", tokenizer=False)
    found = verify_engine(tmp_path / "a.gguf", made.path)
    assert found.verdict == "pass" and found.distance.max_abs > FLOOR, found.message
    with torch.no_grad():  # the control: one number of one norm off
        made.model.model.layers[1].post_feedforward_layernorm.weight[3] += 0.02
    made.model.save_pretrained(tmp_path / "other")
    assert verify_engine(tmp_path / "a.gguf", tmp_path / "other").verdict == "fail"


def test_the_command_line(tmp_path, capsys):
    a, b = make_gguf(tmp_path / "a.gguf", "std"), make_hf(tmp_path / "b", "std")
    assert run(cli, ["verify", str(a.path), str(b.path), "--engine", "llama.cpp", "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "convert.verify/1"
    assert told["engine"] == "llama.cpp"
    assert told["verdict"] == "pass"
    assert told["positions"][0] == 0
    assert told["control"]["first_diff_position"] == 1
    keys = [
        "schema",
        "verdict",
        "device",
        "max_abs",
        "nmse",
        "kl_max",
        "kl_mean",
        "top1",
        "first_diff_position",
        "control",
    ]
    assert list(told)[: len(keys)] == keys
    assert run(cli, ["verify", str(a.path), "--engine", "llama.cpp", "--device", "cpu", "--tokens", "8"]) == 3
    assert "A in llama.cpp" in capsys.readouterr().out
    other = make_hf(tmp_path / "c", "std", seed=1)
    assert run(cli, ["verify", str(a.path), str(other.path), "--engine", "llama.cpp", "-q"]) == 1
    assert run(cli, ["verify", str(b.path), "--engine", "llama.cpp"]) == 2
    assert run(cli, ["verify", str(a.path)]) == 2
    assert "Only --engine llama.cpp" in capsys.readouterr().err
