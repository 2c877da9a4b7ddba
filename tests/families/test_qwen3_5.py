"""Qwen3.5, dense text: key sets, configs, reference, every pair of layouts, every fault, real llama.cpp."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

import convert
from convert import config as configs
from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError
from convert.inspect import inspect
from convert.reference.delta import gated_delta_rule
from convert.reference.layers import KVCache
from convert.reference.loading import load_reference
from convert.reference.qwen3_5 import build as build_reference
from convert.table import build, load_table
from convert.tokenizer.pretokenizers import QWEN35
from tests.families import faults, golden
from tests.families.mixed import LENGTH, Tiny, converted, off, prompt, reference, run_reference
from tests.gguf_files import keys as gguf_keys
from tests.gguf_files import values as gguf_values
from tests.reference.models import one_thread  # noqa: F401
from tests.tokenizer import trained

transformers = pytest.importorskip("transformers")

FAMILY = "qwen3_5"
KEYS = json.loads((Path(__file__).parents[1] / "data" / f"{FAMILY}_keys.json").read_text(encoding="utf-8"))
LINEAR, FULL = "linear_attention", "full_attention"
KINDS = [LINEAR, LINEAR, FULL, LINEAR, FULL]
#: 8 query heads on 2; two key heads of a linear layer with three value heads each; a quarter of each head turns.
SMALL: dict[str, Any] = {
    "vocab_size": 112,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "layer_types": KINDS,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
TOLERANCE = 1e-4
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "as many value heads as key heads": {"linear_num_value_heads": 2},
    "value heads of another size": {"linear_value_head_dim": 12},
    "half of each head turns": {"rope_parameters": SMALL["rope_parameters"] | {"partial_rotary_factor": 0.5}},
    "linear scaling": {"rope_parameters": SMALL["rope_parameters"] | {"rope_type": "linear", "factor": 4.0}},
    "six taps": {"linear_conv_kernel_dim": 6},
    "biases": {"attention_bias": True},
    "only linear layers": {"layer_types": [LINEAR] * 5},
}


def make(path: Path, *, seed: int = 0, **changes: Any) -> Tiny:
    """Norms within ±0.5 of the scale 1, those of Q and K of scale 1.5 to 2.5, slow and fast decay, std 0.2 else."""
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**copy.deepcopy(SMALL) | changes)).eval()
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            low, high = next((r for part, r in _RANGES.items() if part in name), (0.0, 0.0))
            values = rng.uniform(low, high, parameter.shape) if high else rng.normal(0, 0.2, parameter.shape)
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    model.save_pretrained(path)
    model.config.use_cache = False  # transformers' cannot hold linear layers alone
    return Tiny(path, model, {k: v.detach().clone() for k, v in model.state_dict().items()})


_RANGES = {
    "linear_attn.norm": (0.5, 1.5),
    "q_norm": (0.5, 1.5),
    "k_norm": (0.5, 1.5),
    "norm": (-0.5, 0.5),
    "A_log": (-3.0, 1.0),
    "dt_bias": (-1.0, 1.0),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make(tmp_path_factory.mktemp("qwen3_5") / "hf")


def read(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    assert not [k for k in wanted if found[k].dtype != wanted[k].dtype or not torch.equal(found[k], wanted[k])]


def text_keys(case: dict[str, Any]) -> dict[str, list[int]]:
    """Keys of the text part under the text model's names."""
    kept = {k: v for k, v in case["keys"].items() if "visual" not in k}
    return {k.replace("model.language_model.", "model."): v for k, v in kept.items()}


# ---- names, shapes, configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(KEYS))
def test_the_very_keys_and_shapes_that_the_classes_have(name):
    layout, case = name.split("/")[0], KEYS[name]
    hub = configs.to_hub(load_table(FAMILY), layout, case["config"])
    assert golden.shapes(FAMILY, layout, hub) == text_keys(case)
    for change in ({"layer_types": hub["layer_types"][::-1]}, {"linear_value_head_dim": hub["head_dim"] + 2}):
        assert golden.shapes(FAMILY, layout, hub | change) != text_keys(case)


@pytest.mark.parametrize("layout", ["hf", "scratch", "gguf"])
def test_golden(layout):
    assert golden.same(FAMILY, layout, SMALL), "if this is meant, run python -m tests.families.test_qwen3_5"


def test_published_size():
    """As the book counts it, built on meta: 321 tensors, 1,006,672,704 numbers, 752,393,024 with the head tied."""
    table = load_table(FAMILY)
    hub = configs.published(table, "qwen3.5-0.8b")
    for layout in table.layouts:
        found = golden.shapes(FAMILY, layout, hub)
        assert len(found) == 321 and sum(int(np.prod(s)) for s in found.values()) == 1_006_672_704
    assert hub["tie_word_embeddings"] and 1_006_672_704 - 248320 * 1024 == 752_393_024
    assert hub["layer_types"] == ([LINEAR] * 3 + [FULL]) * 6
    book = configs.to_scratch(table, hub, "BF16")
    wanted = {  # the notebook's own dict
        **{"vocab_size": 248_320, "context_length": 262_144, "emb_dim": 1_024, "n_heads": 8, "n_layers": 24},
        **{"hidden_dim": 3_584, "head_dim": 256, "qk_norm": True, "n_kv_groups": 2, "rope_base": 10_000_000.0},
        **{"partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16},
        **{"linear_num_value_heads": 16, "layer_types": hub["layer_types"], "dtype": "bfloat16"},
    }
    assert {k: book[k] for k in wanted} == wanted


def test_configs_of_every_spelling_say_the_same(made, tmp_path):
    table = load_table(FAMILY)
    new = json.loads((made.path / "config.json").read_text())
    hub = configs.to_hub(table, "hf", new)
    assert hub["partial_rotary_factor"] == 0.25 and "partial_rotary_factor" not in hub["rope_parameters"]
    flat = {k: v for k, v in new.items() if k != "rope_parameters"} | {"rope_theta": 1e4, "partial_rotary_factor": 0.25}
    spelt = [flat, {"text_config": new, "model_type": "qwen3_5", "vision_config": {"depth": 1}}]
    found = [configs.to_hub(table, "hf", raw) for raw in spelt]
    book = configs.to_scratch(table, hub, "F32")
    found.append(configs.to_hub(table, "scratch", {k: v for k, v in book.items() if k not in ("family", "layout")}))
    keys = [k for k in SMALL if k != "rope_parameters"]
    for other in found:
        assert {k: other[k] for k in keys} == {k: hub[k] for k in keys} == {k: SMALL[k] for k in keys}
        assert other["partial_rotary_factor"] == 0.25 and other["rope_parameters"] == hub["rope_parameters"]
    # a period in the place of the kinds; transformers reads what we write as what it was
    periodic = {k: v for k, v in new.items() if k != "layer_types"}
    for raw, period in ((periodic, 4), (periodic | {"full_attention_interval": 3}, 3)):
        kinds = configs.to_hub(table, "hf", raw)["layer_types"]
        assert (
            kinds
            == transformers.Qwen3_5TextConfig(**raw).layer_types
            == [FULL if i % period == period - 1 else LINEAR for i in range(5)]
        )
    more = {"mrope_section": [11, 11, 10], "mrope_interleaved": True, "rope_theta": 1e7, "rope_type": "default"}
    released = configs.to_hub(table, "hf", new | {"rope_parameters": more | {"partial_rotary_factor": 0.5}})
    written = configs.to_hf(table, released, "F32")
    assert written["rope_parameters"] == more | {"partial_rotary_factor": 0.5} and "mrope_section" not in written
    again = transformers.Qwen3_5TextConfig(**{k: v for k, v in written.items() if k != "architectures"})
    assert again.rope_parameters == written["rope_parameters"] and again.layer_types == KINDS
    for section in ([1, 2], [], [1, 2, 3, 4]):
        with pytest.raises(ConvertError, match="mrope_section has"):
            configs.to_hub(table, "hf", new | {"rope_parameters": more | {"mrope_section": section}})
    with pytest.raises(ConvertError, match="4 entries for 5 layers"):
        configs.to_hub(table, "hf", new | {"layer_types": KINDS[:4]})


# ---- the reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers(tmp_path, case):
    made = make(tmp_path / "hf", **CASES[case])
    wanted, ids = made.logits, prompt(SMALL["vocab_size"])
    model = reference(made.path)
    found = model(ids)
    assert off(found, wanted) < TOLERANCE
    exact = made.model.double()(ids).logits
    assert off(found, exact) <= 4 * max(off(wanted, exact), 2e-6)
    cache = KVCache(model.n_layers)  # and a cache changes nothing, cut within and at the ends of chunks
    parts = [model(ids[:, a:b], cache) for a, b in ((0, 2), (2, 64), (64, 65), (65, 150), (150, LENGTH))]
    torch.testing.assert_close(torch.cat(parts, 1), found, rtol=1e-5, atol=3e-4)  # as far as float32 goes here
    assert cache.length == LENGTH


@torch.no_grad()
def test_each_fault_is_far_from_transformers(made):
    wanted, ids, model = made.logits, prompt(SMALL["vocab_size"]), reference(made.path)
    with open_checkpoint(made.path) as opened:
        config = dict(opened.config)
    state = dict(model.state_dict())
    assert off(model(ids), wanted) < TOLERANCE
    with model.controls[0].apply(model):
        assert off(model(ids), wanted) > 100 * TOLERANCE
    table, checked = load_table(FAMILY), 0
    for layer in (0, 2):
        for one, other in faults.pairs(FAMILY, config, "scratch", at=layer):
            a, b = (_name(table, row, layer) for row in (one, other))
            model.load_state_dict(state | {a: state[b], b: state[a]}, strict=True)
            assert off(model(ids), wanted) > 100 * TOLERANCE, (one, other)
            checked += 1
    assert checked >= 10
    n, d, keys = 6, 8, 16  # value heads put in order although they were
    order = torch.arange(n * d).reshape(2, 3, d).swapaxes(0, 1).flatten()
    for name, wrong in {
        "in_proj_z.weight": lambda w: w[order],
        "out_proj.weight": lambda w: w[:, order],
        "in_proj_qkv.weight": lambda w: torch.cat([w[: 2 * keys], w[2 * keys :][order]]),
        "conv1d.weight": lambda w: torch.cat([w[: 2 * keys], w[2 * keys :][order]]),
        "A_log": lambda w: w[torch.arange(n).reshape(2, 3).T.flatten()],
        "dt_bias": lambda w: -w,
        "norm.weight": lambda w: w - 1,
    }.items():
        name = f"trf_blocks.1.token_mixer.{name}"
        model.load_state_dict(state | {name: wrong(state[name])}, strict=True)
        assert off(model(ids), wanted) > 100 * TOLERANCE, name
    query = "trf_blocks.2.token_mixer.W_query.weight"  # all queries, then all gates
    apart = state[query].reshape(8, 2, 32, -1).swapaxes(0, 1).reshape(state[query].shape)
    model.load_state_dict(state | {query: apart}, strict=True)
    assert off(model(ids), wanted) > 100 * TOLERANCE


def _name(table: Any, row_id: str, layer: int) -> str:
    name = table.rows[row_id].names["scratch"]
    return f"trf_blocks.{layer}.{name}" if row_id.startswith("block") else name


def test_chunks_compute_what_the_loop_over_tokens_does():
    """The definition, token by token in float64, whatever the chunk."""
    torch.manual_seed(0)
    q, k = torch.nn.functional.normalize(torch.randn(2, 2, 3, 70, 8, dtype=torch.float64), dim=-1)
    v, rate = torch.randn(2, 3, 70, 5, dtype=torch.float64), torch.rand(2, 3, 70, dtype=torch.float64)
    decay, start = -torch.rand(2, 3, 70, dtype=torch.float64) * 3, torch.randn(2, 3, 8, 5, dtype=torch.float64)
    memory, reads = start, []
    for t in range(70):
        memory = memory * decay[:, :, t, None, None].exp()
        missing = v[:, :, t] - torch.einsum("bhkv,bhk->bhv", memory, k[:, :, t])
        memory = memory + torch.einsum("bhk,bhv->bhkv", k[:, :, t], missing * rate[:, :, t, None])
        reads.append(torch.einsum("bhkv,bhk->bhv", memory, q[:, :, t]))
    for chunk in (1, 7, 64, 128):
        read, last = gated_delta_rule(q, k, v, log_decay=decay, rate=rate, state=start, chunk=chunk)
        assert off(read, torch.stack(reads, 2)) < 1e-12 and off(last, memory) < 1e-12
    fresh, _ = gated_delta_rule(q, k, v, log_decay=decay, rate=rate)
    assert off(fresh, torch.stack(reads, 2)) > 0.1  # the memory before does matter
    strong, _ = gated_delta_rule(q.float(), k.float(), v.float(), log_decay=1e3 * decay.float(), rate=rate.float())
    assert strong.isfinite().all()


# ---- there and back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "tied", "as many value heads as key heads", "value heads of another size"])
def test_scratch_and_back_is_bit_equal(tmp_path, case):
    made = make(tmp_path / "hf", **CASES[case])
    report = convert.convert_checkpoint(made.path, tmp_path / "scratch", to="scratch")
    assert not any("computed" in note for note in report.notes)
    book = read(tmp_path / "scratch")
    assert torch.equal(book["trf_blocks.1.norm1.weight"], made.state["model.layers.1.input_layernorm.weight"])  # no +1
    assert book["trf_blocks.0.token_mixer.conv1d.weight"].ndim == 3 and "out_head.weight" in book
    convert.convert_checkpoint(tmp_path / "scratch", tmp_path / "back", to="hf")
    same(read(tmp_path / "back"), read(made.path))
    was, now = (json.loads((p / "config.json").read_text()) for p in (made.path, tmp_path / "back"))
    assert {k: now[k] for k in was if k != "transformers_version"} == {
        k: v for k, v in was.items() if k != "transformers_version"
    }
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        assert off(model(prompt(SMALL["vocab_size"])).logits, made.logits) == 0.0
    assert convert.verify(made.path, tmp_path / "scratch", device="cpu").verdict == "pass"


#: What is computed on the way to GGUF and back: the scale ± 1, and the logarithm of the exponential.
ROUNDED = {"norm": 2.0**-23, "A_log": 2.0**-21}


@pytest.mark.parametrize("case", ["plain", "tied", "as many value heads as key heads", "half of each head turns"])
def test_gguf_and_back(tmp_path, case):
    """Every matrix bit-equal, also those whose heads are dealt out; norms and decay within float32's rounding."""
    made = make(tmp_path / "hf", **CASES[case])
    report = convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    rounded = 5 * 2 + 2 * 2 + 1 + 3  # two norms a layer, two of Q and K in full layers, the last; decay rates
    assert any(note.startswith(f"{rounded} tensors are computed in float32") for note in report.notes), report.notes
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "back", to="hf", tokenizer=False)
    stored, back = read(made.path), read(tmp_path / "back")
    assert back.keys() == stored.keys()
    for name, tensor in stored.items():
        bound = next((b for part, b in ROUNDED.items() if part in name and "linear_attn.norm" not in name), 0.0)
        assert off(back[name], tensor) <= bound, name
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    wanted = json.loads((made.path / "config.json").read_text())
    for key in (*SMALL, "tie_word_embeddings", "hidden_act"):
        found = config[key]
        if key == "rope_parameters":
            found = {k: v for k, v in found.items() if k != "mrope_section"}
        assert found == wanted[key], key
    result = convert.verify(made.path, tmp_path / "m.gguf", device="cpu")
    assert result.verdict == "pass" and result.distance.max_abs < 3 * TOLERANCE, result.message  # norms were rounded
    # from the book, too, and what it was before it went there
    convert.convert_checkpoint(made.path, tmp_path / "s", to="scratch")
    convert.convert_checkpoint(tmp_path / "s", tmp_path / "s.gguf", to="gguf", type="f32", tokenizer=False)
    direct, over = gguf_values(tmp_path / "m.gguf"), gguf_values(tmp_path / "s.gguf")
    assert direct.keys() == over.keys() and all(np.array_equal(direct[k], over[k]) for k in direct)


def test_what_a_gguf_file_holds(tmp_path, made):
    """Names, values and keys as llama.cpp's loader wants them, read by the ``gguf`` package."""
    convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type="f16", tokenizer=False)
    found = gguf_values(tmp_path / "m.gguf")
    state = {k.removeprefix("model.layers.0."): v.numpy() for k, v in made.state.items() if ".layers.0." in k}
    mixer = {k.removeprefix("linear_attn."): v for k, v in state.items() if k.startswith("linear_attn.")}

    def dealt(rows: np.ndarray, head: int) -> np.ndarray:
        return rows.reshape(2, 3, head, -1).swapaxes(0, 1).reshape(rows.shape)

    def half(array: np.ndarray) -> np.ndarray:
        return array.astype(np.float16).astype(np.float32)

    exact = {
        "ssm_a": -np.exp(dealt(mixer["A_log"], 1)),
        "ssm_dt.bias": dealt(mixer["dt_bias"], 1),
        "ssm_conv1d.weight": np.concatenate([mixer["conv1d.weight"][:32, 0], dealt(mixer["conv1d.weight"][32:, 0], 8)]),
        "ssm_norm.weight": mixer["norm.weight"],
        "attn_norm.weight": state["input_layernorm.weight"] + np.float32(1),
        "post_attention_norm.weight": state["post_attention_layernorm.weight"] + np.float32(1),
        "attn_qkv.weight": half(
            np.concatenate([mixer["in_proj_qkv.weight"][:32], dealt(mixer["in_proj_qkv.weight"][32:], 8)])
        ),
        "attn_gate.weight": half(dealt(mixer["in_proj_z.weight"], 8)),
        "ssm_alpha.weight": half(dealt(mixer["in_proj_a.weight"], 1)),
        "ssm_beta.weight": half(dealt(mixer["in_proj_b.weight"], 1)),
        "ssm_out.weight": half(dealt(mixer["out_proj.weight"].T.copy(), 8).T),
    }
    for name, wanted in exact.items():
        assert np.array_equal(found[f"blk.0.{name}"], wanted), name
    assert np.array_equal(
        found["blk.2.attn_q.weight"], half(made.state["model.layers.2.self_attn.q_proj.weight"].numpy())
    )
    keys = gguf_keys(tmp_path / "m.gguf")
    for key, wanted in {
        "ssm.conv_kernel": ("UINT32", 4),
        "ssm.inner_size": ("UINT32", 48),
        "ssm.state_size": ("UINT32", 8),
        "ssm.time_step_rank": ("UINT32", 6),
        "ssm.group_count": ("UINT32", 2),
        "rope.dimension_count": ("UINT32", 8),
        "rope.dimension_sections": ("ARRAY:INT32", [11, 11, 10, 0]),
        "attention.recurrent_layers": ("ARRAY:BOOL", [k == LINEAR for k in KINDS]),
        "attention.key_length": ("UINT32", 32),
    }.items():
        assert keys[f"qwen35.{key}"] == wanted, key
    assert "qwen35.full_attention_interval" not in keys  # there is none
    raw = {k: v for k, (_, v) in keys.items() if not k.startswith("convert.")}  # as a file from elsewhere
    hub = configs.to_hub(load_table(FAMILY), "gguf", raw)
    for key in SMALL:
        if key != "rope_parameters":
            assert hub[key] == SMALL[key], key
    assert hub["partial_rotary_factor"] == 0.25 and hub["mrope_section"] == [11, 11, 10]


def test_a_gguf_file_that_says_a_period_only(tmp_path):
    made = make(tmp_path / "hf", layer_types=None, num_hidden_layers=4)
    convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    raw = {k: v for k, (_, v) in gguf_keys(tmp_path / "m.gguf").items() if "recurrent" not in k and "convert." not in k}
    assert raw["qwen35.full_attention_interval"] == 4
    table = load_table(FAMILY)
    assert configs.to_hub(table, "gguf", raw)["layer_types"] == [LINEAR] * 3 + [FULL]
    del raw["qwen35.full_attention_interval"], raw["qwen35.rope.dimension_count"]
    silent = configs.to_hub(table, "gguf", raw)  # llama.cpp then takes four, and turns the whole head
    assert silent["layer_types"] == [LINEAR] * 3 + [FULL] and silent["partial_rotary_factor"] == 1.0


@pytest.mark.parametrize("config", ["multimodal", "flat"])
def test_the_text_part_of_a_release(tmp_path, made, config):
    """Names with ``language_model``, a tower, tensors that predict further tokens; a config of either form."""
    case = KEYS["hf/qwen3_5_mm"]
    state = {k.replace("model.", "model.language_model.", 1): v for k, v in made.state.items()}
    state |= {k: torch.zeros(s) for k, s in case["keys"].items() if "visual" in k}
    state |= {"mtp.fc.weight": torch.zeros(64, 128), "mtp.layers.0.mlp.up_proj.weight": torch.zeros(96, 64)}
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((made.path / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    whole = {**case["config"], "text_config": text} if config == "multimodal" else text
    (tmp_path / "hf" / "config.json").write_text(json.dumps(whole))
    with open_checkpoint(tmp_path / "hf") as opened:
        assert (opened.family, opened.layout) == (FAMILY, "hf")
        reasons = {reason for _, reason in opened.match.ignored}
        assert len(opened.match.ignored) == 2 + sum("visual" in k for k in case["keys"])
    assert any("vision" in r for r in reasons) and any("several tokens" in r for r in reasons)
    convert.convert_checkpoint(tmp_path / "hf", tmp_path / "s", to="scratch")
    convert.convert_checkpoint(tmp_path / "s", tmp_path / "back", to="hf")
    same(read(tmp_path / "back"), read(made.path))
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["model_type"] == "qwen3_5_text" and "vision_config" not in written and "text_config" not in written
    assert not written.get("mtp_num_hidden_layers")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    save_file(state | {"model.other.weight": torch.zeros(2)}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ConvertError, match=r"model\.other\.weight"):
        convert.convert_checkpoint(tmp_path / "hf", tmp_path / "no", to="scratch")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_come_back_from_gguf_as_they_were(tmp_path, made, dtype):
    """What float32 rounds on the way is far below what 16 bits hold, but next to a norm's zero."""
    kind = getattr(torch, dtype)
    state = {k: v.to(kind) for k, v in read(made.path).items()}
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((made.path / "config.json").read_text()) | {"dtype": dtype}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    convert.convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", to="gguf", type=short, tokenizer=False)
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "back", to="hf", tokenizer=False, dtype=short.upper())
    same(read(tmp_path / "back"), state)


def test_pairs_in_the_other_order_are_turned_by_head_and_in_part(tmp_path, made):
    """The rows that turn are the first of each query, not of its gate; the reference runs that order as stored."""
    table = faults.flipped(FAMILY, "scratch", "rope")
    out = converted(made.path, tmp_path, "scratch", table)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    for name, heads, size in (("W_query", 8, 64), ("W_key", 2, 32), ("q_norm", 1, 32), ("k_norm", 1, 32)):
        name = f"trf_blocks.2.token_mixer.{name}.weight"
        before = reference(made.path).state_dict()[name].reshape(heads, size, -1)
        after = read(out)[name].reshape(heads, size, -1)
        assert torch.equal(after[:, :8], before[:, order]) and torch.equal(after[:, 8:], before[:, 8:])
    with open_checkpoint(out, qk_layout="meta") as opened, torch.no_grad():
        assert opened.pairing == "interleaved"
        found = load_reference(opened)(prompt(SMALL["vocab_size"]))
    assert off(found, made.logits) < TOLERANCE
    assert off(run_reference(out, SMALL["vocab_size"]), made.logits) > 100 * TOLERANCE
    convert.convert_checkpoint(out, tmp_path / "back", to="hf", qk_layout="meta")
    same(read(tmp_path / "back"), read(made.path))


def test_a_folder_of_the_book_that_says_nothing_of_its_family(made, tmp_path):
    convert.convert_checkpoint(made.path, tmp_path / "s", to="scratch", format="pth")
    (tmp_path / "s" / "conversion.json").unlink()
    path = tmp_path / "s" / "scratch_config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in said.items() if k not in ("family", "layout", "class")}))
    with open_checkpoint(tmp_path / "s") as opened:
        assert (opened.family, opened.layout) == (FAMILY, "scratch")
    assert convert.verify(made.path, tmp_path / "s", device="cpu").verdict == "pass"
    # names and shapes are the book's: our class takes the file strictly
    with open_checkpoint(made.path) as opened:
        model = build_reference(opened.config)
    state = torch.load(tmp_path / "s" / "model.pth", weights_only=True)
    model.load_state_dict(state.get("model", state), strict=True)
    with torch.no_grad():
        assert off(model(prompt(SMALL["vocab_size"])), made.logits) < TOLERANCE


@pytest.mark.parametrize("flags", [True, False])
def test_a_gguf_file_with_a_layer_that_predicts_further_tokens(tmp_path, flags):
    """llama.cpp's converter counts it as a block, and names it as one behind the last."""
    made = make(tmp_path / "hf", layer_types=[*KINDS, FULL], num_hidden_layers=6)
    convert.convert_checkpoint(
        made.path,
        tmp_path / "m.gguf",
        to="gguf",
        type="f32",
        tokenizer=False,
        metadata={"qwen35.nextn_predict_layers": 1 if flags else 0},
    )
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "back", to="hf", tokenizer=False)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["num_hidden_layers"] == (5 if flags else 6) and config["layer_types"][:5] == KINDS
    assert len(config["layer_types"]) == config["num_hidden_layers"]
    left = {k for k in read(made.path) if not (flags and k.startswith("model.layers.5."))}
    assert read(tmp_path / "back").keys() == left
    assert (convert.verify(made.path, tmp_path / "back", device="cpu").verdict == "pass") != flags


def test_layers_of_a_kind_that_there_is_not(tmp_path, made):
    copied = make(tmp_path / "hf")
    config = json.loads((copied.path / "config.json").read_text())
    (copied.path / "config.json").write_text(json.dumps(config | {"layer_types": ["sliding_attention", *KINDS[1:]]}))
    with pytest.raises(ConvertError, match=r"layers\.0\.linear_attn"):
        convert.convert_checkpoint(copied.path, tmp_path / "s", to="scratch")


def test_a_module_is_filled_and_saved(tmp_path, made):
    with open_checkpoint(made.path) as opened:
        model = build_reference(opened.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # its rotary table, of a part of the head, is looked at and found right
        report = convert.load_into(model, made.path)
    assert not report.missing_keys and not report.unexpected_keys
    with torch.no_grad():
        assert off(model(prompt(SMALL["vocab_size"])), made.logits) < TOLERANCE
    convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    other = build_reference(
        configs.to_hub(load_table(FAMILY), "hf", json.loads((made.path / "config.json").read_text()))
    )
    convert.load_into(other, tmp_path / "m.gguf")
    whole = build_reference(opened.config | {"partial_rotary_factor": 1.0})
    with pytest.warns(UserWarning, match="does not agree with the checkpoint's RoPE"):
        convert.load_into(whole, made.path)
    out = "trf_blocks.1.token_mixer.out_proj.weight"
    assert torch.equal(other.state_dict()[out], model.state_dict()[out])
    convert.save_model(model, tmp_path / "back", layout="hf", config=made.path / "config.json")
    same(read(tmp_path / "back"), read(made.path))


def test_what_inspect_says(made):
    with open_checkpoint(made.path) as opened:
        found = inspect(opened)
    assert found.kv_bytes() == 2 * 2 * 32 * 2 * 2  # K and V, heads, their size, full layers, bytes
    said = dict(found.lines())
    assert "partial_rotary_factor 0.25" in said["RoPE"]
    assert f"saves {2 * (8 - 2) * 32 * 64 * 2:,} parameters" in said["heads"]
    assert found.parameters == sum(v.numel() for v in made.state.values())


# ---- faults in tables ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["scratch", "gguf"])
def test_wrong_tables_are_caught(made, tmp_path, layout):
    with open_checkpoint(made.path) as opened:
        config = dict(opened.config)
    swaps = {p for layer in (0, 2) for p in faults.pairs(FAMILY, config, layout, at=layer)}
    wrong = {f"{a} {b}": faults.exchanged(FAMILY, layout, a, b) for a, b in swaps}
    wrong |= {kind: faults.flipped(FAMILY, layout, kind) for kind in ("rope", "norm")}
    if layout == "gguf":
        for row in ("qkv", "conv", "z", "b", "a", "a_log", "dt", "out"):
            raw = copy.deepcopy(dict(load_table(FAMILY).raw))
            operations = raw["block"]["linear"][row]["to"]["gguf"]
            raw["block"]["linear"][row]["to"]["gguf"] = [o for o in operations if "tile" not in o["op"]]
            wrong[f"{row} not dealt out"] = build(raw, "wrong.toml")
    assert len(wrong) >= (17 if layout == "gguf" else 9)
    for number, (fault, table) in enumerate(wrong.items()):
        (tmp_path / str(number)).mkdir()
        out = converted(made.path, tmp_path / str(number), layout, table)
        assert convert.verify(made.path, out, device="cpu", n_tokens=64).verdict == "fail", fault


@pytest.mark.parametrize(
    ("layout", "changes", "why"),
    [
        ("scratch", {"attention_bias": True}, "bias=False"),
        ("scratch", {"rms_norm_eps": 1e-5}, "eps 1e-6"),
        ("scratch", CASES["linear scaling"], "no RoPE scaling"),
        ("gguf", {"attention_bias": True}, "no biases"),
        ("gguf", {"layer_types": [LINEAR] * 5}, "not both kinds"),
        ("gguf", CASES["value heads of another size"], "from one key"),
        ("gguf", {"head_dim": 16}, "more than a head"),
        ("gguf", {"rope_parameters": SMALL["rope_parameters"] | {"mrope_section": [2, 4, 2]}}, "in turn"),
        ("gguf", {"rope_parameters": SMALL["rope_parameters"] | {"partial_rotary_factor": 0.01}}, "an even number"),
        ("scratch", {"rope_parameters": SMALL["rope_parameters"] | {"partial_rotary_factor": 1.5}}, "above 0 to 1"),
        ("meta", {}, "no meta layout"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused_before_writing(tmp_path, layout, changes, why):
    factor = changes.get("rope_parameters", {}).get("partial_rotary_factor", 0.25)
    possible = changes if 0.1 < factor <= 1 else {}  # transformers builds no other
    made = make(tmp_path / "hf", **possible)
    config = json.loads((made.path / "config.json").read_text())
    (made.path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConvertError, match=why):
        convert.convert_checkpoint(tmp_path / "hf", tmp_path / "out.gguf", to=layout, tokenizer=False)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"rms_norm_eps": 1e-5}, CASES["linear scaling"]])
def test_our_own_class_holds_more_than_the_books(tmp_path, changes):
    made = make(tmp_path / "hf", **changes)
    convert.convert_checkpoint(made.path, tmp_path / "s", to="scratch", allow_reference=True)
    assert off(run_reference(tmp_path / "s", SMALL["vocab_size"]), made.logits) < TOLERANCE
    convert.convert_checkpoint(tmp_path / "s", tmp_path / "back", to="hf")
    same(read(tmp_path / "back"), read(made.path))


# ---- real llama.cpp --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", ["plain", "tied", "as many value heads as key heads", "half of each head turns", "linear scaling"]
)
def test_real_llama_cpp(tmp_path, case):
    pytest.importorskip("xllamacpp")
    from convert.engines.llama_cpp import logprobs

    made = make(tmp_path / "hf", **CASES[case])
    convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    ids = prompt(SMALL["vocab_size"])[0].tolist()
    lengths = (1, 7, 40, LENGTH)
    found = logprobs(tmp_path / "m.gguf", [ids[:n] for n in lengths], threads=1)
    places = [n - 1 for n in lengths]
    wanted = made.logits[0].double().log_softmax(-1)[places].numpy()
    assert np.abs(found - wanted).max() < 2e-4
    assert np.abs(found - np.roll(wanted, 1, axis=0)).max() > 0.05
    model = reference(made.path)
    with torch.no_grad(), model.controls[0].apply(model):
        broken = model(torch.tensor([ids]))[0].double().log_softmax(-1)[places].numpy()
    assert np.abs(found - broken).max() > 0.02


@pytest.mark.parametrize("case", ["plain", "tied", "as many value heads as key heads"])
def test_a_whole_folder_and_transformers_own_reader_of_gguf(tmp_path, case):
    """transformers undoes norms, decay rates and the order of value heads by code of its own; it knows periods only."""
    text = (Path(__file__).parents[1] / "data" / "multilingual.txt").read_text(encoding="utf-8")
    steps = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN35), "isolated")]
    tokenizer = trained.byte_level(text, split=False, steps=steps, size=500)
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    periodic = {"layer_types": [LINEAR, FULL] * 2, "num_hidden_layers": 4, "vocab_size": 512}
    made = make(tmp_path / "hf", **CASES[case] | periodic)
    tokenizer.save(str(made.path / "tokenizer.json"))
    (made.path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": trained.END, "pad_token": trained.END})
    )
    convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type="f32")
    assert gguf_keys(tmp_path / "m.gguf")["tokenizer.ggml.pre"] == ("STRING", "qwen35")
    assert gguf_keys(tmp_path / "m.gguf")["qwen35.full_attention_interval"] == ("UINT32", 2)
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "back", to="hf")
    again = tokenizers.Tokenizer.from_file(str(tmp_path / "back" / "tokenizer.json"))
    assert again.encode(text).ids == tokenizer.encode(text).ids and again.decode(again.encode(text).ids)
    pytest.importorskip("accelerate")  # transformers wants it for GGUF
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    model.config.use_cache = False
    with torch.no_grad():
        assert off(model(prompt(512)).logits, made.logits) < 10 * TOLERANCE  # norms were rounded
    for name, tensor in model.state_dict().items():
        assert off(tensor, made.state[name]) < 2.0**-20, name


if __name__ == "__main__":
    golden.write(FAMILY, SMALL)
