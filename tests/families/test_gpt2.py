"""GPT-2: keys, configs, reference, every pair of layouts, the book's real classes, OpenAI's checkpoint, llama.cpp."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert import config as configs
from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError, TableError, UsageError
from convert.names import for_class
from convert.reference.layers import KVCache
from convert.reference.loading import load_reference
from convert.table import build, load_table, read_table
from tests.families import faults, golden
from tests.families.mixed import Tiny, at_places, converted, llama_cpp, off, prompt, reference, run_reference, tiny
from tests.reference.models import one_thread  # noqa: F401

transformers = pytest.importorskip("transformers")

DATA = Path(__file__).parents[1] / "data"
OPENAI = DATA / "openai"
KEYS = json.loads((DATA / "gpt2_keys.json").read_text(encoding="utf-8"))
SMALL = {
    "vocab_size": 96,
    "max_position_embeddings": 192,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "qkv_bias": True,
}
HF = {"vocab_size": 96, "n_positions": 192, "n_embd": 48, "n_layer": 3, "n_head": 8}
TOLERANCE = 1e-4
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a head of its own": {"tie_word_embeddings": False},
    "another width inside": {"n_inner": 80},
    "another eps": {"layer_norm_epsilon": 1e-3},
    "exact gelu": {"activation_function": "gelu"},
    "scores scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
    "scores not scaled": {"scale_attn_weights": False},
}


def make(path: Path, *, seed: int = 0, **changes: Any) -> Tiny:
    config = transformers.GPT2Config(**{**HF, "bos_token_id": 0, "eos_token_id": 0, **changes})
    model = transformers.GPT2LMHeadModel(config)
    tiny(path, model, seed=seed)
    with torch.no_grad():  # `tiny` fills what is called a norm evenly; here they are called ln_1, ln_2 and ln_f
        rng = np.random.default_rng(seed + 1)
        for name, value in model.named_parameters():
            if ".ln_" in name and name.endswith("weight"):
                value.copy_(torch.from_numpy(rng.uniform(0.5, 1.5, value.shape).astype(np.float32)))
    model.save_pretrained(path)
    return Tiny(path, model, {k: v.detach().clone() for k, v in model.state_dict().items()})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make(tmp_path_factory.mktemp("made") / "hf")


def read(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    assert not [k for k in wanted if found[k].dtype != wanted[k].dtype or not torch.equal(found[k], wanted[k])]


# ---- names and numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KEYS)
def test_the_very_keys_and_shapes_that_the_classes_have(name):
    layout, case, table = name.split("/")[0], KEYS[name], load_table("gpt2")
    hub = configs.to_hub(table, layout, case["config"])
    wanted = {k: v for k, v in case["keys"].items() if not k.endswith(".mask")}
    named = for_class(table, "GPTModelFast") if "fast" in name else table
    assert named is not table or "fast" not in name

    def shapes(config: dict[str, Any]) -> dict[str, list[int]]:
        from convert.layout import Dims, expand

        return {n: list(s.shape) for n, s in expand(named, Dims(named, config), layout).items()}

    assert shapes(hub) == wanted
    assert shapes(hub | {"max_position_embeddings": 7}) != wanted
    assert shapes(hub | {"num_hidden_layers": 1}) != wanted


@pytest.mark.parametrize("layout", ["hf", "scratch", "gguf"])
def test_golden(layout):
    assert golden.same("gpt2", layout, SMALL), "if this is meant, run python -m tests.families.test_gpt2"


@pytest.mark.parametrize(
    ("size", "tensors", "stored", "distinct"),
    [  # tensors without the masks; parameters as the releases and the book count them
        ("gpt2-124m", 197, 163_037_184, 124_439_808),
        ("gpt2-355m", 389, 406_286_336, 354_823_168),
        ("gpt2-774m", 581, 838_359_040, 774_030_080),
        ("gpt2-1558m", 773, 1_638_022_400, 1_557_611_200),
    ],
)
def test_published_sizes(size, tensors, stored, distinct):
    table = load_table("gpt2")
    hub = configs.published(table, size)
    found = golden.shapes("gpt2", "scratch", hub)
    assert (len(found), sum(int(np.prod(s)) for s in found.values())) == (tensors, stored)
    assert sum(int(np.prod(s)) for s in golden.shapes("gpt2", "openai", hub).values()) == distinct
    assert stored - hub["vocab_size"] * hub["hidden_size"] == distinct


def test_every_spelling_of_a_config_means_the_same(made, tmp_path):
    table = load_table("gpt2")
    new = json.loads((made.path / "config.json").read_text())
    hub = configs.to_hub(table, "hf", new)
    book = configs.to_scratch(table, hub, "F32")
    said = {k: v for k, v in book.items() if k not in ("family", "layout", "class")}
    assert said == {
        **{"vocab_size": 96, "context_length": 192, "emb_dim": 48, "n_heads": 8, "n_layers": 3},
        **{"drop_rate": 0.1, "qkv_bias": True, "dtype": "float32"},
    }
    openai = {"n_vocab": 96, "n_ctx": 192, "n_embd": 48, "n_head": 8, "n_layer": 3}
    with open_checkpoint(converted(made.path, tmp_path, "gguf")) as opened:
        keys = dict(opened.metadata)
    assert not [k for k in keys if "rope" in k]
    for layout, raw in (("scratch", said), ("openai", openai), ("gguf", keys)):
        other = configs.to_hub(table, layout, raw)
        for key in ("max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            assert other[key] == hub[key], (layout, key)
        assert other["layer_norm_epsilon"] == pytest.approx(1e-5) and "rope_parameters" not in other
    back = configs.to_hf(table, configs.to_hub(table, "openai", openai) | {"vocab_size": 96}, "F32")
    assert {k: back[k] for k in HF} == HF
    assert not {"hidden_size", "head_dim", "qkv_bias", "rope_theta", "rope_parameters"} & set(back)


def test_the_row_of_convert_families():
    from convert.listing import family, family_lines

    said = dict(family_lines(family(load_table("gpt2"))))
    assert said["layouts"] == "hf, scratch, gguf, openai" and said["book classes"] == "GPTModel, GPTModelFast"
    assert "gpt2-1558m" in said["sizes"] and said["GGUF arch"] == "gpt2"


# ---- the reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers(tmp_path, case):
    made = make(tmp_path / "hf", **CASES[case])
    wanted, ids = made.logits, prompt(HF["vocab_size"])
    model = reference(made.path)
    assert off(model(ids), wanted) < TOLERANCE
    exact = made.model.double()(ids).logits
    assert off(model(ids), exact) <= 4 * max(off(wanted, exact), 2e-6)
    for control in model.controls:
        with control.apply(model):
            assert off(model(ids), wanted) > 100 * TOLERANCE, control.name
    assert off(model(ids), wanted) < TOLERANCE
    table, state = load_table("gpt2"), dict(model.state_dict())
    with open_checkpoint(made.path) as opened:
        swaps = faults.pairs("gpt2", opened.config, "scratch")
    assert len(swaps) >= 20
    for one, other in swaps:
        if "top.output" in (one, other):
            continue
        a, b = (
            (table.prefix["scratch"] if "block" in row else "").replace("{l}", "0") + table.rows[row].names["scratch"]
            for row in (one, other)
        )
        model.load_state_dict(state | {a: state[b], b: state[a]}, strict=True)
        assert off(model(ids), wanted) > 100 * TOLERANCE, (one, other)
    model.load_state_dict(state)
    cache = KVCache(model.n_layers)
    parts = [model(ids[:, a:b], cache) for a, b in ((0, 70), (70, 71), (71, 130), (130, 160))]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=1e-5, atol=5e-5)


@torch.no_grad()
def test_more_tokens_than_positions(made):
    with pytest.raises(ConvertError, match="192 positions, too few for 193"):
        reference(made.path)(torch.zeros(1, 193, dtype=torch.long))


# ---- there and back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "a head of its own"])
@pytest.mark.parametrize("book_class", ["GPTModel", "GPTModelFast"])
def test_there_and_back(tmp_path, case, book_class):
    made = make(tmp_path / "hf", **CASES[case])
    stored = read(made.path)
    assert ("lm_head.weight" in stored) == (case != "plain")
    scratch = converted(made.path, tmp_path, "scratch", book_class=book_class, buffers=True)
    same(read(converted(scratch, tmp_path / "a", "hf")), stored)
    same(read(converted(converted(scratch, tmp_path / "b", "gguf"), tmp_path / "b", "hf")), stored)
    assert convert.verify(made.path, scratch, device="cpu").verdict == "pass"
    for kept in ("conversion.json", "scratch_config.json"):  # names alone tell which class it is
        if kept == "scratch_config.json":
            said = json.loads((scratch / kept).read_text())
            assert said["class"] == book_class
            said = {k: v for k, v in said.items() if k not in ("family", "layout", "class", "dtype")}
            (scratch / kept).write_text(json.dumps(said))
        else:
            (scratch / kept).unlink()
    with open_checkpoint(scratch) as opened:
        assert (opened.family, opened.layout, opened.table.book_class) == (
            "gpt2",
            "scratch",
            None if book_class == "GPTModel" else book_class,
        )
    same(read(converted(scratch, tmp_path / "c", "hf")), stored)
    # and from the one class to the other
    other = converted(scratch, tmp_path / "d", "scratch", book_class={"GPTModel": "GPTModelFast"}.get(book_class))
    same(read(converted(other, tmp_path / "e", "hf")), stored)


def test_through_gguf(made, tmp_path):
    file = converted(made.path, tmp_path, "gguf")
    back = converted(file, tmp_path, "hf")
    same(read(back), read(made.path))
    was, now = (json.loads((p / "config.json").read_text()) for p in (made.path, back))
    assert {k: now.get(k) for k in was if k != "n_inner"} == {k: v for k, v in was.items() if k != "n_inner"}
    assert now["n_inner"] == 4 * now["n_embd"]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(back, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        assert off(model(prompt(96)).logits, made.logits) == 0.0
    assert convert.verify(made.path, file, device="cpu").verdict == "pass"


@pytest.mark.parametrize("layout", ["scratch", "gguf"])
def test_wrong_tables_are_caught(made, tmp_path, layout):
    with open_checkpoint(made.path) as opened:
        swaps = [p for p in faults.pairs("gpt2", opened.config, layout) if "top.output" not in p]
    wrong = {f"{a} {b}": faults.exchanged("gpt2", layout, a, b) for a, b in swaps[:: 1 + len(swaps) // 12]}
    assert len(wrong) > 5
    for number, (fault, table) in enumerate(wrong.items()):
        out = converted(made.path, tmp_path / str(number), layout, table=table)
        assert convert.verify(made.path, out, device="cpu", n_tokens=48).verdict == "fail", fault


@pytest.mark.parametrize("order", [[1, 0, 2], [2, 1, 0], [0, 2, 1]])
def test_another_order_of_q_k_and_v_is_caught(made, tmp_path, order):
    raw = json.loads(json.dumps(load_table("gpt2").raw))
    for fused in raw["fused"]:
        if fused["layout"] == "gguf":
            fused["parts"] = [fused["parts"][i] for i in order]
    out = converted(made.path, tmp_path, "gguf", table=build(raw, "wrong.toml"))
    result = convert.verify(made.path, out, device="cpu")
    assert result.verdict == "fail"
    assert any("rows of Q and K exchanged" in hint for hint in result.hints) == (order == [1, 0, 2])


def test_a_matrix_that_is_not_turned_is_seen(made, tmp_path):
    """The shape tells it for all but the square ones; a layout whose convention is wrong stops there."""
    with pytest.raises(ConvertError, match=r"c_fc\.weight"), open_checkpoint(made.path) as opened:
        wrong = faults.flipped("gpt2", "hf", "linear")
        opened.table = wrong
        if opened.match.problems:
            raise ConvertError(opened.match.problems)
    out = converted(made.path, tmp_path, "scratch")
    state = read(out)
    for layer in range(3):
        name = f"trf_blocks.{layer}.att.out_proj.weight"
        state[name] = state[name].T.contiguous()
    save_file(state, out / "model.safetensors")
    result = convert.verify(made.path, out, device="cpu")
    assert result.verdict == "fail" and any("output matrix turned" in hint for hint in result.hints)


# ---- what files are like ---------------------------------------------------------------------------------------


def test_the_hubs_files_have_no_prefix_and_hold_masks(made, tmp_path):
    folder = tmp_path / "hub"
    shutil.copytree(made.path, folder)
    state = {k.removeprefix("transformer."): v for k, v in read(made.path).items()}
    for layer in range(3):
        state[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(1, 1, 192, 192))
        state[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(state, folder / "model.safetensors")
    with open_checkpoint(folder) as opened:
        assert not opened.match.problems and len(opened.match.ignored) == 6
        assert any("'h.' where 'transformer.h.'" in note for note in opened.notes)
    same(read(converted(folder, tmp_path, "hf")), read(made.path))


def test_a_model_of_the_books_training_config(tmp_path):
    """256 positions and no biases of q, k and v; Hugging Face and llama.cpp cannot be without, and get zeros."""
    ch04 = pytest.importorskip("llms_from_scratch.ch04")
    cfg = {"vocab_size": 96, "context_length": 256, "emb_dim": 48, "n_heads": 8, "n_layers": 2}
    cfg |= {"drop_rate": 0.1, "qkv_bias": False}
    torch.manual_seed(0)
    model = ch04.GPTModel(cfg).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.uniform_(0.5, 1.5) if name.endswith("scale") else value.normal_(0, 0.2)
    path = tmp_path / "model.pth"
    torch.save({"model_state_dict": model.state_dict(), "optimizer_state_dict": {}}, path)
    options = {"config": cfg}
    with open_checkpoint(path, **options) as opened:
        assert (opened.family, opened.config["qkv_bias"], opened.tied) == ("gpt2", False, False)
    convert.convert_checkpoint(path, tmp_path / "hf", to="hf", tokenizer=False, **options)
    convert.convert_checkpoint(path, tmp_path / "m.gguf", to="gguf", type="f32", tokenizer=False, **options)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert hf.config.n_positions == 256 and hf.config.tie_word_embeddings is False
    assert not hf.state_dict()["transformer.h.1.attn.c_attn.bias"].any()
    ids = prompt(96)
    with torch.no_grad():
        wanted = model(ids)
        assert off(hf(ids).logits, wanted) < TOLERANCE
        assert off(run_reference(tmp_path / "m.gguf", 96), wanted) < TOLERANCE
    convert.convert_checkpoint(tmp_path / "hf", tmp_path / "back", to="scratch", tokenizer=False)
    back = read(tmp_path / "back")
    assert {k for k, v in back.items() if k.endswith(("query.bias", "key.bias", "value.bias")) and not v.any()}
    for name, value in model.state_dict().items():
        assert name.endswith("mask") or torch.equal(back[name], value), name


@pytest.mark.parametrize("biases", [False, True])
def test_a_published_size_fills_what_no_config_says(tmp_path, biases):
    """A bare ``.pth`` of the book: biases follow from its tensors; positions can be stated."""
    table = load_table("gpt2")
    hub = configs.published(table, "gpt2-124m") | {"qkv_bias": biases, "max_position_embeddings": 256}
    layers = golden.shapes("gpt2", "scratch", hub)
    torch.save({k: torch.zeros(1).expand(v) for k, v in layers.items()}, tmp_path / "gpt2-small.pth")
    with open_checkpoint(tmp_path / "gpt2-small.pth", size="gpt2-124M", context=256) as opened:
        assert opened.config["qkv_bias"] is biases and not opened.match.problems
    with open_checkpoint(tmp_path / "gpt2-small.pth", size="gpt2-124m") as opened:
        (problem,) = opened.match.problems
        assert problem.tensor == "pos_emb.weight" and "max_position_embeddings = 256" in str(problem.hint)


def test_heads_that_have_diverged(made, tmp_path):
    scratch = converted(made.path, tmp_path, "scratch")
    state = read(scratch)
    assert torch.equal(state["out_head.weight"], state["tok_emb.weight"])
    state["out_head.weight"] = state["out_head.weight"] + 0.5
    save_file(state, scratch / "model.safetensors")
    back = converted(scratch, tmp_path, "hf")
    assert json.loads((back / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(read(back)["lm_head.weight"], state["out_head.weight"])
    file = converted(scratch, tmp_path, "gguf")
    with open_checkpoint(file) as opened:
        assert "output.weight" in opened.tensors and not opened.tied


@pytest.mark.parametrize(
    ("target", "case", "why"),
    [
        ("scratch", "another width inside", r"feed-forward layer of 4 \* emb_dim"),
        ("scratch", "another eps", "eps 1e-5 hard-wired"),
        ("scratch", "exact gelu", "GELU by tanh"),
        ("gguf", "exact gelu", "GELU by tanh"),
        ("gguf", "scores scaled by layer", "root of head_dim"),
        ("gguf", "scores not scaled", "root of head_dim"),
        ("scratch", "scores not scaled", "root of head_dim"),
        ("meta", "plain", "no meta layout"),
        ("openai", "plain", "is read and never written"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(tmp_path, target, case, why):
    made = make(tmp_path / "hf", **CASES[case])
    with pytest.raises(ConvertError, match=why):
        converted(made.path, tmp_path, target)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("case", ["another width inside", "another eps"])
def test_our_own_class_holds_more_than_the_books(tmp_path, case):
    made = make(tmp_path / "hf", **CASES[case])
    out = converted(made.path, tmp_path, "scratch", allow_reference=True)
    (out / "conversion.json").unlink()
    assert convert.verify(made.path, out, device="cpu").verdict == "pass"
    same(read(converted(out, tmp_path, "hf")), read(made.path))


# ---- the book's real classes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name", "options"),
    [
        ("ch04", "GPTModel", {"buffers": True}),
        ("ch04", "GPTModelFast", {"book_class": "GPTModelFast"}),
        ("ch04", "GPTModelFast", {"book_class": "GPTModelFast", "buffers": True}),
        ("kv_cache.gpt2", "GPTModel", {}),
    ],
)
@torch.no_grad()
def test_the_books_real_classes(made, tmp_path, module, name, options):
    book = pytest.importorskip(f"llms_from_scratch.{module}")
    out = converted(made.path, tmp_path, "scratch", **options)
    cfg = convert.load_scratch_config(out)
    model = getattr(book, name)(cfg).eval()
    masks = {k: v.clone() for k, v in model.state_dict().items() if k.endswith("mask")}
    model.load_state_dict(read(out), strict=True)
    same({k: v for k, v in model.state_dict().items() if k.endswith("mask")}, masks)
    ids = prompt(96)
    assert off(model(ids), made.logits) < TOLERANCE
    other = getattr(book, name)(cfg).eval()
    report = convert.load_into(other, made.path)
    assert not report.missing_keys and torch.equal(other(ids), model(ids))
    convert.save_model(other, tmp_path / "back", layout="hf", config=cfg)
    same(read(tmp_path / "back"), read(made.path))
    bias = next(p for n, p in model.named_parameters() if n.endswith(("norm1.shift", "norm1.bias")))
    bias.add_(0.5)
    assert off(model(ids), made.logits) > 100 * TOLERANCE


def test_without_its_masks_the_first_class_does_not_load(made, tmp_path):
    ch04 = pytest.importorskip("llms_from_scratch.ch04")
    out = converted(made.path, tmp_path, "scratch")
    with pytest.raises(RuntimeError, match=r"att\.mask"):
        ch04.GPTModel(convert.load_scratch_config(out)).load_state_dict(read(out), strict=True)


def test_on_the_command_line(made, tmp_path):
    from convert.cli import cli, run

    def call(*words: Any) -> int:
        return run(cli, [str(word) for word in (*words, "--no-tokenizer", "--json")])

    assert call("hf-to-scratch", made.path, tmp_path / "m", "--buffers") == 0
    assert sum(name.endswith(".mask") for name in read(tmp_path / "m")) == 3
    assert call("hf-to-scratch", made.path, tmp_path / "f", "--class", "GPTModelFast") == 0
    assert "trf_blocks.0.att.qkv.weight" in read(tmp_path / "f")
    for target in ("hf", "scratch", "gguf"):
        out = tmp_path / ("o.gguf" if target == "gguf" else f"o_{target}")
        assert call(f"openai-to-{target}", OPENAI, out) == 0 and out.exists()
    assert call("openai-to-hf", made.path, tmp_path / "x") == 2
    assert call("hf-to-scratch", OPENAI, tmp_path / "x") == 2


def test_no_such_class(made, tmp_path):
    with pytest.raises(UsageError, match="GPTModel, GPTModelFast"):
        converted(made.path, tmp_path, "scratch", book_class="GPTModelSlow")


# ---- OpenAI's checkpoint ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["", "model.ckpt", "model.ckpt.index", "model.ckpt.data-00000-of-00001"])
def test_openais_checkpoint_by_any_of_its_names(given):
    with open_checkpoint(OPENAI / given) as opened:
        assert (opened.family, opened.layout, opened.format) == ("gpt2", "openai", "tensorflow")
        assert not opened.match.problems and opened.tied and opened.config["num_attention_heads"] == 2


def test_openais_checkpoint_to_everything(tmp_path):
    expected = {k.replace("|", "/"): v for k, v in np.load(OPENAI / "expected.npz").items()}
    hf = converted(OPENAI, tmp_path, "hf")
    model, info = transformers.GPT2LMHeadModel.from_pretrained(hf, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    state = model.transformer.state_dict()
    for name, value in expected.items():
        *parts, last = name.removeprefix("model/").split("/")
        parts = [f"h.{part[1:]}" if part in ("h0", "h1") else part for part in parts]
        path = ".".join([*parts, {"g": "weight", "w": "weight", "b": "bias"}.get(last, f"{last}.weight")])
        assert np.array_equal(state[path].numpy(), value.reshape(state[path].shape)), name
    ids = prompt(64, 24)
    with torch.no_grad():
        wanted = model(ids).logits
        for layout in ("scratch", "gguf"):
            out = converted(OPENAI, tmp_path, layout)
            assert off(reference(out)(ids), wanted) < TOLERANCE
        with open_checkpoint(OPENAI) as opened:
            found: Any = load_reference(opened)
        assert off(found(ids), wanted) < TOLERANCE
        assert off(found(ids.flip(1)), wanted) > 100 * TOLERANCE


def test_openais_tokenizer_goes_along(tmp_path):
    """``encoder.json`` and ``vocab.bpe`` are what Hugging Face calls ``vocab.json`` and ``merges.txt``."""
    source = tmp_path / "openai"
    shutil.copytree(OPENAI, source)
    letters = [chr(code) for code in range(ord("!"), ord("!") + 61)]
    vocab = {c: i for i, c in enumerate(letters)} | {letters[0] + letters[1]: 61, letters[2] + letters[3]: 62}
    (source / "encoder.json").write_text(json.dumps(vocab | {"<|endoftext|>": 63}))
    merges = f"#version: 0.2\n{letters[0]} {letters[1]}\n{letters[2]} {letters[3]}\n"
    (source / "vocab.bpe").write_text(merges, encoding="utf-8")
    convert.convert_checkpoint(source, tmp_path / "hf", to="hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.encode('!"#$!') == [61, 62, 0] and len(tokenizer) == 64
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (63, 63)
    convert.convert_checkpoint(source, tmp_path / "m.gguf", to="gguf", type="f32")
    with open_checkpoint(tmp_path / "m.gguf") as opened:
        keys = {key.removeprefix("tokenizer.ggml."): value for key, value in opened.metadata.items()}
    assert (keys["model"], keys["pre"], keys["eos_token_id"]) == ("gpt2", "gpt-2", 63)
    assert keys["tokens"][61:] == ['!"', "#$", "<|endoftext|>"] and keys["merges"] == ['! "', "# $"]


def test_openais_checkpoint_into_the_books_class():
    ch04 = pytest.importorskip("llms_from_scratch.ch04")
    cfg = {"vocab_size": 64, "context_length": 24, "emb_dim": 8, "n_heads": 2, "n_layers": 2}
    ids, wanted = prompt(64, 24), reference(OPENAI)(prompt(64, 24))
    for name in ("GPTModel", "GPTModelFast"):
        model = getattr(ch04, name)(cfg | {"drop_rate": 0.1, "qkv_bias": True}).eval()
        with torch.no_grad():
            assert off(model(ids), wanted) > 100 * TOLERANCE
            assert not convert.load_into(model, OPENAI).missing_keys
            assert off(model(ids), wanted) < TOLERANCE


def test_what_is_wrong_with_openais_checkpoint_is_said_once_for_all_layers(tmp_path):
    shutil.copytree(OPENAI, tmp_path / "o")
    hparams = json.loads((OPENAI / "hparams.json").read_text())
    (tmp_path / "o" / "hparams.json").write_text(json.dumps(hparams | {"n_layer": 1}))
    with pytest.raises(ConvertError) as error:
        convert.convert_checkpoint(tmp_path / "o", tmp_path / "out", to="hf", tokenizer=False)
    assert len(error.value.problems) == 12 and "'model/h1/attn/c_attn/w'" in str(error.value)
    (tmp_path / "o" / "hparams.json").write_text(json.dumps(hparams | {"n_layer": 4}))
    with pytest.raises(ConvertError, match=r"'model/h\{2-3\}/attn/c_attn/w' is missing") as error:
        convert.convert_checkpoint(tmp_path / "o", tmp_path / "out", to="hf", tokenizer=False)
    assert len(error.value.problems) == 12


# ---- llama.cpp -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "a head of its own", "another width inside", "another eps"])
def test_real_llama_cpp(tmp_path, case):
    pytest.importorskip("xllamacpp")
    made = make(tmp_path / "hf", **CASES[case])
    file = converted(made.path, tmp_path, "gguf")
    found, wanted = llama_cpp(file, 96), at_places(made.logits)
    assert off(found, wanted) < 5e-3  # ggml's GELU is a table in float16
    assert off(found, wanted.roll(1, 0)) > 0.5
    with open_checkpoint(file) as opened:
        keys, tensors = opened.metadata, opened.tensors
    assert keys["gpt2.context_length"] == 192 == tensors["position_embd.weight"][0].shape[0]
    assert tensors["position_embd.weight"][0].dtype == "F32" and "blk.0.attn_qkv.bias" in tensors


# ---- the table -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('buffers = ["causal_mask"]', 'buffers = ["mask"]', r"classes\.GPTModel.*'mask'"),
        ("[buffers.causal_mask]", "[buffers.other]", "other|causal_mask"),
        ('zeros   = ["hf", "gguf", "openai"]', 'zeros   = ["hf", "meta"]', "'meta' is no layout of this family"),
        ('attn.norm      = "norm1.weight"', "", r"block\.attn\.norm has no name"),
        ('attn.norm      = "norm1.weight"', 'attn.nrm      = "norm1.weight"', r"block\.attn\.nrm"),
    ],
)
def test_mistakes_in_a_table_are_named(tmp_path, old, new, message):
    from convert.names import class_tables
    from convert.resources import mappings_dir

    text = (mappings_dir() / "gpt2.toml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(TableError, match=message):
        class_tables(read_table(path))


if __name__ == "__main__":
    golden.write("gpt2", SMALL)
    (golden.FOLDER / "gpt2.openai.txt").unlink()  # real files tell its names
