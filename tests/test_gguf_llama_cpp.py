"""Real llama.cpp loads every file that we write and agrees with transformers on whole-vocabulary log-probabilities."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import convert
from convert import ggml
from convert.engines.llama_cpp import logprobs
from tests.fixtures import SHAPES, Fixture, make_gguf, make_hf, make_meta, make_scratch, tokens
from tests.fixtures.ggml import hf_from_gguf
from tests.fixtures.hf import hf_config
from tests.fixtures.tokenizer import save_tokenizer
from tests.fixtures.weights import llama3_scaling
from tests.gguf_files import pieces, values

pytest.importorskip("xllamacpp")
transformers = pytest.importorskip("transformers")

LENGTHS = (1, 7, 40, 128)


def ids(made: Fixture) -> list[list[int]]:
    row = tokens(made.shape)[0].tolist()
    return [row[:n] for n in LENGTHS]


def expected(made: Fixture, state: dict[str, torch.Tensor] | None = None, **changes: object) -> np.ndarray:
    """transformers' log-probabilities after each prompt, in float32."""
    state = made.hf if state is None else state
    biases = {
        kind: any(part in k and k.endswith("bias") for k in state)
        for kind, part in (("attention_bias", "self_attn"), ("mlp_bias", "mlp"))
    }
    config = transformers.LlamaConfig(**hf_config(made.shape, dtype="float32", **biases) | changes)
    model = transformers.LlamaForCausalLM(config).eval()
    loaded = model.load_state_dict({k: v.float() for k, v in state.items()}, strict=False)
    assert not loaded.unexpected_keys and set(loaded.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        rows = model(tokens(made.shape)).logits[0].double().log_softmax(-1)
    return rows[[n - 1 for n in LENGTHS]].numpy()


def check(out: Path, made: Fixture, *, within: float = 2e-4, **changes: object) -> None:
    """The file agrees, and does not agree with the model whose K rows are in the other order."""
    found = logprobs(out, ids(made), threads=1)
    off = np.abs(found - expected(made, **changes)).max()
    assert off < within, off
    broken = dict(made.hf)
    for name in made.hf:
        if "k_proj.weight" in name:
            broken[name] = (
                made.hf[name].view(made.shape.kv_heads, -1, made.hf[name].shape[1]).flip(1).reshape(made.hf[name].shape)
            )
    assert np.abs(found - expected(made, broken, **changes))[1:].max() > max(0.05, 10 * within)


def check_widened(out: Path, made: Fixture) -> None:
    """Sharper: the same values as float32, so that llama.cpp rounds no activations."""
    wide = out.with_name("wide.gguf")
    convert.convert_checkpoint(out, wide, to="gguf", type="f32")
    check(wide, made)


def export(made: Fixture, out: Path, type: str = "f32", **options: object) -> Path:
    options.setdefault("tokenizer", (made.path / "tokenizer.json").is_file())
    convert.convert_checkpoint(made.path, out, to="gguf", type=type, **options)
    return out


# ---- what can be odd about a model -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["gqa8", "gqa6", "h32kv4", "mha", "hd6", "tied"])
def test_f32(tmp_path, shape):
    made = make_hf(tmp_path / "source", shape, tokenizer=True)
    check(export(made, tmp_path / "a.gguf"), made)


def test_biases(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8", attention_bias=True, mlp_bias=True, tokenizer=True)
    check(export(made, tmp_path / "a.gguf"), made)


def test_explicit_head_dim(tmp_path):
    made = make_hf(tmp_path / "source", replace(SHAPES["gqa8"], head_dim=16), tokenizer=True)
    check(export(made, tmp_path / "a.gguf"), made)


def test_llama3_scaling(tmp_path):
    scaling = llama3_scaling(8) | {"original_max_position_embeddings": 64}  # so that 128 tokens feel it
    made = make_hf(tmp_path / "source", "hd16", scaling=scaling, tokenizer=True)
    out = export(made, tmp_path / "a.gguf")
    parameters = scaling | {"rope_theta": made.shape.theta}
    check(out, made, rope_parameters=parameters)
    unscaled = np.abs(logprobs(out, ids(made), threads=1) - expected(made))[-1].max()
    assert unscaled > 0.01  # the control: without the scaling it is another model


def test_linear_scaling(tmp_path):
    made = make_hf(tmp_path / "source", "hd16", scaling={"rope_type": "linear", "factor": 4.0}, tokenizer=True)
    out = export(made, tmp_path / "a.gguf")
    check(out, made, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": made.shape.theta})
    assert np.abs(logprobs(out, ids(made), threads=1) - expected(made))[-1].max() > 0.01


def test_yarn(tmp_path):
    """Stretched four times from 32 positions; llama.cpp computes the attention factor itself."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    made = make_hf(tmp_path / "source", "hd16", scaling=yarn, tokenizer=True)
    out = export(made, tmp_path / "a.gguf")
    check(out, made, rope_parameters=yarn | {"rope_theta": made.shape.theta})
    assert np.abs(logprobs(out, ids(made), threads=1) - expected(made))[-1].max() > 0.01
    convert.convert_checkpoint(out, tmp_path / "back", to="hf")
    back = json.loads((tmp_path / "back" / "config.json").read_text())["rope_parameters"]
    assert {k: back[k] for k in yarn} == yarn and back["attention_factor"] == pytest.approx(1.13862943611)


def test_a_window_that_llama_cpp_does_not_heed_is_noted(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8", tokenizer=True)
    config = json.loads((made.path / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 32}
    (made.path / "config.json").write_text(json.dumps(config))
    summary = convert.convert_checkpoint(made.path, tmp_path / "a.gguf", to="gguf", type="f32")
    assert any("sliding_window = 32" in note and "attends to all" in note for note in summary.notes)
    check(tmp_path / "a.gguf", made)  # 128 tokens, and full attention


def test_a_padded_vocabulary_and_none(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8", tokenizer=100)
    check(export(made, tmp_path / "a.gguf"), made)
    check(export(made, tmp_path / "b.gguf", tokenizer=False), made)  # the engine puts a placeholder in


def test_three_files(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8", tokenizer=True)
    size = export(made, tmp_path / "one.gguf").stat().st_size
    export(made, tmp_path / "a.gguf", split_max_size=int(size * 0.4))
    assert len(pieces(tmp_path / "a.gguf")) == 3
    check(pieces(tmp_path / "a.gguf")[0], made)


@pytest.mark.parametrize("maker", [make_meta, make_scratch])
def test_from_meta_and_from_scratch_in_one_step(tmp_path, maker):
    made = maker(tmp_path / "source", "gqa8")
    (tmp_path / "t").mkdir()
    save_tokenizer(tmp_path / "t", made.shape.vocab)
    out = export(made, tmp_path / "a.gguf", tokenizer=True, tokenizer_path=tmp_path / "t")
    check(out, made)


def test_from_gguf(tmp_path):
    made = make_gguf(tmp_path / "m.gguf", "gqa8")
    check(export(made, tmp_path / "a.gguf", tokenizer=True), made)


# ---- types -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", ["f16", "bf16"])
def test_16_bits(tmp_path, type):
    """Against the same rounding in torch; llama.cpp multiplies float16 and bfloat16 rows with like activations."""
    made = make_hf(tmp_path / "source", "gqa8", tokenizer=True)
    out = export(made, tmp_path / "a.gguf", type)
    kind = torch.float16 if type == "f16" else torch.bfloat16
    made = replace(made, hf={k: v.to(kind).float() if v.ndim == 2 else v for k, v in made.hf.items()})
    check(out, made, within=2e-2 if type == "f16" else 0.16)  # 2^-11 and 2^-8: eight times
    check_widened(out, made)


@pytest.mark.parametrize(
    "type",
    [
        "q8_0",
        "q4_0",
        "q5_1",
        *(
            pytest.param(t, marks=pytest.mark.skipif(not ggml.available(), reason="ggml"))
            for t in ("q2_k", "q3_k_m", "q4_k_m", "q6_k")
        ),
    ],
)
def test_blocks_against_their_own_dequantised_values(tmp_path, type):
    """llama.cpp rounds activations to 8 bits for these types; that error stays, order faults are ten times larger."""
    made = make_hf(tmp_path / "source", "kquant", tokenizer=True)
    out = export(made, tmp_path / "a.gguf", type)
    stored = {k: torch.from_numpy(v.copy()) for k, v in values(out).items()}
    made = replace(made, hf=hf_from_gguf(stored, made.shape))
    found, wanted = logprobs(out, ids(made), threads=1), expected(made)
    off = np.abs(found - wanted)
    roped = {k: v.flip(0) if "k_proj" in k else v for k, v in made.hf.items()}
    control = np.abs(found - expected(made, roped))
    assert off.mean() < 0.5 and control.mean() > 5 * off.mean(), (off.mean(), off.max(), control.mean())
    check_widened(out, made)


def test_rows_that_fell_back(tmp_path):
    made = make_hf(tmp_path / "source", "std", tokenizer=True)  # 48 columns do not hold blocks of 32: all F16
    out = export(made, tmp_path / "a.gguf", "q8_0")
    made = replace(made, hf={k: v.half().float() if v.ndim == 2 else v for k, v in made.hf.items()})
    check(out, made, within=2e-2)
    check_widened(out, made)
