"""Qwen3, dense: key sets, configs, reference, every pair of layouts, the book's real class, real llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert import config as configs
from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError
from convert.layout import Dims, expand
from convert.plan import Request, make_plan
from convert.reference.layers import KVCache
from convert.reference.loading import load_reference
from convert.run import run
from convert.table import load_table
from tests.families import faults, golden
from tests.families.mixed import Tiny, off, prompt, tiny
from tests.reference.models import one_thread  # noqa: F401

transformers = pytest.importorskip("transformers")

KEYS = json.loads((Path(__file__).parents[1] / "data" / "qwen3_keys.json").read_text(encoding="utf-8"))
DENSE = [name for name in KEYS if "moe" not in name]
#: 8 query heads on 2, and heads that are wider together than the model.
SMALL = {
    "vocab_size": 112,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}
TOLERANCE = 1e-4
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "heads 8/2, narrow": {"head_dim": 6},
    "mha": {"num_key_value_heads": 8},
    "biases": {"attention_bias": True},
    "linear scaling": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}},
    "yarn": {"rope_parameters": YARN, "max_position_embeddings": 256},  # as the releases' cards tell for long texts
    "sliding from layer 1 on": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "sliding and full mixed": {
        "use_sliding_window": True,
        "sliding_window": 24,
        "layer_types": [SLIDING, FULL, SLIDING],
    },
}


def make(path: Path, *, seed: int = 0, **changes: Any) -> Tiny:
    config = transformers.Qwen3Config(**{**SMALL, "rope_parameters": dict(ROPE), **changes})
    return tiny(path, transformers.Qwen3ForCausalLM(config), seed=seed)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make(tmp_path_factory.mktemp("made") / "hf")


def read(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    assert not [k for k in wanted if found[k].dtype != wanted[k].dtype or not torch.equal(found[k], wanted[k])]


# ---- names and numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DENSE)
def test_the_very_keys_and_shapes_that_the_classes_have(name):
    layout, case, table = name.split("/")[0], KEYS[name], load_table("qwen3")
    hub = configs.to_hub(table, layout, case["config"])
    found = golden.shapes("qwen3", layout, hub)
    if hub.get("tie_word_embeddings"):
        del found["lm_head.weight"]
    assert found == case["keys"]
    assert golden.shapes("qwen3", layout, hub | {"head_dim": hub["head_dim"] * 2}) != case["keys"]


@pytest.mark.parametrize("layout", ["hf", "scratch", "gguf"])
def test_golden(layout):
    assert golden.same("qwen3", layout, SMALL), "if this is meant, run python -m tests.families.test_qwen3"


@pytest.mark.parametrize(
    ("size", "tensors", "stored", "distinct"),
    [
        ("qwen3-0.6b", 311, 751_632_384, 596_049_920),
        ("qwen3-1.7b", 311, 2_031_739_904, 1_720_574_976),
        ("qwen3-4b", 399, 4_411_424_256, 4_022_468_096),
        ("qwen3-8b", 399, 8_190_735_360, 8_190_735_360),
        ("qwen3-14b", 443, 14_768_307_200, 14_768_307_200),
        ("qwen3-32b", 707, 32_762_123_264, 32_762_123_264),
    ],
)
def test_published_sizes(size, tensors, stored, distinct):
    """As the book's class counts them, built on meta, and as the releases do."""
    table = load_table("qwen3")
    hub = configs.published(table, size)
    for layout in table.layouts:
        found = golden.shapes("qwen3", layout, hub)
        assert len(found) == tensors and sum(int(np.prod(s)) for s in found.values()) == stored
    twice = hub["vocab_size"] * hub["hidden_size"] if hub["tie_word_embeddings"] else 0
    assert stored - twice == distinct


def test_the_books_own_dicts_are_the_published_sizes():
    book = pytest.importorskip("llms_from_scratch.qwen3")
    table = load_table("qwen3")
    names = {"0.6b": "QWEN_CONFIG_06_B"} | {s: f"QWEN3_CONFIG_{s.upper().replace('.', '_')}" for s in ("1.7b", "32b")}
    for size, name in names.items():
        theirs = {k: v for k, v in getattr(book, name).items() if k != "dtype"}
        ours = configs.to_scratch(table, configs.published(table, f"qwen3-{size}"), "BF16")
        assert {k: ours[k] for k in theirs} == theirs


def test_every_spelling_of_a_config_means_the_same(made, tmp_path):
    table = load_table("qwen3")
    new = json.loads((made.path / "config.json").read_text())
    assert "rope_theta" not in new and new["use_sliding_window"] is False
    old = {k: v for k, v in new.items() if k not in ("rope_parameters", "dtype", "layer_types")}
    old |= {"rope_theta": 1_000_000.0, "rope_scaling": None, "torch_dtype": "float32", "sliding_window": 4096}
    book = configs.to_scratch(table, configs.to_hub(table, "hf", new), "F32")
    said = {k: v for k, v in book.items() if k not in ("family", "layout", "class")}
    hubs = [configs.to_hub(table, *x) for x in (("hf", new), ("hf", old), ("scratch", said))]
    convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    with open_checkpoint(tmp_path / "m.gguf") as opened:
        hubs.append(configs.to_hub(table, "gguf", dict(opened.metadata)))
    keys = [*(k for k in table.config if k not in ("sliding_window",)), "rope_theta", "rope_type"]
    for hub in hubs[1:]:
        wanted = {k: hubs[0][k] for k in keys if k in hubs[0]}
        assert {k: pytest.approx(hub[k]) if isinstance(hub[k], float) else hub[k] for k in wanted} == wanted
        assert "sliding_window" not in hub
    assert book["qk_norm"] is True and book["head_dim"] == 16


@pytest.mark.parametrize(
    ("stated", "window", "kinds"),
    [
        ({"use_sliding_window": False, "sliding_window": 32}, None, None),
        ({"sliding_window": 32}, None, None),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 28}, None, [FULL] * 3),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}, 32, [FULL, FULL, SLIDING]),
        ({"use_sliding_window": True, "sliding_window": 32, "layer_types": [FULL] * 3}, None, [FULL] * 3),
        ({"use_sliding_window": False, "sliding_window": 32, "layer_types": None}, None, None),
    ],
)
def test_a_window_counts_only_where_it_is_used(stated, window, kinds):
    raw = {"model_type": "qwen3", **SMALL, **stated}
    hub = configs.to_hub(load_table("qwen3"), "hf", raw)
    assert (hub.get("sliding_window"), hub.get("layer_types")) == (window, kinds)
    theirs = transformers.Qwen3Config(**raw)
    assert theirs.layer_types == (kinds or [FULL] * 3)


def test_a_dict_without_the_norms_of_heads_lacks_tensors(made, tmp_path):
    """qk_norm = False makes another architecture, which no model of this family has."""
    convert.convert_checkpoint(made.path, tmp_path / "s", to="scratch")
    state = {k: v for k, v in read(tmp_path / "s").items() if "q_norm" not in k and "k_norm" not in k}
    save_file(state, tmp_path / "s" / "model.safetensors")
    with pytest.raises(ConvertError, match=r"trf_blocks\.\{0-2\}\.att\.q_norm\.scale' is missing"):
        convert.convert_checkpoint(tmp_path / "s", tmp_path / "out", to="hf")


# ---- the reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers(tmp_path, case):
    made = make(tmp_path / "hf", **CASES[case])
    wanted, ids = made.logits, prompt(SMALL["vocab_size"])
    with open_checkpoint(made.path) as opened:
        model: Any = load_reference(opened, device="cpu")
        swaps = faults.pairs("qwen3", opened.config, "scratch")
    assert off(model(ids), wanted) < TOLERANCE
    exact = made.model.double()(ids).logits
    assert off(model(ids), exact) <= 4 * max(off(wanted, exact), 2e-6)
    with model.controls[0].apply(model):
        assert off(model(ids), wanted) > 100 * TOLERANCE
    table, state = load_table("qwen3"), dict(model.state_dict())
    assert len(swaps) >= 4
    for one, other in swaps:
        a, b = (_names(table, row, model.n_layers) for row in (one, other))
        if model.config.tied and "top.output" in (one, other):
            continue
        model.load_state_dict(state | {x: state[y] for x, y in zip(a + b, b + a, strict=True)}, strict=True)
        assert off(model(ids), wanted) > 100 * TOLERANCE, (one, other)
    model.load_state_dict(state)
    if "rope_parameters" in CASES[case]:
        with open_checkpoint(made.path) as opened:
            opened.config["rope_parameters"] = ROPE
            plain: Any = load_reference(opened, device="cpu")
        assert off(plain(ids), wanted) > 100 * TOLERANCE
    if "sliding" in case:
        with open_checkpoint(made.path) as opened:
            opened.config.pop("sliding_window"), opened.config.pop("layer_types")
            unlimited: Any = load_reference(opened, device="cpu")
        assert off(unlimited(ids)[:, :24], wanted[:, :24]) < TOLERANCE
        assert off(unlimited(ids)[:, 24:], wanted[:, 24:]) > 100 * TOLERANCE
    # and a cache changes nothing
    cache = KVCache(model.n_layers)
    parts = [model(ids[:, a:b], cache) for a, b in ((0, 70), (70, 71), (71, 130), (130, 160))]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=1e-5, atol=5e-5)


def _names(table: Any, row_id: str, layers: int) -> list[str]:
    name, prefix = table.rows[row_id].names["scratch"], table.prefix["scratch"]
    return [prefix.replace("{l}", str(i)) + name for i in range(layers)] if row_id.startswith("block") else [name]


# ---- there and back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "tied", "heads 8/2, narrow", "mha"])
def test_there_and_back(tmp_path, case):
    made = make(tmp_path / "hf", **CASES[case])
    stored = read(made.path)
    assert ("lm_head.weight" in stored) == (case != "tied")
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
        with torch.no_grad():
            assert off(model(prompt(SMALL["vocab_size"])).logits, made.logits) == 0.0
    for other in (tmp_path / "scratch", tmp_path / "m.gguf"):
        assert convert.verify(made.path, other, device="cpu").verdict == "pass"


def test_a_head_that_is_stored_although_tied(tmp_path):
    """As the 0.6B release: the head is in the file, and the config says that it is the embedding."""
    made = make(tmp_path / "hf", tie_word_embeddings=True)
    state = read(made.path)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, made.path / "model.safetensors", metadata={"format": "pt"})
    with open_checkpoint(made.path) as opened:
        assert opened.tied
    convert.convert_checkpoint(made.path, tmp_path / "scratch", to="scratch")
    found = read(tmp_path / "scratch")
    assert torch.equal(found["out_head.weight"], found["tok_emb.weight"])
    convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    with open_checkpoint(tmp_path / "m.gguf") as opened:
        assert "output.weight" not in opened.tensors and opened.tied


@pytest.mark.parametrize("layout", ["scratch", "gguf"])
def test_wrong_tables_are_caught(made, tmp_path, layout):
    with open_checkpoint(made.path) as opened:
        swaps = faults.pairs("qwen3", opened.config, layout)
        wrong = {f"{a} {b}": faults.exchanged("qwen3", layout, a, b) for a, b in swaps}
        wrong["rope"] = faults.flipped("qwen3", layout, "rope")
        assert len(wrong) == 6
        for number, (fault, table) in enumerate(wrong.items()):
            out = tmp_path / (f"{number}.gguf" if layout == "gguf" else str(number))
            request = Request(layout, tokenizer=False)
            request.gguf.type = "f32"
            run(make_plan(opened, request, table=table), out)
            assert convert.verify(made.path, out, device="cpu", n_tokens=48).verdict == "fail", fault


def test_a_folder_of_the_book_that_says_nothing_of_its_family(made, tmp_path):
    convert.convert_checkpoint(made.path, tmp_path / "s", to="scratch", format="pth")
    (tmp_path / "s" / "conversion.json").unlink()
    path = tmp_path / "s" / "scratch_config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in said.items() if k not in ("family", "layout", "class")}))
    with open_checkpoint(tmp_path / "s") as opened:
        assert (opened.family, opened.layout) == ("qwen3", "scratch")
    assert convert.verify(made.path, tmp_path / "s", device="cpu").verdict == "pass"


@pytest.mark.parametrize(
    ("target", "changes", "why"),
    [
        ("scratch", {"attention_bias": True}, "bias=False"),
        ("scratch", {"rms_norm_eps": 1e-5}, "eps 1e-6 hard-wired"),
        ("scratch", CASES["linear scaling"], "no RoPE scaling"),
        ("scratch", CASES["sliding and full mixed"], "no sliding window"),
        ("scratch", {"hidden_act": "gelu"}, "SiLU hard-wired"),
        ("gguf", {"hidden_act": "gelu"}, "SiLU hard-wired"),
        ("gguf", {"attention_bias": True}, "bias of the output projection"),
        ("gguf", CASES["sliding and full mixed"], "no sliding window"),
        ("meta", {}, "no meta layout"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(tmp_path, target, changes, why):
    made = make(tmp_path / "hf", **changes)
    out = tmp_path / ("out.gguf" if target == "gguf" else "out")
    with pytest.raises(ConvertError, match=why):
        convert.convert_checkpoint(made.path, out, to=target, tokenizer=False)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    "changes", [{"attention_bias": True}, {"rms_norm_eps": 1e-5}, CASES["linear scaling"], CASES["yarn"]]
)
def test_our_own_class_holds_more_than_the_books(tmp_path, changes):
    made = make(tmp_path / "hf", **changes)
    convert.convert_checkpoint(made.path, tmp_path / "s", to="scratch", allow_reference=True)
    (tmp_path / "s" / "conversion.json").unlink()
    assert convert.verify(made.path, tmp_path / "s", device="cpu").verdict == "pass"
    convert.convert_checkpoint(tmp_path / "s", tmp_path / "back", to="hf")
    same(read(tmp_path / "back"), read(made.path))


# ---- real programs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["qwen3", "kv_cache.qwen3", "kv_cache_batched.qwen3"])
@torch.no_grad()
def test_the_books_real_classes(made, tmp_path, module):
    book = pytest.importorskip(f"llms_from_scratch.{module}")
    convert.convert_checkpoint(made.path, tmp_path / "s", to="scratch")
    cfg = convert.load_scratch_config(tmp_path / "s")
    model = book.Qwen3Model(cfg)
    model.load_state_dict(read(tmp_path / "s"), strict=True)
    ids = prompt(SMALL["vocab_size"])
    assert off(_run(model, ids), made.logits) < TOLERANCE
    other = book.Qwen3Model(cfg)
    report = convert.load_into(other, made.path)
    assert not report.missing_keys and torch.equal(_run(other, ids), _run(model, ids))
    convert.save_model(other, tmp_path / "back", layout="hf")
    same(read(tmp_path / "back"), read(made.path))
    model.trf_blocks[0].att.q_norm.scale.data, model.trf_blocks[0].att.k_norm.scale.data = (
        model.trf_blocks[0].att.k_norm.scale.data,
        model.trf_blocks[0].att.q_norm.scale.data,
    )
    assert off(_run(model, ids), made.logits) > 100 * TOLERANCE


def _run(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids)


@pytest.mark.parametrize("case", ["plain", "tied", "heads 8/2, narrow", "linear scaling", "yarn"])
def test_real_llama_cpp(tmp_path, case):
    pytest.importorskip("xllamacpp")
    from convert.engines.llama_cpp import logprobs

    made = make(tmp_path / "hf", **CASES[case])
    convert.convert_checkpoint(made.path, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False)
    ids = prompt(SMALL["vocab_size"])[0].tolist()
    lengths = (1, 7, 40, 160)
    found = logprobs(tmp_path / "m.gguf", [ids[:n] for n in lengths], threads=1)
    wanted = made.logits[0].double().log_softmax(-1)[[n - 1 for n in lengths]].numpy()
    assert np.abs(found - wanted).max() < 2e-4
    assert np.abs(found - np.roll(wanted, 1, axis=0)).max() > 0.05
    with open_checkpoint(tmp_path / "m.gguf") as opened:
        keys = opened.metadata
    assert keys["general.architecture"] == "qwen3" and keys["qwen3.attention.key_length"] == made.model.config.head_dim


def test_expanding_needs_no_more_than_a_config():
    table = load_table("qwen3")
    with pytest.raises(ConvertError, match="hidden_size"):
        expand(table, Dims(table, {k: v for k, v in SMALL.items() if k != "hidden_size"}), "hf")


if __name__ == "__main__":
    golden.write("qwen3", SMALL)
