"""Qwen3-MoE: experts one by one, stacked and fused; what GGUF and the book cannot hold; reference, real programs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import convert
from convert import config as configs
from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError
from convert.plan import Request, make_plan
from convert.reference.layers import KVCache
from convert.reference.loading import load_reference
from convert.run import run
from convert.table import load_table
from tests.families import faults, golden
from tests.families.mixed import Tiny, off, prompt, tiny
from tests.families.test_qwen3 import KEYS, ROPE, SMALL, TOLERANCE, YARN, read, same
from tests.reference.models import one_thread  # noqa: F401

transformers = pytest.importorskip("transformers")

FAMILY = "qwen3_moe"
MOE = SMALL | {
    "moe_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "three of six, tied": {"num_experts_per_tok": 3, "tie_word_embeddings": True},
    "not normalised": {"norm_topk_prob": False},
    "layer 1 dense": {"mlp_only_layers": [1]},
    "every second layer dense": {"decoder_sparse_step": 2},
    "yarn": {"rope_parameters": YARN, "max_position_embeddings": 256},
    "a window everywhere": {"use_sliding_window": True, "sliding_window": 24},
}


def make(path: Path, **changes: Any) -> Tiny:
    config = transformers.Qwen3MoeConfig(**{**MOE, "rope_parameters": dict(ROPE), **changes})
    model = transformers.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("eager")  # the fast one knows no float64
    return tiny(path, model)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make(tmp_path_factory.mktemp("made") / "hf")


def logprobs_of(logits: torch.Tensor, lengths: tuple[int, ...]) -> np.ndarray:
    return logits[0].double().log_softmax(-1)[[n - 1 for n in lengths]].numpy()


# ---- names and numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in KEYS if "moe" in name])
def test_the_very_keys_and_shapes_that_the_classes_have(name):
    """Also transformers 5's names in memory, and the notebooks' class, whose dict has another word."""
    layout, case, table = name.split("/")[0], KEYS[name], load_table(FAMILY)
    hub = configs.to_hub(table, layout, case["config"])
    assert golden.shapes(FAMILY, layout, hub, case["keys"]) == case["keys"]
    assert golden.shapes(FAMILY, layout, hub | {"num_experts": hub["num_experts"] + 1}) != case["keys"]


@pytest.mark.parametrize("layout", ["hf", "scratch", "gguf"])
def test_golden(layout):
    assert golden.same(FAMILY, layout, MOE | {"mlp_only_layers": [1]}), "see tests.families.test_qwen3_moe"


@pytest.mark.parametrize(
    ("size", "tensors", "stored"),
    [("qwen3-30b-a3b", 18867, 30_532_122_624), ("qwen3-235b-a22b", 36945, 235_093_634_560)],
)
def test_published_sizes(size, tensors, stored):
    hub = configs.published(load_table(FAMILY), size)
    for layout in ("hf", "scratch"):
        found = golden.shapes(FAMILY, layout, hub)
        assert len(found) == tensors and sum(int(np.prod(s)) for s in found.values()) == stored
    found = golden.shapes(FAMILY, "gguf", hub)
    assert found["blk.0.ffn_gate_exps.weight"] == [128, hub["moe_intermediate_size"], hub["hidden_size"]]
    assert sum(int(np.prod(s)) for s in found.values()) == stored


def test_the_books_own_dict_is_the_published_size():
    book = pytest.importorskip("llms_from_scratch.qwen3")
    table = load_table(FAMILY)
    theirs = {k: v for k, v in book.QWEN3_CONFIG_30B_A3B.items() if k != "dtype"}
    hub = configs.published(table, "qwen3-30b-a3b-2507")
    ours = configs.to_scratch(table, hub, "BF16")
    assert {k: ours[k] for k in theirs} == theirs
    assert ours["moe_hidden_dim"] == 768 and "hidden_dim" not in ours
    # and what their dict does not say is what the release says
    back = configs.to_hub(table, "scratch", theirs)
    for key in ("intermediate_size", "norm_topk_prob", "num_experts", "moe_intermediate_size", "rope_theta"):
        assert back[key] == hub[key]


def test_both_names_of_the_number_of_experts(made):
    table = load_table(FAMILY)
    new = json.loads((made.path / "config.json").read_text())
    old = {k: v for k, v in new.items() if k != "num_local_experts"} | {"num_experts": 6}
    assert new["num_local_experts"] == 6 and "num_experts" not in new
    assert configs.to_hub(table, "hf", new) == configs.to_hub(table, "hf", old)
    assert configs.to_hub(table, "hf", new | {"num_experts": 6})["num_experts"] == 6
    with pytest.raises(ConvertError, match=r"num_experts = 5 and num_local_experts = 6"):
        configs.to_hub(table, "hf", new | {"num_experts": 5})


def test_a_config_without_norm_topk_prob_means_false(made, tmp_path):
    """The class's default; the releases state true."""
    folder = Path(shutil.copytree(made.path, tmp_path / "m"))
    raw = json.loads((folder / "config.json").read_text())
    del raw["norm_topk_prob"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConvertError, match="norm_topk_prob"):
        convert.convert_checkpoint(folder, tmp_path / "out", to="scratch")


# ---- the reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers(tmp_path, case):
    made = make(tmp_path / "hf", **CASES[case])
    wanted, ids = made.logits, prompt(SMALL["vocab_size"])
    with open_checkpoint(made.path) as opened:
        assert opened.family == FAMILY
        model: Any = load_reference(opened, device="cpu")
        opened.config["norm_topk_prob"] = not opened.config["norm_topk_prob"]
        other: Any = load_reference(opened, device="cpu")
    assert off(model(ids), wanted) < TOLERANCE
    exact = made.model.double()(ids).logits
    assert off(model(ids), exact) <= 4 * max(off(wanted, exact), 2e-6)
    with model.controls[0].apply(model):
        assert off(model(ids), wanted) > 100 * TOLERANCE
    assert off(other(ids), wanted) > 100 * TOLERANCE
    cache = KVCache(model.n_layers)
    parts = [model(ids[:, a:b], cache) for a, b in ((0, 70), (70, 71), (71, 130), (130, 160))]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=1e-5, atol=5e-5)
    # Two experts exchanged, gate against up in one of them, and the router's rows in another order.
    ff = next(b.ff for b in model.trf_blocks if hasattr(b.ff, "gate"))
    for a, b in ((ff.fc1[0], ff.fc1[3]), (ff.fc3[0], ff.fc3[3]), (ff.fc1[2], ff.fc2[2])):
        a.weight.data, b.weight.data = b.weight.data, a.weight.data
        assert off(model(ids), wanted) > 100 * TOLERANCE
        a.weight.data, b.weight.data = b.weight.data, a.weight.data
    ff.gate.weight.data = ff.gate.weight.data.roll(1, 0)
    assert off(model(ids), wanted) > 100 * TOLERANCE


# ---- there and back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "three of six, tied"])
def test_there_and_back(tmp_path, case):
    made = make(tmp_path / "hf", **CASES[case])
    stored = read(made.path)
    convert.convert_checkpoint(made.path, tmp_path / "scratch", to="scratch")
    convert.convert_checkpoint(tmp_path / "scratch", tmp_path / "back", to="hf")
    same(read(tmp_path / "back"), stored)
    convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "again", to="hf", tokenizer=False)
    same(read(tmp_path / "again"), stored)
    convert.convert_checkpoint(tmp_path / "scratch", tmp_path / "s.gguf", to="gguf", type="f32", tokenizer=False)
    convert.convert_checkpoint(tmp_path / "s.gguf", tmp_path / "book", to="scratch", tokenizer=False)
    same(read(tmp_path / "book"), read(tmp_path / "scratch"))
    for folder in ("back", "again"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        model.set_experts_implementation("eager")
        with torch.no_grad():
            assert off(model(prompt(SMALL["vocab_size"])).logits, made.logits) == 0.0
    for other in (tmp_path / "scratch", tmp_path / "m.gguf", tmp_path / "s.gguf"):
        assert convert.verify(made.path, other, device="cpu").verdict == "pass"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_stay_what_they_are(tmp_path, dtype):
    path = tmp_path / "hf"
    make(path).model.to(dtype).save_pretrained(path)
    stored = read(path)
    convert.convert_checkpoint(path, tmp_path / "s", to="scratch", format="safetensors")
    convert.convert_checkpoint(tmp_path / "s", tmp_path / "back", to="hf")
    same(read(tmp_path / "back"), stored)


def test_experts_of_different_types(made, tmp_path):
    """What is one tensor in GGUF takes a type that holds all of them."""
    folder = Path(shutil.copytree(made.path, tmp_path / "m"))
    state = read(folder)
    name = "model.layers.1.mlp.experts.{}.up_proj.weight"
    state[name.format(4)] = state[name.format(4)].bfloat16()
    state[name.format(5)] = state[name.format(5)].half()
    save_file(state, folder / "model.safetensors")
    convert.convert_checkpoint(folder, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "back", to="hf", tokenizer=False)
    same(read(tmp_path / "back"), {k: v.float() for k, v in state.items()})


def test_many_experts_cost_no_more_than_their_number(tmp_path):
    """The time for an expert must not grow with the number of experts (planning it once took 70 s for 18,867)."""
    made = make(tmp_path / "hf", num_experts=128, moe_intermediate_size=8)
    source = convert.open_checkpoint(made.path)
    with source:
        plan = make_plan(source, Request("scratch"))
    assert len(plan.outputs) == 3 * (128 * 3 + 9) + 3
    depth = max(len(list(_within(output.source))) for output in plan.outputs)
    assert depth <= 4


def _within(source: Any) -> Any:
    yield source
    for part in (*getattr(source, "parts", ()), *([source.source] if hasattr(source, "source") else [])):
        yield from _within(part)


@pytest.mark.parametrize("target", ["scratch", "gguf"])
def test_stacked_and_fused_experts_are_understood(made, tmp_path, target):
    """What ``state_dict()`` of transformers 5 gives; and the files have them one by one again."""
    folder = tmp_path / "stacked"
    folder.mkdir()
    shutil.copy(made.path / "config.json", folder)
    state = {k: v.contiguous() for k, v in made.state.items()}
    assert state["model.layers.0.mlp.experts.gate_up_proj"].shape == (6, 80, 64)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / ("out.gguf" if target == "gguf" else "out")
    options = {"type": "f32"} if target == "gguf" else {}
    convert.convert_checkpoint(folder, out, to=target, tokenizer=False, **options)
    convert.convert_checkpoint(out, tmp_path / "back", to="hf", tokenizer=False)
    same(read(tmp_path / "back"), read(made.path))
    assert convert.verify(folder, out, device="cpu").verdict == "pass"
    # Half of it stacked: a layer of either kind
    single = read(made.path)
    mixed = {k: v for k, v in state.items() if ".layers.1.mlp" not in k}
    mixed |= {k: v for k, v in single.items() if ".layers.1.mlp" in k}
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    assert convert.verify(folder, out, device="cpu").verdict == "pass"


def test_a_module_of_transformers_is_filled_and_saved(made, tmp_path):
    """Its parameters are the stacked ones."""
    convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    model = transformers.Qwen3MoeForCausalLM(made.model.config)
    convert.load_into(model, tmp_path / "m.gguf")
    assert not [k for k, v in model.state_dict().items() if not torch.equal(v, made.state[k])]
    convert.save_model(model, tmp_path / "s", layout="scratch")
    assert convert.verify(made.path, tmp_path / "s", device="cpu").verdict == "pass"


def test_a_missing_expert_is_named(made, tmp_path):
    folder = Path(shutil.copytree(made.path, tmp_path / "m"))
    state = read(folder)
    del state["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ConvertError, match=r"layers\.1\.mlp\.experts\.4\.up_proj\.weight' is missing"):
        convert.convert_checkpoint(folder, tmp_path / "out", to="scratch")


@pytest.mark.parametrize("layout", ["scratch", "gguf"])
def test_wrong_tables_are_caught(made, tmp_path, layout):
    with open_checkpoint(made.path) as opened:
        swaps = faults.pairs(FAMILY, opened.config, layout)
        wrong = {f"{a} {b}": faults.exchanged(FAMILY, layout, a, b) for a, b in swaps}
        wrong["rope"] = faults.flipped(FAMILY, layout, "rope")
        assert "block.moe.gate block.moe.up" in wrong and len(wrong) == 6
        for number, (fault, table) in enumerate(wrong.items()):
            out = tmp_path / (f"{number}.gguf" if layout == "gguf" else str(number))
            request = Request(layout, tokenizer=False)
            request.gguf.type = "f32"
            run(make_plan(opened, request, table=table), out)
            assert convert.verify(made.path, out, device="cpu", n_tokens=48).verdict == "fail", fault


def test_a_folder_of_the_book_that_says_nothing_of_its_family(made, tmp_path):
    """The notebooks' dict: another word for the experts' width, and no word of the package's."""
    convert.convert_checkpoint(made.path, tmp_path / "s", to="scratch", format="pth")
    (tmp_path / "s" / "conversion.json").unlink()
    path = tmp_path / "s" / "scratch_config.json"
    said = json.loads(path.read_text())
    drop = ("family", "layout", "class", "moe_intermediate_size")
    path.write_text(json.dumps({k: v for k, v in said.items() if k not in drop}))
    with open_checkpoint(tmp_path / "s") as opened:
        assert (opened.family, opened.layout) == (FAMILY, "scratch")
        assert opened.config["norm_topk_prob"] is True
    assert convert.verify(made.path, tmp_path / "s", device="cpu").verdict == "pass"


@pytest.mark.parametrize(
    ("target", "case", "why"),
    [
        ("scratch", "not normalised", "softmax over the chosen experts"),
        ("gguf", "not normalised", "always normalises the weights of the chosen experts"),
        ("scratch", "layer 1 dense", "experts in every layer"),
        ("gguf", "layer 1 dense", "experts in every layer"),
        ("scratch", "every second layer dense", "experts in every layer"),
        ("gguf", "every second layer dense", "experts in every layer"),
        ("gguf", "a window everywhere", "no sliding window"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(tmp_path, target, case, why):
    made = make(tmp_path / "hf", **CASES[case])
    out = tmp_path / ("out.gguf" if target == "gguf" else "out")
    with pytest.raises(ConvertError, match=why):
        convert.convert_checkpoint(made.path, out, to=target, tokenizer=False)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("case", ["not normalised", "layer 1 dense", "every second layer dense"])
def test_our_own_class_holds_more_than_the_books(tmp_path, case):
    """The dict alone says so: with the record gone the model is still the same."""
    made = make(tmp_path / "hf", **CASES[case])
    convert.convert_checkpoint(made.path, tmp_path / "s", to="scratch", allow_reference=True)
    (tmp_path / "s" / "conversion.json").unlink()
    assert convert.verify(made.path, tmp_path / "s", device="cpu").verdict == "pass"
    convert.convert_checkpoint(tmp_path / "s", tmp_path / "back", to="hf")
    same(read(tmp_path / "back"), read(made.path))
    said = json.loads((tmp_path / "back" / "config.json").read_text())
    for key, value in CASES[case].items():
        assert said[key] == value


# ---- real programs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["qwen3", "kv_cache.qwen3"])
@torch.no_grad()
def test_the_books_real_classes(made, tmp_path, module):
    """pip's 1.0.19 makes its experts on meta: ``load_state_dict`` fills them with ``assign=True`` only."""
    book = pytest.importorskip(f"llms_from_scratch.{module}")
    convert.convert_checkpoint(made.path, tmp_path / "s", to="scratch")
    cfg = convert.load_scratch_config(tmp_path / "s")
    model = book.Qwen3Model(cfg)
    assert model.trf_blocks[0].ff.fc1[0].weight.is_meta
    model.load_state_dict(read(tmp_path / "s"), strict=True, assign=True)
    ids = prompt(SMALL["vocab_size"])
    assert off(model(ids), made.logits) < TOLERANCE
    other = book.Qwen3Model(cfg)
    report = convert.load_into(other, made.path)
    assert not report.missing_keys and not any(p.is_meta for p in other.parameters())
    assert torch.equal(other(ids), model(ids))
    convert.save_model(other, tmp_path / "back", layout="hf")
    same(read(tmp_path / "back"), read(made.path))
    ff = model.trf_blocks[0].ff
    ff.fc1[0], ff.fc1[1] = ff.fc1[1], ff.fc1[0]
    assert off(model(ids), made.logits) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("case", "source"), [("plain", "hf"), ("three of six, tied", "hf"), ("yarn", "hf"), ("plain", "scratch")]
)
def test_real_llama_cpp(tmp_path, case, source):
    pytest.importorskip("xllamacpp")
    from convert.engines.llama_cpp import logprobs

    made = make(tmp_path / "hf", **CASES[case])
    path = made.path
    if source == "scratch":  # whose dict has no word for the width of dense layers
        convert.convert_checkpoint(path, tmp_path / "s", to="scratch")
        path = tmp_path / "s"
        (path / "conversion.json").unlink()
    convert.convert_checkpoint(path, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    ids, lengths = prompt(SMALL["vocab_size"])[0].tolist(), (1, 7, 40, 160)
    found = logprobs(tmp_path / "m.gguf", [ids[:n] for n in lengths], threads=1)
    assert np.abs(found - logprobs_of(made.logits, lengths)).max() < 2e-4
    made.model.model.layers[1].mlp.gate.norm_topk_prob = False
    assert np.abs(found - logprobs_of(made.logits, lengths)).max() > 0.02
    with open_checkpoint(tmp_path / "m.gguf") as opened:
        keys = opened.metadata
    assert keys["general.architecture"] == "qwen3moe"
    assert (keys["qwen3moe.expert_count"], keys["qwen3moe.expert_used_count"]) == (
        6,
        made.model.config.num_experts_per_tok,
    )
    assert keys["qwen3moe.expert_feed_forward_length"] == 40


def test_quantised_experts(tmp_path):
    """Blocks lie within an expert's rows; what comes back is the dequantised value of each."""
    gguf = pytest.importorskip("gguf")
    made = make(tmp_path / "hf", moe_intermediate_size=64)
    convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type="q8_0", tokenizer=False)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    tensors = {t.name: t for t in reader.tensors}
    assert tensors["blk.0.ffn_gate_exps.weight"].tensor_type == gguf.GGMLQuantizationType.Q8_0
    assert tensors["blk.0.ffn_gate_inp.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "back", to="hf", dtype="F32", tokenizer=False)
    back = read(tmp_path / "back")
    for stem, name in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
        tensor = tensors[f"blk.2.ffn_{stem}_exps.weight"]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        for e in range(6):
            found = back[f"model.layers.2.mlp.experts.{e}.{name}.weight"]
            assert np.array_equal(found.numpy(), values[e].reshape(found.shape))


@pytest.mark.parametrize("type", ["q8_0", "q4_k_m"])
def test_llama_cpp_runs_quantised_experts(tmp_path, type):
    """Widened again, so that llama.cpp rounds no activations: what it computes is what we read back."""
    pytest.importorskip("xllamacpp")
    from convert import ggml
    from convert.engines.llama_cpp import logprobs

    if "k" in type and not ggml.available():
        pytest.skip("ggml is not installed")
    made = make(tmp_path / "hf", hidden_size=256, moe_intermediate_size=256, head_dim=32)
    convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type=type, tokenizer=False)
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "wide.gguf", to="gguf", type="f32")
    convert.convert_checkpoint(tmp_path / "m.gguf", tmp_path / "back", to="hf", dtype="F32", tokenizer=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    model.set_experts_implementation("eager")
    ids, lengths = prompt(SMALL["vocab_size"]), (1, 7, 40, 160)
    with torch.no_grad():
        wanted = logprobs_of(model(ids).logits, lengths)
    prompts = [ids[0].tolist()[:n] for n in lengths]
    assert np.abs(logprobs(tmp_path / "wide.gguf", prompts, threads=1) - wanted).max() < 2e-4
    quantised = logprobs(tmp_path / "m.gguf", prompts, threads=1)
    assert np.abs(quantised - wanted).mean() < 0.5  # 8-bit activations, and experts that change with them
    assert np.abs(quantised - np.roll(wanted, 1, axis=0)).mean() > 1.5


if __name__ == "__main__":
    golden.write(FAMILY, MOE | {"mlp_only_layers": [1]})
